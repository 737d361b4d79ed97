"""When anchors are chosen anew, and what becomes of them in forks, batches, failed steps, shared prefixes and full arenas."""

import numpy as np
import pytest
import torch

from kvstrata.store.queries import NONE
from kvstrata.types import PAGE_SIZE, Anchors, Plan, Tier
from tests.store.anchored import anchors_of, attended, feed, feed_batch, generate, plan
from tests.store.reference import D, H, L, kv, make_store


@pytest.mark.parametrize(("refresh", "window"), [(1, 64), (16, 64), (64, 0), (100, 64)])
def test_no_more_than_r_tokens_pass_between_choices(refresh: int, window: int) -> None:
    store = make_store(window=window)
    one = store.add_sequence(plan(4, refresh=refresh))
    feed(store, one, list(range(230)))
    s, moments = store.sequence(one), []
    assert s.chosen_at == 230
    for n in range(231, 420):
        generate(store, one, n - 1)
        assert n - s.chosen_at < refresh or refresh == 1
        moments += [n] if s.chosen_at == n else []
    assert len(moments) >= (420 - 231) // refresh
    # a turn, however short, begins with a choice
    feed(store, one, [900, 901, 902])
    assert s.chosen_at == s.num_tokens


def test_what_settles_competes_while_it_is_whole() -> None:
    """With R as long as the window's group no anchor of a long generation is made of planes, unless its mass came later."""
    store = make_store(window=64)
    one = store.add_sequence(plan(6, refresh=64))
    feed(store, one, list(range(230)))
    s, settling = store.sequence(one), []
    for n in range(231, 400):
        before = s.settled
        generate(store, one, n - 1)
        if s.settled != before:
            settling.append(s.chosen_at == n)
    assert settling and all(settling)


def test_a_choice_where_nothing_settles_is_attended_at_once() -> None:
    """The tables of pages follow anchors that move without a page that settles."""
    store = make_store(window=64)
    one = store.add_sequence(plan(4, refresh=8))
    feed(store, one, list(range(300)))
    moved = 0
    for n in range(300, 340):
        before = anchors_of(store, one)
        generate(store, one, n)
        moved += before != anchors_of(store, one)
        for layer in range(L):
            assert (attended(store, one, layer) == 1).all()
    assert moved >= 2


def test_a_token_made_of_planes_is_counted_for_as_long_as_it_stays() -> None:
    store = make_store(window=64)
    one = store.add_sequence(Plan((Tier.BF16,), Tier.INT2))
    feed(store, one, list(range(300)))
    store.set_plan(one, plan(20, refresh=8))
    s = store.sequence(one)
    feed(store, one, [300, 301])
    # everything that can be chosen is planes by now
    assert sum(page.promoted for page in s.anchors) == 20 * L * H
    for n in range(302, 318):
        generate(store, one, n)
    assert sum(page.promoted for page in s.anchors) == 20 * L * H


def test_a_frozen_choice_keeps_no_queries() -> None:
    store = make_store()
    one = store.add_sequence(plan(4, refresh=0))
    feed(store, one, list(range(100)))
    # a byte a channel and four of scale a head
    assert store.sequence(one).ring != NONE and store.queries.ring_bytes == L * 64 * 2 * H * (D + 4)
    feed(store, one, list(range(100, 300)))
    assert store.sequence(one).anchors and store.sequence(one).ring == NONE
    assert store.queries.ref_counts == [0] * len(store.queries.ref_counts)


@pytest.mark.parametrize("new", [1, 30, 64, 200])
def test_an_aborted_step_that_runs_again_chooses_what_it_would_have_chosen(new: int) -> None:
    held = []
    for failures in (0, 2):
        store = make_store()
        one = store.add_sequence(plan(6, refresh=1))
        feed(store, one, list(range(300)))
        for _ in range(failures):
            feed(store, one, list(range(300, 300 + new)), commit=False)
        feed(store, one, list(range(300, 300 + new)))
        held.append(anchors_of(store, one))
    assert held[0] == held[1]


def test_after_an_aborted_step_other_tokens_are_chosen_by_true_queries_alone() -> None:
    store = make_store()
    one = store.add_sequence(plan(6, refresh=1))
    feed(store, one, list(range(300)))
    feed(store, one, list(range(700, 740)), commit=False)
    assert store.sequence(one).queries_from == 300 + 40 - 64
    feed(store, one, [300])
    other = make_store()
    two = other.add_sequence(plan(6, refresh=1))
    feed(other, two, list(range(300)))
    other.sequence(two).queries_from = 276
    feed(other, two, [300])
    assert anchors_of(store, one) == anchors_of(other, two)


def test_forks_choose_by_their_own_queries() -> None:
    store = make_store()
    one = store.add_sequence(plan(6, refresh=1))
    feed(store, one, list(range(300)))
    twin = store.fork(one)
    store.check_integrity()
    feed(store, one, list(range(500, 520)))
    feed(store, twin, list(range(300, 320)))
    for sequence, tail in ((one, range(500, 520)), (twin, range(300, 320))):
        alone = make_store()
        s = alone.add_sequence(plan(6, refresh=1))
        feed(alone, s, list(range(300)))
        feed(alone, s, list(tail))
        assert anchors_of(store, sequence) == anchors_of(alone, s)
    assert anchors_of(store, one) != anchors_of(store, twin)
    for i in (one, twin):
        store.release(i)
    assert not any(store.queries.ref_counts)


def test_a_fork_of_an_open_step_leaves_its_queries_alone() -> None:
    store = make_store()
    one = store.add_sequence(plan(6))
    feed(store, one, list(range(300)))
    step = store.begin([one], [[300]])
    twin = store.fork(one)
    store.check_integrity()
    assert store.sequence(twin).ring == NONE
    step.abort()
    feed(store, twin, [300, 301])


def test_a_crop_keeps_the_queries_that_are_left() -> None:
    store = make_store()
    one = store.add_sequence(plan(6, refresh=1))
    feed(store, one, list(range(320)))
    store.crop(one, 300)
    s = store.sequence(one)
    assert (s.queries_from, s.num_tokens) == (256, 300)
    feed(store, one, [300])
    store.crop(one, 100)
    assert s.queries_from == 100
    feed(store, one, list(range(100, 400)))
    assert (attended(store, one, 0) == 1).all()


def test_a_batch_chooses_as_each_sequence_alone() -> None:
    """Ragged, of different shares, one without anchors, one that is new."""
    plans = [plan(6, refresh=16), plan(40, Tier.INT8, refresh=1), Plan((), Tier.INT4), plan(3, refresh=0)]
    steps = [[300, 170, 200, 5], *[[1, 1, 1, 1]] * 20, [20, 1, 3, 90], *[[1, 1, 1, 1]] * 5]
    store = make_store()
    ids = [store.add_sequence(p) for p in plans]
    alone = [make_store() for _ in plans]
    own = [s.add_sequence(p) for s, p in zip(alone, plans, strict=True)]
    start = [1000 * i for i in range(4)]
    for lengths in steps:
        tokens = [list(range(a, a + n)) for a, n in zip(start, lengths, strict=True)]
        start = [a + n for a, n in zip(start, lengths, strict=True)]
        out = feed_batch(store, ids, tokens)
        parts = [feed(s, i, t) for s, i, t in zip(alone, own, tokens, strict=True)]
        for layer in range(L):
            torch.testing.assert_close(out[layer], torch.cat([p[layer] for p in parts]), atol=1e-4, rtol=1e-3)
    for i, (s, j) in zip(ids, zip(alone, own, strict=True), strict=True):
        assert anchors_of(store, i) == anchors_of(s, j)


def test_a_prefix_hit_takes_over_its_donors_anchors() -> None:
    store = make_store()
    one = store.add_sequence(plan(30))
    feed(store, one, list(range(400)))
    two = store.add_sequence(plan(30))
    taken = store.match_prefix(two, list(range(300)) + [900] * 50)
    store.check_integrity()
    assert taken >= 128
    expected = [[[p for p in head if p < taken] for head in layer] for layer in anchors_of(store, one)]
    assert anchors_of(store, two) == expected and any(expected[0])
    for layer in range(L):
        assert (attended(store, two, layer) == 1).all()
    feed(store, two, list(range(taken, 300)) + [900] * 50)
    assert store.sequence(two).chosen_at == 350
    # and without a donor, or a plan that wants any, there are none until the first step
    three = store.add_sequence(Plan((), Tier.INT2))
    store.match_prefix(three, list(range(400)))
    assert not store.sequence(three).anchors
    for i in (one, two, three):
        store.release(i)
    four = store.add_sequence(plan(30))
    assert store.match_prefix(four, list(range(300)) + [900] * 50) and not store.sequence(four).anchors
    feed(store, four, list(range(store.sequence(four).num_tokens, 320)))
    assert sum(page.promoted for page in store.sequence(four).anchors) > 0
    store.release(four)
    store.prefix.clear()
    assert store.arena.in_use == 0


def test_without_frames_for_other_anchors_a_step_keeps_those_it_has() -> None:
    store = make_store(num_frames=700)
    one = store.add_sequence(plan(64, refresh=1))
    feed(store, one, list(range(310)))
    before = anchors_of(store, one)
    # a neighbour leaves too few frames for two more anchor pages
    other = store.add_sequence(Plan((), Tier.BF16))
    while store.arena.free >= 2 * store.layout.frames(Tier.BF16):
        feed(store, other, [0] * PAGE_SIZE)
    feed(store, one, [310])
    assert anchors_of(store, one) == before and store.sequence(one).num_tokens == 311
    assert store.sequence(one).chosen_at == 310
    store.release(other)
    store.prefix.clear()
    feed(store, one, [311])
    assert store.sequence(one).chosen_at == 312


def test_a_step_takes_the_anchors_that_it_replaces_and_those_it_chooses() -> None:
    store = make_store()
    one = store.add_sequence(plan(64, Tier.INT8, refresh=1))
    feed(store, one, list(range(310)))
    s, chosen = store.sequence(one), 2 * store.layout.frames(Tier.INT8)
    before = s.frames
    feed(store, one, [310])
    assert s.chosen_at == 311
    assert s.frames == before
    assert s.peak_frames == before + chosen == store.arena.peak_in_use


def test_anchors_of_eight_bits_that_are_chosen_again_and_again_stay_finer_than_six() -> None:
    """Each choice writes them again on a grid of its own: after forty the error is some rounding errors, not forty."""
    store = make_store()
    one = store.add_sequence(plan(40, Tier.INT8, refresh=1))
    feed(store, one, list(range(300)))
    for n in range(300, 340):
        generate(store, one, n)
    s, errors = store.sequence(one), []
    for layer in range(L):
        true, _ = kv(list(range(s.num_tokens)), layer)
        for page in s.anchors:
            k, _ = store.read_pages(store.arena.buffer[layer], torch.tensor([page.frames], dtype=torch.int32), page.tier)
            for head in range(H):
                slots = page.positions[layer, head] >= 0
                at = torch.from_numpy(page.positions[layer, head][slots].astype("int64"))
                whole = torch.from_numpy(page.whole[layer, head][slots])
                errors.append((k[0, torch.from_numpy(slots), head] - true[at, head])[whole].abs().flatten())
    # six bits over [-1, 1]: steps of 2 / 64
    every = torch.cat(errors)
    assert len(every) > 64 * L * H and every.square().mean().sqrt() < 2 / 64 / 12**0.5


def test_the_rest_of_the_body_is_not_attended_where_anchors_are_alone() -> None:
    store = make_store()
    one = store.add_sequence(Plan((Tier.BF16,), Tier.INT2, anchors=Anchors(7, alone=True)))
    feed(store, one, list(range(400)))
    end = store.first_window_page(400) * PAGE_SIZE
    for layer in range(L):
        counts = attended(store, one, layer)
        assert (counts[:, :PAGE_SIZE] == 1).all() and (counts[:, end:] == 1).all()
        assert (counts[:, PAGE_SIZE:end].sum(1) == 7).all()
    feed(store, one, list(range(400, 410)))


def test_a_plan_that_leaves_anchors_alone_is_followed_from_then_on() -> None:
    store = make_store()
    one = store.add_sequence(plan(32))
    feed(store, one, list(range(400)))
    body = store.first_window_page(400) * PAGE_SIZE - PAGE_SIZE
    for count, alone in ((32, True), (32, False), (0, True), (0, False)):
        store.set_plan(one, plan(count, alone=alone))
        for layer in range(L):
            assert (attended(store, one, layer).sum(1) == 400 - alone * (body - count)).all()


def test_a_step_where_nothing_is_due_sends_the_device_only_the_window(monkeypatch: pytest.MonkeyPatch) -> None:
    """Masks by layer and head are built when anchors or settled pages change, and never in between."""
    store = make_store()
    ids = [store.add_sequence(plan(40, refresh=64)), store.add_sequence(Plan((), Tier.INT4)), store.add_sequence(plan(3))]
    feed_batch(store, ids, [list(range(300)), list(range(200)), list(range(250, 270))])
    feed_batch(store, ids, [[1], [1], [1]])
    sent: list[int] = []
    plain = torch.from_numpy

    def counted(x: np.ndarray) -> torch.Tensor:
        out = plain(x)
        sent.append(out.numel())
        return out

    monkeypatch.setattr(torch, "from_numpy", counted)
    for n in range(2, 8):
        feed_batch(store, ids, [[n], [n], [n]])
        monkeypatch.undo()
        for i in ids:
            assert all((attended(store, i, layer) == 1).all() for layer in range(L))
        store.tables.build([store.sequence(i) for i in ids])
        monkeypatch.setattr(torch, "from_numpy", counted)
    # 5 window pages at most: where each lies, its frames and its mask; counts of three sequences
    assert sent and max(sent) <= 3 * 4 * store.layout.frames(Tier.BF16)


def test_empty_slots_widen_no_range() -> None:
    """A page of one anchor and 31 empty slots holds that anchor as exactly as eight bits hold 32 equal tokens."""
    store = make_store()
    one = store.add_sequence(plan(33, Tier.INT8))
    feed(store, one, list(range(300)))
    page = store.sequence(one).anchors[1]
    for layer in range(L):
        k, _ = store.read_pages(store.arena.buffer[layer], torch.tensor([page.frames], dtype=torch.int32), page.tier)
        true, _ = kv(list(range(300)), layer)
        for head in range(H):
            assert (k[0, 0, head] - true[int(page.positions[layer, head, 0]), head]).abs().max() < 1e-3
