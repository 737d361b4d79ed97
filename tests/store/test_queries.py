"""Rings of queries at eight bits: what comes back, what they take, and that they choose what exact queries choose."""

import pytest
import torch

from kvstrata.ops.score import NUM_QUERIES, column_scores
from kvstrata.ops.share import output_shares
from kvstrata.store.queries import Queries, quantized, ring_bytes
from kvstrata.types import PAGE_SIZE

CPU = torch.device("cpu")


def random(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def held(q: torch.Tensor, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """What a ring gives back of q [N, Hq, D], one layer's."""
    queries, n = Queries(1, dtype, CPU), len(q)
    queries.write(0, torch.full((n,), queries.take()), torch.arange(n), q)
    return queries.read(0, 0, 0, n)


@pytest.mark.parametrize("given", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("heads", "dim"), [(1, 1), (7, 33), (14, 64), (3, 80), (5, 257)])
def test_queries_come_back_to_half_a_step(heads: int, dim: int, given: torch.dtype) -> None:
    # one head is a thousand times another: each has a scale of its own
    q = (random(9, heads, dim) * 10.0 ** torch.linspace(-1, 2, heads)[:, None]).to(given)
    x = q.double()
    step = x.abs().amax(-1, keepdim=True) / 127
    back = held(q)
    assert back.shape == q.shape and back.dtype is torch.float32
    assert ((back.double() - x).abs() <= step * 0.5001).all()
    # the largest channel is exact but for float32's last bits
    largest = x.abs().argmax(-1, keepdim=True)
    torch.testing.assert_close(back.double().gather(-1, largest), x.gather(-1, largest), rtol=1e-6, atol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_queries_are_read_in_the_stores_dtype(dtype: torch.dtype) -> None:
    q = random(3, 2, 8)
    assert torch.equal(held(q, dtype), held(q).to(dtype))


def test_zeros_stay_zeros_and_the_smallest_and_largest_numbers_have_codes() -> None:
    assert torch.equal(held(torch.zeros(4, 3, 7)), torch.zeros(4, 3, 7))
    largest = 3e38
    q = torch.tensor([[[largest, -largest, 0.0], [1e-44, -2.7e-43, 0.0], [-1e-30, 1e-32, 1e-31]]])
    codes, scales = quantized(q)
    assert codes.dtype is torch.int8 and codes.abs().max() <= 127 and scales.isfinite().all()
    back = held(q)
    assert back.isfinite().all()
    torch.testing.assert_close(back[0, 0], q[0, 0], rtol=1e-6, atol=0)
    # numbers below float32's normal ones have few digits themselves
    torch.testing.assert_close(back[0, 1], q[0, 1], rtol=0, atol=2e-43)
    torch.testing.assert_close(back[0, 2], q[0, 2], rtol=0, atol=0.5001e-30 / 127)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_a_query_that_is_not_finite_attends_nothing_as_it_did_exact(bad: float) -> None:
    q = (random(6, 4, 16) * 30).round().clamp(-127, 127) / 16
    # multiples of a scale that is a power of two are held without loss: any difference is the bad one's
    q[..., 0] = 127 / 16
    wrong = q.clone()
    wrong[2, 1, 5] = bad
    back = held(wrong)
    assert back[2, 1].isnan().all()
    good = torch.ones(6, 4, dtype=torch.bool)
    good[2, 1] = False
    assert torch.equal(back[good], q[good])
    k, v = random(40, 2, 16, seed=1), random(40, 2, 16, seed=2)
    for of in (lambda x: column_scores(x, k, 0.25), lambda x: output_shares(x, k, v, 0.25)):
        assert of(back).isfinite().all()
        torch.testing.assert_close(of(back), of(wrong), rtol=0, atol=0)


def test_rings_count_their_bytes_grow_and_are_copied_whole() -> None:
    layers, heads, dim = 3, 5, 11
    queries = Queries(layers, torch.bfloat16, CPU)
    first = queries.take()
    assert queries.ring_bytes == 0 and queries.num_heads is None and not queries.holds(first)
    q = {layer: random(NUM_QUERIES, heads, dim, seed=layer) for layer in range(layers)}
    places = torch.arange(NUM_QUERIES)
    for layer in range(layers):
        queries.write(layer, torch.full_like(places, first), places, q[layer])
    # a byte a channel, four a head
    assert queries.ring_bytes == layers * NUM_QUERIES * heads * (dim + 4) == ring_bytes(layers, heads, dim)
    assert queries.num_heads == heads and queries.holds(first)
    before = [queries.read(layer, first, 0, NUM_QUERIES) for layer in range(layers)]
    twin = queries.copy(first)
    others = [queries.take() for _ in range(5)]
    new = random(2, heads, dim, seed=9) * 50
    # a step of decoding of two sequences, over what the oldest query was
    queries.write(1, torch.tensor([twin, others[-1]]), torch.tensor([3, 3]), new)
    assert all(torch.equal(queries.read(layer, first, 0, NUM_QUERIES), before[layer]) for layer in range(layers))
    assert torch.equal(queries.read(1, twin, NUM_QUERIES + 3, NUM_QUERIES + 4), held(new[:1], torch.bfloat16))
    assert torch.equal(queries.read(1, others[-1], 3, 4), held(new[1:], torch.bfloat16))
    # positions 10 to 67: the rest of the twin's is the first's, in the order of positions
    left = queries.read(1, twin, 10, 67)
    assert torch.equal(left, torch.cat([before[1][10:], before[1][:3]]))
    assert queries.ring_bytes == layers * NUM_QUERIES * heads * (dim + 4)


def test_packed_rings_are_restored_bit_by_bit() -> None:
    layers, first, n = 2, 90, 50
    places, queries = torch.arange(first, first + n) % NUM_QUERIES, Queries(layers, torch.float32, CPU)
    ring = queries.take()
    for layer in range(layers):
        q = random(n, 3, 7, seed=layer)
        q[4, 1, 2] = torch.nan
        queries.write(layer, torch.full_like(places, ring), places, q)
    codes, scales = queries.packed(ring, first, first + n)
    assert (codes.shape, codes.dtype, scales.shape) == ((layers, n, 3, 7), torch.int8, (layers, n, 3))
    other = Queries(layers, torch.float32, CPU)
    other.take()
    mine = other.take()
    other.restore(mine, first, codes, scales)
    for layer in range(layers):
        there = other.read(layer, mine, first, first + n)
        assert there.isnan().sum() == 7
        torch.testing.assert_close(there, queries.read(layer, ring, first, first + n), rtol=0, atol=0, equal_nan=True)


def test_writing_and_reading_ask_no_tensor_for_its_values() -> None:
    """On the meta device, whose tensors have none: on a GPU it would wait for the device in every layer."""
    device = torch.device("meta")
    queries = Queries(2, torch.bfloat16, device)
    queries.take()
    q = torch.empty(3, 4, 8, device=device)
    at = torch.empty(3, dtype=torch.int64, device=device)
    queries.write(1, at, at, q)
    assert queries.read(1, 0, 60, 70).shape == (10, 4, 8)


def outliers(n: int, heads: int, groups: int, dim: int, own: float) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """q, k, v as Qwen2.5's: two channels of Q and K are many times the others on every token. own: by how much they vary in K."""
    q, k, v = random(NUM_QUERIES, heads * groups, dim), random(n, heads, dim, seed=1), random(n, heads, dim, seed=2)
    for channel, of_k, of_q in ((5, 80.0, 12.0), (37, -40.0, -9.0)):
        k[..., channel] = of_k + k[..., channel] * own
        q[..., channel] += of_q
    return q, k, v


def weights(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float) -> torch.Tensor:
    """What store/weigh.py makes of one layer, before it rounds: [pages]."""
    return output_shares(q, k, v, scale).view(k.shape[1], -1, PAGE_SIZE).sum((0, 2))


@pytest.mark.parametrize("own", [0.05, 2.0])
def test_outlier_channels_leave_choices_as_they_were(own: float) -> None:
    """own 0.05: the channels by which the scale is set say nothing, and the others, of a sixth of its codes, decide; 2: they decide."""
    n, dim = 960, 64
    q, k, v = outliers(n, 2, 7, dim, own)
    scale = dim**-0.5
    back = held(q, torch.bfloat16).float()
    exact, near = column_scores(q, k, scale), column_scores(back, k, scale)
    for share in (0.05, 0.25):
        count = round(share * n)
        mine, theirs = (x.topk(count, 1).indices for x in (near, exact))
        assert min(len(set(a.tolist()) & set(b.tolist())) for a, b in zip(mine, theirs, strict=True)) >= 0.93 * count
        # what is chosen instead has as much attention
        assert (exact.gather(1, mine).sum(1) / exact.gather(1, theirs).sum(1)).min() > 0.9998
    of_exact, of_held = weights(q, k, v, scale), weights(back, k, v, scale)
    assert torch.corrcoef(torch.stack([of_exact, of_held]).log())[0, 1] > 0.998
    assert (of_held / of_exact).log2().abs().max() < 0.05
    # four bits would not pass
    step = q.abs().amax(-1, keepdim=True) / 7
    assert (weights((q / step).round() * step, k, v, scale) / of_exact).log2().abs().max() > 0.2
