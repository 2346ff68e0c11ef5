"""A second implementation of the reference (lucaslingle/mu_transformer, main at 8c38b29), for the tests of the parity.

It shares no code with the package: plain functions of the reference's own names and layouts, torch for arrays and
gradients alone. `test_reference_parity.py` holds it against numbers of the real one, then lets it write files of
options for which there are none here.
"""

from __future__ import annotations

import json
import math

import numpy as np
import torch

EOS = PAD = 1
BOS = 0
BLOCK = {"aq", "ak", "av", "ao", "fi", "fo", "a", "f"}  # leaves that have a slice a layer, by what follows w_, b_, g_

FF_ACTIVATIONS = {
    "relu": lambda x: torch.clamp(x, min=0),
    "gelu": lambda x: 0.5 * x * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))),
    "silu": lambda x: x * torch.sigmoid(x),
    "sqrelu": lambda x: torch.clamp(x, min=0) ** 2,
    "tanh": torch.tanh,
    "elu": lambda x: torch.where(x > 0, x, torch.expm1(torch.clamp(x, max=0))),
}


def starting_leaves(c, init):
    """`init` as the config has it: the leaves that it lacks, zeros where asked for, the unembedding by its rule."""
    n_layer, d_model, d_head = c["n_layer"], c["d_model"], c["d_head"]
    n_head = d_model // d_head
    n_kv = 1 if c["kv_mqa"] else n_head
    d_ff = int(c["ff_multiple"] * d_model)
    p = dict(init)
    if c["proj_biases"]:
        shapes = {
            "aq": (n_head, d_head),
            "ak": (n_kv, d_head),
            "av": (n_kv, d_head),
            "ao": (d_model,),
            "fo": (d_model,),
        }
        shapes["fi"] = (2 * d_ff if c["ff_act_name"] == "swiglu" else d_ff,)
        p |= {f"b_{name}": np.zeros((n_layer, *shape), np.float32) for name, shape in shapes.items()}
        p["b_u"] = np.zeros(len(init["w_e"]), np.float32)
    if c["norm_gains"]:
        names = ["a", "f", "u"] + ["e"] * c["e_norm"] + ["aq", "ak"] * c["qk_norm"]
        width = 1 if c["norm_gains_type"] == "scalar" else d_model
        p |= {f"g_{name}": np.ones((n_layer, width) if name in BLOCK | {"aq"} else width, np.float32) for name in names}
    zero = (
        ["w_aq"] * (c["q_init"] == "zero")
        + ["w_ao", "w_fo"] * (c["r_init"] == "zero")
        + ["w_u"] * (c["u_init"] == "zero")
    )
    p |= {name: np.zeros_like(p[name]) for name in zero}
    if c["u_init"] == "sp":
        p["w_u"] = p["w_u"] * np.float32(math.sqrt(d_model))
    return p


def norm(c, x, gain=None):
    normed = x / torch.sqrt((x**2).mean(-1, keepdim=True) + c["norm_eps"])
    return normed if gain is None else normed * gain


def rope(c, x):
    half = x.shape[-1] // 2
    frequency = c["rotary_base"] ** (-torch.arange(half, dtype=torch.float64) / half)
    angle = (torch.arange(x.shape[-2], dtype=torch.float64)[:, None] * frequency).to(x.dtype)
    e, o = x[..., :half], x[..., half:]
    return torch.cat([e * angle.cos() - o * angle.sin(), e * angle.sin() + o * angle.cos()], -1)


def attention_weights(c, s):
    name, length = c["attn_act_name"], c["sequence_len"]
    s = s - 1e30 * torch.ones(length, length, dtype=s.dtype).triu(1)
    if name == "softmax":
        e = torch.exp(s - s.amax(-1, keepdim=True))
        return e / e.sum(-1, keepdim=True)
    raw = (
        torch.clamp(s, min=0) ** 2 if name.endswith("sqrelu") else torch.where(s > 0, s + 1, torch.exp(s.clamp(max=0)))
    )
    return raw / (c["norm_eps"] + raw.sum(-1, keepdim=True)) if name.startswith("norm_") else raw / length


def logits(c, p, inputs):
    x = p["w_e"][inputs]
    if c["e_norm"]:
        x = norm(c, x, p.get("g_e"))
    for i in range(c["n_layer"]):
        b = {name: leaf[i] for name, leaf in p.items() if name.split("_")[1] in BLOCK}
        h = norm(c, x, b.get("g_a"))
        q, k, v = (torch.einsum("btm,mhk->bhtk", h, b[f"w_a{n}"]) for n in "qkv")
        if c["proj_biases"]:
            q, k, v = (y + b[f"b_a{n}"][:, None] for n, y in zip("qkv", (q, k, v), strict=True))
        if c["qk_norm"]:
            q, k = norm(c, q, b.get("g_aq")), norm(c, k, b.get("g_ak"))
        if c["rotary_base"]:
            q, k = rope(c, q), rope(c, k)
        k, v = k.expand_as(q), v.expand_as(q)
        root = c["qk_scale"] ** 0.5
        w = attention_weights(c, torch.einsum("bhik,bhjk->bhij", q * root, k * root))
        x = x + torch.einsum("bhtk,hkm->btm", torch.einsum("bhij,bhjk->bhik", w, v), b["w_ao"]) + b.get("b_ao", 0)
        h = norm(c, x, b.get("g_f")) @ b["w_fi"] + b.get("b_fi", 0)
        if c["ff_act_name"] == "swiglu":
            half = h.shape[-1] // 2
            h = FF_ACTIVATIONS["silu"](h[..., :half]) * h[..., half:]
        else:
            h = FF_ACTIVATIONS[c["ff_act_name"]](h)
        x = x + h @ b["w_fo"] + b.get("b_fo", 0)
    return norm(c, x, p.get("g_u")) @ p["w_u"] + p.get("b_u", 0)


def objective(c, p, tokens):
    """(mean(mask * CE) over all positions, mean(mask))."""
    rows = [row.tolist() for row in tokens]
    ends = [next((i for i, t in enumerate(row) if t in (EOS, PAD)), len(row)) for row in rows]
    mask = torch.tensor([[float(i <= end) for i in range(len(row))] for row, end in zip(rows, ends, strict=True)])
    inputs = torch.tensor([[BOS, *row[:-1]] for row in rows])
    y = logits(c, p, inputs)
    ce = torch.logsumexp(y, -1) - y.gather(-1, torch.tensor(rows)[..., None])[..., 0]
    return (mask * ce).mean(), mask.mean().item()


def group_factor(c, name):
    if name[:2] != "w_" or name == "w_e" or c["optim_rule"] == "sp":
        return 1.0
    if c["optim_rule"] == "mup":
        return 1 / (c["d_model"] // c["d_base"])
    return 1 / (c["d_model"] * (c["ff_multiple"] if name == "w_fo" else 1))


def schedule(c, t):
    z, warmup, total = 1e-4, c["n_warmup_step"], c["n_pretrain_step"]
    if t < warmup:
        return z + (1 - z) * t / warmup
    u = min((t - warmup) / (total - warmup), 1.0)
    return 1 - (1 - z) * u if c["lr_schedule_name"] == "linear" else (1 - z) * (1 + math.cos(math.pi * u)) / 2 + z


def update(c, p, m, v, grads, t):
    """One step of the chain, in place: clip, Adam or Lion, decay, schedule; t counts from 0."""
    total = math.sqrt(sum((g.double() ** 2).sum().item() for g in grads.values()))
    clip = c["grad_clip"] / total if 0 < c["grad_clip"] < total else 1.0
    b1, b2, s = c["optim_beta1"], c["optim_beta2"], schedule(c, t)
    for name, w in p.items():
        g, factor = grads[name] * clip, group_factor(c, name)
        if c["optim_name"] == "lion":
            u = torch.sign((1 - b1) * g + b1 * m[name])
            m[name] = b2 * m[name] + (1 - b2) * g
        else:
            m[name] = b1 * m[name] + (1 - b1) * g
            v[name] = b2 * v[name] + (1 - b2) * g * g
            eps = c["optim_eps"] * (factor if c["use_eps_scaling"] else 1)
            u = (m[name] / (1 - b1 ** (t + 1))) / (torch.sqrt(v[name] / (1 - b2 ** (t + 1))) + eps)
        lr = c["lr_base"] * factor
        step = lr * u + c["wd"] * w if c["use_iwd"] else lr * (u + c["wd"] * w)
        p[name] = w - s * step


def train(c, init, tokens):
    """Numbers of a run by the keys of a file of one run; `init` is complete."""
    p = {name: torch.tensor(leaf) for name, leaf in init.items()}
    m = {name: torch.zeros_like(leaf) for name, leaf in p.items()}
    v, pending = dict(m), []
    numbers, losses = {f"params0/{name}": leaf.numpy() for name, leaf in p.items()}, []
    for i, batch in enumerate(tokens):
        leaves = {name: leaf.requires_grad_(True) for name, leaf in p.items()}
        value, mask_mean = objective(c, leaves, batch)
        grads = dict(zip(leaves, torch.autograd.grad(value, list(leaves.values())), strict=True))
        p = {name: leaf.detach() for name, leaf in leaves.items()}
        losses.append(value.item() / mask_mean)
        if i == 0:
            numbers |= {f"grads0/{name}": g.numpy() for name, g in grads.items()}
        pending.append(grads)
        if len(pending) == c["grad_acc_steps"]:
            mean = {name: sum(g[name] for g in pending) / len(pending) for name in p}
            update(c, p, m, v, mean, (i + 1) // c["grad_acc_steps"] - 1)
            pending = []
        numbers |= {f"params{i + 1}/{name}": leaf.numpy() for name, leaf in p.items()}
    return numbers | {"loss_avg": np.array(losses)}


def write_variants(path, base, variants, init, tokens):
    """A file of many variants, as scripts/reference_parity.py reads them."""
    arrays = {"base_json": json.dumps(base), "variants_json": json.dumps(variants), "tokens": tokens}
    arrays |= {f"init/{name}": leaf for name, leaf in init.items()}
    for name, changed in variants.items():
        c = base | changed
        start = starting_leaves(c, init)
        numbers = train(c, start, tokens)
        arrays[f"{name}/loss_avg"] = numbers["loss_avg"]
        arrays[f"{name}/loss_avg_f64"] = train(c, {w: leaf.astype(np.float64) for w, leaf in start.items()}, tokens)[
            "loss_avg"
        ]
        for key, leaf in numbers.items():
            head, _, w = key.partition("/")
            leaf = leaf.astype(np.float64)
            if head == "grads0":
                arrays[f"{name}/grad0_l2/{w}"] = np.linalg.norm(leaf)
            if head in ("params5", "params20"):
                arrays[f"{name}/{head}_stat/{w}"] = np.array([np.linalg.norm(leaf), leaf.sum(), *leaf.flat[:8]])
    np.savez(path, **arrays)
