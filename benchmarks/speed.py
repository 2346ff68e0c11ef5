"""The training step (forward, backward, clip, AdamW) of the package against what a user would pick instead.

    python benchmarks/speed.py [--shapes small vocabulary wide deep] [--contenders ...] [--rounds 5] [--steps 4]

Every contender runs in a process of its own and trains the same shape on the same random tokens. Rounds of a few steps
are interleaved, so that a machine that slows down slows all of them; figures are medians over rounds.

    plain      a hand-written nn.Module and loop: nn.Linear, a module a layer, torch's AdamW and clip_grad_norm_
    compiled   the same, through torch.compile
    hf         transformers' LlamaForCausalLM in the same loop
    litgpt     litgpt's GPT in the same loop, where it is installed (pip install --no-deps litgpt psutil)
    eager      mutransformer under lightning.Trainer with the callbacks of `mutransformer fit`
    compile    the same with model.compile
    xla        the same on one XLA CPU device

All are Llama-shaped: RMSNorm, rotary positions, heads of 64, swiglu with a hidden width of 4 d_model, no biases, no
tied embeddings. `--activation relu` trains the plain feed-forward of twice d_model x 4 d_model, for which hf and litgpt
have no model.

On a GPU, in some ten minutes, with the share of its peak (MFU, causal attention counted):

    python benchmarks/speed.py --device cuda --precisions bf16 --contenders plain compiled hf eager compile --steps 8

bf16: autocast for the others, compute_dtype for ours; masters and optimizer are float32 for all.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import nn

from mutransformer import DecoderConfig, OptimizerConfig, ParametrizationConfig
from mutransformer.training.throughput import flops_per_token, gpu_peak


class Shape(NamedTuple):
    """A model and its batch."""

    d_model: int
    n_layer: int
    sequence_len: int
    n_rows: int
    vocab_size: int
    d_head: int = 64
    ff_multiple: float = 4.0

    @property
    def d_ff(self) -> int:
        return round(self.ff_multiple * self.d_model)


SHAPES = {
    "small": Shape(256, 4, 256, 8, 512),
    "vocabulary": Shape(256, 4, 256, 8, 32_128),
    "wide": Shape(512, 8, 512, 4, 8192),
    "deep": Shape(128, 24, 256, 8, 384),
}
GPU_SHAPES = {
    "350M": Shape(1024, 24, 2048, 16, 32_000, ff_multiple=2.75),
    "1.3B": Shape(2048, 24, 2048, 8, 32_000, d_head=128, ff_multiple=2.6875),
}
OURS = ("eager", "compile", "xla")
PEERS = ("plain", "compiled", "hf", "litgpt")
GATED_ONLY = ("hf", "litgpt")
LEARNING_RATE = 1e-3
WARMUP = 3

DEVICE = "cuda" if os.environ.get("BENCHMARK_DEVICE") == "cuda" else "cpu"

Loop = Callable[[Callable[[], None]], None]  # trains until `on_step`, called after each step, raises


# ---------------------------------------------------------------------------------------------------------------------
# contenders
# ---------------------------------------------------------------------------------------------------------------------


class PlainBlock(nn.Module):
    """A pre-norm block as one would write it by hand."""

    def __init__(self, d_model: int, d_head: int, d_ff: int, activation: str) -> None:
        super().__init__()
        self.d_head = d_head
        self.query, self.key, self.value, self.out = (nn.Linear(d_model, d_model, bias=False) for _ in range(4))
        self.up, self.down = nn.Linear(d_model, d_ff, bias=False), nn.Linear(d_ff, d_model, bias=False)
        self.gate = nn.Linear(d_model, d_ff, bias=False) if activation == "swiglu" else None
        self.norms = nn.ModuleList(nn.RMSNorm(d_model, eps=1e-5) for _ in range(2))

    def forward(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        batch, length, width = x.shape
        h = self.norms[0](x)
        q, k, v = (
            p(h).view(batch, length, -1, self.d_head).transpose(1, 2) for p in (self.query, self.key, self.value)
        )
        q, k = self.rotate(q, cos, sin), self.rotate(k, cos, sin)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(batch, length, width))
        h = self.norms[1](x)
        hidden = F.relu(self.up(h)) if self.gate is None else F.silu(self.gate(h)) * self.up(h)
        return x + self.down(hidden)

    @staticmethod
    def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        a, b = x.chunk(2, dim=-1)
        return x * cos + torch.cat((-b, a), dim=-1) * sin


class PlainDecoder(nn.Module):
    """Logits of the next token, layer by layer."""

    def __init__(self, shape: Shape, activation: str) -> None:
        super().__init__()
        self.embedding = nn.Embedding(shape.vocab_size, shape.d_model)
        self.blocks = nn.ModuleList(
            PlainBlock(shape.d_model, shape.d_head, shape.d_ff, activation) for _ in range(shape.n_layer)
        )
        self.norm = nn.RMSNorm(shape.d_model, eps=1e-5)
        self.unembedding = nn.Linear(shape.d_model, shape.vocab_size, bias=False)
        half = shape.d_head // 2
        angles = torch.arange(shape.sequence_len)[:, None] * 10_000.0 ** (-torch.arange(half) / half)
        self.register_buffer("cos", angles.cos().repeat(1, 2))
        self.register_buffer("sin", angles.sin().repeat(1, 2))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        device = x.device.type
        dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else x.dtype
        cos, sin = self.cos.to(dtype), self.sin.to(dtype)
        for block in self.blocks:
            x = block(x, cos, sin)
        return self.unembedding(self.norm(x))


def plain_loop(shape: Shape, bf16: bool, activation: str, compiled: bool = False) -> Loop:
    """The hand-written decoder in a hand-written loop."""
    model = PlainDecoder(shape, activation).to(DEVICE)
    if compiled:
        model.compile()
    return torch_loop(model, lambda x, y: next_token_loss(model(x), y), shape, bf16)


def hf_loop(shape: Shape, bf16: bool, activation: str) -> Loop:
    """transformers' Llama; the loss is its own."""
    from transformers import LlamaConfig, LlamaForCausalLM

    heads = shape.d_model // shape.d_head
    config = LlamaConfig(
        vocab_size=shape.vocab_size,
        hidden_size=shape.d_model,
        intermediate_size=shape.d_ff,
        num_hidden_layers=shape.n_layer,
        num_attention_heads=heads,
        num_key_value_heads=heads,
        max_position_embeddings=shape.sequence_len,
        tie_word_embeddings=False,
        use_cache=False,
        bos_token_id=0,
        eos_token_id=1,
    )
    model = LlamaForCausalLM(config).to(DEVICE)
    return torch_loop(model, lambda x, y: model(input_ids=x, labels=x, shift_labels=y.contiguous()).loss, shape, bf16)


def litgpt_loop(shape: Shape, bf16: bool, activation: str) -> Loop:
    """litgpt's GPT in Llama's shape."""
    from litgpt.config import Config  # type: ignore[import-not-found]
    from litgpt.model import GPT  # type: ignore[import-not-found]

    config = Config(
        block_size=shape.sequence_len,
        vocab_size=shape.vocab_size,
        padded_vocab_size=shape.vocab_size,
        n_layer=shape.n_layer,
        n_head=shape.d_model // shape.d_head,
        n_embd=shape.d_model,
        rotary_percentage=1.0,
        parallel_residual=False,
        bias=False,
        norm_class_name="RMSNorm",
        mlp_class_name="LLaMAMLP",
        intermediate_size=shape.d_ff,
    )
    model = GPT(config).to(DEVICE)
    return torch_loop(model, lambda x, y: next_token_loss(model(x), y), shape, bf16)


def next_token_loss(logits: Any, targets: Any) -> Any:
    """Mean cross-entropy in float32."""
    return F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())


def torch_loop(model: Any, loss_of: Callable[[Any, Any], Any], shape: Shape, bf16: bool) -> Loop:
    """The loop one writes: autocast, backward, clip, fused AdamW."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, betas=(0.9, 0.95), weight_decay=0.0, fused=True)
    tokens = random_tokens(shape)

    def loop(on_step: Callable[[], None]) -> None:
        while True:
            optimizer.zero_grad(set_to_none=True)
            with torch.autocast(DEVICE, torch.bfloat16, enabled=bf16):
                loss = loss_of(tokens[:, :-1], tokens[:, 1:])
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            on_step()

    return loop


def our_loop(shape: Shape, bf16: bool, activation: str, engine: str) -> Loop:
    """The package's module under Lightning, with what `mutransformer fit` puts around it."""
    from lightning.pytorch import Callback, Trainer

    from mutransformer import DecoderModule, ScheduleConfig
    from mutransformer.training.callbacks import DetectNonFinite, StopOnSignal
    from mutransformer.training.engine import engine_options
    from mutransformer.training.run_checkpoint import RunCheckpoint
    from mutransformer.training.run_folder import RunLogger
    from mutransformer.training.run_metrics import Metrics

    config = DecoderConfig(
        d_model=shape.d_model,
        n_layer=shape.n_layer,
        d_head=shape.d_head,
        ff_multiple=shape.ff_multiple,
        sequence_len=shape.sequence_len,
        vocab_size=shape.vocab_size,
        activation=activation,
    )
    module = DecoderModule(
        config,
        ParametrizationConfig(),
        OptimizerConfig(learning_rate=LEARNING_RATE),
        ScheduleConfig(total_steps=10**6),
        gradient_clip=1.0,
        compile=engine == "compile",
    )
    batch = {"tokens": random_tokens(shape)}

    def loop(on_step: Callable[[], None]) -> None:
        class OnStep(Callback):
            def on_train_batch_end(self, *args: Any) -> None:
                if engine == "xla":
                    import torch_xla.core.xla_model as xm

                    xm.wait_device_ops()
                on_step()

        options: dict[str, Any] = {"accelerator": DEVICE, "devices": 1, **engine_options(DEVICE, "auto")}
        if engine == "xla":
            from mutransformer.xla.strategy import SPMDStrategy

            options = engine_options("xla", SPMDStrategy(1, 1))
        with tempfile.TemporaryDirectory() as folder:
            checkpoint = RunCheckpoint(every_n_steps=0, save_best=False)
            trainer = Trainer(
                max_steps=10**6,
                precision="bf16-mixed" if bf16 else "32-true",
                logger=RunLogger(folder),
                callbacks=[Metrics(), DetectNonFinite(checkpoint), StopOnSignal(checkpoint), OnStep()],
                enable_model_summary=False,
                enable_checkpointing=False,
                log_every_n_steps=10,
                limit_val_batches=0,
                **options,
            )
            trainer.fit(module, Endless(batch))

    return loop


class Endless:
    """The same batch for ever."""

    def __init__(self, batch: Any) -> None:
        self.batch = batch

    def __iter__(self) -> Iterator[Any]:
        while True:
            yield self.batch


def random_tokens(shape: Shape) -> Any:
    """The same for every contender: int64 [n_rows, sequence_len + 1]."""
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(shape.vocab_size, (shape.n_rows, shape.sequence_len + 1), generator=generator)
    return tokens.to(DEVICE)


def make_loop(contender: str, shape: Shape, bf16: bool, activation: str) -> Loop:
    """A contender by its name."""
    if contender in OURS:
        return our_loop(shape, bf16, activation, contender)
    if contender == "compiled":
        return plain_loop(shape, bf16, activation, compiled=True)
    return {"plain": plain_loop, "hf": hf_loop, "litgpt": litgpt_loop}[contender](shape, bf16, activation)


# ---------------------------------------------------------------------------------------------------------------------
# worker: one contender, which steps when told to
# ---------------------------------------------------------------------------------------------------------------------


def work(contender: str, shape: Shape, bf16: bool, activation: str, threads: int | None) -> None:
    """Trains; after the warm-up, a line `N` on standard input asks for N steps and is answered by a line of JSON."""
    answers, sys.stdout = sys.stdout, sys.stderr
    if threads:
        torch.set_num_threads(threads)
    torch.manual_seed(0)
    start = [time.perf_counter(), time.process_time()]
    asked, done, first_s = WARMUP, 0, 0.0

    def on_step() -> None:
        nonlocal asked, done, first_s
        done += 1
        if not first_s:
            first_s = time.perf_counter() - start[0]
        if done < asked:
            return
        if DEVICE == "cuda":
            torch.cuda.synchronize()
        now = time.perf_counter(), time.process_time()
        peak = torch.cuda.max_memory_allocated() / 2**20 if DEVICE == "cuda" else peak_resident_mb()
        result = {"wall_s": now[0] - start[0], "cpu_s": now[1] - start[1], "first_s": first_s, "peak_mb": peak}
        print(json.dumps(result), file=answers, flush=True)
        line = sys.stdin.readline()
        if not line.strip():
            os._exit(0)
        asked, done = int(line), 0
        start[:] = time.perf_counter(), time.process_time()

    make_loop(contender, shape, bf16, activation)(on_step)


def peak_resident_mb() -> float:
    """Of this process so far."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / (2**20 if sys.platform == "darwin" else 2**10)


class Worker:
    """A contender's process, warmed up."""

    def __init__(self, contender: str, shape: Shape, bf16: bool, options: argparse.Namespace) -> None:
        self.contender, self.bf16, self.n_tokens = contender, bf16, shape.n_rows * shape.sequence_len
        command = [sys.executable, __file__, "--work", contender, json.dumps(shape), "bf16" if bf16 else "fp32"]
        command += [
            "--activation",
            options.activation,
            *(["--threads", str(options.threads)] if options.threads else []),
        ]
        environment = {
            **os.environ,
            "BENCHMARK_DEVICE": options.device,
            "PJRT_DEVICE": "CPU",
            "CPU_NUM_DEVICES": "1",
            "TF_CPP_MIN_LOG_LEVEL": "2",
        }
        environment["TORCHINDUCTOR_FORCE_DISABLE_CACHES"] = "1"  # compile seconds are those of a first run
        self.log = tempfile.TemporaryFile("w+")  # noqa: SIM115  # as long as the process
        self.process = subprocess.Popen(
            command, env=environment, text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self.log
        )
        self.rounds: list[dict[str, float]] = []
        self.first_s = self._answer()["first_s"]

    def run(self, n_steps: int) -> None:
        """One round."""
        assert self.process.stdin is not None
        print(n_steps, file=self.process.stdin, flush=True)
        answer = self._answer()
        self.rounds.append({**answer, "step_s": answer["wall_s"] / n_steps, "cpu_step_s": answer["cpu_s"] / n_steps})

    def _answer(self) -> dict[str, float]:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            self.log.seek(0)
            raise RuntimeError(f"{self.contender} ended: {self.log.read()[-2000:]}")
        return json.loads(line)

    def result(self) -> dict[str, Any]:
        """Medians over the rounds, and ends the process."""
        self.process.communicate("\n")
        step_s = statistics.median(r["step_s"] for r in self.rounds)
        return {
            "contender": self.contender,
            "precision": "bf16" if self.bf16 else "fp32",
            "tokens_per_s": self.n_tokens / step_s,
            "cpu_s_per_step": statistics.median(r["cpu_step_s"] for r in self.rounds),
            "peak_mb": self.rounds[-1]["peak_mb"],
            "compile_s": max(0.0, self.first_s - step_s) if self.contender in ("compiled", "compile", "xla") else 0.0,
            "step_s": [r["step_s"] for r in self.rounds],
        }


# ---------------------------------------------------------------------------------------------------------------------


def run_rounds(workers: list[Worker], options: argparse.Namespace) -> list[dict[str, Any]]:
    """Rounds in turn; ends the workers."""
    for _ in range(options.rounds):
        for worker in workers:
            worker.run(options.steps)
    return [worker.result() for worker in workers]


def flops_of(shape: Shape, activation: str) -> float:
    """FLOPs a token of a step, with causal attention."""
    names = ("d_model", "n_layer", "d_head", "sequence_len", "vocab_size", "ff_multiple")
    config = DecoderConfig(**{name: getattr(shape, name) for name in names}, activation=activation)  # type: ignore[arg-type]
    return flops_per_token(config, config.plan(ParametrizationConfig(), OptimizerConfig()))


def compare(name: str, options: argparse.Namespace) -> list[dict[str, Any]]:
    """All contenders at one shape, interleaved on CPU; prints a table."""
    shape = {**SHAPES, **GPU_SHAPES}[name]
    results = []
    for precision in options.precisions:  # one after the other, so that memory holds all processes of a round
        workers = []
        for contender in options.contenders:
            if contender in GATED_ONLY and options.activation != "swiglu":
                continue
            if contender == "litgpt" and importlib.util.find_spec("litgpt") is None:
                print("litgpt is not installed: left out", file=sys.stderr)
                continue
            workers.append(Worker(contender, shape, precision == "bf16", options))
            if options.device == "cuda":  # whose memory does not hold them all, and whose clock is steady
                results += run_rounds([workers.pop()], options)
        results += run_rounds(workers, options)
    peak = options.device == "cuda" and gpu_peak(torch.cuda.get_device_name(), torch.bfloat16)
    fastest_peer = max((r["tokens_per_s"] for r in results if r["contender"] in PEERS), default=float("nan"))
    print(f"\n{name}: {shape}, {options.activation}")
    print(
        f"{'':14} {'tokens/s':>9} {'to plain':>9} {'to fastest':>11} "
        f"{'CPU s/step':>11} {'peak MB':>8} {'compile s':>10}{'    MFU' if peak else ''}"
    )
    for r in results:
        plain = (p for p in results if p["contender"] == "plain" and p["precision"] == r["precision"])
        plain_rounds = next(plain, r)["step_s"]
        r["to_plain"] = statistics.median(p / o for p, o in zip(plain_rounds, r["step_s"], strict=True))
        r["to_fastest_peer"] = r["tokens_per_s"] / fastest_peer
        print(
            f"{r['contender']:9}{r['precision']:5} {r['tokens_per_s']:9,.0f} {r['to_plain']:9.3f} "
            f"{r['to_fastest_peer']:11.3f} {r['cpu_s_per_step']:11.3f} {r['peak_mb']:8,.0f} {r['compile_s']:10.1f}"
            + (f" {r['tokens_per_s'] * flops_of(shape, options.activation) / peak:6.1%}" if peak else ""),
            flush=True,
        )
    return results


def main() -> None:
    """Runs the benchmark, or one of its workers."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", nargs="+", choices=[*SHAPES, *GPU_SHAPES])
    parser.add_argument("--contenders", nargs="+", choices=(*PEERS, *OURS), default=[*PEERS, *OURS])
    parser.add_argument("--precisions", nargs="+", choices=("fp32", "bf16"), default=["fp32", "bf16"])
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--activation", choices=("swiglu", "relu"), default="swiglu")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=4, help="steps a round")
    parser.add_argument("--threads", type=int, help="of torch; default: its own choice")
    parser.add_argument("--json", type=Path, help="write the figures there")
    parser.add_argument("--work", nargs=3, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.work:
        contender, shape, precision = options.work
        work(contender, Shape(*json.loads(shape)), precision == "bf16", options.activation, options.threads)
        return
    shapes = options.shapes or (GPU_SHAPES if options.device == "cuda" else SHAPES)
    found = {name: compare(name, options) for name in shapes}
    if options.json:
        options.json.write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
