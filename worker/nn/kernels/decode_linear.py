"""One row times a matrix: the linear layers of a decode step for one session.

With one row every linear layer reads its matrix once and computes almost nothing, so time is
bytes over bandwidth plus the start of each kernel. Here the norm before a matrix and the sum or
the gate behind it are part of its kernel: a decoder layer is four of these and its attention.
Every program sums its own outputs in a fixed order, so results repeat bit for bit, with overlap
(`parts`) and without. The eager twin is the plain way through `worker.nn.decoder.DecoderLayer`.
Needs Triton.
"""

from dataclasses import dataclass

import torch
import triton
from torch import Tensor
from triton import language as tl
from triton.language.extra import cuda as tl_cuda

from worker.nn.kernels.parts import overlap, padded


@dataclass(frozen=True, slots=True)
class Config:
    """How a matrix is shared among programs."""

    n_rows: int
    """Outputs that a program computes at a time; a power of two."""
    n_groups: int
    """How many times; the next group is loaded while one is summed."""
    warps: int


def config_of(n_outputs: int, n_inputs: int, is_gated: bool) -> Config:
    """Return the configuration for `n_outputs` sums (or gated pairs of them) of `n_inputs`.

    Constants, since a search at the start finds another one each time. The best of 23 to 67 on an
    H200 (2026-11; bf16, matrices not cached, with overlap; `tests/bench/bench_linear.py`):

        matrix                  us   TB/s    cuBLAS alone, us
        qkv    6144 x 4096     12.4   4.06    15.4
        out    4096 x 4096      8.5   3.93    12.7
        gated 24576 x 4096     45.5   4.43    49.2
        head 151748 x 4096    270.8   4.59   386.2
        down   4096 x 12288    23.9   4.22    28.9
        qkv    2304 x 768       2.2   1.64     4.4
        out     768 x 768       1.1   1.05     4.2
        gated  6144 x 768       3.5   2.72     5.2
        head   6562 x 768       3.2   3.14     6.7
        down    768 x 3072      2.3   2.09     6.5
    """
    if n_inputs <= 1024:
        return Config(2, 1, 1) if is_gated or n_outputs <= 1024 else Config(4, 1, 1)
    if n_inputs <= 3072:
        return Config(2, 1, 8)
    if n_inputs <= 8192:
        if is_gated:
            return Config(2, 2, 8)
        return Config(4, 2, 8) if n_outputs <= 32_768 else Config(2, 2, 16)
    return Config(1, 2, 8)


@triton.jit
def _normed(x, weight, dtype: tl.constexpr, K: tl.constexpr, EPS: tl.constexpr):
    """The row `[K_PAD]` normed, in fp32, rounded where plain operations round."""
    scale = tl.rsqrt(tl.sum(x * x, 0) / K + EPS)
    return ((x * scale).to(dtype).to(tl.float32) * weight.to(tl.float32)).to(dtype).to(tl.float32)


@triton.jit
def _matrix(weight_ptr, rows, ks, mask, K: tl.constexpr):
    """Rows of the matrix, `[R, K_PAD]`, read once and so not kept in the first cache."""
    place = rows.to(tl.int64)[:, None] * K + ks[None, :]
    return tl.load(weight_ptr + place, mask & (ks < K)[None, :], 0.0, eviction_policy="evict_first")


@triton.jit
def _finish(
    x,
    gate,
    up,
    residual_ptr,
    out_ptr,
    rows,
    n_outputs,
    IS_GATED: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
):
    """Sum products `[R, K_PAD]`, gate or add, and store, rounded where plain operations round."""
    dtype = out_ptr.dtype.element_ty
    if HAS_RESIDUAL:  # before the sum, so that nothing waits for it
        residual = tl.load(residual_ptr + rows, rows < n_outputs, 0.0).to(tl.float32)
    y = tl.sum(gate.to(tl.float32) * x[None, :], 1).to(dtype)
    if IS_GATED:
        wide = y.to(tl.float32)
        gated = (wide / (1.0 + tl.exp(-wide))).to(dtype).to(tl.float32)
        other = tl.sum(up.to(tl.float32) * x[None, :], 1).to(dtype)
        y = (gated * other.to(tl.float32)).to(dtype)
    if HAS_RESIDUAL:
        y = (residual + y.to(tl.float32)).to(dtype)
    tl.store(out_ptr + rows, y, rows < n_outputs)


@triton.jit
def _linear(
    x_ptr,
    norm_ptr,
    weight_ptr,
    residual_ptr,
    out_ptr,
    n_outputs,
    K: tl.constexpr,
    K_PAD: tl.constexpr,
    EPS: tl.constexpr,
    HAS_NORM: tl.constexpr,
    IS_GATED: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
    R: tl.constexpr,
    GROUPS: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    """Groups of R outputs; with gates, output i comes of the rows i and n_outputs + i."""
    ks = tl.arange(0, K_PAD)
    rows = tl.program_id(0) * (R * GROUPS) + tl.arange(0, R)
    if OVERLAPS:
        tl_cuda.gdc_launch_dependents()
    # Weights first: the longest way, and they do not depend on the row.
    gate = _matrix(weight_ptr, rows, ks, (rows < n_outputs)[:, None], K)
    up = gate
    if IS_GATED:
        up = _matrix(weight_ptr, n_outputs + rows, ks, (rows < n_outputs)[:, None], K)
    if HAS_NORM:
        norm = tl.load(norm_ptr + ks, ks < K, 0.0)
    if OVERLAPS:
        tl_cuda.gdc_wait()
    x = tl.load(x_ptr + ks, ks < K, 0.0).to(tl.float32)
    if HAS_NORM:
        x = _normed(x, norm, x_ptr.dtype.element_ty, K, EPS)
    for _ in range(1, GROUPS):
        ahead = rows + R
        mask = (ahead < n_outputs)[:, None]
        next_gate = _matrix(weight_ptr, ahead, ks, mask, K)
        next_up = next_gate
        if IS_GATED:
            next_up = _matrix(weight_ptr, n_outputs + ahead, ks, mask, K)
        _finish(x, gate, up, residual_ptr, out_ptr, rows, n_outputs, IS_GATED, HAS_RESIDUAL)
        gate, up, rows = next_gate, next_up, ahead
    _finish(x, gate, up, residual_ptr, out_ptr, rows, n_outputs, IS_GATED, HAS_RESIDUAL)


def norm_linear(
    x: Tensor, norm_weight: Tensor, eps: float, weight: Tensor, overlaps: bool = False
) -> Tensor:
    """Return `weight @ (norm_weight * x / rms(x))`, `[1, N]`.

    Args:
        x: `[1, K]`, contiguous; fp32, bf16 or fp16, as everything else.
        norm_weight: `[K]`.
        weight: `[N, K]`, contiguous.
        overlaps: whether the kernel begins before the one in front of it has ended (`parts`); not
            within compiled regions.
    """
    return launch(x, weight, norm_weight, eps, overlaps=overlaps)


def linear(x: Tensor, weight: Tensor, overlaps: bool = False) -> Tensor:
    """Return `weight @ x`, `[1, N]`, of `[1, K]` and `[N, K]`; see `norm_linear`."""
    return launch(x, weight, overlaps=overlaps)


def linear_add(x: Tensor, weight: Tensor, residual: Tensor, overlaps: bool = False) -> Tensor:
    """Return `residual + weight @ x`, `[1, N]`, of `[1, K]`, `[N, K]` and `[1, N]`; see
    `norm_linear`."""
    return launch(x, weight, residual=residual, overlaps=overlaps)


def norm_gate_up(
    x: Tensor, norm_weight: Tensor, eps: float, weight: Tensor, overlaps: bool = False
) -> Tensor:
    """Return `silu(gate) * up` of the normed row, `[1, F]`; see `norm_linear`.

    Args:
        weight: the rows of gate, then those of up, `[2 F, K]`, contiguous.
    """
    return launch(x, weight, norm_weight, eps, is_gated=True, overlaps=overlaps)


def launch(
    x: Tensor,
    weight: Tensor,
    norm_weight: Tensor | None = None,
    eps: float = 0.0,
    residual: Tensor | None = None,
    *,
    is_gated: bool = False,
    overlaps: bool = False,
    config: Config | None = None,
) -> Tensor:
    """Launch the kernel that all of these are; arguments as above.

    Args:
        config: another one than `config_of` says, for measurements.
    """
    n_all, k = weight.shape
    n_outputs = n_all // 2 if is_gated else n_all
    if config is None:
        config = config_of(n_outputs, k, is_gated)
    out = torch.empty((1, n_outputs), dtype=x.dtype, device=x.device)
    outputs_each = config.n_rows * config.n_groups
    _linear[((n_outputs + outputs_each - 1) // outputs_each,)](
        x,
        x if norm_weight is None else norm_weight,
        weight,
        x if residual is None else residual,
        out,
        n_outputs,
        K=k,
        K_PAD=padded(k),
        EPS=eps,
        HAS_NORM=norm_weight is not None,
        IS_GATED=is_gated,
        HAS_RESIDUAL=residual is not None,
        R=config.n_rows,
        GROUPS=config.n_groups,
        num_warps=config.warps,
        **overlap(overlaps),
    )
    return out
