"""What `plan` reckons without a compiler: slices, memory, operations, time, what would help."""

from __future__ import annotations

import importlib.util
import json
import re
import runpy
from dataclasses import replace
from pathlib import Path

import pytest

from mutransformer.cli import main
from mutransformer.errors import ConfigError
from mutransformer.model.axes import ACTIVATIONS
from mutransformer.model.config import DecoderConfig
from mutransformer.mup.config import OptimizerConfig
from mutransformer.verify.capacity import candidates, reckon, remedies
from mutransformer.verify.capacity_report import overrides, verdict
from mutransformer.xla.collectives import Sent
from mutransformer.xla.compile_slice import ENVIRONMENT
from mutransformer.xla.estimate import estimate_memory, estimate_time
from mutransformer.xla.flops import dot_flops, step_flops
from mutransformer.xla.hlo import Shape
from mutransformer.xla.libtpu import PYTHON, VERSIONS, CompilationError, allocations, find_python, used_bytes
from mutransformer.xla.mesh import MeshShape
from mutransformer.xla.naming import ACTIVATION_NAMES, Names
from mutransformer.xla.slices import CHIPS, Slice, all_slices
from mutransformer.xla.workload import Workload

GIB = 2**30
V5E = Slice.parse("v5e:4x4")


def workload(rows=4, cols=4, n_sequences=64, optimizer=None, n_micro_batch=1, **decoder):
    shape = {"d_model": 512, "n_layer": 4, "d_head": 64, "sequence_len": 512, "vocab_size": 4096, "remat": "block"}
    return Workload(
        decoder=DecoderConfig(**{**shape, **decoder}),
        optimizer=optimizer or OptimizerConfig(),
        mesh=MeshShape(rows=rows, cols=cols),
        n_sequences=n_sequences,
        n_micro_batch=n_micro_batch,
    )


# ---- slices ---------------------------------------------------------------------------------------------------------


def test_every_slice_is_found_by_both_of_its_names():
    assert all_slices()
    for slice_ in all_slices():
        assert Slice.parse(slice_.name) == Slice.parse(slice_.accelerator) == slice_


@pytest.mark.parametrize(
    ("name", "n_chips", "n_hosts"),
    [
        ("v5litepod-256", 256, 64),
        ("v5e-16", 16, 4),
        ("v5e:2x4", 8, 1),
        ("v4-32", 16, 4),
        ("v5p-128", 64, 16),
        ("v6e-1", 1, 1),
    ],
)
def test_names_count_what_google_counts(name, n_chips, n_hosts):
    slice_ = Slice.parse(name)
    assert (slice_.n_chips, slice_.n_hosts) == (n_chips, n_hosts)


@pytest.mark.parametrize("name", ["v5e:5x5", "v5e-17", "v9:2x2", ""])
def test_an_unknown_slice_is_refused_with_one_that_exists(name):
    with pytest.raises(ConfigError, match="topology") as refused:
        Slice.parse(name)
    assert re.search(r"v\d\w*[:-]\d|use one of v4, v5e", str(refused.value))


def test_an_axis_that_is_a_whole_ring_is_twice_as_fast_as_a_line_of_the_same_links():
    link = CHIPS["v5e"].link_bytes_per_s
    assert Slice.parse("v5e:16x16").axis_bytes_per_s(256, 1)["X"] == 4 * link  # two rings
    assert Slice.parse("v5e:16x16").axis_bytes_per_s(16, 16) == {"X": 2 * link, "Y": 2 * link}
    assert Slice.parse("v5e:4x4").axis_bytes_per_s(4, 4) == {"X": link, "Y": link}  # lines
    assert Slice.parse("v5e:16x16").axis_bytes_per_s(64, 4)["Y"] == link  # a part of a ring


# ---- memory ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("rows", "cols", "n_shards"), [(4, 4, 16), (16, 1, 16), (1, 1, 1)])
def test_a_matrix_of_a_block_is_cut_over_the_whole_mesh_and_the_embedding_over_y(rows, cols, n_shards):
    w = workload(rows, cols)
    assert w.on_chip["w_ff_in"] == 4 * 2048 * 512 // n_shards
    assert w.on_chip["embedding"] == 4096 * 512 // cols


def test_token_ids_take_eight_bytes_each_with_one_more_than_a_sequence_has():
    assert workload().batch_bytes == 8 * (64 // 4) * (512 + 1)


@pytest.mark.parametrize(
    ("optimizer", "per_weight"),
    [
        ({}, 8),
        ({"first_moment": "bfloat16"}, 6),
        ({"algorithm": "lion"}, 4),
        ({"algorithm": "lion", "first_moment": "bfloat16"}, 2),
        ({"algorithm": "sgd"}, 0),
        ({"algorithm": "sgd", "momentum": 0.9, "first_moment": "bfloat16"}, 4),
    ],
)
def test_bytes_of_the_optimizer(optimizer, per_weight):
    w = workload(optimizer=OptimizerConfig(**optimizer))
    assert w.optimizer_bytes == per_weight * sum(w.on_chip.values())
    assert w.parameter_bytes == 4 * sum(w.on_chip.values())


def test_rematerialization_and_micro_batches_trade_memory_for_nothing_that_is_stored():
    none, dots, block = (estimate_memory(workload(remat=remat)) for remat in ("none", "dots", "block"))
    assert none.activations > dots.activations > block.activations
    assert none.parameters == block.parameters
    split = estimate_memory(workload(n_micro_batch=4))
    assert split.activations == block.activations // 4
    assert split.gradients == block.gradients + block.parameters


def test_what_is_kept_of_a_rematerialized_layer_is_its_input():
    w = workload()
    assert estimate_memory(w).activations == 4 * 2 * (64 // 4) * 512 * 512 // 4  # layers, bytes, rows, length, width


# ---- operations -----------------------------------------------------------------------------------------------------


def test_operations_are_six_a_weight_and_token_without_the_embedding():
    decoder = DecoderConfig(d_model=512, n_layer=4, d_head=64, sequence_len=512, vocab_size=4096)
    n_weights = 4 * (4 * 512 * 512 + 2 * 512 * 2048) + 4096 * 512
    flops = step_flops(decoder, n_tokens=1000)
    assert flops.weights == 6 * n_weights * 1000
    assert flops.attention == 12 * 4 * 512 * 512 * 1000
    assert (flops.again, flops.remat_factor) == (0, 1)


def test_a_rematerialized_block_is_computed_again_but_for_its_last_product():
    decoder = DecoderConfig(d_model=512, n_layer=4, d_head=64, sequence_len=512, vocab_size=4096, remat="block")
    flops = step_flops(decoder, n_tokens=1000)
    assert flops.again == (2 * 4 * (4 * 512 * 512 + 512 * 2048) + 4 * 4 * 512 * 512) * 1000


def test_what_is_computed_again_is_the_scores_alone_where_products_are_kept_and_nothing_with_the_kernel():
    decoder = DecoderConfig(d_model=512, n_layer=4, d_head=64, sequence_len=512, vocab_size=4096, remat="dots")
    assert step_flops(decoder, n_tokens=1000).again == 2 * 4 * 512 * 512 * 1000
    flash = step_flops(decoder, n_tokens=1000, flash_attention=True)
    assert (flash.again, flash.in_kernels) == (0, flash.attention)


def test_operations_of_a_program_are_counted_loops_and_all():
    text = """\
HloModule step

body {
  s = (s32[], f32[8,16], f32[16,4]) parameter(0)
  i = s32[] get-tuple-element(s), index=0
  a = f32[8,16] get-tuple-element(s), index=1
  b = f32[16,4] get-tuple-element(s), index=2
  one = s32[] constant(1)
  next = s32[] add(i, one)
  product = f32[8,4] dot(a, b), lhs_contracting_dims={1}, rhs_contracting_dims={0}
  ROOT out = (s32[], f32[8,16], f32[16,4]) tuple(next, a, b)
}

condition {
  t = (s32[], f32[8,16], f32[16,4]) parameter(0)
  j = s32[] get-tuple-element(t), index=0
  limit = s32[] constant(5)
  ROOT more = pred[] compare(j, limit), direction=LT
}

ENTRY main {
  x = (s32[], f32[8,16], f32[16,4]) parameter(0)
  ROOT loop = (s32[], f32[8,16], f32[16,4]) while(x), condition=condition, body=body
}
"""
    assert dot_flops(text) == 5 * 2 * 8 * 4 * 16


# ---- time -----------------------------------------------------------------------------------------------------------


def test_a_step_without_collectives_is_bound_by_the_chip_and_one_with_many_by_the_links():
    w = workload(16, 1, n_sequences=256)
    free = estimate_time(w, V5E, {})
    assert free.compute_s == pytest.approx(w.flops.total / 16 / 197e12)
    assert free.step_s == max(free.compute_s, free.memory_s)
    busy = estimate_time(w, V5E, {("all-gather", "X"): Sent(1, 0, 1e12)})
    assert (busy.bound_by, busy.step_s) == ("collectives over X", busy.over_x_s)


def test_what_goes_over_y_is_added():
    w = workload()
    sent = {("all-gather", "Y"): Sent(1, 0, V5E.axis_bytes_per_s(4, 4)["Y"])}
    assert estimate_time(w, V5E, sent).step_s == pytest.approx(1 + estimate_time(w, V5E, {}).step_s)


# ---- verdicts and searches ------------------------------------------------------------------------------------------


def big(**changes):
    shape = {"d_model": 2048, "n_layer": 24, "d_head": 128, "sequence_len": 1024, "vocab_size": 32768}
    return workload(**{"rows": 16, "cols": 1, "n_sequences": 256, "remat": "none", **shape, **changes})


def test_what_would_help_does():
    finding = reckon(big(), V5E)
    assert not finding.fits
    assert verdict(finding).startswith("DOES NOT FIT, by ")
    found = remedies(finding)
    assert found[:2] == ["--model.decoder.remat=block", "--trainer.accumulate_grad_batches=8"]
    assert reckon(big(remat="block"), V5E).fits
    assert reckon(big(n_micro_batch=8), V5E).fits
    assert not reckon(big(n_micro_batch=4), V5E).fits


def test_candidates_are_of_every_mesh_and_the_best_comes_first():
    found = candidates(big(), V5E)
    shapes = {(one.workload.mesh.rows, one.workload.mesh.cols) for one in found}
    assert shapes == {(16, 1), (8, 2), (4, 4), (2, 8), (1, 16)}
    fits = [one.fits for one in found]
    assert fits == sorted(fits, reverse=True)
    assert not fits[-1]
    close = [one.is_close for one in found if one.fits]
    assert close == sorted(close)
    assert True in close and False in close
    times = [one.time.step_s for one in found if one.fits and not one.is_close]
    assert times == sorted(times)


def test_overrides_are_settings_of_fit():
    w = replace(big(remat="dots"), n_micro_batch=2)
    assert overrides(reckon(w, V5E)).split() == [
        "--trainer.strategy.mesh_rows=16",
        "--trainer.strategy.mesh_cols=1",
        "--model.decoder.remat=dots",
        "--trainer.accumulate_grad_batches=2",
    ]


# ---- names ----------------------------------------------------------------------------------------------------------


def test_every_activation_has_a_name():
    marked = {axes for marks in ACTIVATIONS.values() for axes in marks}
    assert set(ACTIVATION_NAMES) == {axes for axes in marked if "gathered" not in axes}


@pytest.mark.parametrize(
    ("sizes", "name"),
    [
        ((16, 2, 512, 512), "attention scores"),
        ((512, 16, 1, 128), "residual stream"),
        ((4, 16, 512, 128), "residual stream of all layers, kept for the backward pass"),
        ((16, 512, 4096), "logits"),
        ((8192, 4096), "logits"),
        ((4, 512, 128), "w_ff_in or its gradient"),
        ((7, 11), ""),
    ],
)
def test_an_array_is_named_by_its_sizes_on_a_chip(sizes, name):
    assert Names(workload()).of(Shape("bf16", sizes)) == name


# ---- what libtpu says, and where it is ------------------------------------------------------------------------------

MESSAGE = """RESOURCE_EXHAUSTED: Ran out of memory in memory space hbm. Used 21.45G of 15.75G hbm. Exceeded by 5.70G.

  Largest program allocations in hbm:

  1. Size: 12.00G
     Shape: f32[24,8,16,1024,1024]{3,4,2,1,0:T(8,128)}
     Unpadded size: 12.00G
     XLA label: broadcast.362 = broadcast(constant.1121), dimensions={}
     Allocation type: HLO temp
     ==========================

  2. Size: 48.00M
     Operator: op_name="convert.86"
     Shape: bf16[24,8192,128]{2,1,0:T(8,128)(2,1)}
     Unpadded size: 48.00M
     XLA label: convert.546 = convert(param.43)
     Allocation type: HLO temp
"""


def test_a_message_about_memory_is_read():
    assert used_bytes(MESSAGE) == int(21.45 * GIB)
    assert [(one.name, one.n_bytes, one.shape) for one in allocations(MESSAGE)] == [
        ("broadcast.362", 12 * GIB, "f32[24,8,16,1024,1024]"),
        ("convert.546", 48 * 2**20, "bf16[24,8192,128]"),
    ]


def test_a_message_about_one_buffer_larger_than_the_memory_is_read():
    message = (
        "RESOURCE_EXHAUSTED: Allocation (size=34359738368) would exceed memory (size=17179869184) :: #allocation178 "
        "[shape = 'f32[4,256,32,512,512]{3,4,2,1,0:T(8,128)}', space=hbm, size = 0xffffffffffffffff, "
        "tag = 'output of broadcast.354@{}'] :: <no-hlo-instruction>"
    )
    assert used_bytes(message) == 32 * GIB
    assert [(one.name, one.shape) for one in allocations(message)] == [("broadcast.354", "f32[4,256,32,512,512]")]


def test_another_failure_is_not_taken_for_want_of_memory():
    with pytest.raises(CompilationError, match="unimplemented"):
        used_bytes("RESOURCE_EXHAUSTED: unimplemented in hbm")


def test_a_python_without_the_compiler_is_refused_with_the_line_to_type(tmp_path, monkeypatch):
    python = tmp_path / "python"
    python.write_text('#!/bin/sh\necho \'{"jax": "0.7.1", "jaxlib": "0.7.0"}\'\n')
    python.chmod(0o755)
    with pytest.raises(ConfigError, match=r"jaxlib 0\.7\.0, libtpu missing.*pip install jax==0\.7\.1"):
        find_python(str(python))
    monkeypatch.setenv(PYTHON, str(tmp_path / "nothing"))
    with pytest.raises(ConfigError, match="compiler_python"):
        find_python()


def test_no_tpu_is_asked_for():
    assert ENVIRONMENT["JAX_PLATFORMS"] == "cpu"
    assert ENVIRONMENT["TPU_SKIP_MDS_QUERY"] == "1"


# ---- the command ----------------------------------------------------------------------------------------------------


ROOT = Path(__file__).parents[2]


def plan(capsys, *options):
    common = (f"--config={ROOT}/configs/large.yaml", "--trainer.precision=bf16-mixed", "--analytic", *options)
    return main(["plan", *common]), capsys.readouterr()


def test_a_run_that_fits_ends_with_zero_and_its_figures_add_up(capsys):
    code, output = plan(capsys, "--topology=v5litepod-16", "--data.tokens_per_batch=65536", "--json")
    found = json.loads(output.out)
    assert (code, found["verdict"], found["by"], found["mesh"]["rows"]) == (0, "FITS", "arithmetic", 16)
    memory = found["memory"]
    parts = ("parameters", "optimizer", "batch", "gradients", "activations", "working")
    assert found["total_bytes"] == sum(memory[part] for part in parts) == memory["estimated_total"]
    flops = found["flops"]
    assert flops["total"] == flops["weights"] + flops["attention"] + flops["again"]


def test_a_run_that_does_not_fit_ends_with_one_and_says_what_would(capsys):
    code, output = plan(capsys, "--topology=v5e:1x1", "--data.tokens_per_batch=262144")
    assert code == 1
    assert "DOES NOT FIT, by" in output.out
    assert "  --trainer.accumulate_grad_batches=16\n" in output.out
    assert "DOES NOT FIT" in output.err


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (["--topology=v5e:5x5"], "topology"),
        (["--topology=v5e:4x4"], "data.tokens_per_batch"),  # 8 sequences
        (["--topology=v5e:4x4", "--mesh_rows=3"], "mesh_rows"),
    ],
)
def test_a_mistake_ends_with_two_and_one_line(capsys, options, says):
    code, output = plan(capsys, "--data.tokens_per_batch=2048", *options)
    assert code == 2
    assert output.out == ""
    assert output.err.count("\n") == 1
    assert says in output.err


def test_without_torch_xla_the_step_cannot_be_traced(capsys, monkeypatch):
    find = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name, *more: None if name == "torch_xla" else find(name, *more)
    )
    code, output = plan(capsys, "--topology=v5e:4x4", "--data.tokens_per_batch=65536", "--analytic=false")
    assert code == 2
    assert "mutransformer[xla]" in output.err


def test_the_mesh_is_that_of_the_run_unless_it_is_given(capsys):
    options = ("--trainer.strategy.mesh_cols=4", "--data.tokens_per_batch=65536", "--topology=v5e:4x4", "--json")
    _, output = plan(capsys, *options)
    assert json.loads(output.out)["mesh"] == {"rows": 4, "cols": 4, "shard_vocab": False}
    _, output = plan(capsys, *options, "--mesh_rows=-1", "--mesh_cols=2")
    assert json.loads(output.out)["mesh"] == {"rows": 8, "cols": 2, "shard_vocab": False}


def test_flash_attention_holds_no_scores(capsys):
    options = ("--data.tokens_per_batch=65536", "--topology=v5e:4x4", "--trainer.strategy.mesh_rows=16")
    assert "attention written out" in plan(capsys, *options)[1].out
    flash = "--trainer.strategy.flash_attention=true"
    assert "attention by the flash kernel" in plan(capsys, *options, flash)[1].out
    _, output = plan(capsys, *options, "--json")
    _, without = plan(capsys, *options, flash, "--json")
    # in float32: sequences of a chip, heads, queries, keys; each of four layers keeps two
    scores = 4 * 16 * 32 * 256 * 256
    saved = json.loads(output.out)["memory"]["activations"] - json.loads(without.out)["memory"]["activations"]
    assert saved == 4 * 2 * scores
    # attention within documents is written out, whatever the strategy says
    assert "written out" in plan(capsys, *options, flash, "--data.attend_across_documents=false")[1].out


@pytest.mark.parametrize(
    ("option", "says"),
    [
        ("--model.decoder.attention_activation=elu", "is softmax attention, and the model has elu"),
        ("--data.sequence_len=640", "takes sequences of 128, 256, 512 or a multiple of 1024, not of 640"),
    ],
)
def test_flash_attention_is_not_for_every_model(capsys, option, says):
    options = ("--data.tokens_per_batch=81920", "--topology=v5e:4x4", "--trainer.strategy.mesh_rows=16")
    code, output = plan(capsys, *options, "--trainer.strategy.flash_attention=true", option)
    assert (code, output.out, output.err.count("\n")) == (2, "", 1)
    assert says in output.err


def test_a_search_prints_the_best_first_and_what_to_paste(capsys):
    code, output = plan(capsys, "--search", "--topology=v5e:2x2", "--data.tokens_per_batch=262144")
    lines = output.out.splitlines()
    assert code == 0
    assert "FITS" in lines[1]
    assert "DOES NOT" not in lines[1]
    assert lines[-1].startswith("paste: --trainer.strategy.mesh_rows=")


def test_the_table_in_the_document_is_what_the_script_prints():
    printed = runpy.run_path(str(ROOT / "scripts" / "plan_ladder.py"))["table"]()
    assert printed in (ROOT / "docs" / "plan.md").read_text(), "run scripts/plan_ladder.py and put its table there"


def test_the_extra_has_the_versions_that_are_asked_for():
    (pins,) = re.findall(r"^plan = (.+)$", (ROOT / "pyproject.toml").read_text(), flags=re.MULTILINE)
    assert json.loads(pins) == [f"{name}=={version}" for name, version in VERSIONS.items()]


def test_the_slices_can_be_listed(capsys):
    code, output = plan(capsys, "--topologies")
    assert code == 0
    assert output.out.splitlines()[1].split()[:3] == ["v4:2x2x1", "v4-8", "4"]
    assert len(output.out.splitlines()) == 1 + len(all_slices())
