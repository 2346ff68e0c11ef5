"""The progress bar of writing a cache. Read by `datamodule.py`."""

from __future__ import annotations

import sys
import time

from tqdm import tqdm


class WritingProgress:
    """Shows documents, tokens, tokens/s and the time left; the last only where the source's length is known.

    Args:
        title: what is written.
    """

    def __init__(self, title: str) -> None:
        self._title = title
        self._bar: tqdm | None = None
        self._first = (0.0, 0)

    def __call__(self, n_documents: int, n_tokens: int, done: float | None) -> None:
        """Shows that so many documents are read and tokens made, `done` (0 to 1) of all."""
        if self._bar is None:  # speed and time left count from here: the rest was there before
            self._first = (time.perf_counter(), n_tokens)
            form = (
                "{desc}: {postfix} [{elapsed}]"
                if done is None
                else "{desc}: {percentage:3.0f}%|{bar:20}| {postfix} [{elapsed}<{remaining}]"
            )
            self._bar = tqdm(
                total=1.0,
                initial=done or 0.0,
                desc=self._title,
                bar_format=form,
                delay=1.0,
                mininterval=0.5 if sys.stderr.isatty() else 30.0,
            )
        since_s = time.perf_counter() - self._first[0]
        speed = (n_tokens - self._first[1]) / since_s if since_s else 0.0
        text = f"{n_documents:,} documents, {n_tokens:,} tokens, {speed:,.0f} tokens/s"
        self._bar.set_postfix_str(text, refresh=False)
        self._bar.update(max(0.0, (done or 0.0) - self._bar.n))

    def close(self) -> None:
        """Ends the line of the bar."""
        if self._bar is not None:
            self._bar.close()
