"""Anchors bought out of a planner's bytes: which share, what is held, and when there are none."""

import itertools
import json
import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstrata.policy import Budget, Signals, anchored, make_policy
from kvstrata.policy.anchored import GAINS, POWER, buy, factors, pages_of
from kvstrata.policy.profile import Law, load_profile
from kvstrata.policy.tags import page_tags
from kvstrata.policy.triaxial import token_losses
from kvstrata.types import PAGE_SIZE, Plan, Role, Tier
from tests.policy.test_strata import AGENT, ELEMENTS, I2, I3, I4, I8, PAGE, PAGES, N, cost, spans_of

TIERS = (I2, I3, I4, I8)
RESULTS = Path(__file__).parents[2] / "docs" / "results" / "hyquant.json"
BODY = PAGES - 1


def plan(limit: int, signals: Signals, rho: object = (0.0, 0.02, 0.05), **settings: object) -> Plan:
    return make_policy("strata", rho=rho, **settings).plan(AGENT, N, signals, Budget(PAGE, N, ELEMENTS, bytes=limit))


def pages(planned: Plan) -> int:
    return 0 if planned.anchors is None else planned.anchors.count // PAGE_SIZE


def test_gains_are_those_that_were_measured() -> None:
    runs: dict[tuple[str, str], float] = {
        (r["label"], r["trace"]): r["kl"] for r in json.loads(RESULTS.read_text())["runs"] if r["group"] == "anchors"
    }
    for tier, share in ((I2, 0.05), (I2, 0.10), (I4, 0.02)):
        with_, without = (sum(runs[label, f"multi_turn_base_{i}"] for i in (0, 20)) for label in (f"{tier.name} + {share:.0%}", tier.name))
        assert dict(GAINS[tier])[share] == pytest.approx(with_ / without, abs=1e-3)
    for points in GAINS.values():
        kept = [1.0, *(g for _, g in points)]
        assert kept == sorted(kept, reverse=True) and len(set(kept)) == len(kept)


def test_between_measured_shares_the_logarithm_is_straight_and_beyond_nothing_is_gained() -> None:
    # in nats: losses go with a root of those
    gone, *kept = factors(0.05, TIERS, I8) ** POWER
    assert (gone, kept) == (1.0, pytest.approx([0.354, 0.44, 0.56, 1.0]))
    assert factors(0.035, TIERS, I8)[1] ** POWER == pytest.approx(math.sqrt(0.58 * 0.354))
    assert factors(0.01, TIERS, I8)[2] ** POWER == pytest.approx(math.sqrt(0.60))
    assert factors(0.5, TIERS, I8).tolist() == factors(0.10, TIERS, I8).tolist()
    assert factors(0.0, TIERS, I8).tolist() == [1.0] * 5
    # at tiers from the anchors' own on there is no gain
    assert factors(0.05, TIERS, I4)[3] == factors(0.05, TIERS, I4)[4] == 1.0
    assert factors(0.05, TIERS, Tier.BF16)[3] < 1.0


@given(st.lists(st.floats(0.01, 100.0), min_size=5, max_size=5), st.integers(-2000, 5 * 9472), st.sampled_from([0, 1]))
def test_the_share_and_the_tiers_are_the_best_there_are(mass, spare, held):
    """Against brute force over both: five pages, none, one or two pages of anchors."""
    n, rho = 6 * PAGE_SIZE, (0.0, 0.2, 0.4)
    spans = spans_of((70, Role.INST, 0), (50, Role.OBS, 1), (40, Role.TOOL_CALL, 1), (32, Role.USER, 2))
    limit = PAGE[Tier.BF16] + 5 * PAGE[I2] + spare
    budget = Budget(PAGE, n, ELEMENTS, bytes=limit)
    signals = Signals(2, (1.0, *mass), anchor_pages=held, anchor_tier=I8)
    policy = make_policy("strata", rho=rho, solver="exact", spare=(), thin=False)
    planned = policy.plan(spans, n, signals, budget)
    losses = policy._losses(page_tags(spans, n, 2)[1:], signals.mass[1:])
    if spare < 0:
        assert planned.anchors is None
        return
    prices, best = np.array([PAGE[t] for t in TIERS]), np.inf
    choices = np.array(list(itertools.product(range(4), repeat=5)))
    price = prices[choices].sum(1) + PAGE[Tier.BF16]
    least = min(held, spare // PAGE[I8])
    for bought in range(least, 3):
        left = losses[:, 1:].copy()
        for i, points in enumerate(GAINS.values()):
            at, kept = zip((0.0, 1.0), *points, strict=True)
            left[:, i] *= np.exp(np.interp(bought / 5, at, np.log(kept)) / 1.85)
        fits = price + bought * PAGE[I8] <= limit
        if fits.any():
            best = min(best, left[np.arange(5), choices[fits]].sum(1).min())
    assert planned.loss * n == pytest.approx(best)
    assert cost(planned.tiers) + pages(planned) * PAGE[I8] <= limit
    assert pages(planned) >= least


def test_a_share_decided_on_classes_of_pages_is_as_good_as_page_by_page(monkeypatch: pytest.MonkeyPatch) -> None:
    random, n, window = np.random.default_rng(0), 3000, 4
    table = token_losses("default", (Tier.EVICTED, *TIERS))
    losses = random.multinomial(PAGE_SIZE, np.full(len(table), 1 / len(table)), n) @ table * random.lognormal(0, 2, n)[:, None]
    most = random.choice([2, 3, 4, 8], n)
    shares, picked = (0.0, 0.01, 0.02, 0.05, 0.1), set()
    for bits in (2.6, 2.8, 3.0, 3.3, 4.0, 5.0):
        budget = Budget(PAGE, (n + window) * PAGE_SIZE, ELEMENTS, bits=bits, window_pages=window)
        for contrast in (0.2, 1.0):
            told = losses**contrast
            monkeypatch.setattr(anchored, "CLASSES", 512)
            mine = buy(shares, I8, TIERS, told, most, Signals(), budget, "greedy")
            monkeypatch.setattr(anchored, "CLASSES", n)
            totals = {}
            for share in shares:
                only = buy((share,), I8, TIERS, told, most, Signals(), budget, "greedy")
                totals[only.pages] = _total(told * only.factors, most, only.budget.limit - window * PAGE[Tier.BF16])
            best = buy(shares, I8, TIERS, told, most, Signals(), budget, "greedy")
            assert totals[best.pages] <= 1.001 * min(totals.values())
            assert totals[mine.pages] <= 1.005 * totals[best.pages]
            picked.add(mine.pages)
    assert len(picked) > 1


def _total(losses: np.ndarray, most: np.ndarray, limit: int) -> float:
    """Least loss by bisection over a price of bytes: every page by itself, as no solver of ours does it."""
    price = np.array([PAGE[t] for t in TIERS], float)
    allowed = np.array(TIERS)[None, :] <= most[:, None]
    low, high = 0.0, float(losses.max())
    for _ in range(100):
        mid = math.sqrt(max(low, 1e-15) * high)
        choice = np.where(allowed, losses[:, 1:] + mid * price, np.inf).argmin(1)
        low, high = (mid, high) if price[choice].sum() > limit else (low, mid)
    choice = np.where(allowed, losses[:, 1:] + high * price, np.inf).argmin(1)
    return float(losses[np.arange(len(losses)), 1 + choice].sum())


LOWEST = PAGE[Tier.BF16] + BODY * PAGE[I2]
HELD = (Tier.BF16,) + (I4,) * BODY


def held(count: int, *, choosing: bool, tier: Tier = I8, tiers: tuple[Tier, ...] = HELD) -> Signals:
    return Signals(4, (), tiers, anchor_pages=count, anchor_tier=tier, choosing=choosing)


def test_a_single_share_is_that_share_or_as_much_of_it_as_fits() -> None:
    rich = LOWEST + 40 * PAGE[I8]
    assert pages(plan(rich, Signals(4), 0.05)) == pages_of(0.05, BODY) == 4
    assert plan(rich, Signals(4), 0.05) == plan(rich, Signals(4), [0.05])
    planned = plan(rich, Signals(4), 0.05, anchor_tier="bf16")
    assert planned.anchors is not None and (planned.anchors.tier, planned.anchors.refresh) == (Tier.BF16, 64)
    for spare, paid in ((0, 0), (PAGE[I8] - 1, 0), (PAGE[I8], 1), (3 * PAGE[I8] + 5, 3)):
        planned = plan(LOWEST + spare, Signals(4), 0.05)
        assert pages(planned) == paid
        assert cost(planned.tiers) + paid * PAGE[I8] <= LOWEST + spare
    # none by default, and none without a budget
    assert make_policy("strata").plan(AGENT, N, Signals(4), Budget(PAGE, N, ELEMENTS, bytes=rich)).anchors is None
    assert make_policy("strata", rho=0.05).plan(AGENT, N, Signals(4)).anchors is None


def test_what_is_held_is_counted_and_more_is_bought_only_for_a_choice() -> None:
    rich = LOWEST + 40 * PAGE[I8]
    for count in (0, 1, 3, 4):
        after = plan(rich, held(count, choosing=False))
        assert pages(after) == count
        assert cost(after.tiers) + count * PAGE[I8] <= rich
        assert pages(plan(rich, held(count, choosing=True))) >= count
    # of a body that was cut no more than the largest share
    assert pages(plan(rich, held(9, choosing=True))) == pages(plan(rich, held(9, choosing=False))) == 4
    # what others had chosen at a higher tier costs what it costs until it is replaced
    tight = cost(HELD) + 3 * PAGE[I8]
    for choosing in (False, True):
        theirs = plan(tight, held(3, choosing=choosing, tier=Tier.BF16), 0.05)
        assert cost(theirs.tiers) + max(min(3, pages(theirs)) * PAGE[Tier.BF16], pages(theirs) * PAGE[I8]) <= tight
        assert pages(theirs) >= 3


def test_where_something_is_gone_or_does_not_fit_there_are_none() -> None:
    for choosing in (False, True):
        # as many as leave every page the lowest tier
        assert pages(plan(LOWEST + 2 * PAGE[I8], held(4, choosing=choosing))) == 2
        short = plan(LOWEST // 2, held(4, choosing=choosing), spare=())
        assert short.anchors is None and short.thinning is not None
        whole = plan(LOWEST - 1, held(4, choosing=choosing), thin=False)
        assert whole.anchors is None and Tier.EVICTED in whole.tiers
        # and no more from then on, for what is gone would have been worth more
        rich = LOWEST + 40 * PAGE[I8]
        gone = (*HELD[:-3], Tier.EVICTED, *HELD[-2:])
        assert plan(rich, held(0, choosing=choosing, tiers=gone), 0.05).anchors is None
        thinned = Signals(4, (), gone, 0, (0.0,) * (PAGES - 3) + (0.5, 0.0, 0.0), 1, I2, choosing=choosing)
        assert plan(rich, thinned, 0.05).anchors is None


def test_a_quality_buys_none(tmp_path: Path) -> None:
    path = tmp_path / "profile.json"
    path.write_text(replace(load_profile("qwen05"), law=Law(0.0, 300.0, 1.5, 1e-4, 1e-2)).to_json())
    budget = Budget(PAGE, N, ELEMENTS, quality=0.003)
    with_, without = (make_policy("strata", profile=str(path), rho=rho).plan(AGENT, N, Signals(4), budget) for rho in (0.05, 0.0))
    assert with_ == without and with_.predicted_kl is not None
    # nor is a KL predicted that nobody measured
    rich = Budget(PAGE, N, ELEMENTS, bytes=LOWEST + 40 * PAGE[I8])
    assert make_policy("strata", profile=str(path), rho=0.05).plan(AGENT, N, Signals(4), rich).predicted_kl is None


@given(st.lists(st.booleans(), min_size=2, max_size=8), st.floats(2.6, 6.0), st.integers(0, 99))
def test_a_share_once_bought_is_kept_while_a_conversation_grows(choices, bits, seed):
    """Turn by turn: pages of anchors never fall, tiers never rise, and both together keep to the budget."""
    random, stored, bought = np.random.default_rng(seed), (), 0
    for i, choosing in enumerate(choices):
        n = N - 32 * (len(choices) - 1 - i) * 5
        budget = Budget(PAGE, n, ELEMENTS, bits=bits)
        if Budget(PAGE, N, ELEMENTS, bits=bits).limit < LOWEST:
            return
        spans = tuple(s for s in AGENT if s.end <= n)
        spans = (*spans, *(type(s)(s.start, n, s.role, s.turn) for s in AGENT if s.start < n < s.end))
        policy = make_policy("strata", rho=(0.0, 0.01, 0.02, 0.05), spare=())
        mass = tuple(random.lognormal(0, 2, len(stored)).tolist())
        signals = Signals(4, mass, stored, anchor_pages=bought, anchor_tier=I8, choosing=choosing)
        planned = policy.plan(spans, n, signals, budget)
        assert planned == policy.plan(spans, n, signals, budget)
        assert cost(planned.tiers) + max(bought, pages(planned)) * PAGE[I8] <= budget.limit
        assert pages(planned) >= bought if choosing else pages(planned) == bought
        assert all(new <= old for new, old in zip(planned.tiers, stored, strict=False))
        stored, bought = planned.tiers, pages(planned)


@pytest.mark.parametrize(
    "wrong",
    [{"rho": 1.5}, {"rho": "0.05"}, {"rho": ()}, {"rho": True}, {"rho": (0.1, -0.1)}, {"rho": math.nan}, {"anchor_tier": "INT3"},
     {"anchor_tier": 0}],
)  # fmt: skip
def test_wrong_shares_and_tiers_are_refused_by_name(wrong: dict[str, object]) -> None:
    with pytest.raises(ValueError, match=f"^{next(iter(wrong))} is .*accepted"):
        make_policy("strata", **wrong)


def test_a_codec_without_the_anchors_tier_has_the_next_above() -> None:
    assert make_policy("strata", tiers=(I2, I4)).anchor_tier is Tier.BF16
    assert make_policy("strata", tiers=(I2, I4), anchor_tier="int4").anchor_tier is I4
    assert make_policy("strata", rho=[0.02, 0, 0.02]).rho == (0.0, 0.02)
