"""Products of tensors: torch's own on CPU and GPU; on XLA one contraction whose dimensions stay apart.

torch writes a product of many dimensions as reshapes around a matrix product. A dimension sharded on one mesh axis,
merged with one sharded on another, costs GSPMD all-to-alls; so there the equation is kept, forward and backward.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F


def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None, n_summed: int = 1) -> torch.Tensor:
    """Sums over the last dimensions of both: out[..., o] = sum_i x[..., i] weight[o, i] + bias[o].

    Args:
        x: its last `n_summed` dimensions are summed over.
        weight: its last `n_summed` dimensions are summed over.
        bias: of the shape of weight's other dimensions, or None.
        n_summed: how many dimensions i stands for.
    Returns:
        Shape x.shape[:-n_summed] + weight.shape[:-n_summed], x's dtype.
    """
    if x.device.type == "xla":
        kept = [chr(ord("a") + i) for i in range(x.dim() - n_summed)]
        made = [chr(ord("k") + i) for i in range(weight.dim() - n_summed)]
        summed = [chr(ord("t") + i) for i in range(n_summed)]
        out = contract(f"{''.join(kept + summed)},{''.join(made + summed)}->{''.join(kept + made)}", x, weight)
        return out if bias is None else out + bias
    flat_x = x.flatten(-n_summed) if n_summed > 1 else x
    flat_weight = weight.reshape(-1, flat_x.shape[-1])
    out = F.linear(flat_x, flat_weight, None if bias is None else bias.flatten())
    return out.unflatten(-1, weight.shape[:-n_summed])


def contract(equation: str, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """`torch.einsum` of two tensors in which no letter is summed over in one of them alone.

    Args:
        equation: e.g. `bhlk,bhmk->bhlm`.
        a: first operand.
        b: second operand, same dtype.
    Returns:
        The product.
    """
    return _contract(equation, a, b) if a.device.type == "xla" else torch.einsum(equation, a, b)


@torch.library.custom_op("mutransformer::contract", mutates_args=())
def _contract(equation: str, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return torch.einsum(equation, a, b).clone()  # an operator's result must not be a view of its arguments


@_contract.register_fake
def _(equation: str, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return torch.einsum(equation, a, b).contiguous()


def _remember(ctx: Any, inputs: tuple[str, torch.Tensor, torch.Tensor], output: torch.Tensor) -> None:
    ctx.equation = inputs[0]
    ctx.save_for_backward(*inputs[1:])


def _gradients(ctx: Any, gradient: torch.Tensor) -> tuple[None, torch.Tensor, torch.Tensor]:
    a, b = ctx.saved_tensors
    letters_a, _, rest = ctx.equation.partition(",")
    letters_b, _, letters_out = rest.partition("->")
    return (
        None,
        _contract(f"{letters_out},{letters_b}->{letters_a}", gradient, b),
        _contract(f"{letters_a},{letters_out}->{letters_b}", a, gradient),
    )


_contract.register_autograd(_gradients, setup_context=_remember)

# the operator, as a traced graph names it
CONTRACT = torch.ops.mutransformer.contract.default
