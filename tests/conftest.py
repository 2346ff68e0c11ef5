"""What every test gets: the shared helpers on the path, and property tests that draw the same examples in every run.

Token caches go to a temporary folder, never to the user's own; all workers and the processes they start share it.
"""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
from pathlib import Path

from hypothesis import settings

sys.path.insert(0, str(Path(__file__).parent))

settings.register_profile("repeatable", derandomize=True, database=None, deadline=None, max_examples=40)
settings.load_profile("repeatable")

CACHE = "MUTRANSFORMER_CACHE"
IS_MASTER = "PYTEST_XDIST_WORKER" not in os.environ
if IS_MASTER:  # before anything reads it; workers of pytest-xdist inherit it
    os.environ[CACHE] = tempfile.mkdtemp(prefix="mutransformer-")


def pytest_unconfigure() -> None:
    if IS_MASTER:
        shutil.rmtree(os.environ[CACHE], ignore_errors=True)
