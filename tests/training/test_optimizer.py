from __future__ import annotations

import math

import pytest
import torch
from helpers import make_decoder, mup, normal, rows_of, small
from hypothesis import given
from hypothesis import strategies as st
from torch.optim.lr_scheduler import LambdaLR

from mutransformer.mup.config import OptimizerConfig, RoleMultipliers
from mutransformer.training.optimizer import Lion, build_optimizer, clip_by_global_norm
from mutransformer.training.schedule import ScheduleConfig, schedule_factor

ALGORITHMS = pytest.mark.parametrize("algorithm", ["adamw", "lion", "sgd"])


def build(config: OptimizerConfig, decoder_config=None, **parametrization):
    """A float64 decoder and its optimizer."""
    decoder_config = decoder_config or small()
    decoder = make_decoder(decoder_config, **parametrization)
    plan = decoder_config.plan(mup(**parametrization), config)
    return decoder, build_optimizer(decoder.named_parameters(), plan, config)


def weights_of(decoder) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in decoder.state_dict().items()}


def set_gradients(decoder, step: int, scale: float = 1.0) -> None:
    for i, parameter in enumerate(decoder.parameters()):
        parameter.grad = scale * normal(*parameter.shape, seed=1000 * step + i)


# Groups


@ALGORITHMS
def test_one_group_a_parameter_named_after_it_with_the_plans_learning_rate(algorithm):
    config = OptimizerConfig(algorithm=algorithm, learning_rate=0.01, weight_decay=0.1, scale_eps=True)
    shape = small(d_model=48, projection_biases=True, norm_gains="vector")
    decoder, optimizer = build(config, shape)
    rows, parameters = rows_of(shape, mup(), config), dict(decoder.named_parameters())
    assert [group["name"] for group in optimizer.param_groups] == list(parameters)
    for group in optimizer.param_groups:
        name = group["name"]
        assert group["params"] == [parameters[name]]
        assert group["lr"] == rows[name].lr
    epses = {group["name"]: group.get("eps") for group in optimizer.param_groups}
    assert epses == {name: row.eps if algorithm == "adamw" else None for name, row in rows.items()}


# Against the definitions


@pytest.mark.parametrize("decay", ["coupled", "independent"])
def test_lion_is_the_papers_algorithm(decay):
    lr, wd, beta1, beta2 = 0.01, 0.1, 0.9, 0.97
    config = OptimizerConfig(algorithm="lion", learning_rate=lr, weight_decay=wd, decay=decay, beta1=beta1, beta2=beta2)
    decoder, optimizer = build(config, rules="sp")
    theta, m = weights_of(decoder), {name: 0.0 for name, _ in decoder.named_parameters()}
    taken_off = lr * wd if decay == "coupled" else wd
    for step in range(5):
        set_gradients(decoder, step)
        for name, p in decoder.named_parameters():
            c = beta1 * m[name] + (1 - beta1) * p.grad
            theta[name] = theta[name] - lr * torch.sign(c) - taken_off * theta[name]
            m[name] = beta2 * m[name] + (1 - beta2) * p.grad
        optimizer.step()
    for name, p in decoder.named_parameters():
        assert torch.allclose(p, theta[name], rtol=0, atol=1e-14)


def test_lion_runs_a_closure_and_skips_parameters_without_gradient():
    moved, unmoved = (torch.nn.Parameter(torch.ones(2)) for _ in range(2))
    optimizer = Lion([{"params": [moved, unmoved]}], betas=(0.9, 0.99))

    def closure():
        loss = (3 * moved).sum()
        loss.backward()
        return loss

    assert optimizer.step(closure).item() == 6
    assert torch.equal(unmoved, torch.ones(2))
    assert torch.allclose(moved, torch.tensor(1 - 1e-4), rtol=0, atol=1e-7)


@pytest.mark.parametrize("decay", ["coupled", "independent"])
def test_sgd_keeps_independent_decay_out_of_the_momentum(decay):
    lr, wd, momentum = 0.05, 0.02, 0.9
    config = OptimizerConfig(algorithm="sgd", learning_rate=lr, weight_decay=wd, decay=decay, momentum=momentum)
    decoder, optimizer = build(config, rules="sp")
    theta, buffer = weights_of(decoder), {name: 0.0 for name, _ in decoder.named_parameters()}
    for step in range(5):
        set_gradients(decoder, step)
        for name, p in decoder.named_parameters():
            into_momentum = wd * theta[name] if decay == "coupled" else 0.0
            off = wd * theta[name] if decay == "independent" else 0.0
            buffer[name] = momentum * buffer[name] + p.grad + into_momentum
            theta[name] = theta[name] - off - lr * buffer[name]
        optimizer.step()
    for name, p in decoder.named_parameters():
        assert torch.allclose(p, theta[name], rtol=0, atol=1e-14)


def test_coupled_decay_with_one_learning_rate_is_torchs_adamw_with_one_group():
    config = OptimizerConfig(learning_rate=0.01, beta1=0.8, beta2=0.9, eps=1e-6, weight_decay=0.1, decay="coupled")
    ours, optimizer = build(config, rules="sp")
    theirs = make_decoder(small(), rules="sp")
    theirs_optimizer = torch.optim.AdamW(
        theirs.parameters(), lr=0.01, betas=(0.8, 0.9), eps=1e-6, weight_decay=0.1, fused=False
    )
    for step in range(5):
        for decoder, each in ((ours, optimizer), (theirs, theirs_optimizer)):
            set_gradients(decoder, step)
            each.step()
    for a, b in zip(ours.parameters(), theirs.parameters(), strict=True):
        assert torch.allclose(a, b, rtol=0, atol=1e-14)


# Decay


@ALGORITHMS
@pytest.mark.parametrize("d_model", [16, 64])
@pytest.mark.parametrize("learning_rate", [1e-3, 0.3])
def test_independent_decay_takes_off_the_schedule_times_the_setting_whatever_width_and_learning_rate(
    algorithm, d_model, learning_rate
):
    wd, schedule = 0.02, ScheduleConfig(kind="cosine", warmup_steps=3, total_steps=8)
    config = OptimizerConfig(algorithm=algorithm, learning_rate=learning_rate, weight_decay=wd, momentum=0.9)
    decoder, optimizer = build(config, small(d_model=d_model, projection_biases=True, norm_gains="vector"))
    scheduler = LambdaLR(optimizer, lambda step: schedule_factor(step, schedule))
    before = weights_of(decoder)
    for _ in range(8):
        for parameter in decoder.parameters():
            parameter.grad = torch.zeros_like(parameter)
        optimizer.step()
        scheduler.step()
    left = math.prod(1 - schedule_factor(step, schedule) * wd for step in range(8))
    assert left < 0.95
    for name, parameter in decoder.named_parameters():
        is_decayed = not name.startswith(("b_", "gain_"))
        assert torch.allclose(parameter, before[name] * (left if is_decayed else 1.0), rtol=1e-13, atol=0)


@pytest.mark.parametrize("decay, halves", [("independent", False), ("coupled", True)])
def test_coupled_decay_depends_on_the_learning_rate(decay, halves):
    def share_taken_off(learning_rate):
        decoder, optimizer = build(OptimizerConfig(learning_rate=learning_rate, weight_decay=0.1, decay=decay))
        before = weights_of(decoder)["w_query"]
        decoder.w_query.grad = torch.zeros_like(decoder.w_query)
        optimizer.step()
        return float((1 - decoder.w_query.detach() / before).mean())

    assert share_taken_off(0.1) / share_taken_off(0.2) == pytest.approx(0.5 if halves else 1.0)


@ALGORITHMS
@pytest.mark.parametrize("decay", ["independent", "coupled"])
def test_learning_rate_0_freezes_a_role_decay_included(algorithm, decay):
    config = OptimizerConfig(algorithm=algorithm, weight_decay=0.1, decay=decay, momentum=0.9)
    decoder, optimizer = build(config, lr_multiplier=RoleMultipliers(embedding=0.0))
    before = weights_of(decoder)
    for step in range(3):
        set_gradients(decoder, step)
        optimizer.step()
    unmoved = {name for name, parameter in decoder.named_parameters() if torch.equal(parameter, before[name])}
    assert unmoved == {"embedding"}


# Clipping


@given(scale=st.floats(1e-6, 1e6), max_norm=st.floats(1e-3, 1e3))
def test_clipping_is_exact(scale, max_norm):
    parameters = [torch.nn.Parameter(normal(*shape)) for shape in ((3, 4), (5,), ())]
    for i, p in enumerate(parameters):
        p.grad = scale * normal(*p.shape, seed=10 + i)
    before = [p.grad.clone() for p in parameters]
    norm = math.sqrt(sum(float(g.square().sum()) for g in before))

    assert clip_by_global_norm(parameters, None).item() == pytest.approx(norm, rel=1e-14)
    assert all(torch.equal(p.grad, g) for p, g in zip(parameters, before, strict=True))

    assert clip_by_global_norm(parameters, max_norm).item() == pytest.approx(norm, rel=1e-14)
    after = math.sqrt(sum(float(p.grad.square().sum()) for p in parameters))
    assert after == pytest.approx(min(norm, max_norm), rel=1e-13)
    for p, g in zip(parameters, before, strict=True):
        assert torch.allclose(p.grad, g * min(1.0, max_norm / norm), rtol=1e-13, atol=0)


def test_gradients_at_or_below_the_limit_are_untouched_to_the_bit():
    p = torch.nn.Parameter(torch.zeros(2))
    p.grad = torch.tensor([3.0, 4.0])
    clip_by_global_norm([p, torch.nn.Parameter(torch.zeros(1))], 5.0)
    assert p.grad.tolist() == [3.0, 4.0]


def test_clipping_matches_torchs_up_to_its_1e_6_in_the_denominator():
    ours, theirs = (torch.nn.Parameter(normal(50)) for _ in range(2))
    for p in (ours, theirs):
        p.grad = normal(50, seed=1)
    norm = clip_by_global_norm([ours], 0.5)
    assert torch.equal(torch.nn.utils.clip_grad_norm_([theirs], 0.5), norm)
    assert torch.allclose(ours.grad * (norm / (norm + 1e-6)), theirs.grad, rtol=1e-13, atol=0)
    assert not torch.allclose(ours.grad, theirs.grad, rtol=1e-8, atol=0)


def test_zero_gradients_stay_zero():
    p = torch.nn.Parameter(torch.ones(3))
    p.grad = torch.zeros(3)
    assert clip_by_global_norm([p], 1.0).item() == 0
    assert p.grad.tolist() == [0, 0, 0]


def test_a_gradient_that_is_not_finite_shows_in_the_norm():
    p = torch.nn.Parameter(torch.ones(2))
    p.grad = torch.tensor([1.0, float("nan")])
    assert not torch.isfinite(clip_by_global_norm([p], 1.0))
