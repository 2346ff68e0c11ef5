"""From documents to token ids and back. Read by `writer.py`, `datamodule.py`, and by whoever prints samples.

`bytes` needs no file; everything else goes through transformers, and is probed before it is trusted, because a
tokenizer that loads without a word of complaint can still be empty or give other ids than its own `tokenizer.json`.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np

from mutransformer.errors import ConfigError

PROBE = "Hello, World! It's 2024:\n\n\tdef f(x):  return x**2 # naïve café, 東京 🙂 don't you'll"


class Tokenizer(Protocol):
    """What the data room asks of a tokenizer; `len()` counts the ids, those of added tokens too.

    `separator_id` is what it would put between documents: its eos, else its bos, else none. `content_sha256` stands
    for all that decides which ids a text gets.
    """

    @property
    def separator_id(self) -> int | None: ...

    @property
    def content_sha256(self) -> str: ...

    def __len__(self) -> int: ...

    def encode_batch(self, documents: Sequence[bytes]) -> list[np.ndarray]: ...

    def decode(self, ids: Sequence[int]) -> str: ...

    def save(self, folder: str | os.PathLike[str]) -> None: ...


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
    eos_id = separator_id = 1
    unk_id = 2
    content_sha256 = hashlib.sha256(b"bytes: id = byte + 3").hexdigest()
    _FIRST_BYTE = 3

    def __len__(self) -> int:
        return 384

    def encode(self, document: bytes | str) -> np.ndarray:
        """Returns the ids of one document, without special tokens.

        Shapes:
            n bytes -> [n] uint16
        """
        return np.frombuffer(as_bytes(document), np.uint8).astype(np.uint16) + self._FIRST_BYTE

    def encode_batch(self, documents: Sequence[bytes]) -> list[np.ndarray]:
        """Returns the ids of each document."""
        return list(map(self.encode, documents))

    def decode(self, ids: Sequence[int]) -> str:
        """Returns the text of `ids`; ids that are no byte are left out, malformed UTF-8 becomes U+FFFD."""
        bytes_ = np.asarray(ids, dtype=np.int64) - self._FIRST_BYTE
        return bytes_[(bytes_ >= 0) & (bytes_ < 256)].astype(np.uint8).tobytes().decode(errors="replace")

    def save(self, folder: str | os.PathLike[str]) -> None:
        """Writes the files from which transformers' AutoTokenizer makes the same ids, without this package.

        A byte pair encoding without pairs: one piece a byte, by the usual stand-in character of each.
        """
        from tokenizers import Tokenizer as JsonTokenizer
        from tokenizers import decoders, models, pre_tokenizers
        from transformers import PreTrainedTokenizerFast

        specials = {"<pad>": self.pad_id, "</s>": self.eos_id, "<unk>": self.unk_id}
        unused = range(self._FIRST_BYTE + 256, len(self))
        pieces = {_stand_in(byte): byte + self._FIRST_BYTE for byte in range(256)}
        tokenizer = JsonTokenizer(models.BPE({**specials, **pieces, **{f"<unused_{i}>": i for i in unused}}, []))
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        tokenizer.decoder = decoders.ByteLevel()
        PreTrainedTokenizerFast(
            tokenizer_object=tokenizer,
            pad_token="<pad>",
            eos_token="</s>",
            unk_token="<unk>",
            split_special_tokens=True,  # a special token's name in a text stays bytes
            clean_up_tokenization_spaces=False,
        ).save_pretrained(folder)


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
        self._backend = _plain_backend(tokenizer)
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

    @property
    def separator_id(self) -> int | None:
        return self._tokenizer.bos_token_id if self.eos_id is None else self.eos_id

    @property
    def content_sha256(self) -> str:
        if self._backend is not None:
            content = self._backend.to_str()
        else:
            vocabulary = sorted(self._tokenizer.get_vocab().items())
            content = json.dumps([type(self._tokenizer).__name__, vocabulary, self.encode(PROBE).tolist()])
        return hashlib.sha256(content.encode()).hexdigest()

    def encode(self, document: bytes | str) -> np.ndarray:
        """Returns the ids of one document, without special tokens.

        Shapes:
            -> [n_tokens] uint32
        """
        return self.encode_batch([as_bytes(document)])[0]

    def encode_batch(self, documents: Sequence[bytes]) -> list[np.ndarray]:
        """Returns the ids of each document; malformed UTF-8 is read as U+FFFD."""
        texts = [document.decode(errors="replace") for document in documents]
        if self._backend is not None:  # what transformers calls, without the lists it makes besides
            encoded = [encoding.ids for encoding in self._backend.encode_batch_fast(texts, add_special_tokens=False)]
        else:
            encoded = self._tokenizer(texts, add_special_tokens=False, return_attention_mask=False, verbose=False)
            encoded = encoded["input_ids"]
        return [np.array(ids, dtype=np.uint32) for ids in encoded]

    def decode(self, ids: Sequence[int]) -> str:
        """Returns the text of `ids`."""
        return self._tokenizer.decode([int(i) for i in ids], clean_up_tokenization_spaces=False)

    def save(self, folder: str | os.PathLike[str]) -> None:
        """Writes the files from which transformers' AutoTokenizer makes it again."""
        self._tokenizer.save_pretrained(folder)


def _stand_in(byte: int) -> str:
    """The character by which byte-level tokenizers write a byte: itself where it shows, else one from U+0100 up."""
    shows = [*range(33, 127), *range(161, 173), *range(174, 256)]
    return chr(byte) if byte in shows else chr(256 + sum(other not in shows for other in range(byte)))


def load_tokenizer(name: str) -> Tokenizer:
    """Returns the tokenizer that `data.tokenizer` names.

    Args:
        name: `bytes`, a Hugging Face hub id, a local folder, or the path of a `tokenizer.json`.
    Returns:
        A `Tokenizer`.
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


def _plain_backend(tokenizer: Any) -> Any | None:
    """The tokenizer of the `tokenizers` library that works inside, without truncation and padding; None for others."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        return None
    plain = type(backend).from_str(backend.to_str())
    plain.no_padding()
    plain.no_truncation()
    return plain


def _ids_by_tokenizers(tokenizer_json: str) -> list[int]:
    from tokenizers import Tokenizer as JsonTokenizer

    tokenizer = JsonTokenizer.from_file(tokenizer_json)
    tokenizer.no_padding()
    tokenizer.no_truncation()
    return tokenizer.encode(PROBE, add_special_tokens=False).ids
