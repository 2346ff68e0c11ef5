"""From logical axes to mesh axes, in one table. Arithmetic alone: a layout can be looked at without torch_xla.

The layout is "2D finalized" of GSPMD (arXiv 2105.04663, Table 1): weights are cut over both mesh axes, X by their
model dimension and Y by heads or features; activations over X by batch and Y by features.
"""

from __future__ import annotations

from collections.abc import Iterable

from mutransformer.model.axes import Axes
from mutransformer.xla.mesh import MeshShape

Spec = tuple[str | None, ...]

# In order of precedence: a logical axis takes the first of its mesh axes that no other dimension of the tensor has.
# So `embed` is cut over Y, and over X where heads or features have Y, as in every matrix of a block.
RULES: tuple[tuple[str, str], ...] = (
    ("batch", "X"),
    ("heads", "Y"),
    ("kv_heads", "Y"),
    ("mlp", "Y"),
    ("embed", "Y"),
    ("embed", "X"),
)
VOCAB_RULE = ("vocab", "X")

# the precedence among dimensions of one tensor
_ORDER = {axis: i for i, axis in enumerate(dict.fromkeys(axis for axis, _ in (*RULES, VOCAB_RULE)))}


def spec_of(axes: Axes, sizes: Iterable[int], mesh: MeshShape, shard_vocab: bool = False) -> Spec:
    """The mesh axis of each dimension, None where it is whole.

    Args:
        axes: logical axis of each dimension.
        sizes: size of each dimension. One that its mesh axis does not divide stays whole (key/value heads that are
            fewer than the columns) and keeps others off that axis.
        mesh: rows X, columns Y.
        shard_vocab: also cut the vocabulary of embedding and unembedding over X.
    """
    rules = (*RULES, VOCAB_RULE) if shard_vocab else RULES
    sizes = tuple(sizes)
    parts = {"X": mesh.rows, "Y": mesh.cols}
    taken: set[str] = set()
    spec: list[str | None] = [None] * len(axes)
    for i in sorted(range(len(axes)), key=lambda i: _ORDER.get(axes[i], len(_ORDER))):
        choice = next((to for axis, to in rules if axis == axes[i] and to not in taken), None)
        if choice is not None:
            taken.add(choice)
            if sizes[i] % parts[choice] == 0:
                spec[i] = choice
    return tuple(spec)
