"""What the rules read: the settings of the parametrization and of the optimizer. Plain data with its own checks."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from mutransformer.errors import ConfigError, require_finite, require_positive
from mutransformer.mup.roles import Role


@dataclass(kw_only=True)
class RoleMultipliers:
    """One factor a role; 1 leaves the rule as it is.

    Args:
        embedding: token embedding.
        query: query projection.
        key: key projection.
        value: value projection.
        attention_output: projection of the heads back to the residual stream.
        feedforward_in: first feed-forward matrix.
        feedforward_gate: gate matrix of swiglu.
        feedforward_out: second feed-forward matrix.
        unembedding: projection to the vocabulary.
        bias: all biases.
        gain: all gains of norms.
    """

    embedding: float = 1.0
    query: float = 1.0
    key: float = 1.0
    value: float = 1.0
    attention_output: float = 1.0
    feedforward_in: float = 1.0
    feedforward_gate: float = 1.0
    feedforward_out: float = 1.0
    unembedding: float = 1.0
    bias: float = 1.0
    gain: float = 1.0

    def __getitem__(self, role: Role) -> float:
        return getattr(self, role.value)

    def check(self, section: str) -> None:
        """Raises ConfigError for a factor that is negative or not finite; `section` is its dotted prefix."""
        require_finite(section, self)
        for role in Role:
            if not self[role] >= 0:
                raise ConfigError(f"{section}.{role.value}", self[role], "must not be negative", "give 0 or more")


@dataclass(kw_only=True)
class ParametrizationConfig:
    """How initialization, multipliers and learning rates depend on width and depth.

    Args:
        rules: rule set; `mup` scales relative to d_base (arXiv 2203.03466, Table 3), `mup_absolute` divides the
            learning rate by fan-in itself (arXiv 2404.05728), `sp` is the standard parametrization, the control.
        d_base: width at which `mup` equals the unscaled network; tune there, any positive number.
        ff_multiple_base: feed-forward multiple at the base width; null: the decoder's own ff_multiple.
        unembedding_form: `A` puts the 1/width of the output into initialization and learning rate, `B` into a forward
            multiplier (arXiv 2203.03466, Table 8); one model under Adam. Tied embeddings use `B`.
        unembedding_init: initialization of the unembedding, `mup` 1/d_model, `sp` d_model^-1/2 (both as in form A) or
            `zero`; null: the rule set's own.
        query_init: `fan_in` or `zero` for the query projection.
        residual_init: `fan_in` or `zero` for the two projections that write into the residual stream.
        embedding_init_std: standard deviation of the embedding.
        input_multiplier: factor on the embedding's output.
        output_multiplier: factor on the logits.
        residual_multiplier: factor on what each block adds to the residual stream.
        qk_scale: factor on attention scores; null: 1/d_head, and 1/sqrt(d_head) for `sp`.
        embedding_lr_rule: `mup` keeps the embedding's learning rate over width, `sqrt` divides it by sqrt(width
            multiple), for large vocabularies (arXiv 2506.15025).
        lr_multiplier: factor a role on the learning rate.
        weight_decay_multiplier: factor a role on the weight decay; biases and gains are not decayed by default.
        depth_rule: `completep` scales residual branches by depth (arXiv 2505.01618), `none` does not.
        depth_alpha: exponent of the depth rule; 1 keeps the learning rate over depth, 1/2 is the other known choice.
        n_base_layer: depth at which the depth rule changes nothing; needed by completep;
            where it is given, a different depth without a depth rule is warned of.
    """

    rules: Literal["mup", "mup_absolute", "sp"] = "mup"
    d_base: float = 128
    ff_multiple_base: float | None = None
    unembedding_form: Literal["A", "B"] = "A"
    unembedding_init: Literal["mup", "sp", "zero"] | None = None
    query_init: Literal["fan_in", "zero"] = "fan_in"
    residual_init: Literal["fan_in", "zero"] = "fan_in"
    embedding_init_std: float = 1.0
    input_multiplier: float = 1.0
    output_multiplier: float = 1.0
    residual_multiplier: float = 1.0
    qk_scale: float | None = None
    embedding_lr_rule: Literal["mup", "sqrt"] = "mup"
    lr_multiplier: RoleMultipliers = field(default_factory=RoleMultipliers)
    weight_decay_multiplier: RoleMultipliers = field(default_factory=lambda: RoleMultipliers(bias=0.0, gain=0.0))
    depth_rule: Literal["none", "completep"] = "none"
    depth_alpha: float = 1.0
    n_base_layer: float | None = None

    def __post_init__(self) -> None:
        section = "model.parametrization"
        require_finite(section, self)
        require_positive(
            section,
            input_multiplier=self.input_multiplier,
            output_multiplier=self.output_multiplier,
            residual_multiplier=self.residual_multiplier,
            d_base=self.d_base,
            ff_multiple_base=self.ff_multiple_base,
            embedding_init_std=self.embedding_init_std,
            qk_scale=self.qk_scale,
            n_base_layer=self.n_base_layer,
        )
        self.lr_multiplier.check(f"{section}.lr_multiplier")
        self.weight_decay_multiplier.check(f"{section}.weight_decay_multiplier")
        if not 0.5 <= self.depth_alpha <= 1:
            raise ConfigError(f"{section}.depth_alpha", self.depth_alpha, "must lie in 0.5 to 1", "use 1")
        if self.depth_rule == "completep" and self.n_base_layer is None:
            raise ConfigError(
                f"{section}.n_base_layer", None, "depth_rule completep scales from a base depth", "give that depth"
            )
        if self.rules == "mup_absolute" and self.unembedding_form == "B":
            raise ConfigError(
                f"{section}.unembedding_form", "B", "is relative to d_base, which mup_absolute does not use", "use A"
            )


@dataclass(kw_only=True)
class OptimizerConfig:
    """The update rule at the base width; every parameter's own values follow from it by the parametrization.

    Args:
        algorithm: `adamw` and `sgd` are torch's, `lion` is arXiv 2302.06675.
        learning_rate: base learning rate at the peak of the schedule.
        beta1: decay of the first moment (adamw, lion).
        beta2: decay of the second moment (adamw), of the momentum (lion).
        eps: added to the root of the second moment (adamw).
        momentum: momentum (sgd).
        weight_decay: decay at the peak of the schedule, see `decay`.
        decay: `independent` takes weight_decay times the schedule off a weight in each step, whatever the learning
            rate; `coupled` takes learning rate times weight_decay, as torch does.
        scale_eps: multiply eps by the same width factor as the learning rate.
        first_moment: how the first moment is kept (adamw, lion): in the dtype of the weights (`same`), or in `bfloat16`
            for half its memory; the update is computed in the weights' dtype.
    """

    algorithm: Literal["adamw", "lion", "sgd"] = "adamw"
    learning_rate: float = 2**-6
    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-8
    momentum: float = 0.0
    weight_decay: float = 0.0
    decay: Literal["independent", "coupled"] = "independent"
    scale_eps: bool = False
    first_moment: Literal["same", "bfloat16"] = "same"

    def __post_init__(self) -> None:
        section = "model.optimizer"
        require_finite(section, self)
        for name in ("learning_rate", "eps", "weight_decay"):
            if not getattr(self, name) >= 0:
                raise ConfigError(f"{section}.{name}", getattr(self, name), "must not be negative", "give 0 or more")
        for name in ("beta1", "beta2", "momentum"):
            if not 0 <= getattr(self, name) < 1:
                raise ConfigError(f"{section}.{name}", getattr(self, name), "must lie in 0 to 1, 1 excluded", "use 0.9")
        if self.decay == "independent" and self.weight_decay >= 1:
            raise ConfigError(
                f"{section}.weight_decay", self.weight_decay, "a step would take off the whole weight", "use 1e-4"
            )
