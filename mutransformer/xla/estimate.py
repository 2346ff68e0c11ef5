"""What a step needs of a chip's memory and time, by arithmetic: estimates, with their formulas.

Weights, optimizer state and what is kept for the backward pass follow from the table. What a compiler needs besides
follows from its habits: the factors below were read off programs that libtpu 0.0.21 made of this package's step, and
`tests/xla/test_plan_compiled.py` holds the sum to within 15 percent of the compiler's.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from mutransformer.xla.collectives import Key, Sent
from mutransformer.xla.slices import Slice
from mutransformer.xla.workload import Workload

# float32 arrays as large as the attention scores that the backward pass of a layer has at once; many more where libtpu
# does not fuse the softmax with what is around it, as happens from 2,048 positions with several sequences on a chip;
# and one more where `dots` has the backward pass make them again
N_SCORES: Mapping[str, float] = {"none": 2.0, "dots": 3.0, "block": 2.0}
N_SCORES_APART = 5.75
APART_FROM = 2048
LANES = 128
# arrays in the compute dtype, in a layer's backward pass: as large as the residual stream gathered over Y, as the
# feed-forward's hidden layer; and that are kept of a layer, as large as the stream on a chip
N_STREAMS, N_HIDDEN = 6.0, 1.0
N_KEPT_STREAMS: Mapping[str, float] = {"none": 12.0, "dots": 8.5}
# weights of so many layers are whole at once
N_GATHERED = 1.25


@dataclass(frozen=True, kw_only=True)
class Memory:
    """Bytes on one chip.

    Args:
        parameters: master weights.
        optimizer: its buffers.
        batch: token ids.
        gradients: of all weights, until they are clipped.
        activations: kept from the forward pass for the backward pass.
        working: everything else that is there at the fullest moment.
    """

    parameters: int
    optimizer: int
    batch: int
    gradients: int
    activations: int
    working: int

    @property
    def total(self) -> int:
        return self.parameters + self.optimizer + self.batch + self.gradients + self.activations + self.working


def estimate_memory(workload: Workload) -> Memory:
    """By arithmetic; see the factors above."""
    w, decoder = workload, workload.decoder
    c, cols = w.compute_bytes, w.mesh.cols
    on_chip = w.on_chip
    in_block = sum(on_chip[tensor.name] for tensor in decoder.tensors() if tensor.is_in_block)
    of_embedding = w.master_bytes * on_chip["embedding"]
    of_unembedding = c * on_chip.get("unembedding", 0)
    casts = c * in_block if c != w.master_bytes else 0

    stream = c * w.positions * decoder.d_model
    activated = c * w.positions * decoder.d_ff // cols
    hidden = activated * (2 if decoder.activation == "swiglu" else 1)
    # the kernel has a maximum and a sum of each row of scores in their place, each in so many lanes
    scores = 4 * w.positions * decoder.n_head // cols * (LANES if w.flash_attention else decoder.sequence_len)
    kept_scores = 0 if w.flash_attention else scores
    kept_of_layer = {
        "block": stream // cols,
        "dots": hidden + int(N_KEPT_STREAMS["dots"] * stream) // cols,
        "none": 2 * kept_scores + hidden + activated + int(N_KEPT_STREAMS["none"] * stream) // cols,
        "unrolled": kept_scores + hidden + int(N_KEPT_STREAMS["none"] * stream) // cols,
    }[decoder.remat if decoder.scan_layers else "unrolled"]
    kept = decoder.n_layer * kept_of_layer

    is_apart = not w.flash_attention and decoder.sequence_len >= APART_FROM and w.positions > decoder.sequence_len
    gathered = int(N_GATHERED * c * in_block * w.mesh.rows / decoder.n_layer)
    n_scores = N_SCORES_APART if is_apart else N_SCORES[decoder.remat]
    layer = int(n_scores * scores + N_STREAMS * stream + N_HIDDEN * hidden) + gathered
    logits = c * w.positions * decoder.vocab_size + of_unembedding
    # libtpu counts what goes round the loop over layers twice: what is kept with `block`, and the casted weights
    twice = (kept if decoder.remat == "block" else 0) + casts
    gradients = c * in_block + of_unembedding + of_embedding
    # the embedding's gradient is there after the last layer's backward pass, all others' when that begins or in it
    working = casts + twice + max(layer - of_embedding, logits - of_embedding - c * in_block, 0)
    if w.n_micro_batch > 1:  # gradients so far are added up, the embedding's in a new place; a casted unembedding stays
        gradients += w.master_bytes * sum(on_chip.values())
        working += of_embedding + of_unembedding
    return Memory(
        parameters=w.parameter_bytes,
        optimizer=w.optimizer_bytes,
        batch=w.batch_bytes,
        gradients=gradients,
        activations=kept,
        working=working,
    )


@dataclass(frozen=True, kw_only=True)
class StepTime:
    """A roofline: seconds that a step cannot take less than, at the peaks that the chip is sold with.

    The step is `max(compute, memory, over_x) + over_y`: weights and gradients go over X while the chip computes, the
    residual stream over Y is waited for.

    Args:
        compute_s: all operations, at the peak of matrix products.
        memory_s: weights, optimizer state and activations through the chip's memory.
        over_x_s: collectives along X.
        over_y_s: collectives along Y.
        mfu: useful operations, of what the chips could do in that time.
    """

    compute_s: float
    memory_s: float
    over_x_s: float
    over_y_s: float
    mfu: float

    @property
    def step_s(self) -> float:
        return max(self.compute_s, self.memory_s, self.over_x_s) + self.over_y_s

    @property
    def bound_by(self) -> str:
        """What takes longest of the parts that run beside each other."""
        parts = {"compute": self.compute_s, "memory": self.memory_s, "collectives over X": self.over_x_s}
        return max(parts, key=lambda name: parts[name])


def estimate_time(workload: Workload, slice_: Slice, sent: Mapping[Key, Sent]) -> StepTime:
    """The roofline of a step.

    Args:
        workload: what is computed.
        slice_: where.
        sent: collectives of a step, expected or counted.
    """
    w, chip = workload, slice_.chip
    compute_s = w.flops.total / slice_.n_chips / chip.flops_per_s
    memory_s = _memory_traffic(w) / chip.memory_bytes_per_s
    speed = slice_.axis_bytes_per_s(w.mesh.rows, w.mesh.cols)
    over = {"X": 0.0, "Y": 0.0}
    for (_, axes), one in sent.items():
        slowest = min(axes, key=lambda axis: speed[axis])
        over[slowest] += one.wire_bytes / speed[slowest]
    step = max(compute_s, memory_s, over["X"]) + over["Y"]
    mfu = w.flops.useful / (step * slice_.n_chips * chip.flops_per_s)
    return StepTime(compute_s=compute_s, memory_s=memory_s, over_x_s=over["X"], over_y_s=over["Y"], mfu=mfu)


def _memory_traffic(w: Workload) -> float:
    """Bytes that go to or from a chip's memory in a step.

    Gathered weights are read forward and twice backward; state, masters and gradients read and written once; scores
    written and read four times, as attention is written out; other activations written once and read twice.
    """
    c, decoder, cols = w.compute_bytes, w.decoder, w.mesh.cols
    gathered = sum(w.count(t) for t in decoder.tensors()) // cols
    positions = w.positions * w.n_micro_batch
    scores = 0 if w.flash_attention else 4 * positions * (decoder.n_head // cols) * decoder.sequence_len
    stream, hidden = c * positions * decoder.d_model, c * positions * decoder.d_ff // cols
    times = 2 if decoder.remat == "block" else 1
    layers = decoder.n_layer * (8 * scores + (1 + times) * 3 * (6 * stream + 2 * hidden))
    logits = 4 * c * positions * decoder.vocab_size
    return 3 * c * gathered * w.n_micro_batch + 2 * (2 * w.parameter_bytes + w.optimizer_bytes) + layers + logits
