"""Every option of the reference, as variants of oracle_a.npz's run; a list for each set of shapes."""

from __future__ import annotations

import numpy as np

# The base is gelu: relu, which oracle_a.npz has, turns rounding into differences (see N_SPREADS in the script).
# name -> changed keys. Each key changes the numbers: the tests take each away and expect the comparison to fail.
PLAIN = {
    "sqrelu_attention": {"attn_act_name": "sqrelu"},
    "elu_attention": {"attn_act_name": "elu"},
    "norm_sqrelu_attention": {"attn_act_name": "norm_sqrelu", "norm_eps": 1e-3},
    "norm_elu_attention": {"attn_act_name": "norm_elu"},
    "gelu": {},
    "relu": {"ff_act_name": "relu"},
    "silu": {"ff_act_name": "silu"},
    "sqrelu": {"ff_act_name": "sqrelu"},
    "elu": {"ff_act_name": "elu", "norm_eps": 1e-2},
    "qk_norm": {"qk_norm": True, "qk_scale": 0.25},
    "e_norm": {"e_norm": True},
    "vector_gains": {"norm_gains": True, "e_norm": True},
    "scalar_gains": {"norm_gains": True, "norm_gains_type": "scalar", "e_norm": True, "qk_norm": True},
    "biases": {"proj_biases": True},
    "no_rotary": {"rotary_base": 0},
    "rotary_100": {"rotary_base": 100},
    "lion": {"optim_name": "lion", "lr_base": 0.001, "optim_beta1": 0.95, "optim_beta2": 0.98},
    "abs_mup": {"optim_rule": "abs_mup", "lr_base": 0.5},
    "sp": {"optim_rule": "sp", "u_init": "sp"},
    "floored_multiple": {"d_base": 20, "lr_base": 0.01},
    "coupled_decay": {"wd": 0.5},
    "independent_decay": {"wd": 0.01, "use_iwd": True, "proj_biases": True, "norm_gains": True},
    "lion_decay": {"optim_name": "lion", "lr_base": 0.001, "wd": 3.0},
    "cosine": {"lr_schedule_name": "cosine", "n_warmup_step": 2},
    "short_schedule": {"n_pretrain_step": 12},
    "eps_scaling": {"optim_eps": 1e-3, "use_eps_scaling": True},
    "abs_eps_scaling": {"optim_rule": "abs_mup", "optim_eps": 1e-2, "use_eps_scaling": True, "lr_base": 1.0},
    "q_zero": {"q_init": "zero"},
    "r_zero": {"r_init": "zero"},
    "u_zero": {"u_init": "zero"},
    "betas": {"optim_beta1": 0.8, "optim_beta2": 0.99},
    "no_clip": {"grad_clip": 0.0},
    "accumulation_2": {"grad_acc_steps": 2, "n_warmup_step": 2, "n_pretrain_step": 10},
    "accumulation_3": {"grad_acc_steps": 3, "optim_name": "lion", "lr_base": 0.001},
}
SWIGLU = {
    "swiglu": {},
    "swiglu_biases": {"proj_biases": True, "wd": 0.3},
    "swiglu_abs": {"optim_rule": "abs_mup", "lr_base": 0.5},
}
ONE_KV_HEAD = {
    "one_kv_head": {},
    "one_kv_head_biases": {"proj_biases": True, "qk_norm": True, "norm_gains": True, "norm_gains_type": "scalar"},
    "one_kv_head_sqrelu": {"attn_act_name": "sqrelu", "rotary_base": 0},
}


def files(base, init):
    """file name -> (base config, variants, shared init)."""
    w_fi, w_fo = init["w_fi"], init["w_fo"]
    swiglu = init | {
        "w_fo": np.ascontiguousarray(w_fo[:, : w_fi.shape[2] // 2])
    }  # w_fi is gate and up of half the width
    one_kv_head = init | {name: np.ascontiguousarray(init[name][:, :, :1]) for name in ("w_ak", "w_av")}
    return {
        "plain": (base | {"ff_act_name": "gelu"}, PLAIN, init),
        "swiglu": (base | {"ff_act_name": "swiglu", "ff_multiple": 2.0}, SWIGLU, swiglu),
        "one_kv_head": (base | {"ff_act_name": "gelu", "kv_mqa": True}, ONE_KV_HEAD, one_kv_head),
    }
