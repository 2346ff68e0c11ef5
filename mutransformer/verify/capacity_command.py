"""`mutransformer plan`: from options to a report and a verdict."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Mapping
from typing import Any

from mutransformer.errors import CheckFailed, ConfigError
from mutransformer.training.module import DecoderModule
from mutransformer.verify.capacity import compile_step, reckon, search, workload_of
from mutransformer.verify.capacity_report import as_dict, report, search_table, verdict
from mutransformer.xla.libtpu import CompilationError, find_python
from mutransformer.xla.mesh import MeshShape
from mutransformer.xla.slices import Slice
from mutransformer.xla.workload import Workload


def plan_command(
    module: DecoderModule,
    *,
    tokens_per_batch: int,
    trainer: Mapping[str, Any],
    topology: str,
    within_documents: bool = False,
    mesh_rows: int | None = None,
    mesh_cols: int | None = None,
    shard_vocab: bool | None = None,
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
        trainer: the section `trainer`; its precision is read, its strategy's `flash_attention`, and the strategy for
            what is None below.
        topology: either name of a slice.
        within_documents: attention stays within documents, which the kernel is not for; planned as if over all.
        mesh_rows: X; -1: what the columns leave.
        mesh_cols: Y; -1: what the rows leave.
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
    precision = str(trainer["precision"])
    slice_ = Slice.parse(topology)
    strategy = trainer["strategy"].get("init_args") or {} if isinstance(trainer["strategy"], Mapping) else {}
    defaults = {"mesh_rows": -1, "mesh_cols": 1, "shard_vocab": False, "flash_attention": False, **strategy}
    has_flash = bool(defaults["flash_attention"]) and not within_documents
    given = {"mesh_rows": mesh_rows, "mesh_cols": mesh_cols, "shard_vocab": shard_vocab}
    rows, cols, is_vocab_cut = (defaults[name] if value is None else value for name, value in given.items())
    if not analytic and importlib.util.find_spec("torch_xla") is None:
        raise ConfigError(
            "analytic",
            False,
            "tracing the step needs torch_xla",
            'pip install "mutransformer[xla]", or give --analytic',
        )
    python = None if analytic else find_python(compiler_python)
    try:
        if search:
            one_row = MeshShape(rows=1, cols=1)
            workload = workload_of(module, tokens_per_batch, precision, one_row, is_vocab_cut, has_flash)
            _search(workload, module, precision, slice_, python, effort, as_json)
        else:
            shape = MeshShape.of(rows, cols, slice_.n_chips, slice_.n_hosts)
            workload = workload_of(module, tokens_per_batch, precision, shape, is_vocab_cut, has_flash)
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
    workload: Workload,
    module: DecoderModule,
    precision: str,
    slice_: Slice,
    python: str | None,
    effort: str,
    as_json: bool,
) -> None:
    found = search(workload, slice_, module, precision, python, effort)
    print(json.dumps([as_dict(one) for one in found], indent=2) if as_json else search_table(found))
    if not any(one.fits for one in found):
        raise CheckFailed(f"{slice_.name}: nothing that was tried fits")
