"""Anchors: each layer and KV head its own tokens, attended once, from where they are best kept."""

import numpy as np
import pytest
import torch

from kvstrata.ops import quant
from kvstrata.store.gathered import EMPTY
from kvstrata.types import PAGE_SIZE, Anchors, Plan, Tier
from tests.store.anchored import GROUP, attended, feed, generate, plan, queries
from tests.store.reference import D, H, L, kv, make_store


@pytest.mark.parametrize("window", [0, 32, 64])
def test_every_token_is_attended_once_at_every_length(window: int) -> None:
    store = make_store(window=window)
    one = store.add_sequence(plan())
    for n in range(1, 301):
        generate(store, one, n)
        for layer in range(L):
            assert (attended(store, one, layer) == 1).all(), f"{n} tokens, layer {layer}"
    assert store.sequence(one).anchors


@pytest.mark.parametrize("chunks", [[300], [40, 5, 200, 55], [1] * 300])
def test_anchors_hold_what_the_model_gave(chunks: list[int]) -> None:
    store = make_store()
    one = store.add_sequence(plan())
    start = 0
    for n in chunks:
        feed(store, one, list(range(start, start + n)))
        start += n
    s = store.sequence(one)
    assert sum(int((page.positions != EMPTY).sum()) for page in s.anchors) == L * H * 5
    assert len({tuple(sorted(s.anchors[0].positions[layer, head])) for layer in range(L) for head in range(H)}) == L * H
    exact = 0
    for page in s.anchors:
        for layer in range(L):
            k, v = store.read_pages(store.arena.buffer[layer], torch.tensor([page.frames], dtype=torch.int32), page.tier)
            true_k, true_v = kv(list(range(300)), layer)
            for head in range(H):
                for slot, position in enumerate(page.positions[layer, head]):
                    if position != EMPTY:
                        same = torch.equal(k[0, slot, head], true_k[position, head])
                        exact += same
                        if same:
                            torch.testing.assert_close(quant.rotate(v[0, slot, head]), true_v[position, head])
    # those chosen before their planes were all that is left of them
    promoted = sum(page.promoted for page in s.anchors)
    assert exact == L * H * 5 - promoted
    assert promoted == 0 or len(chunks) > 1


def test_attention_reads_anchors_instead_of_planes() -> None:
    """Against attention in float64 over what the store says it holds."""
    store = make_store()
    one = store.add_sequence(plan())
    feed(store, one, list(range(200)))
    s, new = store.sequence(one), list(range(500, 507))
    got = feed(store, store.fork(one), new)
    for layer in range(L):
        k, v = torch.zeros(200, H, D), torch.zeros(200, H, D)
        for p, page in enumerate(s.pages):
            here = store.read_pages(store.arena.buffer[layer], torch.tensor([page.frames], dtype=torch.int32), page.tier)
            for out, x in zip((k, v), here, strict=True):
                out[p * PAGE_SIZE : (p + 1) * PAGE_SIZE] = x[0, : 200 - p * PAGE_SIZE]
        for page in s.anchors:
            here = store.read_pages(store.arena.buffer[layer], torch.tensor([page.frames], dtype=torch.int32), page.tier)
            for head, slot in zip(*np.nonzero(page.positions[layer] != EMPTY), strict=True):
                for out, x in zip((k, v), here, strict=True):
                    out[page.positions[layer, head, slot], head] = x[0, slot, head]
        chunk_k, chunk_v = kv(new, layer)
        keys, values = torch.cat([k, chunk_k]).double(), torch.cat([quant.rotate(v), chunk_v]).double()
        keys, values = (x.repeat_interleave(GROUP, 1) for x in (keys, values))
        logits = torch.einsum("thd,nhd->htn", queries(new, layer).double(), keys) * 0.3
        logits.masked_fill_(torch.arange(207)[None, None, :] > torch.arange(200, 207)[None, :, None], -torch.inf)
        expected = torch.einsum("htn,nhd->thd", logits.softmax(-1), values)
        torch.testing.assert_close(got[layer].double(), expected, atol=2e-5, rtol=1e-4)


def test_anchors_are_the_keys_of_most_attention() -> None:
    store = make_store()
    one = store.add_sequence(plan(3))
    tokens = list(range(400))
    feed(store, one, tokens)
    s = store.sequence(one)
    body = range(PAGE_SIZE, store.first_window_page(400) * PAGE_SIZE)
    for layer in range(L):
        q, (k, _) = queries(tokens, layer)[-64:].double(), kv(tokens, layer)
        for head in range(H):
            logits = torch.einsum("tgd,nd->gtn", q[:, head * GROUP : (head + 1) * GROUP], k[:, head].double()) * 0.3
            logits.masked_fill_(torch.arange(400)[None, None, :] > torch.arange(336, 400)[None, :, None], -torch.inf)
            mass = logits.softmax(-1).sum((0, 1))
            best = sorted(body, key=lambda p: -float(mass[p]))[:3]
            held = s.anchors[0].positions[layer, head]
            assert sorted(held[held != EMPTY]) == sorted(best)


def test_a_frozen_choice_stays_and_a_refreshed_one_moves() -> None:
    held = {}
    for refresh in (0, 64):
        store = make_store()
        one = store.add_sequence(plan(4, refresh=refresh))
        feed(store, one, list(range(300)))
        before = store.sequence(one).anchors[0].positions.copy()
        for n in range(300, 430):
            generate(store, one, n)
        held[refresh] = (before, store.sequence(one).anchors[0].positions)
    assert np.array_equal(*held[0])
    assert not np.array_equal(*held[64])


def test_evicted_cropped_and_unplanned_anchors_give_their_frames_back() -> None:
    store = make_store()
    one = store.add_sequence(plan(64))
    feed(store, one, list(range(400)))
    assert len(store.sequence(one).anchors) == 2
    twin = store.fork(one)
    store.set_plan(twin, Plan((Tier.BF16,), Tier.INT2, anchors=Anchors(20)))
    assert len(store.sequence(twin).anchors) == 1
    store.set_plan(twin, Plan((Tier.BF16, Tier.EVICTED, Tier.EVICTED), Tier.INT2, anchors=Anchors(20)))
    positions = store.sequence(twin).anchors[0].positions
    assert not ((positions >= 32) & (positions < 96)).any()
    store.check_integrity()
    store.crop(twin, 130)
    assert (store.sequence(twin).anchors[0].positions < 128).all()
    store.set_plan(twin, Plan((Tier.BF16,), Tier.INT2))
    assert not store.sequence(twin).anchors
    store.check_integrity()
    assert len(store.sequence(one).anchors) == 2
    for i in (one, twin):
        store.release(i)
    store.prefix.clear()
    assert store.arena.in_use == 0


def test_an_aborted_step_leaves_the_anchors_as_they_were() -> None:
    store = make_store()
    one = store.add_sequence(plan())
    feed(store, one, list(range(300)))
    before = store.sequence(one).anchors
    step = store.begin([one], [list(range(300, 500))])
    step.write(0, *kv(list(range(300, 500)), 0), queries(list(range(300, 500)), 0), 0.3)
    step.abort()
    store.check_integrity()
    assert store.sequence(one).anchors == before


def test_a_write_without_queries_is_refused() -> None:
    store = make_store()
    step = store.begin([store.add_sequence(plan())], [[1, 2, 3]])
    with pytest.raises(ValueError, match="which queries choose"):
        step.write(0, *kv([1, 2, 3], 0))
    step.abort()


def test_anchors_of_fewer_bits_take_fewer_frames() -> None:
    frames = {}
    for tier in (Tier.BF16, Tier.INT8):
        store = make_store(dense_dtype="bfloat16")
        one = store.add_sequence(plan(32, tier))
        feed(store, one, list(range(300)))
        frames[tier] = len(store.sequence(one).anchors[0].frames)
        assert (attended(store, one, 1) == 1).all()
    assert frames[Tier.INT8] == 8 < frames[Tier.BF16]
