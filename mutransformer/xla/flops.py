"""Floating-point operations of a training step: by arithmetic from the shape, and counted in the traced program."""

from __future__ import annotations

import math
from dataclasses import dataclass

from mutransformer.model.config import DecoderConfig
from mutransformer.xla.hlo import Computation, Instruction, Program


@dataclass(frozen=True)
class StepFlops:
    """Operations in matrix products of one optimizer step, on all devices together; a multiply-add is two.

    Args:
        weights: products with weights, forward and backward: 6 a weight and token, without the embedding's lookup.
        attention: queries with keys and weights with values, forward and backward, over all pairs of positions: half of
            it is masked, and computed all the same.
        again: what the backward pass computes a second time.
        in_kernels: of all these, what flash attention's kernels compute. They leave most masked pairs out and make
            scores again twice, which is about as much.
    """

    weights: int
    attention: int
    again: int
    in_kernels: int = 0

    @property
    def useful(self) -> int:
        """What a step is worth: the numerator of the model FLOP/s utilization."""
        return self.weights + self.attention

    @property
    def total(self) -> int:
        return self.useful + self.again

    @property
    def remat_factor(self) -> float:
        """All that is computed, over what is useful."""
        return self.total / self.useful


def step_flops(config: DecoderConfig, n_tokens: int, flash_attention: bool = False) -> StepFlops:
    """By arithmetic.

    Args:
        config: the decoder; its `remat` says what is computed again.
        n_tokens: in a step.
        flash_attention: by a kernel.
    """
    sizes = config.axis_sizes()
    in_block = {
        spec.name: math.prod(sizes[axis] for axis in spec.axes)
        for spec in config.tensors()
        if spec.is_in_block and spec.name.startswith("w_")
    }
    head = config.vocab_size * config.d_model
    pairs = 2 * config.n_layer * config.n_head * config.d_head * config.sequence_len  # multiply-adds a token
    # the last product of a block is not needed again: its result goes into the stream, which is kept
    recomputed = sum(in_block.values()) - in_block["w_ff_out"] + pairs
    scores = 0 if flash_attention else pairs // 2
    again = 2 * {"none": 0, "dots": scores, "block": recomputed}[config.remat]
    in_kernels = (6 + 2 * (config.remat == "block")) * pairs if flash_attention else 0
    return StepFlops(
        weights=6 * (sum(in_block.values()) + head) * n_tokens,
        attention=6 * pairs * n_tokens,
        again=again * n_tokens,
        in_kernels=in_kernels * n_tokens,
    )


def dot_flops(text: str) -> int:
    """Counted in HLO: of all matrix products, loops as often as they go round.

    Args:
        text: of a program as it was traced, on all devices together, or partitioned, on one of them. What a compiler
            has turned into convolutions or kernels is not seen.
    """
    program = Program.parse(text)
    return sum(
        n_runs * _of_dot(instruction, program.computations[name])
        for name, n_runs in program.executions.items()
        for instruction in program.computations[name].values()
        if instruction.op == "dot"
    )


def _of_dot(dot: Instruction, computation: Computation) -> int:
    summed = (dot.attribute("lhs_contracting_dims") or "{}").strip("{}")
    left = computation[dot.operands[0]].shapes[0].sizes
    n_summed = math.prod(left[int(i)] for i in summed.split(",") if i)
    return 2 * math.prod(dot.shapes[0].sizes) * n_summed
