"""Shares in attention's output against attention computed anew without each key."""

import pytest
import torch

from kvstrata.ops.share import output_shares


def outputs(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float, there: torch.Tensor) -> torch.Tensor:
    """float64 [T, Hq, D], token by token; there [n, H]. A query that sees nothing has nothing: so does one whose only key is left out."""
    t, hq, d = q.shape
    n, h, _ = k.shape
    out = torch.zeros(t, hq, d, dtype=torch.float64)
    for i in range(t):
        for j in range(hq):
            head = j // (hq // h)
            rows = [r for r in range(n - t + i + 1) if there[r, head]]
            if rows:
                p = torch.softmax(k[rows, head].double() @ q[i, j].double() * scale, 0)
                out[i, j] = p @ v[rows, head].double()
    return out


@pytest.mark.parametrize(("t", "n", "hq", "h"), [(1, 9, 2, 1), (5, 12, 4, 2), (7, 7, 3, 3)])
@pytest.mark.parametrize("hidden", [0, 3])
def test_a_share_is_what_the_output_changes_by_without_the_key(t: int, n: int, hq: int, h: int, hidden: int) -> None:
    g = torch.Generator().manual_seed(t * n + hidden)
    q, k, v = torch.randn(t, hq, 8, generator=g), torch.randn(n, h, 8, generator=g), torch.randn(n, h, 8, generator=g)
    there = torch.ones(n, h, dtype=torch.bool)
    there[1 : 1 + hidden, 0] = False
    scale = 0.3
    full = outputs(q, k, v, scale, there)
    power = full.square().sum(-1).mean(0)  # [Hq]
    shares = output_shares(q, k, v, scale, there)
    for key in range(n):
        without = there.clone()
        without[key] = False
        seen = [i for i in range(t) if n - t + i >= key]
        change = (outputs(q, k, v, scale, without) - full).square().sum(-1)  # [T, Hq]
        for head in range(h):
            mine = range(head * hq // h, (head + 1) * hq // h)
            expected = sum(float((change[seen, j] / power[j]).sum()) for j in mine) / len(seen) if there[key, head] else 0.0
            # float32's rounding, times up to 1 / (1 - MOST_SHARE)²
            assert float(shares[head, key]) == pytest.approx(expected, rel=1e-3, abs=1e-7)


def test_a_key_that_has_all_attention_has_a_finite_share() -> None:
    q, k, v = torch.full((2, 1, 4), 50.0), torch.zeros(6, 1, 4), torch.randn(6, 1, 4)
    k[2] = 50.0
    shares = output_shares(q, k, v, 1.0)
    assert torch.isfinite(shares).all()
    assert shares[0].argmax() == 2
