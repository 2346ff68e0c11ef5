"""Counting in HLO text: loops, axes, what is a reduce-scatter, what is written twice; and the closed form."""

from __future__ import annotations

import pytest

from mutransformer.model.config import DecoderConfig
from mutransformer.xla.collectives import Sent, collectives, listed, wire_bytes
from mutransformer.xla.communication import exchanges, expected
from mutransformer.xla.hlo import Program, shapes
from mutransformer.xla.mesh import MeshShape

# by hand: four devices, two rows by two columns; device = row * 2 + column
ROWS, COLS = 2, 2
MODULE = """\
HloModule step, entry_computation_layout={(f32[8]{0})->f32[8]{0}}

%add (a: f32[], b: f32[]) -> f32[] {
  %a = f32[] parameter(0)
  %b = f32[] parameter(1)
  ROOT %sum = f32[] add(%a, %b)
}

%scattered (p: f32[8]) -> f32[4] {
  %p = f32[8]{0} parameter(0)
  %at = s32[] constant(0)
  %whole = f32[8]{0} all-reduce(%p), channel_id=7, replica_groups={{0,2},{1,3}}, to_apply=%add
  ROOT %part = f32[4]{0} dynamic-slice(%whole, %at), dynamic_slice_sizes={4}
}

%body (state: (s32[], f32[8])) -> (s32[], f32[8]) {
  %state = (s32[], f32[8]{0}) parameter(0)
  %i = s32[] get-tuple-element(%state), index=0
  %x = f32[8]{0} get-tuple-element(%state), index=1
  %step = s32[] constant(STEP)
  %next = s32[] add(%i, %step)
  %gathered = f32[16]{0} all-gather(%x), channel_id=1, replica_groups=[2,2]<=[2,2]T(1,0), dimensions={0}
  %half = f32[8]{0} slice(%gathered), slice={[0:8]}
  ROOT %out = (s32[], f32[8]{0}) tuple(%next, %half)
}

%condition (state.1: (s32[], f32[8])) -> pred[] {
  %state.1 = (s32[], f32[8]{0}) parameter(0)
  %i.1 = s32[] get-tuple-element(%state.1), index=0
  %limit = s32[] constant(12)
  ROOT %more = pred[] compare(%i.1, %limit), direction=LT
}

ENTRY %main (x.0: f32[8]) -> f32[8] {
  %x.0 = f32[8]{0:T(256)} parameter(0)
  %zero = s32[] constant(0)
  %start = (s32[], f32[8]{0}) tuple(%zero, %x.0)
  %loop = (s32[], f32[8]{0:T(256)S(1)}) while(%start), condition=%condition, body=%bodyNOTE
  %y = f32[8]{0} get-tuple-element(%loop), index=1
  %part.1 = f32[4]{0} fusion(%y), kind=kCustom, calls=%scattered
  %begun = (f32[4]{0}, f32[8]{0}) all-gather-start(%part.1), channel_id=2, replica_groups=[2,2]<=[4], dimensions={0}
  %again = (f32[4]{0}, f32[8]{0}) all-gather-start(%part.1), channel_id=2, replica_groups=[2,2]<=[4], dimensions={0}
  %z = f32[8]{0} all-gather-done(%begun)
  %total = f32[8]{0} all-reduce(%z), channel_id=3, replica_groups={}, to_apply=%add
  %moved = f32[8]{0} collective-permute(%total), channel_id=4, source_target_pairs={{0,1},{1,0},{2,2},{3,3}}
  %stays = f32[8]{0} collective-permute(%moved), channel_id=5, source_target_pairs={{0,0},{1,1},{2,2},{3,3}}
  ROOT %result = f32[8]{0} add(%stays, %total)
}
"""


def module(step=1, note=""):
    return MODULE.replace("STEP", str(step)).replace("NOTE", note)


def test_each_collective_is_counted_by_what_it_does_and_where():
    assert collectives(module(), ROWS, COLS) == {
        ("all-gather", "X"): Sent(12, 12 * 64, 12 * 32.0),
        ("all-gather", "Y"): Sent(1, 32, 16.0),  # started twice under one channel
        ("all-reduce", "XY"): Sent(1, 32, 48.0),
        ("collective-permute", "Y"): Sent(1, 32, 32.0),  # the other moves nothing
        ("reduce-scatter", "X"): Sent(1, 16, 16.0),
    }


@pytest.mark.parametrize(("step", "note", "n"), [(1, "", 12), (5, "", 3), (1, ', x={"known_trip_count":{"n":"7"}}', 7)])
def test_a_loop_counts_as_often_as_it_goes_round(step, note, n):
    program = Program.parse(module(step, note))
    assert program.executions == {"main": 1, "body": n, "scattered": 1}


def test_a_loop_without_a_limit_is_an_error():
    text = module().replace("s32[] constant(12)", "s32[] parameter(1)")
    with pytest.raises(ValueError, match="loop"):
        collectives(text, ROWS, COLS)


def test_text_without_an_entry_is_an_error():
    with pytest.raises(ValueError, match="ENTRY"):
        collectives("no program", ROWS, COLS)


@pytest.mark.parametrize(
    "change", [("f32[4]{0} dynamic-slice", "f32[2]{0} dynamic-slice"), ("dynamic-slice(", "slice(")]
)
def test_an_all_reduce_that_is_not_cut_to_one_share_stays_one(change):
    assert ("all-reduce", "X") in collectives(module().replace(*change), ROWS, COLS)
    assert ("all-reduce", "X") not in collectives(module(), ROWS, COLS)


def test_small_ones_can_be_left_out():
    assert set(collectives(module(), ROWS, COLS, min_bytes=33)) == {("all-gather", "X")}


@pytest.mark.parametrize(("rows", "cols", "axis"), [(2, 2, "X"), (4, 1, "X"), (1, 4, "Y")])
def test_the_axis_depends_on_how_devices_lie(rows, cols, axis):
    gathered = next(one for one in listed(module(), rows, cols) if one.shapes[0].sizes == (16,))
    assert (gathered.axis, gathered.n_devices) == (axis, 2)


def test_shapes_of_a_tuple_with_layouts_and_comments():
    text = "(s32[], bf16[2,3]{1,0:T(8,128)(2,1)S(1)}, /*index=5*/pred[7]{0})"
    assert [(s.dtype, s.sizes, s.n_bytes) for s in shapes(text)] == [
        ("s32", (), 4),
        ("bf16", (2, 3), 12),
        ("pred", (7,), 7),
    ]


@pytest.mark.parametrize("n", [1, 2, 8])
def test_what_a_ring_sends_adds_up(n):
    """An all-reduce is a reduce-scatter, then an all-gather, of the same array."""
    whole = 1024.0
    parts = wire_bytes("reduce-scatter", whole / n, n) + wire_bytes("all-gather", whole, n)
    assert wire_bytes("all-reduce", whole, n) == parts == (0 if n == 1 else 2 * whole * (n - 1) / n)


DECODER = DecoderConfig(d_model=128, n_layer=4, d_head=32, sequence_len=64, vocab_size=256)


def test_the_closed_form_is_what_was_counted_on_eight_devices():
    """Counted once in the program that XLA:CPU compiled, layers unrolled; it kept some gathered weights: 32, not 48."""
    form = expected(exchanges(DECODER, MeshShape(rows=4, cols=2), n_sequences=8))
    assert {key: (sent.count, sent.result_bytes) for key, sent in form.items()} == {
        ("all-gather", "X"): (48, 3 * 2**20),
        ("all-gather", "Y"): (24, 3 * 2**19),
        ("all-reduce", "X"): (2, 2**17),
        ("all-reduce", "Y"): (1, 2**17),
        ("reduce-scatter", "X"): (24, 3 * 2**17),
        ("reduce-scatter", "Y"): (24, 3 * 2**18),
    }


def test_a_mesh_with_one_device_on_an_axis_sends_nothing_over_it():
    assert {axis for _, axis in expected(exchanges(DECODER, MeshShape(rows=8, cols=1), 8))} == {"X"}
    assert {axis for _, axis in expected(exchanges(DECODER, MeshShape(rows=1, cols=4), 8))} == {"Y"}
    assert exchanges(DECODER, MeshShape(rows=1, cols=1), 8) == []


def test_micro_batches_gather_the_weights_again_and_send_the_stream_once():
    whole, split = (expected(exchanges(DECODER, MeshShape(rows=2, cols=2), 8, n_micro_batch=n)) for n in (1, 4))
    assert split["all-gather", "X"].result_bytes == 4 * whole["all-gather", "X"].result_bytes
    assert split["all-gather", "Y"].result_bytes == whole["all-gather", "Y"].result_bytes
    assert split["all-gather", "Y"].count == 4 * whole["all-gather", "Y"].count
