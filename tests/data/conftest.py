"""Small corpora and tokenizers on disk, for the tests of the data room."""

from __future__ import annotations

import random

import pytest


@pytest.fixture(scope="session")
def books(tmp_path_factory):
    """A folder of 40 text files of 60 random bytes: no two windows of it are alike."""
    folder = tmp_path_factory.mktemp("books")
    rng = random.Random(0)
    for i in range(40):
        path = folder / f"shelf{i % 3}" / f"{i}.txt"
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(bytes(rng.randrange(256) for _ in range(60)))
    return folder


@pytest.fixture(scope="session")
def bpe():
    """A byte-level BPE tokenizer of the `tokenizers` library: 256 bytes, an eos and a few merges."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=270,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=["<eos>"],
        show_progress=False,
    )
    tokenizer.train_from_iterator(["hello world 2024 2024 2024"] * 20, trainer)
    return tokenizer


@pytest.fixture
def tokenizer_json(bpe, tmp_path):
    """The path of `bpe` as a `tokenizer.json`, which names no eos."""
    path = tmp_path / "tokenizer.json"
    bpe.save(str(path))
    return path


@pytest.fixture
def tokenizer_folder(tokenizer_json, tmp_path):
    """The path of `bpe` as a folder that transformers wrote, with `<eos>` as its eos."""
    from transformers import PreTrainedTokenizerFast

    folder = tmp_path / "tokenizer"
    PreTrainedTokenizerFast(tokenizer_file=str(tokenizer_json), eos_token="<eos>").save_pretrained(folder)
    return folder
