"""The linear kernels of one row against plain operations. They need Triton, which a torch for CPUs
does not bring, and a GPU or Triton's interpreter:
`TRITON_INTERPRET=1 python -m pytest tests/worker/nn/test_decode_linear.py`."""

import importlib.util
import inspect
import os
from unittest.mock import Mock, patch

import pytest
import torch
from torch.nn import functional

from worker.nn import attention, decoder
from worker.nn.decoder import Decoder, DecoderConfig, KvCache, normed, row_linear

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
CAN_RUN = DEVICE == "cuda" or os.environ.get("TRITON_INTERPRET") == "1"
if importlib.util.find_spec("triton") is None or not CAN_RUN:
    pytest.skip("needs Triton and a GPU or its interpreter", allow_module_level=True)

import triton  # noqa: E402
from triton import language as tl  # noqa: E402
from triton.language.extra import cuda as tl_cuda  # noqa: E402

from worker.nn.kernels import decode_attention, decode_linear, parts, prefill_attention  # noqa: E402
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
CONFIGS = [Config(1, 1, 4), Config(4, 1, 2), Config(2, 3, 4)]


@pytest.fixture(autouse=True)
def _in_inference_mode():
    with torch.inference_mode():
        yield


@pytest.fixture(params=CONFIGS, ids=str)
def config(request):
    with patch.object(decode_linear, "config_of", lambda *sizes: request.param):
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


@pytest.mark.parametrize("is_gated", [False, True])
@pytest.mark.parametrize("n_inputs", [64, 768, 1025, 3072, 3073, 4096, 8192, 8193, 12_288])
@pytest.mark.parametrize("n_outputs", [1, 768, 6144, 151_748])
def test_matrix_of_a_program_fits_into_registers(n_outputs, n_inputs, is_gated):
    chosen = config_of(n_outputs, n_inputs, is_gated)

    elements = chosen.n_rows * (2 if is_gated else 1) * (1 << (n_inputs - 1).bit_length())
    held = 2 if chosen.n_groups > 1 else 1
    assert held * elements / 2 / (32 * chosen.warps) <= 128  # two numbers of bf16 in each


def test_no_kernel_has_a_constant_by_default():
    """Compiled regions of torch 2.11 left such a constant out, and the launch had one argument too
    few."""
    kernels = [
        kernel
        for module in (decode_attention, decode_linear, parts, prefill_attention)
        for kernel in vars(module).values()
        if hasattr(kernel, "fn") and hasattr(kernel, "arg_names")
    ]

    assert {kernel.fn.__name__ for kernel in kernels} >= {"_linear", "_decode_part", "merge_parts"}
    for kernel in kernels:
        parameters = inspect.signature(kernel.fn).parameters.values()
        assert all(one.default is inspect.Parameter.empty for one in parameters), kernel


@pytest.mark.parametrize("qk_norm", [True, False])
@pytest.mark.parametrize("dtype", DTYPES if DEVICE == "cuda" else [torch.float32], ids=str)
def test_layers_with_one_row_equal_the_plain_layers(dtype, qk_norm):
    model = small(qk_norm).to(dtype)
    x = draw(1, 1, 40, dtype=dtype)

    fast, plain = (feed(model, x, (0,), (5,), kernels) for kernels in (True, False))

    limit = 1e-4 if dtype == torch.float32 else 0.05
    torch.testing.assert_close(fast, plain, rtol=limit, atol=limit)


def test_one_row_goes_through_the_kernels_and_equals_its_row_of_a_batch():
    """What is compiled for several rows is never compiled for one."""
    model = small(True)
    x = draw(2, 1, 40, dtype=torch.float32)

    with patch.object(decoder, "norm_gate_up", wraps=norm_gate_up) as calls:
        batch = feed(model, x, (0, 1), (5, 9), True)
        assert not calls.called
        model.decode_layers = [Mock(side_effect=AssertionError)] * model.config.n_layers
        alone = [feed(model, x[row : row + 1], (row,), (5 + 4 * row,), True) for row in range(2)]
    assert calls.call_count == 2 * model.config.n_layers

    torch.testing.assert_close(batch, torch.cat(alone), rtol=1e-5, atol=1e-5)


def test_one_row_without_kernels_is_an_ordinary_decode_step():
    model = small(True)
    model.row_layers = [Mock(side_effect=AssertionError)] * model.config.n_layers

    assert feed(model, draw(1, 1, 40, dtype=torch.float32), (0,), (5,), False).isfinite().all()


@pytest.mark.parametrize("n_rows", [1, 2])
@pytest.mark.parametrize("kernels", [True, False])
def test_logits_are_those_of_the_head(n_rows, kernels):
    model, hidden = small(True), draw(n_rows, 40, dtype=torch.float32)

    with (
        patch.object(decoder, "has_kernels", lambda x: kernels),
        patch.object(decoder, "linear", wraps=linear) as calls,
    ):
        made = model.logits(hidden)

    assert calls.called == (kernels and n_rows == 1)
    torch.testing.assert_close(made, model.head(hidden), rtol=1e-5, atol=1e-5)


def small(qk_norm, n_layers=2, width=40, head_dim=16, ffn_size=72):
    config = DecoderConfig(
        vocab_size=31,
        hidden_size=width,
        n_layers=n_layers,
        n_heads=4,
        n_kv_heads=2,
        head_dim=head_dim,
        ffn_size=ffn_size,
        rope_theta=1e6,
        norm_eps=EPS,
        qk_norm=qk_norm,
    )
    made = Decoder(config).requires_grad_(False)
    for index, parameter in enumerate(made.parameters()):
        spread = draw(*parameter.shape, dtype=torch.float32, seed=index) * 0.2 * (40 / width) ** 0.5
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


# ---- overlap, and compiled regions with kernels in them

on_gpu = [
    pytest.mark.gpu,
    pytest.mark.skipif(DEVICE != "cuda", reason="needs a CUDA device"),
]
needs_overlap = [
    *on_gpu,
    pytest.mark.skipif(
        not parts.can_overlap(torch.device(DEVICE)), reason="needs a device of capability 9"
    ),
]
OVERLAPPING = [pytest.param(True, marks=needs_overlap)]
K = 512
N_LATE = 4096


@triton.jit
def _copy_late(source_ptr, target_ptr, SIZE: tl.constexpr, OVERLAPS: tl.constexpr):
    """Lets the next kernel begin, and copies a millisecond or two later."""
    if OVERLAPS:
        tl_cuda.gdc_launch_dependents()
        tl_cuda.gdc_wait()
        for _ in range(2000):
            tl.inline_asm_elementwise(
                "nanosleep.u32 1000; // dummy $0", "=r", [], dtype=tl.int32, is_pure=False, pack=1
            )
    places = tl.arange(0, SIZE)
    tl.store(target_ptr + places, tl.load(source_ptr + places))


def copy_late(source, target):
    _copy_late[(1,)](source, target, SIZE=source.numel(), **parts.overlap(True))


def attend(qkv, overlaps, before=lambda: None):
    """One row of 4 heads over two key heads, at position 5; `before` is launched just before."""
    d = K // 8
    cache = KvCache.allocate(small(False, 1, K, d).config, 1, 20, qkv.dtype, DEVICE)
    cache.keys[0].fill_(0.5)
    at, slot = torch.tensor([5], device=DEVICE), torch.tensor([0], device=DEVICE)
    torch.cuda.synchronize()
    before()
    mixed = decode_attention.decode_attention(
        qkv.view(1, 8, d), None, cache.table, cache.keys[0], cache.values[0], slot, at, overlaps
    )
    return torch.cat((mixed.flatten(), cache.keys[0].flatten(), cache.values[0].flatten()))


READERS = {
    "norm_linear": lambda x, norm, weight, o: norm_linear(x, norm, EPS, weight, o),
    "linear_add": lambda x, norm, weight, o: linear_add(x, weight, x, o),
    "norm_gate_up": lambda x, norm, weight, o: norm_gate_up(x, norm, EPS, weight, o),
}


@pytest.mark.parametrize("overlaps", OVERLAPPING)
@pytest.mark.parametrize("reader", READERS.values(), ids=READERS)
def test_a_kernel_reads_its_row_when_the_one_before_has_written_it(reader, overlaps):
    x = draw(1, K, dtype=torch.bfloat16)
    late = torch.full_like(x, torch.nan)
    norm_weight = 1 + 0.1 * draw(K, dtype=torch.bfloat16, seed=1)
    weight = draw(K, K, dtype=torch.bfloat16, seed=2)
    expected, _ = (reader(x, norm_weight, weight, o) for o in (False, overlaps))  # and compiled
    torch.cuda.synchronize()

    copy_late(x, late)
    made = reader(late, norm_weight, weight, overlaps)

    assert torch.equal(made, expected)


@pytest.mark.parametrize("overlaps", OVERLAPPING)
def test_attention_reads_its_heads_when_the_kernel_before_has_written_them(overlaps):
    x = draw(1, K, dtype=torch.bfloat16)
    late = torch.full_like(x, torch.nan)
    expected, _ = (attend(x, o) for o in (False, overlaps))  # and compiled

    made = attend(late, overlaps, lambda: copy_late(x, late))

    assert torch.equal(made, expected)


@pytest.mark.parametrize("overlaps", OVERLAPPING)
def test_a_kernel_writes_when_the_one_before_has_read(overlaps):
    """The allocator hands out memory whose last reader may still be running."""
    x, weight = draw(1, 24, dtype=torch.bfloat16), draw(N_LATE, 24, dtype=torch.bfloat16)
    linear(x, weight, overlaps)  # compiled now
    old = torch.full((1, N_LATE), 7.0, device=DEVICE, dtype=torch.bfloat16)
    place, kept = old.data_ptr(), torch.zeros_like(old)
    torch.cuda.synchronize()

    copy_late(old, kept)
    del old
    made = linear(x, weight, overlaps)

    assert made.data_ptr() == place
    assert bool((kept == 7.0).all())


def captured_step(model, x, position):
    """Return a graph of a step of one row at a fixed position, its result, and what it reads."""
    cache = KvCache.allocate(model.config, 1, 600, x.dtype, DEVICE)
    for index, tensor in enumerate((*cache.keys, *cache.values)):
        tensor.copy_(draw(*tensor.shape, dtype=torch.float32, seed=index))
    slots, positions = torch.tensor([0], device=DEVICE), torch.tensor([[position]], device=DEVICE)

    def step():
        return model.feed(cache, x + 0, slots, positions, 600)  # an ordinary kernel in front

    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = step()
    return graph, result, (cache, slots, positions)


@pytest.mark.parametrize("sizes", [(4096, 128, 8200), (768, 64, 3072)], ids=str)
@pytest.mark.parametrize("overlaps", OVERLAPPING)
def test_a_captured_step_with_overlap_gives_the_same_bits_a_thousand_times(overlaps, sizes):
    model = small(True, 4, *sizes).to(torch.bfloat16)
    rows = draw(8, 1, sizes[0], dtype=torch.bfloat16)
    x = rows[:1].clone()
    with patch.object(decoder, "can_overlap", lambda device: False):
        graph, result, _read = captured_step(model, x, 500)
    expected = []
    for row in rows:
        x.copy_(row[None])
        graph.replay()
        expected.append(result.clone())

    with patch.object(decoder, "can_overlap", lambda device: overlaps):
        graph, result, _read = captured_step(model, x, 500)
    wrong = torch.zeros((), dtype=torch.int64, device=DEVICE)
    for index in range(1000):  # as many without a wait of the host as a unit's speech takes
        if index % 32 == 0:
            torch.cuda.synchronize()
        x.copy_(rows[index % 8][None])
        result.fill_(torch.nan)
        graph.replay()
        wrong += (result != expected[index % 8]).sum()

    assert not torch.equal(expected[0], expected[1])
    assert wrong.item() == 0


@pytest.mark.parametrize("n_rows", [pytest.param(n, marks=on_gpu) for n in (1, 2)])
@pytest.mark.usefixtures("compiling")
def test_compiled_regions_launch_the_kernels(n_rows):
    """Several rows go through compiled layers with attention in them; the head may be compiled
    for one row as well."""
    model = small(True).to(torch.bfloat16)
    x = draw(n_rows, 1, 40, dtype=torch.bfloat16)
    plain = feed(model, x, range(n_rows), (5, 9)[:n_rows], True)
    logits = row_linear(model.head, plain[:, 0])

    model.decode_layers = [torch.compile(one, fullgraph=True) for one in model.decode_layers]
    compiled = feed(model, x, range(n_rows), (5, 9)[:n_rows], True)
    head = torch.compile(model.logits, fullgraph=True)

    torch.testing.assert_close(compiled, plain, rtol=0.05, atol=0.05)
    torch.testing.assert_close(head(plain[:, 0]), logits, rtol=0.01, atol=0.01)
