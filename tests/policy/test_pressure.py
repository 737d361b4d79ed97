"""Who gives way under pressure: the decision alone."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from kvstrata.policy.pressure import Concession, Holding, concede, rank_pages
from kvstrata.policy.role import GIVE_UP
from kvstrata.policy.tags import page_tags
from kvstrata.types import PAGE_SIZE, Role, Span, Tier

FRAMES = {Tier.EVICTED: 0, Tier.INT2: 2, Tier.INT3: 3, Tier.INT4: 4, Tier.INT8: 8, Tier.BF16: 14}
LADDER = (Tier.INT2, Tier.INT3, Tier.INT4, Tier.INT8)
OBS, CALL, INST = GIVE_UP.index(Role.OBS), GIVE_UP.index(Role.TOOL_CALL), 2 * len(GIVE_UP)


def holding(pages: list[tuple[Tier, int]], shared: tuple[int, ...] = (), survivors: int = 0, tokens: int = 0) -> Holding:
    frames = sum(FRAMES[t] for t, _ in pages) + survivors * FRAMES[Tier.INT2]
    kept = frozenset(p for p, (_, rank) in enumerate(pages) if rank == INST)
    return Holding(
        tuple(t for t, _ in pages), tuple(r for _, r in pages), kept, frozenset(shared), tokens or PAGE_SIZE * len(pages), frames, survivors
    )


def after(h: Holding, c: Concession) -> Holding:
    """What is held once a concession was made."""
    tiers = [c.tiers.get(p, t) for p, t in enumerate(h.tiers)]
    assert c.survivors < h.survivors + len(c.thinned) or not c.thinned
    for page in c.thinned:
        tiers[page] = Tier.EVICTED
    frames = sum(FRAMES[t] for t in tiers) + c.survivors * FRAMES[Tier.INT2]
    return Holding(tuple(tiers), h.ranks, h.kept, h.shared, h.tokens, frames, c.survivors)


page = st.tuples(st.sampled_from([Tier.BF16, *LADDER, Tier.EVICTED]), st.sampled_from([OBS, CALL, INST]))
held = st.lists(page, min_size=1, max_size=12).map(holding)


@given(st.lists(held, min_size=1, max_size=3), st.integers(1, 60))
def test_enough_is_freed_or_all_is_given(holdings, short):
    by_id = dict(enumerate(holdings))
    given_up = concede(by_id, FRAMES, LADDER, short)
    later = {i: after(h, given_up[i]) if i in given_up else h for i, h in by_id.items()}
    freed = sum(h.frames - later[i].frames for i, h in by_id.items())
    # nothing rises, and instructions live
    for i, h in by_id.items():
        assert all(new <= old for old, new in zip(h.tiers, later[i].tiers, strict=True))
        assert all(later[i].tiers[p] > Tier.EVICTED for p in h.kept if h.tiers[p] > Tier.EVICTED)
        assert all(t is Tier.BF16 for t, old in zip(later[i].tiers, h.tiers, strict=True) if old is Tier.BF16)
    if freed < short:
        assert all(later[i].survivors == 0 for i in by_id)
        for i, h in by_id.items():
            assert all(t in (Tier.EVICTED, Tier.BF16) or (t is Tier.INT2 and p in h.kept) for p, t in enumerate(later[i].tiers))
        assert not concede(later, FRAMES, LADDER, short)
    # the same again
    assert concede(by_id, FRAMES, LADDER, short) == given_up
    # no more than a step too much
    assert freed < short + FRAMES[Tier.INT8]


def test_old_observations_first_then_others_instructions_last() -> None:
    I4, I3, I2 = Tier.INT4, Tier.INT3, Tier.INT2
    h = holding([(Tier.BF16, INST), (I4, INST), (I4, OBS), (I4, CALL), (I4, OBS)])
    assert concede({7: h}, FRAMES, LADDER, 1) == {7: Concession({2: I3})}
    assert concede({7: h}, FRAMES, LADDER, 2) == {7: Concession({2: I3, 4: I3})}
    assert concede({7: h}, FRAMES, LADDER, 4)[7].tiers == {2: I2, 4: I3, 3: I3}
    assert concede({7: h}, FRAMES, LADDER, 7)[7].tiers == {1: I3, 2: I2, 3: I2, 4: I2}
    # then tokens of observations: two pages become one
    some = concede({7: h}, FRAMES, LADDER, 10)[7]
    assert (some.thinned, some.survivors) == ([2, 4], 1)
    every = concede({7: h}, FRAMES, LADDER, 1000)[7]
    assert (sorted(every.thinned), every.survivors) == ([2, 3, 4], 0)
    assert every.tiers[1] is I2


def test_who_holds_most_gives_first_and_sessions_end_level() -> None:
    I4 = Tier.INT4
    much, little = holding([(I4, OBS)] * 8), holding([(Tier.INT3, OBS)] * 8)
    given_up = concede({1: little, 2: much}, FRAMES, LADDER, 8)
    assert set(given_up) == {2}
    given_up = concede({1: little, 2: much}, FRAMES, LADDER, 12)
    later = [after(h, given_up[i]).frames for i, h in ((1, little), (2, much))]
    assert abs(later[0] - later[1]) <= 1
    # one that has nothing but instructions pays after another's calls
    given_up = concede({1: holding([(I4, INST)] * 8), 2: holding([(I4, CALL)] * 2)}, FRAMES, LADDER, 4)
    assert set(given_up) == {2}


def test_what_others_hold_too_frees_nothing_until_they_give_it_up() -> None:
    I4 = Tier.INT4
    mine, alone = holding([(I4, OBS)] * 4, shared=(0, 1, 2, 3)), holding([(I4, OBS)] * 2)
    given_up = concede({1: mine, 2: alone}, FRAMES, LADDER, 2)
    assert set(given_up) == {2}
    # shared pages are not gathered, for that needs frames: they go whole, last
    given_up = concede({1: mine}, FRAMES, LADDER, 100)
    assert given_up[1].tiers == dict.fromkeys(range(4), Tier.EVICTED)
    assert given_up[1].thinned == []


def test_pages_rank_by_their_tags() -> None:
    runs = ((Role.INST, 0), (Role.OBS, 1), (Role.TOOL_CALL, 1), (Role.OBS, 3), (Role.USER, 3))
    spans = [Span(i * PAGE_SIZE, (i + 1) * PAGE_SIZE, role, turn) for i, (role, turn) in enumerate(runs)]
    spans[-1] = Span(128, 160, Role.USER, 3)
    ranks, kept = rank_pages(page_tags(spans, 160))
    assert kept == {0}
    order = [int(i) for i in np.argsort(ranks, kind="stable")]
    # the newest turn after older calls, instructions after all
    assert order == [1, 2, 3, 4, 0]
