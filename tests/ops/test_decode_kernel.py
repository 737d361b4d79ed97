"""The decode kernels (Triton; CUDA C++, which needs a GPU) against float64 attention over the dequantized cache, and their reference."""

import functools
import math

import pytest
import torch

from kvstrata.ops import decode_cuda, decode_kernel
from kvstrata.ops.decode import decode_ref
from kvstrata.types import Tier
from tests.ops.kernel_cases import DEVICE, attention64, make_case, relative_error, rotate64

T = Tier
RUN = {"triton": decode_kernel.decode_triton, "cuda": decode_cuda.decode_cuda}


def expected(q, case, scale):
    outs, lses = [], []
    for b in range(q.shape[0]):
        out, lse = attention64(q[b : b + 1], case.k[b], case.v[b], case.live[b][None], scale)
        outs.append(rotate64(out))
        lses.append(lse)
    return torch.cat(outs), torch.cat(lses)


def poison(w):
    for x in (w.part, w.stat, w.out, w.lse):
        x.fill_(math.nan)


def poisoned(kernel, q, heads, parts):
    if kernel == "cuda":
        w = decode_cuda.make_workspace(q, heads, parts)
    else:
        w = decode_kernel.make_workspace(q, heads, parts=parts)
        w.plan.fill_(1 << 30)
    poison(w)
    return w


def check(kernel, counts, heads, group, head_dim, *, live=None, dtype=torch.bfloat16, q_dtype=None, parts=6, bound=2e-3):
    case = make_case(counts, heads, head_dim, live=live, dtype=dtype)
    batch = len(next(iter(counts.values())))
    q_dtype = q_dtype or dtype
    q = torch.randn(batch, heads * group, head_dim, generator=torch.Generator().manual_seed(1)).to(q_dtype).to(DEVICE)
    scale = 1 / math.sqrt(head_dim)
    w = poisoned(kernel, q, heads, parts)
    out, lse = RUN[kernel](q, case.arena, case.table, scale, dense_dtype=dtype, workspace=w)
    ref, ref_lse = expected(q, case, scale)
    # an output in bfloat16 is rounded by up to 2**-9 of itself
    rounding = 2e-3 if q_dtype is torch.bfloat16 else 3e-4
    assert relative_error(out, ref) < bound + rounding
    assert torch.allclose(lse.double(), ref_lse, atol=3e-3, rtol=1e-4)
    same, same_lse = decode_ref(q, case.arena, case.table, scale, dense_dtype=dtype)
    assert relative_error(out, same.double()) < bound + 2 * rounding
    assert torch.allclose(lse, same_lse, atol=3e-3, rtol=1e-4)


def both(*cases):
    """Each case for each kernel that has it. A case: (counts, heads, group, head_dim, live, id)."""
    out = []
    for *values, name in cases:
        out.append(pytest.param("triton", *values, id=f"triton-{name}"))
        if values[3] in decode_cuda.HEAD_DIMS and values[2] <= decode_cuda.MAX_GROUP:
            out.append(pytest.param("cuda", *values, id=f"cuda-{name}", marks=pytest.mark.gpu))
    return out


SHAPES = both(
    ({T.INT2: [3]}, 1, 4, 128, {}, "int2"),
    ({T.INT3: [3]}, 1, 4, 128, {}, "int3"),
    ({T.INT4: [3]}, 1, 4, 128, {}, "int4"),
    ({T.INT8: [2]}, 1, 4, 128, {}, "int8"),
    ({T.BF16: [2]}, 1, 4, 128, {}, "bf16"),
    ({T.INT2: [0, 5], T.INT4: [1, 0]}, 2, 1, 64, {}, "ragged-64"),
    ({T.INT2: [2, 1], T.INT3: [1, 0], T.BF16: [1, 2]}, 2, 7, 64, {T.INT2: 2, T.BF16: 2}, "live-a-head"),
    ({T.INT4: [1, 3]}, 1, 16, 64, {T.INT4: 1}, "sixteen-heads"),
    ({T.INT3: [2], T.BF16: [1]}, 1, 9, 80, {T.INT3: 1}, "head-dim-80"),
    ({T.INT4: [2], T.BF16: [1]}, 1, 3, 96, {T.BF16: 1}, "head-dim-96"),
    ({T.INT2: [1], T.INT8: [1], T.BF16: [1]}, 1, 8, 256, {T.INT8: 1}, "head-dim-256"),
)
BIGGER = both(
    ({T.INT2: [70, 0, 0, 3, 9], T.INT4: [5, 0, 17, 2, 1]}, 1, 4, 128, {T.INT2: 1}, "blocks-span-sequences"),
    ({T.INT2: [40, 3], T.INT3: [9, 31], T.INT4: [5, 17], T.INT8: [3, 6], T.BF16: [9, 1]}, 2, 8, 128, {T.BF16: 2, T.INT2: 1}, "every-tier"),
    (
        {T.INT2: [40, 3], T.INT3: [9, 31], T.INT4: [5, 17], T.INT8: [3, 6], T.BF16: [9, 1]},
        2,
        5,
        64,
        {T.BF16: 1, T.INT3: 2},
        "every-tier-64",
    ),
    ({T.INT3: [1] * 200}, 2, 2, 64, {}, "many-sequences"),
)


@pytest.mark.parametrize("kernel, counts, heads, group, head_dim, live", SHAPES)
def test_decode_kernel_matches_float64(kernel, counts, heads, group, head_dim, live):
    check(kernel, counts, heads, group, head_dim, live=live, dtype=torch.float16)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("kernel, counts, heads, group, head_dim, live", BIGGER)
def test_decode_kernel_matches_float64_over_many_parts(kernel, counts, heads, group, head_dim, live, dtype):
    check(kernel, counts, heads, group, head_dim, live=live, dtype=dtype, parts=7)


@pytest.mark.gpu
@pytest.mark.parametrize("kernel", RUN)
def test_queries_may_have_another_type_than_dense_pages(kernel):
    check(kernel, {T.INT4: [2, 9], T.BF16: [1, 2]}, 2, 4, 128, dtype=torch.float16, q_dtype=torch.bfloat16)


@pytest.mark.parametrize("kernel", ["triton", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_decode_kernel_walks_many_pages_in_one_program(kernel):
    check(kernel, {T.INT2: [9], T.INT4: [7]}, 1, 4, 64, dtype=torch.float16, parts=2)


@pytest.mark.parametrize("kernel", ["triton", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_a_sequence_without_a_live_token_gives_zeros(kernel):
    case = make_case({T.INT2: [2, 0]}, 1, 64, live={T.INT2: 1})
    case.table.segments[0].live.zero_()
    q = torch.ones(2, 2, 64, dtype=torch.float16, device=DEVICE)
    out, lse = RUN[kernel](q, case.arena, case.table, 0.1, dense_dtype=torch.float16, workspace=poisoned(kernel, q, 1, 6))
    assert (out == 0).all()
    assert (lse == -math.inf).all()


@pytest.mark.gpu
@pytest.mark.parametrize("kernel", RUN)
def test_logits_that_grow_page_by_page_keep_their_precision(kernel):
    """Every page raises the largest logit, far beyond what fp16 holds of the first ones."""
    case = make_case({T.BF16: [12], T.INT4: [12]}, 1, 128, dtype=torch.float16)
    q = torch.randn(1, 4, 128, generator=torch.Generator().manual_seed(1)).half().to(DEVICE)
    for scale in (0.0, 1e-3, 1.0, 8.0, -1.0):
        w = poisoned(kernel, q, 1, 1)
        out, lse = RUN[kernel](q, case.arena, case.table, scale, dense_dtype=torch.float16, workspace=w)
        ref, ref_lse = expected(q, case, scale)
        # logits are off by a share of their size, and the output by as much
        assert relative_error(out, ref) < 2e-3 + 0.02 * abs(scale)
        assert torch.allclose(lse.double(), ref_lse, atol=1e-2, rtol=1e-3)


@pytest.mark.parametrize(
    "group, head_dim, dtype, name",
    [(17, 64, torch.float16, "query heads"), (1, 72, torch.float16, "head_dim"), (1, 64, torch.float32, "float32")],
)
@pytest.mark.parametrize("kernel", RUN)
def test_what_a_kernel_cannot_do_is_refused_by_name(kernel, group, head_dim, dtype, name):
    case = make_case({T.INT2: [1]}, 1, 64)
    q = torch.zeros(1, group, head_dim, dtype=dtype, device=DEVICE)
    with pytest.raises(ValueError, match=name):
        RUN[kernel](q, case.arena, case.table, 1.0, dense_dtype=torch.float16)


@pytest.mark.gpu
@pytest.mark.parametrize("kernel", RUN)
def test_a_cuda_graph_replays_with_changed_counts_and_queries(kernel):
    heads, group, head_dim = 2, 4, 128
    counts = {T.INT2: [40, 3], T.INT4: [5, 17], T.BF16: [2, 1]}
    case = make_case(counts, heads, head_dim, live={T.BF16: heads})
    q = torch.randn(2, heads * group, head_dim, dtype=torch.bfloat16, device=DEVICE)
    w = (decode_cuda if kernel == "cuda" else decode_kernel).make_workspace(q, heads)
    run = functools.partial(RUN[kernel], q, case.arena, case.table, 0.1, dense_dtype=torch.bfloat16, workspace=w)
    run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    for shrink in (0, 1, 2):
        for s in case.table.segments:
            s.counts.copy_((s.counts - shrink).clamp(min=0))
        q.normal_()
        poison(w)
        graph.replay()
        ref, ref_lse = decode_ref(q, case.arena, case.table, 0.1, dense_dtype=torch.bfloat16)
        assert relative_error(w.out, ref.double()) < 6e-3
        assert torch.allclose(w.lse, ref_lse, atol=5e-3, rtol=1e-3)
