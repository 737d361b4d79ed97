"""The decode kernel against float64 attention over the dequantized cache, and against its reference."""

import math

import pytest
import torch

from kvstrata.ops.decode import decode_ref
from kvstrata.ops.decode_kernel import decode_triton, make_workspace
from kvstrata.types import Tier
from tests.ops.kernel_cases import DEVICE, attention64, make_case, relative_error, rotate64

T = Tier


def expected(q, case, scale):
    outs, lses = [], []
    for b in range(q.shape[0]):
        out, lse = attention64(q[b : b + 1], case.k[b], case.v[b], case.live[b][None], scale)
        outs.append(rotate64(out))
        lses.append(lse)
    return torch.cat(outs), torch.cat(lses)


def poisoned(q, heads, parts):
    w = make_workspace(q, heads, parts=parts)
    for x in (w.part, w.stat, w.out, w.lse):
        x.fill_(math.nan)
    w.plan.fill_(1 << 30)
    return w


def check(counts, heads, group, head_dim, *, live=None, dtype=torch.bfloat16, parts=6, bound=2e-3):
    case = make_case(counts, heads, head_dim, live=live, dtype=dtype)
    batch = len(next(iter(counts.values())))
    q = torch.randn(batch, heads * group, head_dim, generator=torch.Generator().manual_seed(1)).to(dtype).to(DEVICE)
    scale = 1 / math.sqrt(head_dim)
    w = poisoned(q, heads, parts)
    out, lse = decode_triton(q, case.arena, case.table, scale, dense_dtype=dtype, workspace=w)
    ref, ref_lse = expected(q, case, scale)
    # an output in bfloat16 is rounded by up to 2**-9 of itself
    rounding = 2e-3 if dtype is torch.bfloat16 else 3e-4
    assert relative_error(out, ref) < bound + rounding
    assert torch.allclose(lse.double(), ref_lse, atol=3e-3, rtol=1e-4)
    same, same_lse = decode_ref(q, case.arena, case.table, scale, dense_dtype=dtype)
    assert relative_error(out, same.double()) < bound + 2 * rounding
    assert torch.allclose(lse, same_lse, atol=3e-3, rtol=1e-4)


SHAPES = [
    pytest.param({T.INT2: [3]}, 1, 4, 128, {}, id="int2"),
    pytest.param({T.INT3: [3]}, 1, 4, 128, {}, id="int3"),
    pytest.param({T.INT4: [3]}, 1, 4, 128, {}, id="int4"),
    pytest.param({T.INT8: [2]}, 1, 4, 128, {}, id="int8"),
    pytest.param({T.BF16: [2]}, 1, 4, 128, {}, id="bf16"),
    pytest.param({T.INT2: [0, 5], T.INT4: [1, 0]}, 2, 1, 64, {}, id="ragged-64"),
    pytest.param({T.INT2: [2, 1], T.INT3: [1, 0], T.BF16: [1, 2]}, 2, 7, 64, {T.INT2: 2, T.BF16: 2}, id="live-a-head"),
    pytest.param({T.INT4: [1, 3]}, 1, 16, 64, {T.INT4: 1}, id="sixteen-heads"),
    pytest.param({T.INT3: [2], T.BF16: [1]}, 1, 9, 80, {T.INT3: 1}, id="head-dim-80"),
    pytest.param({T.INT4: [2], T.BF16: [1]}, 1, 3, 96, {T.BF16: 1}, id="head-dim-96"),
    pytest.param({T.INT2: [1], T.INT8: [1], T.BF16: [1]}, 1, 8, 256, {T.INT8: 1}, id="head-dim-256"),
]


@pytest.mark.parametrize("counts, heads, group, head_dim, live", SHAPES)
def test_decode_kernel_matches_float64(counts, heads, group, head_dim, live):
    check(counts, heads, group, head_dim, live=live, dtype=torch.float16)


def test_decode_kernel_walks_many_pages_in_one_program():
    check({T.INT2: [9], T.INT4: [7]}, 1, 4, 64, dtype=torch.float16, parts=2)


def test_a_sequence_without_a_live_token_gives_zeros():
    case = make_case({T.INT2: [2, 0]}, 1, 64, live={T.INT2: 1})
    case.table.segments[0].live.zero_()
    q = torch.ones(2, 2, 64, dtype=torch.float16, device=DEVICE)
    out, lse = decode_triton(q, case.arena, case.table, 0.1, dense_dtype=torch.float16, workspace=poisoned(q, 1, 6))
    assert (out == 0).all()
    assert (lse == -math.inf).all()


@pytest.mark.parametrize(
    "group, head_dim, dtype, name",
    [(17, 64, torch.float16, "query heads"), (1, 72, torch.float16, "head_dim"), (1, 64, torch.float32, "float32")],
)
def test_what_the_kernel_cannot_do_is_refused_by_name(group, head_dim, dtype, name):
    case = make_case({T.INT2: [1]}, 1, 64)
    q = torch.zeros(1, group, head_dim, dtype=dtype, device=DEVICE)
    with pytest.raises(ValueError, match=name):
        decode_triton(q, case.arena, case.table, 1.0, dense_dtype=torch.float16)


@pytest.mark.gpu
def test_a_cuda_graph_replays_with_changed_counts_and_queries():
    heads, group, head_dim = 2, 4, 128
    counts = {T.INT2: [40, 3], T.INT4: [5, 17], T.BF16: [2, 1]}
    case = make_case(counts, heads, head_dim, live={T.BF16: heads})
    q = torch.randn(2, heads * group, head_dim, dtype=torch.bfloat16, device=DEVICE)
    w = make_workspace(q, heads)
    run = lambda: decode_triton(q, case.arena, case.table, 0.1, dense_dtype=torch.bfloat16, workspace=w)  # noqa: E731
    run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    for shrink in (0, 1, 2):
        for s in case.table.segments:
            s.counts.copy_((s.counts - shrink).clamp(min=0))
        q.normal_()
        for x in (w.out, w.lse, w.part, w.stat):
            x.fill_(math.nan)
        graph.replay()
        ref, ref_lse = decode_ref(q, case.arena, case.table, 0.1, dense_dtype=torch.bfloat16)
        assert relative_error(w.out, ref.double()) < 6e-3
        assert torch.allclose(w.lse, ref_lse, atol=5e-3, rtol=1e-3)
