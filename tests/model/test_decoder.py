from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from helpers import LENGTH, VOCAB, make_decoder, normal, random_tokens, small

from mutransformer.model.decoder import Decoder
from mutransformer.model.loss import cross_entropy_sum

TOKENS = random_tokens(2)


def close(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Equal to float64's rounding of sums of a hundred products of size 1."""
    return torch.allclose(a, b, rtol=0, atol=1e-12)


def with_weights(decoder: Decoder, **factors: float) -> Decoder:
    """A copy of `decoder` whose named parameters are multiplied."""
    other = copy.deepcopy(decoder)
    with torch.no_grad():
        for name, factor in factors.items():
            getattr(other, name).mul_(factor)
    return other


# Multipliers


def test_input_multiplier_scales_the_embedding():
    scaled = make_decoder(small(), input_multiplier=3.0)
    assert close(scaled(TOKENS), with_weights(make_decoder(small()), embedding=3.0)(TOKENS))
    assert not close(scaled(TOKENS), make_decoder(small())(TOKENS))


@pytest.mark.parametrize("settings", [{"output_multiplier": 3.0}, {"unembedding_form": "B", "d_base": 48}])
def test_logits_are_multiplied_and_their_bias_is_not(settings):
    config = small(projection_biases=True)
    decoder, plain = make_decoder(config, **settings), make_decoder(config)
    bias = normal(VOCAB)
    for each in (decoder, plain):
        each.load_state_dict(plain.state_dict() | {"b_unembedding": bias})
    assert close(decoder(TOKENS) - bias, 3 * (plain(TOKENS) - bias))


def test_residual_multiplier_scales_what_every_block_adds():
    scaled = make_decoder(small(), residual_multiplier=0.3)
    by_hand = with_weights(make_decoder(small()), w_attention_out=0.3, w_ff_out=0.3)
    assert close(scaled(TOKENS), by_hand(TOKENS))
    assert not close(scaled(TOKENS), make_decoder(small())(TOKENS))


def test_without_residual_branches_only_embedding_norm_and_unembedding_remain():
    decoder = make_decoder(small(), residual_init="zero")
    x_BLD = F.rms_norm(F.embedding(TOKENS, decoder.embedding), (16,), None, 1e-5)
    assert close(decoder(TOKENS), x_BLD @ decoder.unembedding.T)


def test_qk_scale_reaches_the_scores():
    scaled = make_decoder(small(), qk_scale=0.5)
    assert close(scaled(TOKENS), with_weights(make_decoder(small()), w_query=0.5 * 8)(TOKENS))


def test_embedding_norm_makes_the_network_blind_to_the_embeddings_size():
    normed, plain = (make_decoder(small(embedding_norm=on, norm_eps=1e-14)) for on in (True, False))
    assert close(normed(TOKENS), with_weights(normed, embedding=5.0)(TOKENS))
    assert not close(plain(TOKENS), with_weights(plain, embedding=5.0)(TOKENS))


@pytest.mark.parametrize("name", ["gain_embedding", "gain_attention", "gain_feedforward", "gain_final"])
@pytest.mark.parametrize("norm_gains", ["scalar", "vector"])
def test_gains_start_without_effect_and_have_one(name, norm_gains):
    config = small(norm_gains=norm_gains, embedding_norm=True)
    decoder = make_decoder(config)
    assert close(decoder(TOKENS), make_decoder(small(embedding_norm=True))(TOKENS))
    assert not close(decoder(TOKENS), with_weights(decoder, **{name: 2.0})(TOKENS))


# Positions


def test_only_distances_of_positions_matter():
    decoder = make_decoder(small())
    at_zero = decoder(TOKENS)
    positions = torch.arange(LENGTH)
    assert close(decoder(TOKENS, positions), at_zero)
    # angles of positions near 1000 lose three of sixteen digits
    assert torch.allclose(decoder(TOKENS, positions + 1000), at_zero, rtol=0, atol=1e-10)
    assert torch.allclose(decoder(TOKENS, torch.stack((positions, positions + 9))), at_zero, rtol=0, atol=1e-10)
    assert not torch.allclose(decoder(TOKENS, 2 * positions), at_zero, rtol=0, atol=1e-4)


@pytest.mark.parametrize("rotary_base, sees_order", [(0.0, False), (100.0, True)])
def test_rotary_base_0_has_no_positions(rotary_base, sees_order):
    decoder = make_decoder(small(n_layer=1, rotary_base=rotary_base))
    shuffled = torch.cat((TOKENS[:, [3, 0, 5, 1, 4, 2, 6]], TOKENS[:, 7:]), dim=1)
    assert not torch.equal(shuffled, TOKENS)
    assert close(decoder(TOKENS)[:, -1], decoder(shuffled)[:, -1]) is not sees_order


# Tied embeddings


def test_tied_embeddings_are_one_parameter_with_both_gradients():
    tied, untied = make_decoder(small(tie_embeddings=True)), make_decoder(small())
    assert set(dict(untied.named_parameters())) - set(dict(tied.named_parameters())) == {"unembedding"}
    untied.load_state_dict(tied.state_dict() | {"unembedding": tied.embedding.detach()})
    for decoder in (tied, untied):
        cross_entropy_sum(decoder(TOKENS), TOKENS).backward()
    assert close(tied.embedding.grad, untied.embedding.grad + untied.unembedding.grad)


@pytest.mark.parametrize(
    "remake",
    [
        lambda d: d.to(torch.float32).to(torch.float64),
        copy.deepcopy,
        lambda d: loaded(make_decoder(d.config, seed=1), d.state_dict()),
    ],
    ids=["to", "deepcopy", "state_dict"],
)
def test_tied_embeddings_stay_tied(remake):
    decoder, tokens = make_decoder(small(tie_embeddings=True)), TOKENS.clamp(min=1)
    before = decoder(tokens)
    other = remake(decoder)
    assert torch.equal(other(tokens), before)
    with torch.no_grad():
        other.embedding[0] += 1  # token 0 is not read: what moves is its logit, by the unembedding
    moved = (other(tokens) - before).abs().amax((0, 1)) > 1e-6
    assert moved.tolist() == [True] + [False] * (VOCAB - 1)
    assert "unembedding" not in other.state_dict()


def loaded(decoder: Decoder, state: dict[str, torch.Tensor]) -> Decoder:
    decoder.load_state_dict(state)
    return decoder


@pytest.mark.parametrize("remat", ["none", "block"])
@pytest.mark.parametrize("compute_dtype", [None, torch.bfloat16])
def test_a_compiled_block_gives_the_same_loss_and_gradients(remat, compute_dtype):
    found = []
    for is_compiled in (False, True):
        decoder = make_decoder(small(remat=remat), dtype=torch.float32)
        decoder.compute_dtype = compute_dtype
        if is_compiled:
            torch._dynamo.reset()
            decoder.compile_block()
        loss = decoder.loss_sum(TOKENS[:, :-1], TOKENS[:, 1:])
        loss.backward()
        found.append([loss.detach(), *(p.grad for p in decoder.parameters())])
    assert not is_compiled or torch._dynamo.utils.counters["stats"]["unique_graphs"] > 0
    error = 1e-5 if compute_dtype is None else 0.02
    for eager, compiled in zip(*found, strict=True):
        assert (eager - compiled).norm() <= error * eager.norm()


# Precision


def test_bfloat16_compute_keeps_masters_and_gradients_in_float32_and_the_loss_close():
    def loss_of(compute_dtype):
        decoder = make_decoder(small(projection_biases=True, norm_gains="vector"), dtype=torch.float32)
        decoder.compute_dtype = compute_dtype
        logits = decoder(TOKENS)
        loss = cross_entropy_sum(logits, TOKENS) / TOKENS.numel()
        loss.backward()
        assert {tensor.dtype for p in decoder.parameters() for tensor in (p, p.grad)} == {torch.float32}
        return loss.item(), logits.dtype

    coarse, fine = loss_of(torch.bfloat16), loss_of(None)
    assert (coarse[1], fine[1]) == (torch.bfloat16, torch.float32)
    # some ten roundings to 8 bits on the way to a logit of size 1/4: at most 10 * 2**-9 / 4
    assert 0 < abs(coarse[0] - fine[0]) < 0.005


# The same logits however it runs


def test_training_and_evaluation_give_the_same_logits():
    decoder = make_decoder(small(), unembedding_form="B", d_base=4)
    assert torch.equal(decoder.train()(TOKENS), decoder.eval()(TOKENS))


def test_length_may_differ_from_the_configs():
    decoder = make_decoder(small(sequence_len=4))
    longer = decoder(TOKENS)
    assert close(decoder(TOKENS[:, :3]), longer[:, :3])


@pytest.mark.parametrize(
    "settings", [{}, {"attention_activation": "elu", "activation": "swiglu", "n_kv_head": 1, "tie_embeddings": True}]
)
def test_compiled_decoder_gives_the_same_logits_and_gradients(settings):
    torch.compiler.reset()

    def run(backend):
        decoder = make_decoder(small(**settings))
        if backend is not None:
            decoder.compile(backend=backend, fullgraph=True)
        logits = decoder(TOKENS)
        logits.square().sum().backward()
        return [logits, *(p.grad for p in decoder.parameters())]

    for plain, compiled in zip(run(None), run("aot_eager"), strict=True):
        assert close(plain, compiled)


# Several documents in a row

DOCUMENT_LENGTHS = (5, 1, 7, 3)
ATTENTIONS = [
    {},
    {"n_kv_head": 1, "qk_norm": True},
    {"rotary_base": 0.0},
    {"attention_activation": "sqrelu", "attention_normalization": "sum"},
    {"attention_activation": "elu", "attention_normalization": "causal_count"},
    {"attention_activation": "elu", "attention_normalization": "length"},
]


def packed(tokens_BL: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(positions_BL, document_BL) of rows of documents of DOCUMENT_LENGTHS."""
    positions_L = torch.cat([torch.arange(length) for length in DOCUMENT_LENGTHS])
    document_L = torch.repeat_interleave(torch.arange(len(DOCUMENT_LENGTHS)), torch.tensor(DOCUMENT_LENGTHS))
    return positions_L.expand(tokens_BL.shape), document_L.expand(tokens_BL.shape)


@pytest.mark.parametrize("shape", ATTENTIONS, ids=str)
def test_packed_documents_give_the_logits_of_each_alone(shape):
    decoder = make_decoder(small(**shape))
    tokens_BL = random_tokens(2, length=sum(DOCUMENT_LENGTHS))
    positions_BL, document_BL = packed(tokens_BL)
    together = decoder(tokens_BL, positions_BL, document_BL)
    alone = torch.cat([decoder(part) for part in tokens_BL.split(DOCUMENT_LENGTHS, dim=1)], dim=1)
    assert close(together, alone)
    first = DOCUMENT_LENGTHS[0]
    across = decoder(tokens_BL)
    assert close(across[:, :first], alone[:, :first])
    assert not close(across[:, first:], alone[:, first:])


def test_gradients_do_not_cross_documents():
    decoder = make_decoder(small())
    tokens_BL = random_tokens(1, length=sum(DOCUMENT_LENGTHS))
    tokens_BL = torch.where(packed(tokens_BL)[1] == 0, 0, tokens_BL.clamp_min(1))  # token 0 in the first document alone
    logits = decoder(tokens_BL, *packed(tokens_BL))[:, DOCUMENT_LENGTHS[0] :]
    logits.square().sum().backward()
    assert decoder.embedding.grad[0].abs().max() == 0
    assert decoder.embedding.grad.abs().max() > 0
