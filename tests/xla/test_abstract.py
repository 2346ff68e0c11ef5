"""The real step traced without weights: what the program takes and gives, and that nothing of 7B is ever in memory."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

pytestmark = pytest.mark.slow  # a process with torch_xla

PROGRAM = """
import json, resource, sys
from mutransformer.model.config import DecoderConfig
from mutransformer.mup.config import OptimizerConfig, ParametrizationConfig
from mutransformer.training.abstract import lower_step
from mutransformer.training.module import DecoderModule
from mutransformer.training.schedule import ScheduleConfig
from mutransformer.xla.mesh import MeshShape
from mutransformer.xla.sharding import Sharding

decoder, rows, cols, n_sequences, flash_attention = json.loads(sys.argv[1])
sys.modules["jax"] = None  # as where it is not installed
module = DecoderModule(
    DecoderConfig(**decoder), ParametrizationConfig(), OptimizerConfig(), ScheduleConfig(), gradient_clip=1.0
)
lowered = lower_step(module, Sharding(MeshShape(rows=rows, cols=cols)), n_sequences, "bf16-mixed", flash_attention)
print(json.dumps({
    "arguments": {one.name: [one.shape, one.sharding] for one in lowered.arguments if one.name},
    "sent": [one.shape for one in lowered.arguments if not one.name],
    "results": lowered.results,
    "n_hlo": len(lowered.hlo),
    "n_parameters": module.plan.count,
    "peak_rss": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
}))
"""


def trace(decoder, rows, cols, n_sequences, flash_attention=False):
    request = json.dumps([decoder, rows, cols, n_sequences, flash_attention])
    return subprocess.run([sys.executable, "-c", PROGRAM, request], capture_output=True, text=True, timeout=300)


def lower(*args, **options):
    done = trace(*args, **options)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize("scan_layers", [True, False])
def test_a_program_takes_weights_state_and_tokens_as_they_are_cut_and_gives_them_back(scan_layers):
    decoder = {"d_model": 128, "n_layer": 2, "d_head": 32, "sequence_len": 32, "vocab_size": 64}
    found = lower({**decoder, "scan_layers": scan_layers}, rows=4, cols=2, n_sequences=8)
    weights = [name for name in found["arguments"] if "." not in name]
    state = [f"{name}.{buffer}" for name in weights for buffer in ("exp_avg", "exp_avg_sq")]
    assert set(found["arguments"]) == {*weights, *state, "batch.tokens"}
    assert {"embedding", "w_query", "w_ff_out", "unembedding"} <= set(weights)
    assert found["results"][:2] == ["loss", "grad_norm"]
    assert set(found["results"][2:]) == {*weights, *state}
    assert found["arguments"]["w_ff_in"] == [[2, 512, 128], "{devices=[1,2,4]0,2,4,6,1,3,5,7}"]
    assert found["arguments"]["w_ff_in.exp_avg"] == found["arguments"]["w_ff_in"]
    assert found["arguments"]["batch.tokens"] == [[8, 33], "{devices=[4,1,2]0,1,2,3,4,5,6,7 last_tile_dim_replicate}"]
    assert [len(weights), 3] in found["sent"]  # learning rates and bias corrections: one small tensor a step


def test_seven_billion_weights_are_traced_in_two_gibibytes():
    decoder = {
        "d_model": 4096,
        "n_layer": 32,
        "d_head": 128,
        "sequence_len": 2048,
        "vocab_size": 32768,
        "remat": "block",
    }
    found = lower(decoder, rows=256, cols=1, n_sequences=256)
    assert found["n_parameters"] > 6e9
    assert found["peak_rss"] < 2 * 2**30
    assert found["n_hlo"] < 5e6


def test_flash_attention_needs_jax_where_the_step_is_traced():
    decoder = {"d_model": 128, "n_layer": 2, "d_head": 64, "sequence_len": 128, "vocab_size": 64}
    done = trace(decoder, rows=4, cols=2, n_sequences=8, flash_attention=True)
    assert "trainer.strategy.flash_attention=True: needs jax; pip install" in done.stderr
