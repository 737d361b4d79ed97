"""The extend kernel against float64 attention over the dequantized prefix and the chunk, and against its reference."""

import itertools
import math

import pytest
import torch

from kvstrata.ops.extend import extend_ref
from kvstrata.ops.extend_kernel import extend_triton
from kvstrata.ops.table import PageTable
from kvstrata.types import Tier
from tests.ops.kernel_cases import DEVICE, attention64, make_case, relative_error, rotate64

T = Tier


def expected(q, k, v, cu, case, scale):
    out = torch.empty(q.shape, dtype=torch.float64, device=q.device)
    for b, (start, end) in enumerate(itertools.pairwise(cu)):
        if start == end:
            continue
        n, h = end - start, k.shape[1]
        own = torch.arange(n, device=q.device)
        causal = (own[None, :] <= own[:, None])[..., None].expand(n, n, h)
        keys, values, mask = k[start:end].double(), v[start:end].double(), causal
        if case is not None:
            keys = torch.cat([case.k[b].double(), keys])
            values = torch.cat([rotate64(case.v[b].double()), values])
            mask = torch.cat([case.live[b][None].expand(n, -1, -1), causal], 1)
        out[start:end] = attention64(q[start:end], keys, values, mask, scale)[0]
    return out


CASES = [
    pytest.param({T.INT2: [3]}, [5], 1, 4, 64, {}, id="int2"),
    pytest.param({T.INT4: [1, 2]}, [40, 3], 1, 2, 64, {T.INT4: 1}, id="int4-ragged-live"),
    pytest.param({T.INT3: [2, 0], T.BF16: [1, 1]}, [0, 33], 2, 3, 80, {T.BF16: 2}, id="int3-bf16-80"),
    pytest.param({T.INT8: [1]}, [9], 1, 16, 128, {}, id="int8-sixteen-heads"),
    pytest.param({T.INT2: [1], T.INT4: [1]}, [4], 1, 1, 256, {}, id="head-dim-256"),
    pytest.param(None, [70, 1], 2, 5, 96, {}, id="no-pages"),
]


@pytest.mark.parametrize("counts, lengths, heads, group, head_dim, live", CASES)
def test_extend_kernel_matches_float64(counts, lengths, heads, group, head_dim, live):
    dtype = torch.float16
    gen = torch.Generator().manual_seed(3)
    cu = [0, *torch.tensor(lengths).cumsum(0).tolist()]
    q, k, v = (torch.randn(cu[-1], n, head_dim, generator=gen).to(dtype).to(DEVICE) for n in (heads * group, heads, heads))
    case = make_case(counts, heads, head_dim, live=live, dtype=dtype) if counts else None
    arena = case.arena if case else make_case({T.INT2: [1] * len(lengths)}, heads, head_dim).arena
    table = case.table if case else PageTable((), len(lengths))
    scale = 1 / math.sqrt(head_dim)
    out = extend_triton(q, k, v, cu, arena, table, scale, dense_dtype=dtype)
    assert relative_error(out, expected(q, k, v, cu, case, scale)) < 2e-3
    assert relative_error(out, extend_ref(q, k, v, cu, arena, table, scale, dense_dtype=dtype).double()) < 2e-3


@pytest.mark.parametrize("scale", [0.0, -0.2])
def test_scales_that_turn_the_order_of_scores_or_level_them(scale):
    """A score of what is dead or to come is -inf: times 0 it would be no number, times less the largest."""
    gen = torch.Generator().manual_seed(3)
    q, k, v = (torch.randn(8, n, 64, generator=gen).half().to(DEVICE) for n in (4, 2, 2))
    case = make_case({T.INT4: [2, 1], T.BF16: [1, 1]}, 2, 64, live={T.INT4: 1, T.BF16: 2}, dtype=torch.float16)
    out = extend_triton(q, k, v, [0, 5, 8], case.arena, case.table, scale, dense_dtype=torch.float16)
    assert relative_error(out, expected(q, k, v, [0, 5, 8], case, scale)) < 2e-3
