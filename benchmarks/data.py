"""The data room against the bare tokenizer, against numpy and against `datasets`; ratios from one run.

    python benchmarks/data.py writer --text FILE.jsonl --tokenizer tokenizer.json [--rounds 5]
    python benchmarks/data.py reader [--shards 1] [--tokens 200000000] [--sequence_len 1024] [--rows 32] [--rounds 5]
    python benchmarks/data.py seek
    python benchmarks/data.py memory

writer  tokens per CPU second of `mutransformer prepare`'s writer, source to cache, against `tokenizers` alone on the
        same documents in memory; one thread each, then on all cores, and as two writers at once.
reader  M tokens/s of batches (int64 tensors) from shards on disk: the package's training loader, numpy's fancy gather
        from the same shards, `datasets` Arrow with torch format. Orders are random; contenders take turns.
seek    milliseconds from a loader's state to the first batch's windows, at 10^9 windows.
memory  peak memory of a writer and of a reader as the corpus grows 100 times.

Medians over rounds. Idle the machine first: ratios hold under load, rates do not.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import resource
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from mutransformer.data import writer as writer_file
from mutransformer.data.cache import CacheRequest, open_shards
from mutransformer.data.order import window_at
from mutransformer.data.source import TextSource
from mutransformer.data.storage import Folder
from mutransformer.data.tokenizer import load_tokenizer
from mutransformer.data.windows import TokenStream, TokenWindows, WindowLoader


def timed(run: Callable[[], int]) -> tuple[float, float]:
    """(tokens a second, tokens a CPU second) of a run that returns its count of tokens."""
    clock.start()
    return clock.rates(run())


def report(results: dict[str, list[tuple[float, float]]], unit: float, name: str) -> None:
    """A line a contender: medians of both rates, and their ratio to the first contender's."""
    medians = {key: [statistics.median(rate) for rate in zip(*rates, strict=True)] for key, rates in results.items()}
    first = next(iter(medians.values()))
    print(f"{'':<28}{name + '/s':>14}{name + '/CPU s':>16}{'ratio':>8}{'ratio CPU':>11}")
    for key, (wall, cpu) in medians.items():
        print(f"{key:<28}{wall / unit:>14.2f}{cpu / unit:>16.2f}{wall / first[0]:>8.2f}{cpu / first[1]:>11.2f}")


# ---- writer ---------------------------------------------------------------------------------------------------------


def request_for(root: str, options: argparse.Namespace) -> CacheRequest:
    """The cache of the text, in a folder."""
    (reading,) = TextSource(dataset="json", data_files=options.text, validation_fraction=0.01).readings()
    tokenizer = load_tokenizer(options.tokenizer)
    return CacheRequest(
        root=Folder(root),
        reading=reading,
        tokenizer=tokenizer,
        tokenizer_name=options.tokenizer,
        separator=options.separator,
        vocab_size=len(tokenizer),
    )


def write(options: argparse.Namespace) -> int:
    """Tokens of the cache, written from the beginning."""
    with tempfile.TemporaryDirectory() as root:
        request = request_for(root, options)
        clock.start()
        _, manifest = request.ensure(lambda *progress: None)
        return manifest.total("n_tokens")


def writer(options: argparse.Namespace) -> None:
    """Each contender in a process of its own, as the number of the tokenizer's threads is fixed at its first call."""
    for n_threads in (1, os.cpu_count() or 1):
        os.environ["RAYON_NUM_THREADS"] = str(n_threads)
        results = {name: [] for name in ("tokenizers alone", "writer, source to cache")}
        for _ in range(options.rounds):
            for name, contender in zip(results, (bare_tokenizer, write), strict=True):
                results[name].append(in_own_process(contender, options))
        print(f"\n{n_threads} thread(s) of the tokenizer")
        report(results, 1e3, "k tokens")
    os.environ["RAYON_NUM_THREADS"] = "1"
    one = statistics.median(in_own_process(write, options)[0] for _ in range(options.rounds))
    two = statistics.median(two_at_once(write, options) for _ in range(options.rounds))
    print(f"\ntwo writers of one thread at once: {two / one:.2f} times the tokens/s of one")


def bare_tokenizer(options: argparse.Namespace) -> int:
    """Tokens of the same documents by the `tokenizers` library alone."""
    from datasets import load_dataset
    from tokenizers import Tokenizer

    rows = load_dataset("json", data_files=options.text, split="train", streaming=True)
    texts = [row["text"] for row in rows]
    tokenizer = Tokenizer.from_file(options.tokenizer)
    tokenizer.encode_batch_fast(texts[:1], add_special_tokens=False)
    clock.start()
    return sum(
        len(encoding.ids)
        for i in range(0, len(texts), 512)
        for encoding in tokenizer.encode_batch_fast(texts[i : i + 512], add_special_tokens=False)
    )


class Clock:
    """Wall and CPU time since `start`: imports and the loading of the tokenizer are no part of the work."""

    def start(self) -> None:
        self.began = time.perf_counter(), time.process_time()

    def rates(self, n_tokens: int) -> tuple[float, float]:
        """(tokens a second, tokens a CPU second)."""
        return n_tokens / (time.perf_counter() - self.began[0]), n_tokens / (time.process_time() - self.began[1])


clock = Clock()


def _child(contender: Callable[..., int], options: argparse.Namespace, connection: Any) -> None:
    n_tokens = contender(options)
    connection.send(clock.rates(n_tokens))


def started(contender: Callable[..., int], options: argparse.Namespace) -> Any:
    """Where a contender in a process of its own sends its rates."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe(duplex=False)
    context.Process(target=_child, args=(contender, options, theirs)).start()
    return ours


def in_own_process(contender: Callable[..., int], options: argparse.Namespace) -> tuple[float, float]:
    """The rates of a contender in a process of its own."""
    return started(contender, options).recv()


def two_at_once(contender: Callable[..., int], options: argparse.Namespace) -> float:
    """Tokens a second of two contenders together."""
    both = [started(contender, options) for _ in range(2)]
    return sum(connection.recv()[0] for connection in both)


# ---- reader ---------------------------------------------------------------------------------------------------------


def make_shards(folder: str, options: argparse.Namespace) -> list[np.ndarray]:
    """Shards of random tokens on disk, mapped."""
    draw = np.random.default_rng(0)
    paths = [os.path.join(folder, f"{i}.npy") for i in range(options.shards)]
    for path in paths:
        np.save(path, draw.integers(0, 50_000, options.tokens // options.shards, dtype=np.uint16))
    return [np.load(path, mmap_mode="r") for path in paths]


def reader(options: argparse.Namespace) -> None:
    """Batches by the loader, by numpy, by `datasets`."""
    length, n_rows, n_batches = options.sequence_len, options.rows, options.batches
    with tempfile.TemporaryDirectory() as folder:
        shards = make_shards(folder, options)
        windows = TokenWindows(TokenStream(shards, [], n_bytes=0, sha256=""), length)
        loader = WindowLoader(windows, n_rows * length)
        views = [np.lib.stride_tricks.sliding_window_view(shard, length + 1)[::length] for shard in shards]
        n_rows_of = [len(part) for part in np.array_split(np.arange(n_rows), len(views))]
        draw = np.random.default_rng(1)
        # what the loader computes is given to numpy
        numbers = [
            [draw.integers(0, len(view), n) for view, n in zip(views, n_rows_of, strict=True)] for _ in range(n_batches)
        ]
        table = arrow_table(folder, shards[0], length)

        def package() -> int:
            for _, batch in zip(range(n_batches), loader, strict=False):
                batch["tokens"]
            return n_batches * n_rows * length

        def gather() -> int:
            for wanted in numbers:
                parts = [view[rows] for view, rows in zip(views, wanted, strict=True)]
                rows = parts[0] if len(parts) == 1 else np.concatenate(parts)
                torch.from_numpy(rows.astype(np.int64))
            return n_batches * n_rows * length

        def arrow() -> int:
            for _ in range(n_batches // 20):
                table[draw.integers(0, len(table), n_rows).tolist()]["tokens"]
            return n_batches // 20 * n_rows * length

        contenders = {"numpy fancy gather": gather, "loader": package, "datasets, torch format": arrow}
        results: dict[str, list[tuple[float, float]]] = {name: [] for name in contenders}
        for _ in range(options.rounds):
            for name, run in contenders.items():
                results[name].append(timed(run))
        n_windows = f"{windows.n_windows:,} windows of {length} tokens in {len(shards)} shard(s)"
        print(f"{n_windows}, {n_rows} rows a batch")
        report(results, 1e6, "M tokens")


def arrow_table(folder: str, shard: np.ndarray, length: int) -> Any:
    """The first windows of a shard as `datasets` would hold them, in a file that is mapped."""
    from datasets import Dataset, Features, List, Value, load_from_disk

    rows = np.lib.stride_tricks.sliding_window_view(shard[: 20_000 * length + 1], length + 1)[::length]
    path = os.path.join(folder, "arrow")
    features = Features({"tokens": List(Value("int32"), length=length + 1)})
    Dataset.from_dict({"tokens": rows}, features=features).save_to_disk(path)
    return load_from_disk(path).with_format("torch")


def seek(options: argparse.Namespace) -> None:
    """A stream of 10^9 windows takes 2 TB, so its order alone is asked for: all that a seek does but one read."""
    times = []
    for _ in range(20):
        start = time.perf_counter()
        window_at(np.arange(777_000_000, 777_000_000 + 2**14), 10**9, epoch=3, seed=1)
        times.append(time.perf_counter() - start)
    print(f"first block of the order at window 777,000,000 of 10^9: {1e3 * statistics.median(times):.1f} ms")


# ---- memory ---------------------------------------------------------------------------------------------------------


def _peak(size: int, task: str, connection: Any) -> None:
    writer_file.SHARD_TOKENS = 2**20
    with tempfile.TemporaryDirectory() as folder:
        text = Path(folder, "text")
        text.mkdir()
        block = np.random.default_rng(0).integers(97, 123, 50_000, dtype=np.uint8).tobytes()
        for i in range(size):
            (text / f"{i:06d}.txt").write_bytes(block)
        tokenizer = load_tokenizer("bytes")
        (reading,) = TextSource(dataset="text", data_files=f"{text}/*.txt").readings()
        request = CacheRequest(
            root=Folder(f"{folder}/cache"),
            reading=reading,
            tokenizer=tokenizer,
            tokenizer_name="bytes",
            separator=1,
            vocab_size=384,
        )
        cache, manifest = request.ensure(lambda *progress: None)
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        if task == "reader":
            shards, starts = open_shards(cache, manifest, "train")
            loader = WindowLoader(TokenWindows(TokenStream(shards, starts, n_bytes=0, sha256=""), 1024), 2**15)
            before = _private_bytes()
            for batch in loader:
                batch["tokens"]
            peak = (_private_bytes() - before) // 1024
        connection.send((manifest.total("n_tokens"), peak))


def _private_bytes() -> int:
    """Memory of this process but the pages of mapped files, which the system takes back when it needs them."""
    fields = dict(line.split(":") for line in Path("/proc/self/status").read_text().splitlines() if ":" in line)
    return int(fields["RssAnon"].split()[0]) * 1024


def memory(options: argparse.Namespace) -> None:
    """Peak memory of a writer, growth of a reader, for two sizes of corpus."""
    context = multiprocessing.get_context("spawn")
    for task in ("writer", "reader"):
        for size in (40, 4000):
            ours, theirs = context.Pipe(duplex=False)
            context.Process(target=_peak, args=(size, task, theirs)).start()
            n_tokens, peak = ours.recv()
            what = "peak memory" if task == "writer" else "growth over an epoch"
            print(f"{task}: {n_tokens / 1e6:8.1f} M tokens, {what} {peak / 1024:.0f} MiB")


def main() -> None:
    """Runs the task that was named."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("task", choices=("writer", "reader", "seek", "memory"))
    parser.add_argument("--text", help="JSON lines with a column `text`")
    parser.add_argument("--tokenizer", help="path of a tokenizer.json")
    parser.add_argument("--separator", type=int, default=0)
    parser.add_argument("--tokens", type=int, default=200_000_000)
    parser.add_argument("--shards", type=int, default=1)
    parser.add_argument("--sequence_len", type=int, default=1024)
    parser.add_argument("--rows", type=int, default=32)
    parser.add_argument("--batches", type=int, default=1000)
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    {"writer": writer, "reader": reader, "seek": seek, "memory": memory}[options.task](options)


if __name__ == "__main__":
    main()
