"""What public code of HyQuant gets wrong, each a test: which tokens may be anchors, what the window holds, what a cut and a code leave."""

import pytest
import torch

from kvstrata.ops import quant
from kvstrata.ops.codecs import make_codec
from kvstrata.policy import Signals, make_policy
from kvstrata.store.anchors import eligible
from kvstrata.store.layout import Layout
from kvstrata.store.store import Store
from kvstrata.types import PAGE_SIZE, Anchors, Plan, Tier
from tests.store.anchored import anchors_of, attended, feed, generate, plan, queries
from tests.store.reference import D, H, L, check_content, kv, make_store


def whole(store: Store, sequence: int) -> list[bool]:
    """Of each token: whether it lies in a page of full precision."""
    s = store.sequence(sequence)
    return [s.pages[p // PAGE_SIZE].tier is Tier.BF16 for p in range(s.num_tokens)]


@pytest.mark.parametrize("window", [0, 32, 64, 128])
def test_the_window_is_subtracted_once(window: int) -> None:
    """With anchors for all, every token between the sink page and the window is one: the last W of the prefix too."""
    store = make_store(window=window)
    one = store.add_sequence(plan(1000))
    feed(store, one, list(range(500)))
    body = list(range(PAGE_SIZE, store.first_window_page(500) * PAGE_SIZE))
    assert body[-1] >= 500 - 2 * max(window, PAGE_SIZE)
    assert anchors_of(store, one) == [[body] * H] * L


@pytest.mark.parametrize("window", [32, 64, 128])
def test_short_contexts_have_anchors_as_soon_as_anything_is_coarse(window: int) -> None:
    store = make_store(window=window)
    one = store.add_sequence(plan(5))
    had = []
    for n in range(1, 2 * window + PAGE_SIZE + 2):
        generate(store, one, n)
        s = store.sequence(one)
        assert bool(s.anchors) == bool(eligible(s.pages).any()), f"{n} tokens"
        had += [n] if s.anchors else []
    assert had and had[0] <= 2 * window + PAGE_SIZE
    # and the policy asks for some, however little there is
    for n in (129, 160, 257):
        wanted = make_policy("hyquant").plan((), n, Signals(window_pages=3)).anchors
        assert wanted is not None and wanted.count >= 1


@pytest.mark.parametrize("window", [32, 64, 128])
def test_the_window_moves_past_the_prompt(window: int) -> None:
    """The newest W tokens are whole, generated ones as well; older ones of the prompt are not any more."""
    store = make_store(window=window)
    one = store.add_sequence(plan(5))
    feed(store, one, list(range(300)))
    for n in range(300, 304 + 2 * window):
        generate(store, one, n)
        assert all(whole(store, one)[-window:]), f"{n + 1} tokens"
    assert not any(whole(store, one)[PAGE_SIZE : 300 - PAGE_SIZE])


def test_no_flush_leaves_the_newest_tokens_coarse() -> None:
    """At each step that settles pages, above all."""
    store = make_store(window=64)
    one, flushes = store.add_sequence(plan(5)), 0
    feed(store, one, [0])
    for n in range(1, 330):
        before = store.sequence(one).settled
        generate(store, one, n)
        if store.sequence(one).settled != before:
            flushes += 1
            assert whole(store, one)[-64:] == [True] * 64
    assert flushes >= 4


def test_a_second_turn_attends_the_first() -> None:
    """What is attended before a chunk is everything before it, once; its outputs are far from those of the chunk alone."""
    store = make_store()
    one = store.add_sequence(plan(8, body=Tier.INT8))
    first, second = list(range(300)), list(range(300, 340))
    feed(store, one, first)
    for layer in range(L):
        assert (attended(store, one, layer) == 1).all()
    got = feed(store, one, second)
    everything = first + second
    for layer in range(L):
        k, v = (x.repeat_interleave(2, 1).double() for x in kv(everything, layer))
        q = queries(second, layer).double()
        logits = torch.einsum("thd,nhd->htn", q, k) * 0.3
        future = torch.arange(340)[None, :] > torch.arange(300, 340)[:, None]
        out = [torch.einsum("htn,nhd->thd", logits.masked_fill(hidden, -torch.inf).softmax(-1), v)
               for hidden in (future, future | (torch.arange(340) < 300))]  # fmt: skip
        error, alone = ((got[layer].double() - x).square().mean().sqrt() for x in out)
        assert error < 0.02 < 0.2 < alone


def test_two_bits_reach_four_levels() -> None:
    """Of K in each channel of a page, of V in each token: no code is wasted on symmetry."""
    k = torch.arange(PAGE_SIZE).view(1, -1, 1, 1) * torch.linspace(-1, 1, D) + 5
    v = torch.arange(D).view(1, 1, 1, -1) * torch.linspace(-1, 1, PAGE_SIZE).view(1, -1, 1, 1) - 7
    k, v = (x.expand(1, PAGE_SIZE, H, D).contiguous() for x in (k, v))
    got_k, got_v = quant.decode(quant.encode(k, v, Tier.INT2), Tier.INT2, D)
    assert {len(x.unique()) for x in got_k.permute(0, 2, 3, 1).reshape(-1, PAGE_SIZE)} == {4}
    assert {len(x.unique()) for x in got_v.reshape(-1, D)} == {4}


def test_the_papers_symmetric_tiles_come_in_no_two_bits() -> None:
    layout = Layout(L, H, D, make_codec("hyquant"), 2)
    with pytest.raises(ValueError, match="codec 'hyquant' has no tier INT2; accepted: EVICTED, INT4, INT8, BF16"):
        layout.check_tier(Tier.INT2)


@pytest.mark.parametrize("keep", [420, 330, 200, 130, 70, 0])
def test_a_crop_crops(keep: int) -> None:
    """Tokens, anchors and what is attended; what an anchor held whole stays whole in the page that is cut."""
    store = make_store()
    one = store.add_sequence(plan(1000))
    feed(store, one, list(range(450)))
    store.crop(one, keep)
    store.check_integrity()
    s = store.sequence(one)
    assert s.num_tokens == keep and len(s.pages) == -(-keep // PAGE_SIZE)
    positions = [p for layer in anchors_of(store, one) for head in layer for p in head]
    assert all(p < keep // PAGE_SIZE * PAGE_SIZE for p in positions)
    for layer in range(L):
        assert (attended(store, one, layer) == 1).all()
    check_content(store, one)
    # other tokens come where the old ones were
    out = feed(store, one, list(range(800, 900)))
    fresh = make_store()
    other = fresh.add_sequence(plan(1000))
    if keep:
        feed(fresh, other, list(range(keep)))
    expected = feed(fresh, other, list(range(800, 900)))
    for a, b in zip(out, expected, strict=True):
        torch.testing.assert_close(a, b, atol=1e-4, rtol=1e-3)


def test_a_cut_page_keeps_what_its_anchors_held() -> None:
    store = make_store()
    one = store.add_sequence(Plan((Tier.BF16,), Tier.INT2, anchors=Anchors(1000)))
    feed(store, one, list(range(450)))
    store.crop(one, 200)
    page = store.sequence(one).pages[-1]
    assert page.tier is Tier.BF16 and page.live_tokens == 8
    for layer in range(L):
        k, v = store.read_pages(store.arena.buffer[layer], torch.tensor([page.frames], dtype=torch.int32), page.tier)
        true_k, true_v = kv(list(range(192, 200)), layer)
        torch.testing.assert_close(k[0, :8], true_k)
        torch.testing.assert_close(quant.rotate(v[0, :8]), true_v)
