"""Each rule against its formula, written out here from the papers and evaluated on the sizes alone."""

from __future__ import annotations

import pytest
from helpers import rows_of, small
from hypothesis import given
from hypothesis import strategies as st

from mutransformer.mup.config import OptimizerConfig, ParametrizationConfig, RoleMultipliers

TENSOR_OF_ROLE = {
    "embedding": "embedding",
    "query": "w_query",
    "key": "w_key",
    "value": "w_value",
    "attention_output": "w_attention_out",
    "feedforward_in": "w_ff_in",
    "feedforward_gate": "w_ff_gate",
    "feedforward_out": "w_ff_out",
    "unembedding": "unembedding",
    "bias": "b_query",
    "gain": "gain_attention",
}
HIDDEN_BY_M = ("query", "key", "value", "feedforward_in", "feedforward_gate")

# Sizes that no two formulas agree on: d_model is no multiple of d_base, and ff_multiple differs from its base's.
DECODER = small(
    d_model=96, d_head=8, ff_multiple=2.5, n_layer=6, activation="swiglu", norm_gains="vector", projection_biases=True
)
SIZES = {
    "M": 96,
    "F": 240,
    "HK": 96,
    "m": 96 / 64,  # 1.5, where floor division gives 1
    "m_F": 240 / (4.0 * 64),  # below 1
    "m_N": 6 / 4,
}
BASE = {"d_base": 64, "ff_multiple_base": 4.0, "n_base_layer": 4}
LR, EPS = 2**-5, 2**-20


def rows_by_role(algorithm: str = "adamw", decoder=DECODER, optimizer: dict | None = None, **parametrization):
    rows = rows_of(
        decoder,
        ParametrizationConfig(**{**BASE, **parametrization}),
        OptimizerConfig(algorithm=algorithm, learning_rate=LR, eps=EPS, **(optimizer or {})),
    )
    return {role: rows[name] for role, name in TENSOR_OF_ROLE.items() if name in rows}


def expected(table: dict[str, str]) -> dict[str, float]:
    return {role: eval(formula, {}, SIZES) for role, formula in table.items()}


def every_role(formula: str, **others: str) -> dict[str, str]:
    return {**dict.fromkeys(TENSOR_OF_ROLE, formula), **others}


ADAM = every_role(
    "1",
    **dict.fromkeys(HIDDEN_BY_M, "1 / m"),
    attention_output="1 / m",
    feedforward_out="1 / m_F",
    unembedding="1 / m",
)
ADAM_ABSOLUTE = every_role(
    "1",
    **dict.fromkeys(HIDDEN_BY_M, "1 / M"),
    attention_output="1 / HK",
    feedforward_out="1 / F",
    unembedding="1 / M",
)
SGD = {
    "embedding": "m",
    "query": "m / m",
    "key": "m / m",
    "value": "m / m",
    "attention_output": "m / m",
    "feedforward_in": "m_F / m",
    "feedforward_gate": "m_F / m",
    "feedforward_out": "m / m_F",
    "unembedding": "1 / m",
    "bias": "m",
    "gain": "m",
}
LR_FACTORS = {
    ("adamw", "mup", "A"): ADAM,
    ("adamw", "mup", "B"): {**ADAM, "unembedding": "1"},
    ("adamw", "mup_absolute", "A"): ADAM_ABSOLUTE,
    ("adamw", "sp", "A"): every_role("1"),
    ("lion", "mup", "A"): ADAM,
    ("lion", "mup", "B"): {**ADAM, "unembedding": "1"},
    ("lion", "mup_absolute", "A"): ADAM_ABSOLUTE,
    ("lion", "sp", "A"): every_role("1"),
    ("sgd", "mup", "A"): SGD,
    ("sgd", "mup", "B"): {**SGD, "unembedding": "m"},
    ("sgd", "sp", "A"): every_role("1"),
}


@pytest.mark.parametrize("algorithm, rules, form", LR_FACTORS)
def test_learning_rate(algorithm, rules, form):
    rows = rows_by_role(algorithm, rules=rules, unembedding_form=form)
    factors = {role: row.lr / LR for role, row in rows.items()}
    assert factors == pytest.approx(expected(LR_FACTORS[algorithm, rules, form]), rel=1e-12)


@pytest.mark.parametrize("algorithm, rules, form", [key for key in LR_FACTORS if key[0] == "adamw"])
def test_eps_follows_the_learning_rate_if_scaled_and_is_the_setting_otherwise(algorithm, rules, form):
    settings = {"rules": rules, "unembedding_form": form}
    scaled = rows_by_role(algorithm, optimizer={"scale_eps": True}, **settings)
    table = expected(LR_FACTORS[algorithm, rules, form])
    assert {role: row.eps / EPS for role, row in scaled.items()} == pytest.approx(table, rel=1e-12)
    assert {row.eps for row in rows_by_role(algorithm, **settings).values()} == {EPS}


INIT_STD = {
    "embedding": "1",
    "query": "M**-0.5",
    "key": "M**-0.5",
    "value": "M**-0.5",
    "attention_output": "HK**-0.5",
    "feedforward_in": "M**-0.5",
    "feedforward_gate": "M**-0.5",
    "feedforward_out": "F**-0.5",
    "unembedding": "1 / M",
    "bias": "0",
    "gain": "0",
}


@pytest.mark.parametrize(
    "settings, changed",
    [
        ({}, {}),
        ({"rules": "mup_absolute"}, {}),
        ({"rules": "sp"}, {"unembedding": "M**-0.5"}),
        ({"unembedding_form": "B"}, {"unembedding": "m / M"}),  # 1 / d_base: constant over width
        ({"unembedding_init": "sp"}, {"unembedding": "M**-0.5"}),
        ({"unembedding_init": "zero"}, {"unembedding": "0"}),
        ({"unembedding_init": "zero", "unembedding_form": "B"}, {"unembedding": "0"}),
        ({"rules": "sp", "unembedding_init": "mup"}, {"unembedding": "1 / M"}),
        ({"query_init": "zero"}, {"query": "0"}),
        ({"residual_init": "zero"}, {"attention_output": "0", "feedforward_out": "0"}),
        ({"embedding_init_std": 0.02}, {"embedding": "0.02"}),
    ],
)
def test_initialization(settings, changed):
    rows = rows_by_role(**settings)
    assert {role: row.init_std for role, row in rows.items()} == pytest.approx(expected({**INIT_STD, **changed}))
    assert {role for role, row in rows.items() if row.init_mean == 1} == {"gain"}
    assert {role for role, row in rows.items() if row.init_mean == 0} == set(rows) - {"gain"}


@pytest.mark.parametrize(
    "settings, changed",
    [
        ({}, {}),
        ({"rules": "sp", "unembedding_form": "B"}, {}),
        ({"input_multiplier": 3.0}, {"embedding": "3"}),
        ({"output_multiplier": 5.0}, {"unembedding": "5"}),
        ({"unembedding_form": "B"}, {"unembedding": "1 / m"}),
        ({"unembedding_form": "B", "output_multiplier": 5.0}, {"unembedding": "5 / m"}),
    ],
)
def test_forward_multiplier(settings, changed):
    rows = rows_by_role(**settings)
    assert {role: row.forward_multiplier for role, row in rows.items()} == pytest.approx(
        expected(every_role("1", **changed))
    )


def logits_multiplier(decoder=DECODER, **settings) -> float:
    return decoder.plan(ParametrizationConfig(**{**BASE, **settings}), OptimizerConfig()).logits_multiplier


def test_logits_carry_one_over_width_in_form_b_and_when_tied_and_only_there():
    tied = small(d_model=96, tie_embeddings=True)
    assert logits_multiplier() == 1
    assert logits_multiplier(output_multiplier=5.0) == 5
    assert logits_multiplier(unembedding_form="B", output_multiplier=5.0) == pytest.approx(5 / 1.5)
    assert logits_multiplier(tied, output_multiplier=5.0) == pytest.approx(5 / 1.5)
    assert logits_multiplier(tied, rules="sp", output_multiplier=5.0) == 5


@pytest.mark.parametrize(
    "settings, scale", [({}, 1 / 8), ({"rules": "mup_absolute"}, 1 / 8), ({"rules": "sp"}, 8**-0.5)]
)
def test_scores_are_scaled_by_a_constant_of_the_head(settings, scale):
    def scale_of(**more):
        return DECODER.plan(ParametrizationConfig(**settings, **more), OptimizerConfig()).qk_scale

    assert scale_of() == pytest.approx(scale)
    assert scale_of(qk_scale=0.3) == 0.3


# The embedding's own rule, for large vocabularies


def test_embedding_learning_rate_with_the_square_root_rule():
    plain, root = rows_by_role(), rows_by_role(embedding_lr_rule="sqrt")
    assert root["embedding"].lr == pytest.approx(LR * 1.5**-0.5)
    assert {role for role in plain if plain[role].lr != root[role].lr} == {"embedding"}


# Depth


@pytest.mark.parametrize("alpha, lr_factor", [(1.0, "1"), (0.5, "m_N**-0.5")])
def test_completep(alpha, lr_factor):
    plain = rows_by_role(optimizer={"scale_eps": True})
    deep = rows_by_role(optimizer={"scale_eps": True}, depth_rule="completep", depth_alpha=alpha)
    outside = {"embedding": "1", "unembedding": "1"}
    lr = {role: deep[role].lr / plain[role].lr for role in deep}
    eps = {role: deep[role].eps / plain[role].eps for role in deep}
    assert lr == pytest.approx(expected(every_role(lr_factor, **outside)))
    assert eps == pytest.approx(expected(every_role(f"m_N**-{alpha}", **outside)))
    assert {role: row.init_std for role, row in deep.items()} == {role: row.init_std for role, row in plain.items()}


@pytest.mark.parametrize(
    "settings, factor",
    [
        ({}, 1.0),
        ({"residual_multiplier": 0.7}, 0.7),
        ({"depth_rule": "completep"}, 4 / 6),
        ({"depth_rule": "completep", "residual_multiplier": 0.7}, 0.7 * 4 / 6),
        ({"depth_rule": "completep", "depth_alpha": 0.5}, (4 / 6) ** 0.5),
        ({"depth_rule": "completep", "n_base_layer": 6}, 1.0),
    ],
)
def test_residual_branches_are_scaled_by(settings, factor):
    plan = DECODER.plan(ParametrizationConfig(**{**BASE, **settings}), OptimizerConfig())
    assert plan.residual_multiplier == pytest.approx(factor)


# Factors and decay of each role


@pytest.mark.parametrize("role", TENSOR_OF_ROLE)
def test_a_role_has_its_own_learning_rate_and_decay_multiplier(role):
    plain = rows_by_role(optimizer={"weight_decay": 0.1}, weight_decay_multiplier=RoleMultipliers())
    changed = rows_by_role(
        optimizer={"weight_decay": 0.1},
        lr_multiplier=RoleMultipliers(**{role: 3.0}),
        weight_decay_multiplier=RoleMultipliers(**{role: 0.5}),
    )
    assert changed[role].lr == pytest.approx(3 * plain[role].lr)
    assert changed[role].weight_decay == pytest.approx(0.05)
    assert {other for other in plain if plain[other] != changed[other]} == {role}


def test_biases_and_gains_are_not_decayed_by_default():
    decays = {role: row.decay_per_step for role, row in rows_by_role(optimizer={"weight_decay": 0.1}).items()}
    assert {role for role, decay in decays.items() if decay == 0} == {"bias", "gain"}


@pytest.mark.parametrize("rules", ["mup", "mup_absolute", "sp"])
@pytest.mark.parametrize("learning_rate", [LR, 2 * LR])
def test_decay_of_a_step(rules, learning_rate):
    def decays(decay):
        optimizer = OptimizerConfig(learning_rate=learning_rate, weight_decay=1e-3, decay=decay)
        rows = rows_of(DECODER, ParametrizationConfig(rules=rules, **BASE), optimizer).values()
        return {row.name: (row.decay_per_step, row.lr) for row in rows if row.role not in ("bias", "gain")}

    assert {decay for decay, _ in decays("independent").values()} == {1e-3}
    coupled = decays("coupled")
    assert {name: decay for name, (decay, _) in coupled.items()} == pytest.approx(
        {name: lr * 1e-3 for name, (_, lr) in coupled.items()}
    )


@pytest.mark.parametrize("decay", ["independent", "coupled"])
def test_a_frozen_role_is_not_decayed(decay):
    frozen = RoleMultipliers(key=0.0)
    rows = rows_by_role(optimizer={"weight_decay": 0.1, "decay": decay}, lr_multiplier=frozen)
    assert {role for role, row in rows.items() if row.lr == 0} == {"key"}
    assert {role for role, row in rows.items() if row.decay_per_step == 0} == {"key", "bias", "gain"}


# Widths are divided, never floored; each tensor by its own fan-in


@given(
    n_head=st.integers(1, 400),
    d_base=st.floats(1, 5000),
    ff_multiple=st.floats(0.25, 8),
    ff_multiple_base=st.floats(0.25, 8),
)
def test_width_multiple_is_a_real_division(n_head, d_base, ff_multiple, ff_multiple_base):
    decoder = small(d_model=8 * n_head, ff_multiple=ff_multiple)
    rows = rows_of(decoder, ParametrizationConfig(d_base=d_base, ff_multiple_base=ff_multiple_base))
    m = 8 * n_head / d_base
    m_f = ff_multiple * 8 * n_head / (ff_multiple_base * d_base)
    for name in ("embedding", "w_query", "w_attention_out", "w_ff_in", "unembedding"):
        assert rows[name].width_multiple == pytest.approx(m, rel=1e-12)
    assert rows["w_ff_out"].width_multiple == pytest.approx(m_f, rel=1e-12)


def test_base_width_is_the_identity_where_the_feedforward_width_is_no_whole_number():
    rows = rows_of(small(ff_multiple=8 / 3), ParametrizationConfig(d_base=small().d_model))
    assert {row.width_multiple for row in rows.values()} == {1.0}


def test_a_single_key_value_head_does_not_grow_with_width():
    decoder = small(d_model=96, n_kv_head=1, projection_biases=True)
    rows = rows_of(decoder, ParametrizationConfig(**BASE), OptimizerConfig(algorithm="sgd", learning_rate=LR))
    assert rows["w_key"].lr == pytest.approx(LR / 1.5)
    assert rows["b_key"].lr == LR
    assert rows["b_query"].lr == pytest.approx(LR * 1.5)
