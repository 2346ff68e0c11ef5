from __future__ import annotations

import importlib.util
import subprocess
import sys

import pytest
import torch
from lightning.pytorch import Trainer

from mutransformer.errors import ConfigError
from mutransformer.training import engine
from mutransformer.training.engine import STRATEGY_CLASS, engine_options, mode_of

AS_CONFIGURED = {"class_path": STRATEGY_CLASS, "init_args": {"mesh_rows": 4, "mesh_cols": 2}}


def test_plain_torch_is_left_to_lightning():
    assert engine_options("cpu", "auto") == {"strategy": "auto"}
    assert engine_options("auto", "ddp") == {"strategy": "ddp"}


@pytest.mark.parametrize("accelerator", ["tpu", "xla", "auto"])
def test_xla_by_its_name_or_its_strategy(accelerator, monkeypatch):
    monkeypatch.setenv("PJRT_DEVICE", "TPU")
    options = engine_options(accelerator, AS_CONFIGURED)
    strategy = options["strategy"]
    assert (strategy.mesh_rows, strategy.mesh_cols) == (4, 2)
    assert options["accelerator"].name() == "xla"
    assert options["inference_mode"] is False
    assert engine_options("xla", strategy)["strategy"] is strategy
    assert engine_options("tpu", "auto")["strategy"].mesh_rows == -1


def test_auto_takes_a_tpu_where_there_is_one(monkeypatch):
    assert engine_options("auto", "auto") == {"strategy": "auto"}
    monkeypatch.setattr(engine, "_has_tpu", lambda: True)
    assert engine_options("auto", "auto")["accelerator"].name() == "xla"
    assert engine_options("cpu", "auto") == {"strategy": "auto"}


def test_a_tpu_that_is_not_there_is_no_cpu(monkeypatch):
    for device in ("", "CPU"):
        monkeypatch.setenv("PJRT_DEVICE", device)
        with pytest.raises(ConfigError, match=r"trainer.accelerator='tpu': there is no TPU here; use xla"):
            engine_options("tpu", "auto")
    monkeypatch.setattr(engine, "_has_tpu", lambda: True)
    assert engine_options("tpu", "auto")["accelerator"].name() == "xla"


def test_what_does_not_go_together():
    with pytest.raises(ConfigError, match=r"trainer.accelerator='cpu': is not what .*SPMDStrategy drives; use xla"):
        engine_options("cpu", AS_CONFIGURED)
    with pytest.raises(ConfigError, match=r"trainer.strategy='ddp': does not drive tpu; use auto, or xla_spmd"):
        engine_options("tpu", "ddp")


def test_without_torch_xla_the_line_to_type(monkeypatch):
    found = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "torch_xla" else found(name))
    with pytest.raises(
        ConfigError, match=r"trainer.accelerator='tpu': needs torch_xla; pip install \"mutransformer\[tpu\]\""
    ):
        engine_options("tpu", "auto")


NOT_IMPORTED = """
import sys
from lightning.pytorch import Trainer
from mutransformer.training.engine import engine_options
Trainer(accelerator="cpu", logger=False, enable_checkpointing=False, **engine_options("cpu", "auto"))
sys.exit("torch_xla" in sys.modules)
"""


@pytest.mark.skipif(engine._has_device_of_google(), reason="there may be a TPU, for which Lightning looks")
def test_a_run_on_cpu_does_not_import_torch_xla():
    subprocess.run([sys.executable, "-c", NOT_IMPORTED], check=True)


def test_what_a_run_computes_on():
    trainer = Trainer(accelerator="cpu", logger=False, enable_checkpointing=False, barebones=True)
    assert mode_of(trainer, False) == f"cpu with {torch.get_num_threads()} threads, 32-true, eager"
    trainer = Trainer(accelerator="cpu", precision="bf16-mixed", barebones=True)
    assert mode_of(trainer, True).endswith(", bf16-mixed, torch.compile")
