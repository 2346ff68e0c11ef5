from __future__ import annotations

import pytest
import torch
from helpers import (
    VOCAB,
    Batches,
    Outputs,
    fit,
    make_module,
    make_trainer,
    mup,
    random_batch,
    random_tokens,
    small,
)

from mutransformer.errors import ConfigError, NonFiniteError
from mutransformer.model.decoder import Decoder
from mutransformer.mup.config import OptimizerConfig, RoleMultipliers
from mutransformer.training.module import DecoderModule, check_finite, compute_dtype
from mutransformer.training.run_metrics import Metrics
from mutransformer.training.schedule import ScheduleConfig, schedule_factor

N_ROWS = 5
SGD = OptimizerConfig(algorithm="sgd", learning_rate=0.5)


def masked_batch(seed: int = 0) -> dict[str, torch.Tensor]:
    """Rows with 8, 1, 5, 0 and 3 targets that count."""
    lengths = torch.tensor([8, 1, 5, 0, 3])
    return random_batch(N_ROWS, seed=seed) | {"mask": (torch.arange(8) < lengths[:, None]).long()}


def gradients_of(module: DecoderModule) -> dict[str, torch.Tensor]:
    return {name: p.grad.clone() for name, p in module.decoder.named_parameters()}


def largest_difference(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> float:
    return max((a[name] - b[name]).abs().max().item() for name in a)


# One batch is one step, in however many parts


@pytest.mark.parametrize("make_batch", [lambda seed: random_batch(N_ROWS, seed=seed), masked_batch])
@pytest.mark.parametrize("n_micro_batch", [2, 3, 4, 5])
def test_micro_batches_give_the_gradients_and_weights_of_the_whole_batch(n_micro_batch, make_batch, tmp_path):
    def run(n_parts):
        module, outputs = make_module(optimizer=SGD, gradient_clip=0.5, n_micro_batch=n_parts), Outputs()
        trainer = fit(module, tmp_path, [make_batch(seed) for seed in range(3)], callbacks=(outputs,))
        assert trainer.global_step == 3
        return gradients_of(module), module.decoder.state_dict(), outputs.values

    whole, parts = run(1), run(n_micro_batch)
    # sums of 40 targets in another order, in float64
    assert largest_difference(whole[0], parts[0]) < 1e-14
    assert largest_difference(whole[1], parts[1]) < 1e-13
    for a, b in zip(whole[2], parts[2], strict=True):
        assert a == pytest.approx(b, rel=1e-13)


def test_the_mean_of_the_parts_means_would_be_another_gradient(tmp_path):
    module = make_module(optimizer=SGD)
    fit(module, tmp_path, [masked_batch()])
    right = gradients_of(module)
    fresh = make_module()
    fresh.configure_model()
    fresh.double()
    for rows in (slice(0, 3), slice(3, 5)):
        part = {name: tensor[rows] for name, tensor in masked_batch().items()}
        (fresh.loss_sum(part) / part["mask"].sum() / 2).backward()
    assert largest_difference(right, gradients_of(fresh)) > 1e-3


def test_objective_may_be_divided_by_all_positions_the_reported_loss_is_not(tmp_path):
    def run(mean_over):
        module, outputs = make_module(loss_mean_over=mean_over), Outputs()
        fit(module, tmp_path, [masked_batch()], callbacks=(outputs,))
        return gradients_of(module), outputs.values[0]["loss"]

    (over_targets, loss), (over_positions, same_loss) = run("targets"), run("positions")
    assert same_loss == loss
    rescaled = {name: gradient * 40 / 17 for name, gradient in over_positions.items()}
    assert largest_difference(over_targets, rescaled) < 1e-14


def test_the_loss_is_the_mean_cross_entropy_of_the_next_token(tmp_path):
    module, outputs, batch = make_module(), Outputs(), masked_batch()
    fit(module, tmp_path, [batch], callbacks=(outputs,))
    fresh = make_module()
    fresh.configure_model()
    log_p = fresh.double()(batch["tokens"][:, :-1]).log_softmax(-1)
    of_targets = log_p.gather(-1, batch["tokens"][:, 1:, None])[..., 0][batch["mask"].bool()]
    assert of_targets.numel() == 17
    assert outputs.values[0]["loss"] == pytest.approx(-of_targets.mean().item(), rel=1e-13)


def test_gradients_are_clipped_and_the_norm_before_is_reported(tmp_path):
    def run(gradient_clip):
        module, outputs = make_module(optimizer=SGD, gradient_clip=gradient_clip), Outputs()
        fit(module, tmp_path, [random_batch()], callbacks=(outputs,))
        squares = sum(gradient.square().sum().item() for gradient in gradients_of(module).values())
        return outputs.values[0]["grad_norm"], squares**0.5

    free, clipped = run(None), run(0.1)
    assert free[0] == pytest.approx(free[1], rel=1e-13)
    assert clipped == pytest.approx((free[0], 0.1), rel=1e-13)
    assert free[0] > 0.1


def test_the_schedule_counts_optimizer_steps(tmp_path):
    schedule = ScheduleConfig(warmup_steps=2, total_steps=6)
    module = make_module(schedule=schedule, n_micro_batch=4)
    trainer = fit(module, tmp_path, [random_batch()] * 5)
    assert trainer.global_step == 5
    for group in trainer.optimizers[0].param_groups:
        assert group["lr"] == pytest.approx(group["initial_lr"] * schedule_factor(5, schedule), rel=1e-14)


@pytest.mark.parametrize(
    "arguments, field",
    [({"n_micro_batch": 0}, "trainer.accumulate_grad_batches"), ({"gradient_clip": 0.0}, "trainer.gradient_clip_val")],
)
def test_settings_that_cannot_work_are_refused(arguments, field):
    with pytest.raises(ConfigError) as error:
        make_module(**arguments)
    assert error.value.field == field


def test_more_parts_than_sequences_are_refused(tmp_path):
    with pytest.raises(ConfigError, match="a batch has 4 sequences to split; use 4"):
        fit(make_module(n_micro_batch=5), tmp_path, [random_batch(4)])


# Weights


def test_a_module_has_no_weights_until_they_are_needed():
    module = make_module(decoder=small(d_model=12288, d_head=128, n_layer=56))
    assert list(module.parameters()) == []
    assert module.plan.count > 100e9


def test_weights_depend_on_the_seed_alone():
    def weight(seed, global_seed):
        torch.manual_seed(global_seed)
        module = make_module(seed=seed)
        module.configure_model()
        return module.decoder.w_query.detach()

    assert torch.equal(weight(0, 1), weight(0, 2))
    assert not torch.equal(weight(0, 1), weight(1, 1))


def test_compile_is_handed_to_the_decoder(monkeypatch):
    compiled = []
    monkeypatch.setattr(Decoder, "compile_block", lambda decoder: compiled.append(decoder))
    for compile_decoder in (False, True):
        module = make_module(compile=compile_decoder)
        module.configure_model()
        assert compiled == [module.decoder] * compile_decoder


def test_compile_does_not_go_with_operators_that_are_kept_one_by_one():
    with pytest.raises(ConfigError, match=r"model.compile=True: is not for model.decoder.remat=dots"):
        make_module(small(remat="dots"), compile=True)


def test_weights_that_are_not_finite_are_found_by_name():
    module = make_module()
    module.configure_model()
    check_finite(module.state_dict())
    with torch.no_grad():
        module.decoder.w_ff_in[1, 2, 3] = float("inf")
    with pytest.raises(NonFiniteError, match="parameter w_ff_in is not finite"):
        check_finite(module.state_dict())


def test_hyper_parameters_are_plain_and_make_the_same_module():
    others = {"gradient_clip": 1.0, "seed": 3, "n_micro_batch": 2, "loss_mean_over": "positions", "compile": True}
    module = make_module(small(n_kv_head=1), mup(lr_multiplier=RoleMultipliers(query=2.0)), SGD, **others)
    again = DecoderModule(**module.hyper_parameters)
    assert again.plan == module.plan
    configs = ("decoder", "parametrization", "optimizer", "schedule")
    assert {name: type(module.hyper_parameters[name]) for name in configs} == dict.fromkeys(configs, dict)
    for hyper_parameters in (module.hyper_parameters, again.hyper_parameters):
        assert {name: value for name, value in hyper_parameters.items() if name not in configs} == others


# Precision


@pytest.mark.parametrize(
    "precision, masters, logits",
    [
        ("32-true", "float32", "float32"),
        ("64-true", "float64", "float64"),
        ("bf16-mixed", "float32", "bfloat16"),
        (32, "float32", "float32"),
        (None, "float32", "float32"),
    ],
)
def test_precision_sets_masters_and_compute_dtype(precision, masters, logits, tmp_path):
    module = make_module()
    fit(module, tmp_path, [random_batch()], precision=precision)
    assert {p.dtype for p in module.decoder.parameters()} == {getattr(torch, masters)}
    assert module(random_tokens(1)).dtype == getattr(torch, logits)


# elu: its scores are multiplied in float32, which autocast would not do
@pytest.mark.parametrize("attention_activation", ["softmax", "elu"])
def test_bf16_mixed_is_the_decoders_own_bfloat16_and_no_autocast_on_top(attention_activation, tmp_path):
    outputs, batch, config = Outputs(), random_batch(), small(attention_activation=attention_activation)
    fit(make_module(config), tmp_path, [batch], precision="bf16-mixed", callbacks=(outputs,))
    fresh = make_module(config)
    fresh.configure_model()
    fresh.decoder.compute_dtype = torch.bfloat16
    assert outputs.values[0]["loss"] == (fresh.loss_sum(batch) / 32).item()


@pytest.mark.parametrize("precision", ["16-mixed", "bf16-true", "16-true", "transformer-engine", 16])
def test_other_precisions_are_refused_with_those_that_do(precision):
    with pytest.raises(ConfigError, match=r"trainer\.precision=.*use one of 32-true, 64-true, bf16-mixed"):
        compute_dtype(precision)


def test_a_trainer_with_another_precision_is_refused_before_there_are_weights(tmp_path):
    module = make_module()
    with pytest.raises(ConfigError, match=r"trainer\.precision='bf16-true'"):
        fit(module, tmp_path, [random_batch()], precision="bf16-true")
    assert module.decoder is None


# Validation


def test_validation_loss_is_a_mean_over_targets_not_over_batches(tmp_path):
    module, metrics = make_module(), Metrics()
    batches = [masked_batch(), random_batch(2, seed=1), {"tokens": random_tokens(3, 4, seed=2)}]
    trainer = make_trainer(tmp_path, 1, (metrics,), precision="64-true")
    trainer.validate(module, Batches(*batches), verbose=False)

    sums = [module.loss_sum(batch).item() for batch in batches]
    targets = [17, 16, 9]
    # the metric's sum is kept in float32
    assert metrics.last["val_loss"] == pytest.approx(sum(sums) / sum(targets), rel=1e-6)
    mean_of_means = sum(s / n for s, n in zip(sums, targets, strict=True)) / 3
    assert metrics.last["val_loss"] != pytest.approx(mean_of_means, rel=1e-3)


def test_validation_starts_from_nothing_each_time(tmp_path):
    module, metrics = make_module(), Metrics()
    for batch in (random_batch(seed=1), random_batch(seed=2)):
        make_trainer(tmp_path, 1, (metrics,)).validate(module, Batches(batch), verbose=False)
        assert metrics.last["val_loss"] == pytest.approx((module.loss_sum(batch) / 32).item(), rel=1e-6)


def test_module_forward_is_the_decoders(tmp_path):
    module, tokens = make_module(), random_tokens(2)
    module.configure_model()
    assert module(tokens).shape == (2, 8, VOCAB)
    assert torch.equal(module(tokens, torch.arange(8) + 3), module.decoder(tokens, torch.arange(8) + 3))


def test_positions_in_a_batch_keep_attention_within_documents(tmp_path):
    """The loss of a packed row is the sum over its documents; without positions it is another."""
    module, batch = make_module(), random_batch(1)
    module.configure_model()
    tokens, cut = batch["tokens"], 5
    positions = torch.cat([torch.arange(cut), torch.arange(tokens.shape[1] - 1 - cut)])[None]
    together = module.loss_sum({**batch, "positions": positions})
    alone = sum(module.loss_sum({"tokens": part}) for part in (tokens[:, : cut + 1], tokens[:, cut:]))
    assert together.item() == pytest.approx(alone.item(), rel=1e-6)
    assert module.loss_sum(batch).item() != pytest.approx(together.item(), rel=1e-4)
