"""Compiles a lowered step for a TPU slice with libtpu, which needs no TPU for that; a script for a process of its own.

    python -I mutransformer/xla/compile_slice.py FOLDER

Runs where jax and libtpu of the versions in the extra `plan` are installed; imports nothing of this package. FOLDER
holds `step.pb` (HLO) and `request.json`; what comes out is `result.json`, `step.hlo` (the program as text) and, where
it compiled, `optimized.hlo`.
"""

# pyright: reportMissingImports=false
from __future__ import annotations

import json
import os
import re
import resource
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

# a TPU that is not asked for, and the flags that torch_xla itself starts libtpu with
ENVIRONMENT = {
    "JAX_PLATFORMS": "cpu",
    "TPU_SKIP_MDS_QUERY": "1",
    "TPU_ACCELERATOR_TYPE": "v5litepod-16",
    "TPU_WORKER_HOSTNAMES": "localhost",
    "TPU_WORKER_ID": "0",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
    "TPU_MIN_LOG_LEVEL": "3",
    "TF_CPP_MIN_LOG_LEVEL": "3",
}
FLAGS = (
    "--xla_tpu_use_enhanced_launch_barrier=false --xla_latency_hiding_scheduler_rerun=1 "
    "--xla_tpu_prefer_async_allgather_to_allreduce=true --xla_tpu_enable_flash_attention=false"
)
FLAGS_V5 = " --xla_enable_async_all_gather=true --xla_enable_async_collective_permute=true"


def main(folder: Path) -> None:
    """Reads the request in the folder and writes the result there."""
    request = json.loads((folder / "request.json").read_text())
    os.environ.update(ENVIRONMENT)
    os.environ["LIBTPU_INIT_ARGS"] = FLAGS + (FLAGS_V5 if request["topology"].startswith("v5") else "")
    result = compile_step((folder / "step.pb").read_bytes(), request, folder)
    result["peak_rss_bytes"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    (folder / "result.json").write_text(json.dumps(result))


def compile_step(hlo: bytes, request: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Compiles; says what it needs of a device's memory, or that it does not fit.

    Args:
        hlo: the program.
        request: `topology`, its `options`, `arguments` ({name, sharding}), `results` (names), `effort` (None or -1..1).
        folder: for the text of the optimized program.
    """
    import jax
    import libtpu
    import numpy as np
    from jax.experimental import topologies
    from jaxlib import _jax
    from jaxlib import xla_client as xc

    versions = {"jax": jax.__version__, "libtpu": getattr(libtpu, "__version__", "?")}
    slice_ = topologies.get_topology_desc(
        platform="tpu", topology_name=request["topology"], **{k: _frozen(v) for k, v in request["options"].items()}
    )
    devices = slice_.devices
    n = len(devices)
    if n != request["n_devices"]:
        raise ValueError(f"{request['topology']} has {n} devices, the program is for {request['n_devices']}")

    traced = _jax.XlaComputation(hlo)
    (folder / "step.hlo").write_text(traced.as_hlo_text())
    bytecode = _annotated(_jax.mlir.xla_computation_to_mlir_module(traced), request, n)
    options = xc.CompileOptions()
    options.num_replicas, options.num_partitions = 1, n
    build = options.executable_build_options
    build.num_replicas, build.num_partitions = 1, n
    build.use_spmd_partitioning, build.use_shardy_partitioner = True, False
    if request["effort"] is not None:
        build.exec_time_optimization_effort = float(request["effort"])
    options.device_assignment = xc.DeviceAssignment.create(np.array(sorted(d.id for d in devices)).reshape(1, n))
    result: dict[str, Any] = {"versions": versions}
    with tempfile.TemporaryDirectory() as dump:
        options.env_option_overrides = [("xla_dump_to", dump), ("xla_dump_hlo_as_text", True)]
        started = time.monotonic()
        try:
            program = devices[0].client.compile(bytecode, _jax.DeviceList(tuple(devices)), options)
        except _jax.XlaRuntimeError as error:
            result["compile_s"] = time.monotonic() - started
            is_memory = "RESOURCE_EXHAUSTED" in str(error) and "hbm" in str(error)
            result["out_of_memory" if is_memory else "error"] = str(error)
            return result
        result["compile_s"] = time.monotonic() - started
        result["buffers"] = _buffers(Path(dump))
    memory = program.get_compiled_memory_stats()
    result["memory"] = {
        name: getattr(memory, f"{name}_size_in_bytes")
        for name in ("argument", "output", "alias", "temp", "generated_code")
    }
    (folder / "optimized.hlo").write_text(program.hlo_modules()[0].to_string())
    return result


def _buffers(dump: Path, n_most: int = 30) -> list[dict[str, Any]]:
    """The largest temporaries in the order of their size, one for each place in memory: name, bytes, shape."""
    for file in dump.glob("*buffer-assignment.txt"):
        temporaries = re.findall(r"^allocation \d+: size \d+, preallocated-temp:\n((?: .*\n)*)", file.read_text(), re.M)
        values = [
            (int(size), int(offset), name, shape)
            for text in temporaries[:1]  # further ones are in other memories
            for name, size, offset, shape in re.findall(
                r"value: <\d+ (\S+) @\d+> \(size=(\d+),offset=(\d+)\): (\S+)", text
            )
        ]
        places: list[tuple[int, int]] = []
        found = []
        for size, offset, name, shape in sorted(values, reverse=True):
            if all(offset + size <= start or end <= offset for start, end in places):
                places.append((offset, offset + size))
                found.append({"name": name, "bytes": size, "shape": shape.partition("{")[0]})
        return found[:n_most]
    return []


def _annotated(text: str, request: dict[str, Any], n_devices: int) -> bytes:
    """The module, as bytecode, with shardings, and which results take the place of which arguments."""
    from jax._src.interpreters import mlir as jax_mlir
    from jax._src.lib.mlir import ir

    arguments, results = request["arguments"], request["results"]
    sharding_of = {argument["name"]: argument["sharding"] for argument in arguments if argument["name"]}
    with jax_mlir.make_ir_context(), ir.Location.unknown():
        module = ir.Module.parse(text)
        main = next(
            op for op in module.body if op.operation.name == "func.func" and op.attributes["sym_name"].value == "main"
        )
        string, number = ir.StringAttr.get, lambda n: ir.IntegerAttr.get(ir.IntegerType.get_signless(32), n)
        of_arguments = []
        for argument in arguments:
            attributes = {"mhlo.sharding": string(argument["sharding"])}
            if argument["name"] in results:
                attributes["tf.aliasing_output"] = number(results.index(argument["name"]))
            of_arguments.append(ir.DictAttr.get(attributes))
        main.arg_attrs = ir.ArrayAttr.get(of_arguments)
        main.result_attrs = ir.ArrayAttr.get(
            [ir.DictAttr.get({"mhlo.sharding": string(sharding_of.get(name, "{replicated}"))}) for name in results]
        )
        module.operation.attributes["mhlo.num_partitions"] = number(n_devices)
        module.operation.attributes["mhlo.num_replicas"] = number(1)
        return jax_mlir.module_to_bytecode(module)


def _frozen(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value


if __name__ == "__main__":
    main(Path(sys.argv[1]))
