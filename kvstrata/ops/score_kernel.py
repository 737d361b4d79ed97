"""Column sums of softmax probabilities in Triton: one pass for what each row's logits sum to, one for what each key gets of it.

Logits are made twice and never stored. Knows nothing of pages or policies.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from kvstrata.ops import backend

KEYS, ROWS, SUMS = 128, 64, 128
"""Keys of a program, rows (a query and a head of the group) that it takes at a time, sums of a row that are joined at a time. Nothing is
compiled anew as a context grows."""


@triton.jit
def logits(q_ptr, k, row, keys, there, rows, tokens, group, n, factor, stride_qt, stride_qh, offs_d, D: tl.constexpr):
    """float32 [ROWS, KEYS], base 2, -inf where a row does not see a key: row = query * group + head of the group; k [PADDED, KEYS]."""
    at = (row // group).to(tl.int64) * stride_qt + row % group * stride_qh
    q = tl.load(q_ptr + at[:, None] + offs_d[None, :], mask=(row < rows)[:, None] & (offs_d < D)[None, :], other=0.0)
    # causal: of n keys query t of T sees the first n - T + t + 1
    seen = there[None, :] & (keys[None, :] <= (n - tokens + row // group)[:, None])
    return tl.where(seen, tl.dot(q, k) * factor, -float("inf"))


@triton.jit
def keys_of(k_ptr, visible_ptr, n, stride_kn, heads, head, offs_d, D: tl.constexpr, MASKED: tl.constexpr, KEYS: tl.constexpr):
    """Numbers of this program's keys, which of them are there, and K, turned over."""
    keys = tl.program_id(0) * KEYS + tl.arange(0, KEYS)
    there = keys < n
    at = keys.to(tl.int64)
    k = tl.load(k_ptr + at[None, :] * stride_kn + offs_d[:, None], mask=there[None, :] & (offs_d < D)[:, None], other=0.0)
    if MASKED:
        there = there & (tl.load(visible_ptr + at * heads + head, mask=there, other=0) != 0)
    return keys, there, k


@triton.jit(do_not_specialize=["tokens", "rows", "n"])
def sums_kernel(q_ptr, k_ptr, visible_ptr, sums_ptr, tokens, rows, group, n, heads, factor, stride_qt, stride_qh, stride_kn, stride_kh,
                D: tl.constexpr, PADDED: tl.constexpr, MASKED: tl.constexpr, KEYS: tl.constexpr, ROWS: tl.constexpr):  # fmt: skip
    """grid (blocks of keys, KV heads). sums float32 [H, rows, blocks]: log2 of the sum of exp(logit) over the block, or -inf."""
    head = tl.program_id(1)
    offs_d = tl.arange(0, PADDED)
    keys, there, k = keys_of(k_ptr + head * stride_kh, visible_ptr, n, stride_kn, heads, head, offs_d, D, MASKED, KEYS)
    q_ptr += head * group * stride_qh
    for first in tl.range(0, rows, ROWS):
        row = first + tl.arange(0, ROWS)
        x = logits(q_ptr, k, row, keys, there, rows, tokens, group, n, factor, stride_qt, stride_qh, offs_d, D)
        top = tl.maximum(tl.max(x, 1), -1e30)
        total = tl.sum(tl.exp2(x - top[:, None]), 1)
        to = (head * rows + row).to(tl.int64) * tl.num_programs(0) + tl.program_id(0)
        tl.store(sums_ptr + to, top + tl.log2(total), mask=row < rows)


@triton.jit(do_not_specialize=["blocks"])
def join_kernel(sums_ptr, lse_ptr, blocks, SUMS: tl.constexpr):
    """grid (H * rows,). sums float32 [H, rows, blocks] -> lse [H, rows], base 2 both."""
    offs = tl.arange(0, SUMS)
    row = tl.program_id(0).to(tl.int64)
    top = tl.full([SUMS], -1e30, tl.float32)
    total = tl.zeros([SUMS], tl.float32)
    for first in tl.range(0, blocks, SUMS):
        x = tl.load(sums_ptr + row * blocks + first + offs, mask=first + offs < blocks, other=-float("inf"))
        higher = tl.maximum(top, x)
        total = total * tl.exp2(top - higher) + tl.exp2(x - higher)
        top = higher
    highest = tl.max(top, 0)
    tl.store(lse_ptr + row, highest + tl.log2(tl.sum(total * tl.exp2(top - highest), 0)))


@triton.jit(do_not_specialize=["tokens", "rows", "n"])
def mass_kernel(q_ptr, k_ptr, visible_ptr, lse_ptr, out_ptr, tokens, rows, group, n, heads, factor, stride_qt, stride_qh, stride_kn, stride_kh,
                D: tl.constexpr, PADDED: tl.constexpr, MASKED: tl.constexpr, KEYS: tl.constexpr, ROWS: tl.constexpr):  # fmt: skip
    """grid (blocks of keys, KV heads). lse float32 [H, rows], base 2; out float32 [H, n]."""
    head = tl.program_id(1)
    offs_d = tl.arange(0, PADDED)
    keys, there, k = keys_of(k_ptr + head * stride_kh, visible_ptr, n, stride_kn, heads, head, offs_d, D, MASKED, KEYS)
    q_ptr += head * group * stride_qh
    total = tl.zeros([KEYS], tl.float32)
    for first in tl.range(0, rows, ROWS):
        row = first + tl.arange(0, ROWS)
        x = logits(q_ptr, k, row, keys, there, rows, tokens, group, n, factor, stride_qt, stride_qh, offs_d, D)
        lse = tl.load(lse_ptr + head * rows + row, mask=row < rows, other=float("inf"))
        # a row that sees nothing pays nothing: its sum is -inf, and so are all of its logits
        total += tl.sum(tl.where(x > -float("inf"), tl.exp2(x - lse[:, None]), 0.0), 0)
    tl.store(out_ptr + head.to(tl.int64) * n + keys, total, mask=keys < n)


def mass_triton(q: Tensor, k: Tensor, scale: float, visible: Tensor | None) -> Tensor:
    """`column_scores` by mass: q [T, Hq, D] and k [n, H, D] of one 16-bit dtype."""
    if backend.interpreting() and q.dtype == torch.bfloat16:
        raise ValueError("queries torch.bfloat16 in Triton's interpreter, whose products take their bits for integers; "
                         "accepted there: torch.float16")  # fmt: skip
    t, hq, d = q.shape
    n, h, _ = k.shape
    q, k = (x if x.stride(2) == 1 else x.contiguous() for x in (q, k))
    rows, blocks = t * (hq // h), triton.cdiv(n, KEYS)
    sums = torch.empty(h, rows, blocks, dtype=torch.float32, device=k.device)
    lse = torch.empty(h, rows, dtype=torch.float32, device=k.device)
    out = torch.empty(h, n, dtype=torch.float32, device=k.device)
    there = k if visible is None else visible.contiguous().view(torch.uint8)
    sizes = (t, rows, hq // h, n, h, scale * 1.4426950408889634, *q.stride()[:2], *k.stride()[:2])
    how = {"D": d, "PADDED": triton.next_power_of_2(d), "MASKED": visible is not None, "KEYS": KEYS, "ROWS": ROWS, "num_warps": 4}
    sums_kernel[(blocks, h)](q, k, there, sums, *sizes, **how)
    join_kernel[(h * rows,)](sums, lse, blocks, SUMS=SUMS, num_warps=1)
    mass_kernel[(blocks, h)](q, k, there, lse, out, *sizes, **how)
    return out
