from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from helpers import VOCAB, make_decoder, random_tokens, small

from mutransformer.inference.decoding import CHUNK, Draws, generate, read_prompts
from mutransformer.inference.sampling import Sampling
from mutransformer.model.tap import recording

T = 16
PROMPTS = [[0], [0, 5, 7], [0, *random_tokens(1, CHUNK + 3)[0].tolist()], [0, 5], [0, 5, 7]]
WARM, GREEDY = Sampling(temperature=1.5, top_p=0.95), Sampling(temperature=0)


@pytest.fixture(scope="module")
def decoder():
    """Its logits are far from uniform, so that a token depends on the context."""
    return make_decoder(small(sequence_len=T, n_kv_head=1), output_multiplier=20.0).requires_grad_(False)


def texts(decoder, prompts, sampling=WARM, seed=0, max_tokens=2 * T, **options) -> list[list[int]]:
    draws = Draws(seed)
    found: list[list[int]] = [[] for _ in prompts]
    ended = set()
    generators = [draws.generator(prompt) for prompt in prompts]
    for event in generate(decoder, prompts, sampling, generators, max_tokens=max_tokens, **options):
        assert event.row not in ended
        found[event.row].append(event.token)
        ended |= {event.row} if event.is_last else set()
    assert ended == set(range(len(prompts)))
    return found


def slowly(decoder, prompt, sampling, seed, max_tokens) -> list[int]:
    """One token at a time from a cache that has read the whole text anew."""
    generator, tokens = Draws(seed).generator(prompt), list(prompt)
    for _ in range(max_tokens):
        logits, _ = read_prompts(decoder, [tokens])
        uniform = torch.rand((), generator=generator)
        weights, ids = logits[0].div(sampling.temperature).softmax(-1).sort(descending=True)
        kept = (weights.cumsum(-1) - weights) < sampling.top_p
        weights = (weights * kept).cumsum(-1)
        tokens.append(int(ids[int((weights <= uniform * weights[-1]).sum())]))
    return tokens[len(prompt) :]


def test_a_text_does_not_depend_on_the_others(decoder):
    together = texts(decoder, PROMPTS)
    assert texts(decoder, PROMPTS[3::-1]) == together[3::-1]
    for prompt, text in zip(PROMPTS[:4], together[:4], strict=True):
        assert texts(decoder, [prompt]) == [text]
        assert slowly(decoder, prompt, WARM, 0, 2 * T) == text


def test_equal_prompts_give_different_texts_and_each_seed_others(decoder):
    first, again = texts(decoder, PROMPTS), texts(decoder, PROMPTS)
    assert first == again
    assert first[1] != first[4]
    assert texts(decoder, PROMPTS, seed=1) != first
    assert texts(decoder, PROMPTS, GREEDY, seed=1) == texts(decoder, PROMPTS, GREEDY)


def test_greedy_is_the_argmax_of_a_whole_forward_pass(decoder):
    for prompt in ([0], [0, 5, 7]):
        (text,) = texts(decoder, [prompt], GREEDY, max_tokens=T + 1 - len(prompt))
        logits_LV = decoder(torch.tensor([prompt + text[:-1]]))[0]
        assert logits_LV[len(prompt) - 1 :].argmax(-1).tolist() == text


def test_a_row_ends_with_the_stop_token(decoder):
    whole = texts(decoder, PROMPTS)
    stop = whole[2][4]
    stopped = texts(decoder, PROMPTS, stop_token=stop)
    for text, cut in zip(whole, stopped, strict=True):
        assert cut == (text[: text.index(stop) + 1] if stop in text else text)
    assert len(stopped[2]) <= 5


def test_padding_ids_are_never_drawn(decoder):
    assert max(max(text) for text in texts(decoder, PROMPTS)) > 9
    assert max(max(text) for text in texts(decoder, PROMPTS, n_id=10)) <= 9
    assert VOCAB > 10


def test_no_step_is_made_for_nothing(decoder):
    calls = []
    with recording(lambda name, tensor: calls.append(name) if name == "logits" else None):
        assert len(texts(decoder, [[0], [0]], max_tokens=3)[0]) == 3
    assert len(calls) == 3  # the prompts, and two steps; the last token is drawn and not read


ON_XLA = """
import os, sys
os.environ["PJRT_DEVICE"] = "CPU"
sys.path.insert(0, "tests")
import torch, torch_xla, torch_xla.debug.metrics as met
from helpers import make_decoder, small
from mutransformer.inference.decoding import Draws, generate
from mutransformer.inference.sampling import Sampling
shape = small(sequence_len=16, n_kv_head=1)
cpu = make_decoder(shape, dtype=torch.float32, output_multiplier=20.0).requires_grad_(False)
prompts = [[[0], [0, 5, 7]], [[0, *([3, 4] * 90)], [0, 9]]]
expected = []
for pair in prompts:
    draws = Draws(0)
    generators = [draws.generator(p) for p in pair]
    expected.append([e.token for e in generate(cpu, pair, Sampling(top_p=0.9), generators, max_tokens=40)])
xla, counts = cpu.to(torch_xla.device()), []
for pair, tokens in zip(prompts, expected):
    draws = Draws(0)
    generators = [draws.generator(p) for p in pair]
    events = list(generate(xla, pair, Sampling(top_p=0.9), generators, max_tokens=40, sync=torch_xla.sync))
    assert [event.token for event in events] == tokens
    counts.append(met.metric_data("CompileTime")[0])
assert counts == [4, 4], counts  # the empty cache, a chunk of the prompts, a step, the last step, which only draws
"""


@pytest.mark.slow
def test_xla_compiles_four_graphs_whatever_the_prompts_and_gives_the_same_tokens():
    pytest.importorskip("torch_xla")
    root = Path(__file__).resolve().parents[2]
    done = subprocess.run([sys.executable, "-c", ON_XLA], capture_output=True, text=True, cwd=root, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
