"""Prints the table of docs/plan.md: models from small to 13B on four slices, by arithmetic, the best that fits of each.

    python scripts/plan_ladder.py

tests/xla/test_plan_arithmetic.py compares the document with it.
"""

from __future__ import annotations

from mutransformer.model.config import DecoderConfig
from mutransformer.mup.config import OptimizerConfig
from mutransformer.verify.capacity import candidates
from mutransformer.xla.mesh import MeshShape
from mutransformer.xla.slices import Slice
from mutransformer.xla.workload import Workload

GIB = 2**30
SLICES = ("v5e:16x16", "v6e:16x16", "v4:4x8x8", "v5p:4x4x8")
TOKENS_PER_STEP = 2**21
_LADDER = {"n_layer": 4, "d_head": 64, "sequence_len": 256, "vocab_size": 384}
_LLAMA = {"activation": "swiglu", "d_head": 128, "sequence_len": 2048, "vocab_size": 32768, "ff_multiple": 2.6875}
# name -> (decoder; of the ladder as in configs/, of the others as Llama's)
MODELS = {
    "small": {**_LADDER, "d_model": 128},
    "medium": {**_LADDER, "d_model": 512},
    "large": {**_LADDER, "d_model": 2048},
    "huge": {**_LADDER, "d_model": 8192},
    "1.3B": {**_LLAMA, "d_model": 2048, "n_layer": 24},
    "6.7B": {**_LLAMA, "d_model": 4096, "n_layer": 32},
    "13B": {**_LLAMA, "d_model": 5120, "n_layer": 40},
}


def rows() -> list[tuple[str, ...]]:
    """Model, slice, mesh, remat, micro-batches, GiB, milliseconds, MFU."""
    found = []
    for name, shape in MODELS.items():
        decoder = DecoderConfig(**shape)
        for slice_name in SLICES:
            workload = Workload(
                decoder=decoder,
                optimizer=OptimizerConfig(),
                mesh=MeshShape(rows=1, cols=1),
                n_sequences=TOKENS_PER_STEP // decoder.sequence_len,
            )
            best = candidates(workload, Slice.parse(slice_name))[0]
            w, capacity = best.workload, best.capacity_bytes / GIB
            fits = "fits" if best.fits else "does not fit"
            found.append(
                (
                    name,
                    slice_name,
                    f"{w.mesh.rows} x {w.mesh.cols}",
                    w.decoder.remat,
                    str(w.n_micro_batch),
                    f"{fits}, {best.total_bytes / GIB:.2f} of {capacity:.2f}",
                    f"{best.time.step_s * 1e3:.1f}",
                    f"{best.time.mfu:.0%}",
                )
            )
    return found


def table() -> str:
    """The Markdown table."""
    header = ("model", "slice", "mesh", "remat", "micro-batches", "GiB on a chip", "step, ms, at least", "MFU, at most")
    lines = [header, ("---",) * len(header), *rows()]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


if __name__ == "__main__":
    print(table())
