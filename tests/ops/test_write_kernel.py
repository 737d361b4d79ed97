"""The write kernels against the references, byte by byte."""

import pytest
import torch

from kvstrata.ops import dense, frame, quant, write_kernel
from kvstrata.ops.gather import gather_pages_ref
from kvstrata.types import PAGE_SIZE, Tier
from tests.ops.kernel_cases import DEVICE, make_case

HEADS = 2


def pages(count, head_dim, dtype, seed=0):
    """K with channels of unlike size and mean, V of Gaussians; some groups of zero range, some outliers."""
    gen = torch.Generator().manual_seed(seed)
    k = (
        torch.randn(count, PAGE_SIZE, HEADS, head_dim, generator=gen) * torch.linspace(0.01, 8, head_dim)
        + torch.randn(head_dim, generator=gen) * 30
    )
    v = torch.randn(count, PAGE_SIZE, HEADS, head_dim, generator=gen)
    k[0, :, 0, 3], v[0, 5], k[0, 2, 0, 7], v[-1, 1, 0, 2] = 1.25, 0.0, 1e4, -300.0
    return k.to(dtype), v.to(dtype)


def poison(frames, head_dim):
    return torch.full((frames, HEADS, frame.frame_bytes(head_dim)), 0xFF, dtype=torch.uint8, device=DEVICE)


def scattered(count, n, total, seed=1):
    ids = torch.randperm(total - 1, generator=torch.Generator().manual_seed(seed))[: count * n] + 1
    return ids.int().view(count, n)


@pytest.mark.parametrize("tier", [Tier.INT2, Tier.INT3, Tier.INT4, Tier.INT8])
@pytest.mark.parametrize("head_dim, dtype", [(64, torch.float32), (80, torch.bfloat16), (128, torch.float16)])
def test_write_pages_kernel_gives_the_bytes_of_the_reference(tier, head_dim, dtype):
    k, v = pages(2, head_dim, dtype)
    arena, frames = poison(20, head_dim), scattered(2, tier.value, 20)
    expected = arena.cpu()
    expected[frames.flatten().long()] = quant.encode(k, v, tier).flatten(0, 1)
    # not contiguous: tokens lie apart, as in a [tokens, 2, heads, head_dim] projection
    both = torch.stack([k, v], 2).to(DEVICE)
    write_kernel.write_pages_triton(arena, frames.to(DEVICE), both[:, :, 0], both[:, :, 1], tier)
    assert torch.equal(arena.cpu(), expected)


@pytest.mark.parametrize("head_dim", [64, 96, 256])
def test_settle_kernel_gives_the_bytes_of_the_reference(head_dim):
    n = dense.num_frames(head_dim, 2, frame.frame_bytes(head_dim))
    k, v = pages(2, head_dim, torch.bfloat16)
    arena, ids = poison(60, head_dim), scattered(2, n + 4, 60)
    src, dst = ids[:, :n].contiguous(), ids[:, n:].contiguous()
    arena[src.flatten().long().to(DEVICE)] = dense.to_frames(k, v, arena.shape[2]).flatten(0, 1).to(DEVICE)
    expected = arena.cpu()
    expected[dst.flatten().long()] = quant.encode(k, v, Tier.INT4).flatten(0, 1)
    write_kernel.settle_pages_triton(arena, src.to(DEVICE), dst.to(DEVICE), Tier.INT4, head_dim, torch.bfloat16)
    assert torch.equal(arena.cpu(), expected)


@pytest.mark.parametrize("head_dim", [64, 80])
def test_write_dense_kernel_puts_tokens_where_the_reference_does(head_dim):
    n = dense.num_frames(head_dim, 2, frame.frame_bytes(head_dim))
    k, v = (x[0, :7] for x in pages(1, head_dim, torch.bfloat16))
    rows = scattered(2, n, 50)
    frames, tokens = rows[torch.tensor([0, 0, 1, 1, 1, 0, 1])], torch.tensor([31, 0, 4, 5, 17, 8, 30], dtype=torch.int32)
    arena = poison(50, head_dim)
    whole_k, whole_v = dense.from_frames(arena.cpu()[rows.long()], head_dim, torch.bfloat16)
    whole_k, whole_v = whole_k.clone(), whole_v.clone()
    page = torch.tensor([0, 0, 1, 1, 1, 0, 1])
    whole_k[page, tokens.long()], whole_v[page, tokens.long()] = k, v
    write_kernel.write_dense_triton(arena, frames.to(DEVICE), tokens.to(DEVICE), k.to(DEVICE), v.to(DEVICE))
    got_k, got_v = dense.from_frames(arena.cpu()[rows.long()], head_dim, torch.bfloat16)
    assert torch.equal(got_k.view(torch.int16), whole_k.view(torch.int16))
    assert torch.equal(got_v.view(torch.int16), whole_v.view(torch.int16))


@pytest.mark.parametrize("tier", [Tier.INT2, Tier.INT3, Tier.INT8, Tier.BF16])
def test_gather_kernel_gives_the_pages_of_the_reference(tier):
    head_dim = 80 if tier is Tier.INT3 else 64
    case = make_case({tier: [3]}, HEADS, head_dim, dtype=torch.float16)  # (the interpreter truncates to bfloat16)
    n = dense.num_frames(head_dim, 2, case.arena.shape[2])
    picks = torch.randint(-1, 3 * PAGE_SIZE, (2, PAGE_SIZE, HEADS), generator=torch.Generator().manual_seed(2)).int()
    arena = torch.cat([case.arena, torch.full_like(case.arena[:1], 0xFF).expand(2 * n, -1, -1)])
    dst = (torch.arange(2 * n) + len(case.arena)).int().view(2, n).to(DEVICE)
    src = case.table.segments[0].frames[0, :3]
    expected = arena.clone()
    gather_pages_ref(expected, src, tier, picks.to(DEVICE), dst, head_dim, torch.float16)
    write_kernel.gather_pages_triton(arena, src, tier, picks.to(DEVICE), dst, head_dim, torch.float16)
    used = 128 * head_dim
    flat = lambda x: x[dst.long()].transpose(1, 2).reshape(2, HEADS, -1)[..., :used]  # noqa: E731
    assert torch.equal(flat(arena), flat(expected))
