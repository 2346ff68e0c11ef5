"""Does a run fit a TPU slice, and what would a step cost there? Asked before anyone has the slice.

By arithmetic alone, or from the program that libtpu compiles of the real step. `capacity_report.py` prints what is
found here; the command is `mutransformer plan`.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from mutransformer.errors import ConfigError
from mutransformer.training.module import DecoderModule, compute_dtype
from mutransformer.xla.collectives import Key, Sent, collectives
from mutransformer.xla.communication import expected
from mutransformer.xla.estimate import Memory, StepTime, estimate_memory, estimate_time
from mutransformer.xla.flops import dot_flops
from mutransformer.xla.hlo import shapes
from mutransformer.xla.libtpu import Compiled, compile_for
from mutransformer.xla.mesh import MeshShape
from mutransformer.xla.naming import Names
from mutransformer.xla.slices import Slice
from mutransformer.xla.workload import Workload

EFFORTS: Mapping[str, float | None] = {"full": None, "fast": -1.0}

# collectives with smaller results are sums of norms and losses, which the closed form leaves out
SMALL_BYTES = 64 * 2**10

# what the sum may be off by, see docs/plan.md
MARGIN = 0.15

_MASTER_BYTES = {"64": 8, "64-true": 8}


@dataclass(frozen=True)
class NamedBuffer:
    """A temporary with what it is.

    Args:
        n_bytes: on one chip.
        what: by the layer, empty where its sizes say nothing.
        shape: on one chip.
        name: the compiler's.
    """

    n_bytes: int
    what: str
    shape: str
    name: str


@dataclass(frozen=True, kw_only=True)
class FromCompiler:
    """What only the compiler knows.

    Args:
        argument_bytes: on one chip, padded.
        in_place_bytes: of them, what results take the place of: weights and optimizer state.
        unaliased_bytes: results that take no argument's place.
        temporary_bytes: on one chip.
        buffers: the largest temporaries.
        sent: collectives of one step; empty where it did not compile.
        traced_flops: matrix products of the traced step, on all chips.
        is_complete: it compiled; else memory ran out while it did.
        trace_s: seconds to trace and lower.
        compile_s: seconds to compile.
        peak_rss_bytes: of the compiling process.
        versions: of jax and libtpu.
    """

    argument_bytes: int
    in_place_bytes: int
    unaliased_bytes: int
    temporary_bytes: int
    buffers: tuple[NamedBuffer, ...]
    sent: Mapping[Key, Sent]
    traced_flops: int
    is_complete: bool
    trace_s: float
    compile_s: float
    peak_rss_bytes: int
    versions: Mapping[str, str]


@dataclass(frozen=True, kw_only=True)
class Finding:
    """All that is known of one step on one slice.

    Args:
        workload: the step.
        slice_: the slice.
        memory: by arithmetic.
        expected: collectives by arithmetic.
        compiled: what the compiler said; None: it was not asked.
    """

    workload: Workload
    slice_: Slice
    memory: Memory
    expected: Mapping[Key, Sent]
    compiled: FromCompiler | None = None

    @property
    def capacity_bytes(self) -> int:
        return self.slice_.chip.usable_bytes

    @property
    def total_bytes(self) -> int:
        """On one chip: by the compiler's figures where there are; arguments by the table's where it gave none."""
        compiled = self.compiled
        if compiled is None:
            return self.memory.total
        memory = self.memory
        arguments = compiled.argument_bytes or memory.parameters + memory.optimizer + memory.batch
        return arguments + compiled.unaliased_bytes + compiled.temporary_bytes

    @property
    def fits(self) -> bool:
        return self.total_bytes <= self.capacity_bytes and (self.compiled is None or self.compiled.is_complete)

    @property
    def is_close(self) -> bool:
        """Whether it fits by less than the sum may be off."""
        return self.fits and self.total_bytes * (1 + MARGIN) > self.capacity_bytes

    @property
    def time(self) -> StepTime:
        """A roofline, from counted collectives where there are."""
        sent = self.compiled.sent if self.compiled is not None and self.compiled.sent else self.expected
        return estimate_time(self.workload, self.slice_, sent)


def workload_of(
    module: DecoderModule,
    tokens_per_batch: int,
    precision: str,
    mesh: MeshShape,
    shard_vocab: bool = False,
    flash_attention: bool = False,
) -> Workload:
    """The step that a module would make.

    Args:
        module: before its weights are made.
        tokens_per_batch: on all chips together.
        precision: `trainer.precision`.
        mesh: rows and columns.
        shard_vocab: see `layout.spec_of`.
        flash_attention: whether attention is the strategy's kernel.
    Raises:
        ConfigError: the model or the batch cannot be cut as the mesh is, or the kernel is not for this model.
    """
    decoder = module.config["decoder"]
    master_bytes = _MASTER_BYTES.get(precision, 4)
    compute = compute_dtype(precision)
    workload = Workload(
        decoder=decoder,
        optimizer=module.optimizer_config,
        mesh=mesh,
        n_sequences=tokens_per_batch // decoder.sequence_len,
        n_micro_batch=module.n_micro_batch,
        compute_bytes=master_bytes if compute is None else compute.itemsize,
        master_bytes=master_bytes,
        shard_vocab=shard_vocab,
        flash_attention=flash_attention,
    )
    workload.check()
    return workload


def module_for(workload: Workload, module: DecoderModule) -> DecoderModule:
    """A module like this one that makes the workload's step."""
    own = {"decoder": workload.decoder, "n_micro_batch": workload.n_micro_batch, "compile": False}
    return DecoderModule(**{**module.hyper_parameters, **own})


def reckon(workload: Workload, slice_: Slice) -> Finding:
    """By arithmetic alone."""
    return Finding(
        workload=workload,
        slice_=slice_,
        memory=estimate_memory(workload),
        expected=expected(workload.exchanges),
    )


def compile_step(
    workload: Workload, slice_: Slice, module: DecoderModule, precision: str, python: str, effort: str = "full"
) -> Finding:
    """Traces the step without weights and compiles it for the slice.

    Args:
        workload: the step.
        slice_: the target, with as many chips as the mesh.
        module: as which a module is made for it.
        precision: `trainer.precision`.
        python: from `libtpu.find_python`.
        effort: key of EFFORTS.
    Raises:
        CompilationError: the compiler refused it for another reason than memory.
    """
    from mutransformer.training.abstract import lower_step
    from mutransformer.xla.sharding import Sharding

    started = time.monotonic()
    sharding = Sharding(workload.mesh, workload.shard_vocab)
    lowered = lower_step(
        module_for(workload, module), sharding, workload.n_sequences, precision, workload.flash_attention
    )
    trace_s = time.monotonic() - started
    compiled = compile_for(lowered, slice_, python, EFFORTS[effort])
    mesh = workload.mesh
    sent = collectives(compiled.optimized, mesh.rows, mesh.cols, SMALL_BYTES) if compiled.optimized else {}
    return replace(
        reckon(workload, slice_),
        compiled=FromCompiler(
            argument_bytes=compiled.argument_bytes,
            in_place_bytes=compiled.in_place_bytes,
            unaliased_bytes=compiled.unaliased_bytes,
            temporary_bytes=compiled.temporary_bytes,
            buffers=_named(compiled, workload),
            sent=sent,
            traced_flops=dot_flops(compiled.traced),
            is_complete=compiled.is_complete,
            trace_s=trace_s,
            compile_s=compiled.compile_s,
            peak_rss_bytes=compiled.peak_rss_bytes,
            versions=compiled.versions,
        ),
    )


def _named(compiled: Compiled, workload: Workload, n_most: int = 10) -> tuple[NamedBuffer, ...]:
    names = Names(workload)
    found = []
    for buffer in compiled.buffers[:n_most]:
        shape = next(iter(shapes(buffer.shape)), None)
        what = names.of(shape) if shape is not None else ""
        found.append(NamedBuffer(buffer.n_bytes, what, buffer.shape, buffer.name))
    return tuple(found)


def meshes(n_chips: int) -> Iterator[tuple[int, int]]:
    """All (rows, columns) of so many chips, the most rows first."""
    return ((n_chips // cols, cols) for cols in range(1, n_chips + 1) if n_chips % cols == 0)


def candidates(workload: Workload, slice_: Slice, max_micro_batch: int = 64) -> list[Finding]:
    """The meshes, rematerialization policies and micro-batches that can be, by arithmetic; those that fit come first.

    Args:
        workload: whose model and batch are kept.
        slice_: the target.
        max_micro_batch: most parts that a batch is split into.
    """
    policies = ("none", "dots", "block") if workload.decoder.scan_layers else ("none",)
    found = []
    for rows, cols in meshes(slice_.n_chips):
        mesh = MeshShape(rows=rows, cols=cols, n_hosts=slice_.n_hosts)
        n_micro = 1
        while n_micro <= max_micro_batch:
            for remat in policies:
                one = replace(workload, mesh=mesh, n_micro_batch=n_micro).with_remat(remat)
                try:
                    one.check()
                except ConfigError:
                    continue
                found.append(reckon(one, slice_))
            n_micro *= 2
    return sorted(found, key=_rank)


def search(
    workload: Workload,
    slice_: Slice,
    module: DecoderModule,
    precision: str,
    python: str | None,
    effort: str = "fast",
    n_compiled: int = 3,
) -> list[Finding]:
    """The best of `candidates`, compiled where a compiler is given; best first, those that fit before all others.

    Args:
        workload: see `candidates`.
        slice_: the target.
        module: see `compile_step`.
        precision: `trainer.precision`.
        python: from `libtpu.find_python`; None: by arithmetic alone.
        effort: key of EFFORTS.
        n_compiled: how many are compiled; more where these do not fit, up to twice as many.
    Raises:
        ConfigError: nothing can be cut so.
    """
    found = candidates(workload, slice_)
    if not found:
        raise ConfigError(
            "topology",
            slice_.name,
            f"no mesh of {slice_.n_chips} chips divides {workload.n_sequences} sequences and the model's widths",
            f"use a batch of a multiple of {slice_.n_chips} sequences, or a smaller slice",
        )
    if python is None:
        return found
    done: list[Finding] = []
    for one in found[: 2 * n_compiled]:
        if len(done) >= n_compiled and any(finding.fits for finding in done):
            break
        done.append(compile_step(one.workload, slice_, module, precision, python, effort))
    return sorted(done, key=_rank)


def _rank(finding: Finding) -> tuple[int, float, int]:
    """Those that fit whatever the error, then those that fit by the figures, each by time; then by what is missing."""
    if not finding.fits:
        return 2, float(finding.total_bytes - finding.capacity_bytes), finding.workload.n_micro_batch
    return int(finding.is_close), finding.time.step_s, finding.workload.n_micro_batch


def remedies(finding: Finding) -> list[str]:
    """Single changes under which a step that does not fit would, by arithmetic: as they are typed."""
    w, slice_ = finding.workload, finding.slice_
    short = finding.total_bytes - finding.capacity_bytes
    tried: list[tuple[str, Workload]] = []
    if w.decoder.scan_layers:
        tried += [(f"--model.decoder.remat={remat}", w.with_remat(remat)) for remat in ("dots", "block")]
    if w.decoder.attention_activation == "softmax":
        tried.append(("--trainer.strategy.flash_attention=true", replace(w, flash_attention=True)))
    for n_micro in (2, 4, 8, 16, 32, 64):
        tried.append(
            (
                f"--trainer.accumulate_grad_batches={w.n_micro_batch * n_micro}",
                replace(w, n_micro_batch=w.n_micro_batch * n_micro),
            )
        )
    for rows, cols in meshes(slice_.n_chips):
        mesh = MeshShape(rows=rows, cols=cols, n_hosts=slice_.n_hosts)
        tried.append((f"--mesh_rows={rows} --mesh_cols={cols}", replace(w, mesh=mesh)))
    found, kinds = [], set()
    for text, changed in tried:
        kind = text.partition("=")[0]
        if kind in kinds or changed == w:
            continue
        try:
            changed.check()
        except ConfigError:
            continue
        if estimate_memory(w).total - estimate_memory(changed).total >= short:
            found.append(text)
            kinds.add(kind)
    return found
