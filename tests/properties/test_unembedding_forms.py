"""Forms A and B of the unembedding are one model under Adam (arXiv 2203.03466, Lemma J.1).

Forward times t, initialization over t, learning rate over t, eps times t.
"""

from __future__ import annotations

import pytest
import torch
from helpers import D_BASE, Outputs, fit, make_module, mup, random_batch, random_tokens, small

from mutransformer.mup.config import OptimizerConfig

WIDE = small(d_model=4 * D_BASE)
BATCHES = [random_batch(seed=seed) for seed in range(8)]


def run(form: str, folder, algorithm: str = "adamw", prepare=lambda module: None, **optimizer):
    """Trains; returns losses, the logits of other tokens, and the unembedding as form A has it."""
    settings = {"algorithm": algorithm, "learning_rate": 0.02, "weight_decay": 0.01, "eps": 1e-30, **optimizer}
    module, outputs = make_module(WIDE, mup(unembedding_form=form), OptimizerConfig(**settings)), Outputs()
    prepare(module)
    fit(module, folder, BATCHES, callbacks=(outputs,))
    losses = [values["loss"] for values in outputs.values]
    row = next(row for row in module.plan.rows if row.name == "unembedding")
    return losses, module(random_tokens(3)).detach(), row.forward_multiplier * module.decoder.unembedding.detach()


def largest_difference(one, other) -> float:
    losses = max(abs(a - b) for a, b in zip(one[0], other[0], strict=True))
    return max(losses, *((a - b).abs().max().item() for a, b in zip(one[1:], other[1:], strict=True)))


def test_form_b_starts_from_form_as_weights_over_the_forward_multiplier():
    modules = {form: make_module(WIDE, mup(unembedding_form=form)) for form in "AB"}
    for module in modules.values():
        module.configure_model()
    a, b = (modules[form].decoder for form in "AB")
    assert (a.logits_multiplier, b.logits_multiplier) == (1, 1 / 4)
    for name, parameter in a.named_parameters():
        assert torch.equal(parameter, b.get_parameter(name) * (1 / 4 if name == "unembedding" else 1))


@pytest.mark.parametrize("algorithm", ["adamw", "lion"])
@pytest.mark.parametrize("decay", ["independent", None])
def test_both_forms_take_the_same_steps(algorithm, decay, tmp_path):
    decayed = {"weight_decay": 0.01 if decay else 0.0}
    form_a, form_b = (run(form, tmp_path, algorithm, **decayed) for form in "AB")
    # eight steps in float64 whose roundings Adam divides by gradients of 1e-3
    assert largest_difference(form_a, form_b) < 1e-10
    assert abs(form_a[0][0] - form_a[0][-1]) > 1e-2


def test_sgd_takes_the_same_steps_with_learning_rates_that_differ_by_the_square(tmp_path):
    form_a, form_b = (run(form, tmp_path, "sgd", learning_rate=0.5) for form in "AB")
    assert largest_difference(form_a, form_b) < 1e-12


# Each part of the equivalence is needed


def forget_multiplier(module):
    module.configure_model()
    module.decoder.logits_multiplier = 1.0


def test_forgetting_the_output_multiplier_is_seen(tmp_path):
    assert largest_difference(run("A", tmp_path), run("B", tmp_path, prepare=forget_multiplier)) > 1e-2


def test_coupled_decay_is_seen(tmp_path):
    form_a, form_b = (run(form, tmp_path, decay="coupled", weight_decay=1.0) for form in "AB")
    assert largest_difference(form_a, form_b) > 1e-4


def scale_eps_of_unembedding(module):
    """What the lemma asks of form B: its gradient is a quarter of form A's, and so must be its eps."""
    configure = module.configure_optimizers

    def scaled():
        configured = configure()
        group = next(group for group in configured["optimizer"].param_groups if group["name"] == "unembedding")
        group["eps"] /= 4
        return configured

    module.configure_optimizers = scaled


def test_a_large_eps_must_be_scaled_with_the_forward_multiplier(tmp_path):
    form_a = run("A", tmp_path, eps=1e-3)
    assert largest_difference(form_a, run("B", tmp_path, prepare=scale_eps_of_unembedding, eps=1e-3)) < 1e-10
    assert largest_difference(form_a, run("B", tmp_path, eps=1e-3)) > 1e-4
