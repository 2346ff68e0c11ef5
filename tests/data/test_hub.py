"""The real `load_dataset` and `AutoTokenizer` against a hub on loopback, with faults."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from loopback_hub import LoopbackHub
from own_process import OwnProcesses

DATASET, MODEL = "datasets/owner/name", "models/owner/tokenizer"
SMALL = {"mutransformer.data.writer:SHARD_TOKENS": 20_000, "mutransformer.data.reader:DOCUMENTS_PER_BATCH": 50}
N_ROWS = 300


def rows(split: str, number: int) -> bytes:
    texts = (f"{split} {number} {i} naïve hello world of a document " * (1 + i % 5) for i in range(N_ROWS))
    return "".join(json.dumps({"text": text, "id": i}) + "\n" for i, text in enumerate(texts)).encode()


def expected_tokens(split: str, n_files: int) -> list[int]:
    texts = [json.loads(line)["text"] for i in range(n_files) for line in rows(split, i).splitlines()]
    return [1, *(token for text in texts for token in [*(byte + 3 for byte in text.encode()), 1])]


@pytest.fixture(scope="module")
def served(tokenizer_files):
    hub = LoopbackHub()
    yield hub
    hub.close()


@pytest.fixture(scope="module")
def tokenizer_files(tmp_path_factory, bpe) -> dict[str, bytes]:
    from transformers import PreTrainedTokenizerFast

    folder = tmp_path_factory.mktemp("tokenizer")
    bpe.save(str(folder / "plain.json"))
    PreTrainedTokenizerFast(tokenizer_file=str(folder / "plain.json"), eos_token="<eos>").save_pretrained(folder)
    return {name: (folder / name).read_bytes() for name in ("tokenizer.json", "tokenizer_config.json")}


@pytest.fixture(scope="module")
def processes(served, tmp_path_factory):
    home = str(tmp_path_factory.mktemp("hf"))
    return OwnProcesses(
        {
            "HF_ENDPOINT": served.url,
            "HF_HUB_DISABLE_XET": "1",
            "HF_HOME": home,
            "HF_TOKEN": "",
            "HF_HUB_DISABLE_TELEMETRY": "1",
        }
    )


def serve(hub, tokenizer_files) -> LoopbackHub:
    """Three files to train on, one each to validate and test; no faults."""
    splits = [("train", 3), ("validation", 1), ("test", 1)]
    files = {f"data/{split}-{i}.jsonl": rows(split, i) for split, n in splits for i in range(n)}
    hub.repositories = {DATASET: files, MODEL: dict(tokenizer_files)}
    hub.fault = lambda request: None
    hub.requests.clear()
    return hub


def run(processes, cache, *args, command="prepare"):
    options = [f"--data.cache={cache}", "--data.dataset=owner/name", "--data.validation_split=validation", *args]
    return processes.run(command, *options, patches=SMALL)


@pytest.fixture(scope="module")
def made(served, tokenizer_files, processes, tmp_path_factory) -> Path:
    """The caches of an undisturbed run."""
    serve(served, tokenizer_files)
    folder = tmp_path_factory.mktemp("made")
    ended = run(processes, folder)
    assert ended.code == 0, ended
    return folder


@pytest.fixture
def hub(made, served, tokenizer_files):
    return serve(served, tokenizer_files)


@pytest.fixture
def prepare(hub, processes, tmp_path):
    return lambda *args, cache=tmp_path / "cache", **options: run(processes, cache, *args, **options)


def content_of(root: Path) -> dict[str, bytes]:
    return {path.relative_to(root).as_posix(): path.read_bytes() for path in root.rglob("*") if path.is_file()}


def stream_of(root: Path, split: str) -> list[int]:
    files = [path for path in sorted(root.glob(f"*/{split}/*.npy")) if ".starts." not in path.name]
    return np.concatenate([np.load(path) for path in files]).tolist()


def files_read(hub) -> list[str]:
    return [
        request.file
        for request in hub.requests
        if request.method == "GET" and request.file and request.file.startswith("data/")
    ]


@pytest.fixture
def undisturbed(made, tmp_path) -> dict[str, bytes]:
    """The files of an undisturbed run, which lie in `tmp_path / "undisturbed"` too."""
    shutil.copytree(made, tmp_path / "undisturbed")
    return content_of(made)


def test_official_splits_are_streamed_at_one_commit(prepare, hub, tmp_path):
    ended = prepare("--data.test_split=test")
    assert ended.code == 0, ended
    for split, n_files in (("train", 3), ("validation", 1), ("test", 1)):
        assert stream_of(tmp_path / "cache", split) == expected_tokens(split, n_files)
    assert len(list(tmp_path.glob("cache/*/train/*.npy"))) > 6  # several shards
    commit = hub.commit(DATASET)
    assert all(f"/resolve/{commit}/" in request.path for request in hub.requests if request.file in files_read(hub))


def test_tokenizer_of_the_hub(prepare, bpe, tmp_path):
    ended = prepare("--data.tokenizer=owner/tokenizer")
    assert ended.code == 0, ended
    stream = stream_of(tmp_path / "cache", "validation")
    eos = bpe.token_to_id("<eos>")
    text = json.loads(rows("validation", 0).splitlines()[0])["text"]
    ids = bpe.encode(text, add_special_tokens=False).ids
    assert stream[: len(ids) + 2] == [eos, *ids, eos]
    assert len(ids) < len(text.encode())


def test_second_run_reads_no_data(prepare, undisturbed, hub, tmp_path):
    assert prepare(cache=tmp_path / "undisturbed").code == 0
    assert files_read(hub) == []


def test_new_commit_is_another_cache(prepare, hub, undisturbed, tmp_path):
    hub.repositories[DATASET]["data/train-0.jsonl"] = b'{"text": "new", "id": 0}\n'
    assert prepare(cache=tmp_path / "undisturbed").code == 0
    assert len(content_of(tmp_path / "undisturbed")) > len(undisturbed)
    ended = prepare(f"--data.revision={'0' * 40}", cache=tmp_path / "undisturbed")
    assert ended.code == 2
    assert len(ended.err.splitlines()) == 1 and ended.err.startswith("mutransformer: data.dataset='owner/name'")


def test_cache_needs_no_hub(prepare, hub, undisturbed, tmp_path):
    """By its commit without asking, by its branch with a line that says so."""
    by_commit = f"--data.revision={hub.commit(DATASET)}"
    hub.fault = lambda request: "close"
    ended = prepare(by_commit, cache=tmp_path / "undisturbed")
    assert (ended.code, ended.err) == (0, "")
    ended = prepare(cache=tmp_path / "undisturbed")
    assert ended.code == 0
    assert "is used: the source is not at hand" in ended.err
    ended = prepare("--data.max_documents=5", cache=tmp_path / "undisturbed")
    assert ended.code == 1
    assert "the hub cannot be reached" in ended.err.splitlines()[-1]


def twice(fault):
    """The fault at the first two requests for each file's content, and none after them."""
    seen: dict[str, int] = {}

    def faulty(request):
        if not (request.file or "").startswith("data/") or request.method != "GET":
            return None
        seen[request.file] = seen.get(request.file, 0) + 1
        return fault if seen[request.file] <= 2 else None

    return faulty


@pytest.mark.parametrize("fault", [500, 503, 429, "cut", "close"])
def test_passing_fault_changes_nothing(fault, prepare, hub, undisturbed, tmp_path):
    hub.fault = twice(fault)
    ended = prepare()
    assert ended.code == 0, ended
    assert content_of(tmp_path / "cache") == undisturbed


@pytest.mark.parametrize("fault", [500, pytest.param("close", marks=pytest.mark.slow)])
def test_lasting_fault_ends_in_a_line_and_the_same_command_goes_on(fault, prepare, hub, undisturbed, tmp_path):
    hub.fault = lambda request: fault if request.file == "data/train-2.jsonl" else None
    ended = prepare()
    assert ended.code == 1, ended
    last = ended.err.splitlines()[-1]
    assert last.startswith("mutransformer: data.dataset='owner/name': reading failed after document 600, 6 times")
    assert "the same command goes on" in last
    assert "Traceback" not in ended.err
    assert len(hub.requests) < 100
    written = {path: path.stat().st_mtime_ns for path in tmp_path.glob("cache/*/train/*.npy")}
    assert len(written) >= 6
    hub.fault = lambda request: None
    assert prepare().code == 0
    assert content_of(tmp_path / "cache") == undisturbed
    assert {path: path.stat().st_mtime_ns for path in written} == written


@pytest.mark.parametrize("status", [401, 403, 404])
def test_refusal_ends_at_once(status, prepare, hub):
    hub.fault = lambda request: status if request.file == "data/train-1.jsonl" else None
    ended = prepare()
    assert ended.code == 2, ended
    assert len(ended.err.splitlines()) == 1
    assert ended.err.startswith("mutransformer: data.dataset='owner/name': could not be read")
    assert files_read(hub).count("data/train-1.jsonl") <= 2


def test_dataset_split_and_column_that_do_not_exist(prepare, hub):
    for args, field, would_do in (
        (["--data.dataset=owner/nothing"], "data.dataset='owner/nothing'", "check data.dataset"),
        (["--data.train_split=learn"], "data.dataset='owner/name'", "learn"),
        (["--data.text_column=body"], "data.text_column='body'", "the columns are id, text"),
        (["--data.text_column=id"], "data.text_column='id'", "document 0 is int"),
        (["--data.name=en"], "data.dataset='owner/name'", "en"),
        (["--data.tokenizer=owner/nothing"], "data.tokenizer='owner/nothing'", "hub id"),
    ):
        hub.requests.clear()
        ended = prepare(*args)
        assert ended.code == 2, ended
        (line,) = ended.err.splitlines()
        assert line.startswith(f"mutransformer: {field}") and would_do in line, line
        assert len(files_read(hub)) <= 4  # of one file


def test_fit_makes_the_cache_it_needs(prepare, tmp_path):
    ended = prepare(
        "--data.sequence_len=64",
        "--data.tokens_per_batch=256",
        "--model.decoder.d_model=16",
        "--model.decoder.d_head=8",
        "--model.decoder.n_layer=1",
        "--trainer.max_steps=2",
        "--trainer.accelerator=cpu",
        "--trainer.limit_val_batches=1",
        "--trainer.enable_progress_bar=false",
        f"--trainer.default_root_dir={tmp_path / 'runs'}",
        command="fit",
    )
    assert ended.code == 0, ended
    assert "an epoch: " in ended.out and "left out: " in ended.out
    assert stream_of(tmp_path / "cache", "train") == expected_tokens("train", 3)
