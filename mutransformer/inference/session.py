"""`mutransformer sample`: prompts from wherever, text to the terminal while it comes."""

from __future__ import annotations

import itertools
import json
import os
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

from mutransformer.data.datamodule import TextDataModule
from mutransformer.data.tokenizer import Tokenizer
from mutransformer.errors import ConfigError, Interrupted
from mutransformer.inference.decoding import Draws, generate
from mutransformer.inference.sampling import Sampling
from mutransformer.inference.text import InOrder, TextStream
from mutransformer.model.decoder import Decoder

# a terminal acts on control characters; these show them instead
_SHOWN = {code: 0x2400 + code for code in range(32) if chr(code) not in "\n\t"}


@dataclass(frozen=True)
class Prompt:
    """What a sequence starts from.

    Args:
        text: as it is shown.
        ids: its tokens, the separator first.
    """

    text: str
    ids: list[int]


def read_prompts(
    data: TextDataModule,
    *,
    prompt: str,
    prompts: str,
    from_validation: int,
    prompt_tokens: int,
) -> list[Prompt]:
    """The prompts that the options name: at most one of them; without any, the empty prompt.

    Args:
        data: of the checkpoint.
        prompt: text.
        prompts: file with a prompt a line; blank lines are left out.
        from_validation: number of documents of the validation split.
        prompt_tokens: tokens of a document that are its prompt.
    Raises:
        ConfigError: several of them, or one that has no prompts.
    """
    options = {"prompt": prompt, "prompts": prompts, "from_validation": from_validation}
    given = [name for name, value in options.items() if value]
    if len(given) > 1:
        raise ConfigError(given[0], ..., f"is given together with {given[1]}", "give one of them")
    for name, value, least in (("from_validation", from_validation, 0), ("prompt_tokens", prompt_tokens, 1)):
        if value < least:
            raise ConfigError(name, value, f"must be at least {least}", f"use {least}")
    tokenizer, separator = data.tokenizer, data.separator
    if from_validation:
        stream = data.windows("validation").stream
        if from_validation > stream.n_documents:
            rule = f"the validation split has {stream.n_documents} documents"
            raise ConfigError("from_validation", from_validation, rule, f"use at most {stream.n_documents}")
        heads = stream.heads(from_validation, prompt_tokens)
        # a character that is cut through is shown once it is whole
        return [Prompt(tokenizer.decode(ids[1:]).rstrip("\ufffd"), ids) for ids in heads]
    documents = _lines(prompts) if prompts else [os.fsencode(prompt)]
    encoded = tokenizer.encode_batch(documents)
    pairs = zip(documents, encoded, strict=True)
    return [Prompt(document.decode(errors="replace"), [separator, *ids.tolist()]) for document, ids in pairs]


def _lines(file: str) -> list[bytes]:
    try:
        lines = Path(file).read_bytes().splitlines()
    except OSError as error:
        raise ConfigError("prompts", file, f"cannot be read ({error.strerror})", "give a file of text") from error
    if not (lines := [line for line in lines if line.strip()]):
        raise ConfigError("prompts", file, "holds no prompt", "write a prompt a line")
    return lines


def sample(
    decoder: Decoder,
    tokenizer: Tokenizer,
    prompts: list[Prompt],
    sampling: Sampling,
    *,
    stop_token: int,
    n_samples: int,
    max_tokens: int,
    seed: int,
    batch_size: int,
    as_json: bool,
) -> None:
    """Prints what the model makes of each prompt, `n_samples` times, prompts in order.

    Args:
        decoder: with its weights, on any device.
        tokenizer: of the model.
        prompts: at least one.
        sampling: how to draw.
        stop_token: ends a text; the separator.
        n_samples: texts a prompt.
        max_tokens: most tokens of a text.
        seed: of the draws.
        batch_size: texts that are made side by side.
        as_json: a JSON object a line, once each text is whole; else text as it comes.
    Raises:
        ConfigError: a number below 1.
        Interrupted: on a signal; says how far it came.
    """
    for name, value in (("samples", n_samples), ("max_tokens", max_tokens), ("batch_size", batch_size)):
        if value < 1:
            raise ConfigError(name, value, "must be at least 1", "use 1")
    is_one = len(prompts) * n_samples == 1
    draws, n_tokens = Draws(seed), 0
    numbered = enumerate(prompts, start=1)
    sequences = ((i, k, prompt) for i, prompt in numbered for k in range(1, n_samples + 1))
    try:
        for batch in _batches(sequences, batch_size):
            titles = ["" if is_one else f"--- prompt {i}, sample {k} ---\n" for i, k, _ in batch]
            starts = [title + _bold(_shown(p.text)) for title, (_, _, p) in zip(titles, batch, strict=True)]
            output = InOrder(_write, [""] * len(batch) if as_json else starts)
            streams = [TextStream(tokenizer, prompt.ids) for _, _, prompt in batch]
            texts, counts = [""] * len(batch), [0] * len(batch)
            events = generate(
                decoder,
                [prompt.ids for _, _, prompt in batch],
                sampling,
                [draws.generator(prompt.ids) for _, _, prompt in batch],
                max_tokens=max_tokens,
                stop_token=stop_token,
                n_id=len(tokenizer),
            )
            for event in events:
                row, is_stop = event.row, event.token == stop_token
                n_tokens += 1
                counts[row] += 1
                text = "" if is_stop else streams[row].push(event.token)
                text += streams[row].end() if event.is_last else ""
                texts[row] += text
                if not as_json:
                    output.add(row, _shown(text) + ("\n" if event.is_last else ""), event.is_last)
                elif event.is_last:
                    i, k, prompt = batch[row]
                    line = {"prompt": prompt.text, "text": texts[row], "prompt_number": i, "sample": k}
                    line |= {"n_tokens": counts[row], "ended_by": "separator" if is_stop else "max_tokens"}
                    output.add(row, json.dumps(line) + "\n", True)
    except Interrupted as stop:
        raise Interrupted(stop.signum, f"stopped after {n_tokens:,} tokens") from None


def _batches(sequences: Iterable[tuple[int, int, Prompt]], size: int) -> Iterator[list[tuple[int, int, Prompt]]]:
    left = iter(sequences)
    while batch := list(itertools.islice(left, size)):
        yield batch


def _shown(text: str) -> str:
    return text.translate(_SHOWN) if sys.stdout.isatty() else text


def _bold(text: str) -> str:
    return f"\033[1m{text}\033[0m" if text and sys.stdout.isatty() else text


def _write(text: str) -> None:
    encoding = sys.stdout.encoding or "utf-8"
    sys.stdout.write(text.encode(encoding, errors="replace").decode(encoding))
    sys.stdout.flush()


def device_of(accelerator: str) -> torch.device:
    """Where to sample: the GPU if there is one and `trainer.accelerator` lets it, else the CPU.

    Raises:
        ConfigError: an accelerator that is not there, or that sampling does not run on.
    """
    name = {"auto": "cuda" if torch.cuda.is_available() else "cpu", "gpu": "cuda"}.get(accelerator, accelerator)
    if name not in ("cpu", "cuda") or (name == "cuda" and not torch.cuda.is_available()):
        raise ConfigError("trainer.accelerator", accelerator, "cannot be sampled on here", "use cpu")
    return torch.device(name)
