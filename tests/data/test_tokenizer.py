from __future__ import annotations

import json
import logging

import numpy as np
import pytest

from mutransformer.data.tokenizer import PROBE, ByteTokenizer, PretrainedTokenizer, load_tokenizer
from mutransformer.errors import ConfigError

TEXTS = ["", "plain text", "naïve café\n\t東京 🙂\x00\x7f", PROBE, "".join(map(chr, range(1, 600)))]


def error_of(name) -> ConfigError:
    with pytest.raises(ConfigError) as caught:
        load_tokenizer(str(name))
    assert "\n" not in str(caught.value)
    assert caught.value.field == "data.tokenizer"
    return caught.value


# Bytes


@pytest.mark.parametrize("text", TEXTS)
def test_bytes_are_numbered_as_in_byt5(text):
    from transformers import ByT5Tokenizer

    theirs = ByT5Tokenizer()
    ours = load_tokenizer("bytes")
    ids = ours.encode(text)
    assert ids.dtype == np.uint16
    assert ids.tolist() == theirs(text, add_special_tokens=False)["input_ids"]
    assert len(ours) == len(theirs)
    assert ours.eos_id == theirs.eos_token_id


def test_bytes_and_text_give_the_same_ids():
    tokenizer = ByteTokenizer()
    for text in TEXTS:
        assert np.array_equal(tokenizer.encode(text), tokenizer.encode(text.encode()))
    assert tokenizer.encode(b"\xff\x00").tolist() == [258, 3]


def test_bytes_decode_to_the_text():
    tokenizer = ByteTokenizer()
    for text in TEXTS:
        assert tokenizer.decode(tokenizer.encode(text)) == text


def test_bytes_decode_malformed_text_and_ids_that_are_no_byte():
    tokenizer = ByteTokenizer()
    assert tokenizer.decode(tokenizer.encode(b"a\xffb")) == "a\N{REPLACEMENT CHARACTER}b"
    assert tokenizer.decode([1, ord("a") + 3, 0, 2, 259, 383, ord("b") + 3]) == "ab"


def test_no_text_forges_a_special_token():
    text = b"</s><pad><extra_id_0>"
    assert ByteTokenizer().encode(text.decode()).tolist() == [byte + 3 for byte in text]


# Through transformers


@pytest.mark.parametrize("fixture", ["tokenizer_json", "tokenizer_folder"])
def test_ids_are_those_of_the_tokenizers_library(fixture, bpe, request):
    tokenizer = load_tokenizer(str(request.getfixturevalue(fixture)))
    documents = [*TEXTS, "hello world"] * 100
    encoded = tokenizer.encode_batch([text.encode() for text in documents])
    assert [ids.tolist() for ids in encoded] == [bpe.encode(text).ids for text in documents]
    assert tokenizer.decode(encoded[2]) == TEXTS[2]
    assert len(encoded[-1]) < len("hello world")  # merges are at work
    assert max(ids.max() for ids in encoded if ids.size) < len(tokenizer) == bpe.get_vocab_size()


def test_eos_is_known_where_it_is_named(tokenizer_json, tokenizer_folder, bpe):
    assert load_tokenizer(str(tokenizer_folder)).eos_id == bpe.token_to_id("<eos>")
    assert load_tokenizer(str(tokenizer_json)).eos_id is None


def test_separator_is_eos_else_bos_else_none(tokenizer_json, tokenizer_folder, bpe):
    from transformers import PreTrainedTokenizerFast

    def separator_with(**special) -> int | None:
        inner = PreTrainedTokenizerFast(tokenizer_file=str(tokenizer_json), **special)
        return PretrainedTokenizer(inner, "special").separator_id

    a, b = bpe.token_to_id("a"), bpe.token_to_id("b")
    assert separator_with(eos_token="a", bos_token="b") == a
    assert separator_with(eos_token="a") == a  # as T5's, which has no bos
    assert separator_with(bos_token="b") == b
    assert separator_with(unk_token="a") is None


def test_content_hash_is_of_what_decides_the_ids(tokenizer_json, tokenizer_folder, tmp_path):
    """Not of the name, the place or the padding; one merge less is another content."""
    first = load_tokenizer(str(tokenizer_json)).content_sha256
    content = json.loads(tokenizer_json.read_text())
    for change in (
        {
            "padding": {
                "strategy": {"Fixed": 9},
                "direction": "Right",
                "pad_to_multiple_of": None,
                "pad_id": 0,
                "pad_type_id": 0,
                "pad_token": "<eos>",
            }
        },
    ):
        (tmp_path / "same.json").write_text(json.dumps({**content, **change}))
        assert load_tokenizer(str(tmp_path / "same.json")).content_sha256 == first
    content["model"]["merges"].pop()
    (tmp_path / "other.json").write_text(json.dumps(content))
    assert load_tokenizer(str(tmp_path / "other.json")).content_sha256 != first
    assert ByteTokenizer().content_sha256 != first


def test_tokenizer_that_is_not_fast_works():
    from transformers import ByT5Tokenizer

    slow = PretrainedTokenizer(ByT5Tokenizer(), "byt5")
    assert slow.encode("naïve").tolist() == ByteTokenizer().encode("naïve").tolist()
    assert slow.content_sha256 == PretrainedTokenizer(ByT5Tokenizer(), "again").content_sha256
    assert slow.content_sha256 != PretrainedTokenizer(ByT5Tokenizer(extra_ids=1), "fewer").content_sha256


def test_length_counts_added_tokens(tokenizer_json, bpe):
    from transformers import PreTrainedTokenizerFast

    inner = PreTrainedTokenizerFast(tokenizer_file=str(tokenizer_json), additional_special_tokens=["<a>", "<b>"])
    assert inner.vocab_size == bpe.get_vocab_size()
    assert len(PretrainedTokenizer(inner, "added")) == bpe.get_vocab_size() + 2


def test_truncation_padding_and_special_tokens_of_the_file_are_not_applied(tmp_path, tokenizer_json, bpe):
    from tokenizers import Tokenizer
    from tokenizers.processors import TemplateProcessing

    meddling = Tokenizer.from_file(str(tokenizer_json))
    meddling.post_processor = TemplateProcessing(single="$A <eos>", special_tokens=[("<eos>", 0)])
    meddling.enable_truncation(4)
    meddling.enable_padding(length=300)
    path = tmp_path / "meddling.json"
    meddling.save(str(path))
    ids = [ids.tolist() for ids in load_tokenizer(str(path)).encode_batch([b"a", PROBE.encode()])]
    assert ids == [bpe.encode("a").ids, bpe.encode(PROBE).ids]


def test_long_document_gives_no_warning(tokenizer_json, caplog):
    from transformers import PreTrainedTokenizerFast

    inner = PreTrainedTokenizerFast(tokenizer_file=str(tokenizer_json), model_max_length=8)
    logger = logging.getLogger("transformers")  # passes nothing on to the root logger
    logger.addHandler(caplog.handler)
    try:
        assert len(PretrainedTokenizer(inner, "short").encode("hello there, " * 50)) > 100
        assert not caplog.records
        inner("hello there, " * 50)
        assert "longer than the specified maximum" in caplog.text
    finally:
        logger.removeHandler(caplog.handler)


def test_malformed_text_is_replaced(tokenizer_json):
    tokenizer = load_tokenizer(str(tokenizer_json))
    assert tokenizer.decode(tokenizer.encode(b"a\xffb")) == "a\N{REPLACEMENT CHARACTER}b"


# Those that must be refused


def test_empty_tokenizer_is_refused():
    from transformers import GPT2TokenizerFast

    empty = GPT2TokenizerFast(vocab_file="vocab.json", merges_file="merges.txt")  # keywords that it takes and ignores
    with pytest.raises(ConfigError, match=r"^data.tokenizer='gpt2': knows nothing"):
        PretrainedTokenizer(empty, "gpt2")


def test_tokenizer_that_knows_no_word_is_refused(tmp_path):
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    stranger = Tokenizer(models.WordLevel({"<unk>": 0, "zzz": 1}, unk_token="<unk>"))
    stranger.pre_tokenizer = pre_tokenizers.Whitespace()
    with pytest.raises(ConfigError, match="knows nothing"):
        PretrainedTokenizer(PreTrainedTokenizerFast(tokenizer_object=stranger, unk_token="<unk>"), "stranger")


def test_disagreement_with_its_own_tokenizer_json_is_refused(tokenizer_folder):
    """transformers replaces the file's pre-tokenizer by GPT-2's where the class is GPT-2's (its issue 45488)."""
    path = tokenizer_folder / "tokenizer.json"
    content = json.loads(path.read_text())
    content["pre_tokenizer"] = {
        "type": "Sequence",
        "pretokenizers": [{"type": "Digits", "individual_digits": True}, content["pre_tokenizer"]],
    }
    path.write_text(json.dumps(content))
    load_tokenizer(str(tokenizer_folder))  # agrees as long as the class is the general one
    config_path = tokenizer_folder / "tokenizer_config.json"
    config = json.loads(config_path.read_text())
    config_path.write_text(json.dumps({**config, "tokenizer_class": "GPT2Tokenizer"}))
    error = error_of(tokenizer_folder)
    assert str(path) in str(error)
    load_tokenizer(str(path))  # what the message says to use


def test_tokenizer_that_is_not_there_is_refused(tmp_path):
    error_of(tmp_path / "tokenizer.json")
    error_of(tmp_path)
    error_of("./no/such/folder")


def test_broken_tokenizer_json_is_refused(tmp_path):
    path = tmp_path / "tokenizer.json"
    path.write_text("not json")
    assert "not json" not in str(error_of(path))
