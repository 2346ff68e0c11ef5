"""The coordinate check: muP passes, SP and each planted fault fail with the faulty tensor named, no bit changes."""

from __future__ import annotations

import csv
import json
import os
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from helpers import LENGTH, Batches, Outputs, make_trainer, random_batch
from lightning.pytorch import LightningModule
from torch import nn

from mutransformer import (
    DecoderConfig,
    DecoderModule,
    OptimizerConfig,
    ParametrizationConfig,
    ScheduleConfig,
    coordcheck,
)
from mutransformer.cli import main
from mutransformer.errors import ConfigError
from mutransformer.verify.record import CoordinateRecorder

WIDTHS = (32, 64, 128, 256)
N_STEPS = 4
NO_VALIDATION = Batches(random_batch())  # Lightning warns where there is none


def batches(seed):
    return [random_batch(8, 4 * LENGTH, seed)] * N_STEPS


def make(rules="mup", *, decay=1e-3, decoder=lambda width: {}, optimizer=None, **parametrization):
    """(width, seed) -> module; `decoder` gives settings that depend on width."""

    def build(width, seed):
        return DecoderModule(
            DecoderConfig(**{"d_model": width, "n_layer": 2, "d_head": 16, "vocab_size": 17, **decoder(width)}),
            ParametrizationConfig(rules=rules, d_base=32, **parametrization),
            OptimizerConfig(**{"learning_rate": 2**-5, "weight_decay": decay, **(optimizer or {})}),
            ScheduleConfig(kind="constant"),
            seed=seed,
        )

    return build


def planted(change, make):
    """A module whose plan is changed before its weights are made: `change(row, width)` -> fields of the row."""

    def build(width, seed):
        module = make(width, seed)
        rows = tuple(replace(row, **change(row, width / 32)) for row in module.plan.rows)
        module.plan = replace(module.plan, rows=rows)
        return module

    return build


def check(make, **options):
    return coordcheck(make, batches, widths=WIDTHS, **{"seeds": (1, 2, 3), **options})


def failing(verdict):
    return {finding.name for finding in verdict.failures}


VARIANTS = {
    "form A": {},
    "form B": {"unembedding_form": "B"},
    "absolute": {"rules": "mup_absolute", "optimizer": {"learning_rate": 2**-1}},
    "zero init": {"unembedding_init": "zero", "query_init": "zero", "residual_init": "zero"},
    "multipliers": {"output_multiplier": 4.0, "input_multiplier": 2.0, "qk_scale": 0.25},
    "gains, biases, norms": {
        "decoder": lambda width: {
            "norm_gains": "vector",
            "projection_biases": True,
            "qk_norm": True,
            "embedding_norm": True,
        }
    },
    "swiglu, grouped heads": {"decoder": lambda width: {"activation": "swiglu", "n_kv_head": width // 32}},
    "completep": {"depth_rule": "completep", "n_base_layer": 1},
    "sgd": {"optimizer": {"algorithm": "sgd", "learning_rate": 0.5}},
    "lion": {"optimizer": {"algorithm": "lion", "learning_rate": 2**-6}},
}


@pytest.mark.parametrize("settings", VARIANTS.values(), ids=VARIANTS.keys())
def test_mup_passes(settings):
    verdict = check(make(**settings))
    assert verdict.passed, verdict.failures
    looked_at = {finding.name for finding in verdict.findings}
    assert {
        "logits activation",
        "residual change",
        "w_ff_out update",
        "embedding decay",
        "unembedding update",
    } <= looked_at


def test_tied_embeddings_pass():
    """Their logits start with the power of untied ones and take longer to leave it."""
    tied = make(decoder=lambda width: {"tie_embeddings": True})
    verdict = check(tied, transients={"logits": (-0.5, N_STEPS)})
    assert verdict.passed, verdict.failures


def test_control_must_fail():
    verdict = check(make(), control=make("sp"))
    assert verdict.passed, verdict.failures
    assert verdict.findings[-1].name == "control sp fails"
    with_mup_as_control = check(make(), control=make())
    assert failing(with_mup_as_control) == {"control sp fails"}


def test_sp_fails_and_names_step_and_power():
    verdict = check(make("sp"))
    assert {"w_query update", "logits activation", "unembedding weight", "residual change"} <= failing(verdict)
    reason = next(finding.reason for finding in verdict.failures if finding.name == "w_query update")
    assert re.search(r"width\^\([+-]0\.00", reason) and "at step 0" in reason and "muP asks for width^(-1)" in reason


ROW_FAULTS = {
    "query rate not scaled": (lambda row, m: {"lr": row.lr * m} if row.name == "w_query" else {}, "w_query update"),
    "feed-forward rate scaled twice": (
        lambda row, m: {"lr": row.lr / m} if row.name == "w_ff_in" else {},
        "w_ff_in update",
    ),
    "embedding rate scaled": (lambda row, m: {"lr": row.lr / m} if row.name == "embedding" else {}, "embedding update"),
    "unembedding std as in SP": (
        lambda row, m: {"init_std": row.init_std * m**0.5} if row.name == "unembedding" else {},
        "logits activation",
    ),
    "unembedding std, by its weight": (
        lambda row, m: {"init_std": row.init_std * m**0.5} if row.name == "unembedding" else {},
        "unembedding weight",
    ),
    "decay over m": (lambda row, m: {"decay_per_step": row.decay_per_step / m}, "w_key decay"),
}


@pytest.mark.parametrize(("change", "named"), ROW_FAULTS.values(), ids=ROW_FAULTS.keys())
def test_planted_fault_in_the_plan_is_named(change, named):
    verdict = check(planted(change, make()))
    assert not verdict.passed
    assert named in failing(verdict), failing(verdict)


def test_decay_over_m_is_seen_by_the_decay_alone():
    """No activation shows it in so few steps: the check of the optimizer's groups must."""
    verdict = check(planted(ROW_FAULTS["decay over m"][0], make()))
    assert {name.split()[1] for name in failing(verdict)} == {"decay"}


def test_coupled_decay_fails_as_it_depends_on_width():
    assert "w_value decay" in failing(check(make(optimizer={"decay": "coupled", "weight_decay": 0.1})))


def with_wide_heads(width):
    return {"d_head": width // 4}


TRANSIENTS_OF_WIDE_HEADS = {"logits": (-0.5, 2), "scores": (-0.5, N_STEPS)}


def test_scores_over_sqrt_d_head_fail_where_heads_grow():
    # queries and keys are not aligned within a few steps of random tokens, nor then the attention weights' changes
    verdict = check(make(decoder=with_wide_heads), transients=TRANSIENTS_OF_WIDE_HEADS)
    assert failing(verdict) == {"weights change"}

    def faulty(width, seed):
        return make(decoder=with_wide_heads, qk_scale=(width // 4) ** -0.5)(width, seed)

    verdict = check(faulty, transients=TRANSIENTS_OF_WIDE_HEADS)
    assert "scores activation" in failing(verdict)
    assert "w_query update" not in failing(verdict)


def with_wide_feedforward(width):
    return {"ff_multiple": 4 * (width / 32) ** 0.5}


def test_feedforward_multiple_taken_from_d_model_fails():
    right = make(decoder=with_wide_feedforward, ff_multiple_base=4)
    assert check(right).passed

    def change(row, m):
        return {"lr": row.lr * row.width_multiple / m} if row.name == "w_ff_out" else {}

    assert {"w_ff_out update", "feedforward_output change"} <= failing(check(planted(change, right)))


def test_forgotten_output_multiplier_fails():
    def faulty(width, seed):
        module = make(unembedding_form="B")(width, seed)
        module.plan = replace(module.plan, logits_multiplier=1.0)
        return module

    assert {"logits activation", "logits change"} <= failing(check(faulty))


def test_not_finite_and_partly_zero_are_failures():
    def exploding(width, seed):
        return make(optimizer={"learning_rate": 1e38 if width == 64 else 2**-5})(width, seed)

    reasons = {finding.name: finding.reason for finding in check(exploding, seeds=(1,)).failures}
    assert "is not finite" in reasons["logits activation"]

    def frozen(row, m):
        return {"lr": 0.0} if row.name == "w_key" and m == 2 else {}

    reasons = {finding.name: finding.reason for finding in check(planted(frozen, make()), seeds=(1,)).failures}
    assert "is zero at some widths" in reasons["w_key update"]


# ---- recording changes nothing ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("n_micro_batch", [1, 3])
def test_losses_are_the_same_to_the_bit_with_and_without_recording(tmp_path, n_micro_batch):
    def losses(*callbacks):
        outputs = Outputs()
        module = make()(32, 1)
        module.n_micro_batch = n_micro_batch
        trainer = make_trainer(tmp_path, N_STEPS, (outputs, *callbacks), limit_val_batches=0)
        trainer.fit(module, Batches(*batches(1)), NO_VALIDATION)
        return outputs.values

    recorder = CoordinateRecorder()
    assert losses(recorder) == losses()
    assert {row.step for row in recorder.rows} == set(range(N_STEPS))
    assert {row.layer for row in recorder.rows if row.tensor == "scores"} == {0, 1}
    assert {row.layer for row in recorder.rows if row.tensor == "logits"} == {0}


def test_micro_batches_give_the_mean_over_the_batch():
    whole, parts = (values_of(n_micro_batch) for n_micro_batch in (1, 4))
    assert whole.keys() == parts.keys()
    for key, value in whole.items():
        assert parts[key] == pytest.approx(value, rel=1e-3, abs=1e-6), key


def values_of(n_micro_batch):
    recorder = CoordinateRecorder()
    module = make()(32, 1)
    module.n_micro_batch = n_micro_batch
    trainer = make_trainer(Path("unused"), 2, (recorder,), limit_val_batches=0)
    trainer.loggers = []
    trainer.fit(module, Batches(*batches(1)[:2]), NO_VALIDATION)
    return {(row.step, row.tensor, row.layer, row.quantity): row.value for row in recorder.rows}


def test_recorded_numbers_are_those_of_the_tensors(tmp_path):
    """Against the embedding and an update computed by hand, in all three norms."""
    recorder = CoordinateRecorder(("l2", "max"))
    module = make()(32, 1)
    module.configure_model()
    before = {name: parameter.detach().clone() for name, parameter in module.decoder.named_parameters()}
    tokens = batches(1)[0]["tokens"][:, :-1]
    trainer = make_trainer(tmp_path, 1, (recorder,), limit_val_batches=0)
    trainer.fit(module, Batches(*batches(1)[:1]), NO_VALIDATION)
    values = {(row.tensor, row.quantity, row.norm): row.value for row in recorder.rows}
    x = before["embedding"][tokens]
    update = module.decoder.w_query.detach() - before["w_query"] * (1 - 1e-3)  # decay is not counted
    for tensor, quantity, numbers in (("embedding", "activation", x), ("w_query", "update", update)):
        assert values[tensor, quantity, "mean"] == pytest.approx(numbers.abs().mean().item(), rel=1e-6)
        assert values[tensor, quantity, "l2"] == pytest.approx(numbers.square().mean().sqrt().item(), rel=1e-6)
        assert values[tensor, quantity, "max"] == pytest.approx(numbers.abs().max().item(), rel=1e-6)
    assert values["w_query", "update_per_lr", "mean"] == pytest.approx(update.abs().mean().item() / 2**-5, rel=1e-6)
    assert values["w_query", "decay", "mean"] == pytest.approx(1e-3, rel=1e-6)


# ---- a user's own module ---------------------------------------------------------------------------------------------


def perceptron(right):
    """A user's network of three layers in SP, or in muP by its own hands; with its optimizer."""

    def build(width, seed):
        torch.manual_seed(seed)
        model = nn.Sequential(nn.Linear(8, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 3))
        if right:
            nn.init.normal_(model[4].weight, std=1 / width)
        scale = 32 / width if right else 1.0
        groups = [(model[0], 1.0), (model[2], scale), (model[4], scale)]
        return model, torch.optim.Adam([{"params": m.weight, "lr": 0.03 * factor} for m, factor in groups])

    return build


def perceptron_batches(seed):
    generator = torch.Generator().manual_seed(seed)
    return [(torch.randn(64, 8, generator=generator), torch.randint(3, (64,), generator=generator))] * 4


def test_a_users_own_module_is_judged_by_the_same_rule(tmp_path):
    verdict = coordcheck(
        perceptron(right=True),
        perceptron_batches,
        widths=(32, 64, 128, 256, 512),
        control=perceptron(right=False),
        loss=lambda model, batch: nn.functional.cross_entropy(model(batch[0]), batch[1]),
        transients={"model.4": (-0.5, 2)},
        out=tmp_path,
    )
    assert verdict.passed, verdict.failures
    assert "model.4 change" in {finding.name for finding in verdict.findings}
    assert (tmp_path / "coordcheck.png").stat().st_size > 10_000


# ---- the command -----------------------------------------------------------------------------------------------------

TINY = (
    "--data.dataset=text",
    "--data.validation_fraction=0.2",
    "--data.sequence_len=32",
    "--data.tokens_per_batch=128",
    "--model.decoder.n_layer=1",
    "--model.decoder.d_head=16",
    "--model.parametrization.d_base=32",
    "--model.optimizer.learning_rate=0.03125",
    "--model.optimizer.weight_decay=0.001",
    "--model.schedule.kind=constant",
    "--trainer.accelerator=cpu",
    "--steps=4",
    "--widths=[32,64,128,256]",
    "--seeds=[1,2,3]",
)


@pytest.fixture
def corpus(tmp_path):
    from cli_runs import write_corpus

    (tmp_path / "corpus").mkdir()
    return f"--data.data_files={write_corpus(tmp_path / 'corpus')}"


def test_command_passes_with_its_files(tmp_path, corpus, capsys):
    out = tmp_path / "out"
    assert main(["coordcheck", *TINY, corpus, f"--out={out}", "--norms=[max]"]) == 0
    assert "coordcheck: PASS" in capsys.readouterr().out
    verdict = json.loads((out / "verdict.json").read_text())
    assert verdict["passed"] and verdict["figures"]["tolerance"] == 0.25
    with (out / "coordcheck.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert {row["norm"] for row in rows} == {"mean", "max"}
    assert {row["variant"] for row in rows} == {"mup", "sp"}
    assert (out / "coordcheck.png").stat().st_size > 10_000


def test_command_fails_with_exit_code_1(tmp_path, corpus, capsys):
    options = [corpus, f"--out={tmp_path / 'out'}", "--model.parametrization.rules=sp", "--control=false"]
    assert main(["coordcheck", *TINY, *options]) == 1
    captured = capsys.readouterr()
    assert "FAIL" in captured.out
    assert captured.err.count("\n") == 1 and "coordcheck: FAIL" in captured.err


def test_real_batches_are_recorded_without_changes(tmp_path, corpus):
    out = tmp_path / "out"
    assert main(["coordcheck", *TINY, corpus, f"--out={out}", "--same_batch=false"]) == 0
    assert ",change," not in (out / "coordcheck.csv").read_text()


@pytest.mark.parametrize(
    ("option", "field"),
    [
        ("--widths=[32,40]", "d_model"),
        ("--widths=[64]", "widths"),
        ("--seeds=[]", "seeds"),
        ("--norms=[sum]", "norms"),
        ("--steps=0", "steps"),
        ("--steps=1000000000000", "steps"),
        ("--seeds=[1,1]", "seeds"),
        ("--trainer.devices=2", "trainer.devices"),
        ("--data.data_files=/nowhere/*.txt", "data.data_files"),
    ],
)
def test_mistakes_end_before_any_work(tmp_path, corpus, capsys, option, field):
    out = tmp_path / "out"
    assert main(["coordcheck", *TINY, corpus, f"--out={out}", option]) == 2
    error = capsys.readouterr().err
    assert field in error and error.count("\n") == 1
    assert not out.exists()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"widths": (32,)}, "two widths at least"),
        ({"widths": WIDTHS, "norms": ("sum",)}, "'sum'.*are not known"),
        ({"widths": WIDTHS, "seeds": ()}, "names no seed"),
    ],
)
def test_what_cannot_be_judged_is_refused(options, message):
    with pytest.raises(ConfigError, match=message):
        coordcheck(make(), batches, **options)


def test_no_batches_are_no_pass():
    with pytest.raises(ConfigError, match="batches"):
        coordcheck(make(), lambda seed: [], widths=WIDTHS, seeds=(1,))


XLA_SCRIPT = """
import torch, torch_xla
import torch_xla.core.xla_model as xm
from helpers import random_batch
from test_coordcheck import make
from mutransformer.model.tap import recording

def losses(record):
    module = make()(32, 1)
    module.configure_model()
    module.decoder.to(torch_xla.device())
    sizes = []
    optimizer = torch.optim.SGD(module.decoder.parameters(), lr=0.1)
    tokens = random_batch(8, 32, 1)["tokens"].to(torch_xla.device())
    found = []
    for _ in range(3):
        optimizer.zero_grad()
        with recording((lambda name, x: sizes.append(x.abs().mean())) if record else (lambda name, x: None)):
            loss = module.loss_sum({"tokens": tokens})
        loss.backward()
        optimizer.step()
        torch_xla.sync()
        found.append(loss.item())
    return found, len([size.item() for size in sizes])

recorded, n = losses(True)
assert n > 0
plain, _ = losses(False)
assert recorded == plain, (recorded, plain)
"""


def test_accumulation_by_lightning_is_one_step(tmp_path):
    """A module of a user's that leaves accumulation to Lightning: two batches, one update, which is recorded."""
    recorder = CoordinateRecorder()
    torch.manual_seed(0)
    model, optimizer = perceptron(right=True)(32, 1)

    class Module(LightningModule):
        def __init__(self):
            super().__init__()
            self.model = model

        def training_step(self, batch, batch_idx):
            return nn.functional.cross_entropy(self.model(batch[0]), batch[1])

        def configure_optimizers(self):
            return optimizer

    before = model[2].weight.detach().clone()
    trainer = make_trainer(tmp_path, 1, (recorder,), accumulate_grad_batches=2)
    trainer.fit(Module(), Batches(*perceptron_batches(1)[:2]))
    values = {(row.tensor, row.quantity): row.value for row in recorder.rows}
    assert {row.step for row in recorder.rows} == {0}
    expected = (model[2].weight.detach() - before).abs().mean().item()
    assert values["model.2.weight", "update"] == pytest.approx(expected, rel=1e-6) and expected > 0


def test_change_is_not_fooled_by_work_in_place():
    def inplace(width, seed):
        torch.manual_seed(seed)
        model = nn.Sequential(nn.Linear(8, width), nn.ReLU(inplace=True), nn.Linear(width, 3))
        return model, torch.optim.SGD(model.parameters(), lr=0.0)

    verdict = coordcheck(
        inplace,
        perceptron_batches,
        widths=(32, 64),
        seeds=(1,),
        loss=lambda model, batch: nn.functional.cross_entropy(model(batch[0]), batch[1]),
    )
    assert not any(finding.name.endswith(" change") for finding in verdict.findings)  # nothing changed


def test_recording_on_xla_changes_no_bit():
    """In a process of its own: the XLA client must exist before any backward."""
    pytest.importorskip("torch_xla", reason="torch_xla has wheels for Linux on x86_64 alone")
    here = Path(__file__).parent
    env = {"PJRT_DEVICE": "CPU", "PYTHONPATH": f"{here}:{here.parent}", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", XLA_SCRIPT], env={**os.environ, **env}, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
