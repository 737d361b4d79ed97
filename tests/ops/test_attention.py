"""Decode, extend and merge, as references: against float64 attention over what the pages decode to."""

import math
from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from kvstrata.ops import dense, frame, quant
from kvstrata.ops.codecs import make_codec
from kvstrata.ops.decode import decode_ref
from kvstrata.ops.extend import extend_ref
from kvstrata.ops.merge import merge
from kvstrata.ops.table import PageTable, Segment
from kvstrata.ops.write import write_dense, write_pages
from kvstrata.types import PAGE_SIZE, Tier

Known = tuple[Tensor, Tensor, Tensor]
"""Of one sequence: k, v [S, H, D] float64, live bool [S, H]."""


class Batch:
    """A poisoned arena with pages of random tiers, and what attention over them must see."""

    def __init__(self, counts: list[dict[Tier, int]], h: int, d: int, *, masked: bool, dtype: torch.dtype = torch.float32) -> None:
        g = torch.Generator().manual_seed(7)
        self.dtype, size = dtype, frame.frame_bytes(d)
        per_page = {t: dense.num_frames(d, dtype.itemsize, size) if t is Tier.BF16 else t.value for c in counts for t in c}
        total = sum(n * per_page[t] for c in counts for t, n in c.items())
        self.arena = torch.full((total + 1, h, size), 0xFF, dtype=torch.uint8)
        ids = (torch.randperm(total, generator=g) + 1).int()
        self.known: list[Known] = []
        segments = {}
        for tier, n in per_page.items():
            most = max(c.get(tier, 0) for c in counts)
            live = torch.randint(-(2**31), 2**31, (len(counts), most, h), generator=g).int() if masked else None
            segments[tier] = Segment(
                tier,
                torch.zeros(len(counts), most, n, dtype=torch.int32),
                torch.tensor([c.get(tier, 0) for c in counts], dtype=torch.int32),
                live,
            )
        for b, c in enumerate(counts):
            parts: list[Known] = []
            for tier, pages in c.items():
                if not pages:
                    continue
                s = segments[tier]
                s.frames[b, :pages] = ids[: pages * per_page[tier]].view(pages, -1)
                ids = ids[pages * per_page[tier] :]
                k = (torch.randn(pages, PAGE_SIZE, h, d, generator=g) * torch.linspace(0.3, 2, d)).to(dtype)
                v = torch.randn(pages, PAGE_SIZE, h, d, generator=g).to(dtype)
                frames = s.frames[b, :pages]
                if tier is Tier.BF16:
                    page = torch.arange(pages).repeat_interleave(PAGE_SIZE)
                    token = torch.arange(PAGE_SIZE, dtype=torch.int32).repeat(pages)
                    write_dense(self.arena, frames[page], token, k.flatten(0, 1), v.flatten(0, 1))
                else:
                    write_pages(self.arena, frames, k, v, tier)
                    k, v = quant.decode(self.arena[frames.long()], tier, d)
                bits = torch.ones(pages, PAGE_SIZE, h, dtype=torch.bool)
                if s.live is not None:
                    bits = (s.live[b, :pages, None, :] >> torch.arange(PAGE_SIZE)[:, None]) & 1 == 1
                parts.append((k.double().flatten(0, 1), (v.double() @ quant.hadamard(d).double()).flatten(0, 1), bits.flatten(0, 1)))
            empty = (torch.zeros(0, h, d).double(), torch.zeros(0, h, d).double(), torch.zeros(0, h).bool())
            self.known.append(tuple(torch.cat(x) for x in zip(empty, *parts, strict=True)))  # type: ignore[arg-type]
        self.table = PageTable(tuple(segments.values()), len(counts))


def attention(q: Tensor, k: Tensor, v: Tensor, seen: Tensor, scale: float) -> Tensor:
    """float64: q [T, Hq, D], k, v [S, H, D], seen bool [T, S, H] -> [T, Hq, D]; 0 where nothing is seen."""
    group = q.shape[1] // k.shape[1]
    k, v, seen = (x.repeat_interleave(group, -2 if x.ndim == 3 and x.dtype != torch.bool else -1) for x in (k, v, seen))
    scores = torch.einsum("thd,shd->ths", q.double(), k) * scale
    p = torch.softmax(scores.masked_fill(~seen.transpose(1, 2), -math.inf), -1).nan_to_num(0.0)
    return torch.einsum("ths,shd->thd", p, v)


TIERS = {Tier.BF16: 2, Tier.INT2: 3, Tier.INT3: 1, Tier.INT4: 40, Tier.INT8: 2}


@pytest.mark.parametrize("head_dim", [64, 80, 96, 128, 256])
@pytest.mark.parametrize(("h", "group"), [(1, 1), (2, 3), (2, 7)])
@pytest.mark.parametrize("masked", [False, True])
def test_decode_sees_every_live_token_of_a_ragged_batch_once(head_dim: int, h: int, group: int, masked: bool) -> None:
    batch = Batch([TIERS, {}, {Tier.INT2: 1}, {Tier.BF16: 1, Tier.INT4: 5}], h, head_dim, masked=masked)
    q = torch.randn(4, h * group, head_dim)
    out, lse = decode_ref(q, batch.arena, batch.table, 0.11, dense_dtype=torch.float32)
    for b, (k, v, live) in enumerate(batch.known):
        expected = attention(q[b : b + 1], k, v, live[None], 0.11)[0]
        assert (out[b] - expected).norm() <= 1e-5 * expected.norm()
        scores = torch.einsum("hgd,shd->hgs", q[b].view(h, group, -1).double(), k) * 0.11
        expected_lse = scores.masked_fill(~live.T[:, None], -math.inf).logsumexp(-1).flatten()
        assert torch.allclose(lse[b].double(), expected_lse, atol=1e-4)
    assert (out[1] == 0).all()
    assert (lse[1] == -math.inf).all()


@pytest.mark.parametrize("chunks", [[1, 1, 1], [5, 0, 3], [1, 300, 33], [1100, 2, 1]])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_extend_is_causal_in_the_chunk_and_sees_all_that_is_stored(chunks: list[int], dtype: torch.dtype) -> None:
    h, group, d = 2, 3, 64
    batch = Batch([{Tier.INT4: 3, Tier.BF16: 1}, {Tier.INT2: 2}, {}], h, d, masked=True, dtype=dtype)
    cu = [0, *torch.tensor(chunks).cumsum(0).tolist()]
    q, k, v = (torch.randn(cu[-1], n, d).to(dtype) for n in (h * group, h, h))
    out = extend_ref(q, k, v, cu, batch.arena, batch.table, 0.2, dense_dtype=dtype)
    for (start, end), (k_old, v_old, live) in zip(pairwise(cu), batch.known, strict=True):
        n = end - start
        if n:
            seen = torch.cat([live[None].expand(n, -1, -1), torch.ones(n, n).tril().bool()[:, :, None].expand(-1, -1, h)], 1)
            k_all, v_all = torch.cat([k_old, k[start:end].double()]), torch.cat([v_old, v[start:end].double()])
            expected = attention(q[start:end], k_all, v_all, seen, 0.2)
            assert (out[start:end] - expected).norm() <= (1e-5 if dtype is torch.float32 else 6e-3) * expected.norm()


def test_attention_reads_the_other_codecs_too() -> None:
    for name in ("kivi", "triaxial", "hyquant", "fp8", "int8"):
        codec = make_codec(name)
        tier = codec.tiers[-1]
        k, v = torch.randn(3, 32, 2, 64), torch.randn(3, 32, 2, 64)
        n = codec.num_frames(tier, 64)
        arena = torch.full((3 * n + 1, 2, codec.frame_bytes(64)), 0xFF, dtype=torch.uint8)
        frames = (torch.randperm(3 * n) + 1).int().view(3, n)
        write_pages(arena, frames, k, v, tier, encode=codec.encode)
        table = PageTable((Segment(tier, frames[None], torch.tensor([3], dtype=torch.int32)),), 1)
        q = torch.randn(1, 4, 64)
        out, _ = decode_ref(q, arena, table, 0.125, dense_dtype=torch.bfloat16, rotated=False, decode_pages=codec.decode)
        k_hat, v_hat = (x.double().flatten(0, 1) for x in codec.decode(arena[frames.long()], tier, 64))
        expected = attention(q, k_hat, v_hat, torch.ones(1, 96, 2).bool(), 0.125)
        assert (out - expected).norm() <= 1e-5 * expected.norm(), name


@given(st.data())
def test_merge_is_associative_commutative_and_minus_infinity_is_its_zero(data: st.DataObject) -> None:
    seed = data.draw(st.integers(0, 10_000))
    parts = data.draw(st.integers(2, 5))
    torch.manual_seed(seed)
    outs, lses = torch.randn(parts, 3, 2, 8), torch.randn(parts, 3, 2) * 20
    lses[torch.rand(parts, 3, 2) < 0.3] = -math.inf
    outs[lses == -math.inf] = float("nan")
    out, lse = merge(outs, lses)
    order = torch.randperm(parts)
    swapped, swapped_lse = merge(outs[order], lses[order])
    cut = data.draw(st.integers(1, parts - 1))
    left, right = merge(outs[:cut], lses[:cut]), merge(outs[cut:], lses[cut:])
    nested, nested_lse = merge(torch.stack([left[0], right[0]]), torch.stack([left[1], right[1]]))
    for other, other_lse in ((swapped, swapped_lse), (nested, nested_lse)):
        assert torch.allclose(out, other, atol=1e-5)
        assert torch.allclose(lse, other_lse, atol=1e-4)
    dead = (lses == -math.inf).all(0)
    assert (out[dead] == 0).all()
    assert (lse[dead] == -math.inf).all()
    assert torch.isfinite(out).all()


def test_peak_extra_memory_is_bounded_by_a_tile() -> None:
    """Attention over 300 pages holds no more in floating point than over 150."""
    tracker: list[int] = []
    for pages in (150, 500):
        batch = Batch([{Tier.INT4: pages}], 2, 64, masked=False)
        q = torch.randn(1, 4, 64)
        largest = 0

        class Watch(torch.utils._python_dispatch.TorchDispatchMode):
            def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
                nonlocal largest
                out = func(*args, **(kwargs or {}))
                for x in out if isinstance(out, tuple | list) else (out,):
                    if isinstance(x, Tensor) and x._base is None:
                        largest = max(largest, x.untyped_storage().nbytes())
                return out

        decode_ref(q, batch.arena, batch.table, 0.1, dense_dtype=torch.bfloat16)  # fill the lookup tables
        with Watch():
            decode_ref(q, batch.arena, batch.table, 0.1, dense_dtype=torch.bfloat16)
        tracker.append(largest)
    assert tracker[0] == tracker[1] <= 128 * 32 * 2 * 64 * 4
