"""The Triton column scores against their reference, on odd shapes, with outputs poisoned."""

import pytest
import torch

from kvstrata.ops.score import column_scores_ref
from kvstrata.ops.score_kernel import mass_triton
from tests.ops.kernel_cases import DEVICE, relative_error

CASES = [
    pytest.param(1, 1, 1, 64, 1, id="one-key"),
    pytest.param(64, 2, 4, 128, 389, id="ragged"),
    pytest.param(23, 2, 3, 80, 300, id="head-dim-80"),
    pytest.param(64, 1, 7, 64, 64, id="only-the-queries-own"),
    pytest.param(100, 3, 1, 96, 129, id="more-queries"),
    pytest.param(3, 1, 2, 64, 128 * 130 + 1, id="more-blocks-than-are-joined-at-a-time"),
]


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("queries, heads, group, head_dim, keys", CASES)
def test_the_triton_kernel_gives_what_the_reference_gives(queries, heads, group, head_dim, keys, masked, monkeypatch):
    gen = torch.Generator().manual_seed(keys)
    # heads outside and tokens inside, as a projection has them: neither is contiguous
    q, k = (
        torch.randn(h, n, head_dim, generator=gen).half().to(DEVICE).transpose(0, 1) for h, n in ((heads * group, queries), (heads, keys))
    )
    q = q * 3
    visible = (torch.rand(keys, heads, generator=gen) < 0.7).to(DEVICE) if masked else None
    if masked:
        # the first queries of a head see no key at all
        visible[: keys - queries + 2, 0] = False
    empty = torch.empty
    monkeypatch.setattr(torch, "empty", lambda *a, **o: empty(*a, **o).fill_(float("nan")))
    out = mass_triton(q, k, head_dim**-0.5, visible)
    monkeypatch.undo()
    ref = column_scores_ref(q, k, head_dim**-0.5, "mass", visible)
    assert out.dtype is torch.float32 and out.shape == (heads, keys)
    assert relative_error(out, ref.double()) < 1e-5 if ref.any() else not out.any()
    if masked:
        assert not out[~visible.T].any()
