"""The formula against torch's own counter on the real step, and the tables of peaks."""

from __future__ import annotations

import pytest
import torch
from helpers import make_decoder, mup, plan_of, random_tokens, small
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from mutransformer.model.loss import cross_entropy_sum
from mutransformer.mup.config import OptimizerConfig
from mutransformer.training.throughput import bytes_held, flops_per_token, gpu_peak, peak_flops_per_s, utilization
from mutransformer.xla.slices import device_peak

LENGTH, N_ROWS = 12, 3
SHAPES = {
    "relu": {},
    "swiglu": {"activation": "swiglu"},
    "key/value heads": {"d_model": 32, "n_kv_head": 2},
    "deeper and wider": {"d_model": 48, "n_layer": 3, "d_head": 16},
    "biases, gains and norms": {
        "projection_biases": True,
        "norm_gains": "vector",
        "embedding_norm": True,
        "qk_norm": True,
    },
    "tied": {"tie_embeddings": True},
    "another attention": {"attention_activation": "sqrelu"},
}


def counted(config) -> int:
    """Operations of a forward and a backward pass, with scores written out: all keys count, masked or not."""
    decoder = make_decoder(config, dtype=torch.float64)  # in float32 products are oneDNN's, which torch does not count
    tokens = random_tokens(N_ROWS, LENGTH + 1)
    with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH):
        cross_entropy_sum(decoder(tokens[:, :-1]), tokens[:, 1:]).backward()
    return counter.get_total_flops()


@pytest.mark.parametrize("shape", SHAPES)
def test_the_formula_counts_every_product_that_torch_counts(shape):
    config = small(**{"sequence_len": LENGTH, **SHAPES[shape]})
    assert flops_per_token(config, plan_of(config), "palm") * N_ROWS * LENGTH == counted(config)


def test_the_causal_convention_counts_the_keys_that_a_query_sees():
    config = small(sequence_len=LENGTH)
    plan = config.plan(mup(), OptimizerConfig())
    palm, causal = (flops_per_token(config, plan, convention) for convention in ("palm", "causal"))
    n_visible = sum(query + 1 for query in range(LENGTH)) / LENGTH
    a_key = 3 * 2 * 2 * config.n_layer * config.n_head * config.d_head  # a multiply and an add, twice, thrice
    assert palm - causal == pytest.approx(a_key * (LENGTH - n_visible))


# as drivers name them -> dense bfloat16, float32 without tensor cores; from data sheets
GPUS = {
    "NVIDIA H100 80GB HBM3": (989.5e12, 67e12),
    "NVIDIA H100 PCIe": (756e12, 51e12),
    "NVIDIA H200": (989.5e12, 67e12),
    "NVIDIA A100-SXM4-80GB": (312e12, 19.5e12),
    "NVIDIA L40S": (362e12, 91.6e12),
    "NVIDIA L4": (121e12, 30.3e12),
    "NVIDIA GeForce RTX 4090": (165.2e12, 82.6e12),
    "Tesla V100-SXM2-16GB": (None, 15.7e12),
    "Tesla T4": (None, 8.1e12),
}


@pytest.mark.parametrize("name", GPUS)
def test_a_gpu_is_known_by_its_name(name):
    assert tuple(gpu_peak(name, dtype) for dtype in (torch.bfloat16, torch.float32)) == GPUS[name]


def test_tensor_cores_for_float32_are_another_peak():
    assert gpu_peak("NVIDIA A100-SXM4-80GB", torch.float32, tf32=True) == 156e12


@pytest.mark.parametrize("name", ["NVIDIA RTX A4000", "NVIDIA RTX A1000", "NVIDIA T400", "AMD Instinct MI300X", ""])
def test_a_name_that_only_resembles_a_known_one_is_not_known(name):
    assert gpu_peak(name, torch.float32) is None


def test_a_tpu_is_known_by_its_accelerator_type_and_a_device_may_be_half_a_chip():
    types = ["v2-8", "v3-32", "v4-8", "v5p-128", "v5litepod-16", "v6e-8", "TPU v4"]
    assert [device_peak(kind) for kind in types] == [22.5e12, 61.5e12, 275e12, 459e12, 197e12, 918e12, 275e12]
    assert device_peak("v99-8") is None


def test_utilization_has_no_percentage_where_the_peak_is_not_known():
    assert peak_flops_per_s(torch.device("cpu"), torch.float32) is None
    assert utilization(1000, 2e9, None) == {"tflops_per_s": 2.0}
    assert utilization(1000, 2e9, 4e12, n_devices=2) == {"tflops_per_s": 2.0, "mfu": 0.25}


@pytest.mark.parametrize("activation", ["relu", "swiglu"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_bytes_held_are_those_that_the_backward_pass_waits_for(activation, dtype):
    config = small(d_model=64, d_head=16, n_layer=3, sequence_len=64, activation=activation)
    decoder = make_decoder(config, dtype=torch.float32)
    decoder.compute_dtype = dtype
    tokens = random_tokens(4, 65)
    weights = {p.untyped_storage().data_ptr() for p in decoder.parameters()}
    kept: dict[int, torch.UntypedStorage] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            kept[storage.data_ptr()] = storage
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        decoder.loss_sum(tokens[:, :-1], tokens[:, 1:])
    n_parameters = plan_of(config).count
    masters_gradients_and_moments = 16 * n_parameters
    formula = bytes_held(config, plan_of(config), 4 * 64, dtype) - masters_gradients_and_moments
    assert sum(storage.nbytes() for storage in kept.values()) == pytest.approx(formula, rel=0.07)
