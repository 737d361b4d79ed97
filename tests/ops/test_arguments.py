"""What the ops refuse: anything whose shape, dtype or device a kernel would read past or as other numbers."""

import math

import torch

from kvstrata.ops import decode_cuda, decode_kernel, dense, frame
from kvstrata.ops.merge import merge
from kvstrata.ops.table import PageTable, Segment
from kvstrata.ops.write import write_pages
from kvstrata.types import PAGE_SIZE, Tier
from tests.ops.kernel_cases import DEVICE

T = Tier
BFLOAT, HALF = torch.bfloat16, torch.float16
HEADS, GROUP, D, PAGES = 2, 2, 64, 3
FRAME_BYTES = frame.frame_bytes(D)
DENSE = dense.num_frames(D, 2, FRAME_BYTES)


def arena(heads=HEADS, frame_bytes=FRAME_BYTES, dtype=torch.uint8):
    return torch.zeros(2 * DENSE + 8, heads, frame_bytes, dtype=dtype, device=DEVICE)


def test_queries_in_another_order_of_memory_give_the_same():
    gen = torch.Generator().manual_seed(0)
    x, frames = arena(), torch.arange(1, 1 + 4 * PAGES, dtype=torch.int32, device=DEVICE).view(PAGES, 4)
    k, v = (torch.randn(PAGES, PAGE_SIZE, HEADS, D, generator=gen).half().to(DEVICE) for _ in range(2))
    write_pages(x, frames, k, v, T.INT4)
    segment = Segment(T.INT4, frames[None].expand(2, -1, -1), torch.tensor([PAGES, 1], dtype=torch.int32, device=DEVICE))
    q = torch.randn(2, HEADS * GROUP, D, generator=gen).half().to(DEVICE)
    turned = q.transpose(1, 2).contiguous().transpose(1, 2)
    out, _ = decode_kernel.decode_triton(q, x, PageTable((segment,), 2), 0.1, dense_dtype=HALF)
    other, _ = decode_kernel.decode_triton(turned, x, PageTable((segment,), 2), 0.1, dense_dtype=HALF)
    assert torch.equal(out, other)
    # both kernels write the rows of [B, Hq, D] one after another
    assert decode_cuda.make_workspace(turned, HEADS, blocks=4).out.is_contiguous()


def test_a_part_that_is_not_a_number_is_not_lost_in_a_merge():
    outs, lses = torch.ones(2, 1, 1, 4), torch.tensor([math.nan, 0.0]).view(2, 1, 1)
    out, lse = merge(outs, lses)
    assert out.isnan().all()
    assert lse.isnan().all()
