"""`mutransformer plan`: from options to a report and a verdict."""

from __future__ import annotations

import json

from mutransformer.errors import CheckFailed
from mutransformer.training.module import DecoderModule, check_precision
from mutransformer.verify.capacity import compile_step, reckon, search, workload_of
from mutransformer.verify.capacity_report import as_dict, report, search_table, verdict
from mutransformer.xla.libtpu import CompilationError, find_python
from mutransformer.xla.mesh import MeshShape
from mutransformer.xla.slices import Slice


def plan_command(
    module: DecoderModule,
    *,
    tokens_per_batch: int,
    precision: str,
    topology: str,
    mesh: tuple[int, int] = (-1, 1),
    shard_vocab: bool = False,
    analytic: bool = False,
    search: bool = False,
    effort: str = "full",
    as_json: bool = False,
    compiler_python: str | None = None,
) -> None:
    """Prints whether a step fits a slice, and what it does there.

    Args:
        module: before its weights are made.
        tokens_per_batch: on all chips together.
        precision: `trainer.precision`.
        topology: either name of a slice.
        mesh: rows and columns; -1: what the other leaves.
        shard_vocab: see `layout.spec_of`.
        analytic: by arithmetic alone.
        search: try other meshes, rematerialization policies and micro-batches too.
        effort: the compiler's, `full` or `fast`.
        as_json: print JSON.
        compiler_python: see `libtpu.find_python`.
    Raises:
        ConfigError: a slice, a mesh or a batch that cannot be; the compiler is not there.
        CheckFailed: it does not fit, or nothing that was searched does.
    """
    precision = check_precision(precision)
    slice_ = Slice.parse(topology)
    python = None if analytic else find_python(compiler_python)
    try:
        if search:
            _search(module, tokens_per_batch, precision, slice_, shard_vocab, python, effort, as_json)
        else:
            shape = MeshShape.of(*mesh, slice_.n_chips, slice_.n_hosts)
            workload = workload_of(module, tokens_per_batch, precision, shape, shard_vocab)
            if python is None:
                finding = reckon(workload, slice_)
            else:
                finding = compile_step(workload, slice_, module, precision, python, effort)
            print(json.dumps(as_dict(finding), indent=2) if as_json else report(finding))
            if not finding.fits:
                raise CheckFailed(f"{slice_.name}: {verdict(finding)}")
    except CompilationError as error:
        raise CheckFailed(f"{slice_.name}: the TPU compiler refused the step: {error}") from error


def _search(
    module: DecoderModule,
    tokens_per_batch: int,
    precision: str,
    slice_: Slice,
    shard_vocab: bool,
    python: str | None,
    effort: str,
    as_json: bool,
) -> None:
    one_row = MeshShape(rows=1, cols=1)
    workload = workload_of(module, tokens_per_batch, precision, one_row, shard_vocab)
    found = search(workload, slice_, module, precision, python, effort)
    print(json.dumps([as_dict(one) for one in found], indent=2) if as_json else search_table(found))
    if not any(one.fits for one in found):
        raise CheckFailed(f"{slice_.name}: nothing that was tried fits")
