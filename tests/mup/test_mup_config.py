from __future__ import annotations

import pytest
from helpers import mup, small

from mutransformer.errors import ConfigError
from mutransformer.mup.config import OptimizerConfig, ParametrizationConfig, RoleMultipliers


@pytest.mark.parametrize(
    "config, field, value",
    [
        (ParametrizationConfig, "d_base", 0),
        (ParametrizationConfig, "d_base", float("nan")),
        (ParametrizationConfig, "ff_multiple_base", -1.0),
        (ParametrizationConfig, "embedding_init_std", 0.0),
        (ParametrizationConfig, "qk_scale", 0.0),
        (ParametrizationConfig, "input_multiplier", -1.0),
        (ParametrizationConfig, "output_multiplier", 0.0),
        (ParametrizationConfig, "residual_multiplier", float("inf")),
        (ParametrizationConfig, "n_base_layer", 0),
        (ParametrizationConfig, "depth_alpha", 0.4),
        (ParametrizationConfig, "depth_alpha", 1.1),
        (OptimizerConfig, "learning_rate", -1e-3),
        (OptimizerConfig, "learning_rate", float("nan")),
        (OptimizerConfig, "learning_rate", float("inf")),
        (OptimizerConfig, "eps", -1e-8),
        (OptimizerConfig, "weight_decay", -0.1),
        (OptimizerConfig, "weight_decay", 1.0),
        (OptimizerConfig, "beta1", 1.0),
        (OptimizerConfig, "beta2", -0.1),
        (OptimizerConfig, "momentum", 1.0),
    ],
)
def test_a_value_out_of_range_is_refused_with_its_field(config, field, value):
    section = {ParametrizationConfig: "parametrization", OptimizerConfig: "optimizer"}[config]
    with pytest.raises(ConfigError, match=f"^model.{section}.{field}={value!r}: .+; .+"):
        config(**{field: value})


def test_coupled_decay_may_be_above_one():
    assert OptimizerConfig(weight_decay=2.0, decay="coupled").weight_decay == 2.0


@pytest.mark.parametrize("section", ["lr_multiplier", "weight_decay_multiplier"])
@pytest.mark.parametrize("value", [-1.0, float("inf"), float("nan")])
def test_a_multiplier_below_zero_or_not_finite_is_refused_with_its_role(value, section):
    with pytest.raises(ConfigError, match=rf"^model.parametrization.{section}.feedforward_out={value}: "):
        mup(**{section: RoleMultipliers(feedforward_out=value)})


# Pairs that have no rule together


@pytest.mark.parametrize(
    "decoder, parametrization, optimizer, field",
    [
        ({}, {"rules": "mup_absolute"}, {"algorithm": "sgd"}, "model.parametrization.rules"),
        ({}, {"depth_rule": "completep", "n_base_layer": 2}, {"algorithm": "sgd"}, "model.parametrization.depth_rule"),
        ({}, {"depth_rule": "completep"}, {}, "model.parametrization.n_base_layer"),
        ({}, {"rules": "mup_absolute", "unembedding_form": "B"}, {}, "model.parametrization.unembedding_form"),
        ({"tie_embeddings": True}, {"rules": "mup_absolute"}, {}, "model.decoder.tie_embeddings"),
    ],
)
def test_a_combination_without_a_rule_is_refused(decoder, parametrization, optimizer, field):
    with pytest.raises(ConfigError) as error:
        small(**decoder).plan(mup(**parametrization), OptimizerConfig(**optimizer))
    assert error.value.field == field
    assert "\n" not in str(error.value)
