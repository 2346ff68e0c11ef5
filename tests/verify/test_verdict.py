"""Slopes, intervals, parabolas and what a verdict says."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest

from mutransformer.verify.verdict import Estimate, Finding, Verdict, parabola_minimum, slope, table


@pytest.mark.parametrize("power", [-1.0, -0.5, 0.0, 2.0])
def test_slope_is_the_power(power):
    sizes = [64, 128, 256, 512]
    assert slope(sizes, [3.0 * size**power for size in sizes]) == pytest.approx(power, abs=1e-12)


def test_interval_is_students():
    """For 3 values t is 4.303, for 20 it is 2.093."""
    estimate = Estimate.over_seeds([1.0, 2.0, 3.0])
    assert estimate.mean == 2.0
    assert estimate.high - estimate.mean == pytest.approx(4.303 / math.sqrt(3))
    many = Estimate.over_seeds(list(np.tile([1.0, 3.0], 10)))
    assert many.high - many.mean == pytest.approx(2.093 * np.std([1.0, 3.0] * 10, ddof=1) / math.sqrt(20), rel=0.01)


def test_a_single_seed_has_no_interval():
    estimate = Estimate.over_seeds([0.5])
    assert estimate.high == math.inf
    assert str(estimate) == "+0.50"


def test_parabola_finds_the_minimum_between_points():
    x = [-4.0, -3.0, -2.0, -1.0]
    assert parabola_minimum(x, [(v + 2.3) ** 2 for v in x]) == pytest.approx(-2.3)


@pytest.mark.parametrize(
    ("losses", "minimum"),
    [([1.0, 2.0, 3.0], -3.0), ([3.0, 2.0, 1.0], -1.0), ([2.0, 1.0, math.inf], -2.0), ([1.0, 1.0, 1.0], -3.0)],
    ids=["left edge", "right edge", "beside a diverged run", "level"],
)
def test_parabola_stays_on_the_grid_where_it_cannot_be_fitted(losses, minimum):
    assert parabola_minimum([-3.0, -2.0, -1.0], losses) == minimum


def test_verdict_fails_with_one_finding_and_saves_plain_json(tmp_path):
    good = Finding(name="a", passed=True, reason="fine")
    bad = Finding(name="b", passed=False, reason="off")
    assert Verdict(check="x", findings=[good]).passed
    figures = {"estimate": Estimate.over_seeds([1.0]), "power": np.float64(0.5)}
    verdict = Verdict(check="x", findings=[good, bad], figures=figures)
    assert not Verdict(check="x", findings=[]).passed  # nothing was looked at
    assert str(verdict) == "x: FAIL" and verdict.failures == [bad]
    verdict.save(tmp_path / "verdict.json")
    saved = json.loads((tmp_path / "verdict.json").read_text())
    assert saved["passed"] is False
    assert saved["figures"] == {"estimate": {"mean": 1.0, "low": None, "high": None}, "power": 0.5}


def test_table_aligns_columns():
    assert table([{"a": "1", "bb": "2"}, {"a": "333", "bb": "4"}]) == "a    bb\n1    2\n333  4"
