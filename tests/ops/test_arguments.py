"""What the ops refuse: anything whose shape, dtype or device a kernel would read past or as other numbers."""

import math

import pytest
import torch

from kvstrata.ops import arguments, backend, decode_cuda, decode_kernel, dense, extend_kernel, frame, prefill_kernel, quant
from kvstrata.ops.decode import decode
from kvstrata.ops.extend import extend
from kvstrata.ops.gather import gather_pages
from kvstrata.ops.merge import merge
from kvstrata.ops.table import PageTable, Segment
from kvstrata.ops.write import settle_pages, write_dense, write_pages
from kvstrata.types import PAGE_SIZE, Tier
from tests.ops.kernel_cases import DEVICE

T = Tier
BFLOAT, HALF = torch.bfloat16, torch.float16
HEADS, GROUP, D, PAGES = 2, 2, 64, 3
FRAME_BYTES = frame.frame_bytes(D)
DENSE = dense.num_frames(D, 2, FRAME_BYTES)


def ints(*shape, dtype=torch.int32):
    return torch.zeros(*shape, dtype=dtype, device=DEVICE)


def numbers(*shape, dtype=HALF):
    return torch.zeros(*shape, dtype=dtype, device=DEVICE)


def arena(heads=HEADS, frame_bytes=FRAME_BYTES, dtype=torch.uint8):
    return torch.zeros(2 * DENSE + 8, heads, frame_bytes, dtype=dtype, device=DEVICE)


def table(per_page=4, tier=T.INT4, live=None):
    counts = torch.full((1,), PAGES, dtype=torch.int32, device=DEVICE)
    return PageTable((Segment(tier, ints(1, PAGES, per_page), counts, live),), 1)


SEGMENTS = {
    "EVICTED": lambda: Segment(T.EVICTED, ints(1, 3, 0), ints(1)),
    "frames of INT4 are torch.int64": lambda: Segment(T.INT4, ints(1, 3, 4, dtype=torch.int64), ints(1)),
    r"frames of INT4 are torch.int32 \[3, 4\]": lambda: Segment(T.INT4, ints(3, 4), ints(3)),
    "counts of INT4 are torch.int64": lambda: Segment(T.INT4, ints(1, 3, 4), ints(1, dtype=torch.int64)),
    r"counts of INT4 are torch.int32 \[2\]": lambda: Segment(T.INT4, ints(1, 3, 4), ints(2)),
    "live masks of INT4 are torch.uint8": lambda: Segment(T.INT4, ints(1, 3, 4), ints(1), ints(1, 3, 1, dtype=torch.uint8)),
    r"accepted: int32 \[1, 3, 1 or KV heads\]": lambda: Segment(T.INT4, ints(1, 3, 4), ints(1), ints(1, 2, 1)),
    "one of a tier at most": lambda: PageTable((Segment(T.INT4, ints(1, 3, 4), ints(1)),) * 2, 1),
    "has 1 sequences, the table 2": lambda: PageTable((Segment(T.INT4, ints(1, 3, 4), ints(1)),), 2),
}


@pytest.mark.parametrize("message", SEGMENTS)
def test_a_table_of_other_shapes_is_refused(message):
    with pytest.raises(ValueError, match=message):
        SEGMENTS[message]()


ATTENTION = [
    pytest.param({"q": numbers(1, 3, D)}, r"a multiple of 2 query heads", id="three-heads-on-two"),
    pytest.param({"q": numbers(1, 0, D)}, "a multiple of 2 query heads", id="no-heads"),
    pytest.param({"q": numbers(HEADS, D)}, r"queries are torch.float16 \[2, 64\]", id="two-axes"),
    pytest.param({"q": ints(1, 4, D)}, "queries are torch.int32", id="integers"),
    pytest.param({"q": numbers(1, 4, 72)}, "head_dim 72", id="head-dim"),
    pytest.param({"q": numbers(1, 4, 128)}, "1184 bytes a frame", id="another-head-dim"),
    pytest.param({"arena": arena(dtype=torch.int16)}, "arena is torch.int16", id="arena-of-words"),
    pytest.param({"arena": arena(heads=0)}, "arena is", id="arena-without-heads"),
    pytest.param({"arena": arena()[:, 0]}, "arena is", id="arena-of-two-axes"),
    pytest.param({"table": table(3)}, "frames of INT4 are .*accepted: 4 a page", id="too-few-frames"),
    pytest.param({"table": table(8)}, "frames of INT4 are .*accepted: 4 a page", id="too-many-frames"),
    pytest.param({"table": table(4, T.BF16)}, f"accepted: {DENSE} a page", id="dense-frames"),
    pytest.param({"table": table(live=ints(1, PAGES, 3))}, "for 3 KV heads; accepted: 1 or 2", id="live-heads"),
    pytest.param({"dense_dtype": torch.int8}, "dense pages are torch.int8", id="dense-integers"),
]


@pytest.mark.parametrize("op", [decode, extend])
@pytest.mark.parametrize("bad, message", ATTENTION)
def test_attention_of_other_shapes_is_refused(op, bad, message):
    values = {"q": numbers(1, HEADS * GROUP, D), "arena": arena(), "table": table(), "scale": 1.0, "dense_dtype": HALF} | bad
    if op is extend:
        values |= {"k": numbers(1, HEADS, D), "v": numbers(1, HEADS, D), "cu_seqlens": [0, 1]}
    with pytest.raises(ValueError, match=message):
        op(**values)


@pytest.mark.parametrize("batch", [0, 2])
def test_queries_for_other_sequences_are_refused(batch):
    with pytest.raises(ValueError, match=f"{batch} queries for 1 sequences"):
        decode(numbers(batch, HEADS * GROUP, D), arena(), table(), 1.0, dense_dtype=HALF)


@pytest.mark.parametrize("cu", [[0, 6], [0, 4], [1, 5], [0, 2, 5], [0, 4, 3, 5], [-1, 5], [0], []])
def test_a_chunk_that_is_not_all_cut_into_the_sequences_is_refused(cu):
    q, k = numbers(5, HEADS * GROUP, D), numbers(5, HEADS, D)
    with pytest.raises(ValueError, match="accepted: 2 numbers, ascending, from 0 to the chunk's 5 tokens"):
        extend(q, k, k, cu, arena(), table(), 1.0, dense_dtype=HALF)


@pytest.mark.parametrize("shape", [(4, HEADS, D), (5, 1, D), (5, HEADS, 32), (5, HEADS * GROUP, D)])
def test_keys_or_values_unlike_the_chunk_are_refused(shape):
    q, k, bad = numbers(5, HEADS * GROUP, D), numbers(5, HEADS, D), numbers(*shape)
    for name, pair in (("k", (bad, k)), ("v", (k, bad))):
        with pytest.raises(ValueError, match=f"^{name} is torch.float16"):
            extend(q, *pair, [0, 5], arena(), table(), 1.0, dense_dtype=HALF)


def pages(n=PAGES, heads=HEADS, tokens=PAGE_SIZE, dtype=HALF):
    return numbers(n, tokens, heads, D, dtype=dtype)


def tokens(n=4, heads=HEADS, dtype=HALF):
    return numbers(n, heads, D, dtype=dtype)


WRITES = [
    pytest.param(lambda: write_pages(arena(), ints(3, 5), pages(), pages(), T.INT4), r"int32 \[3, 4\]", id="pages-wide"),
    pytest.param(lambda: write_pages(arena(), ints(3, 3), pages(), pages(), T.INT4), r"int32 \[3, 4\]", id="pages-narrow"),
    pytest.param(lambda: write_pages(arena(), ints(4, 4), pages(), pages(), T.INT4), r"int32 \[3, 4\]", id="pages-fewer"),
    pytest.param(lambda: write_pages(arena(), ints(3, 4).long(), pages(), pages(), T.INT4), "torch.int64", id="pages-int64"),
    pytest.param(lambda: write_pages(arena(), ints(3, 4), pages(heads=1), pages(heads=1), T.INT4), "32, 2, head_dim", id="pages-heads"),
    pytest.param(lambda: write_pages(arena(), ints(3, 4), pages(), pages(2), T.INT4), "^v is", id="pages-values"),
    pytest.param(lambda: write_pages(arena(), ints(3, 4), pages(tokens=31), pages(tokens=31), T.INT4), "^k is", id="pages-tokens"),
    pytest.param(lambda: write_pages(arena(dtype=torch.int8), ints(3, 4), pages(), pages(), T.INT4), "arena is", id="pages-arena"),
    pytest.param(lambda: write_pages(arena(frame_bytes=640), ints(3, 4), pages(), pages(), T.INT4), "608 bytes", id="pages-frame"),
    pytest.param(lambda: write_pages(arena(), ints(3, 16), pages(), pages(), T.BF16), "BF16 has no planes", id="pages-tier"),
    pytest.param(lambda: write_dense(arena(), ints(4, 3), ints(4), tokens(), tokens()), rf"int32 \[4, {DENSE}\]", id="dense-narrow"),
    pytest.param(lambda: write_dense(arena(), ints(2, DENSE), ints(4), tokens(), tokens()), rf"int32 \[4, {DENSE}\]", id="dense-fewer"),
    pytest.param(lambda: write_dense(arena(), ints(4, DENSE), ints(2), tokens(), tokens()), r"tokens are .*int32 \[4\]", id="dense-places"),
    pytest.param(lambda: write_dense(arena(), ints(4, DENSE), ints(4), tokens(), tokens(2)), "^v is", id="dense-values"),
    pytest.param(lambda: write_dense(arena(), ints(4, DENSE), ints(4), tokens(heads=4), tokens(heads=4)), "^k is", id="dense-heads"),
    pytest.param(
        lambda: write_dense(arena(), ints(4, DENSE), ints(4), tokens(), tokens(dtype=BFLOAT)), "one dtype for both", id="dense-dtypes"
    ),
    pytest.param(lambda: settle_pages(arena(), ints(2, DENSE), ints(1, 4), T.INT4, D, HALF), r"frames are .*\[2, 4\]", id="settle-fewer"),
    pytest.param(
        lambda: settle_pages(arena(), ints(2, 5), ints(2, 4), T.INT4, D, HALF), rf"source frames .*\[2, {DENSE}\]", id="settle-from"
    ),
    pytest.param(lambda: settle_pages(arena(), ints(2, DENSE), ints(2, 4), T.INT4, 128, HALF), "1184 bytes", id="settle-head-dim"),
    pytest.param(
        lambda: gather_pages(arena(), ints(3, 4), T.INT4, ints(2, 32, 1), ints(2, DENSE), D, HALF),
        r"picks are .*\[pages, 32, 2\]",
        id="picks",
    ),
    pytest.param(
        lambda: gather_pages(arena(), ints(3, 4), T.INT4, ints(2, 32, 2).long(), ints(2, DENSE), D, HALF), "torch.int64", id="picks-int64"
    ),
    pytest.param(
        lambda: gather_pages(arena(), ints(3, 4), T.INT4, ints(2, 32, 2), ints(1, DENSE), D, HALF),
        rf"frames are .*\[2, {DENSE}\]",
        id="picks-to",
    ),
    pytest.param(
        lambda: gather_pages(arena(), ints(3, 2), T.INT4, ints(2, 32, 2), ints(2, DENSE), D, HALF),
        r"source frames .*\[3, 4\]",
        id="picks-from",
    ),
    pytest.param(
        lambda: gather_pages(arena(), ints(0, 4), T.INT4, ints(2, 32, 2), ints(2, DENSE), D, HALF), "no source page", id="picks-nothing"
    ),
    pytest.param(
        lambda: gather_pages(arena(), ints(3, 0), T.EVICTED, ints(2, 32, 2), ints(2, DENSE), D, HALF), "EVICTED", id="picks-evicted"
    ),
    pytest.param(lambda: quant.decode(ints(1, 2, 1, FRAME_BYTES, dtype=torch.uint8), T.INT4, D), "of tier INT4", id="planes-missing"),
    pytest.param(lambda: quant.decode(ints(1, 4, 1, 640, dtype=torch.uint8), T.INT4, D), "608", id="planes-bytes"),
    pytest.param(lambda: quant.decode(ints(1, 16, 1, FRAME_BYTES, dtype=torch.uint8), T.BF16, D), "of tier BF16", id="planes-of-dense"),
]


@pytest.mark.parametrize("write, message", WRITES)
def test_writes_of_other_shapes_are_refused(write, message):
    with pytest.raises(ValueError, match=message):
        write()


def test_nothing_to_do_is_done():
    x = arena()
    before = x.clone()
    write_pages(x, ints(0, 4), pages(0), pages(0), T.INT4)
    write_dense(x, ints(0, DENSE), ints(0), tokens(0), tokens(0))
    settle_pages(x, ints(0, DENSE), ints(0, 4), T.INT4, D, HALF)
    gather_pages(x, ints(3, 4), T.INT4, ints(0, PAGE_SIZE, HEADS), ints(0, DENSE), D, HALF)
    assert torch.equal(x, before)
    nobody = PageTable((Segment(T.INT4, ints(0, PAGES, 4), ints(0)),), 0)
    for run in (decode, decode_kernel.decode_triton):
        out, lse = run(numbers(0, HEADS * GROUP, D), x, nobody, 1.0, dense_dtype=HALF)
        assert (out.shape, lse.shape) == ((0, HEADS * GROUP, D), (0, HEADS * GROUP))
    assert not len(extend(numbers(0, HEADS * GROUP, D), tokens(0), tokens(0), [0], x, nobody, 1.0, dense_dtype=HALF))


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


def test_the_interpreter_refuses_bfloat16_products(monkeypatch):
    monkeypatch.setattr(backend, "interpreting", lambda: True)
    q, k = numbers(1, HEADS * GROUP, D, dtype=BFLOAT), tokens(1, dtype=BFLOAT)
    with pytest.raises(ValueError, match="interpreter"):
        extend_kernel.extend_triton(q, k, k, [0, 1], arena(), PageTable((), 1), 1.0, dense_dtype=BFLOAT)
    with pytest.raises(ValueError, match="interpreter"):
        prefill_kernel.prefill_triton(q, k, k, ints(HEADS, 0), 1.0)


@pytest.mark.parametrize("scale", [math.nan, math.inf, -math.inf])
def test_scales_that_are_no_numbers(scale):
    with pytest.raises(ValueError, match="accepted: finite numbers"):
        arguments.ascending(numbers(1, 1, D), scale)
