"""Pages settle with more planes than planned, are weighed by the newest queries, and give planes up with the next plan."""

import numpy as np
import pytest
import torch

from kvstrata.attend import attend
from kvstrata.ops.share import output_shares
from kvstrata.store.arena import OutOfFramesError
from kvstrata.store.store import Store
from kvstrata.store.weigh import is_due, weigh
from kvstrata.types import PAGE_SIZE, Plan, Tier, Weighing
from tests.store.anchored import SCALE, feed, generate, queries
from tests.store.reference import L, kv, make_store, stored

TOKENS = [(7 * i * i + i) % 1000 for i in range(400)]


def plan(body: Tier = Tier.INT2, **how: object) -> Plan:
    return Plan((Tier.BF16,), body, weighing=Weighing(**how))


def tiers(store: Store, sequence: int) -> list[Tier]:
    return [page.tier for page in store.sequence(sequence).pages]


@pytest.mark.parametrize("window", [0, 64])
def test_pages_settle_with_more_planes_and_give_them_up(window: int) -> None:
    store = make_store(window=window)
    a, b = store.add_sequence(plan()), store.add_sequence(Plan((Tier.BF16,), Tier.INT2))
    for sequence in (a, b):
        feed(store, sequence, TOKENS[:300])
    settled = store.sequence(a).settled
    assert settled == (9 if window == 0 else 6)
    assert tiers(store, a)[:settled] == [Tier.BF16] + [Tier.INT4] * (settled - 1)
    store.set_plan(a, plan())
    store.check_integrity()
    # and are what they had been if they had never had those planes
    assert tiers(store, a) == tiers(store, b)
    assert store.sequence(a).frames == store.sequence(b).frames
    for layer in range(L):
        for mine, theirs in zip(stored(store, a, layer), stored(store, b, layer), strict=True):
            assert all(torch.equal(mine[p], theirs[p]) for p in theirs)
    # token by token too
    for token in TOKENS[300:400]:
        generate(store, a, token)
        assert {Tier.INT4, Tier.INT2} >= set(tiers(store, a)[1 : store.sequence(a).settled])
    assert tiers(store, a)[settled] is Tier.INT4


def test_without_frames_for_it_pages_settle_where_they_are_to_be() -> None:
    lowest = make_store(window=0).layout
    needed = 2 * lowest.frames(Tier.BF16) + 8 * lowest.frames(Tier.INT2)
    store = make_store(num_frames=1 + needed, window=0)
    a = store.add_sequence(plan())
    feed(store, a, TOKENS[:300])
    assert tiers(store, a)[1:9] == [Tier.INT2] * 8
    with pytest.raises(OutOfFramesError):
        feed(store, a, TOKENS[:300])
    store.check_integrity()
    assert len(store.sequence(a).token_ids) == 300


def test_weights_are_the_shares_of_the_newest_queries() -> None:
    store = make_store(window=0)
    a = store.add_sequence(plan(tier=Tier.INT8))
    feed(store, a, TOKENS[:330])
    assert is_due(store.sequence(a), 330)
    weigh(store, store.sequence(a))
    s = store.sequence(a)
    assert (len(s.weights), s.weighed_at) == (10, 330)
    expected = np.zeros(10)
    for layer in range(L):
        k, v = kv(TOKENS[:330], layer)
        shares = output_shares(queries(TOKENS[266:330], layer), k, v, SCALE).sum(0)
        expected += shares[:320].view(10, PAGE_SIZE).sum(1).double().numpy()
    # eight bits, and steps of a twelfth of a factor of two
    assert np.abs(np.log2(s.weights / expected)).max() < 0.1
    # the first weights fade to half, the newest queries' come on top
    first = s.weights
    for token in TOKENS[330:394]:
        generate(store, a, token)
        assert is_due(s, 1) == (s.num_tokens == 394)
    weigh(store, s)
    assert len(s.weights) == 12
    assert (s.weights[:10] >= 0.5 * first * 2 ** (-1 / 24)).all()


def test_weights_follow_crops_and_forks() -> None:
    store = make_store(window=0)
    a = store.add_sequence(plan())
    feed(store, a, TOKENS[:330])
    weigh(store, store.sequence(a))
    before = store.sequence(a).weights
    twin = store.fork(a)
    store.crop(a, 150)
    assert store.sequence(a).weights.tolist() == before[:4].tolist()
    assert store.sequence(twin).weights.tolist() == before.tolist()
    feed(store, a, TOKENS[200:330])
    weigh(store, store.sequence(a))
    assert len(store.sequence(a).weights) == 8
    assert store.sequence(twin).weights.tolist() == before.tolist()
    for sequence in (a, twin):
        store.release(sequence)
    store.check_integrity()


def test_weights_do_not_depend_on_the_batch() -> None:
    alone, together = make_store(window=0), make_store(window=0)
    other = [t + 1 for t in TOKENS[:200]]
    a = alone.add_sequence(plan())
    feed(alone, a, TOKENS[:300])
    weigh(alone, alone.sequence(a))
    b, c = together.add_sequence(plan()), together.add_sequence(plan())
    step = together.begin([c, b], [other, TOKENS[:300]])
    for layer in range(L):
        flat = other + TOKENS[:300]
        q, (k, v) = queries(flat, layer), kv(flat, layer)
        attend(together, step, layer, q, k, v, SCALE)
        step.write(layer, k, v, q, SCALE)
    step.commit()
    weigh(together, together.sequence(b))
    assert together.sequence(b).weights.tolist() == alone.sequence(a).weights.tolist()


@pytest.mark.parametrize("wrong", [{"refresh": 0}, {"refresh": True}, {"decay": -0.1}, {"decay": 1.1}])
def test_wrong_weighings_are_refused(wrong: dict[str, object]) -> None:
    with pytest.raises(ValueError, match=f"{next(iter(wrong))} is .*accepted"):
        Weighing(**wrong)
