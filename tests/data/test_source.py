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

from mutransformer.data.source import TextSource
from mutransformer.errors import ConfigError


def both_splits(source: TextSource) -> tuple[list[bytes], list[bytes]]:
    return list(source.documents("train")), list(source.documents("validation"))


def error_of(**fields) -> ConfigError:
    with pytest.raises(ConfigError) as caught:
        TextSource(**fields)
    assert "\n" not in str(caught.value)
    return caught.value


def error_of_reading(source: TextSource, split="train") -> ConfigError:
    with pytest.raises(ConfigError) as caught:
        list(source.documents(split))
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
    everything = list(TextSource(validation_fraction=1e-9).documents("train"))
    assert everything.index(first) < everything.index(second)


def test_stdlib_is_the_same_in_another_process(stdlib):
    program = (
        "import hashlib; from mutransformer.data.source import TextSource\n"
        "print(hashlib.sha256(b'|'.join(TextSource().documents('validation'))).hexdigest())"
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
    train = list(TextSource(dataset="text", data_files=patterns, validation_fraction=1e-9).documents("train"))
    shelf = sorted((books / "shelf1").iterdir())
    assert train == [b"odd"] + [path.read_bytes() for path in shelf]


def test_empty_documents_are_left_out(tmp_path):
    (tmp_path / "a.txt").write_bytes(b"")
    (tmp_path / "b.txt").write_bytes(b"text")
    source = TextSource(dataset="text", data_files=f"{tmp_path}/*.txt", validation_fraction=1e-9)
    assert list(source.documents("train")) == [b"text"]


def test_max_documents_bounds_what_is_read(books):
    source = TextSource(dataset="text", data_files=f"{books}/**/*.txt", validation_fraction=0.3, max_documents=20)
    train, validation = both_splits(source)
    assert len(train) + len(validation) == 20


def test_missing_file_is_named(books, tmp_path):
    error = error_of(dataset="text", data_files=[f"{books}/**/*.txt", f"{tmp_path}/nothing.txt"])
    assert error.field == "data.data_files"
    assert f"{tmp_path}/nothing.txt" in str(error)
    assert str(books) not in str(error)


def test_directory_is_refused(books):
    error = error_of(dataset="text", data_files=str(books))
    assert error.field == "data.data_files"
    assert "directory" in str(error)


def test_split_without_documents_is_refused(tmp_path):
    (tmp_path / "one.txt").write_bytes(b"text")
    source = TextSource(dataset="text", data_files=f"{tmp_path}/one.txt", validation_fraction=1e-9)
    assert list(source.documents("train")) == [b"text"]
    error = error_of_reading(source, "validation")
    assert error.field == "data.validation_fraction"
    assert "validation split, of 1 read" in str(error)


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
    assert "int" in str(error)


def test_table_without_text_is_refused(tmp_path):
    path = tmp_path / "null.json"
    write_rows(path, [{"text": None}] * 3)
    assert error_of_reading(TextSource(dataset="json", data_files=str(path))).field == "data.dataset"


@pytest.mark.parametrize("content", ["", '{"text": "a"}\n{"text": oops\n'])
def test_broken_table_is_refused(tmp_path, content):
    path = tmp_path / "broken.json"
    path.write_text(content)
    error = error_of_reading(TextSource(dataset="json", data_files=str(path)))
    assert error.field == "data.data_files"
    assert str(path) in str(error)


# The hub: `load_dataset` takes a folder of this name for the dataset, so no network is needed


@pytest.fixture
def hub(tmp_path, monkeypatch):
    folder = tmp_path / "owner" / "name"
    folder.mkdir(parents=True)
    for split, n in (("train", 50), ("validation", 3)):
        write_rows(folder / f"{split}.jsonl", [{"text": f"{split} {i}"} for i in range(n)])
    monkeypatch.chdir(tmp_path)


def test_hub_validation_split(hub):
    source = TextSource(dataset="owner/name", validation_split="validation", max_documents=40)
    train, validation = both_splits(source)
    assert train == [f"train {i}".encode() for i in range(40)]
    assert validation == [f"validation {i}".encode() for i in range(3)]


def test_hub_without_validation_split_holds_rows_out(hub):
    source = TextSource(dataset="owner/name", validation_fraction=0.3, max_documents=40)
    train, validation = both_splits(source)
    assert sorted(train + validation) == sorted(f"train {i}".encode() for i in range(40))
    assert min(len(train), len(validation)) > 5


def test_hub_split_that_does_not_exist(hub):
    error = error_of_reading(TextSource(dataset="owner/name", train_split="learn", max_documents=5))
    assert error.field == "data.dataset"
    assert "learn" in str(error)


def test_hub_needs_a_limit():
    error = error_of(dataset="owner/name")
    assert error.field == "data.max_documents"
    assert "memory" in str(error)


# Values that cannot work


@pytest.mark.parametrize(
    "field, fields",
    [
        ("data.validation_fraction", {"validation_fraction": 0.0}),
        ("data.validation_fraction", {"validation_fraction": 1.0}),
        ("data.max_documents", {"max_documents": 0}),
        ("data.data_files", {"dataset": "text"}),
        ("data.data_files", {"dataset": "json", "data_files": []}),
        ("data.data_files", {"dataset": "stdlib", "data_files": "a.txt"}),
        ("data.data_files", {"dataset": "owner/name", "data_files": "a.txt", "max_documents": 1}),
        ("data.dataset", {"dataset": "./books", "max_documents": 1}),
        ("data.dataset", {"dataset": "", "max_documents": 1}),
        ("data.name", {"name": "en"}),
        ("data.revision", {"revision": "main"}),
        ("data.train_split", {"train_split": "all"}),
        ("data.validation_split", {"validation_split": "dev"}),
        ("data.validation_split", {"dataset": "owner/name", "validation_split": "train", "max_documents": 1}),
    ],
)
def test_value_that_cannot_work_is_refused(field, fields):
    assert error_of(**fields).field == field
