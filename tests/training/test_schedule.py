from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.optim.lr_scheduler import LambdaLR

from mutransformer.errors import ConfigError
from mutransformer.training.schedule import ScheduleConfig, schedule_factor

N, W, Z, E = 100, 10, 1e-4, 0.1

# (kind, settings) -> {step: factor}, by hand: warm-up z + (1 - z) t / W; then a decay over N - W, or over the last D
D_WSD = 20
POINTS = {
    "linear": ({}, {W: 1, W + 1: 1 + (E - 1) / 90, 55: (1 + E) / 2, N - 1: 1 + (E - 1) * 89 / 90, N: E, N + 5: E}),
    "cosine": (
        {},
        {
            W: 1,
            W + 1: (1 - E) * (1 + math.cos(math.pi / 90)) / 2 + E,
            55: (1 + E) / 2,
            N: E,
            N + 5: E,
        },
    ),
    "wsd": ({"decay_steps": D_WSD}, {W: 1, W + 1: 1, 80: 1, 81: 1 + (E - 1) / 20, 90: (1 + E) / 2, N: E, N + 5: E}),
    "constant": ({}, {W: 1, W + 1: 1, N: 1, N + 5: 1}),
}


@pytest.mark.parametrize("kind", POINTS)
def test_factor_by_hand(kind):
    settings, points = POINTS[kind]
    config = ScheduleConfig(kind=kind, warmup_steps=W, total_steps=N, start_fraction=Z, end_fraction=E, **settings)
    warmup = {0: Z, 1: Z + (1 - Z) / 10, W - 1: Z + (1 - Z) * 0.9}
    expected = {**warmup, **points}
    assert {step: schedule_factor(step, config) for step in expected} == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("kind", POINTS)
def test_without_warmup_the_first_step_is_at_the_peak(kind):
    assert schedule_factor(0, ScheduleConfig(kind=kind, total_steps=7)) == 1


def test_defaults_end_at_a_ten_thousandth():
    config = ScheduleConfig(warmup_steps=2, total_steps=10)
    assert [schedule_factor(step, config) for step in (0, 10)] == pytest.approx([1e-4, 1e-4])


@pytest.mark.parametrize("total_steps, warmup_steps, length", [(100, 0, 10), (100, 50, 5), (5, 0, 1), (105, 0, 10)])
def test_wsd_decays_over_a_tenth_of_what_follows_the_warmup_unless_told_otherwise(total_steps, warmup_steps, length):
    config = ScheduleConfig(kind="wsd", total_steps=total_steps, warmup_steps=warmup_steps, end_fraction=0.0)
    below_peak = [step for step in range(warmup_steps, total_steps) if schedule_factor(step, config) < 1]
    assert below_peak == list(range(total_steps - length + 1, total_steps))
    assert schedule_factor(total_steps, config) == 0


@given(
    kind=st.sampled_from(list(POINTS)),
    total_steps=st.integers(1, 300),
    warmup=st.floats(0, 0.99),
    start=st.floats(0, 1),
    end=st.floats(0, 1),
    step=st.integers(0, 400),
)
def test_factor_lies_in_0_to_1_rises_in_the_warmup_and_never_after(kind, total_steps, warmup, start, end, step):
    config = ScheduleConfig(
        kind=kind,
        total_steps=total_steps,
        warmup_steps=int(warmup * total_steps),
        start_fraction=start,
        end_fraction=end,
    )
    here, following = schedule_factor(step, config), schedule_factor(step + 1, config)
    assert 0 <= here <= 1
    rises = step + 1 <= config.warmup_steps
    assert (here <= following + 1e-12) if rises else (following <= here + 1e-12)


@pytest.mark.parametrize(
    "settings, field",
    [
        ({"total_steps": 0}, "trainer.max_steps"),
        ({"total_steps": -1}, "trainer.max_steps"),
        ({"warmup_steps": -1}, "model.schedule.warmup_steps"),
        ({"warmup_steps": 10, "total_steps": 10}, "model.schedule.warmup_steps"),
        ({"start_fraction": float("nan")}, "model.schedule.start_fraction"),
        ({"start_fraction": 1.5}, "model.schedule.start_fraction"),
        ({"end_fraction": -0.1}, "model.schedule.end_fraction"),
        ({"kind": "cosine", "decay_steps": 10}, "model.schedule.decay_steps"),
        ({"kind": "wsd", "decay_steps": 0}, "model.schedule.decay_steps"),
        ({"kind": "wsd", "decay_steps": 91, "warmup_steps": 10, "total_steps": 100}, "model.schedule.decay_steps"),
    ],
)
def test_a_schedule_that_cannot_work_is_refused_with_its_field(settings, field):
    with pytest.raises(ConfigError) as error:
        ScheduleConfig(**settings)
    assert error.value.field == field
    assert "\n" not in str(error.value)


def test_the_longest_decay_that_fits_is_allowed():
    config = ScheduleConfig(kind="wsd", decay_steps=90, warmup_steps=10, total_steps=100)
    assert schedule_factor(10, config) == 1 > schedule_factor(11, config)


def test_every_group_is_multiplied_by_the_same_factor():
    config = ScheduleConfig(kind="cosine", warmup_steps=2, total_steps=6)
    groups = [{"params": [torch.nn.Parameter(torch.zeros(1))], "lr": lr} for lr in (0.1, 3.0)]
    optimizer = torch.optim.SGD(groups)
    scheduler = LambdaLR(optimizer, lambda step: schedule_factor(step, config))
    for step in range(8):
        factor = schedule_factor(step, config)
        assert [group["lr"] for group in optimizer.param_groups] == pytest.approx([0.1 * factor, 3.0 * factor])
        optimizer.step()
        scheduler.step()
