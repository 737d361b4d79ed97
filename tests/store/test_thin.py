"""Thinning: who lives on, that attention sees exactly them, that nobody else notices, and that bytes come back."""

from typing import Any

import numpy as np
import pytest
import torch

from kvstrata.ops import quant
from kvstrata.ops.score import column_scores
from kvstrata.store.arena import OutOfFramesError
from kvstrata.store.gathered import EMPTY
from kvstrata.store.memory import MOST, QueryMemory, places
from kvstrata.store.store import Store
from kvstrata.types import PAGE_SIZE, SELECTORS, Ask, Plan, Thinning, Tier
from tests.store.anchored import GROUP, SCALE, feed, generate, queries
from tests.store.reference import D, H, L, kv, make_store


def plan(count: int = 64, tier: Tier = Tier.BF16, pages: int | None = None, **how: Any) -> Plan:
    how = {"spared": frozenset([0]), "asks": (Ask(0, 40, 0),)} | how
    return Plan((Tier.BF16,), tier, thinning=Thinning(count, -(-count // PAGE_SIZE) + 1 if pages is None else pages, tier, **how))


def alive(store: Store, sequence: int) -> np.ndarray:
    """int [L, H, tokens]: how often each token lives."""
    s = store.sequence(sequence)
    out = np.zeros((L, H, len(s.pages) * PAGE_SIZE), np.int64)
    for p, page in enumerate(s.pages):
        out[:, :, p * PAGE_SIZE : (p + 1) * PAGE_SIZE] += [(page.live >> j) & 1 for j in range(PAGE_SIZE)]
    for page in s.survivors:
        layer, head, slot = np.nonzero(page.positions != EMPTY)
        np.add.at(out, (layer, head, page.positions[layer, head, slot]), 1)
    return out[:, :, : s.num_tokens]


def check_attention(store: Store, sequence: int, new: list[int], tolerance: float) -> None:
    """What new tokens get is float64 attention over the living ones and themselves."""
    s = store.sequence(sequence)
    before, lives = list(s.token_ids), torch.from_numpy(alive(store, sequence)).bool()
    got = feed(store, sequence, new)
    for layer in range(L):
        q = queries(new, layer).double()
        (k, v), (nk, nv) = kv(before, layer), kv(new, layer)
        k, v = torch.cat([k, nk]).double(), torch.cat([v, nv]).double()
        seen = torch.cat([lives[layer][None].expand(len(new), -1, -1), torch.ones(len(new), H, len(new), dtype=torch.bool)], -1)
        seen[:, :, len(before) :] &= torch.ones(len(new), len(new)).tril().bool()[:, None]
        logits = torch.einsum("thgd,nhd->thgn", q.view(-1, H, GROUP, D), k) * SCALE
        weights = logits.masked_fill(~seen[:, :, None], -torch.inf).softmax(-1)
        want = torch.einsum("thgn,nhd->thgd", weights, v).flatten(1, 2)
        assert (got[layer].double() - want).abs().max() < tolerance


@pytest.mark.parametrize("score", SELECTORS)
@pytest.mark.parametrize("window", [0, 64])
def test_each_head_keeps_its_count_and_attention_sees_them_alone(score: str, window: int) -> None:
    store = make_store(window=window)
    one = store.add_sequence(plan(score=score))
    feed(store, one, list(range(300)))
    before = store.frames_in_use
    store.set_plan(one, plan(score=score))
    store.check_integrity()
    s, lives = store.sequence(one), alive(store, one)
    assert store.frames_in_use == before - (s.settled - 1 - len(s.survivors)) * store.layout.frames(Tier.BF16)
    settled = s.settled * PAGE_SIZE
    assert (lives <= 1).all()
    assert (lives[:, :, :PAGE_SIZE] == 1).all(), "the spared page lost a token"
    assert (lives[:, :, settled:] == 1).all(), "the window lost a token"
    assert (lives[:, :, PAGE_SIZE:settled].sum(-1) == 64).all()
    assert s.thinned == settled - PAGE_SIZE - 64
    check_attention(store, one, [500, 501, 502, 503], 1e-4)


def test_the_newest_the_best_received_and_the_asked_for_stay() -> None:
    store = make_store()
    chosen = {}
    for score in ("recent", "newest", "received"):
        one = store.add_sequence(plan(score=score))
        feed(store, one, list(range(300)))
        store.set_plan(one, plan(score=score))
        chosen[score] = alive(store, one)[:, :, PAGE_SIZE : store.sequence(one).settled * PAGE_SIZE].astype(bool)
    end = store.sequence(one).settled * PAGE_SIZE
    assert chosen["recent"][:, :, -64:].all()
    for layer in range(L):
        (k, _), q = kv(list(range(300)), layer), queries(list(range(300)), layer)
        mass = column_scores(q, k, SCALE)[:, PAGE_SIZE:end]
        best = torch.zeros_like(mass, dtype=torch.bool).scatter_(1, mass.topk(64, 1).indices, True)
        assert (best.numpy() == chosen["received"][layer]).mean() > 0.99
        newest = torch.nn.functional.avg_pool1d(column_scores(q[-64:], k, SCALE), 7, 1, 3)[:, PAGE_SIZE:end]
        best = torch.zeros_like(newest, dtype=torch.bool).scatter_(1, newest.topk(64, 1).indices, True)
        assert (best.numpy() == chosen["newest"][layer]).mean() > 0.99


@pytest.mark.parametrize("pool", ["max", "sum"])
def test_intent_is_the_attention_of_remembered_queries(pool: str) -> None:
    how: dict[str, Any] = {"asks": (Ask(10, 14, 0), Ask(100, 102, 2)), "decay": 0.5, "pool": pool}
    store = make_store()
    one = store.add_sequence(plan(**how))
    feed(store, one, list(range(300)))
    s = store.sequence(one)
    assert s.memory.positions == (10, 11, 12, 13, 100, 101)
    store.set_plan(one, plan(**how))
    lives, end = alive(store, one), s.settled * PAGE_SIZE
    weights = torch.exp(-0.5 * torch.tensor([2.0, 2, 2, 2, 0, 0]))
    for layer in range(L):
        (k, _), q = kv(list(range(300)), layer), queries(list(s.memory.positions), layer)
        logits = torch.einsum("ehgd,nhd->ehgn", q.view(-1, H, GROUP, D), k) * SCALE
        paid = logits.softmax(-1) * weights[:, None, None, None]
        score = (paid.amax((0, 2)) if pool == "max" else paid.sum((0, 2)))[:, PAGE_SIZE:end]
        best = torch.zeros_like(score, dtype=torch.bool).scatter_(1, score.topk(64, 1).indices, True)
        assert (best.numpy() == lives[layer, :, PAGE_SIZE:end].astype(bool)).mean() > 0.99


def test_one_choice_for_all_heads() -> None:
    store = make_store()
    one = store.add_sequence(plan(per_head=False))
    feed(store, one, list(range(300)))
    store.set_plan(one, plan(per_head=False))
    lives = alive(store, one)
    assert (lives == lives[:1, :1]).all()
    check_attention(store, one, [500, 501], 1e-4)


def test_masked_tokens_stay_where_they_are_and_free_only_whole_pages() -> None:
    how: dict[str, Any] = {"per_head": False, "repack": False, "score": "random"}
    store = make_store()
    one = store.add_sequence(plan(8, **how))
    feed(store, one, list(range(300)))
    pages = list(store.sequence(one).pages)
    store.set_plan(one, plan(8, **how))
    store.check_integrity()
    s, lives = store.sequence(one), alive(store, one)
    assert not s.survivors
    assert (lives == lives[:1, :1]).all()
    assert (lives[:, :, PAGE_SIZE : s.settled * PAGE_SIZE].sum(-1) == 8).all()
    for old, new in zip(pages, s.pages, strict=True):
        assert new.frames == (old.frames if new.live else ())
    check_attention(store, one, [500, 501], 1e-4)
    # those that died stay dead
    feed(store, one, list(range(600, 700)))
    store.set_plan(one, plan(8, **how))
    assert (alive(store, one)[:, :, :300] <= lives).all()


def test_positions_and_tokens_stay_and_a_turn_continues() -> None:
    store = make_store()
    one = store.add_sequence(plan())
    feed(store, one, list(range(300)))
    store.set_plan(one, plan())
    s = store.sequence(one)
    assert s.token_ids == list(range(300))
    assert len(s.pages) == 10
    for n in range(300, 480):
        generate(store, one, n)
        if n % PAGE_SIZE == 0:
            store.set_plan(one, plan())
        store.check_integrity()
    assert (alive(store, one) <= 1).all()
    check_attention(store, one, [900], 1e-4)


def test_survivors_that_stay_are_not_quantized_again() -> None:
    store = make_store()
    how: dict[str, Any] = {"tier": Tier.INT4, "pages": 5, "score": "received"}
    one = store.add_sequence(plan(**how))
    feed(store, one, list(range(300)))
    store.set_plan(one, plan(**how))
    s = store.sequence(one)
    before = {page.frames: store.arena.buffer[:, list(page.frames)].clone() for page in s.survivors}
    feed(store, one, list(range(300, 450)))
    store.set_plan(one, plan(**how))
    store.check_integrity()
    kept = [page for page in s.survivors if page.frames in before]
    assert kept, "no page of survivors stayed"
    for page in kept:
        assert torch.equal(store.arena.buffer[:, list(page.frames)], before[page.frames])
    assert len(s.survivors) <= 5
    check_attention(store, one, [900, 901], 0.1)


@pytest.mark.parametrize("tier", [Tier.BF16, Tier.INT8, Tier.INT4, Tier.INT3])
def test_survivors_hold_what_the_model_gave(tier: Tier) -> None:
    store = make_store()
    one = store.add_sequence(plan(tier=tier))
    feed(store, one, list(range(300)))
    store.set_plan(one, plan(tier=tier))
    # quantized twice, once in its page and once among survivors
    limit = {Tier.BF16: 1e-5, Tier.INT8: 0.04, Tier.INT4: 0.24, Tier.INT3: 0.24}[tier]
    for page in store.sequence(one).survivors:
        frames = torch.tensor([page.frames], dtype=torch.int32)
        for layer in range(L):
            k, _ = store.read_pages(store.arena.buffer[layer], frames, page.tier)
            for head in range(H):
                slots = np.flatnonzero(page.positions[layer, head] != EMPTY)
                want = kv(page.positions[layer, head][slots].tolist(), layer)[0][:, head]
                assert (k[0, slots, head].float() - want).abs().max() < limit


def test_a_fork_and_other_sessions_keep_what_one_loses() -> None:
    store = make_store(num_frames=4000)
    one = store.add_sequence(plan())
    feed(store, one, list(range(300)))
    twin = store.fork(one)
    store.set_plan(one, plan())
    store.check_integrity()
    assert (alive(store, twin) == 1).all()
    # what one computes now saw a pruned context, what others take over did not
    feed(store, one, list(range(300, 500)))
    other = store.add_sequence(Plan((Tier.BF16,), Tier.BF16))
    matched = store.match_prefix(other, [*range(500), 7])
    assert 0 < matched <= store.first_window_page(300) * PAGE_SIZE
    alone = make_store(num_frames=4000)
    lone = alone.add_sequence(Plan((Tier.BF16,), Tier.BF16))
    got = feed(store, other, list(range(matched, 510)))
    feed(alone, lone, list(range(matched)))
    want = feed(alone, lone, list(range(matched, 510)))
    for a, b in zip(got, want, strict=True):
        assert torch.equal(a, b)


def test_crop_lets_go_of_later_survivors_and_of_what_was_remembered() -> None:
    store = make_store()
    how: dict[str, Any] = {"asks": (Ask(10, 12, 0), Ask(200, 202, 1))}
    one = store.add_sequence(plan(score="recent", **how))
    feed(store, one, list(range(400)))
    store.set_plan(one, plan(score="recent", **how))
    survivors = alive(store, one)
    for n in (310, 150, 33, 0):
        store.crop(one, n)
        store.check_integrity()
        assert (alive(store, one) == survivors[:, :, :n]).all()
    store.release(one)
    assert store.frames_in_use == 0
    memory = QueryMemory().grown([10, 11, 200], [0, 0, 1], torch.arange(3.0).view(3, 1, 1, 1), 300)
    assert memory.cropped(300) is memory
    assert memory.cropped(200).positions == (10, 11)
    assert memory.cropped(200).until == 200
    assert memory.cropped(5).positions == ()
    # tokens without an ask among them were looked at too
    assert QueryMemory().grown([], [], None, 300).cropped(200).until == 200


@pytest.mark.parametrize("tier", [Tier.BF16, Tier.INT4])
def test_a_full_arena_is_thinned(tier: Tier) -> None:
    store = make_store(num_frames=29 * 27 + 1)
    one = store.add_sequence(plan(400, tier, spared=frozenset()))
    feed(store, one, list(range(900)))
    store.prefix.clear()
    others = store.arena.allocate(store.arena.free)
    before = store.frames_in_use
    store.set_plan(one, plan(400, tier, spared=frozenset()))
    assert store.frames_in_use < before
    store.arena.release(others)
    store.check_integrity()
    lives = alive(store, one)
    assert (lives[:, :, : store.sequence(one).settled * PAGE_SIZE].sum(-1) == 400).all()
    check_attention(store, one, [2000], 0.1)


def test_pages_that_others_hold_are_no_room_and_a_refusal_changes_nothing() -> None:
    store = make_store(num_frames=29 * 27 + 1)
    one = store.add_sequence(plan(600, spared=frozenset()))
    feed(store, one, list(range(900)))
    twin = store.fork(one)
    before = alive(store, one)
    with pytest.raises(OutOfFramesError):
        store.set_plan(one, plan(600, spared=frozenset()))
    store.check_integrity()
    assert (alive(store, one) == before).all()
    store.release(twin)
    store.set_plan(one, plan(600, spared=frozenset()))
    store.check_integrity()
    assert (alive(store, one) != before).any()


def test_generated_asks_are_remembered_once_they_are_known() -> None:
    store = make_store()
    one = store.add_sequence(plan(asks=()))
    feed(store, one, list(range(100)))
    for n in range(100, 140):
        generate(store, one, n)
    s = store.sequence(one)
    assert s.memory.positions == ()
    store.set_plan(one, plan(asks=(Ask(110, 114, 1),)))
    assert s.memory.positions == (110, 111, 112, 113)
    for layer in range(L):
        assert torch.equal(s.memory.of(layer), queries([110, 111, 112, 113], layer))
    store.set_plan(one, plan(asks=(Ask(110, 114, 1),)))
    assert s.memory.positions == (110, 111, 112, 113), "an ask was remembered twice"


def test_memory_fades_and_has_an_end() -> None:
    assert places(Ask(0, 5, 0)) == [0, 1, 2, 3, 4]
    assert len(places(Ask(0, 1000, 0))) <= 16
    assert places(Ask(0, 1000, 0))[-1] == 999
    memory = QueryMemory()
    for turn in range(40):
        memory = memory.grown([turn * 10 + i for i in range(10)], [turn] * 10, torch.zeros(10, L, H, D), turn * 10 + 10)
    assert len(memory.positions) == MOST == len(memory.of(0))
    assert set(memory.turns) == set(range(40)), "a turn was forgotten altogether"
    assert list(memory.positions) == sorted(memory.positions)
    weights = memory.weights(0.1)
    assert weights[-1] == 1
    assert torch.isclose(weights[0], torch.exp(torch.tensor(-3.9)))


@pytest.mark.parametrize(
    ("bad", "named"),
    [
        ({"count": -1}, "count"), ({"pages": 1}, "hold 64"), ({"score": "best"}, "best"), ({"tier": Tier.EVICTED}, "EVICTED"),
        ({"decay": -1.0}, "decay"), ({"decay": float("nan")}, "decay"), ({"rope": "left"}, "rope"), ({"pool": "mean"}, "pool"),
        ({"repack": False}, "repack"),
    ],
)  # fmt: skip
def test_bad_thinnings_are_refused_by_name(bad: dict[str, Any], named: str) -> None:
    with pytest.raises(ValueError, match=named):
        Thinning(**{"count": 64, "pages": 2} | bad)


def test_v_is_stored_rotated() -> None:
    """The tests above compare V through attention; here it is looked at."""
    store = make_store()
    one = store.add_sequence(plan())
    feed(store, one, list(range(300)))
    store.set_plan(one, plan())
    page = store.sequence(one).survivors[0]
    _, v = store.read_pages(store.arena.buffer[0], torch.tensor([page.frames], dtype=torch.int32), page.tier)
    want = kv([int(page.positions[0, 0, 0])], 0)[1][0, 0]
    assert (quant.rotate(v.float())[0, 0, 0] - want).abs().max() < 1e-5


def test_survivors_give_way_where_nothing_else_may() -> None:
    store = make_store()
    one = store.add_sequence(plan())
    feed(store, one, list(range(300)))
    store.set_plan(one, plan())
    # a budget that fell, or a newest turn that grew: all that may go has been gathered before
    store.set_plan(one, plan(20))
    store.check_integrity()
    lives, end = alive(store, one), store.sequence(one).settled * PAGE_SIZE
    assert (lives[:, :, PAGE_SIZE:end].sum(-1) == 20).all()
    assert len(store.sequence(one).survivors) <= 2
    store.set_plan(one, plan(5, per_head=False, repack=False))
    store.check_integrity()
    assert store.sequence(one).held_tokens == 300 - end + PAGE_SIZE + 5
    check_attention(store, one, [500, 501], 1e-4)


@pytest.mark.parametrize("window", [0, 64])
def test_survivors_of_a_page_that_a_crop_has_cut_are_thinned(window: int) -> None:
    store = make_store(window=window)
    how: dict[str, Any] = {"score": "random", "spared": frozenset([0, 3])}
    one = store.add_sequence(plan(**how))
    feed(store, one, list(range(400)))
    store.set_plan(one, plan(**how))
    store.crop(one, 150)
    assert alive(store, one)[:, :, 128:].any(), "nobody lives in the page that was cut"
    store.set_plan(one, plan(1, score="random"))
    store.check_integrity()
    assert (alive(store, one)[:, :, PAGE_SIZE:].sum(-1) == 1).all()
    check_attention(store, one, [500, 501], 1e-4)


def test_steps_that_take_no_frame_are_watched_too() -> None:
    store = make_store()
    one = store.add_sequence(plan(score="received"))
    feed(store, one, list(range(100)))
    for n in range(100, 140):
        generate(store, one, n)
    feed(store, one, [140, 141, 142])
    received = store.sequence(one).received
    assert received is not None
    for layer in range(L):
        want = column_scores(queries(list(range(143)), layer), kv(list(range(143)), layer)[0], SCALE)
        assert (received[layer] - want).abs().max() < 1e-3
    store = make_store()
    one = store.add_sequence(plan(asks=(Ask(0, 4, 0), Ask(40, 44, 1))))
    feed(store, one, list(range(40)))
    feed(store, one, list(range(40, 46)))
    assert store.sequence(one).memory.positions == (0, 1, 2, 3, 40, 41, 42, 43)
