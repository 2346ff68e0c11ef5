from __future__ import annotations

import pytest
from tokenizers import Tokenizer as JsonTokenizer
from tokenizers import decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from mutransformer.data.tokenizer import ByteTokenizer, PretrainedTokenizer
from mutransformer.inference.text import InOrder, TextStream

TEXT = "naïve café, 東京 🙂🙂 and\n\n\tsome plain words with don't and 한국어 in it"


def byte_level() -> PretrainedTokenizer:
    """A byte pair encoding whose pieces cut through characters."""
    tokenizer = JsonTokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=280, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator([TEXT] * 3, trainer)
    return PretrainedTokenizer(PreTrainedTokenizerFast(tokenizer_object=tokenizer), "byte level")


def metaspace() -> PretrainedTokenizer:
    """As SentencePiece has it: a space belongs to the next piece and the first is dropped; bytes for what it lacks."""
    pieces = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", *"abcdefghijklmnopqrstuvwxyz,", "▁wo", "rds"]
    vocab = {piece: i for i, piece in enumerate(pieces)}
    merges = [("▁", "w"), ("▁w", "o"), ("r", "d"), ("rd", "s")]
    vocab |= {"▁w": len(vocab), "rd": len(vocab) + 1}
    tokenizer = JsonTokenizer(models.BPE(vocab, merges, unk_token="<unk>", byte_fallback=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    parts = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    tokenizer.decoder = decoders.Sequence(parts)
    return PretrainedTokenizer(PreTrainedTokenizerFast(tokenizer_object=tokenizer), "metaspace")


TOKENIZERS = {"bytes": ByteTokenizer, "byte_level": byte_level, "metaspace": metaspace}
each_tokenizer = pytest.mark.parametrize("name", TOKENIZERS)


def streamed(tokenizer, prompt, ids) -> list[str]:
    stream = TextStream(tokenizer, prompt)
    return [*map(stream.push, ids), stream.end()]


@each_tokenizer
@pytest.mark.parametrize("n_prompt", [0, 1, 7, 20])
def test_the_parts_are_the_text_and_hold_whole_characters(name, n_prompt):
    tokenizer = TOKENIZERS[name]()
    ids = tokenizer.encode(TEXT).tolist()
    parts = streamed(tokenizer, ids[:n_prompt], ids[n_prompt:])
    shown = tokenizer.decode(ids[:n_prompt]).rstrip("\ufffd")
    assert tokenizer.decode(ids) == TEXT
    assert shown + "".join(parts) == TEXT


@each_tokenizer
def test_text_comes_as_early_as_its_characters_are_whole(name):
    tokenizer = TOKENIZERS[name]()
    ids = tokenizer.encode("some words").tolist()
    parts = streamed(tokenizer, [], ids)
    for i in range(len(ids)):
        assert "".join(parts[: i + 1]) == tokenizer.decode(ids[: i + 1])


def test_bytes_that_are_no_text_come_too_with_a_limit_on_the_wait():
    tokenizer = ByteTokenizer()
    parts = streamed(tokenizer, [], 100 * [131])  # a byte that goes on with a character where none has begun
    assert "".join(parts) == 100 * "\ufffd"
    assert len("".join(parts[:50])) > 30
    cut = tokenizer.encode("東")[:2].tolist()
    assert streamed(tokenizer, [], cut) == ["", "", "\ufffd"]


def test_ids_that_are_no_text_do_not_hold_up_what_follows():
    assert streamed(ByteTokenizer(), [1], [300, 68, 300, 69, 1]) == ["", "A", "", "B", "", ""]


def test_texts_that_grow_side_by_side_come_one_after_the_other():
    written: list[str] = []
    output = InOrder(written.append, ["a:", "b:", "c:"])
    assert written == ["a:"]
    output.add(1, "second")
    output.add(0, "first")
    output.add(2, "third", is_last=True)
    assert written == ["a:", "first"]
    output.add(1, "!", is_last=True)
    output.add(0, ".", is_last=True)
    assert written == ["a:", "first", ".", "b:second!", "c:third"]
