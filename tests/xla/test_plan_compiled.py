"""The step compiled for a TPU slice, without a TPU: does the compiler agree with the arithmetic?

Needs the extra `plan`, here or in the environment that MUTRANSFORMER_PLAN_PYTHON names (`make plan-env` makes it).
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from cli_runs import in_own_process

from mutransformer.errors import ConfigError
from mutransformer.xla.libtpu import find_python

try:
    find_python()
    is_there = True
except ConfigError:
    is_there = False

pytestmark = [pytest.mark.slow, pytest.mark.skipif(not is_there, reason="the extra `plan` is not installed")]

BASE = (
    "--config",
    str(Path(__file__).parents[2] / "configs" / "base.yaml"),
    "--trainer.precision=bf16-mixed",
    "--json",
)
GROUPED = (
    *("--mesh_rows=4", "--mesh_cols=4", "--data.tokens_per_batch=16384", "--data.sequence_len=512"),
    *("--model.decoder.d_model=512", "--model.decoder.n_kv_head=4", "--model.decoder.activation=swiglu"),
    *("--model.decoder.tie_embeddings=true", "--data.vocab_size=32768", "--model.decoder.remat=block"),
)
DENSE = (
    *("--mesh_rows=16", "--mesh_cols=1", "--data.tokens_per_batch=65536", "--data.sequence_len=512"),
    *("--model.decoder.d_model=2048", "--data.vocab_size=4096", "--model.decoder.remat=block"),
)
UNROLLED = (
    *("--mesh_rows=16", "--mesh_cols=1", "--data.tokens_per_batch=32768", "--data.sequence_len=1024"),
    *("--model.decoder.d_model=2048", "--data.vocab_size=4096", "--model.decoder.scan_layers=false"),
)
# rows of a batch would be sent from chip to chip, which this slice cannot, if micro-batches were not cut on each
SPLIT = (
    *("--topology=v5e:16x16", "--mesh_rows=256", "--mesh_cols=1", "--data.tokens_per_batch=262144"),
    *("--model.decoder.d_model=2048", "--data.vocab_size=4096", "--model.decoder.remat=block"),
    "--trainer.accumulate_grad_batches=2",
)
CASES = {"grouped": GROUPED, "dense": DENSE, "unrolled": UNROLLED}


def run(*options):
    process = in_own_process("plan", *BASE, "--topology=v5e:4x4", "--effort=fast", *options)
    output, errors = process.communicate(timeout=500)
    assert output, errors
    return process.returncode, json.loads(output)


@pytest.fixture(scope="module", params=CASES)
def found(request):
    code, report = run(*CASES[request.param])
    assert (code, report["verdict"], report["by"]) == (0, "FITS", "compiler")
    return report


def test_parameters_and_optimizer_state_are_what_the_table_says_to_the_byte(found):
    memory = found["memory"]
    assert memory["compiled"]["in_place"] == memory["parameters"] + memory["optimizer"]


def test_the_sum_is_of_arguments_results_and_temporaries(found):
    compiled = found["memory"]["compiled"]
    assert found["total_bytes"] == compiled["arguments"] + compiled["unaliased_results"] + compiled["temporaries"]
    assert compiled["arguments"] > compiled["in_place"]


def test_arithmetic_comes_within_fifteen_percent(found):
    assert found["memory"]["estimated_total"] == pytest.approx(found["total_bytes"], rel=0.15)


def test_the_traced_step_has_as_many_operations_as_arithmetic_says(found):
    assert found["flops"]["traced"] == found["flops"]["total"]


def test_weights_are_gathered_over_x_or_sent_round_it(found):
    sent = {(one["kind"], one["axis"]): one for one in found["collectives"]}
    moved = sum(one["wire_bytes"] for (_, axis), one in sent.items() if axis == "X" and one.get("count"))
    expected = sum(one["expected"]["wire_bytes"] for (_, axis), one in sent.items() if axis == "X" and one["expected"])
    assert 0.5 * expected < moved < 2 * expected


def test_micro_batches_are_cut_on_each_chip():
    code, report = run(*SPLIT)
    assert (code, report["verdict"]) == (0, "FITS")
    assert {one["kind"] for one in report["collectives"] if one.get("count")} == {"all-gather", "all-reduce"}


def test_what_does_not_fit_is_said_with_the_largest_buffer():
    code, report = run(*DENSE, "--data.tokens_per_batch=786432", "--model.decoder.remat=none")
    assert (code, report["verdict"]) == (1, "DOES NOT FIT")
    assert report["total_bytes"] > report["capacity_bytes"]
    largest = report["memory"]["compiled"]["buffers"][0]
    assert largest["what"] == "attention scores of all layers, kept for the backward pass"
    assert "--model.decoder.remat=block" in report["remedies"] or "--trainer.accumulate_grad_batches" in str(
        report["remedies"]
    )
