from __future__ import annotations

import torch
from helpers import normal
from hypothesis import given
from hypothesis import strategies as st

from mutransformer.model.rotary import rotary_table, rotate

K = 8


def test_rotation_is_a_complex_product_of_the_two_halves():
    x_BHLK = normal(2, 3, 5, K)
    angles = torch.tensor([[p * 100.0 ** (-i / 4) for i in range(4)] for p in range(5)], dtype=torch.float64)
    turned = torch.complex(x_BHLK[..., :4], x_BHLK[..., 4:]) * torch.exp(1j * angles)
    out = rotate(x_BHLK, rotary_table(torch.arange(5), K, 100.0, torch.float64))
    assert torch.allclose(out, torch.cat((turned.real, turned.imag), dim=-1), rtol=0, atol=1e-14)


@given(st.integers(0, 500), st.integers(0, 500), st.integers(0, 10_000))
def test_a_score_depends_on_the_distance_of_the_positions_alone(i, j, shift):
    q, k = normal(1, 1, 1, K), normal(1, 1, 1, K, seed=1)

    def score(position_q, position_k):
        tables = [rotary_table(torch.tensor([p]), K, 10_000.0, torch.float64) for p in (position_q, position_k)]
        return (rotate(q, tables[0]) * rotate(k, tables[1])).sum()

    # positions up to 1e4 lose 4 of float64's 16 digits in the angle
    assert torch.allclose(score(i, j), score(i + shift, j + shift), rtol=0, atol=1e-11)


def test_a_score_does_depend_on_the_distance():
    table = rotary_table(torch.arange(3), K, 10_000.0, torch.float64)
    q, k = rotate(normal(1, 1, 1, K), table[:, :1]), normal(1, 1, 1, K, seed=1).expand(1, 1, 3, K)
    scores = (q * rotate(k, table)).sum(-1).flatten()
    assert len(set(scores.tolist())) == 3


def test_positions_of_their_own_for_each_sequence():
    x_BHLK = normal(2, 3, 4, K)
    positions_BL = torch.tensor([[0, 1, 2, 3], [7, 8, 9, 0]])
    together = rotate(x_BHLK, rotary_table(positions_BL, K, 50.0, torch.float64))
    for b in range(2):
        alone = rotate(x_BHLK[b : b + 1], rotary_table(positions_BL[b], K, 50.0, torch.float64))
        assert torch.equal(together[b], alone[0])


def test_bfloat16_table_is_the_float32_one_rounded():
    positions = torch.arange(300)
    table = rotary_table(positions, K, 10_000.0, torch.bfloat16)
    assert torch.equal(table, rotary_table(positions, K, 10_000.0, torch.float32).bfloat16())
