"""The Triton kernel that reads pages whole gives the numbers of the codec, rounded once."""

import pytest
import torch

from kvstrata.ops.read import read_pages_ref
from kvstrata.ops.read_kernel import read_pages_triton
from kvstrata.types import Tier
from tests.ops.kernel_cases import make_case


@pytest.mark.parametrize("tier", [Tier.INT2, Tier.INT3, Tier.INT4, Tier.INT8])
@pytest.mark.parametrize("head_dim", [64, 80, 128])
def test_pages_are_those_of_the_reference(tier, head_dim, monkeypatch):
    case = make_case({tier: [5]}, 3, head_dim, dtype=torch.float16)
    frames = case.table.segments[0].frames[0, :5].flip(0)
    expected = read_pages_ref(case.arena, frames, tier, head_dim, torch.float16)
    empty = torch.empty
    monkeypatch.setattr(torch, "empty", lambda *a, **o: empty(*a, **o).fill_(float("nan")))
    got = read_pages_triton(case.arena, frames, tier, head_dim, torch.float16)
    for x, y in zip(got, expected, strict=True):
        assert x.shape == y.shape and torch.equal(x, y)
