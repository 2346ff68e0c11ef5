from __future__ import annotations

import torch
from helpers import normal

from mutransformer.model.activations import swiglu


def test_swiglu_and_its_gradients():
    gate, hidden = 3 * normal(4, 5).requires_grad_(), normal(4, 5, seed=1).requires_grad_()
    assert torch.allclose(swiglu(gate, hidden), torch.nn.functional.silu(gate) * hidden, rtol=0, atol=1e-15)
    assert torch.autograd.gradcheck(swiglu, (gate, hidden))
