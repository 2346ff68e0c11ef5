"""A real study, small: muP keeps its best learning rate over a factor of four in width, and SP does not."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from mutransformer.cli import main

CONFIG = Path(__file__).resolve().parents[2] / "configs" / "transfer.yaml"


@pytest.mark.slow
def test_mup_transfers_and_sp_does_not(tmp_path):
    options = [
        "--config",
        str(CONFIG),
        "--trainer.max_steps=120",
        "--model.schedule.warmup_steps=12",
        "--data.tokens_per_batch=512",
        "--widths=[32,64,128]",
        "--log2_learning_rates=[-8,-7,-6,-5,-4,-3]",
        "--seeds=[1,2]",
        "--jobs=2",
        f"--out={tmp_path}",
    ]
    main(["transfer", *options])  # so short a run need not pass: noise is a tenth of what so little width gains
    verdict = json.loads((tmp_path / "verdict.json").read_text())
    found = {finding["name"]: finding["passed"] for finding in verdict["findings"]}
    assert found["mup: grid"] and found["mup: drift"] and found["control sp fails"], verdict["findings"]
    mup, sp = verdict["figures"]["sweeps"]
    assert sp["drift_octaves"]["mean"] < -1 < mup["drift_octaves"]["mean"] < 1
    mup_regret, sp_regret = (sweep["sizes"][-1]["regret_nats"]["mean"] for sweep in (mup, sp))
    assert mup_regret < sp_regret / 2
