"""The write kernels in CUDA C++: compiled without a GPU and looked at; with one, against the references, byte by byte."""

import re
import warnings
from functools import partial

import pytest
import torch

from kvstrata.ops import backend, cuda, dense, frame, quant, write_cuda
from kvstrata.ops.gather import gather_pages, gather_pages_ref
from kvstrata.ops.write import settle_pages, write_dense, write_dense_ref, write_pages
from kvstrata.types import PAGE_SIZE, Tier
from tests.ops.cubin import inspect
from tests.ops.kernel_cases import DEVICE, make_case
from tests.ops.test_write_kernel import HEADS, pages, poison, scattered

T = Tier
PLANES = (T.INT2, T.INT3, T.INT4, T.INT8)
HALF, BFLOAT = torch.float16, torch.bfloat16


def usage(name, options):
    """Registers, stack and local bytes a thread."""
    (text,) = inspect(name, options, "-res-usage")
    return tuple(map(int, re.search(r"REG:(\d+) STACK:(\d+) .*LOCAL:(\d+) ", text).groups()))


# all tiers where they share a kernel's shape, all shapes at the tier of most registers
@pytest.mark.parametrize(
    "head_dim, dtype, tier, settle", [(128, BFLOAT, t, False) for t in PLANES] + [(64, HALF, T.INT8, True), (256, BFLOAT, T.INT8, False)]
)
def test_page_kernels_compile_without_spills_and_leave_room_for_their_blocks(head_dim, dtype, tier, settle):
    registers, stack, local = usage("write", write_cuda.page_options(head_dim, dtype, tier, settle))
    assert (stack, local) == (0, 0)
    blocks = write_cuda.min_blocks(head_dim)
    assert blocks >= 3
    assert registers * 32 * write_cuda.WARPS * blocks <= 1 << 16
    assert (write_cuda.page_shared_bytes(head_dim) + 1024) * blocks <= 227 << 10


@pytest.mark.parametrize("name, options", [
    ("write_dense", write_cuda.dense_options(256, 1184, 14)),
    ("write_dense", write_cuda.dense_options(512, 2336, 15)),
    *(("write_dense", write_cuda.dense_options(2 * d, frame.frame_bytes(d), 15, t)) for d, t in ((80, HALF), (128, BFLOAT), (256, BFLOAT))),
    ("write_gather", write_cuda.gather_options(128, BFLOAT, T.BF16)),
    ("write_gather", write_cuda.gather_options(64, HALF, T.INT2)),
    ("write_gather", write_cuda.gather_options(128, BFLOAT, T.INT8)),
])  # fmt: skip
def test_other_kernels_compile_without_spills(name, options):
    registers, stack, local = usage(name, options)
    assert (stack, local) == (0, 0)
    assert registers <= 128


def gather_zeros(tier, arena, k, ids):
    write_cuda.gather_pages_cuda(arena, ids, tier, torch.zeros(3, PAGE_SIZE, HEADS, dtype=torch.int32), ids, 64, HALF)


@pytest.mark.parametrize("name, grids, run", [
    ("write", [(3,)], lambda arena, k, ids: write_cuda.write_pages_cuda(arena, ids[:, :4], k, k, T.INT4)),
    ("write", [(3,)], lambda arena, k, ids: write_cuda.settle_pages_cuda(arena, ids, ids[:, :2], T.INT2, 64, HALF)),
    ("write_dense", [(2,)], lambda arena, k, ids: write_cuda.write_dense_cuda(arena, ids[:1].expand(32, -1), torch.arange(32), k[0], k[0])),
    ("write_gather", [(2,)], partial(gather_zeros, T.BF16)),
    ("write_gather", [(1,), (1,)], partial(gather_zeros, T.INT4)),
])  # fmt: skip
def test_launches_pass_what_the_kernels_take(name, grids, run, monkeypatch):
    launches = []

    def kernel(source, function, options, shared, device):
        text = cuda.source(source)
        parameters = re.search(rf"__global__ void .*?{function}\((.*?)\) {{", text, re.DOTALL)[1].split(",")
        return lambda grid, threads, arguments: launches.append((source, grid, parameters, arguments))

    monkeypatch.setattr(cuda, "kernel", kernel)
    n = dense.num_frames(64, 2, frame.frame_bytes(64))
    run(poison(60, 64), torch.zeros(3, PAGE_SIZE, HEADS, 64, dtype=HALF), scattered(3, n, 60))
    # blocks: a head's 32 tokens; K and V of 6 pages and heads by 4 warps, of 6 by 8; 192 slots by 256 threads and 6 pages by 8 warps
    assert [grid for _, grid, _, _ in launches] == grids
    for source, _, parameters, arguments in launches:
        assert source == name
        assert len(parameters) == len(arguments)
        for parameter, argument in zip(parameters, arguments, strict=True):
            assert isinstance(argument, torch.Tensor) == ("*" in parameter)
            if "int*" in parameter:
                assert argument.dtype is torch.int32


def test_shapes_of_other_kernels_are_left_to_them():
    arena = poison(4, 64)
    assert write_cuda.accepts_pages(arena, 64, BFLOAT)
    assert not write_cuda.accepts_pages(arena, 64, torch.float32)
    assert not write_cuda.accepts_pages(poison(4, 80), 80, BFLOAT)
    # frames of another codec, and an arena that starts off 16 bytes
    assert not write_cuda.accepts_pages(arena, 128, BFLOAT)
    assert not write_cuda.accepts_pages(arena.flatten()[8 : 8 + 608].view(1, 1, 608), 64, BFLOAT)
    k = torch.zeros(1, HEADS, 64, dtype=BFLOAT)
    assert write_cuda.accepts_tokens(arena, k, k)
    assert not write_cuda.accepts_tokens(arena, k, k.half())
    assert not write_cuda.accepts_tokens(arena, k[..., :4], k[..., :4])


def test_unaligned_or_far_strided_input_is_copied():
    x = torch.zeros(1, PAGE_SIZE, HEADS, 64, dtype=BFLOAT)
    assert cuda.readable(x) is x
    odd = torch.zeros(x.numel() + 1, dtype=BFLOAT)[1:].view(x.shape)
    for other in (odd, x.transpose(2, 3).contiguous().transpose(2, 3), x.expand(2, -1, -1, -1).as_strided(x.shape, (1 << 31, 128, 64, 1))):
        copy = cuda.readable(other)
        assert copy.is_contiguous()
        assert copy.data_ptr() % 16 == 0


@pytest.mark.parametrize("frames", [torch.zeros(2, 3).int(), torch.zeros(4).int()])
def test_too_few_frames_are_refused(frames):
    k = torch.zeros(2, PAGE_SIZE, HEADS, 64, dtype=BFLOAT)
    with pytest.raises(ValueError, match="have 4 each"):
        write_cuda.write_pages_cuda(poison(4, 64), frames, k, k, T.INT4)


def test_tiers_without_planes_are_refused():
    with pytest.raises(ValueError, match="BF16 has no planes"):
        write_cuda.settle_pages_cuda(poison(4, 64), torch.zeros(1, 14).int(), torch.zeros(1, 14).int(), T.BF16, 64, BFLOAT)


@pytest.mark.parametrize("dtype", [HALF, BFLOAT])
def test_a_reciprocal_in_two_parts_divides_every_16_bit_number_exactly(dtype):
    """What write_codec.cuh rests its codes on: x * head is exact, so that adding x * tail rounds once, to x / s."""
    x = torch.arange(1 << 16).to(torch.int16).view(dtype).float()
    x = x[torch.isfinite(x) & (x.abs() > 1e-30)]
    for s in torch.arange(16, 32).float():
        r = 1 / s
        head = (r.view(torch.int32) & ~0x7FF).view(torch.float32)
        tail = ((1 - s.double() * head.double()) * r.double()).float()
        assert torch.equal((x * head).double(), x.double() * head.double())
        # a fused product and sum: exact in float64, then rounded
        assert torch.equal((x.double() * tail.double() + (x * head).double()).float(), x / s)


# ---- on a GPU -----------------------------------------------------------------------------------------------------------------


def extreme_pages(count, head_dim, dtype):
    """All that 16-bit numbers can do to a grid: ties, zeros of either sign, subnormals, groups out of any scale's reach, few values."""
    k, v = pages(count, head_dim, dtype, seed=4)
    gen = torch.Generator().manual_seed(5)
    largest = 60000 if dtype is HALF else 3e38
    for x in (k, v):
        x[0] = torch.randint(-40, 40, x[0].shape, generator=gen).to(dtype) * 0.125
        x[1] = x[1] * 1e-7
        x[2, ::3] = 0.0
        x[2, 1::3] = -0.0
        x[3, :, :, ::2] = (x[3, :, :, ::2].float() * (largest / x[3].float().abs().max())).to(dtype)
        x[4] = 7.0 + x[4] * 1e-2
    return k, v


def launch_pages(k, v, tier, settle, spare=3):
    """Pages written by the kernel into an arena of poison, and the arena that the reference makes of it."""
    p, _, heads, d = k.shape
    n = dense.num_frames(d, 2, frame.frame_bytes(d))
    ids = scattered(p, n + tier.value, p * (n + tier.value) + spare)
    src, dst = ids[:, :n].contiguous(), ids[:, n:].contiguous()
    arena = torch.full((p * (n + tier.value) + spare, heads, frame.frame_bytes(d)), 0xFF, dtype=torch.uint8)
    if settle:
        arena[src.flatten().long()] = dense.to_frames(k, v, arena.shape[2]).flatten(0, 1)
    expected = arena.clone()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of groups that saturate
        expected[dst.flatten().long()] = quant.encode(k, v, tier).flatten(0, 1)
    arena, src, dst = arena.to(DEVICE), src.to(DEVICE), dst.to(DEVICE)
    if settle:
        write_cuda.settle_pages_cuda(arena, src, dst, tier, d, k.dtype)
    else:
        # not contiguous: tokens lie apart, as in a [tokens, 2, heads, head_dim] projection
        both = torch.stack([k, v], 2).to(DEVICE)
        write_cuda.write_pages_cuda(arena, dst, both[:, :, 0], both[:, :, 1], tier)
    return arena.cpu(), expected


@pytest.mark.gpu
@pytest.mark.parametrize("settle", [False, True], ids=["write", "settle"])
@pytest.mark.parametrize("tier", PLANES)
@pytest.mark.parametrize("head_dim, dtype", [(64, HALF), (128, BFLOAT), (128, HALF), (256, BFLOAT)])
def test_pages_have_the_bytes_of_the_reference(head_dim, dtype, tier, settle):
    arena, expected = launch_pages(*extreme_pages(7, head_dim, dtype), tier, settle)
    assert torch.equal(arena, expected)


@pytest.mark.gpu
def test_many_pages_of_three_heads_have_the_bytes_of_the_reference():
    gen = torch.Generator().manual_seed(6)
    k, v = (torch.randn(333, PAGE_SIZE, 3, 128, generator=gen).to(BFLOAT) for _ in range(2))
    arena, expected = launch_pages(k + 3, v, T.INT8, False)
    assert torch.equal(arena, expected)


@pytest.mark.gpu
@pytest.mark.parametrize(
    "head_dim, dtype", [(64, torch.float32), (80, BFLOAT), (96, HALF), (128, BFLOAT), (256, BFLOAT), (256, torch.float32)]
)
def test_tokens_lie_where_the_reference_puts_them(head_dim, dtype):
    k, v = (x.flatten(0, 1)[:75] for x in pages(3, head_dim, dtype))
    n = dense.num_frames(head_dim, dtype.itemsize, frame.frame_bytes(head_dim))
    slots = torch.randperm(4 * PAGE_SIZE, generator=torch.Generator().manual_seed(3))[: len(k)]
    frames, tokens = scattered(4, n, 4 * n + 2)[slots // PAGE_SIZE].contiguous(), (slots % PAGE_SIZE).int()
    expected = poison(4 * n + 2, head_dim).cpu()
    write_dense_ref(expected, frames, tokens, k, v)
    arena = poison(4 * n + 2, head_dim)
    both = torch.stack([k, v], 1).to(DEVICE)
    write_cuda.write_dense_cuda(arena, frames.to(DEVICE), tokens.to(DEVICE), both[:, 0], both[:, 1])
    assert torch.equal(arena.cpu(), expected)


@pytest.mark.gpu
@pytest.mark.parametrize("head_dim, dtype", [(64, HALF), (80, BFLOAT), (96, HALF), (128, BFLOAT), (256, BFLOAT)])
def test_tokens_are_rotated_on_their_way(head_dim, dtype):
    k, v = (x.flatten(0, 1)[:75] for x in pages(3, head_dim, dtype))
    n = dense.num_frames(head_dim, 2, frame.frame_bytes(head_dim))
    slots = torch.randperm(4 * PAGE_SIZE, generator=torch.Generator().manual_seed(3))[: len(k)]
    frames, tokens = scattered(4, n, 4 * n + 2)[slots // PAGE_SIZE].contiguous().to(DEVICE), (slots % PAGE_SIZE).int().to(DEVICE)
    arenas = [poison(4 * n + 2, head_dim) for _ in range(2)]
    both = torch.stack([k, v], 1).to(DEVICE)
    write_dense(arenas[0], frames, tokens, both[:, 0], both[:, 1], rotate=True)
    write_dense(arenas[1], frames, tokens, both[:, 0], quant.rotate(both[:, 1]))
    got, want = (dense.from_frames(a[frames.long()], head_dim, dtype) for a in arenas)
    at = torch.arange(len(k)), tokens.long().cpu()
    assert torch.equal(got[0][at], want[0][at])
    exact = v.double() @ quant.hadamard(head_dim).double()
    # half a unit in the last place of this type, and float32's sums
    error = (got[1][at].cpu().double() - exact).abs()
    assert (error <= exact.abs() * (2**-8 if dtype is BFLOAT else 2**-11) + 1e-5).all()
    # and nothing else is touched
    written = torch.zeros(arenas[0].shape[0], dtype=torch.bool)
    written[frames.cpu().flatten().long()] = True
    assert torch.equal(arenas[0][~written.to(DEVICE)], arenas[1][~written.to(DEVICE)])


@pytest.mark.gpu
@pytest.mark.parametrize("tier", [*PLANES, T.BF16])
@pytest.mark.parametrize("head_dim, dtype", [(64, HALF), (128, BFLOAT), (256, BFLOAT)])
def test_gathered_pages_are_those_of_the_reference(head_dim, dtype, tier):
    case = make_case({tier: [5]}, 3, head_dim, dtype=dtype)
    n = dense.num_frames(head_dim, 2, case.arena.shape[2])
    picks = torch.randint(-1, 5 * PAGE_SIZE, (3, PAGE_SIZE, 3), generator=torch.Generator().manual_seed(2)).int().to(DEVICE)
    # a head that takes one token many times, and nothing of a page
    picks[1, :, 2] = torch.where(picks[1, :, 2] // PAGE_SIZE == 4, -1, 37)
    picks[0, :, 2], picks[2, :, 2] = picks[0, :, 2] % (4 * PAGE_SIZE), 37
    arena = torch.cat([case.arena, torch.full_like(case.arena[:1], 0xFF).expand(3 * n, -1, -1)])
    dst = (torch.arange(3 * n).int().view(3, n) + len(case.arena)).to(DEVICE)
    src = case.table.segments[0].frames[0, :5]
    expected = arena.clone()
    gather_pages_ref(expected, src, tier, picks, dst, head_dim, dtype)
    write_cuda.gather_pages_cuda(arena, src, tier, picks, dst, head_dim, dtype)
    got, wanted = (x[dst.long()].transpose(1, 2).reshape(3, 3, -1)[..., : 128 * head_dim] for x in (arena, expected))
    assert torch.equal(got, wanted)
    assert torch.equal(arena[: len(case.arena)], case.arena)


@pytest.mark.gpu
def test_ops_choose_these_kernels_and_others_where_they_must(monkeypatch):
    calls = []
    for name in ("write_pages_cuda", "settle_pages_cuda", "write_dense_cuda", "gather_pages_cuda"):
        monkeypatch.setattr(write_cuda, name, lambda *_, name=name, **__: calls.append(name))
    for head_dim in (64, 80):
        n = dense.num_frames(head_dim, 2, frame.frame_bytes(head_dim))
        k, v = (x.to(DEVICE) for x in pages(1, head_dim, BFLOAT))
        arena, ids = poison(2 * n + 1, head_dim), scattered(1, 2 * n, 2 * n + 1).to(DEVICE)
        write_pages(arena, ids[:, :2], k, v, T.INT2)
        settle_pages(arena, ids[:, :n], ids[:, n : n + 2], T.INT2, head_dim, BFLOAT)
        write_dense(arena, ids[:, :n], torch.zeros(1, device=DEVICE).int(), k[0, :1], v[0, :1])
        picks = torch.zeros(1, PAGE_SIZE, HEADS, device=DEVICE).int()
        gather_pages(arena, ids[:, :2], T.INT2, picks, ids[:, n:], head_dim, BFLOAT)
    assert calls == ["write_pages_cuda", "settle_pages_cuda", "write_dense_cuda", "gather_pages_cuda", "write_dense_cuda"]
    assert backend.use_cuda(arena)
