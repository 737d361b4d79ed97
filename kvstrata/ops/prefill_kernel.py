"""`prefill` in Triton: a program takes a tile of queries of one head through the body's codes, the lines and the window.

Codes are made by PyTorch. Knows nothing of stores.
"""

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from kvstrata.ops import backend
from kvstrata.ops import prefill as reference

BLOCK_ROWS, KEYS, NUM_WARPS, NUM_STAGES = 128, 128, 8, 3


@triton.jit
def softmax(x, m, total):
    """Logits x [M, N], base 2 -> probabilities, the new maximum, what sums so far are worth, the new total."""
    top = tl.maximum(m, tl.max(x, 1))
    alpha = tl.exp2(m - top)
    p = tl.exp2(x - top[:, None])
    return p, top, alpha, total * alpha + tl.sum(p, 1)


@triton.jit
def walk_codes(acc, m, total, q, factor, k_ptr, v_ptr, scale_ptr, seen, last, D: tl.constexpr, PADDED: tl.constexpr, KEYS: tl.constexpr,
               stride_v, INT8_VALUES: tl.constexpr):  # fmt: skip
    """Codes of K [n, D] and of V, turned over, [D, n], n a multiple of KEYS; seen: int32 [M], keys that each row sees, at most `last`."""
    offs_n = tl.arange(0, KEYS)
    offs_d = tl.arange(0, PADDED)
    top_code: tl.constexpr = 127.0 if INT8_VALUES else 448.0
    for n in tl.range(0, last, KEYS):
        k = tl.load(k_ptr + (n + offs_n).to(tl.int64)[:, None] * D + offs_d[None, :], mask=(offs_d < D)[None, :], other=0.0)
        v = tl.load(v_ptr + offs_d.to(tl.int64)[:, None] * stride_v + (n + offs_n)[None, :], mask=(offs_d < D)[:, None], other=0.0)
        k_scale = tl.load(scale_ptr + n // KEYS * 2)
        v_scale = tl.load(scale_ptr + n // KEYS * 2 + 1)
        x = tl.dot(q, tl.trans(k)).to(tl.float32) * (factor * k_scale)[:, None]
        x = tl.where((n + offs_n)[None, :] < seen[:, None], x, -float("inf"))
        own = tl.maximum(tl.max(x, 1), -1e30)
        top = tl.maximum(m, own)
        # int8 has no small numbers: its probabilities are relative to the tile's own maximum
        base = own if INT8_VALUES else top
        p = tl.exp2(x - base[:, None])
        worth = tl.exp2(base - top)
        alpha = tl.exp2(m - top)
        total = total * alpha + tl.sum(p, 1) * worth
        p = p * top_code
        if INT8_VALUES:
            codes = tl.floor(p + 0.5).to(tl.int8)
        else:
            codes = p.to(tl.float8e4nv)
        # a sum of its own for each tile: matrix units add 8-bit products with few bits
        sums = tl.dot(codes, tl.trans(v)).to(tl.float32)
        acc = acc * alpha[:, None] + sums * (worth * (v_scale / top_code))[:, None]
        m = top
    return acc, m, total


@triton.jit
def walk_whole(
    acc, m, total, q, factor, k_ptr, v_ptr, stride_k, stride_v, first, end, seen, D: tl.constexpr, PADDED: tl.constexpr, KEYS: tl.constexpr
):
    """Keys [first, end) as they are; seen: int32 [M], each row sees keys below it."""
    offs_n = tl.arange(0, KEYS)
    offs_d = tl.arange(0, PADDED)
    for n in tl.range(first, end, KEYS):
        ok = ((n + offs_n) < end)[:, None] & (offs_d < D)[None, :]
        k = tl.load(k_ptr + (n + offs_n).to(tl.int64)[:, None] * stride_k + offs_d[None, :], mask=ok, other=0.0)
        v = tl.load(v_ptr + (n + offs_n).to(tl.int64)[:, None] * stride_v + offs_d[None, :], mask=ok, other=0.0)
        x = tl.where((n + offs_n)[None, :] < seen[:, None], tl.dot(q, tl.trans(k)) * factor, -float("inf"))
        p, m, alpha, total = softmax(x, m, total)
        acc = tl.dot(p.to(v.dtype), v, acc * alpha[:, None])
    return acc, m, total


@triton.jit
def prefill_kernel(q_ptr, q_codes_ptr, q_scale_ptr, constant_ptr, k_ptr, v_ptr, k_codes_ptr, v_codes_ptr, scale_ptr, k_lines_ptr, v_lines_ptr,
                   body_ptr, lines_ptr, out_ptr, tokens, query_tiles, group, num_tiles, num_lines, window, scale, stride_kt, stride_kh, stride_vt, stride_vh,
                   D: tl.constexpr, PADDED: tl.constexpr, M: tl.constexpr, KEYS: tl.constexpr, INT8_VALUES: tl.constexpr):  # fmt: skip
    """Grid query tiles * query heads. q, out [T, Hq, D], codes alike, q_scale and constant float32 [T, Hq]; codes of keys [H, n, D], of
    values [H, D, n], scales [H, tiles, 2]; lines [H, L, D]; body, lines int32 [H, T]: keys of each part that a row sees."""
    program = tl.program_id(0)
    member = program % group
    tile = query_tiles - 1 - program // group % query_tiles
    head = (program // group // query_tiles).to(tl.int64)
    heads = tl.num_programs(0) // query_tiles
    rows = tile * M + tl.arange(0, M)
    offs_d = tl.arange(0, PADDED)
    ok = rows < tokens
    at = rows.to(tl.int64) * heads + head * group + member
    whole = ok[:, None] & (offs_d < D)[None, :]
    acc = tl.zeros([M, PADDED], tl.float32)
    m = tl.full([M], -1e30, tl.float32)
    total = tl.zeros([M], tl.float32)
    codes = tl.load(q_codes_ptr + at[:, None] * D + offs_d[None, :], mask=whole, other=0.0)
    factor = tl.load(q_scale_ptr + at, mask=ok, other=0.0) * scale
    seen = tl.load(body_ptr + head * tokens + rows, mask=ok, other=0)
    acc, m, total = walk_codes(acc, m, total, codes, factor, k_codes_ptr + head * num_tiles * KEYS * D, v_codes_ptr + head * num_tiles * KEYS * D,
                               scale_ptr + head * num_tiles * 2, seen, tl.max(seen, 0), D, PADDED, KEYS, num_tiles * KEYS, INT8_VALUES)  # fmt: skip
    m += tl.load(constant_ptr + at, mask=ok, other=0.0) * scale
    q = tl.load(q_ptr + at[:, None] * D + offs_d[None, :], mask=whole, other=0.0)
    seen = tl.load(lines_ptr + head * tokens + rows, mask=ok, other=0)
    own = head * num_lines * D
    acc, m, total = walk_whole(acc, m, total, q, scale, k_lines_ptr + own, v_lines_ptr + own, D, D, 0, tl.max(seen, 0), seen, D, PADDED, 64)
    if window > 0:
        first = tl.maximum(tile * M - window, 0)
        end = tl.minimum(tile * M + M, tokens)
        acc, m, total = walk_whole(
            acc,
            m,
            total,
            q,
            scale,
            k_ptr + head * stride_kh,
            v_ptr + head * stride_vh,
            stride_kt,
            stride_vt,
            first,
            end,
            rows + 1,
            D,
            PADDED,
            64,
        )
    out = acc / tl.maximum(total, 1e-30)[:, None]
    tl.store(out_ptr + at[:, None] * D + offs_d[None, :], out.to(out_ptr.dtype.element_ty), mask=whole)


def prefill_triton(q: Tensor, k: Tensor, v: Tensor, lines: Tensor, scale: float, *, window: int = 128,
                   precision: reference.Precision = reference.INT8_FP8) -> Tensor:  # fmt: skip
    """`prefill` in Triton, for bf16 and fp16."""
    if backend.interpreting() and q.dtype == torch.bfloat16:
        raise ValueError("queries torch.bfloat16 in Triton's interpreter, whose products take their bits for integers; "
                         "accepted there: torch.float16")  # fmt: skip
    t, hq, d = q.shape
    h = k.shape[1]
    k, v = (x if x.stride(2) == 1 else x.contiguous() for x in (k, v))
    out = torch.empty(t, hq, d, dtype=q.dtype, device=q.device)
    mean = k.mean(0, dtype=torch.float32) if precision.smooth else torch.zeros(h, d, device=k.device)
    body = reference.rest(lines, t)
    tiles = -(-body.shape[1] // KEYS)
    k_codes, k_scale = _tiles(_pick(k, body).float() - mean[:, None], tiles, precision.scores)
    v_codes, v_scale = _tiles(_pick(v, body).float(), tiles, precision.values)
    q_codes, q_scale = reference.quantize(q.float(), precision.scores, -1)
    constant = torch.einsum("thgd,hd->thg", q.unflatten(1, (h, hq // h)).float(), mean)
    position = torch.arange(t, dtype=torch.int32, device=q.device)
    # of each row, the first position that is no longer the body's or the lines'
    first = (position // BLOCK_ROWS * BLOCK_ROWS - window).clamp(min=0) if window else position + 1
    of_lines = torch.searchsorted(lines, first.expand(h, t).contiguous(), out_int32=True)
    of_body = first - of_lines
    query_tiles = -(-t // BLOCK_ROWS)
    prefill_kernel[(query_tiles * hq,)](
        q.contiguous(), _stored(q_codes, precision.scores).contiguous(), q_scale.contiguous(), constant.contiguous(), k, v,
        _stored(k_codes, precision.scores), _stored(v_codes, precision.values).transpose(1, 2).contiguous(),
        torch.stack([k_scale, v_scale], -1).contiguous(), _pick(k, lines.long()), _pick(v, lines.long()), of_body.contiguous(), of_lines, out,
        t, query_tiles, hq // h, tiles, lines.shape[1], window, scale * math.log2(math.e), *k.stride()[:2], *v.stride()[:2],
        D=d, PADDED=triton.next_power_of_2(d), M=BLOCK_ROWS, KEYS=KEYS, INT8_VALUES=precision.values == "int8", num_warps=NUM_WARPS,
        num_stages=NUM_STAGES,
    )  # fmt: skip
    return out


def _pick(x: Tensor, positions: Tensor) -> Tensor:
    """x [T, H, D], positions [H, n] -> [H, n, D]."""
    return torch.gather(x.transpose(0, 1), 1, positions[..., None].expand(-1, -1, x.shape[2])).contiguous()


def _tiles(x: Tensor, tiles: int, form: str) -> tuple[Tensor, Tensor]:
    """x [H, n, D] -> codes [H, tiles * KEYS, D], scales [H, tiles]."""
    padded = torch.nn.functional.pad(x, (0, 0, 0, tiles * KEYS - x.shape[1])).unflatten(1, (-1, KEYS))
    codes, scale = reference.quantize(padded, form, 2, 3)
    return codes.flatten(1, 2), scale[:, :, 0, 0]


def _stored(codes: Tensor, form: str) -> Tensor:
    return codes.to(torch.int8 if form == "int8" else torch.float8_e4m3fn)
