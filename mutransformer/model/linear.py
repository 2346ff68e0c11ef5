"""Products of tensors: torch's own on GPU, oneDNN's on CPU, and on XLA one contraction whose dimensions stay apart.

torch hands float32 products on x86 to MKL, which runs on AMD's processors at half the speed of oneDNN (110 against 240
GFLOP/s a core, measured on a Zen 5); bfloat16 goes to oneDNN anyway.

torch writes a product of many dimensions as reshapes around a matrix product. On XLA a dimension sharded on one mesh
axis, merged with one sharded on another, costs GSPMD all-to-alls; so there the equation is kept, forward and backward.
"""

from __future__ import annotations

import platform
from typing import Any

import torch
import torch.nn.functional as F

_HAS_ONEDNN = torch.backends.mkldnn.is_available() and platform.machine().lower() in ("x86_64", "amd64")


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
    out = product(flat_x, flat_weight).unflatten(-1, weight.shape[:-n_summed])
    return out if bias is None else out + bias


def product(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """x weight^T, as `F.linear`: x [..., I], weight [O, I] -> [..., O]."""
    if _HAS_ONEDNN and x.dtype == weight.dtype == torch.float32 and x.device.type == "cpu" and x.numel():
        return _OneDNN.apply(x, weight)
    return F.linear(x, weight)


def _onednn(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return torch.ops.mkldnn._linear_pointwise(_dense(x), _dense(weight), None, "none", [], "")


def _dense(matrix: torch.Tensor) -> torch.Tensor:
    """Rows or columns without gaps: of other layouts oneDNN takes some a thousand times slower."""
    is_dense = matrix.is_contiguous() or (matrix.dim() == 2 and matrix.t().is_contiguous())
    return matrix if is_dense else matrix.contiguous()


# the same under a name that torch.compile leaves alone: it takes oneDNN's own for one with constant weights
_product = torch.library.custom_op("mutransformer::product", _onednn, mutates_args=())
_product.register_fake(lambda x, weight: x.new_empty(*x.shape[:-1], weight.shape[0]))

# oneDNN's products as a trace names them
ONEDNN = (torch.ops.mkldnn._linear_pointwise.default, torch.ops.mutransformer.product.default) if _HAS_ONEDNN else ()


class _OneDNN(torch.autograd.Function):
    """`F.linear` in float32 by oneDNN."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        return _product(x, weight) if torch.compiler.is_compiling() else _onednn(x, weight)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        x, weight = ctx.saved_tensors
        of_x, of_weight = ctx.needs_input_grad
        return (
            _OneDNN.apply(gradient, weight.t()) if of_x else None,
            _sum_of_outer(gradient.flatten(0, -2), x.flatten(0, -2)) if of_weight else None,
        )


def _sum_of_outer(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """a^T b, with the narrower of both as oneDNN's first argument, which it copies."""
    return _OneDNN.apply(a.t(), b.t()) if a.shape[1] <= b.shape[1] else _OneDNN.apply(b.t(), a.t()).t()


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
