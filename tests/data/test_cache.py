"""From documents to a cache folder and back: what is written, when it is used, what damages and odd texts do."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import signal
import threading
from pathlib import Path

import numpy as np
import pytest

from mutransformer.data import cache as cache_file
from mutransformer.data import storage
from mutransformer.data import writer as writer_file
from mutransformer.data.cache import CacheRequest, damages
from mutransformer.data.datamodule import TextDataModule
from mutransformer.data.listing import MATCH, describe_caches
from mutransformer.data.manifest import MANIFEST, PROGRESS, Manifest
from mutransformer.data.source import TextSource
from mutransformer.data.storage import Folder, Lock
from mutransformer.data.tokenizer import ByteTokenizer
from mutransformer.errors import ConfigError, DataError, Interrupted, SaveError

SEPARATOR = 1


def silent(*progress) -> None:
    pass


def request_for(root, files, dataset="text", tokenizer=None, separator=SEPARATOR, **source):
    options = {"validation_fraction": 0.3, **source}
    (reading,) = TextSource(dataset=dataset, data_files=str(files), **options).readings()
    tokenizer = tokenizer or ByteTokenizer()
    return CacheRequest(
        root=Folder(root),
        reading=reading,
        tokenizer=tokenizer,
        tokenizer_name="bytes",
        separator=separator,
        vocab_size=max(len(tokenizer), separator + 1),
    )


@pytest.fixture(autouse=True)
def small_shards(monkeypatch):
    monkeypatch.setattr(writer_file, "SHARD_TOKENS", 500)


@pytest.fixture
def small_batches(monkeypatch):
    """A batch every four documents, so that a small corpus makes several shards."""
    monkeypatch.setattr("mutransformer.data.reader.DOCUMENTS_PER_BATCH", 4)


def content_of(folder) -> dict[str, bytes]:
    """Path in the folder -> bytes, of all files."""
    root = Path(str(folder))
    return {path.relative_to(root).as_posix(): path.read_bytes() for path in root.rglob("*") if path.is_file()}


def stream_of(folder, manifest, split) -> np.ndarray:
    shards, _ = cache_file.open_shards(folder, manifest, split)
    return np.concatenate(shards)


# What is written


def test_stream_has_a_separator_before_between_and_after_documents(tmp_path):
    for name, text in (("a", "ab"), ("b", ""), ("c", "é")):
        (tmp_path / f"{name}.txt").write_text(text)
    request = request_for(tmp_path / "cache", tmp_path / "*.txt", separator=300, validation_fraction=1e-9)
    # all documents are in train, so validation is empty: written in a split alone it is fine
    request = CacheRequest(**{**vars(request), "reading": single(request.reading)})
    folder, manifest = request.ensure(silent)
    assert stream_of(folder, manifest, "train").tolist() == [300, 100, 101, 300, 0xC3 + 3, 0xA9 + 3, 300]
    assert manifest.total("n_bytes") == 4
    assert manifest.total("n_documents") == 2
    assert manifest.counts == {"n_read": 3, "n_empty": 1}


def single(reading):
    """The same reading with nothing held out."""
    return type(reading)(reading.source, reading.source_split, reading.rest, {})


def test_shards_together_are_the_stream_and_starts_lead_to_documents(books, tmp_path, small_batches):
    folder, manifest = request_for(tmp_path, f"{books}/**/*.txt").ensure(silent)
    texts = set()
    for split in ("train", "validation"):
        assert len(manifest.splits[split]) > 1
        shards, starts = cache_file.open_shards(folder, manifest, split)
        for shard, tokens, begins in zip(manifest.splits[split], shards, starts, strict=True):
            assert (len(tokens), len(begins)) == (shard.n_tokens, shard.n_documents)
            assert (tokens[begins] == SEPARATOR).all()
            ends = [*begins[1:], begins[-1] + 61] if len(begins) else []
            texts |= {bytes((tokens[a + 1 : b] - 3).astype(np.uint8)) for a, b in zip(begins, ends, strict=True)}
        assert stream_of(folder, manifest, split)[-1] == SEPARATOR
    assert texts == {path.read_bytes() for path in books.rglob("*.txt")}


def test_shard_size_does_not_change_the_stream(books, tmp_path, small_batches, monkeypatch):
    streams = []
    for shard_tokens in (100, 700, 10**9):
        root = tmp_path / str(shard_tokens)
        monkeypatch.setattr(writer_file, "SHARD_TOKENS", shard_tokens)
        folder, manifest = request_for(root, f"{books}/**/*.txt").ensure(silent)
        streams.append([stream_of(folder, manifest, split).tolist() for split in ("train", "validation")])
    assert streams[0] == streams[1] == streams[2]
    assert len(manifest.splits["train"]) == 1


def test_tokens_are_as_narrow_as_the_tokenizer_allows(tmp_path):
    (tmp_path / "a.txt").write_text("some text")

    class Wide(ByteTokenizer):
        content_sha256 = "wide"

        def __len__(self) -> int:
            return 2**16 + 1

    for separator, tokenizer, dtype in ((2**16 - 1, None, np.uint16), (2**16, None, np.uint32), (1, Wide(), np.uint32)):
        request = request_for(tmp_path / "cache", tmp_path / "a.txt", separator=separator, tokenizer=tokenizer)
        request = CacheRequest(**{**vars(request), "reading": single(request.reading)})
        folder, manifest = request.ensure(silent)
        stream = stream_of(folder, manifest, "train")
        assert stream.dtype == dtype and stream[0] == separator


# When a cache is used


def test_key_covers_what_changes_the_tokens_and_nothing_else(books, tmp_path, tokenizer_folder, monkeypatch):
    def names(**changed) -> set[str]:
        options = {"dataset": "text", "data_files": f"{books}/**/*.txt", "cache": str(tmp_path), **changed}
        return {
            request.settings(request.reading.reader().state_of_source()).__repr__()
            for request in TextDataModule(**options).requests()
        }

    ours = names()
    for same in (
        {"sequence_len": 32, "tokens_per_batch": 64, "shuffle_seed": 3, "attend_across_documents": False},
        {"vocab_size": 500, "cache": str(tmp_path / "elsewhere")},
        {"data_files": [f"{books}/**/*.txt"]},
    ):
        assert names(**same) == ours
    for other in (
        {"max_documents": 10},
        {"validation_fraction": 0.1},
        {"test_fraction": 0.1},
        {"document_separator": 2},
        {"tokenizer": str(tokenizer_folder)},
        {"data_files": f"{books}/shelf1/*.txt"},
        {"dataset": "json"},
    ):
        assert not names(**other) & ours
    assert names(dataset="json", text_column="body") != names(dataset="json")
    monkeypatch.setattr(cache_file, "FORMAT", 99)
    assert not names() & ours


def test_changed_file_is_tokenized_anew(tmp_path):
    for i in range(9):
        (tmp_path / f"{i}.txt").write_text(f"text {i}")
    request = request_for(tmp_path / "cache", tmp_path / "*.txt")
    first, _ = request.ensure(silent)
    assert request.ensure(silent)[0].path == first.path
    (tmp_path / "3.txt").write_text("another text")
    folder, manifest = request.ensure(silent)
    assert folder.path != first.path
    assert manifest.total("n_bytes") == 8 * 6 + 12


def test_file_that_changes_while_it_is_read_is_noticed(books, tmp_path, small_batches):
    files = tmp_path / "books"
    files.mkdir()
    for i, path in enumerate(sorted(books.rglob("*.txt"))):
        (files / f"{i}.txt").write_bytes(path.read_bytes())

    def change_one(n_documents, *progress) -> None:
        if n_documents == 12:
            (files / "0.txt").write_text("changed")

    request = request_for(tmp_path / "cache", f"{files}/*.txt")
    with pytest.raises(DataError, match="changed while they were read"):
        request.ensure(change_one)
    _, manifest = request.ensure(silent)
    assert manifest.total("n_bytes") == 39 * 60 + 7


def test_cache_serves_a_machine_without_the_files(books, tmp_path, capsys):
    moved = tmp_path / "books"
    moved.mkdir()
    for path in books.rglob("*.txt"):
        (moved / path.name).write_bytes(path.read_bytes())
    request = request_for(tmp_path / "cache", f"{moved}/*.txt")
    made, _ = request.ensure(silent)
    for path in moved.iterdir():
        path.unlink()
    found, _ = request.ensure(silent)
    assert found.path == made.path
    assert "is used: the source is not at hand" in capsys.readouterr().err
    other = request_for(tmp_path / "cache", f"{moved}/*.txt", validation_fraction=0.2)
    with pytest.raises(ConfigError, match="no file has this path") as caught:
        other.ensure(silent)
    assert caught.value.field == "data.data_files"
    (moved / "new.txt").write_text("new")
    (moved / "new2.txt").write_text("new text")
    (moved / "new3.txt").write_text("newer text")
    request.ensure(silent)
    for path in moved.iterdir():
        path.unlink()
    with pytest.raises(DataError, match="several caches"):
        request.ensure(silent)


def test_folder_of_other_settings_is_never_used(books, tmp_path):
    """Not even where somebody gave it the name that another configuration looks for."""
    first = request_for(tmp_path, f"{books}/**/*.txt")
    folder, _ = first.ensure(silent)
    second = request_for(tmp_path, f"{books}/**/*.txt", validation_fraction=0.2)
    wanted = second.settings(second.reading.reader().state_of_source())
    os.rename(folder.path, (Folder(tmp_path) / cache_file.folder_name(wanted)).path)
    with pytest.raises(DataError, match="other settings"):
        second.ensure(silent)


# Interruptions


class Stop(Exception):
    pass


@pytest.fixture
def undisturbed(books, tmp_path, small_batches) -> dict[str, bytes]:
    folder, _ = request_for(tmp_path / "undisturbed", f"{books}/**/*.txt").ensure(silent)
    return content_of(folder)


@pytest.mark.parametrize("stops", [(8,), (24,), (40,), (12, 28), (16, 20, 36)])
def test_interrupted_write_ends_with_the_same_bytes(stops, books, tmp_path, undisturbed):
    request = request_for(tmp_path / "cache", f"{books}/**/*.txt")
    read = []

    def stop_at(n_documents, *progress) -> None:
        read.append(n_documents)
        if stops and n_documents == stops[0]:
            raise Stop

    for stop in stops:
        stops = (stop,)
        with pytest.raises(Stop):
            request.ensure(stop_at)
    stops = ()
    folder, _ = request.ensure(stop_at)
    assert content_of(folder) == undisturbed
    assert read[-1] == 40


def test_nothing_that_was_written_is_written_twice(books, tmp_path, small_batches, undisturbed, monkeypatch):
    request = request_for(tmp_path / "cache", f"{books}/**/*.txt")
    written = []
    write = Folder.write
    monkeypatch.setattr(
        Folder, "write", lambda self, name, content: (written.append(name), write(self, name, content))[1]
    )

    def stop(n_documents, *progress) -> None:
        if n_documents == 20:
            raise Stop

    with pytest.raises(Stop):
        request.ensure(stop)
    request.ensure(silent)
    shards = [name for name in written if name.endswith(".npy")]
    assert sorted(shards) == sorted(set(shards)) == sorted(name for name in undisturbed if name.endswith(".npy"))


def test_signal_says_what_is_kept(books, tmp_path, small_batches):
    def interrupt(n_documents, *progress) -> None:
        if n_documents == 20:
            raise Interrupted(signal.SIGTERM, "stopped")

    with pytest.raises(
        Interrupted, match=r"2 shards with \d+ tokens are kept in .*\nthe same command goes on"
    ) as caught:
        request_for(tmp_path, f"{books}/**/*.txt").ensure(interrupt)
    assert caught.value.signum == signal.SIGTERM


@pytest.mark.parametrize("n_writes", range(1, 14))
def test_full_disk_keeps_what_is_whole(n_writes, books, tmp_path, undisturbed, monkeypatch):
    """The disk is full after so many files; then it has space again."""
    request = request_for(tmp_path / "cache", f"{books}/**/*.txt")
    fsync, left = os.fsync, [n_writes]

    def fsync_until_full(descriptor) -> None:
        left[0] -= 1
        if left[0] < 0:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", fsync_until_full)
    with pytest.raises(SaveError, match=r"(?s)No space left.*the same command goes on") as caught:
        request.ensure(silent)
    assert str(caught.value).count("\n") == 1
    monkeypatch.setattr(os, "fsync", fsync)
    folder, _ = request.ensure(silent)
    assert content_of(folder) == undisturbed


# Two at once


def test_two_writers_make_one_cache(books, tmp_path, small_batches, undisturbed, monkeypatch, capsys):
    monkeypatch.setattr(cache_file, "POLL_S", 0.02)
    n_read, found = [0, 0], [None, None]
    both_started = threading.Barrier(2)

    def write(number: int) -> None:
        def count(*progress) -> None:
            n_read[number] += 1

        request = request_for(tmp_path / "cache", f"{books}/**/*.txt")
        both_started.wait()
        found[number] = request.ensure(count)[0].path

    threads = [threading.Thread(target=write, args=(number,)) for number in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found[0] == found[1] is not None
    assert sorted(n_read) == [0, 10]
    assert content_of(found[0]) == undisturbed
    assert "lock.json" not in content_of(found[0])


def test_waiting_names_the_owner_once(books, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(cache_file, "POLL_S", 0.02)
    request = request_for(tmp_path, f"{books}/**/*.txt")
    settings = request.settings(request.reading.reader().state_of_source())
    folder = request.root / cache_file.folder_name(settings)
    lock = Lock(folder)
    assert lock.acquire() is None
    timer = threading.Timer(0.3, lock.release)
    timer.start()
    request.ensure(silent)
    timer.join()
    said = capsys.readouterr().err.splitlines()
    assert len(said) == 1
    assert f"process {os.getpid()} on " in said[0] and folder.path in said[0]


def test_writer_whose_lock_was_taken_over_waits_for_the_other(books, tmp_path, small_batches, undisturbed, monkeypatch):
    monkeypatch.setattr(cache_file, "POLL_S", 0.02)
    request = request_for(tmp_path / "cache", f"{books}/**/*.txt")
    other: list[Lock] = []

    def lose_lock(n_documents, *progress) -> None:
        if n_documents == 20 and not other:
            folder = next(cache_file.caches(request.root))
            folder.delete("lock.json")
            other.append(Lock(folder))
            assert other[0].acquire() is None
            threading.Timer(0.2, other[0].release).start()

    folder, _ = request.ensure(lose_lock)
    assert other
    assert content_of(folder) == undisturbed


def test_lock_of_a_dead_process_is_taken_over(tmp_path):
    folder = Folder(tmp_path)
    dead = Lock(folder)
    assert dead.acquire() is None
    assert Lock(folder).acquire()["pid"] == os.getpid()  # alive: not taken
    dead._stop.set()
    owner = json.loads((tmp_path / "lock.json").read_text())
    for death in ({"pid": 2**22 + 1}, {"process_started": "1"}):  # the second: its number is another's by now
        (tmp_path / "lock.json").write_text(json.dumps({**owner, **death}))
        lock = Lock(folder)
        assert lock.acquire() is None
        lock.release()
        assert not (tmp_path / "lock.json").exists()
    dead.release()  # another's by now: nothing happens


def test_lock_of_another_machine_is_taken_over_when_its_heart_stands_still(tmp_path, monkeypatch):
    now = [0.0]
    monkeypatch.setattr(storage.time, "monotonic", lambda: now[0])
    owner = {"host": "elsewhere", "pid": 1, "process_started": "1", "since": "", "token": "t"}
    (tmp_path / "lock.json").write_text(json.dumps({**owner, "beat": 1}))
    lock = Lock(Folder(tmp_path))
    assert lock.acquire()["host"] == "elsewhere"
    now[0] = storage.STALE_S - 1
    assert lock.acquire()["host"] == "elsewhere"
    (tmp_path / "lock.json").write_text(json.dumps({**owner, "beat": 2}))
    now[0] = storage.STALE_S + 2
    assert lock.acquire()["host"] == "elsewhere"
    now[0] = 2 * storage.STALE_S + 3
    assert lock.acquire() is None
    lock.release()


def test_heart_beats(tmp_path, monkeypatch):
    monkeypatch.setattr(storage, "HEARTBEAT_S", 0.02)
    lock = Lock(Folder(tmp_path))
    assert lock.acquire() is None
    for _ in range(500):
        if json.loads((tmp_path / "lock.json").read_text())["beat"] > 1:
            break
        threading.Event().wait(0.02)
    else:
        raise AssertionError("no heartbeat in ten seconds")
    lock.release()


# Damages


@pytest.mark.parametrize("file", ["train/000001.npy", "validation/000000.starts.npy"])
@pytest.mark.parametrize("damage", ["missing", "truncated", "flipped"])
def test_damaged_file_is_named(file, damage, books, tmp_path, small_batches):
    folder, manifest = request_for(tmp_path, f"{books}/**/*.txt").ensure(silent)
    assert not list(damages(folder, manifest, by_hash=True))
    path = Path(folder.path, file)
    content = bytearray(path.read_bytes())
    if damage == "missing":
        path.unlink()
    else:
        content[-1] ^= 1
        path.write_bytes(content[:-1] if damage == "truncated" else content)
    (line,) = damages(folder, manifest, by_hash=True)
    assert str(path) in line
    assert ("is missing" in line) == (damage == "missing")
    if damage != "flipped":
        with pytest.raises(DataError, match=r"000.*delete .* to have it written again"):
            cache_file.bring_here(folder, manifest)


@pytest.mark.parametrize("name", [MANIFEST, PROGRESS])
@pytest.mark.parametrize("content", ["{", "[]", '{"key": "x"}', None])
def test_damaged_manifest_is_named(name, content, books, tmp_path):
    request = request_for(tmp_path, f"{books}/**/*.txt")
    folder, _ = request.ensure(silent)
    if content is None:  # edited by hand
        edited = json.loads(Path(folder.path, MANIFEST).read_text())
        edited["settings"]["separator"] = 2
        content = json.dumps(edited)
    Path(folder.path, MANIFEST).unlink()
    Path(folder.path, name).write_text(content)
    with pytest.raises(DataError, match=name):
        request.ensure(silent)


# Odd texts


ODD_TEXTS = {
    "nul": b"a\x00b",
    "non-ascii": "naïve 東京 🙂".encode(),
    "ends within a character": "caf\u00e9".encode()[:-1],
    "malformed": b"\xff\xfe\x80",
    "lone surrogate": b"\xed\xa0\x80 x",
    "line ends": b"a\r\nb\r",
}


@pytest.mark.parametrize("kind", ["bytes", "bpe"])
def test_odd_text_files(kind, tmp_path, tokenizer_json):
    from mutransformer.data.tokenizer import load_tokenizer

    for name, text in ODD_TEXTS.items():
        (tmp_path / f"{name}.txt").write_bytes(text)
    tokenizer = load_tokenizer("bytes" if kind == "bytes" else str(tokenizer_json))
    request = request_for(tmp_path / "cache", tmp_path / "*.txt", tokenizer=tokenizer, separator=0)
    request = CacheRequest(**{**vars(request), "reading": single(request.reading)})
    folder, manifest = request.ensure(silent)
    (tokens,), (starts,) = cache_file.open_shards(folder, manifest, "train")
    documents = [ids[1:] for ids in np.split(tokens[:-1], starts[1:])]
    for name, ids in zip(sorted(ODD_TEXTS), documents, strict=True):
        text = ODD_TEXTS[name]
        if kind == "bytes":
            assert (ids - 3).astype(np.uint8).tobytes() == text
        else:
            assert tokenizer.decode(ids) == text.decode(errors="replace")


def test_odd_rows(tmp_path):
    import pyarrow
    import pyarrow.parquet

    texts = ["nul \x00", "naïve 東京 🙂", "", None, "\ufeffmark", "\u2028", "x"]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    pyarrow.parquet.write_table(pyarrow.table({"text": texts}), tmp_path / "a.parquet")
    for dataset, file in (("json", "a.jsonl"), ("parquet", "a.parquet")):
        request = request_for(tmp_path / "cache", tmp_path / file, dataset=dataset)
        request = CacheRequest(**{**vars(request), "reading": single(request.reading)})
        folder, manifest = request.ensure(silent)
        assert manifest.counts == {"n_read": 7, "n_empty": 2}
        expected = [SEPARATOR, *(i for text in texts if text for i in [*(b + 3 for b in text.encode()), SEPARATOR])]
        assert stream_of(folder, manifest, "train").tolist() == expected


@pytest.mark.parametrize(
    "content, reason",
    [
        (rb'{"text": "a\ud800b"}', "surrogate"),
        (b'{"text": "ok"}\n{"text": "caf\xc3', "quotation"),
        (b'{"text": "ok"}\n{"text": "caf\xc3"}', "UTF"),
    ],
)
def test_row_that_is_no_text_is_refused_in_a_line(content, reason, tmp_path):
    """A lone surrogate escaped in JSON, a file that ends within a character, malformed UTF-8."""
    (tmp_path / "a.jsonl").write_bytes(content)
    with pytest.raises(ConfigError, match=rf"(?i){reason}") as caught:
        request_for(tmp_path / "cache", tmp_path / "a.jsonl", dataset="json").ensure(silent)
    assert caught.value.field == "data.data_files"
    assert "\n" not in str(caught.value)


def test_value_that_is_no_string_is_refused_with_its_number(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"text": "ok"}\n{"text": 5}\n')
    with pytest.raises(ConfigError, match=r"document 1 is int: '5'") as caught:
        request_for(tmp_path / "cache", tmp_path / "a.jsonl", dataset="json").ensure(silent)
    assert caught.value.field == "data.text_column"


def test_hundred_megabytes_in_one_document(tmp_path):
    block = bytes(range(1, 251)) * 4000
    with (tmp_path / "a.txt").open("wb") as file:
        for _ in range(100):
            file.write(block)
    request = request_for(tmp_path / "cache", tmp_path / "a.txt")
    request = CacheRequest(**{**vars(request), "reading": single(request.reading)})
    folder, manifest = request.ensure(silent)
    ((shard, end),) = manifest.splits.values()
    assert end.n_tokens == 1
    assert (shard.n_documents, shard.n_bytes, shard.n_tokens) == (1, 100_000_000, 100_000_001)
    stream = stream_of(folder, manifest, "train")
    assert hashlib.sha256((stream[1:-1] - 3).astype(np.uint8)).digest() == hashlib.sha256(block * 100).digest()


def test_id_outside_the_vocabulary_stops_with_the_documents_number(tmp_path):
    for i in range(6):
        (tmp_path / f"{i}.txt").write_text("abc" if i < 4 else "xyz")

    class Small(ByteTokenizer):
        content_sha256 = "small"

        def __len__(self) -> int:
            return 110

    request = request_for(tmp_path / "cache", tmp_path / "*.txt", tokenizer=Small())
    with pytest.raises(ConfigError, match=r"has 110 ids, and makes id 125 of document 4") as caught:
        request.ensure(silent)
    assert caught.value.field == "data.tokenizer"
    request = CacheRequest(**{**vars(request), "tokenizer": ByteTokenizer(), "vocab_size": 120})
    with pytest.raises(ConfigError, match=r"document 4 has 125; use at least 384") as caught:
        request.ensure(silent)
    assert caught.value.field == "data.vocab_size"


def test_split_without_documents_is_refused(tmp_path):
    (tmp_path / "one.txt").write_bytes(b"text")
    request = request_for(tmp_path / "cache", tmp_path / "one.txt", validation_fraction=1e-9)
    with pytest.raises(ConfigError, match="no document in the validation split, of 1 read") as caught:
        request.ensure(silent)
    assert caught.value.field == "data.validation_fraction"


def test_source_without_text_is_refused(tmp_path):
    (tmp_path / "null.json").write_text('{"text": null}\n' * 3)
    with pytest.raises(ConfigError, match="holds no document") as caught:
        request_for(tmp_path / "cache", tmp_path / "null.json", dataset="json").ensure(silent)
    assert caught.value.field == "data.dataset"


def test_cache_that_cannot_be_written_is_refused(books):
    with pytest.raises(ConfigError) as caught:
        request_for("/proc/nowhere", f"{books}/**/*.txt").ensure(silent)
    assert caught.value.field == "data.cache"


# `mutransformer data`


def test_listing_says_what_there_is_and_what_does_not_match(books, tmp_path, small_batches):
    ours = request_for(tmp_path, f"{books}/**/*.txt")
    ours.ensure(silent)
    other = request_for(tmp_path, f"{books}/**/*.txt", separator=2, max_documents=30)
    other.ensure(silent)

    def stop(n_documents, *progress) -> None:
        if n_documents == 20:
            raise Stop

    with pytest.raises(Stop):
        request_for(tmp_path, f"{books}/**/*.txt", validation_fraction=0.2).ensure(stop)
    lines = list(describe_caches(ours.root, [ours], verify=True))
    text = "\n".join(lines)
    assert lines[0].startswith("3 caches")
    assert text.count(MATCH) == 1
    assert text.count("complete, every hash is right") == 2
    assert "unfinished" in text
    assert "data.max_documents is None here and 30 there, data.document_separator is 1 here and 2 there" in text
    assert "data.validation_fraction" in text


def test_listing_fails_where_a_cache_is_damaged(books, tmp_path):
    request = request_for(tmp_path, f"{books}/**/*.txt")
    folder, _ = request.ensure(silent)
    path = Path(folder.path, "train/000000.npy")
    content = bytearray(path.read_bytes())
    content[200] ^= 1
    path.write_bytes(content)
    assert len(list(describe_caches(request.root, [request], verify=False))) == 6  # sizes are right
    lines = []
    with pytest.raises(DataError, match="1 of 1 caches are damaged"):
        for line in describe_caches(request.root, [request], verify=True):
            lines.append(line)
    assert any(f"{path} is damaged" in line for line in lines)


def test_listing_of_nothing(tmp_path, books):
    request = request_for(tmp_path / "none", f"{books}/**/*.txt")
    assert list(describe_caches(request.root, [request], verify=True)) == [f"0 caches in {tmp_path}/none"]


def test_default_cache_is_the_users(monkeypatch):
    monkeypatch.setenv("MUTRANSFORMER_CACHE", "/somewhere")
    assert str(storage.default_cache()) == "/somewhere"
    monkeypatch.delenv("MUTRANSFORMER_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", "/xdg")
    assert str(storage.default_cache()) == "/xdg/mutransformer"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", "/home/me")
    assert str(storage.default_cache()) == "/home/me/.cache/mutransformer"


def test_manifest_survives_its_file(books, tmp_path):
    folder, manifest = request_for(tmp_path, f"{books}/**/*.txt").ensure(silent)
    assert Manifest.load(folder) == manifest
