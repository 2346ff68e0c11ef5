"""What `mutransformer plan` prints: a report of one step on one slice, a table of many, both as text or JSON."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from mutransformer.verify.capacity import MARGIN, Finding, remedies
from mutransformer.xla.collectives import Key, Sent

GIB = 2**30


def verdict(finding: Finding) -> str:
    """FITS or DOES NOT FIT, by how much."""
    spare = finding.capacity_bytes - finding.total_bytes
    if finding.fits:
        near = f"; so near the limit that an error of {MARGIN:.0%} would decide" if finding.is_close else ""
        return f"FITS, with {spare / GIB:.2f} GiB to spare{near}"
    return f"DOES NOT FIT, by {max(0, -spare) / GIB:.2f} GiB"


def as_dict(finding: Finding) -> dict[str, Any]:
    """The report as plain values; sizes are bytes on one chip."""
    w, time, compiled = finding.workload, finding.time, finding.compiled
    memory = {**dataclasses.asdict(finding.memory), "estimated_total": finding.memory.total}
    if compiled is not None:
        memory["compiled"] = {
            "arguments": compiled.argument_bytes,
            "in_place": compiled.in_place_bytes,
            "unaliased_results": compiled.unaliased_bytes,
            "temporaries": compiled.temporary_bytes,
            "buffers": [dataclasses.asdict(buffer) for buffer in compiled.buffers],
        }
    return {
        "topology": finding.slice_.name,
        "accelerator": finding.slice_.accelerator,
        "chips": finding.slice_.n_chips,
        "hosts": finding.slice_.n_hosts,
        "mesh": {"rows": w.mesh.rows, "cols": w.mesh.cols, "shard_vocab": w.shard_vocab},
        "parameters": sum(w.count(tensor) for tensor in w.decoder.tensors()),
        "tokens_per_step": w.n_tokens,
        "sequences_per_step": w.n_sequences,
        "micro_batches": w.n_micro_batch,
        "remat": w.decoder.remat,
        "flash_attention": w.flash_attention,
        "verdict": "FITS" if finding.fits else "DOES NOT FIT",
        "by": "arithmetic" if compiled is None else "compiler",
        "total_bytes": finding.total_bytes,
        "capacity_bytes": finding.capacity_bytes,
        "memory": memory,
        "collectives": [
            {
                "kind": kind,
                "axis": axis,
                **({} if sent is None else dataclasses.asdict(sent)),
                "expected": None if wanted is None else dataclasses.asdict(wanted),
            }
            for (kind, axis), sent, wanted in _both(finding)
        ],
        "flops": {
            **dataclasses.asdict(w.flops),
            "total": w.flops.total,
            "remat_factor": w.flops.remat_factor,
            "traced": None if compiled is None else compiled.traced_flops,
        },
        "estimate": {**dataclasses.asdict(time), "step_s": time.step_s, "bound_by": time.bound_by},
        "compiler": None
        if compiled is None
        else {
            "trace_s": compiled.trace_s,
            "compile_s": compiled.compile_s,
            "peak_rss_bytes": compiled.peak_rss_bytes,
            "versions": dict(compiled.versions),
        },
        "remedies": [] if finding.fits else remedies(finding),
    }


def report(finding: Finding) -> str:
    """The report for people."""
    w, slice_, memory, compiled = finding.workload, finding.slice_, finding.memory, finding.compiled
    n_parameters = sum(w.count(tensor) for tensor in w.decoder.tensors())
    lines = [
        f"{slice_.name} ({slice_.accelerator}): {_count(slice_.n_chips, 'chip')} on {_count(slice_.n_hosts, 'host')}, "
        f"mesh {w.mesh.rows} x {w.mesh.cols}",
        f"{n_parameters:,} parameters, {w.n_tokens:,} tokens a step in {w.n_sequences} sequences"
        + (f" and {w.n_micro_batch} micro-batches" if w.n_micro_batch > 1 else "")
        + f", remat {w.decoder.remat}, attention {'by the flash kernel' if w.flash_attention else 'written out'}",
        "",
        "memory on a chip, GiB" + (", by arithmetic" if compiled is None else ""),
        _size("parameters", memory.parameters),
        _size("optimizer", memory.optimizer),
    ]
    if compiled is None:
        lines += [
            _size("gradients", memory.gradients),
            _size("kept activations", memory.activations),
            _size("working memory", memory.working),
        ]
    else:
        stored = memory.parameters + memory.optimizer
        if compiled.argument_bytes:
            lines.append(_size("batch, padding", compiled.argument_bytes - stored))
        lines += [
            _size("temporaries", compiled.temporary_bytes + compiled.unaliased_bytes)
            + f"  (by arithmetic: gradients {memory.gradients / GIB:.2f}, kept activations "
            f"{memory.activations / GIB:.2f}, working memory {memory.working / GIB:.2f})"
        ]
    lines += [_size("total", finding.total_bytes) + f"  of {finding.capacity_bytes / GIB:.2f}"]
    if compiled is not None:
        lines[-1] += f"  (by arithmetic: {memory.total / GIB:.2f})"
        lines += ["", "largest temporaries, GiB"]
        lines += [
            f"  {buffer.n_bytes / GIB:8.3f}  {buffer.shape:<28} {buffer.what or 'unknown'} ({buffer.name})"
            for buffer in compiled.buffers
        ]
    lines += ["", *_collectives(finding), "", *_flops(finding), "", *_time(finding)]
    if compiled is not None:
        lines += [
            "",
            f"traced in {compiled.trace_s:.1f} s, compiled in {compiled.compile_s:.1f} s "
            f"({compiled.peak_rss_bytes / GIB:.2f} GiB) by libtpu {compiled.versions.get('libtpu')}",
        ]
    lines += ["", verdict(finding)]
    if not finding.fits:
        found = remedies(finding)
        lines.append(
            "by arithmetic, each of these alone would do:" if found else "no single change would do; see --search"
        )
        lines += [f"  {text}" for text in found]
    return "\n".join(lines)


def _count(n: int, what: str) -> str:
    return f"{n} {what}" if n == 1 else f"{n} {what}s"


def _size(name: str, n_bytes: int) -> str:
    return f"  {name:<18}{n_bytes / GIB:9.3f}"


def _both(finding: Finding) -> Iterable[tuple[Key, Sent | None, Sent | None]]:
    """Key, what was counted, what was expected."""
    counted: Mapping[Key, Sent] = finding.compiled.sent if finding.compiled is not None else {}
    for key in sorted({*counted, *finding.expected}):
        yield key, counted.get(key), finding.expected.get(key)


def _collectives(finding: Finding) -> list[str]:
    lines = ["collectives in a step                 counted            by arithmetic"]
    for (kind, axis), sent, wanted in _both(finding):
        texts = [
            f"{one.count:>6} {one.result_bytes / GIB:8.3f} GiB" if one else " " * 12 + "-" + " " * 6
            for one in (sent, wanted)
        ]
        lines.append(f"  {kind:<19} {axis:<3}  {texts[0]:>20}  {texts[1]:>20}")
    if len(lines) == 1:
        return ["collectives in a step: none"]
    if any(axis == "Y" for _, axis in finding.expected):
        lines.append("  those over Y are waited for; those over X can run while the chip computes")
    return lines


def _flops(finding: Finding) -> list[str]:
    w, flops, compiled = finding.workload, finding.workload.flops, finding.compiled
    n = sum(w.count(tensor) for tensor in w.decoder.tensors())
    lines = [
        f"operations in a step: {flops.total:.4g} = {flops.weights:.4g} with weights "
        f"({flops.weights / (6 * n * w.n_tokens):.3f} of 6 N D) + {flops.attention:.4g} attention "
        f"+ {flops.again:.4g} again",
        f"  rematerialization computes {flops.remat_factor:.3f} times what is useful",
    ]
    if compiled is not None:
        seen = flops.total - flops.in_kernels
        lines.append(f"  traced program: {compiled.traced_flops:.4g}, {compiled.traced_flops / seen:.4f} of that")
        lines[-1] += f" less {flops.in_kernels:.4g} in kernels" if flops.in_kernels else ""
    return lines


def _time(finding: Finding) -> list[str]:
    time, chip, n_tokens = finding.time, finding.slice_.chip, finding.workload.n_tokens
    ms = {name: f"{1e3 * seconds:.1f}" for name, seconds in dataclasses.asdict(time).items()}
    return [
        f"ESTIMATE of a step, a roofline at peak rates: {time.step_s * 1e3:.1f} ms, "
        f"{n_tokens / time.step_s:,.0f} tokens/s, MFU at most {time.mfu:.0%}; bound by {time.bound_by}",
        "  max(compute, memory, over X) + over Y = "
        f"max({ms['compute_s']}, {ms['memory_s']}, {ms['over_x_s']}) + {ms['over_y_s']} ms",
        f"  at {chip.flops_per_s / 1e12:g} TFLOP/s bfloat16, {chip.memory_bytes_per_s / 1e9:g} GB/s memory, "
        f"{chip.link_bytes_per_s / 1e9:g} GB/s a link and direction",
    ]


def overrides(finding: Finding) -> str:
    """The settings of a finding as they are typed for `fit`."""
    w = finding.workload
    return (
        f"--trainer.strategy.mesh_rows={w.mesh.rows} --trainer.strategy.mesh_cols={w.mesh.cols} "
        f"--model.decoder.remat={w.decoder.remat} --trainer.accumulate_grad_batches={w.n_micro_batch}"
    )


def search_table(findings: Sequence[Finding], n_most: int = 12) -> str:
    """Findings as a table, in the order given, and the overrides of the first that fits."""
    header = ("mesh", "remat", "micro-batches", "GiB", "by", "step ms", "MFU <=", "verdict")
    rows = [
        (
            f"{f.workload.mesh.rows}x{f.workload.mesh.cols}",
            f.workload.decoder.remat,
            str(f.workload.n_micro_batch),
            f"{f.total_bytes / GIB:.2f}",
            "arithmetic" if f.compiled is None else "compiler",
            f"{f.time.step_s * 1e3:.1f}",
            f"{f.time.mfu:.0%}",
            ("FITS, close" if f.is_close else "FITS") if f.fits else "DOES NOT FIT",
        )
        for f in findings[:n_most]
    ]
    widths = [max(len(row[i]) for row in (header, *rows)) for i in range(len(header))]
    lines = [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in (header, *rows)
    ]
    best = next((f for f in findings if f.fits), None)
    lines += ["", f"paste: {overrides(best)}" if best else "nothing fits"]
    return "\n".join(lines)
