"""The LightningModule: wires the decoder, the plan's optimizer, the schedule and the loss. One batch is one step."""

from __future__ import annotations

import dataclasses
import platform
from collections.abc import Callable, Mapping
from typing import Any, Literal, cast

import lightning
import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.core.optimizer import LightningOptimizer
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

import mutransformer
from mutransformer.errors import ConfigError, NonFiniteError
from mutransformer.model.config import DecoderConfig
from mutransformer.model.decoder import Decoder
from mutransformer.mup.config import OptimizerConfig, ParametrizationConfig, RoleMultipliers
from mutransformer.mup.init import initialize
from mutransformer.mup.plan import Plan
from mutransformer.training.allocator import keep_freed_memory
from mutransformer.training.metrics import TokenMean
from mutransformer.training.optimizer import build_optimizer, clip_by_global_norm
from mutransformer.training.schedule import ScheduleConfig, schedule_factor

Batch = Mapping[str, torch.Tensor]

# settings of other sections that a module takes as arguments: nobody types them twice
LINKED_SETTINGS: Mapping[str, str] = {
    "seed_everything": "model.seed",
    "data.sequence_len": "model.decoder.sequence_len",
    "trainer.max_steps": "model.schedule.total_steps",
    "trainer.accumulate_grad_batches": "model.n_micro_batch",
    "trainer.gradient_clip_val": "model.gradient_clip",
}
# of these, what Lightning's Trainer must not see: one batch is one step, split and clipped by the module
NOT_FOR_TRAINER = ("accumulate_grad_batches", "gradient_clip_val")

# settings of the decoder that weights do not depend on
HOW_LAYERS_RUN = ("scan_layers", "remat")

# trainer.precision -> dtype the model computes in; masters keep theirs (float32, float64 under 64-true)
COMPUTE_DTYPES: Mapping[str, torch.dtype | None] = {"32-true": None, "64-true": None, "bf16-mixed": torch.bfloat16}


def compute_dtype(precision: object) -> torch.dtype | None:
    """The dtype that the model computes in under a `trainer.precision`; None: that of its masters.

    Raises:
        ConfigError: a precision that would not keep float32 masters with the casts this model makes.
    """
    aliases = {"None": "32-true", "32": "32-true", "64": "64-true"}
    name = aliases.get(str(precision), str(precision))
    if name not in COMPUTE_DTYPES:
        raise ConfigError(
            "trainer.precision",
            precision,
            "would not keep float32 masters with the casts this model makes",
            f"use one of {', '.join(COMPUTE_DTYPES)}",
        )
    return COMPUTE_DTYPES[name]


class DecoderModule(LightningModule):
    """A muP decoder to be trained by `lightning.Trainer`.

    A batch is one optimizer step: `{"tokens": int64 [B, L + 1]}` with inputs `[:, :-1]` and targets `[:, 1:]`;
    optionally `"mask"` [B, L], 1 where a target counts, and `"positions"` [B, L], which start again at 0 in each
    document, if attention is to stay within documents.

    Args:
        decoder: shape of the decoder.
        parametrization: rules for initialization, multipliers and learning rates.
        optimizer: update rule at the base width.
        schedule: factor on the learning rates over the run.
        seed: of the initialization; linked to seed_everything.
        n_micro_batch: parts that each batch is split into, one after the other, to save memory; the gradient is that
            of the whole batch. Linked to trainer.accumulate_grad_batches.
        gradient_clip: largest global norm of the gradient; null: no clipping. Linked to trainer.gradient_clip_val.
        loss_mean_over: what the objective's sum is divided by: `targets` that count, or all `positions` (the
            reference's objective, smaller where targets are masked).
        compile: have torch.compile make the code of a layer, half a minute before the first step.
    """

    def __init__(
        self,
        decoder: DecoderConfig,
        parametrization: ParametrizationConfig,
        optimizer: OptimizerConfig,
        schedule: ScheduleConfig,
        seed: int = 0,
        n_micro_batch: int = 1,
        gradient_clip: float | None = None,
        loss_mean_over: Literal["targets", "positions"] = "targets",
        compile: bool = False,
    ) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.config = {
            "decoder": _as_config(DecoderConfig, decoder),
            "parametrization": _as_config(ParametrizationConfig, parametrization),
            "optimizer": _as_config(OptimizerConfig, optimizer),
            "schedule": _as_config(ScheduleConfig, schedule),
        }
        self.optimizer_config: OptimizerConfig = self.config["optimizer"]
        self.schedule: ScheduleConfig = self.config["schedule"]
        self.plan = self.config["decoder"].plan(self.config["parametrization"], self.optimizer_config)
        self.seed = seed
        self.n_micro_batch = n_micro_batch
        self.gradient_clip = gradient_clip
        self.loss_mean_over = loss_mean_over
        self.compile_decoder = compile
        self.run_config: dict[str, Any] = {}
        self.decoder: Decoder = None  # type: ignore[assignment]  # made by configure_model
        self.initializer: Callable[[Mapping[str, torch.Tensor], Plan, int], None] = initialize
        self.val_loss = TokenMean()
        if n_micro_batch < 1:
            raise ConfigError("trainer.accumulate_grad_batches", n_micro_batch, "must be at least 1", "use 1")
        if compile and self.config["decoder"].remat == "dots":
            rule = "is not for model.decoder.remat=dots, which decides operator by operator what is kept"
            raise ConfigError("model.compile", compile, rule, "use remat none or block, or compile false")
        if gradient_clip is not None and not gradient_clip > 0:
            raise ConfigError("trainer.gradient_clip_val", gradient_clip, "must be above zero", "use 1.0, or null")

    @property
    def hyper_parameters(self) -> dict[str, Any]:
        """The constructor's arguments as plain values, as `load_from_checkpoint` reads them back."""
        return {
            **{name: dataclasses.asdict(config) for name, config in self.config.items()},
            "seed": self.seed,
            "n_micro_batch": self.n_micro_batch,
            "gradient_clip": self.gradient_clip,
            "loss_mean_over": self.loss_mean_over,
            "compile": self.compile_decoder,
        }

    def configure_model(self) -> None:
        """Makes and initializes the weights; before this the module is a plan alone."""
        if self.decoder is not None:
            return
        self.decoder = Decoder(self.config["decoder"], self.plan)
        self.initializer(dict(self.decoder.named_parameters()), self.plan, self.seed)
        if self.compile_decoder:
            self.decoder.compile_block()

    def setup(self, stage: str) -> None:
        dtype = compute_dtype(self.trainer.precision)
        self.configure_model()
        self.decoder.compute_dtype = dtype

    def forward(self, tokens_BL: torch.Tensor, *where: torch.Tensor | None) -> torch.Tensor:
        """Logits of the next token, see `Decoder.forward`: tokens_BL int64 -> logits_BLV in the compute dtype."""
        with _no_autocast(tokens_BL):
            return self.decoder(tokens_BL, *where)

    def loss_sum(self, batch: Batch) -> torch.Tensor:
        """Sum of the cross-entropy over the targets that count, in nats; a float32 (or wider) scalar."""
        tokens, positions_BL = batch["tokens"], batch.get("positions")
        document_BL = None if positions_BL is None else (positions_BL == 0).cumsum(1)
        with _no_autocast(tokens):
            return self.decoder.loss_sum(tokens[:, :-1], tokens[:, 1:], batch.get("mask"), positions_BL, document_BL)

    def training_step(self, batch: Batch, batch_idx: int) -> dict[str, torch.Tensor]:
        """One optimizer step over the whole batch, see `step_over`."""
        out = self.step_over(batch, cast(LightningOptimizer, self.optimizers()), self.manual_backward)
        cast(LambdaLR, self.lr_schedulers()).step()
        return out

    def step_over(
        self,
        batch: Batch,
        optimizer: Optimizer | LightningOptimizer,
        backward: Callable[[torch.Tensor], None] = torch.Tensor.backward,
    ) -> dict[str, torch.Tensor]:
        """Gradient, clipping and update; all of a step but the schedule, and without a Trainer.

        Args:
            batch: one step's.
            optimizer: of the decoder's parameters.
            backward: how gradients are computed from the objective.
        Returns:
            `loss`, the mean over the targets that count, and `grad_norm` before clipping; scalars on the device.
        """
        optimizer.zero_grad(set_to_none=True)
        n_targets, n_positions = _counts(batch)
        denominator = n_targets if self.loss_mean_over == "targets" else n_positions
        loss_sums = []
        for part in _split(batch, self.n_micro_batch):
            loss_sum = self.loss_sum(self._after_gradients(part) if loss_sums else part)
            with _no_autocast(part["tokens"]):
                backward(loss_sum / denominator)
            loss_sums.append(loss_sum.detach())
        grad_norm = clip_by_global_norm(self.decoder.parameters(), self.gradient_clip)
        optimizer.step()
        return {"loss": torch.stack(loss_sums).sum() / n_targets, "grad_norm": grad_norm}

    def _after_gradients(self, part: Batch) -> Batch:
        """A micro-batch; on XLA one that cannot be begun before the gradients of those before it are added up.

        A whole step is one program there, whose compiler would add at the end and have many in memory until then.
        """
        if part["tokens"].device.type != "xla":
            return part
        from mutransformer.xla.runtime import after

        gradients = [parameter.grad for parameter in self.decoder.parameters() if parameter.grad is not None]
        return dict(zip(part, after(gradients, part.values()), strict=True))

    def validation_step(self, batch: Batch, batch_idx: int) -> dict[str, Any]:
        """Sum of the losses and number of targets, which are added up once the step is sent to the device."""
        n_targets, _ = _counts(batch)
        return {"loss_sum": self.loss_sum(batch), "n_targets": n_targets}

    def test_step(self, batch: Batch, batch_idx: int) -> dict[str, Any]:
        return self.validation_step(batch, batch_idx)

    def on_validation_batch_end(self, outputs: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        self.val_loss.update(**outputs)

    def on_test_batch_end(self, outputs: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        self.val_loss.update(**outputs)

    def configure_optimizers(self) -> dict[str, Any]:
        """The plan's groups, each named after its parameter, and the schedule that multiplies them all."""
        optimizer = build_optimizer(self.decoder.named_parameters(), self.plan, self.optimizer_config)
        scheduler = LambdaLR(optimizer, lambda step: schedule_factor(step, self.schedule))
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}

    def on_train_start(self) -> None:
        """Sets the learning rates of the first step by formula: a resumed run may have a longer schedule."""
        if self.device.type == "cpu":
            keep_freed_memory()
        scheduler = cast(LambdaLR, self.lr_schedulers())
        factor = schedule_factor(scheduler.last_epoch, self.schedule)
        for group, peak in zip(scheduler.optimizer.param_groups, scheduler.base_lrs, strict=True):
            group["lr"] = peak * factor

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Adds settings and versions, all plain values: the file loads with `weights_only=True`."""
        checkpoint["hyper_parameters"] = self.hyper_parameters
        checkpoint["mutransformer"] = {
            "config": self.run_config,
            "module": self.hyper_parameters,  # Lightning lets `load_from_checkpoint` write into the one above
            "versions": {
                "mutransformer": mutransformer.__version__,
                "torch": str(torch.__version__),
                "lightning": str(lightning.__version__),
                "python": platform.python_version(),
            },
        }

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Refuses weights of another shape or parametrization by the setting that differs, before one is copied.

        Raises:
            ConfigError: e.g. the checkpoint has d_model 128 and 256 was asked for.
        """
        for section in ("decoder", "parametrization"):
            saved = checkpoint["mutransformer"]["module"][section]
            for name, value in dataclasses.asdict(self.config[section]).items():
                if name not in HOW_LAYERS_RUN and saved.get(name, value) != value:
                    raise ConfigError(
                        f"model.{section}.{name}",
                        value,
                        f"checkpoint has {name} {saved[name]}, you asked for {value}",
                        f"use {saved[name]}, or leave it out",
                    )
        self.configure_model()


def _no_autocast(tokens: torch.Tensor) -> torch.autocast:
    """The decoder casts by itself, the same on every engine; Lightning's mixed precision would cast once more."""
    return torch.autocast(tokens.device.type, enabled=False)


def check_finite(state_dict: Mapping[str, Any]) -> None:
    """Raises NonFiniteError naming a tensor of a checkpoint that holds NaN or infinity."""
    for name, tensor in state_dict.items():
        is_finite = tensor.isfinite().all() if isinstance(tensor, torch.Tensor) else tensor.is_finite()
        if not is_finite:
            raise NonFiniteError(f"parameter {name.removeprefix('decoder.')} is not finite")


def _as_config(cls: type, value: Any) -> Any:
    """A config object, also from the plain dict that a checkpoint holds."""
    if not isinstance(value, Mapping):
        return value
    nested = {name: RoleMultipliers(**item) if isinstance(item, Mapping) else item for name, item in value.items()}
    return cls(**nested)


def _counts(batch: Batch) -> tuple[torch.Tensor | int, int]:
    """(number of targets that count, number of positions)."""
    n_positions = batch["tokens"][:, 1:].numel()
    return (batch["mask"].sum() if "mask" in batch else n_positions), n_positions


def _split(batch: Batch, n_parts: int) -> list[Batch]:
    """Parts of nearly equal rows, every n-th row: where rows are cut over devices, each device splits its own."""
    if n_parts == 1:
        return [batch]
    n_rows = len(batch["tokens"])
    if n_rows < n_parts:
        raise ConfigError(
            "trainer.accumulate_grad_batches", n_parts, f"a batch has {n_rows} sequences to split", f"use {n_rows}"
        )
    # a view rather than a slice with a step, for which rows would be sent from device to device
    is_even = n_rows % n_parts == 0
    parts = {
        name: tensor.unflatten(0, (-1, n_parts)).unbind(1) if is_even else [tensor[i::n_parts] for i in range(n_parts)]
        for name, tensor in batch.items()
    }
    return [{name: chunks[i] for name, chunks in parts.items()} for i in range(n_parts)]
