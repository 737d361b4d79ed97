"""The extend kernel in CUDA C++: compiled without a GPU and looked at; with one, against float64 attention and the reference."""

import itertools
import math
import re
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from kvstrata.ops import backend, extend_cuda, extend_tiles, frame, quant
from kvstrata.ops.extend import extend, extend_ref
from kvstrata.ops.table import PageTable
from kvstrata.types import Tier
from tests.ops import test_extend_kernel
from tests.ops.cubin import inspect
from tests.ops.kernel_cases import DEVICE, make_case, relative_error

T = Tier
HALF, BFLOAT = torch.float16, torch.bfloat16


def usage_and_code(head_dim, dtype):
    """What cuobjdump says of a variant's resources, and its instructions."""
    return inspect("extend", extend_cuda.options(head_dim, dtype), "-res-usage", "-sass")


def test_each_variant_compiles_without_spills_at_its_register_cap():
    variants = [(d, dtype) for d in extend_cuda.HEAD_DIMS for dtype in (HALF, BFLOAT)]
    with ThreadPoolExecutor() as pool:
        found = list(pool.map(usage_and_code, *zip(*variants, strict=True)))
    for (head_dim, _), (usage, code) in zip(variants, found, strict=True):
        # 384 threads share 65,536 registers; a stack would be a spill or an array that is indexed at run time
        registers, stacks = (list(map(int, re.findall(rf"{name}:(\d+)", usage))) for name in ("REG", "STACK"))
        assert max(registers) == 168
        assert stacks == [0, 0]
        assert code.count("USETMAXREG") == 2
        # three walks, each with a first and a last tile outside its loop: scores over head_dim, sums over 128 keys
        assert code.count("HGMMA") == 3 * 2 * (head_dim // 16 + 128 // 16)


def test_shared_memory_fits_a_multiprocessor():
    assert max(map(extend_cuda.shared_bytes, extend_cuda.HEAD_DIMS)) <= 227 << 10


@pytest.mark.parametrize("rows_per_token", [1, 5])
def test_tiles_cover_each_row_once_the_longest_first(rows_per_token):
    lengths, starts = [70, 0, 300], [0, 70, 70, 370]
    tiles = extend_tiles.tiles(starts, 128, rows_per_token)
    rows = [(b, row) for b, _, tokens, first in tiles for row in range(first, min(first + 128, tokens * rows_per_token))]
    assert sorted(rows) == [(b, row) for b, n in enumerate(lengths) for row in range(n * rows_per_token)]
    assert all(first_row == starts[b] and tokens == lengths[b] for b, first_row, tokens, _ in tiles)
    assert [t[3] for t in tiles] == sorted((t[3] for t in tiles), reverse=True)


def test_keys_are_split_where_programs_are_few_only():
    assert extend_cuda._splits(512, 264, 132) == 1
    assert extend_cuda._splits(128, 264, 132) == 1
    assert extend_cuda._splits(8, 7, 132) == 1
    assert extend_cuda._splits(16, 256, 132) == 8
    assert extend_cuda._splits(1, 1000, 132) == extend_cuda.MAX_SPLITS
    assert extend_cuda._splits(140, 1000, 132) > 1


def test_shapes_of_other_kernels_are_refused():
    arena = torch.zeros(1, 1, 704, dtype=torch.uint8)
    q, k = torch.zeros(1, 1, 96, dtype=HALF), torch.zeros(1, 1, 96, dtype=HALF)
    with pytest.raises(ValueError, match="head_dim"):
        extend_cuda.extend_cuda(q, k, k, [0, 1], torch.zeros(1, 1, 896, dtype=torch.uint8), PageTable((), 1), 1.0, dense_dtype=HALF)
    assert not extend_cuda.accepts(q, arena, HALF)
    assert not extend_cuda.accepts(torch.zeros(1, 1, 64, dtype=HALF), arena, BFLOAT)
    assert not extend_cuda.accepts(torch.zeros(1, 1, 64), arena, torch.float32)


def test_extend_takes_this_kernel_where_it_runs_and_does_the_shape(monkeypatch):
    monkeypatch.setattr(backend, "use_cuda", lambda q: True)
    monkeypatch.setattr(extend_cuda, "extend_cuda", lambda *_, **__: "cuda")
    table = PageTable((), 1)
    for head_dim, decode_pages, taken in ((64, quant.decode, True), (80, quant.decode, False), (64, lambda *_: None, False)):
        q, arena = torch.ones(2, 1, head_dim, dtype=HALF), torch.zeros(1, 1, frame.frame_bytes(head_dim), dtype=torch.uint8)
        out = extend(q, q, q, [0, 2], arena, table, 1.0, dense_dtype=HALF, decode_pages=decode_pages)
        assert (out == "cuda") if taken else torch.equal(out, q)


@pytest.mark.parametrize("scale", [0.2, 0.0, -0.2])
def test_the_kernel_is_given_a_scale_above_zero(scale, monkeypatch):
    """It masks and compares scores before it scales them."""
    given = []
    monkeypatch.setattr(extend_cuda.cuda, "kernel", lambda *_: lambda grid, threads, values: given.append(values))
    monkeypatch.setattr(extend_cuda, "_multiprocessors", lambda device: 132)
    q = torch.randn(3, 2, 64).half()
    extend_cuda.extend_cuda(
        q, q, q, [0, 3], torch.zeros(1, 2, frame.frame_bytes(64), dtype=torch.uint8), PageTable((), 1), scale, dense_dtype=HALF
    )
    (values,) = given
    (passed,) = (x for x in values if isinstance(x, float))
    assert passed > 0
    torch.testing.assert_close(values[0] * passed, q * scale * math.log2(math.e))


ALL = {T.INT8: [5, 0], T.BF16: [1, 3], T.INT4: [4, 1], T.INT3: [0, 2], T.INT2: [9, 6]}
LIVE = {T.INT8: 1, T.BF16: 2, T.INT4: 2, T.INT2: 1}
OWN_CASES = [
    pytest.param(None, [300, 1, 0, 129], 2, 4, 128, {}, id="no-pages-128"),
    pytest.param({T.INT2: [9]}, [128], 1, 4, 128, {}, id="int2-128"),
    pytest.param({T.INT3: [8]}, [50], 2, 2, 128, {}, id="int3-128"),
    pytest.param({T.INT4: [5]}, [200], 2, 1, 128, {}, id="int4-128"),
    pytest.param({T.BF16: [11]}, [33], 2, 3, 128, {}, id="bf16-128"),
    pytest.param({T.BF16: [3]}, [33], 2, 3, 64, {T.BF16: 2}, id="bf16-live-64"),
    pytest.param(ALL, [270, 37], 2, 5, 128, LIVE, id="all-tiers-live-128"),
    pytest.param(ALL, [37, 270], 2, 7, 64, LIVE, id="all-tiers-live-64"),
]
CASES = [c for c in test_extend_kernel.CASES if c.values[4] in extend_cuda.HEAD_DIMS] + OWN_CASES


def inputs(lengths, heads, group, head_dim, dtype):
    gen = torch.Generator().manual_seed(3)
    cu = [0, *torch.tensor(lengths).cumsum(0).tolist()]
    return cu, *(torch.randn(cu[-1], n, head_dim, generator=gen).to(dtype).to(DEVICE) for n in (heads * group, heads, heads))


@pytest.mark.gpu
@pytest.mark.parametrize("splits", [1, 3])
@pytest.mark.parametrize("dtype, bound", [(HALF, 2e-3), (BFLOAT, 6e-3)], ids=["fp16", "bf16"])
@pytest.mark.parametrize("counts, lengths, heads, group, head_dim, live", CASES)
def test_extend_cuda_matches_float64(counts, lengths, heads, group, head_dim, live, dtype, bound, splits, monkeypatch):
    monkeypatch.setattr(extend_cuda, "_splits", lambda *_: splits)
    cu, q, k, v = inputs(lengths, heads, group, head_dim, dtype)
    case = make_case(counts, heads, head_dim, live=live, dtype=dtype) if counts else None
    arena = case.arena if case else make_case({T.INT2: [1] * len(lengths)}, heads, head_dim).arena
    table = case.table if case else PageTable((), len(lengths))
    scale = 1 / math.sqrt(head_dim)
    out = extend_cuda.extend_cuda(q, k, v, cu, arena, table, scale, dense_dtype=dtype)
    assert relative_error(out, test_extend_kernel.expected(q, k, v, cu, case, scale)) < bound
    assert relative_error(out, extend_ref(q, k, v, cu, arena, table, scale, dense_dtype=dtype).double()) < bound


@pytest.mark.gpu
def test_views_and_unrotated_values_and_large_scores():
    cu, q, k, v = inputs([40, 60], 2, 4, 128, BFLOAT)
    q = q * 30
    case = make_case({T.INT4: [6, 2]}, 2, 128)
    kv = torch.stack([k, v], 1)
    for rotated in (True, False):
        run = {"dense_dtype": BFLOAT, "rotated": rotated}
        ref = extend_ref(q, k, v, cu, case.arena, case.table, 0.1, **run)
        out = extend_cuda.extend_cuda(q, kv[:, 0], kv[:, 1], cu, case.arena, case.table, 0.1, **run)
        assert relative_error(out, ref.double()) < 1e-2
        halves = torch.stack([q, q], -1)[..., 0]
        assert torch.equal(extend_cuda.extend_cuda(halves, k, v, cu, case.arena, case.table, 0.1, **run), out)


@pytest.mark.gpu
@pytest.mark.parametrize("splits", [1, 2])
@pytest.mark.parametrize("scale", [0.0, -0.1])
def test_scales_that_turn_the_order_of_scores_or_level_them(scale, splits, monkeypatch):
    monkeypatch.setattr(extend_cuda, "_splits", lambda *_: splits)
    cu, q, k, v = inputs([70, 30], 2, 4, 128, BFLOAT)
    case = make_case({T.INT4: [6, 2], T.BF16: [1, 1]}, 2, 128, live={T.INT4: 1, T.BF16: 2})
    out = extend_cuda.extend_cuda(q, k, v, cu, case.arena, case.table, scale, dense_dtype=BFLOAT)
    assert relative_error(out, test_extend_kernel.expected(q, k, v, cu, case, scale)) < 6e-3


@pytest.mark.gpu
def test_a_long_prefix_is_attended_the_same_each_time_and_by_dispatch():
    cu, q, k, v = inputs([700], 2, 4, 128, HALF)
    case = make_case({T.INT2: [150], T.INT4: [33], T.BF16: [3]}, 2, 128, dtype=HALF)
    assert extend_cuda._splits(44, 52, 132) > 1
    run = {"dense_dtype": HALF}
    outs = [extend(q, k, v, cu, case.arena, case.table, 0.09, **run) for _ in range(3)]
    assert all(torch.equal(a, b) for a, b in itertools.pairwise(outs))
    assert torch.equal(outs[0], extend_cuda.extend_cuda(q, k, v, cu, case.arena, case.table, 0.09, **run))
    assert relative_error(outs[0], test_extend_kernel.expected(q, k, v, cu, case, 0.09)) < 2e-3
