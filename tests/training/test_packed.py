"""The packed optimizer makes the updates of torch's, and goes from one to the other by a checkpoint."""

from __future__ import annotations

import copy

import pytest
import torch
from helpers import make_decoder, mup, normal, random_tokens, small

from mutransformer.model.loss import cross_entropy_sum
from mutransformer.mup.config import OptimizerConfig
from mutransformer.training.optimizer import build_optimizer, param_groups
from mutransformer.training.packed import PackedOptimizer

CONFIGS = {
    "adamw": OptimizerConfig(algorithm="adamw", weight_decay=1e-3, learning_rate=0.01),
    "adamw coupled": OptimizerConfig(algorithm="adamw", weight_decay=0.1, decay="coupled", learning_rate=0.01),
    "lion": OptimizerConfig(algorithm="lion", weight_decay=1e-3, learning_rate=1e-3),
    "sgd": OptimizerConfig(algorithm="sgd", momentum=0.9, weight_decay=1e-3, learning_rate=0.1),
    "sgd coupled": OptimizerConfig(algorithm="sgd", weight_decay=1e-3, decay="coupled", learning_rate=0.1),
}


def packed(decoder, config, **options):
    plan = decoder.config.plan(mup(), config)
    algorithm = config.algorithm
    built = build_optimizer(decoder.named_parameters(), plan, config)
    groups = [{key: value for key, value in group.items() if key != "params"} for group in built.param_groups]
    for group, (_, parameter) in zip(groups, decoder.named_parameters(), strict=True):
        group["params"] = [parameter]
    defaults = {"momentum": config.momentum} if algorithm == "sgd" else {"betas": (config.beta1, config.beta2)}
    return PackedOptimizer(groups, algorithm, defaults, **options)


def train(decoder, optimizer, seeds, rate=1.0):
    for seed in seeds:
        tokens = random_tokens(4, 9, seed)
        optimizer.zero_grad()
        cross_entropy_sum(decoder(tokens[:, :-1]), tokens[:, 1:]).backward()
        for group in optimizer.param_groups:
            group.setdefault("initial_lr", group["lr"])
            group["lr"] = group["initial_lr"] * rate * (1 + seed % 3) / 3
        optimizer.step()


def both(config):
    left, right = make_decoder(small()), make_decoder(small())
    plan = left.config.plan(mup(), config)
    return (left, build_optimizer(left.named_parameters(), plan, config)), (right, packed(right, config))


def assert_close(left, right):
    for (name, a), (_, b) in zip(left.named_parameters(), right.named_parameters(), strict=True):
        # float64, another order of operations
        assert torch.allclose(a, b, rtol=0, atol=1e-12), name


@pytest.mark.parametrize("name", CONFIGS)
def test_updates_are_those_of_torchs(name):
    (left, torchs), (right, ours) = both(CONFIGS[name])
    assert isinstance(ours, PackedOptimizer) and not isinstance(torchs, PackedOptimizer)
    for decoder, optimizer in ((left, torchs), (right, ours)):
        train(decoder, optimizer, range(6))
    assert_close(left, right)
    assert not torch.equal(left.w_ff_in, make_decoder(small()).w_ff_in)


@pytest.mark.parametrize("name", ["adamw", "lion", "sgd"])
@pytest.mark.parametrize("from_torch", [True, False])
def test_state_goes_from_one_to_the_other(name, from_torch):
    config = CONFIGS[name]
    (left, torchs), (right, ours) = both(config)
    for decoder, optimizer in ((left, torchs), (right, ours)):
        train(decoder, optimizer, range(3))
    source, target = ((left, torchs), (right, ours))[:: 1 if from_torch else -1]
    before = {key: value for key, value in target[1].param_groups[0].items() if key != "params"}
    target[1].load_state_dict(copy.deepcopy(source[1].state_dict()))
    after = target[1].param_groups[0]
    assert {key: after[key] for key in before if key != "lr"} == {k: v for k, v in before.items() if k != "lr"}
    target[0].load_state_dict(source[0].state_dict())
    for decoder, optimizer in (source, target):
        train(decoder, optimizer, range(3, 6))
    assert_close(left, right)


def test_frozen_at_a_rate_of_zero():
    config = CONFIGS["adamw"]
    _, (right, ours) = both(config)
    train(right, ours, range(2), rate=0.0)
    assert_close(right, make_decoder(small()))


def test_first_moment_in_bfloat16_is_kept_and_restored_in_it():
    config = OptimizerConfig(first_moment="bfloat16", learning_rate=0.01)
    decoder = make_decoder(small(), dtype=torch.float32)
    plan = decoder.config.plan(mup(), config)
    optimizer = build_optimizer(decoder.named_parameters(), plan, config)
    train(decoder, optimizer, range(3))
    state = optimizer.state[decoder.w_ff_in]
    assert (state["exp_avg"].dtype, state["exp_avg_sq"].dtype) == (torch.bfloat16, torch.float32)
    again = build_optimizer(decoder.named_parameters(), plan, config)
    again.load_state_dict(optimizer.state_dict())
    assert torch.equal(again.state[decoder.w_ff_in]["exp_avg"], state["exp_avg"])
    # the update of a step is that of float32 within what a bfloat16 of the moment loses: 2^-9 of it
    exact = make_decoder(small(), dtype=torch.float32)
    plain = build_optimizer(exact.named_parameters(), plan, OptimizerConfig(learning_rate=0.01))
    train(exact, plain, range(3))
    moved = (exact.w_ff_in - make_decoder(small(), dtype=torch.float32).w_ff_in).abs().max()
    assert 0 < (decoder.w_ff_in - exact.w_ff_in).abs().max() < 0.02 * moved


def test_parameter_without_gradient_stays():
    p = torch.nn.Parameter(normal(3, 3))
    config = CONFIGS["adamw"]
    decoder = make_decoder(small())
    groups = param_groups(decoder.named_parameters(), decoder.config.plan(mup(), config), config)
    optimizer = PackedOptimizer([{**groups[0], "params": [p]}], "adamw", {"betas": (0.9, 0.95)})
    before = p.detach().clone()
    optimizer.step()
    assert torch.equal(p, before)
