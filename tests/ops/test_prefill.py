"""Prefill in 8 bits: the reference against float64, what its parts are worth."""

import pytest
import torch

from kvstrata.ops import prefill as op
from kvstrata.ops.prefill import Precision, prefill, prefill_ref
from tests.ops.kernel_cases import DEVICE, attention64, relative_error


def make(tokens, heads, group, head_dim, lines, dtype=torch.float32, seed=0):
    """q, k (of unlike channels and means), v, and `lines` lines a KV head."""
    gen = torch.Generator().manual_seed(seed)
    q, k, v = (torch.randn(tokens, n, head_dim, generator=gen) for n in (heads * group, heads, heads))
    k = k * torch.linspace(0.3, 1.5, head_dim) + torch.randn(1, heads, head_dim, generator=gen) * 3
    picked = torch.stack([torch.randperm(tokens, generator=gen)[:lines].sort().values for _ in range(heads)]).int()
    return (*(x.to(dtype).to(DEVICE) for x in (q, k, v)), picked.to(DEVICE))


def exact(q, k, v, scale):
    seen = torch.ones(len(q), len(q), dtype=torch.bool, device=q.device).tril()[..., None].expand(-1, -1, k.shape[1])
    return attention64(q, k, v, seen, scale)[0]


@pytest.mark.parametrize("window", [1, 32, 100, 128])
def test_each_key_is_attended_once_at_every_length(window):
    """Ones for values give one only if the weights of all parts sum to it, and a key left out or counted twice changes the marked value."""
    for tokens in [*range(1, 12), 127, 128, 129, 131, 255, 257, 384, 389]:
        q, k, _, lines = make(tokens, 2, 2, 16, min(tokens, 7 + tokens // 20))
        # equal logits: a query's output is the mean of what it sees
        v = torch.arange(tokens).float()[:, None, None].expand(-1, 2, 16).to(DEVICE)
        out = prefill_ref(q * 0, k, v, lines, 0.25, window=window, precision=Precision("int8", "int8"))
        mean = torch.arange(tokens, device=DEVICE).float() / 2
        # int8 values are off by half a step of their tile's largest at most
        assert ((out - mean[:, None, None]).abs() <= tokens / 127 / 2).all(), tokens


def test_parts_hold_every_position_once():
    lines = torch.tensor([[0, 3, 4, 8], [1, 2, 5, 6]], dtype=torch.int32)
    assert op.rest(lines, 9).tolist() == [[1, 2, 5, 6, 7], [0, 3, 4, 7, 8]]


@pytest.mark.parametrize(
    "scores, values, bound", [("int8", "fp8", 0.04), ("fp8", "fp8", 0.06), ("int8", "int8", 0.02), ("fp8", "int8", 0.06)]
)
def test_the_reference_is_near_exact_attention(scores, values, bound):
    q, k, v, lines = make(700, 2, 3, 64, 35)
    x = exact(q, k, v, 0.125)
    errors = {}
    for name, own, window in (("uniform", lines[:, :0], 0), ("lines", lines, 0), ("window", lines[:, :0], 128), ("both", lines, 128)):
        errors[name] = relative_error(prefill_ref(q, k, v, own, 0.125, window=window, precision=Precision(scores, values)), x)
    assert 1e-4 < errors["uniform"] < bound
    assert errors["both"] < errors["window"] < errors["uniform"]
    assert errors["both"] < errors["lines"]
    all_whole = torch.arange(700, dtype=torch.int32, device=DEVICE).expand(2, -1).contiguous()
    assert relative_error(prefill_ref(q, k, v, all_whole, 0.125, window=0, precision=Precision(scores, values)), x) < 1e-5


def test_views_are_taken():
    q, k, v, lines = make(200, 2, 2, 16, 10)
    x = prefill(q, k, v, lines, 0.25, window=32)
    heads_first = [y.transpose(0, 1).contiguous().transpose(0, 1) for y in (q, k, v)]
    assert torch.equal(prefill(*heads_first, lines, 0.25, window=32), x)
    kv = torch.stack([k, v], 1)
    assert torch.equal(prefill(q, kv[:, 0], kv[:, 1], lines, 0.25, window=32), x)


def test_what_all_keys_share_costs_nothing_where_k_is_smoothed():
    """A mean of K that is large beside its spread takes all levels of int8 if it is quantized with it."""
    q, k, v, lines = make(500, 1, 2, 64, 0)
    k = k * 0.2 + 40
    x = exact(q, k, v, 0.125)
    plain, smooth = (relative_error(prefill_ref(q, k, v, lines, 0.125, precision=Precision("int8", "int8", s)), x) for s in (False, True))
    assert smooth < 0.1 * plain


def test_an_attended_line_does_not_drown_small_probabilities():
    """A sink whose probability is near 1 leaves others below e4m3's smallest: in the body they are lost beside it, as a line it does not
    enter their maximum."""
    q, k, v, _ = make(384, 1, 1, 64, 0)
    q, k = q * 0.1, k * 0.1
    q[..., 0], k[..., 0], k[0, 0, 0], v[0] = 10.0, 0.0, 11.0, 0.0
    x = exact(q, k, v, 0.125)
    sink = torch.zeros(1, 1, dtype=torch.int32, device=DEVICE)
    beside, apart = (relative_error(prefill_ref(q, k, v, own, 0.125, precision=Precision())[256:], x[256:]) for own in (sink[:, :0], sink))
    assert apart < 0.5 * beside


@pytest.mark.parametrize(
    "change, message",
    [
        ({"k": torch.zeros(3, 2, 8)}, r"q \[4, 2, 8\], k \[3, 2, 8\]"),
        ({"lines": torch.zeros(2, 1)}, "lines are torch.float32"),
        ({"lines": torch.zeros(2, 5, dtype=torch.int32)}, "at most 4"),
        ({"window": -1}, "window is -1"),
        ({"window": 1.5}, "window is 1.5"),
        ({"q": torch.zeros(2, 8)}, r"q \[2, 8\]"),
        ({"k": torch.zeros(4, 0, 8), "v": torch.zeros(4, 0, 8)}, r"k \[4, 0, 8\]"),
    ],
)
def test_bad_arguments_are_named(change, message):
    good = {"q": torch.zeros(4, 2, 8), "k": torch.zeros(4, 2, 8), "v": torch.zeros(4, 2, 8), "lines": torch.zeros(2, 1, dtype=torch.int32)}
    with pytest.raises(ValueError, match=message):
        prefill(**(good | change), scale=1.0)
    with pytest.raises(ValueError, match="format 'int4'"):
        Precision("int4")
