from __future__ import annotations

import platform
from pathlib import Path

import lightning
import pytest
import torch
from helpers import Batches, fit, make_module, make_trainer, mup, random_batch, random_tokens, small

import mutransformer
from mutransformer.errors import ConfigError, SaveError
from mutransformer.mup.config import OptimizerConfig, RoleMultipliers
from mutransformer.training.checkpoint import AtomicCheckpointIO, load_plain
from mutransformer.training.module import DecoderModule
from mutransformer.training.run_checkpoint import RunCheckpoint

NARROW = small(d_model=32)


def checkpoint_of(module, folder, **arguments) -> str:
    """Trains `module` for two steps and returns the path of its last checkpoint."""
    checkpoint = RunCheckpoint()
    fit(module, folder, [random_batch(seed=seed) for seed in range(2)], callbacks=(checkpoint,), **arguments)
    return checkpoint.last_path


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A trained module of width 32 and the path of its checkpoint."""
    module = make_module(
        NARROW, mup(lr_multiplier=RoleMultipliers(key=0.5)), OptimizerConfig(weight_decay=1e-3), gradient_clip=1.0
    )
    module.run_config = {"model": {"seed": 0}, "data": {"files": ["a.txt", None], "length": 8, "rate": 0.1}}
    path = checkpoint_of(module, tmp_path_factory.mktemp("run"), precision="32-true")
    return module, path


# What a checkpoint holds


def test_a_checkpoint_loads_as_plain_types_with_settings_and_versions(saved):
    module, path = saved
    checkpoint = torch.load(path, weights_only=True)
    assert checkpoint["hyper_parameters"] == module.hyper_parameters
    assert checkpoint["mutransformer"]["config"] == module.run_config
    assert checkpoint["mutransformer"]["versions"] == {
        "mutransformer": mutransformer.__version__,
        "torch": torch.__version__,
        "lightning": lightning.__version__,
        "python": platform.python_version(),
    }
    assert checkpoint["global_step"] == 2
    names = {name.removeprefix("decoder.") for name in checkpoint["state_dict"]}
    assert names == {row.name for row in module.plan.rows}


def test_a_checkpoint_makes_the_same_module_with_the_same_weights(saved):
    module, path = saved
    again = DecoderModule.load_from_checkpoint(path)
    assert again.hyper_parameters == module.hyper_parameters
    for name, parameter in module.decoder.named_parameters():
        assert torch.equal(again.decoder.get_parameter(name), parameter)
    assert torch.equal(again(random_tokens(2)), module(random_tokens(2)))


def test_trained_weights_are_saved_and_not_the_initial_ones(saved):
    _, path = saved
    fresh = make_module(NARROW)
    fresh.configure_model()
    again = DecoderModule.load_from_checkpoint(path)
    for name, parameter in fresh.decoder.named_parameters():
        assert not torch.equal(again.decoder.get_parameter(name), parameter)


# Loading into something else


OTHER_SHAPES = pytest.mark.parametrize(
    "changes, message",
    [
        ({"d_model": 64}, "model.decoder.d_model=64: checkpoint has d_model 32, you asked for 64; use 32"),
        ({"n_layer": 3}, "model.decoder.n_layer=3: checkpoint has n_layer 2, you asked for 3; use 2"),
        ({"activation": "gelu"}, "model.decoder.activation='gelu': checkpoint has activation relu, you asked for gelu"),
    ],
)


@OTHER_SHAPES
def test_a_run_that_resumes_with_another_shape_is_refused_by_the_setting_that_differs(
    changes, message, saved, tmp_path
):
    module = make_module(small(**{"d_model": 32, **changes}))
    with pytest.raises(ConfigError, match=message):
        make_trainer(tmp_path, 4).fit(module, Batches(random_batch()), Batches(random_batch()), ckpt_path=saved[1])


@OTHER_SHAPES
def test_a_module_of_another_shape_is_refused_by_the_setting_that_differs(changes, message, saved):
    with pytest.raises(ConfigError, match=message):
        DecoderModule.load_from_checkpoint(saved[1], decoder=small(**{"d_model": 32, **changes}))


def test_a_module_of_another_parametrization_is_refused_too(saved):
    with pytest.raises(ConfigError, match=r"d_base=8: checkpoint has d_base 16, you asked for 8; use 16"):
        DecoderModule.load_from_checkpoint(saved[1], parametrization=mup(d_base=8))


def test_what_is_no_shape_may_differ(saved):
    again = DecoderModule.load_from_checkpoint(saved[1], seed=7, n_micro_batch=2)
    assert (again.seed, again.n_micro_batch) == (7, 2)
    assert torch.equal(again.decoder.w_query, saved[0].decoder.w_query)


def test_load_plain_reads_a_checkpoint(saved):
    assert load_plain(saved[1])["mutransformer"]["config"] == saved[0].run_config


@pytest.mark.parametrize(
    "content, rule",
    [
        (None, "there is no such file"),
        (b"no checkpoint", "is not readable"),
        ({"state_dict": {}}, "was not written by this package"),
        ([1], "was not written by this package"),
        ({"mutransformer": Path("no plain type")}, "is not readable"),
    ],
)
def test_load_plain_refuses_anything_else_in_a_line(content, rule, tmp_path):
    path = tmp_path / "a.ckpt"
    if isinstance(content, bytes):
        path.write_bytes(content)
    elif content is not None:
        torch.save(content, path)
    with pytest.raises(ConfigError, match=f"^ckpt_path='.*a.ckpt': {rule}") as error:
        load_plain(path)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("lacking", [("state_dict",), ("global_step",), ("mutransformer", "module", "decoder")])
def test_load_plain_refuses_what_lacks_a_part(lacking, saved, tmp_path):
    checkpoint = torch.load(saved[1], weights_only=True)
    *above, last = lacking
    branch = checkpoint
    for name in above:
        branch = branch[name]
    del branch[last]
    torch.save(checkpoint, tmp_path / "a.ckpt")
    with pytest.raises(ConfigError, match="was not written by this package"):
        load_plain(tmp_path / "a.ckpt")


def test_load_plain_sees_a_bit_that_turned(saved, tmp_path):
    content = bytearray(Path(saved[1]).read_bytes())
    weights = torch.load(saved[1], weights_only=True)["state_dict"]["decoder.embedding"].numpy().tobytes()
    content[content.index(weights) + 5] ^= 1
    (tmp_path / "a.ckpt").write_bytes(content)
    with pytest.raises(ConfigError, match=r"a.ckpt': is damaged \(.*/data/\d+ in it is not what was written\)"):
        load_plain(tmp_path / "a.ckpt")


# Whole or not at all


# torch.save turns a full disk into a RuntimeError of its own
ERRORS = pytest.mark.parametrize(
    "error, raised", [(OSError("disk is full"), SaveError), (RuntimeError(), SaveError), (KeyboardInterrupt(), None)]
)


def failing_save(error):
    def save(checkpoint, file):
        file.write(b"half of it")
        raise error

    return save


def files_in(folder) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


@ERRORS
def test_a_save_that_fails_half_way_leaves_the_old_file_and_nothing_else(error, raised, tmp_path, monkeypatch):
    path = tmp_path / "last.ckpt"
    AtomicCheckpointIO().save_checkpoint({"step": 1}, path)
    before = path.read_bytes()
    monkeypatch.setattr(torch, "save", failing_save(error))
    with pytest.raises(raised or type(error)):
        AtomicCheckpointIO().save_checkpoint({"step": 2}, path)
    assert path.read_bytes() == before
    assert files_in(tmp_path) == ["last.ckpt"]


def test_a_first_save_that_fails_leaves_no_file(tmp_path, monkeypatch):
    monkeypatch.setattr(torch, "save", failing_save(OSError("disk is full")))
    with pytest.raises(SaveError, match=r"last\.ckpt could not be written \(disk is full\); what was there is intact"):
        AtomicCheckpointIO().save_checkpoint({"step": 1}, tmp_path / "sub" / "last.ckpt")
    assert files_in(tmp_path / "sub") == []


def test_a_save_makes_the_folder_and_replaces_the_old_file(tmp_path):
    path = tmp_path / "a" / "b" / "last.ckpt"
    for step in (1, 2):
        AtomicCheckpointIO().save_checkpoint({"step": step}, path)
    assert torch.load(path) == {"step": 2}
    assert files_in(path.parent) == ["last.ckpt"]


def test_the_old_file_is_there_until_the_new_one_is_complete(tmp_path, monkeypatch):
    path, seen = tmp_path / "last.ckpt", []
    AtomicCheckpointIO().save_checkpoint({"step": 1}, path)
    save = torch.save

    def watching_save(checkpoint, file):
        save(checkpoint, file)
        seen.append(torch.load(path))

    monkeypatch.setattr(torch, "save", watching_save)
    AtomicCheckpointIO().save_checkpoint({"step": 2}, path)
    assert seen == [{"step": 1}]
    assert torch.load(path) == {"step": 2}
