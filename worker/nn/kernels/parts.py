"""What the kernels share: the walk over cached positions in parts, the merge, and overlap.

Flash decoding (Dao et al., "Flash-Decoding for long-context inference", 2023): the positions that
a query sees are shared among several programs, each with its own running softmax, and a second
kernel merges their parts. A position behind a row's live length is never loaded, NaN or not.

Overlap ("programmatic dependent launch", from Hopper on): a kernel begins while the one before it
still runs, so its start costs nothing and its weights are on their way. A row of such kernels
keeps the order of its stream by three rules:

* Every program says `gdc_wait`, which returns when the kernel before has ended and all it wrote can
  be seen. That one has waited as well before it ended, and so on: behind its wait a kernel finds
  everything done that was launched before it. So does an ordinary kernel behind the row.
* Before its wait a kernel reads weights and nothing else. The first of a row begins when the
  ordinary kernel before it is through, and that one began when everything before it had ended, the
  loading of the weights included.
* Everything else, all writes above all, comes behind the wait. So memory that the allocator hands
  out again has no reader left when it is written, as without overlap.

A captured graph of such kernels that was replayed some hundred times without any wait of the host
crashed the driver (580.159, CUDA 13.0, torch 2.11); a unit waits after 30 replays at most.
"""

import functools

import torch
import triton
from torch import Tensor
from triton import language as tl
from triton.language.extra import cuda as tl_cuda

LOG2_E = 1.4426950408889634
"""Kernels compute powers of two; scores are scaled by this on top of `d ** -0.5`."""
TARGET_PROGRAMS = 512
"""About two waves of programs on 132 multiprocessors with two programs each."""


@functools.cache
def can_overlap(device: torch.device) -> bool:
    """Whether kernels on this device can begin before the one in front of them has ended."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (9, 0)


def overlap(is_on: bool) -> dict[str, bool]:
    """Return what a kernel takes at its launch for that.

    OVERLAPS is always among it, since compiled regions of torch 2.11 fail at a constant left to its
    default; `launch_pdl` is not, since no compiled region knows it.
    """
    return {"OVERLAPS": True, "launch_pdl": True} if is_on else {"OVERLAPS": False}


@triton.jit
def walk(
    q,
    limits,
    highest,
    total,
    mixed,
    keys_ptr,
    values_ptr,
    start,
    end,
    SCALE: tl.constexpr,
    D: tl.constexpr,
    D_PAD: tl.constexpr,
    BLOCK: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Go on with the running softmax of queries `[R, d]` over positions `start .. end - 1`.

    A query sees positions below its limit `[R]`. The pointers are those of one slot and key head.
    """
    dims = tl.arange(0, D_PAD)
    for block in range(start, end, BLOCK):
        index = block + tl.arange(0, BLOCK)
        place = index[:, None] * D + dims[None, :]
        mask = (index < end)[:, None] & (dims < D)[None, :]
        k = tl.load(keys_ptr + place, mask, 0.0)  # [BLOCK, d]
        scores = tl.dot(q, tl.trans(k), input_precision=PRECISION) * SCALE
        is_seen = (index[None, :] < limits[:, None]) & (index < end)[None, :]
        scores = tl.where(is_seen, scores, float("-inf"))
        new_highest = tl.maximum(highest, tl.max(scores, 1))
        # A query that has seen nothing yet must not subtract infinity from infinity.
        base = tl.where(new_highest == float("-inf"), 0.0, new_highest)
        weights = tl.exp2(scores - base[:, None])
        shrink = tl.exp2(highest - base)
        v = tl.load(values_ptr + place, mask, 0.0)
        mixed = mixed * shrink[:, None]
        mixed += tl.dot(weights.to(v.dtype), v, input_precision=PRECISION)
        total = total * shrink + tl.sum(weights, 1)
        highest = new_highest
    return highest, total, mixed


@triton.jit
def merge_parts(
    mixed_ptr,
    highest_ptr,
    total_ptr,
    out_ptr,
    D: tl.constexpr,
    D_PAD: tl.constexpr,
    SPLITS: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    """One query: the weighted mean of its parts; zeros for a query that saw nothing."""
    if OVERLAPS:
        tl_cuda.gdc_launch_dependents()
        tl_cuda.gdc_wait()
    query = tl.program_id(0).to(tl.int64)
    parts, dims = query * SPLITS + tl.arange(0, SPLITS), tl.arange(0, D_PAD)
    highest, total = tl.load(highest_ptr + parts), tl.load(total_ptr + parts)
    has_any = total > 0.0
    weights = tl.where(has_any, tl.exp2(highest - tl.max(highest, 0)), 0.0)
    mask = has_any[:, None] & (dims < D)[None, :]  # an empty part was never written
    mixed = tl.load(mixed_ptr + parts[:, None] * D + dims[None, :], mask, 0.0)
    whole = tl.sum(total * weights, 0)
    out = tl.sum(mixed * weights[:, None], 0) / tl.where(whole > 0.0, whole, 1.0)
    tl.store(out_ptr + query * D + dims, out.to(out_ptr.dtype.element_ty), dims < D)


def padded(size: int) -> int:
    """Return the power of two that holds `size`; a matrix unit takes 16 at least."""
    return max(16, 1 << (size - 1).bit_length())


def n_splits(n_groups: int, least: int, most: int) -> int:
    """Return among how many programs the positions of one group of queries are shared.

    Args:
        n_groups: groups of queries, each of one row and key head.
        least, most: bounds, powers of two.
    """
    splits = least
    while splits < most and splits * n_groups < TARGET_PROGRAMS:
        splits *= 2
    return splits


def part_buffers(q: Tensor, splits: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return room for the parts of queries `[..., d]`: mixed values, highest scores, sums."""
    *queries, d = q.shape
    mixed = torch.empty((*queries, splits, d), dtype=torch.float32, device=q.device)
    highest = torch.empty((*queries, splits), dtype=torch.float32, device=q.device)
    return mixed, highest, torch.empty_like(highest)
