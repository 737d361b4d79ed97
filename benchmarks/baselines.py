"""What decode is measured against: bf16 attention of PyTorch, FlashAttention 3 with a paged fp8 cache, and a plain low-bit kernel."""

import sys
from collections.abc import Callable

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from benchmarks.common import microseconds


def best_bf16(q: Tensor, heads: int, tokens: int) -> dict[str, float]:
    """Microseconds of SDPA flash and cuDNN with q [B, Hq, D] over `tokens` contiguous tokens in bfloat16."""
    b, _, d = q.shape
    k, v = (torch.randn(b, heads, tokens, d, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    times = {}
    for name, kind in (("flash", SDPBackend.FLASH_ATTENTION), ("cudnn", SDPBackend.CUDNN_ATTENTION)):
        with sdpa_kernel(kind):
            times[name] = microseconds(lambda: scaled_dot_product_attention(q[:, :, None], k, v, enable_gqa=True))
    return times


def fa3_fp8(q: Tensor, heads: int, tokens: int, library: str) -> Callable[[], Tensor]:
    return fa3(q, heads, tokens, library, torch.float8_e4m3fn)


def fa3(q: Tensor, heads: int, tokens: int, library: str, dtype: torch.dtype = torch.bfloat16, page: int = 64) -> Callable[[], Tensor]:
    """FlashAttention 3 as vLLM builds it (`library`: the path of its _vllm_fa3_C.abi3.so), one query a sequence over a paged cache of
    bfloat16 or fp8."""
    if "fa3" not in sys.modules:
        torch.ops.load_library(library)
        sys.modules["fa3"] = sys.modules[__name__]
    b, hq, d = q.shape
    pages = tokens // page
    k, v = (torch.randn(b * pages, page, heads, d, device="cuda").to(dtype) for _ in range(2))
    table = torch.randperm(b * pages, device="cuda").int().view(b, pages)
    cast = q.to(dtype)
    cu = torch.arange(b + 1, dtype=torch.int32, device="cuda")
    used = torch.full((b,), tokens, dtype=torch.int32, device="cuda")
    one = None if dtype is torch.bfloat16 else torch.ones(b, heads, device="cuda")
    out = torch.empty(b, hq, d, dtype=torch.bfloat16, device="cuda")
    plan = torch.ops._vllm_fa3_C.get_scheduler_metadata(
        b, 1, tokens, hq, heads, d, d, dtype, used, cu, None, None, None, None, page, 0, True, -1, -1, False, 0, None, 0
    )  # fmt: skip

    def run() -> Tensor:
        result: Tensor = torch.ops._vllm_fa3_C.fwd(
            cast, k, v, None, None, None, out, cu, None, None, None, used, 1, tokens, table, None, None, None, None, None, one, one, one,
            d**-0.5, True, -1, -1, 0.0, True, plan, 0, None, 0, None, 1, 0, None)[0]  # fmt: skip
        return result

    return run


@triton.jit
def plain_kernel(q_ptr, k_ptr, v_ptr, scale_ptr, part_ptr, stat_ptr, tokens, splits, qk_scale, D: tl.constexpr, BLOCK: tl.constexpr):
    """Split decode over 4-bit codes that converts each element; contiguous, one scale a token, 16 query rows."""
    bh = tl.program_id(0).to(tl.int64)
    split = tl.program_id(1)
    offs_m = tl.arange(0, 16)
    offs_d = tl.arange(0, D // 2)
    offs_n = tl.arange(0, BLOCK)
    per = tl.cdiv(tokens, splits * BLOCK) * BLOCK
    q0 = tl.load(q_ptr + bh * 16 * D + offs_m[:, None] * D + offs_d[None, :])
    q1 = tl.load(q_ptr + bh * 16 * D + offs_m[:, None] * D + D // 2 + offs_d[None, :])
    m = tl.full([16], -1e30, tl.float32)
    total = tl.zeros([16], tl.float32)
    acc0 = tl.zeros([16, D // 2], tl.float32)
    acc1 = tl.zeros([16, D // 2], tl.float32)
    for n in range(split * per, tl.minimum(tokens, split * per + per), BLOCK):
        at = (bh * tokens + n + offs_n[:, None]) * (D // 2) + offs_d[None, :]
        k = tl.load(k_ptr + at)
        v = tl.load(v_ptr + at)
        scale = tl.load(scale_ptr + bh * tokens + n + offs_n)
        s = tl.dot(q0, tl.trans((k & 15).to(tl.float16))) + tl.dot(q1, tl.trans((k >> 4).to(tl.float16)))
        s = s * (scale.to(tl.float32) * qk_scale)[None, :]
        m_new = tl.maximum(m, tl.max(s, 1))
        alpha = tl.exp2(m - m_new)
        p = tl.exp2(s - m_new[:, None])
        total = total * alpha + tl.sum(p, 1)
        p = p.to(tl.float16)
        acc0 = tl.dot(p, (v & 15).to(tl.float16) * scale[:, None], acc0 * alpha[:, None])
        acc1 = tl.dot(p, (v >> 4).to(tl.float16) * scale[:, None], acc1 * alpha[:, None])
        m = m_new
    row = (bh * splits + split) * 16 + offs_m
    tl.store(part_ptr + row[:, None] * D + offs_d[None, :], acc0)
    tl.store(part_ptr + row[:, None] * D + D // 2 + offs_d[None, :], acc1)
    tl.store(stat_ptr + row, m)
    tl.store(stat_ptr + row, total)


def plain_int4(batch: int, heads: int, tokens: int, head_dim: int) -> Callable[[], object]:
    bh = batch * heads
    splits = max(1, 1056 // bh)
    q = torch.randn(bh, 16, head_dim, device="cuda", dtype=torch.float16)
    k, v = (torch.randint(0, 256, (bh, tokens, head_dim // 2), dtype=torch.uint8, device="cuda") for _ in range(2))
    scale = torch.rand(bh, tokens, device="cuda", dtype=torch.float16) * 0.1
    part = torch.empty(bh, splits, 16, head_dim, device="cuda")
    stat = torch.empty(bh, splits, 16, device="cuda")
    options = {"D": head_dim, "BLOCK": 64, "num_warps": 4, "num_stages": 3}
    return lambda: plain_kernel[(bh, splits)](q, k, v, scale, part, stat, tokens, splits, 0.1, **options)
