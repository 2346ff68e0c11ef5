"""Makes the parity script and the second implementation importable, and reads the recorded numbers."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np
import pytest

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE.parents[1] / "scripts"), str(HERE)]

DATA = HERE / "data"


@pytest.fixture(scope="session")
def oracle():
    """Arrays of oracle_a.npz."""
    with np.load(DATA / "oracle_a.npz") as file:
        return dict(file)


@pytest.fixture(scope="session")
def base(oracle):
    """The full config of oracle_a.npz, every key."""
    return json.loads((DATA / "base_config.json").read_text()) | json.loads(str(oracle["config_json"]))
