from __future__ import annotations

import json

import pytest
import torch
from helpers import make_decoder, small
from tokenizers import Tokenizer as JsonTokenizer
from tokenizers import models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from mutransformer.data.tokenizer import PretrainedTokenizer
from mutransformer.inference import decoding
from mutransformer.inference.sampling import Sampling
from mutransformer.inference.session import Prompt, sample


@pytest.fixture
def words() -> PretrainedTokenizer:
    """Ids of words; the separator's name would be seen in a text."""
    tokenizer = JsonTokenizer(models.WordLevel({"<end>": 0, "a": 1, "b": 2, "Hello": 3}, unk_token="<end>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<end>")
    return PretrainedTokenizer(fast, "words")


@pytest.mark.parametrize("as_json", [False, True])
def test_the_separator_ends_a_text_and_is_not_shown(as_json, words, monkeypatch, capsys):
    tokens = iter([[1, 2], [2, 0], [0, 1]])  # for two rows; the second has ended at the third step
    monkeypatch.setattr(decoding, "choose", lambda *_: torch.tensor(next(tokens)))
    decoder = make_decoder(small(vocab_size=4)).requires_grad_(False)
    options = {"stop_token": 0, "n_samples": 2, "max_tokens": 9, "seed": 0, "batch_size": 5}
    sample(decoder, words, [Prompt("a", [0, 1])], Sampling(), **options, as_json=as_json)
    said = capsys.readouterr().out
    if as_json:
        found = [json.loads(line) for line in said.splitlines()]
        assert [(one["text"].split(), one["n_tokens"], one["ended_by"]) for one in found] == [
            (["a", "b"], 3, "separator"),
            (["b"], 2, "separator"),
        ]
    else:
        assert [line.split() for line in said.splitlines()] == [
            ["---", "prompt", "1,", "sample", "1", "---"],
            ["a", "a", "b"],
            ["---", "prompt", "1,", "sample", "2", "---"],
            ["a", "b"],
        ]
