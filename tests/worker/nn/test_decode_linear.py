"""The linear kernels of one row against plain operations. They need Triton, which a torch for CPUs
does not bring, and a GPU or Triton's interpreter:
`TRITON_INTERPRET=1 python -m pytest tests/worker/nn/test_decode_linear.py`."""

import importlib.util
import os
from unittest.mock import patch

import pytest
import torch
from torch.nn import functional

from worker.nn import attention, decoder
from worker.nn.decoder import Decoder, DecoderConfig, KvCache, normed

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
CAN_RUN = DEVICE == "cuda" or os.environ.get("TRITON_INTERPRET") == "1"
if importlib.util.find_spec("triton") is None or not CAN_RUN:
    pytest.skip("needs Triton and a GPU or its interpreter", allow_module_level=True)

from worker.nn.kernels import decode_linear  # noqa: E402
from worker.nn.kernels.decode_linear import (  # noqa: E402
    Config,
    config_of,
    linear,
    linear_add,
    norm_gate_up,
    norm_linear,
)

EPS = 1e-6
# The interpreter cuts digits off where a GPU rounds to bf16, but it rounds to fp16.
DTYPES = [torch.float32, torch.float16, *([torch.bfloat16] if DEVICE == "cuda" else [])]
LIMITS = {torch.float32: 2e-5, torch.float16: 2**-8, torch.bfloat16: 2**-5}
SIZES = {"even": (64, 128), "odd": (37, 100), "one output": (1, 24)}
CONFIGS = [Config(1, 1, 4), Config(4, 1, 2), Config(2, 3, 4), Config(2, 3, 4, stages=3)]


@pytest.fixture(autouse=True)
def _in_inference_mode():
    with torch.inference_mode():
        yield


@pytest.fixture(params=CONFIGS, ids=str)
def config(request):
    with patch.object(decode_linear, "config_of", lambda n_outputs, n_inputs: request.param):
        yield request.param


@pytest.fixture(params=SIZES.values(), ids=SIZES)
def sizes(request):
    return request.param


def draw(*shape, dtype, seed=0):
    made = torch.randn(shape, generator=torch.Generator().manual_seed(seed))
    return made.to(DEVICE, dtype)


def norm(x, weight):
    """As `RmsNorm` does it."""
    return weight * normed(x, EPS)


def assert_close(fast, plain, exact):
    """Errors no larger than those of plain operations in this dtype, and none of NaN."""
    assert fast.shape == plain.shape
    assert fast.dtype == plain.dtype
    limit = LIMITS[fast.dtype]
    torch.testing.assert_close(fast.double(), exact, rtol=limit, atol=limit)
    torch.testing.assert_close(fast, plain, rtol=limit, atol=limit)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_normed_row_times_a_matrix(config, sizes, dtype):
    n, k = sizes
    x, weight = draw(1, k, dtype=dtype), draw(n, k, dtype=dtype, seed=1) / k**0.5
    norm_weight = 1 + 0.1 * draw(k, dtype=dtype, seed=2)

    made = norm_linear(x, norm_weight, EPS, weight)

    plain = functional.linear(norm(x, norm_weight), weight)
    exact = functional.linear(norm(x, norm_weight).double(), weight.double())
    assert_close(made, plain, exact)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_row_times_a_matrix(config, sizes, dtype):
    n, k = sizes
    x, weight = draw(1, k, dtype=dtype), draw(n, k, dtype=dtype, seed=1) / k**0.5

    made = linear(x, weight)

    exact = functional.linear(x.double(), weight.double())
    assert_close(made, functional.linear(x, weight), exact)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_sum_of_a_residual_and_a_row_times_a_matrix(config, sizes, dtype):
    n, k = sizes
    x, weight = draw(1, k, dtype=dtype), draw(n, k, dtype=dtype, seed=1) / k**0.5
    residual = draw(1, n, dtype=dtype, seed=2)

    made = linear_add(x, weight, residual)

    plain = residual + functional.linear(x, weight)
    assert_close(made, plain, residual + functional.linear(x.double(), weight.double()))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_gated_product_of_two_halves_of_a_matrix(config, sizes, dtype):
    n, k = sizes
    x, weight = draw(1, k, dtype=dtype), draw(2 * n, k, dtype=dtype, seed=1) / k**0.5
    norm_weight = 1 + 0.1 * draw(k, dtype=dtype, seed=2)

    made = norm_gate_up(x, norm_weight, EPS, weight)

    gate, up = functional.linear(norm(x, norm_weight), weight).chunk(2, dim=-1)
    wide = functional.linear(norm(x, norm_weight).double(), weight.double()).chunk(2, dim=-1)
    assert_close(made, functional.silu(gate) * up, functional.silu(wide[0]) * wide[1])


@pytest.mark.parametrize("dtype", DTYPES[1:], ids=str)
def test_norm_is_rounded_where_plain_operations_round(config, dtype):
    """With a matrix of unit rows, the output is the rounded norm itself."""
    x, norm_weight = draw(1, 24, dtype=dtype), draw(24, dtype=dtype, seed=1)
    unit = torch.eye(24, dtype=dtype, device=DEVICE)

    made = norm_linear(x, norm_weight, EPS, unit)

    assert torch.equal(made, norm(x, norm_weight))


def test_nothing_behind_a_matrix_is_touched(config):
    """The matrix lies in a larger tensor of NaN, as do its outputs' neighbours."""
    around = torch.full((40, 24), torch.nan, device=DEVICE)
    around[:37] = draw(37, 24, dtype=torch.float32)

    made = linear(torch.ones(1, 24, device=DEVICE), around[:37])

    assert made.isfinite().all()


@pytest.mark.parametrize(
    ("n_outputs", "n_inputs"),
    [(6144, 4096), (4096, 4096), (24_576, 4096), (4096, 12_288), (151_748, 4096), (2304, 768),
     (768, 768), (6144, 768), (768, 3072), (6562, 768)],
)  # fmt: skip
def test_matrix_of_a_program_fits_into_registers(n_outputs, n_inputs):
    chosen = config_of(n_outputs, n_inputs)

    is_gated = n_outputs in (24_576, 6144) and n_inputs in (4096, 768)
    elements = chosen.n_rows * (2 if is_gated else 1) * (1 << (n_inputs - 1).bit_length())
    held = 2 if chosen.stages == 1 and chosen.n_groups > 1 else 1
    assert held * elements / 2 / (32 * chosen.warps) <= 128


@pytest.mark.parametrize("qk_norm", [True, False])
@pytest.mark.parametrize("dtype", DTYPES if DEVICE == "cuda" else [torch.float32], ids=str)
def test_layers_with_one_row_equal_the_plain_layers(dtype, qk_norm):
    model = small(qk_norm).to(dtype)
    x = draw(1, 1, 40, dtype=dtype)

    fast, plain = (feed(model, x, (0,), (5,), kernels) for kernels in (True, False))

    limit = 1e-4 if dtype == torch.float32 else 0.05
    torch.testing.assert_close(fast, plain, rtol=limit, atol=limit)


def test_one_row_goes_through_the_kernels_and_equals_its_row_of_a_batch():
    model = small(True)
    x = draw(2, 1, 40, dtype=torch.float32)

    with patch.object(decoder, "norm_gate_up", wraps=norm_gate_up) as calls:
        batch = feed(model, x, (0, 1), (5, 9), True)
        assert not calls.called
        alone = [feed(model, x[row : row + 1], (row,), (5 + 4 * row,), True) for row in range(2)]
    assert calls.call_count == 2 * model.config.n_layers

    torch.testing.assert_close(batch, torch.cat(alone), rtol=1e-5, atol=1e-5)


def small(qk_norm):
    config = DecoderConfig(
        vocab_size=31,
        hidden_size=40,
        n_layers=2,
        n_heads=4,
        n_kv_heads=2,
        head_dim=16,
        ffn_size=72,
        rope_theta=1e6,
        norm_eps=EPS,
        qk_norm=qk_norm,
    )
    made = Decoder(config).requires_grad_(False)
    for index, parameter in enumerate(made.parameters()):
        spread = draw(*parameter.shape, dtype=torch.float32, seed=index) * 0.2
        parameter.copy_(spread if parameter.dim() > 1 else 1 + spread)
    return made.to(DEVICE)


def feed(model, x, slots, lengths, kernels):
    """Feed one token of each row behind random content; return the hidden states."""

    def chosen(tensor):
        return kernels

    cache = KvCache.allocate(model.config, 2, 20, x.dtype, DEVICE)
    for index, tensor in enumerate((*cache.keys, *cache.values)):
        tensor.copy_(draw(*tensor.shape, dtype=torch.float32, seed=index))
    positions = torch.tensor(lengths, device=DEVICE)[:, None]
    with (
        patch.object(attention, "has_kernels", chosen),
        patch.object(decoder, "has_kernels", chosen),
    ):
        return model.feed(cache, x, torch.tensor(slots, device=DEVICE), positions, 20)
