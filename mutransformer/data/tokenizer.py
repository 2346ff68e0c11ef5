"""From documents to token ids and back. Read by `datamodule.py`, and by whoever prints samples.

`bytes` needs no file; everything else goes through transformers, and is probed before it is trusted, because a
tokenizer that loads without a word of complaint can still be empty or give other ids than its own `tokenizer.json`.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from typing import Any, Protocol

import numpy as np

from mutransformer.errors import ConfigError

PROBE = "Hello, World! It's 2024:\n\n\tdef f(x):  return x**2 # naïve café, 東京 🙂 don't you'll"
_DOCUMENTS_PER_CALL = 256


class Tokenizer(Protocol):
    """What the data room asks of a tokenizer; `len()` counts the ids, those of added tokens too."""

    eos_id: int | None

    def __len__(self) -> int: ...

    def encode_documents(self, documents: Iterable[bytes | str]) -> Iterator[np.ndarray]: ...

    def decode(self, ids: Sequence[int]) -> str: ...


def as_bytes(document: bytes | str) -> bytes:
    """Returns the document's UTF-8 bytes; bytes are returned as they are, lone surrogates become question marks."""
    return document.encode(errors="replace") if isinstance(document, str) else document


class ByteTokenizer:
    """UTF-8 bytes in ByT5's numbering: id = byte + 3, with pad 0, eos 1, unk 2 and 125 unused ids at the end.

    A special token's name inside a document stays plain bytes: no text can forge an eos.

    Source:
        arXiv:2105.13626 (ByT5). Decoding differs: malformed UTF-8 shows as U+FFFD where ByT5 drops it.
    """

    pad_id = 0
    eos_id: int | None = 1
    unk_id = 2
    _FIRST_BYTE = 3

    def __len__(self) -> int:
        return 384

    def encode(self, document: bytes | str) -> np.ndarray:
        """Returns the ids of one document, without special tokens.

        Shapes:
            n bytes -> [n] uint16
        """
        return np.frombuffer(as_bytes(document), np.uint8).astype(np.uint16) + self._FIRST_BYTE

    def encode_documents(self, documents: Iterable[bytes | str]) -> Iterator[np.ndarray]:
        """Yields the ids of each document."""
        return map(self.encode, documents)

    def decode(self, ids: Sequence[int]) -> str:
        """Returns the text of `ids`; ids that are no byte are left out, malformed UTF-8 becomes U+FFFD."""
        bytes_ = np.asarray(ids, dtype=np.int64) - self._FIRST_BYTE
        return bytes_[(bytes_ >= 0) & (bytes_ < 256)].astype(np.uint8).tobytes().decode(errors="replace")


class PretrainedTokenizer:
    """A transformers tokenizer, probed, and used without its special tokens.

    Args:
        tokenizer: a transformers tokenizer.
        name: what the user typed as `data.tokenizer`.
        tokenizer_json: path of the `tokenizer.json` that belongs to it, where there is one.
    Raises:
        ConfigError: when it is empty, makes nothing but unknown tokens of a probe string, or makes other ids of it
            than the `tokenizers` library does from the same `tokenizer.json`.
    """

    def __init__(self, tokenizer: Any, name: str, tokenizer_json: str | None = None) -> None:
        self._tokenizer = tokenizer
        self.eos_id: int | None = tokenizer.eos_token_id
        ids = self.encode(PROBE).tolist()
        if len(tokenizer) == 0 or not ids or set(ids) == {tokenizer.unk_token_id}:
            rule = f"knows nothing: it has {len(tokenizer)} tokens, and a probe string gives ids {ids[:8]}"
            raise ConfigError("data.tokenizer", name, rule, "check that its vocabulary files are complete")
        if tokenizer_json is not None and ids != _ids_by_tokenizers(tokenizer_json):
            rule = f"transformers makes other ids of a probe string than {tokenizer_json} says"
            remedy = f"use data.tokenizer={tokenizer_json}, or mend its tokenizer_config.json"
            raise ConfigError("data.tokenizer", name, rule, remedy)

    def __len__(self) -> int:
        return len(self._tokenizer)  # not `vocab_size`, which leaves added tokens out

    def encode(self, document: bytes | str) -> np.ndarray:
        """Returns the ids of one document, without special tokens.

        Shapes:
            -> [n_tokens] uint32
        """
        return next(self.encode_documents([document]))

    def encode_documents(self, documents: Iterable[bytes | str]) -> Iterator[np.ndarray]:
        """Yields the ids of each document; malformed UTF-8 is read as U+FFFD."""
        documents = iter(documents)
        while batch := list(islice(documents, _DOCUMENTS_PER_CALL)):
            texts = [as_bytes(document).decode(errors="replace") for document in batch]
            encoded = self._tokenizer(texts, add_special_tokens=False, return_attention_mask=False, verbose=False)
            for ids in encoded["input_ids"]:
                yield np.array(ids, dtype=np.uint32)

    def decode(self, ids: Sequence[int]) -> str:
        """Returns the text of `ids`."""
        return self._tokenizer.decode([int(i) for i in ids], clean_up_tokenization_spaces=False)


def load_tokenizer(name: str) -> Tokenizer:
    """Returns the tokenizer that `data.tokenizer` names.

    Args:
        name: `bytes`, a Hugging Face hub id, a local folder, or the path of a `tokenizer.json`.
    Returns:
        An object with `encode_documents`, `decode`, `eos_id` (None where it has no eos) and `len()`.
    Raises:
        ConfigError: when nothing can be loaded by this name, or what is loaded fails its probe.
    """
    if name == "bytes":
        return ByteTokenizer()
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    try:
        if name.endswith(".json"):
            tokenizer = PreTrainedTokenizerFast(tokenizer_file=name)
        else:
            tokenizer = AutoTokenizer.from_pretrained(name, trust_remote_code=False)
    except Exception as error:  # a broken file makes `tokenizers` raise a bare Exception
        reason = f"{type(error).__name__}: {error}".splitlines()[0]
        remedy = "use 'bytes', a hub id, a local folder or the path of a tokenizer.json"
        raise ConfigError("data.tokenizer", name, f"could not be loaded ({reason})", remedy) from error
    return PretrainedTokenizer(tokenizer, name, _find_tokenizer_json(name))


def _find_tokenizer_json(name: str) -> str | None:
    """The `tokenizer.json` that a tokenizer was loaded from, local or in the hub's cache."""
    if name.endswith(".json"):
        return name
    if os.path.isdir(name):
        path = os.path.join(name, "tokenizer.json")
        return path if os.path.isfile(path) else None
    from huggingface_hub import try_to_load_from_cache

    path = try_to_load_from_cache(name, "tokenizer.json")
    return path if isinstance(path, str) else None


def _ids_by_tokenizers(tokenizer_json: str) -> list[int]:
    from tokenizers import Tokenizer as JsonTokenizer

    tokenizer = JsonTokenizer.from_file(tokenizer_json)
    tokenizer.no_padding()
    tokenizer.no_truncation()
    return tokenizer.encode(PROBE, add_special_tokens=False).ids
