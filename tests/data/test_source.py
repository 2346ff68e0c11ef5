from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import sysconfig
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mutransformer.data import reader as reader_file
from mutransformer.data.reader import SourceAbsent
from mutransformer.data.source import TextSource
from mutransformer.errors import ConfigError


def documents(source: TextSource, split="train") -> list[bytes]:
    (reading,) = (reading for reading in source.readings() if split in reading.splits)
    batches = reading.reader().batches({})
    return [text for batch in batches for _, ours, text in batch.documents if ours == split]


def both_splits(source: TextSource) -> tuple[list[bytes], list[bytes]]:
    return documents(source), documents(source, "validation")


def error_of(**fields) -> ConfigError:
    with pytest.raises(ConfigError) as caught:
        TextSource(**fields)
    assert "\n" not in str(caught.value)
    return caught.value


def error_of_reading(source: TextSource, split="train") -> ConfigError:
    with pytest.raises(ConfigError) as caught:
        documents(source, split)
    assert "\n" not in str(caught.value)
    return caught.value


@pytest.fixture(scope="module")
def stdlib() -> tuple[list[bytes], list[bytes]]:
    return both_splits(TextSource())


def write_rows(path, rows) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


# The standard library


def test_stdlib_splits_are_disjoint_and_large(stdlib):
    train, validation = stdlib
    assert sum(map(len, train)) > 5_000_000
    assert sum(map(len, validation)) > 200_000
    root = Path(sysconfig.get_path("stdlib"))
    left_out = {"test", "tests", "idle_test", "site-packages", "dist-packages"}
    files = [path for path in root.rglob("*.py") if not left_out & set(path.relative_to(root).parts)]
    files = [path for path in files if not path.name.startswith("_sysconfigdata_")]  # written where Python was built
    # Each file once, in one split or the other (files may be copies of each other, so their texts are counted).
    assert Counter(train + validation) == Counter(text for path in files if (text := path.read_bytes()))


def test_stdlib_holds_out_about_the_fraction_asked_for(stdlib):
    train, validation = stdlib
    assert 0.02 < len(validation) / (len(train) + len(validation)) < 0.08
    train, validation = both_splits(TextSource(validation_fraction=0.5))
    assert 0.4 < len(validation) / (len(train) + len(validation)) < 0.6


def test_stdlib_leaves_out_tests_and_packages(stdlib, tmp_path, monkeypatch):
    kept = ["os.py", "json/decoder.py", "testing/tools.py"]
    left_out = [
        "test/test_os.py",
        "json/tests/test_decoder.py",
        "idlelib/idle_test/test_editor.py",
        "site-packages/numpy/core.py",
        "dist-packages/apt.py",
        "__pycache__/os.py",
        "os.txt",
    ]
    for relative in kept + left_out:
        path = tmp_path / relative
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(relative)
    monkeypatch.setattr(sysconfig, "get_path", lambda name: str(tmp_path))
    train, validation = both_splits(TextSource(validation_fraction=0.4))
    assert sorted(train + validation) == sorted(name.encode() for name in kept)


def test_stdlib_is_read_in_the_order_of_its_paths(stdlib):
    root = Path(sysconfig.get_path("stdlib"))
    first, second = (root / "abc.py").read_bytes(), (root / "argparse.py").read_bytes()
    everything = documents(TextSource(validation_fraction=1e-9))
    assert everything.index(first) < everything.index(second)


def test_stdlib_is_the_same_in_another_process(stdlib):
    program = (
        "import hashlib; from mutransformer.data.source import TextSource\n"
        "(reading,) = TextSource().readings()\n"
        "texts = [text for batch in reading.reader().batches({}) for _, split, text in batch.documents "
        "if split == 'validation']\n"
        "print(hashlib.sha256(b'|'.join(texts)).hexdigest())"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    printed = [
        subprocess.run(
            [sys.executable, "-c", program],
            env={**environment, "PYTHONHASHSEED": seed},
            cwd="/",
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for seed in ("1", "2")
    ]
    assert printed == [hashlib.sha256(b"|".join(stdlib[1])).hexdigest() + "\n"] * 2


# Text files


def test_text_file_is_a_document(books):
    source = TextSource(dataset="text", data_files=f"{books}/**/*.txt", validation_fraction=0.3)
    train, validation = both_splits(source)
    files = [path.read_bytes() for path in books.rglob("*.txt")]
    assert sorted(train + validation) == sorted(files)
    assert not set(train) & set(validation)
    assert min(len(train), len(validation)) > 5


def test_text_split_does_not_depend_on_where_the_folder_lies(books, tmp_path):
    moved = tmp_path / "elsewhere"
    for path in books.rglob("*.txt"):
        copy = moved / path.relative_to(books)
        copy.parent.mkdir(parents=True, exist_ok=True)
        copy.write_bytes(path.read_bytes())
    here = TextSource(dataset="text", data_files=f"{books}/**/*.txt", validation_fraction=0.3)
    there = TextSource(dataset="text", data_files=f"{moved}/**/*.txt", validation_fraction=0.3)
    assert both_splits(here) == both_splits(there)


def test_text_files_as_list_are_read_once_each_and_in_order(books, tmp_path):
    odd = tmp_path / "name[1].txt"  # a path, though it looks like a glob
    odd.write_bytes(b"odd")
    patterns = [str(odd), f"{books}/shelf1/*.txt", f"{books}/**/1.txt"]
    train = documents(TextSource(dataset="text", data_files=patterns, validation_fraction=1e-9))
    shelf = sorted((books / "shelf1").iterdir())
    assert train == [b"odd"] + [path.read_bytes() for path in shelf]


def test_empty_documents_are_left_out(tmp_path):
    (tmp_path / "a.txt").write_bytes(b"")
    (tmp_path / "b.txt").write_bytes(b"text")
    source = TextSource(dataset="text", data_files=f"{tmp_path}/*.txt", validation_fraction=1e-9)
    assert documents(source) == [b"text"]


def test_max_documents_bounds_what_is_read(books):
    source = TextSource(dataset="text", data_files=f"{books}/**/*.txt", validation_fraction=0.3, max_documents=20)
    train, validation = both_splits(source)
    assert len(train) + len(validation) == 20


def test_missing_file_is_absent_and_named(books, tmp_path):
    patterns = [f"{books}/**/*.txt", f"{tmp_path}/nothing.txt"]
    (reading,) = TextSource(dataset="text", data_files=patterns).readings()
    with pytest.raises(SourceAbsent) as caught:
        reading.reader().state_of_source()
    assert f"{tmp_path}/nothing.txt" in str(caught.value)
    assert str(books) not in str(caught.value)


def test_directory_is_refused(books):
    error = error_of_reading(TextSource(dataset="text", data_files=str(books)))
    assert error.field == "data.data_files"
    assert "directory" in str(error)


def test_state_of_files_changes_with_names_sizes_and_times(tmp_path):
    def state():
        (reading,) = TextSource(dataset="text", data_files=f"{tmp_path}/*.txt").readings()
        return reading.reader().state_of_source()

    path = tmp_path / "a.txt"
    path.write_text("text")
    states = [state()]
    path.write_text("longer text")
    states.append(state())
    os.utime(path, (1, 1))
    states.append(state())
    path.rename(tmp_path / "b.txt")
    states.append(state())
    assert len({json.dumps(one) for one in states}) == 4
    assert state() == states[-1]


def test_state_of_stdlib_is_its_content(tmp_path, monkeypatch):
    monkeypatch.setattr(sysconfig, "get_path", lambda name: str(tmp_path))
    (reading,) = TextSource().readings()
    (tmp_path / "a.py").write_text("text")
    first = reading.reader().state_of_source()
    os.utime(tmp_path / "a.py", (1, 1))
    assert reading.reader().state_of_source() == first
    (tmp_path / "a.py").write_text("TEXT")
    assert reading.reader().state_of_source() != first


# Shares of the documents


@given(st.floats(0.01, 0.6), st.floats(0.0, 0.3))
def test_held_out_shares_are_disjoint_and_nested(validation, test):
    """A document is in one split; it is in validation whatever share test has, and train only loses to them."""
    (reading,) = TextSource(validation_fraction=validation, test_fraction=test).readings()
    (without,) = TextSource(validation_fraction=validation).readings()
    keys = [str(i).encode() for i in range(2000)]
    splits = [reading.split_of(key) for key in keys]
    for split, share in (("validation", validation), ("test", test)):
        assert abs(splits.count(split) / 2000 - share) < 5 * (share * (1 - share) / 2000) ** 0.5 + 1e-9
    for split, key in zip(splits, keys, strict=True):
        assert (split == "validation") == (without.split_of(key) == "validation")


def test_official_splits_are_read_each_by_itself():
    source = TextSource(dataset="owner/name", validation_split="dev", test_split="final")
    assert [(r.source_split, r.splits) for r in source.readings()] == [
        ("train", ("train",)),
        ("dev", ("validation",)),
        ("final", ("test",)),
    ]
    source = TextSource(dataset="owner/name", validation_split="dev", test_fraction=0.1)
    assert [(r.source_split, r.splits) for r in source.readings()] == [
        ("train", ("train", "test")),
        ("dev", ("validation",)),
    ]


# Going on from any batch


@given(data=st.data())
def test_reading_goes_on_from_any_batch(data, many_rows):
    kind = data.draw(st.sampled_from(["text", "json", "parquet"]))
    limit = data.draw(st.sampled_from([None, 45]))
    source = TextSource(dataset=kind, data_files=str(many_rows[kind]), validation_fraction=0.3, max_documents=limit)
    (reading,) = source.readings()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(reader_file, "DOCUMENTS_PER_BATCH", data.draw(st.integers(1, 20)))
        patch.setattr(reader_file, "BYTES_PER_BATCH", data.draw(st.integers(1, 300)))
        whole = list(reading.reader().batches({}))
        stop = data.draw(st.integers(0, len(whole) - 1))
        position = json.loads(json.dumps(whole[stop].position))  # as it is kept in a file
        rest = list(reading.reader().batches(position))
        again = list(reading.reader().batches(rest[0].position)) if rest else []
    assert [batch.documents for batch in rest] == [batch.documents for batch in whole[stop + 1 :]]
    assert [batch.documents for batch in again] == [batch.documents for batch in rest[1:]]
    numbers = [number for batch in whole for number, _, _ in batch.documents]
    assert numbers == [i for i in range(limit or 60) if i % 10 != 7]
    assert whole[-1].n_read == (limit or 60)


@pytest.fixture(scope="module")
def many_rows(tmp_path_factory):
    """60 documents as text files and as two tables each; every tenth is empty, in tables some of these null."""
    import pyarrow
    import pyarrow.parquet

    folder = tmp_path_factory.mktemp("many")
    texts = ["" if i % 10 == 7 else f"text {i} ü" * (1 + i % 5) for i in range(60)]
    for i, text in enumerate(texts):
        (folder / f"{i:02d}.txt").write_text(text)
    rows = [{"text": text or (None if i % 20 == 7 else "")} for i, text in enumerate(texts)]
    for number, part in enumerate((rows[:25], rows[25:])):
        write_rows(folder / f"{number}.jsonl", part)
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(part), folder / f"{number}.parquet", row_group_size=10)
    return {"text": folder / "*.txt", "json": folder / "*.jsonl", "parquet": folder / "*.parquet"}


# Tables


@pytest.fixture(params=["json", "parquet"])
def table(request, tmp_path) -> TextSource:
    """60 rows in two files, one of them without text."""
    rows = [{"id": i, "body": f"text {i} ü" if i != 7 else None} for i in range(60)]
    for number, part in enumerate((rows[:30], rows[30:])):
        path = tmp_path / f"part{number}.{request.param}"
        if request.param == "json":
            write_rows(path, part)
        else:
            import pyarrow
            import pyarrow.parquet

            pyarrow.parquet.write_table(pyarrow.Table.from_pylist(part), path)
    return TextSource(
        dataset=request.param, data_files=f"{tmp_path}/part*", text_column="body", validation_fraction=0.3
    )


def test_table_row_is_a_document(table):
    train, validation = both_splits(table)
    assert sorted(train + validation) == sorted(f"text {i} ü".encode() for i in range(60) if i != 7)
    assert min(len(train), len(validation)) > 5
    assert train == sorted(train, key=lambda text: int(text.split()[1]))


def test_missing_column_is_refused_with_those_there_are(table):
    error = error_of_reading(replace(table, text_column="text"))
    assert error.field == "data.text_column"
    assert "body, id" in str(error)


def test_column_that_is_no_text_is_refused(table):
    error = error_of_reading(replace(table, text_column="id"))
    assert error.field == "data.text_column"
    assert "document 0 is int" in str(error)


@pytest.mark.parametrize("content", ["", '{"text": "a"}\n{"text": oops\n'])
def test_broken_table_is_refused(tmp_path, content):
    path = tmp_path / "broken.json"
    path.write_text(content)
    error = error_of_reading(TextSource(dataset="json", data_files=str(path)))
    assert error.field == "data.data_files"
    assert str(path) in str(error)


# Values that cannot work


@pytest.mark.parametrize(
    "field, fields",
    [
        ("data.validation_fraction", {"validation_fraction": 0.0}),
        ("data.validation_fraction", {"validation_fraction": 1.0}),
        ("data.test_fraction", {"test_fraction": -0.1}),
        ("data.test_fraction", {"test_fraction": 0.95}),
        ("data.test_fraction", {"dataset": "owner/name", "test_split": "test", "test_fraction": 0.1}),
        ("data.max_documents", {"max_documents": 0}),
        ("data.data_files", {"dataset": "text"}),
        ("data.data_files", {"dataset": "json", "data_files": []}),
        ("data.data_files", {"dataset": "stdlib", "data_files": "a.txt"}),
        ("data.data_files", {"dataset": "owner/name", "data_files": "a.txt"}),
        ("data.dataset", {"dataset": "./books"}),
        ("data.dataset", {"dataset": ""}),
        ("data.name", {"name": "en"}),
        ("data.revision", {"revision": "main"}),
        ("data.train_split", {"train_split": "all"}),
        ("data.validation_split", {"validation_split": "dev"}),
        ("data.validation_split", {"dataset": "owner/name", "validation_split": "train"}),
        ("data.test_split", {"test_split": "test"}),
        ("data.test_split", {"dataset": "owner/name", "test_split": "train"}),
        ("data.test_split", {"dataset": "owner/name", "validation_split": "dev", "test_split": "dev"}),
    ],
)
def test_value_that_cannot_work_is_refused(field, fields):
    assert error_of(**fields).field == field
