"""The training step through Lightning against plain PyTorch loops, interleaved in one process.

    python benchmarks/step.py [--d_model 128] [--n_layer 4] [--rounds 5] [--steps 12] [--compile] [--bf16]

Three contenders over the same shapes and random tokens:
    plain      hand-written nn.Module (nn.Linear, a module a layer), torch's AdamW with one group, no Lightning
    decoder    the package's Decoder and optimizer in a bare loop
    lightning  the package's DecoderModule under lightning.Trainer, as `mutransformer fit` runs it

Prints tokens/s and CPU seconds a step (medians over rounds), each as a ratio to `plain`, and peak memory.
"""

from __future__ import annotations

import argparse
import resource
import statistics
import tempfile
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.loggers import CSVLogger
from torch import nn

from mutransformer import DecoderConfig, DecoderModule, OptimizerConfig, ParametrizationConfig, ScheduleConfig
from mutransformer.model.loss import cross_entropy_sum
from mutransformer.model.rotary import rotary_table, rotate
from mutransformer.training.callbacks import DetectNonFinite, StopOnSignal
from mutransformer.training.optimizer import build_optimizer, clip_by_global_norm
from mutransformer.training.run_checkpoint import RunCheckpoint
from mutransformer.training.run_metrics import Metrics


class PlainBlock(nn.Module):
    """A pre-norm block as one would write it by hand."""

    def __init__(self, d_model: int, d_head: int) -> None:
        super().__init__()
        self.d_head = d_head
        self.query, self.key, self.value, self.out = (nn.Linear(d_model, d_model, bias=False) for _ in range(4))
        self.up, self.down = nn.Linear(d_model, 4 * d_model, bias=False), nn.Linear(4 * d_model, d_model, bias=False)

    def forward(self, x: torch.Tensor, rotary: torch.Tensor) -> torch.Tensor:
        batch, length, width = x.shape
        h = F.rms_norm(x, (width,), eps=1e-5)
        q, k, v = (
            p(h).view(batch, length, -1, self.d_head).transpose(1, 2) for p in (self.query, self.key, self.value)
        )
        q, k = rotate(q, rotary), rotate(k, rotary)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=1 / self.d_head)
        x = x + self.out(mixed.transpose(1, 2).reshape(batch, length, width))
        return x + self.down(F.relu(self.up(F.rms_norm(x, (width,), eps=1e-5))))


class PlainDecoder(nn.Module):
    """The same decoder, layer by layer."""

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        self.config = config
        self.embedding = nn.Embedding(config.vocab_size, config.d_model)
        self.blocks = nn.ModuleList(PlainBlock(config.d_model, config.d_head) for _ in range(config.n_layer))
        self.unembedding = nn.Linear(config.d_model, config.vocab_size, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        rotary = rotary_table(torch.arange(tokens.shape[1]), self.config.d_head, 10_000.0, torch.float32)
        if torch.is_autocast_enabled("cpu"):
            rotary = rotary.bfloat16()
        for block in self.blocks:
            x = block(x, rotary)
        return self.unembedding(F.rms_norm(x, (self.config.d_model,), eps=1e-5))


class Clock(Callback):
    """Wall and CPU seconds from the end of the warm-up steps to the last one."""

    def __init__(self, warmup: int) -> None:
        self.warmup = warmup
        self.start = self.stop = (0.0, 0.0)

    def on_train_batch_end(self, trainer: Trainer, *args: Any) -> None:
        self.stop = (time.perf_counter(), time.process_time())
        if trainer.global_step == self.warmup:
            self.start = self.stop


def main() -> None:
    """Runs the benchmark and prints its table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in {"d_model": 128, "n_layer": 4, "d_head": 64, "sequence_len": 256, "vocab_size": 384}.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--batch", type=int, default=16, help="sequences a step")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=12, help="steps a round that are timed, after 3 of warm-up")
    parser.add_argument("--compile", action="store_true", help="run all three through torch.compile")
    parser.add_argument("--bf16", action="store_true", help="compute in bfloat16 (plain: by autocast)")
    args = parser.parse_args()
    warmup = 3
    shape = {name: getattr(args, name) for name in ("d_model", "n_layer", "d_head", "sequence_len", "vocab_size")}
    config, optimizer_config = DecoderConfig(**shape), OptimizerConfig(learning_rate=1e-3)
    steps = warmup + args.steps
    tokens = torch.randint(args.vocab_size, (steps, args.batch, args.sequence_len + 1))

    def module() -> DecoderModule:
        schedule = ScheduleConfig(total_steps=steps)
        made = DecoderModule(
            config, ParametrizationConfig(), optimizer_config, schedule, gradient_clip=1.0, compile=args.compile
        )
        made.configure_model()
        return made

    def bare_loop(model: nn.Module, optimizer: torch.optim.Optimizer, autocast: bool) -> tuple[float, float]:
        start = (0.0, 0.0)
        for i, batch in enumerate(tokens):
            optimizer.zero_grad(set_to_none=True)
            with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
                logits = model(batch[:, :-1])
            loss = cross_entropy_sum(logits, batch[:, 1:]) / batch[:, 1:].numel()
            loss.backward()
            clip_by_global_norm(model.parameters(), 1.0)
            optimizer.step()
            if i + 1 == warmup:
                start = (time.perf_counter(), time.process_time())
        return time.perf_counter() - start[0], time.process_time() - start[1]

    plain_model, decoder_module, fitted_module = PlainDecoder(config), module(), module()
    if args.compile:
        plain_model.compile()
    if args.bf16:
        decoder_module.decoder.compute_dtype = torch.bfloat16

    def plain() -> tuple[float, float]:
        optimizer = torch.optim.AdamW(plain_model.parameters(), lr=1e-3, betas=(0.9, 0.95), weight_decay=0, fused=True)
        return bare_loop(plain_model, optimizer, args.bf16)

    def decoder() -> tuple[float, float]:
        model = decoder_module.decoder
        return bare_loop(model, build_optimizer(model.named_parameters(), decoder_module.plan, optimizer_config), False)

    def lightning() -> tuple[float, float]:
        clock, checkpoint = Clock(warmup), RunCheckpoint(every_n_steps=0, save_best=False)
        with tempfile.TemporaryDirectory() as folder:
            callbacks = [Metrics(), DetectNonFinite(checkpoint), StopOnSignal(checkpoint), clock]
            trainer = Trainer(
                max_steps=steps,
                accelerator="cpu",
                precision="bf16-mixed" if args.bf16 else "32-true",
                logger=CSVLogger(folder),
                callbacks=callbacks,
                enable_model_summary=False,
                enable_checkpointing=False,
                log_every_n_steps=10,
                limit_val_batches=0,
            )
            loader = torch.utils.data.DataLoader([{"tokens": batch} for batch in tokens], batch_size=None)
            trainer.fit(fitted_module, loader)
        return clock.stop[0] - clock.start[0], clock.stop[1] - clock.start[1]

    contenders: dict[str, Callable[[], tuple[float, float]]] = {
        "plain": plain,
        "decoder": decoder,
        "lightning": lightning,
    }
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in contenders}
    for _ in range(args.rounds):
        for name, run in contenders.items():
            times[name].append(run())
    n_tokens = args.batch * args.sequence_len
    print(f"\n{'':10} {'tokens/s':>10} {'ratio':>6} {'CPU s/step':>11} {'ratio':>6}")
    wall_0, cpu_0 = (statistics.median(column) for column in zip(*times["plain"], strict=True))
    for name, pairs in times.items():
        wall, cpu = (statistics.median(column) for column in zip(*pairs, strict=True))
        print(
            f"{name:10} {n_tokens * args.steps / wall:10,.0f} {wall_0 / wall:6.3f} "
            f"{cpu / args.steps:11.3f} {cpu / cpu_0:6.3f}"
        )
    print(f"peak memory {resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024:,.0f} MB")


if __name__ == "__main__":
    main()
