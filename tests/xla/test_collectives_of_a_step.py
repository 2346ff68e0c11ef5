"""What a compiled step sends, read from the partitioned program, against what "2D finalized" asks for."""

from __future__ import annotations

import cases
import on_devices
import pytest

from mutransformer.xla.collectives import collectives
from mutransformer.xla.communication import exchanges, expected
from mutransformer.xla.mesh import MeshShape

LARGE = ("all-gather", "reduce-scatter")
RUNS = [("dense", (4, 2)), ("dense", (2, 4)), ("swiglu", (8, 1)), ("gqa", (2, 4)), ("tied", (4, 2))]


def found_and_wanted(variant, mesh, precision="32-true", **decoder):
    text = on_devices.run(mesh[0] * mesh[1], "partitioned", mesh=mesh, variant=variant, precision=precision, **decoder)
    config = cases.make_module(variant, **decoder).config["decoder"]
    n_bytes = 2 if precision == "bf16-mixed" else 4
    shape = MeshShape(rows=mesh[0], cols=mesh[1])
    return collectives(text, *mesh), expected(exchanges(config, shape, cases.N_ROWS, compute_bytes=n_bytes))


def difference(found, wanted, kinds):
    """Kinds and axes whose bytes are more than a tenth off: (found, wanted)."""
    keys = [key for key in found.keys() | wanted.keys() if key[0] in kinds]
    bytes_of = {key: tuple(total[key].result_bytes if key in total else 0 for total in (found, wanted)) for key in keys}
    return {key: sizes for key, sizes in bytes_of.items() if abs(sizes[0] - sizes[1]) > 0.1 * sizes[1]}


@pytest.mark.parametrize("variant, mesh", RUNS, ids=str)
def test_a_step_gathers_and_scatters_what_the_layout_asks_for(variant, mesh):
    found, wanted = found_and_wanted(variant, mesh, remat="none")
    assert difference(found, wanted, LARGE) == {}
    # what is left: sums of gradients that are not cut over X, of logits over Y, and of norm statistics, which are small
    others = {kind for kind, _ in found} - {*LARGE, "all-reduce"}
    assert others == set()
    for axis in ("X", "Y"):
        extra = (
            found["all-reduce", axis].result_bytes - wanted["all-reduce", axis].result_bytes
            if axis != "Y" or mesh[1] > 1
            else 0
        )
        assert 0 <= extra <= 0.05 * sum(sent.result_bytes for sent in wanted.values())


def test_bfloat16_halves_all_but_what_is_summed_in_float32():
    found, wanted = found_and_wanted("dense", (4, 2), "bf16-mixed")
    assert difference(found, wanted, LARGE) == {}
    assert (
        found["all-gather", "X"].result_bytes * 2
        == found_and_wanted("dense", (4, 2))[0]["all-gather", "X"].result_bytes
    )


@pytest.mark.parametrize("plant", ["logits", "residual"])
def test_an_accidental_gather_is_found(plant):
    mesh = (4, 2)
    text = on_devices.run(8, "partitioned", mesh=mesh, variant="dense", precision="32-true", gathered=plant)
    wanted = found_and_wanted("dense", mesh)[1]
    assert ("all-gather", "X") in difference(collectives(text, *mesh), wanted, LARGE)
