"""At the base width muP is plain PyTorch: an ordinary decoder under one AdamW group takes the same steps."""

from __future__ import annotations

import pytest
import torch
from helpers import D_BASE, Outputs, fit, make_module, mup, random_batch, small
from torch import nn

from mutransformer.mup.config import OptimizerConfig, RoleMultipliers
from mutransformer.training.schedule import ScheduleConfig

N_STEPS = 10
N_WARMUP = 3
LR, WD = 0.01, 1e-3
BATCHES = [random_batch(seed=seed) for seed in range(N_STEPS)]
SCHEDULE = ScheduleConfig(warmup_steps=N_WARMUP, total_steps=N_STEPS, start_fraction=0.1, end_fraction=0.2)
OPTIMIZER = OptimizerConfig(learning_rate=LR, weight_decay=WD)


class PlainNorm(nn.Module):
    def forward(self, x):
        return x / torch.sqrt((x * x).mean(dim=-1, keepdim=True) + 1e-5)


class PlainBlock(nn.Module):
    def __init__(self, width, d_head, d_ff):
        super().__init__()
        self.query, self.key, self.value, self.out = (nn.Linear(width, width, bias=False) for _ in range(4))
        self.up, self.down = nn.Linear(width, d_ff, bias=False), nn.Linear(d_ff, width, bias=False)
        self.norm, self.d_head = PlainNorm(), d_head

    def heads(self, x):
        return torch.stack(x.split(self.d_head, dim=-1), dim=1)

    def rotated(self, x):
        length, half = x.shape[-2], self.d_head // 2
        angle = torch.arange(length)[:, None] / 10_000.0 ** (torch.arange(half, dtype=torch.float64) / half)
        turned = torch.complex(x[..., :half], x[..., half:]) * torch.polar(torch.ones_like(angle), angle)
        return torch.cat((turned.real, turned.imag), dim=-1)

    def forward(self, x):
        h = self.norm(x)
        q, k = (self.rotated(self.heads(project(h))) for project in (self.query, self.key))
        future = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).triu(1)
        weights = (q @ k.mT / self.d_head).masked_fill(future, float("-inf")).softmax(-1)
        x = x + self.out(torch.cat((weights @ self.heads(self.value(h))).unbind(1), dim=-1))
        return x + self.down(torch.relu(self.up(self.norm(x))))


class PlainDecoder(nn.Module):
    """A pre-norm decoder as anybody would write it."""

    def __init__(self, config):
        super().__init__()
        self.embedding = nn.Embedding(config.vocab_size, config.d_model)
        self.blocks = nn.ModuleList(
            PlainBlock(config.d_model, config.d_head, config.d_ff) for _ in range(config.n_layer)
        )
        self.norm = PlainNorm()
        self.unembedding = nn.Linear(config.d_model, config.vocab_size, bias=False)

    def forward(self, tokens):
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return self.unembedding(self.norm(x))

    def named_as_ours(self) -> dict[str, list[nn.Parameter]]:
        """Our names -> these parameters, one a layer."""
        in_block = {
            "w_query": "query",
            "w_key": "key",
            "w_value": "value",
            "w_attention_out": "out",
            "w_ff_in": "up",
            "w_ff_out": "down",
        }
        layers = {ours: [getattr(block, theirs).weight for block in self.blocks] for ours, theirs in in_block.items()}
        return {"embedding": [self.embedding.weight], **layers, "unembedding": [self.unembedding.weight]}


def run_plain(config, initial: dict[str, torch.Tensor]):
    """Losses and final weights of the plain decoder under torch's AdamW with one group."""
    decoder = PlainDecoder(config).double()
    with torch.no_grad():
        for name, parameters in decoder.named_as_ours().items():
            for parameter, values in zip(parameters, initial[name].reshape(len(parameters), -1), strict=True):
                parameter.copy_(values.reshape(parameter.shape))
    # decay of WD a step at the peak, whatever the learning rate
    optimizer = torch.optim.AdamW(decoder.parameters(), lr=LR, betas=(0.9, 0.95), eps=1e-8, weight_decay=WD / LR)
    assert len(optimizer.param_groups) == 1
    losses = []
    for step, batch in enumerate(BATCHES):
        into_warmup, into_decay = step / N_WARMUP, (step - N_WARMUP) / (N_STEPS - N_WARMUP)
        factor = 0.1 + 0.9 * into_warmup if step < N_WARMUP else 1 - 0.8 * into_decay
        optimizer.param_groups[0]["lr"] = LR * factor
        logits = decoder(batch["tokens"][:, :-1])
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), batch["tokens"][:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    final = {name: torch.stack([*p]).detach().flatten() for name, p in decoder.named_as_ours().items()}
    return losses, final


def run_ours(config, parametrization, folder, optimizer=OPTIMIZER):
    """Initial weights, losses and final weights of the module under Lightning's trainer."""
    arguments = (config, parametrization, optimizer, SCHEDULE)
    fresh = make_module(*arguments)
    fresh.configure_model()
    initial = {name: tensor.double() for name, tensor in fresh.decoder.state_dict().items()}
    module, outputs = make_module(*arguments), Outputs()
    fit(module, folder, BATCHES, callbacks=(outputs,))
    final = {name: tensor.flatten() for name, tensor in module.decoder.state_dict().items()}
    return initial, [values["loss"] for values in outputs.values], final


def differences(losses, final, other_losses, other_final) -> tuple[float, float]:
    """Largest difference of the losses and of the weights."""
    assert len(losses) == len(other_losses) == N_STEPS
    assert final.keys() == other_final.keys()
    return (
        max(abs(a - b) for a, b in zip(losses, other_losses, strict=True)),
        max((final[name] - other_final[name]).abs().max().item() for name in final),
    )


@pytest.mark.parametrize("form", ["A", "B"])
def test_at_the_base_width_mup_is_plain_pytorch_update_for_update(form, tmp_path):
    initial, *ours = run_ours(small(), mup(unembedding_form=form), tmp_path)
    plain = run_plain(small(), initial)
    # float64, and Adam may blow a rounding of 1e-17 of a gradient near eps=1e-8 up to 1e-9 of an update of 1e-2
    assert max(differences(*ours, *plain)) < 1e-10
    assert len(set(ours[0])) == N_STEPS


def test_at_twice_the_base_width_it_is_not(tmp_path):
    wide = small(d_model=2 * D_BASE)
    initial, *ours = run_ours(wide, mup(), tmp_path)
    loss_difference, weight_difference = differences(*ours, *run_plain(wide, initial))
    assert loss_difference > 1e-3
    assert weight_difference > LR


def test_sp_is_plain_pytorch_at_any_width(tmp_path):
    wide = small(d_model=2 * D_BASE)
    initial, *ours = run_ours(wide, mup(rules="sp", qk_scale=1 / 8), tmp_path)
    assert max(differences(*ours, *run_plain(wide, initial))) < 1e-10


# The learning rate that mup_absolute divides by the fan-in, given back: the same constants at the base
AS_MUP = RoleMultipliers(
    query=D_BASE,
    key=D_BASE,
    value=D_BASE,
    attention_output=D_BASE,
    feedforward_in=D_BASE,
    feedforward_out=4 * D_BASE,
    unembedding=D_BASE,
)
# settings, and whether they are the same network at other widths too
SAME_AT_BASE = {
    "form_b": ({"unembedding_form": "B"}, True),  # but for Adam's eps
    "mup_absolute": ({"rules": "mup_absolute", "lr_multiplier": AS_MUP}, True),
    "sp": ({"rules": "sp", "unembedding_init": "mup", "qk_scale": 1 / 8}, False),
    "embedding_rule": ({"embedding_lr_rule": "sqrt"}, False),
    "completep": ({"depth_rule": "completep"}, False),
}


@pytest.mark.parametrize("settings, is_same_when_wider", SAME_AT_BASE.values(), ids=SAME_AT_BASE)
def test_with_the_same_constants_every_rule_set_is_the_same_network_at_the_base(settings, is_same_when_wider, tmp_path):
    def run(d_model, **parametrization):
        shape = small(d_model=d_model, n_layer=2 * d_model // D_BASE)  # deeper too, for the rule of depth
        return run_ours(shape, mup(n_base_layer=2, **parametrization), tmp_path)[1:]

    # powers of two are exact: the same bits
    assert differences(*run(D_BASE), *run(D_BASE, **settings)) == (0, 0)
    loss_difference, _ = differences(*run(2 * D_BASE), *run(2 * D_BASE, **settings))
    assert (loss_difference < 1e-5) is is_same_when_wider
