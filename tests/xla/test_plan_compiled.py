"""The step compiled for a TPU slice, without a TPU: does the compiler agree with the arithmetic?

Needs the extra `plan`, here or in the environment that MUTRANSFORMER_PLAN_PYTHON names (`make plan-env` makes it).
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from cli_runs import in_own_process

from mutransformer.errors import ConfigError
from mutransformer.xla.libtpu import find_python

try:
    COMPILER = find_python()
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
# a large embedding, whose gradient is whole on each chip
EMBEDDING = (
    *("--mesh_rows=16", "--mesh_cols=1", "--data.sequence_len=512", "--data.vocab_size=32768"),
    *("--model.decoder.d_model=2048", "--model.decoder.remat=block"),
)
# rows of a batch would be sent from chip to chip, which this slice cannot, if micro-batches were not cut on each
SPLIT = (
    *("--topology=v5e:16x16", "--mesh_rows=256", "--mesh_cols=1", "--data.tokens_per_batch=262144"),
    *("--model.decoder.d_model=2048", "--data.vocab_size=4096", "--model.decoder.remat=block"),
    "--trainer.accumulate_grad_batches=2",
)
DOTS = (*DENSE, "--data.sequence_len=1024", "--model.decoder.remat=dots")
FLASH = (*GROUPED, "--data.vocab_size=4096", "--data.sequence_len=1024", "--trainer.strategy.flash_attention=true")
CASES = {"grouped": GROUPED, "dense": DENSE, "unrolled": UNROLLED, "dots": DOTS, "flash": FLASH}
OF_JAX = ("jax", "jaxlib", "ml_dtypes", "opt_einsum", "scipy", "scipy.libs")


def run(*options, **environment):
    process = in_own_process("plan", *BASE, "--topology=v5e:4x4", "--effort=fast", *options, env=environment)
    output, errors = process.communicate(timeout=500)
    assert output, errors
    return process.returncode, json.loads(output)


@pytest.fixture(scope="module")
def with_jax(tmp_path_factory):
    """jax of the compiler's environment, without its libtpu: the kernel is made where the step is traced."""
    where = "import sys, sysconfig; print(*sys.version_info[:2]); print(sysconfig.get_path('platlib'))"
    version, site = subprocess.run(
        [COMPILER, "-c", where], capture_output=True, text=True, check=True
    ).stdout.splitlines()
    if version.split() != [str(number) for number in sys.version_info[:2]]:
        pytest.skip(f"jax of the compiler's environment is for Python {version}")
    folder = tmp_path_factory.mktemp("jax")
    for name in OF_JAX:
        (folder / name).symlink_to(Path(site) / name)
    return {"PYTHONPATH": str(folder)}


@pytest.fixture(scope="module")
def reports(request):
    """Name of a case -> its report, made when it is asked for."""
    made = {}

    def of(name):
        if name not in made:
            environment = request.getfixturevalue("with_jax") if name == "flash" else {}
            code, made[name] = run(*CASES[name], **environment)
            assert (code, made[name]["verdict"], made[name]["by"]) == (0, "FITS", "compiler")
        return made[name]

    return of


@pytest.fixture(params=CASES)
def found(request, reports):
    return reports(request.param)


def named(report):
    return {buffer["what"] for buffer in report["memory"]["compiled"]["buffers"]}


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
    assert found["flops"]["traced"] == found["flops"]["total"] - found["flops"]["in_kernels"]


def test_weights_are_gathered_over_x_or_sent_round_it(found):
    sent = {(one["kind"], one["axis"]): one for one in found["collectives"]}
    moved = sum(one["wire_bytes"] for (_, axis), one in sent.items() if axis == "X" and one.get("count"))
    expected = sum(one["expected"]["wire_bytes"] for (_, axis), one in sent.items() if axis == "X" and one["expected"])
    assert 0.5 * expected < moved < 2 * expected


def test_the_flash_kernel_holds_no_scores(reports):
    _, written = run(*FLASH, "--trainer.strategy.flash_attention=false")
    flash = reports("flash")
    assert written["flops"]["in_kernels"] == 0 < flash["flops"]["in_kernels"]
    assert any("scores" in what for what in named(written))
    assert not any("scores" in what for what in named(flash))
    assert flash["total_bytes"] < written["total_bytes"]


def test_scores_are_computed_again_where_products_are_kept(reports):
    assert "attention scores of all layers, kept for the backward pass" not in named(reports("dots"))


def test_more_micro_batches_take_no_more_memory():
    few, many = (
        run(*EMBEDDING, f"--trainer.accumulate_grad_batches={n}", f"--data.tokens_per_batch={n * 8192}")[1]
        for n in (2, 4)
    )
    # one gradient of the embedding a micro-batch, if they were added up at the end
    assert many["total_bytes"] - few["total_bytes"] < 4 * 32768 * 2048
    for report in (few, many):
        assert report["memory"]["estimated_total"] == pytest.approx(report["total_bytes"], rel=0.15)


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
