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
