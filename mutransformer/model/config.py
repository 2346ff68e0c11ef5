"""The decoder's shape, and the plan that follows from it. No torch here: a plan of any size costs milliseconds."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from mutransformer.errors import ConfigError, require_finite, require_positive
from mutransformer.mup.config import OptimizerConfig, ParametrizationConfig
from mutransformer.mup.plan import Plan, build_plan
from mutransformer.mup.roles import TENSORS, Role, TensorSpec

Activation = Literal[
    "relu",
    "gelu",
    "silu",
    "sqrelu",
    "swiglu",
    "tanh",
    "sigmoid",
    "elu",
    "selu",
    "softplus",
    "leaky_relu",
    "relu6",
    "celu",
    "mish",
    "hard_tanh",
    "hard_sigmoid",
    "hard_silu",
    "log_sigmoid",
    "soft_sign",
    "squareplus",
]


@dataclass(kw_only=True)
class DecoderConfig:
    """A pre-norm transformer decoder without dropout.

    Args:
        d_model: width of the residual stream; a multiple of d_head.
        n_layer: number of blocks.
        d_head: width of an attention head; keep it fixed when width varies.
        n_kv_head: key/value heads, a divisor of the number of heads; null: one each, 1: multi-query.
        ff_multiple: feed-forward width is int(ff_multiple * d_model).
        activation: feed-forward nonlinearity; gelu is the tanh form, sqrelu is relu squared, swiglu has a gate matrix.
        attention_activation: from scores to weights; softmax, or sqrelu / elu (plus 1) normalized as below.
        attention_normalization: of sqrelu and elu: `length` divides by sequence_len, `causal_count` by the
            number of visible positions, `sum` by the weights' sum; softmax needs none.
        rotary_base: base of the rotary position frequencies; 0: no positions.
        norm_eps: added to the mean square in RMSNorm.
        norm_gains: learned gains of the norms, `none`, `vector` (a value a feature) or `scalar` (one value).
        embedding_norm: RMSNorm after the embedding.
        qk_norm: RMSNorm on each head's query and key, before the rotary positions.
        projection_biases: a bias on every projection, the unembedding too.
        tie_embeddings: one matrix as embedding and unembedding.
        scan_layers: on XLA, compile one layer and loop over it, so that compile time does not grow with depth; not read
            elsewhere.
        remat: what the backward pass computes again instead of keeping it: `none`, `block` (all but the input of each
            block), `dots` (all but products with weights).
        sequence_len: longest sequence; linked to data.sequence_len.
        vocab_size: number of token ids; linked to the data's tokenizer.
    """

    d_model: int = 128
    n_layer: int = 4
    d_head: int = 64
    n_kv_head: int | None = None
    ff_multiple: float = 4.0
    activation: Activation = "relu"
    attention_activation: Literal["softmax", "sqrelu", "elu"] = "softmax"
    attention_normalization: Literal["length", "causal_count", "sum"] = "causal_count"
    rotary_base: float = 10_000.0
    norm_eps: float = 1e-5
    norm_gains: Literal["none", "vector", "scalar"] = "none"
    embedding_norm: bool = False
    qk_norm: bool = False
    projection_biases: bool = False
    tie_embeddings: bool = False
    scan_layers: bool = True
    remat: Literal["none", "block", "dots"] = "none"
    sequence_len: int = 256
    vocab_size: int = 384

    def __post_init__(self) -> None:
        section = "model.decoder"
        require_finite(section, self)
        require_positive(
            section,
            d_model=self.d_model,
            n_layer=self.n_layer,
            d_head=self.d_head,
            n_kv_head=self.n_kv_head,
            ff_multiple=self.ff_multiple,
            norm_eps=self.norm_eps,
            sequence_len=self.sequence_len,
            vocab_size=self.vocab_size,
        )
        if self.d_model % self.d_head:
            below = self.d_model // self.d_head * self.d_head
            raise ConfigError(
                f"{section}.d_model",
                self.d_model,
                f"must be a multiple of d_head={self.d_head}",
                f"use {below + self.d_head}" if below == 0 else f"use {below} or {below + self.d_head}",
            )
        if self.n_head % self.n_kv_head_:
            divisors = [str(n) for n in range(1, self.n_head + 1) if self.n_head % n == 0]
            raise ConfigError(
                f"{section}.n_kv_head",
                self.n_kv_head,
                f"must divide n_head={self.n_head} (d_model / d_head)",
                f"use one of {', '.join(divisors)}",
            )
        if self.rotary_base < 0:
            raise ConfigError(f"{section}.rotary_base", self.rotary_base, "must not be negative", "use 10000, or 0")
        if self.rotary_base and self.d_head % 2:
            raise ConfigError(
                f"{section}.d_head",
                self.d_head,
                "must be even with rotary positions",
                f"use {self.d_head + 1}, or model.decoder.rotary_base=0",
            )
        if self.d_ff < 1:
            raise ConfigError(f"{section}.ff_multiple", self.ff_multiple, "gives a feed-forward width of 0", "use 4")

    @property
    def n_head(self) -> int:
        """Number of query heads."""
        return self.d_model // self.d_head

    @property
    def n_kv_head_(self) -> int:
        """Number of key/value heads, resolved."""
        return self.n_kv_head or self.n_head

    @property
    def d_ff(self) -> int:
        """Feed-forward width."""
        return int(self.ff_multiple * self.d_model)

    def tensors(self) -> list[TensorSpec]:
        """The parameters this shape has, in order."""
        is_gated = self.activation == "swiglu"
        has_gains = self.norm_gains != "none"
        absent = {
            "unembedding": self.tie_embeddings,
            "w_ff_gate": not is_gated,
            "b_ff_gate": not is_gated,
            "gain_embedding": not self.embedding_norm,
            "gain_query": not self.qk_norm,
            "gain_key": not self.qk_norm,
        }
        specs = [
            spec
            for name, spec in TENSORS.items()
            if not absent.get(name, False)
            and (spec.role is not Role.BIAS or self.projection_biases)
            and (spec.role is not Role.GAIN or has_gains)
        ]
        if self.norm_gains != "scalar":
            return specs
        return [replace(spec, axes=(*spec.axes[:-1], "one")) if spec.role is Role.GAIN else spec for spec in specs]

    def axis_sizes(self) -> dict[str, int]:
        """Logical axis -> size."""
        return {
            "layers": self.n_layer,
            "vocab": self.vocab_size,
            "embed": self.d_model,
            "heads": self.n_head,
            "kv_heads": self.n_kv_head_,
            "head_dim": self.d_head,
            "mlp": self.d_ff,
            "one": 1,
        }

    def width_multiples(self, parametrization: ParametrizationConfig) -> dict[str, float]:
        """Logical axis -> size over that of the base width; each by its own dimension, by real division.

        That of the feed-forward width is taken before rounding to whole features: 1 at the base width. Grouped
        key/value heads grow with the heads; a single one (multi-query) does not grow.
        """
        m = self.d_model / parametrization.d_base
        m_ff = m * self.ff_multiple / (parametrization.ff_multiple_base or self.ff_multiple)
        grows = {"embed": m, "heads": m, "kv_heads": 1.0 if self.n_kv_head == 1 else m, "mlp": m_ff}
        return {axis: grows.get(axis, 1.0) for axis in self.axis_sizes()}

    def plan(self, parametrization: ParametrizationConfig, optimizer: OptimizerConfig) -> Plan:
        """The plan of this decoder, with warnings.

        Raises:
            ConfigError: settings that have no rule together.
        """
        if self.tie_embeddings and parametrization.rules == "mup_absolute":
            raise ConfigError(
                "model.decoder.tie_embeddings", True, "needs form B, which mup_absolute does not have", "use rules mup"
            )
        plan = build_plan(
            self.tensors(),
            sizes=self.axis_sizes(),
            multiples=self.width_multiples(parametrization),
            n_layer=self.n_layer,
            is_tied=self.tie_embeddings,
            parametrization=parametrization,
            optimizer=optimizer,
        )
        return replace(plan, warnings=tuple(self._warnings(plan, parametrization, optimizer)))

    def _warnings(self, plan: Plan, p: ParametrizationConfig, optimizer: OptimizerConfig) -> list[str]:
        """What is known not to transfer (arXiv 2404.05728), or starts badly, in the settings given."""
        is_mup = p.rules != "sp"
        tied_std = p.embedding_init_std * self.d_model**0.5 * plan.logits_multiplier
        tied_remedy = p.output_multiplier / (tied_std * self.d_model**0.5)  # an untied model starts at d_model^-1/2
        checks = {
            "rules sp: the best learning rate moves with width (the control, not for transfer)": not is_mup,
            "norm_gains: learned gains of norms broke transfer in Lingle's study": is_mup and self.norm_gains != "none",
            "algorithm lion: its best learning rate moved with width in Lingle's study": (
                is_mup and optimizer.algorithm == "lion"
            ),
            "decay coupled: the best learning rate moved with width in Lingle's study; independent did not": (
                is_mup and optimizer.decay == "coupled" and optimizer.weight_decay > 0
            ),
            f"weight_decay: independent decay takes {optimizer.weight_decay:.3g} of every weight off in a step; "
            f"torch's 0.1 with a learning rate of 1e-3 is 1e-4 here": (
                optimizer.decay == "independent" and optimizer.weight_decay > 1e-2
            ),
            "n_layer differs from n_base_layer without a depth rule: the learning rate need not transfer": (
                p.depth_rule == "none" and p.n_base_layer is not None and p.n_base_layer != self.n_layer
            ),
            f"tie_embeddings: logits start with a standard deviation of about {tied_std:.3g}; "
            f"output_multiplier={tied_remedy:.3g} starts as small as an untied model": (
                self.tie_embeddings and tied_std > 2
            ),
            "embedding_lr_rule sqrt: read by rules mup with adamw and lion alone": (
                p.embedding_lr_rule == "sqrt" and not (p.rules == "mup" and optimizer.algorithm != "sgd")
            ),
            "unembedding_form B: not read by rules sp": p.unembedding_form == "B" and not is_mup,
            "unembedding_init: not read where embeddings are tied": bool(p.unembedding_init and self.tie_embeddings),
            "depth_alpha: read by depth_rule completep alone": p.depth_alpha != 1 and p.depth_rule == "none",
            "momentum: read by algorithm sgd alone": optimizer.momentum != 0 and optimizer.algorithm != "sgd",
        }
        return [text for text, applies in checks.items() if applies]
