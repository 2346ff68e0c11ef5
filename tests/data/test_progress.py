from __future__ import annotations

import pytest

from mutransformer.data import progress as progress_file
from mutransformer.data.progress import WritingProgress


@pytest.fixture
def shown(monkeypatch, capsys):
    """Shows each report at once, at a rate of a report a second; returns what stands there in the end."""
    now = iter(range(100))
    monkeypatch.setattr(progress_file.time, "perf_counter", lambda: float(next(now)))
    real = progress_file.tqdm
    monkeypatch.setattr(progress_file, "tqdm", lambda **options: real(**{**options, "delay": 0, "mininterval": 0}))

    def show(*reports) -> str:
        progress = WritingProgress("books (train)")
        for report in reports:
            progress(*report)
        progress.close()
        return capsys.readouterr().err.split("\r")[-1].rstrip()

    return show


def test_documents_tokens_speed_and_time_left_are_shown(shown):
    text = shown((100, 1000, 0.1), (200, 51_000, 0.5))
    assert text.startswith("books (train):  50%|")
    assert "200 documents, 51,000 tokens, " in text
    assert text.endswith("]") and "<" in text  # elapsed and left
    speed = int(text.partition("tokens, ")[2].partition(" tokens/s")[0].replace(",", ""))
    assert 0 < speed <= 50_000  # what was there before the first report is no work of this run


def test_without_a_known_length_there_is_no_time_left(shown):
    text = shown((100, 1000, None), (200, 51_000, None))
    assert text.startswith("books (train): ") and "200 documents, 51,000 tokens, " in text
    assert "%" not in text and "<" not in text


def test_nothing_to_show_is_nothing():
    WritingProgress("books").close()
