"""Tokens to text while they come: whole characters only, several sequences in order."""

from __future__ import annotations

from collections.abc import Callable

from mutransformer.data.tokenizer import Tokenizer

_REPLACEMENT = "\ufffd"
_CONTEXT = 8  # tokens decoded again with the next: a piece's spaces depend on the one before
_LONGEST_WAIT = 16  # tokens that a character may take to become whole


class TextStream:
    """The text of a sequence, given out as soon as it is certain.

    A character may need several tokens; until they are there decoders show U+FFFD, which is held back.

    Args:
        tokenizer: of the model.
        prompt: tokens before the first that is pushed; a character that they leave unfinished is given out.
    """

    def __init__(self, tokenizer: Tokenizer, prompt: list[int]) -> None:
        self._tokenizer = tokenizer
        self._ids = prompt[-_CONTEXT:]
        self._n_given = len(tokenizer.decode(self._ids).rstrip(_REPLACEMENT))  # characters of their text
        self._n_waiting = 0

    def push(self, token: int) -> str:
        """Adds a token; returns what can be shown now, often nothing."""
        self._ids.append(token)
        text = self._tokenizer.decode(self._ids)
        n_certain = len(text.rstrip(_REPLACEMENT))
        self._n_waiting += 1
        if n_certain < len(text) and self._n_waiting < _LONGEST_WAIT:
            return self._give(text, n_certain)
        shown = self._give(text, len(text))
        self._n_waiting = 0
        if len(self._ids) > 4 * _CONTEXT:
            self._ids = self._ids[-_CONTEXT:]
            self._n_given = len(self._tokenizer.decode(self._ids))
        return shown

    def end(self) -> str:
        """Returns what was held back."""
        text = self._tokenizer.decode(self._ids)
        return self._give(text, len(text))

    def _give(self, text: str, n: int) -> str:
        shown = text[self._n_given : n]
        self._n_given = max(self._n_given, n)
        return shown


class InOrder:
    """Writes sequences that grow side by side one after the other: the first at once, each next when its turn comes.

    Args:
        write: takes text.
        headings: what stands before each sequence; as many as there are.
    """

    def __init__(self, write: Callable[[str], None], headings: list[str]) -> None:
        self._write = write
        self._waiting = headings
        self._is_done = [False] * len(headings)
        self._turn = 0
        self._flush()

    def add(self, i: int, text: str, is_last: bool = False) -> None:
        """Adds text to sequence `i`; `is_last`: nothing will follow."""
        self._waiting[i] += text
        self._is_done[i] = is_last
        self._flush()

    def _flush(self) -> None:
        while self._turn < len(self._waiting):
            text, self._waiting[self._turn] = self._waiting[self._turn], ""
            if text:
                self._write(text)
            if not self._is_done[self._turn]:
                return
            self._turn += 1
