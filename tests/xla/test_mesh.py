from __future__ import annotations

import pytest

from mutransformer.errors import ConfigError
from mutransformer.model.config import DecoderConfig
from mutransformer.xla.mesh import MeshShape


@pytest.mark.parametrize(
    "rows, cols, expected",
    [(-1, 1, (8, 1)), (-1, 2, (4, 2)), (2, -1, (2, 4)), (4, 2, (4, 2)), (-1, -1, (8, 1)), (-1, 8, (1, 8))],
)
def test_minus_one_is_the_rest(rows, cols, expected):
    mesh = MeshShape.of(rows, cols, n_devices=8)
    assert ((mesh.rows, mesh.cols), mesh.n_devices) == (expected, 8)


@pytest.mark.parametrize(
    "rows, cols, message",
    [
        (
            3, 2,
            "trainer.strategy.mesh_rows=3: times mesh_cols 2 is 6, and there are 8 devices; use -1 for one of the two",
        ),
        (-1, 3, "trainer.strategy.mesh_cols=3: does not divide the 8 devices; use one of 1, 2, 4, 8"),
        (5, -1, "trainer.strategy.mesh_rows=5: does not divide the 8 devices; use one of 1, 2, 4, 8"),
        (0, 8, "trainer.strategy.mesh_rows=0: must be a number of devices; use -1 for the rest"),
    ],
)  # fmt: skip
def test_mesh_that_is_not_the_devices(rows, cols, message):
    with pytest.raises(ConfigError) as error:
        MeshShape.of(rows, cols, n_devices=8)
    assert str(error.value) == message


@pytest.mark.parametrize(
    "rows, cols, changes, words",
    [
        (3, 1, {}, "trainer.strategy.mesh_rows=3: does not divide d_model = 128; use 2, or another width"),
        (1, 4, {"d_head": 64}, "mesh_cols=4: does not divide n_head (d_model / d_head) = 2; use 2, or another width"),
        (
            1,
            2,
            {"d_head": 64, "ff_multiple": 0.0079},
            "mesh_cols=2: does not divide d_ff (ff_multiple * d_model) = 1; use 1",
        ),
    ],
)
def test_width_that_cannot_be_cut(rows, cols, changes, words):
    config = DecoderConfig(**{"d_model": 128, "d_head": 16, "vocab_size": 100, **changes})
    with pytest.raises(ConfigError) as error:
        MeshShape(rows=rows, cols=cols).check_model(config)
    assert words in str(error.value)


def test_vocabulary_is_cut_only_where_asked():
    config = DecoderConfig(d_model=128, d_head=16, vocab_size=100)
    mesh = MeshShape(rows=8, cols=1)
    mesh.check_model(config)
    with pytest.raises(ConfigError, match=r"mesh_rows=8: does not divide vocab_size = 100; use 5"):
        mesh.check_model(config, shard_vocab=True)


def test_batch_that_cannot_be_cut():
    mesh = MeshShape(rows=4, cols=2)
    mesh.check_batch(16, n_parts=4)
    with pytest.raises(ConfigError) as error:
        mesh.check_batch(18)
    assert str(error.value) == (
        "data.tokens_per_batch='18 sequences': is not a multiple of 4 (mesh_rows 4); use 20 sequences, or another mesh"
    )
    with pytest.raises(ConfigError, match=r"in 8 micro-batches'?: is not a multiple of 32"):
        mesh.check_batch(16, n_parts=8)


def test_batch_of_several_hosts_is_cut_over_all_devices_first():
    mesh = MeshShape(rows=4, cols=2, n_hosts=2)
    mesh.check_batch(16)
    with pytest.raises(ConfigError, match=r"is not a multiple of 8 \(2 hosts with 8 devices\)"):
        mesh.check_batch(12)
