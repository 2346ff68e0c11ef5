"""A cache on Google Cloud Storage: the real gcsfs against a server on loopback."""

from __future__ import annotations

import shutil
from collections import namedtuple
from pathlib import Path

import fsspec
import pytest
from gcs_server import file_system, gcs_server

from mutransformer.data import cache as cache_file
from mutransformer.data.datamodule import TextDataModule
from mutransformer.data.listing import describe_caches
from mutransformer.data.storage import Folder, Lock
from mutransformer.errors import ConfigError, DataError, SaveError

# gcsfs hands aiohttp bytes, not a stream
pytestmark = pytest.mark.filterwarnings("ignore:Sending a large body:ResourceWarning")


@pytest.fixture(scope="module")
def server():
    with gcs_server():
        yield


@pytest.fixture
def remote(server, request, monkeypatch, tmp_path) -> str:
    monkeypatch.setenv("MUTRANSFORMER_CACHE", str(tmp_path / "local"))
    monkeypatch.setattr("mutransformer.data.writer.SHARD_TOKENS", 500)
    monkeypatch.setattr("mutransformer.data.reader.DOCUMENTS_PER_BATCH", 4)
    monkeypatch.setattr(cache_file, "POLL_S", 0.05)
    return f"gs://bucket/{request.node.name}"


@pytest.fixture
def make_data(books, remote):
    def make(cache=remote, **changed) -> TextDataModule:
        options = {"dataset": "text", "data_files": f"{books}/**/*.txt", "validation_fraction": 0.3}
        return TextDataModule(cache=str(cache), sequence_len=64, tokens_per_batch=192, **{**options, **changed})

    return make


def content_of(folder) -> dict[str, bytes]:
    root = Path(str(folder))
    return {path.relative_to(root).as_posix(): path.read_bytes() for path in root.rglob("*") if path.is_file()}


def remote_content_of(root: str) -> dict[str, bytes]:
    fs = file_system()
    prefix = root.removeprefix("gs://") + "/"
    return {path.removeprefix(prefix): fs.cat_file(path) for path in fs.find(prefix)}


def test_cache_is_written_there_and_copied_here_once(make_data, remote, tmp_path, capsys):
    data = make_data()
    data.setup("fit")
    assert capsys.readouterr().err.count("copying") == 1
    here = make_data(cache=tmp_path / "directly")
    here.setup("fit")
    assert remote_content_of(remote) == content_of(tmp_path / "directly") == content_of(tmp_path / "local")
    assert data.windows("train").stream.sha256 == here.windows("train").stream.sha256
    make_data().setup("fit")
    assert "copying" not in capsys.readouterr().err


def test_copy_that_was_interrupted_goes_on(make_data, remote, tmp_path, monkeypatch):
    data = make_data()
    data.prepare()
    read, n_left = Folder.read, [4]
    names = []

    def read_some(self, name):
        if name.endswith(".npy"):
            n_left[0] -= 1
            if n_left[0] < 0:
                raise DataError("the network is gone")
            names.append(name)
        return read(self, name)

    monkeypatch.setattr(cache_file, "_COPIES_AT_ONCE", 1)
    monkeypatch.setattr(Folder, "read", read_some)
    with pytest.raises(DataError, match="the network is gone"):
        data.setup("fit")
    assert len(names) == 4
    n_left[0] = 10**6
    data.setup("fit")
    assert len(names) == len(set(names)) == len([name for name in remote_content_of(remote) if name.endswith(".npy")])


def test_interrupted_write_goes_on_there(make_data, remote, tmp_path):
    class Stop(Exception):
        pass

    def stop(n_documents, *progress) -> None:
        if n_documents == 20:
            raise Stop

    (request,) = make_data().requests()
    with pytest.raises(Stop):
        request.ensure(stop)
    assert any(name.endswith("progress.json") for name in remote_content_of(remote))
    make_data().prepare()
    make_data(cache=tmp_path / "directly").prepare()
    assert remote_content_of(remote) == content_of(tmp_path / "directly")


def test_lock_there_is_exclusive(remote):
    first, second = Lock(Folder(f"{remote}/a")), Lock(Folder(f"{remote}/a"))
    assert first.acquire() is None
    owner = second.acquire()
    assert owner is not None and owner["pid"] > 0
    first.release()
    assert second.acquire() is None
    second.release()
    assert remote_content_of(remote) == {}


def test_damaged_shard_is_named(make_data, remote):
    data = make_data()
    data.prepare()
    path, content = next(item for item in remote_content_of(remote).items() if item[0].endswith("train/000001.npy"))
    file_system().pipe_file(f"{remote}/{path}", content[:-2] + b"xx")
    with pytest.raises(DataError, match=r"train/000001.npy is damaged"):
        data.setup("fit")
    lines = []
    with pytest.raises(DataError, match="1 of 1 caches are damaged"):
        for line in describe_caches(data.cache, data.requests(), verify=True):
            lines.append(line)
    assert any("train/000001.npy is damaged" in line for line in lines)


def test_space_is_checked_before_copying(make_data, tmp_path, monkeypatch):
    data = make_data()
    data.prepare()
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage(10**9, 10**9, 1000))
    with pytest.raises(ConfigError, match=r"GiB of it are to be copied to .*set MUTRANSFORMER_CACHE") as caught:
        data.setup("fit")
    assert caught.value.field == "data.cache"
    assert not [name for name in content_of(tmp_path / "local") if name.endswith(".npy")]


def test_bucket_that_does_not_exist_is_refused(make_data):
    with pytest.raises(ConfigError, match="cannot be written to") as caught:
        make_data(cache="gs://no-such-bucket/caches").setup("fit")
    assert caught.value.field == "data.cache"
    assert "\n" not in str(caught.value)


def test_fault_of_the_store_is_one_line(remote, monkeypatch):
    folder = Folder(f"{remote}/a")

    def fail(*args, **kwargs):
        raise RuntimeError("500\nInternal Server Error")

    for method in ("cat_file", "pipe_file", "info", "ls", "rm_file"):
        monkeypatch.setattr(folder._fs, method, fail)
    for call, kind in (
        (lambda: folder.read("x"), DataError),
        (lambda: folder.read_json("x"), DataError),
        (lambda: folder.size("x"), DataError),
        (folder.folders, DataError),
        (lambda: folder.write("x", b""), SaveError),
        (lambda: folder.create("x", b""), ConfigError),
        (lambda: folder.delete("x"), SaveError),
    ):
        with pytest.raises(kind, match="RuntimeError: 500") as caught:
            call()
        assert "\n" not in str(caught.value)


def test_missing_package_is_named(monkeypatch):
    def refuse(*args, **kwargs):
        raise ImportError("Please install gcsfs to access Google Storage")

    monkeypatch.setattr(fsspec.core, "url_to_fs", refuse)
    with pytest.raises(ConfigError, match=r"pip install \"mutransformer\[gcs\]\""):
        TextDataModule(cache="gs://bucket/caches")
