"""The planner: what it buys, what it never does, and how long it takes."""

import itertools
import time

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstrata.policy import Budget, BudgetTooSmallError, Signals, make_policy
from kvstrata.policy.profile import distance_bins, load_profile
from kvstrata.policy.tags import page_tags
from kvstrata.policy.triaxial import token_losses
from kvstrata.types import PAGE_SIZE, Plan, Role, Span, Tier

PAGE = {Tier.INT2: 2368, Tier.INT3: 3552, Tier.INT4: 4736, Tier.INT8: 9472, Tier.BF16: 16576}
ELEMENTS = 2 * 32 * 128
I2, I3, I4, I8 = Tier.INT2, Tier.INT3, Tier.INT4, Tier.INT8


def spans_of(*runs: tuple[int, Role, int]) -> tuple[Span, ...]:
    ends = np.cumsum([n for n, _, _ in runs])
    return tuple(Span(int(e - n), int(e), role, turn) for e, (n, role, turn) in zip(ends, runs, strict=True))


AGENT = spans_of((960, Role.INST, 0), (320, Role.USER, 1), (640, Role.OBS, 2), (320, Role.TOOL_CALL, 3), (96, Role.USER, 4))
N = AGENT[-1].end
PAGES = N // PAGE_SIZE


def plan(
    bits: float, mass: tuple[float, ...] = (), held: tuple[Tier, ...] = (), num_tokens: int = N, anchors: int = 0, **settings: object
) -> Plan:
    """As a step has ended that chose `anchors` pages of anchors at INT8."""
    signals = Signals(4, mass, held, anchor_pages=anchors, anchor_tier=I8, choosing=False)
    return make_policy("strata", **settings).plan(AGENT, num_tokens, signals, Budget(PAGE, num_tokens, ELEMENTS, bits=bits))


def cost(tiers: tuple[Tier, ...]) -> int:
    return sum(PAGE[t] for t in tiers if t)


def test_without_signals_it_is_the_profiles_plan() -> None:
    budget = Budget(PAGE, N, ELEMENTS, bits=3.6)
    theirs = make_policy("triaxial").plan(AGENT, N, Signals(4), budget)
    assert plan(3.6, contrast=1).tiers == theirs.tiers


def test_what_was_looked_at_keeps_more_planes() -> None:
    plain = plan(3.3).tiers
    # a page of the schema, which its tags alone leave at the bottom
    page = next(p for p in range(1, 30) if plain[p] is I2)
    ordinary = (0.0, *np.exp2(np.arange(PAGES - 1) % 5))
    mass = tuple(m if p != page else 1e5 for p, m in enumerate(ordinary))
    assert plan(3.3, mass).tiers[page] > I2
    assert plan(3.3, mass, trust=0.0).tiers == plain
    # a page that nobody looked at pays for it
    assert cost(plan(3.3, mass).tiers) <= 3.3 * N * ELEMENTS / PAGE_SIZE / 8


@given(st.lists(st.floats(0.01, 100.0), min_size=5, max_size=5), st.integers(0, 5 * 9472))
def test_exact_is_the_best_plan_there_is(mass, spare):
    n, tiers = 6 * PAGE_SIZE, (I2, I3, I4, I8)
    limit = PAGE[Tier.BF16] + 5 * PAGE[I2] + spare
    spans = spans_of((70, Role.INST, 0), (50, Role.OBS, 1), (40, Role.TOOL_CALL, 1), (32, Role.USER, 2))
    signals = Signals(2, (1.0, *mass))
    budget = Budget(PAGE, n, ELEMENTS, bytes=limit)
    counts = page_tags(spans, n, 2)[1:]
    prior = (counts @ token_losses("default", tiers)) * load_profile("default").decay[distance_bins(5)][:, None]
    told, tags = np.log(mass), np.log(prior[:, 0])
    believed = tags + 0.4 * ((told - told.mean()) - (tags - tags.mean()))
    losses = prior * np.exp(0.8 * believed - tags)[:, None]
    prices = np.array([PAGE[t] for t in tiers])
    fitting = [c for c in itertools.product(range(4), repeat=5) if prices[list(c)].sum() + PAGE[Tier.BF16] <= limit]
    best = min(losses[range(5), list(c)].sum() for c in fitting)
    for solver, most in (("exact", 1e-9), ("greedy", losses[:, 0].max())):
        chosen = make_policy("strata", solver=solver).plan(spans, n, signals, budget).tiers
        assert cost(chosen) <= limit
        assert losses[range(5), [tiers.index(t) for t in chosen[1:]]].sum() <= best * (1 + 1e-9) + most


def test_exact_counts_in_frames_however_large_they_are() -> None:
    """40 pages that may not rise: the best plan is the same where a frame takes one byte and where it takes 100,000."""
    n, frames = 40 * PAGE_SIZE, {I2: 4, I3: 6, I4: 8, I8: 15, Tier.BF16: 28}
    mass = tuple(np.random.default_rng(0).lognormal(size=40))
    signals = Signals(1, mass, (Tier.BF16, *[I8, I4, I3] * 13))
    better = 0
    for spare in range(0, 200, 7):
        losses = {}
        for solver, size in (("exact", 1), ("exact", 100_000), ("greedy", 100_000)):
            budget = Budget({t: c * size for t, c in frames.items()}, n, ELEMENTS, bytes=(28 + 39 * 4 + spare) * size)
            policy = make_policy("strata", solver=solver, trust=1, contrast=1)
            losses[solver, size] = policy.plan(spans_of((n, Role.OBS, 1)), n, signals, budget).loss
        assert losses["exact", 100_000] == pytest.approx(losses["exact", 1])
        better += losses["exact", 100_000] < losses["greedy", 100_000] * (1 - 1e-9)
    # which greedy does not always find
    assert better


def test_what_is_to_come_takes_no_planes_before_it_is_weighed() -> None:
    # at the last turn but one, and a step of 416 tokens later
    before = plan(3.3, num_tokens=N).tiers
    held = (Tier.BF16, *[I4 if p % 3 else I3 for p in range(1, 60)])
    paid = 8 * cost(held) / (60 * ELEMENTS)
    to_come = plan(paid, held=held).tiers
    assert to_come[:60] == held
    assert set(to_come[60:]) == {I2}
    assert len(to_come) == len(before) == PAGES
    # without weighing it is planned once for all
    assert set(plan(paid, held=held, staging=None).tiers[60:]) != {I2}


def test_nothing_is_evicted_that_fits_and_instructions_never() -> None:
    # just enough for INT2 everywhere, then a page less, then as little as instructions take
    lowest = PAGE[Tier.BF16] + (PAGES - 1) * PAGE[I2]
    policy = make_policy("strata", thin=False)
    for whole in (policy, make_policy("strata")):
        fits = whole.plan(AGENT, N, Signals(4), Budget(PAGE, N, ELEMENTS, bytes=lowest))
        assert set(fits.tiers[1:]) == {I2}
        assert fits.thinning is None
    short = policy.plan(AGENT, N, Signals(4), Budget(PAGE, N, ELEMENTS, bytes=lowest - 1)).tiers
    assert short.count(Tier.EVICTED) >= 1
    assert Tier.EVICTED not in short[:30]
    assert cost(short) <= lowest - 1
    floor = PAGE[Tier.BF16] + 29 * PAGE[I2]
    assert policy.plan(AGENT, N, Signals(4), Budget(PAGE, N, ELEMENTS, bytes=floor)).tiers[30:] == (Tier.EVICTED,) * (PAGES - 30)
    with pytest.raises(BudgetTooSmallError, match="below the floor of policy 'strata'"):
        policy.plan(AGENT, N, Signals(4), Budget(PAGE, N, ELEMENTS, bytes=floor - 1))


@given(
    st.lists(st.lists(st.floats(1e-3, 1e3), min_size=PAGES, max_size=PAGES), min_size=2, max_size=5),
    st.floats(1.5, 6.0),
    st.integers(0, 5),
)
def test_no_page_flaps(masses, bits, anchors):
    """Whatever queries say from turn to turn, pages and anchors only ever go; and those that hold what the budget pays for keep it."""
    held: tuple[Tier, ...] = (Tier.BF16,) + (I4,) * (PAGES - 1)
    limit = bits * N * ELEMENTS / PAGE_SIZE / 8
    for mass in masses:
        try:
            now = plan(bits, tuple(mass), held, thin=False, anchors=anchors, rho=0.08)
        except BudgetTooSmallError:
            return
        kept = 0 if now.anchors is None else now.anchors.count // PAGE_SIZE
        assert all(new <= old for new, old in zip(now.tiers, held, strict=True))
        assert kept <= anchors
        assert cost(now.tiers) + kept * PAGE[I8] <= limit
        if cost(held) + anchors * PAGE[I8] <= limit:
            assert (now.tiers, kept) == (held, anchors)
        held, anchors = now.tiers, kept


@pytest.mark.parametrize(("bits", "rho"), [(3.0, 0.0), (1.6, 0.0), (3.0, (0.0, 0.01, 0.02, 0.05))])
def test_a_plan_of_128k_tokens_takes_less_than_20_milliseconds(bits: float, rho: object) -> None:
    tokens, random = 1 << 17, np.random.default_rng(0)
    spans: list[Span] = []
    while not spans or spans[-1].end < tokens:
        start = spans[-1].end if spans else 0
        role = list(Role)[int(random.integers(7))]
        spans.append(Span(start, min(tokens, start + int(random.integers(5, 900))), role, len(spans) // 7))
    pages = tokens // PAGE_SIZE
    signals = Signals(spans[-1].turn, tuple(random.lognormal(-5, 2, pages).tolist()), (I4,) * pages)
    budget, policy = Budget(PAGE, tokens, ELEMENTS, bits=bits), make_policy("strata", rho=rho)
    spent = []
    while len(spent) < 60 and min(spent, default=1.0) >= 0.020:
        # of this process alone: others take the core too
        start_at = time.process_time()
        planned = policy.plan(spans, tokens, signals, budget)
        spent.append(time.process_time() - start_at)
    assert (planned.thinning is not None) == (bits == 1.6)
    anchors = 0 if planned.anchors is None else planned.anchors.count // PAGE_SIZE
    assert (anchors > 0) == (rho != 0.0)
    assert planned.thinning is not None or cost(planned.tiers) + anchors * PAGE[I8] <= budget.limit
    assert min(spent) < 0.020


@pytest.mark.parametrize(
    "wrong",
    [
        {"trust": 1.5},
        {"trust": True},
        {"contrast": -0.1},
        {"decay": 2.0},
        {"refresh": 0},
        {"solver": "luck"},
        {"staging": "INT5"},
        {"staging": "EVICTED"},
        {"staging": Tier.BF16},
    ],
)
def test_wrong_settings_are_refused_by_name(wrong: dict[str, object]) -> None:
    with pytest.raises(ValueError, match=f"{next(iter(wrong)) if wrong != {'staging': 'INT5'} else 'unknown tier'}.*accepted"):
        make_policy("strata", **wrong)
