"""A run of lucaslingle/mu_transformer (main at 8c38b29) by the package: its settings, weights and batches in ours.

`map_config` maps every key of the reference's config, `LEAVES` every parameter; `run` trains through the package's own
module, optimizer, schedule and clipping under `lightning.pytorch.Trainer`, on the CPU. Read by reference_parity.py.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import Any, get_args

import numpy as np
import torch
from lightning.pytorch import Callback, Trainer

from mutransformer.model.config import Activation, DecoderConfig
from mutransformer.model.tap import recording
from mutransformer.mup.config import OptimizerConfig, ParametrizationConfig, RoleMultipliers
from mutransformer.training.module import DecoderModule
from mutransformer.training.schedule import ScheduleConfig

Arrays = Mapping[str, np.ndarray]
Settings = dict[str, Any]


class Mistake(Exception):
    """The file or its settings cannot be used: one line, exit code 2."""


# ---- settings: the reference's keys to ours -------------------------------------------------------------------------


def _activation(name: str, config: Settings) -> Settings:
    ours = {"swish": "silu", "hard_swish": "hard_silu"}.get(name, name)  # jax.nn has two names for these
    if ours not in get_args(Activation):
        raise Mistake(f"ff_act_name={name!r}: the package has {', '.join(get_args(Activation))}")
    return {"decoder.activation": ours}


def _ff_multiple(multiple: float, config: Settings) -> Settings:
    # abs_mup divides by d_model * ff_multiple, ours by the width that int() leaves of it
    exact = multiple * config["d_model"]
    factor = int(exact) / exact if config["optim_rule"] == "abs_mup" else 1.0
    return {"decoder.ff_multiple": multiple, "parametrization.lr_multiplier": RoleMultipliers(feedforward_out=factor)}


def _d_base(d_base: int, config: Settings) -> Settings:
    # The reference floors the width multiple and gives d_model's to ff out too. Ours is a real quotient, each tensor's
    # own: the base widths below give every tensor the reference's multiple.
    if config["optim_rule"] != "mup":
        return {}
    d_model = config["d_model"]
    if not 0 < d_base <= d_model:
        raise Mistake(f"d_base={d_base!r}: the reference divides by d_model // d_base, which must not be 0")
    ff_multiple = int(config["ff_multiple"] * d_model) / d_model
    return {"parametrization.d_base": d_model / (d_model // d_base), "parametrization.ff_multiple_base": ff_multiple}


def _attention(activation: str, **normalization: str) -> Settings:
    return {"decoder.attention_activation": activation, **normalization}


_LENGTH, _SUM = ({"decoder.attention_normalization": name} for name in ("length", "sum"))

# The reference's key -> (its default, where it goes): one of our settings by name, or each legal value with what it
# means here, or a function of the value and the whole config.
MAPPING: Mapping[str, tuple[Any, str | Mapping[Any, Settings] | Callable[[Any, Settings], Settings]]] = {
    "attn_act_name": (
        "softmax",
        {
            "softmax": _attention("softmax"),
            "sqrelu": _attention("sqrelu", **_LENGTH),
            "elu": _attention("elu", **_LENGTH),
            "norm_sqrelu": _attention("sqrelu", **_SUM),
            "norm_elu": _attention("elu", **_SUM),
        },
    ),
    "d_base": (128, _d_base),
    "d_head": (128, "decoder.d_head"),
    "d_model": (1024, "decoder.d_model"),
    "dtype": ("bfloat16", {"float32": {"run.precision": "32-true"}, "bfloat16": {"run.precision": "bf16-mixed"}}),
    "e_norm": (False, "decoder.embedding_norm"),
    "ff_act_name": ("relu", _activation),
    "ff_multiple": (4.0, _ff_multiple),
    "grad_acc_steps": (1, "module.n_micro_batch"),
    "grad_clip": (1.0, lambda norm, config: {"module.gradient_clip": norm if norm > 0 else None}),
    "kv_mqa": (False, {False: {"decoder.n_kv_head": None}, True: {"decoder.n_kv_head": 1}}),
    "lr_base": (1.0, "optimizer.learning_rate"),
    "lr_schedule_name": ("linear", {kind: {"schedule.kind": kind} for kind in ("linear", "cosine")}),
    "n_layer": (24, "decoder.n_layer"),
    "n_pretrain_step": (125_000, "schedule.total_steps"),
    "n_warmup_step": (10_000, "schedule.warmup_steps"),
    "norm_eps": (1e-5, "decoder.norm_eps"),
    "norm_gains": (False, lambda has, config: {"decoder.norm_gains": config["norm_gains_type"] if has else "none"}),
    "norm_gains_type": ("vector", {"vector": {}, "scalar": {}}),  # read with norm_gains
    "optim_beta1": (0.9, "optimizer.beta1"),
    "optim_beta2": (0.95, "optimizer.beta2"),
    "optim_eps": (1e-8, "optimizer.eps"),
    "optim_name": ("adamw", {name: {"optimizer.algorithm": name} for name in ("adamw", "lion")}),
    "optim_rule": (
        "mup",
        {
            name: {"parametrization.rules": rules}
            for name, rules in (("mup", "mup"), ("abs_mup", "mup_absolute"), ("sp", "sp"))
        },
    ),
    "param_dtype": ("float32", {"float32": {}}),
    "proj_biases": (False, "decoder.projection_biases"),
    "q_init": ("vs", {"vs": {}, "zero": {"parametrization.query_init": "zero"}}),
    "qk_norm": (False, "decoder.qk_norm"),
    "qk_scale": (1 / 128, "parametrization.qk_scale"),
    "r_init": ("vs", {"vs": {}, "zero": {"parametrization.residual_init": "zero"}}),
    "rotary_base": (10_000, "decoder.rotary_base"),
    "sequence_len": (256, "decoder.sequence_len"),
    "u_init": ("mup", {name: {"parametrization.unembedding_init": name} for name in ("mup", "sp", "zero")}),
    "use_eps_scaling": (False, "optimizer.scale_eps"),
    "use_iwd": (False, {False: {"optimizer.decay": "coupled"}, True: {"optimizer.decay": "independent"}}),
    "wd": (0.0, "optimizer.weight_decay"),
    # of the tokenizer in the reference, so not in its config; a file may give them
    "bos_token_id": (0, "run.bos"),
    "eos_token_id": (1, "run.eos"),
    "pad_token_id": (1, "run.pad"),
}

# Nothing here changes what a step computes from given tokens.
NO_EFFECT = {
    "data": "force_download hfds_buffer_size hfds_config hfds_datacol hfds_identifier hftr_tokenizer_instance "
    "hftr_tokenizer_name n_ds_shard tokens_per_global_batch",
    "mesh": "n_mesh_cols n_mesh_rows",
    "sampling": "sampling_max_len sampling_method sampling_nucleus sampling_prompt_len sampling_temp sampling_topk",
    "other loops, logging, saving": "is_sweep n_eval_step n_finetune_step n_print_step n_save_step no_checkpoint "
    "sow_intermediates sow_param_info",
}


def _kind(value: Any) -> str:
    return "number" if isinstance(value, int | float) and not isinstance(value, bool) else type(value).__name__


def map_config(config: Settings) -> dict[str, Settings]:
    """The reference's settings as ours, by section; a key that is not given has the reference's default.

    Raises:
        Mistake: a key or a value that the mapping does not know, by name.
    """
    for key in config:
        if key not in MAPPING and not any(key in keys.split() for keys in NO_EFFECT.values()):
            raise Mistake(f"unknown key {key!r} in the config")
    full = {key: config.get(key, default) for key, (default, _) in MAPPING.items()}
    for key, (default, _) in MAPPING.items():
        if _kind(full[key]) != _kind(default):
            raise Mistake(f"{key}={full[key]!r}: must be a {_kind(default)}")
    sections: dict[str, Settings] = {name: {} for name in ("decoder", "optimizer", "schedule", "run")}
    sections["parametrization"] = {"weight_decay_multiplier": RoleMultipliers()}  # gains and biases decay as well
    sections["module"] = {"loss_mean_over": "positions"}
    for key, (_, target) in MAPPING.items():
        value = full[key]
        if isinstance(target, Mapping) and value not in target:
            raise Mistake(f"{key}={value!r}: known are {', '.join(map(repr, target))}")
        if isinstance(target, str):
            settings = {target: value}
        else:
            settings = target[value] if isinstance(target, Mapping) else target(value, full)
        for name, setting in settings.items():
            section, _, option = name.partition(".")
            sections[section][option] = setting
    return sections


# ---- weights: the reference's leaves to our parameters --------------------------------------------------------------

# leaf -> (its axes in our order, our names; where there are two it holds both, one after the other on its last axis)
LEAVES: Mapping[str, tuple[tuple[int, ...], tuple[str, ...]]] = {
    "w_e": ((0, 1), ("embedding",)),
    "w_aq": ((0, 2, 3, 1), ("w_query",)),
    "w_ak": ((0, 2, 3, 1), ("w_key",)),
    "w_av": ((0, 2, 3, 1), ("w_value",)),
    "w_ao": ((0, 3, 1, 2), ("w_attention_out",)),
    "w_fi": ((0, 2, 1), ("w_ff_gate", "w_ff_in")),
    "w_fo": ((0, 2, 1), ("w_ff_out",)),
    "w_u": ((1, 0), ("unembedding",)),
    "b_aq": ((0, 1, 2), ("b_query",)),
    "b_ak": ((0, 1, 2), ("b_key",)),
    "b_av": ((0, 1, 2), ("b_value",)),
    "b_ao": ((0, 1), ("b_attention_out",)),
    "b_fi": ((0, 1), ("b_ff_gate", "b_ff_in")),
    "b_fo": ((0, 1), ("b_ff_out",)),
    "b_u": ((0,), ("b_unembedding",)),
    "g_e": ((0,), ("gain_embedding",)),
    "g_a": ((0, 1), ("gain_attention",)),
    "g_aq": ((0, 1), ("gain_query",)),
    "g_ak": ((0, 1), ("gain_key",)),
    "g_f": ((0, 1), ("gain_feedforward",)),
    "g_u": ((0,), ("gain_final",)),
}


def to_reference(tensors: Mapping[str, torch.Tensor]) -> dict[str, np.ndarray]:
    """Our parameters, or their gradients, as the reference's leaves in its layout; always copies."""
    leaves = {}
    for leaf, (order, names) in LEAVES.items():
        parts = [tensors[name].detach().numpy().transpose(np.argsort(order)) for name in names if name in tensors]
        if parts:
            leaves[leaf] = np.concatenate(parts, axis=-1)
    return leaves


@torch.no_grad()
def load_leaves(parameters: Mapping[str, torch.Tensor], leaves: Arrays) -> None:
    """Copies the reference's leaves into our parameters; the others stay as they are."""
    shapes = {leaf: array.shape for leaf, array in to_reference(parameters).items()}
    for leaf, array in leaves.items():
        if array.shape != shapes.get(leaf):
            raise Mistake(f"init/{leaf}: shape {array.shape}, the config asks for {shapes.get(leaf, 'no such leaf')}")
        order, names = LEAVES[leaf]
        names = [name for name in names if name in parameters]
        for name, part in zip(names, np.split(array, len(names), axis=-1), strict=True):
            parameters[name].copy_(torch.from_numpy(part.transpose(order).copy()))


# What the reference calls the statistics of its forward pass; each is a mean |.| of a layer.
TAPS = {
    "ax": "attention_input",
    "aq": "query",
    "ak": "key",
    "av": "value",
    "aqr": "query_rotated",
    "akr": "key_rotated",
    "as": "scores",
    "ap": "weights",
    "ao": "attention_mixed",
    "ar": "attention_output",
    "fx": "feedforward_input",
    "fh": "feedforward_hidden",
    "fa": "feedforward_activation",
    "fr": "feedforward_output",
}


# ---- a run of the package -------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Case:
    """A run: our settings by section, the reference's initial leaves, its tokens [batches, B, T]."""

    settings: dict[str, Settings]
    init: Arrays
    tokens: np.ndarray

    def batch(self, tokens: np.ndarray) -> dict[str, torch.Tensor]:
        """Tokens [B, T] as the module takes them: bos in front, and the mask."""
        run = self.settings["run"]
        tokens = tokens.astype(np.int64)
        with_bos = np.pad(tokens, ((0, 0), (1, 0)), constant_values=run["bos"])
        mask = loss_mask(tokens, run["eos"], run["pad"])
        return {"tokens": torch.from_numpy(with_bos), "mask": torch.from_numpy(mask)}

    def module(self) -> DecoderModule:
        """The package's module with the initial weights, in float32."""
        s = self.settings
        parametrization, optimizer = ParametrizationConfig(**s["parametrization"]), OptimizerConfig(**s["optimizer"])
        schedule = ScheduleConfig(**s["schedule"])
        module = DecoderModule(DecoderConfig(**s["decoder"]), parametrization, optimizer, schedule, **s["module"])
        module.configure_model()
        load_leaves(dict(module.decoder.named_parameters()), self.init)
        return module

    def evaluator(self, float64: bool) -> DecoderModule:
        """The module for use outside a Trainer, without gradients."""
        module = self.module().requires_grad_(False)
        return module.double() if float64 else module


def make_case(config: Settings, init: Arrays, tokens: np.ndarray | None) -> Case:
    """A run from the reference's config.

    Raises:
        Mistake: config, leaves and tokens do not go together.
    """
    settings = map_config(config)
    if unknown := sorted(set(init) - set(LEAVES)):
        raise Mistake(f"unknown leaf init/{unknown[0]}")
    if "w_e" not in init:
        raise Mistake("init/w_e is missing; it says how large the vocabulary is")
    settings["decoder"]["vocab_size"] = len(init["w_e"])
    if tokens is None:
        raise Mistake("the file lacks tokens")
    if tokens.ndim != 3 or tokens.shape[2] != settings["decoder"]["sequence_len"]:
        raise Mistake(f"tokens: shape {tokens.shape} is not [batches, B, {settings['decoder']['sequence_len']}]")
    if tokens.size and not (tokens.min() >= 0 and tokens.max() < len(init["w_e"])):
        raise Mistake(f"tokens: {tokens.min()} to {tokens.max()} is beyond the vocabulary of {len(init['w_e'])}")
    return Case(settings, init, tokens)


def loss_mask(tokens: np.ndarray, eos: int, pad: int) -> np.ndarray:
    """1 up to and with the first eos or pad of a row, 0 after it."""
    is_end = (tokens == eos) | (tokens == pad)
    return (is_end.cumsum(-1) - is_end == 0).astype(np.int64)


@dataclass
class Record:
    """What the package computed: a number a batch, and leaves in the reference's layout."""

    loss: list[float] = field(default_factory=list)
    mask_mean: list[float] = field(default_factory=list)
    grad_norm: list[float] = field(default_factory=list)
    logits0: np.ndarray | None = None
    grads0: Arrays = field(default_factory=dict)
    params: dict[int, Arrays] = field(default_factory=dict)  # by number of batches taken
    taps: list[dict[str, list[float]]] = field(default_factory=list)  # an update: tap -> mean |.| of each layer


class Probe(Callback):
    """Fills a Record. A step of the Trainer is an update: one batch of the file, or grad_acc_steps of them."""

    def __init__(self, case: Case, keep: Collection[int], n_tapped: int) -> None:
        self.record, self.keep, self.n_tapped = Record(), keep, n_tapped
        self.k = case.settings["module"]["n_micro_batch"]
        self.batches = [case.batch(tokens) for tokens in case.tokens]
        self.record.mask_mean = [batch["mask"].double().mean().item() for batch in self.batches]

    def on_train_start(self, trainer: Trainer, module: DecoderModule) -> None:
        self.record.logits0 = module(self.batches[0]["tokens"][:, :-1]).detach().double().numpy()
        self.record.grads0 = to_reference(self._loss_and_gradients(module, self.batches[0])[1])
        self._keep(module, 0)

    def on_train_batch_start(self, trainer: Trainer, module: DecoderModule, batch: Any, index: int) -> None:
        self._micro_batches(module, index)
        if index < self.n_tapped:
            self.record.taps.append(taps := {})
            with recording(lambda name, x: taps.setdefault(name, []).append(x.double().abs().mean().item())):
                module(batch["tokens"][:, :-1])

    def on_train_batch_end(self, trainer: Trainer, module: DecoderModule, outputs: Any, batch: Any, index: int) -> None:
        if self.k == 1:
            self.record.loss.append(outputs["loss"].item())
            self.record.grad_norm.append(outputs["grad_norm"].item())
        self._keep(module, index + 1)

    def on_train_end(self, trainer: Trainer, module: DecoderModule) -> None:
        self._micro_batches(module, trainer.global_step)  # batches left over, too few for an update

    def _micro_batches(self, module: DecoderModule, update: int) -> None:
        """Where an update takes several batches: loss and gradient norm of each, with the weights before it."""
        for batch in self.batches[update * self.k : (update + 1) * self.k] if self.k > 1 else ():
            loss, gradients = self._loss_and_gradients(module, batch)
            self.record.loss.append(loss)
            self.record.grad_norm.append(torch.nn.utils.get_total_norm(list(gradients.values())).item())

    def _loss_and_gradients(self, module: DecoderModule, batch: Any) -> tuple[float, dict[str, torch.Tensor]]:
        parameters = dict(module.decoder.named_parameters())
        loss_sum = module.loss_sum(batch)
        gradients = torch.autograd.grad(loss_sum / batch["mask"].numel(), list(parameters.values()))
        return (loss_sum / batch["mask"].sum()).item(), dict(zip(parameters, gradients, strict=True))

    def _keep(self, module: DecoderModule, n_updates: int) -> None:
        for n_batches in self.keep:
            if n_batches // self.k == n_updates:
                self.record.params[n_batches] = to_reference(dict(module.decoder.named_parameters()))


def run(case: Case, precision: str, keep: Collection[int] = (), n_tapped: int = 0) -> Record:
    """Trains through the tokens; keeps the weights after `keep` batches, records the first n_tapped forward passes."""
    probe = Probe(case, keep, n_tapped)
    n_updates = len(case.tokens) // probe.k
    quiet = dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False)
    trainer = Trainer(
        max_steps=n_updates, precision=precision, callbacks=[probe], accelerator="cpu", devices=1, **quiet
    )
    updates = np.split(case.tokens[: n_updates * probe.k], n_updates)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*no `val_dataloader`")
        trainer.fit(case.module(), iter([case.batch(np.concatenate(tokens)) for tokens in updates]))
    return probe.record
