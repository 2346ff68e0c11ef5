from __future__ import annotations

import lightning.pytorch as pl
import numpy as np
import pytest
import torch

from mutransformer.data import datamodule as datamodule_file
from mutransformer.data.datamodule import TextDataModule
from mutransformer.data.files import FileReader
from mutransformer.errors import ConfigError

L = 64


def tokens_of(data: TextDataModule, split) -> list[int]:
    return np.concatenate(data.windows(split).stream.shards).tolist()


def error_of(field: str, function, *args, **kwargs) -> str:
    with pytest.raises(ConfigError) as caught:
        function(*args, **kwargs)
    assert caught.value.field == field
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.fixture
def make_data(books):
    def make(**changed) -> TextDataModule:
        options = {
            "dataset": "text",
            "data_files": f"{books}/**/*.txt",
            "validation_fraction": 0.3,
            "sequence_len": L,
            "tokens_per_batch": 3 * L,
        }
        return TextDataModule(**{**options, **changed})

    return make


# The constructor


def test_defaults_work_and_read_nothing(monkeypatch):
    def refuse(*args, **kwargs):
        raise AssertionError("the constructor read the corpus")

    monkeypatch.setattr(datamodule_file.CacheRequest, "ensure", refuse)
    data = TextDataModule()
    assert data.vocab_size == 384
    assert data.separator == 1
    with pytest.raises(AssertionError, match="read the corpus"):
        data.setup("fit")


@pytest.mark.parametrize(
    "options, would_do",
    [
        ({"sequence_len": 100, "tokens_per_batch": 250}, "use 200 or 300"),
        ({"sequence_len": 100, "tokens_per_batch": 50}, "use 100"),
    ],
)
def test_batch_that_is_no_multiple_of_the_window_is_refused(options, would_do):
    assert error_of("data.tokens_per_batch", TextDataModule, **options).endswith(would_do)


@pytest.mark.parametrize(
    "field, options",
    [
        ("data.sequence_len", {"sequence_len": 0}),
        ("data.tokens_per_batch", {"tokens_per_batch": -256}),
        ("data.vocab_size", {"vocab_size": 0}),
        ("data.shuffle_seed", {"shuffle_seed": -1}),
        ("data.validation_fraction", {"validation_fraction": 2.0}),
        ("data.max_documents", {"max_documents": 0}),
        ("data.data_files", {"dataset": "text"}),
        ("data.cache", {"cache": "nosuch://bucket/folder"}),
        ("data.tokenizer", {"tokenizer": "./no/such/folder"}),
        ("data.document_separator", {"document_separator": 384}),
        ("data.document_separator", {"document_separator": -1}),
    ],
)
def test_value_that_cannot_work_is_refused(field, options):
    error_of(field, TextDataModule, **options)


def test_vocabulary_size_that_is_given_spares_loading_the_tokenizer(tokenizer_folder, bpe):
    assert TextDataModule(tokenizer=str(tokenizer_folder)).vocab_size == bpe.get_vocab_size()
    data = TextDataModule(tokenizer="./no/such/folder", vocab_size=512)
    assert data.vocab_size == 512
    error_of("data.tokenizer", data.setup, "fit")


# Reading


def test_setup_reads_once(make_data, monkeypatch):
    data = make_data()
    data.setup("fit")
    train, validation = data.windows("train"), data.windows("validation")
    monkeypatch.setattr(datamodule_file.CacheRequest, "ensure", None)
    data.setup("fit")
    data.setup("validate")
    assert data.windows("train") is train
    assert data.windows("validation") is validation


def test_second_module_reads_the_cache_and_no_document(make_data, tmp_path, monkeypatch):
    first = make_data(cache=str(tmp_path))
    first.setup("fit")
    monkeypatch.setattr(FileReader, "documents", None)
    second = make_data(cache=str(tmp_path), sequence_len=32, tokens_per_batch=64, shuffle_seed=5)
    second.setup("fit")
    assert tokens_of(second, "train") == tokens_of(first, "train")
    with pytest.raises(TypeError):
        make_data(cache=str(tmp_path), max_documents=10).setup("fit")


def test_tokens_and_bytes_are_those_of_the_documents(make_data, books):
    data = make_data()
    files = {path.read_bytes() for path in books.rglob("*.txt")}
    n_documents = 0
    for split in ("train", "validation"):
        tokens = np.array(tokens_of(data, split))
        documents = np.split(tokens, np.flatnonzero(tokens == 1))
        assert documents[0].size == 0 and documents[-1].tolist() == [1]
        texts = {(ids[1:] - 3).astype(np.uint8).tobytes() for ids in documents[1:-1]}
        assert texts <= files
        n_documents += len(texts)
        assert data.bytes_per_token(split) == pytest.approx(60 / 61)
    assert n_documents == 40


def test_tokenizer_without_eos_needs_a_separator(make_data, tokenizer_json):
    data = make_data(tokenizer=str(tokenizer_json))
    assert "270" in error_of("data.document_separator", data.setup, "fit")
    data = make_data(tokenizer=str(tokenizer_json), document_separator=0)
    data.setup("fit")
    assert tokens_of(data, "train")[0] == 0


def test_padded_vocabulary(make_data):
    data = make_data(vocab_size=70_000, document_separator=69_999)
    data.setup("fit")
    assert next(iter(data.train_dataloader()))["tokens"].max() == 69_999


def test_vocabulary_that_is_too_small_is_refused(make_data):
    error_of("data.vocab_size", make_data(vocab_size=100).setup, "fit")


def test_cache_made_for_a_larger_vocabulary_is_refused(make_data, tmp_path):
    make_data(cache=str(tmp_path)).setup("fit")
    message = error_of("data.vocab_size", make_data(cache=str(tmp_path), vocab_size=100).setup, "fit")
    assert message.endswith("use at least 259")


def test_test_split_is_held_out_or_that_of_validation(make_data):
    data = make_data(test_fraction=0.3)
    for stage in ("fit", "test"):
        data.setup(stage)
    whole = [tokens_of(data, split) for split in ("train", "validation", "test")]
    assert sum(map(len, whole)) == 40 * 61 + 3
    assert len({tuple(tokens) for tokens in whole}) == 3
    held_out = torch.cat([batch["tokens"] for batch in data.test_dataloader()])
    assert held_out[0].tolist() == whole[2][: L + 1]
    assert data.windows("test").stream.sha256 != data.windows("validation").stream.sha256
    assert make_data().windows("test") is not None
    assert tokens_of(make_data(), "test") == tokens_of(make_data(), "validation") == whole[1]


def test_batches_say_where_documents_start(make_data):
    data = make_data(attend_across_documents=False)
    data.setup("fit")
    batch = next(iter(data.train_dataloader()))
    assert set(batch) == {"tokens", "positions"}
    inputs, positions = batch["tokens"][:, :-1], batch["positions"]
    assert positions.shape == inputs.shape == (3, L)
    starts = (positions == 0)[:, 1:]
    assert torch.equal(starts, (inputs == 1)[:, 1:])  # a document starts with the separator before it
    assert starts.any()
    assert torch.equal(positions[:, 1:][~starts], (positions[:, :-1] + 1)[~starts])


def test_summary_of_an_epoch_says_what_is_left_out(make_data):
    data = make_data(tokens_per_batch=4 * L)
    data.setup("fit")
    windows = data.windows("train")
    n_leftover = windows.n_windows % 4
    assert n_leftover > 0
    summary = data.epoch_summary()
    assert f"{n_leftover} of {windows.n_windows} windows" in summary
    assert f"{windows.n_leftover_tokens:,} of {len(windows.stream):,} tokens" in summary


def test_loaders(make_data):
    data = make_data()
    data.setup("fit")
    train, validation = data.windows("train"), data.windows("validation")
    batch = next(iter(data.train_dataloader()))
    assert set(batch) == {"tokens"}
    assert batch["tokens"].shape == (3, L + 1)
    assert batch["tokens"].dtype == torch.int64
    assert len(data.train_dataloader()) == train.n_windows // 3
    for loader in (data.val_dataloader(), data.test_dataloader()):
        everything = torch.cat([batch["tokens"] for batch in loader])
        assert torch.equal(everything, validation.batch(np.arange(validation.n_windows))["tokens"])


def test_batch_larger_than_the_training_split_is_refused(make_data):
    data = make_data(tokens_per_batch=1000 * L)
    data.setup("fit")
    largest = data.windows("train").n_windows * L
    assert error_of("data.tokens_per_batch", data.train_dataloader).endswith(f"use at most {largest}")
    assert len(list(data.val_dataloader())) == 1


# Through the Trainer. One batch is one optimizer step, as in the package's own module.


class Recorder(pl.LightningModule):
    """Keeps the batches it was trained on, and moves its weight by their sum."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.weight = torch.nn.Parameter(torch.zeros((), dtype=torch.float64))
        self.seen: list[list[list[int]]] = []
        self.n_validated: list[int] = []

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=1e-6)

    def training_step(self, batch, batch_idx):
        self.seen.append(batch["tokens"].tolist())
        optimizer = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(self.weight * batch["tokens"].sum())
        optimizer.step()

    def on_validation_epoch_start(self):
        self.n_validated.append(0)

    def validation_step(self, batch, batch_idx):
        self.n_validated[-1] += len(batch["tokens"])


class Interrupted(Exception):
    pass


class SaveAndStop(pl.Callback):
    """Saves a checkpoint in the hook named, once `step` steps are done, and ends the run as a lost machine would."""

    def __init__(self, hook: str, step: int, path) -> None:
        def save(trainer, *args, **kwargs):
            if trainer.global_step == step and not trainer.sanity_checking:
                trainer.save_checkpoint(path)
                raise Interrupted

        setattr(self, hook, save)


def fit(data, length: dict, ckpt_path=None, callbacks=(), **options) -> tuple[Recorder, pl.Trainer]:
    module = Recorder()
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=list(callbacks),
        **length,
        **options,
    )
    try:
        trainer.fit(module, datamodule=data, ckpt_path=ckpt_path)
    except Interrupted:
        assert callbacks
    else:
        assert not callbacks, "the run was to be interrupted"
    return module, trainer


@pytest.fixture
def n_batches(make_data) -> int:
    data = make_data()
    data.setup("fit")
    n = len(data.train_dataloader())
    assert n == 9  # the cases below are written for it
    return n


BY_STEPS = {"max_steps": 22}  # 2.5 epochs of 9 batches
BY_EPOCHS = {"max_epochs": 3, "max_steps": -1}
EVERY_2 = {"val_check_interval": 2}


@pytest.mark.parametrize(
    "length, hook, stops, options",
    [
        (BY_STEPS, "on_train_batch_end", (4, 13), {}),  # in the middle of an epoch
        (BY_STEPS, "on_train_batch_end", (4, 6), {}),  # twice in the same epoch
        (BY_STEPS, "on_train_batch_end", (9, 18), {}),  # at an epoch's last batch
        (BY_STEPS, "on_train_batch_end", (9, 10), {}),  # ... and right after it
        (BY_STEPS, "on_train_batch_end", (8, 10), {}),
        (BY_STEPS, "on_train_batch_end", (4, 9), {"limit_val_batches": 0}),
        (BY_STEPS, "on_train_batch_end", (9, 18), {"limit_val_batches": 0}),
        (BY_STEPS, "on_train_batch_end", (4, 9), EVERY_2),
        (BY_STEPS, "on_train_batch_end", (6, 20), {"limit_train_batches": 7}),
        (BY_STEPS, "on_train_batch_end", (9, 12), {"reload_dataloaders_every_n_epochs": 1}),
        (BY_STEPS, "on_train_epoch_end", (9, 18), {}),
        (BY_STEPS, "on_train_epoch_end", (9, 18), {"limit_val_batches": 0}),
        (BY_STEPS, "on_validation_end", (9, 18), {}),
        (BY_STEPS, "on_validation_end", (4, 13), EVERY_2),
        (BY_EPOCHS, "on_train_batch_end", (4, 13), {}),
        (BY_EPOCHS, "on_train_batch_end", (4, 9), {}),
        (BY_EPOCHS, "on_train_epoch_end", (9, 18), {}),
        (BY_EPOCHS, "on_train_epoch_end", (9, 18), {"limit_val_batches": 0}),
        (BY_EPOCHS, "on_validation_end", (9, 18), {}),
    ],
)
def test_interrupted_run_trains_on_the_same_windows(length, hook, stops, options, make_data, n_batches, tmp_path):
    whole, _ = fit(make_data(), length, **options)
    seen, ckpt_path = [], None
    for stop in stops:
        path = tmp_path / f"{stop}.ckpt"
        part, _ = fit(make_data(), length, ckpt_path, [SaveAndStop(hook, stop, path)], **options)
        seen += part.seen
        assert len(seen) == stop
        ckpt_path = path
    last, _ = fit(make_data(), length, ckpt_path, **options)
    assert last.seen
    assert seen + last.seen == whole.seen
    assert len(whole.seen) == 22 if length is BY_STEPS else len(whole.seen) == 3 * n_batches
    assert last.weight.item() == whole.weight.item()


@pytest.mark.parametrize("stops", [(4, 13), (9, 18), (9, 10), (10, 11)])
def test_run_that_ended_goes_on_with_more_steps(stops, make_data, n_batches, tmp_path):
    whole, _ = fit(make_data(), BY_STEPS)
    seen, ckpt_path = [], None
    for stop in (*stops, 22):
        part, trainer = fit(make_data(), {"max_steps": stop}, ckpt_path)
        seen += part.seen
        assert len(seen) == stop
        ckpt_path = tmp_path / f"{stop}.ckpt"
        trainer.save_checkpoint(ckpt_path)
    assert seen == whole.seen


def test_run_without_checkpoint_starts_at_the_beginning(make_data):
    data = make_data()
    next(iter(data.train_dataloader()))  # a look at the data before training
    first, _ = fit(data, {"max_steps": 5})
    second, _ = fit(data, {"max_steps": 5})
    assert first.seen == second.seen == fit(make_data(), {"max_steps": 5})[0].seen


def test_validating_a_checkpoint_does_not_move_the_next_run(make_data, tmp_path):
    module, trainer = fit(make_data(), {"max_steps": 5})
    path = tmp_path / "5.ckpt"
    trainer.save_checkpoint(path)
    data = make_data(tokens_per_batch=L)  # other batches are no reason to refuse a validation
    trainer.validate(module, datamodule=data, ckpt_path=path, verbose=False)
    assert module.n_validated[-1] == data.windows("validation").n_windows
    resumed, _ = fit(data, {"max_steps": 5})
    assert resumed.seen == fit(make_data(tokens_per_batch=L), {"max_steps": 5})[0].seen


def test_every_validation_reads_all_windows(make_data, n_batches):
    data = make_data()
    module, _ = fit(data, BY_STEPS, val_check_interval=4)
    sanity, *validations = module.n_validated
    assert sanity == 6  # two batches
    assert validations == [data.windows("validation").n_windows] * 5


def test_resuming_with_other_data_is_refused(make_data, tmp_path):
    _, trainer = fit(make_data(), {"max_steps": 5})
    path = tmp_path / "5.ckpt"
    trainer.save_checkpoint(path)
    error_of("data.shuffle_seed", fit, make_data(shuffle_seed=1), BY_STEPS, path)
    error_of("data.dataset", fit, make_data(max_documents=30), BY_STEPS, path)


def test_checkpoint_loads_as_plain_data(make_data, tmp_path):
    _, trainer = fit(make_data(), {"max_steps": 5})
    path = tmp_path / "5.ckpt"
    trainer.save_checkpoint(path)
    state = torch.load(path, weights_only=True)["TextDataModule"]["train_loader"]
    assert (state["epoch"], state["batch"]) == (0, 5)


def test_overfitting_a_few_batches_is_refused(make_data):
    error_of("trainer.overfit_batches", fit, make_data(), {"max_steps": 5}, overfit_batches=2)
