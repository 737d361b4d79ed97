"""Tokens bought one by one where pages do not fit whole, and plans to a predicted KL."""

import dataclasses
import itertools
import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstrata.policy import Budget, BudgetTooSmallError, Signals, make_policy
from kvstrata.policy.knapsack import cover
from kvstrata.policy.market import FILL, SHARES, SLACK
from kvstrata.policy.profile import Law, Profile, load_profile
from kvstrata.policy.tags import page_tags
from kvstrata.types import PAGE_SIZE, Plan, Role, Tier
from tests.policy.test_strata import AGENT, ELEMENTS, I2, I4, PAGE, PAGES, N, cost, spans_of

INST = 30
"""Pages of instructions at AGENT's start."""


NOTHING = Signals(4)


def plan(limit: int, signals: Signals = NOTHING, **settings: object) -> Plan:
    return make_policy("strata", **settings).plan(AGENT, N, signals, Budget(PAGE, N, ELEMENTS, bytes=limit))


def spent(planned: Plan, alive: int = 0) -> int:
    """Bytes of a plan: pages that stay whole, and survivors'."""
    whole = [t for p, t in enumerate(planned.tiers) if planned.thinning is None or p in planned.thinning.spared]
    return cost(tuple(whole)) + (planned.thinning.pages * PAGE[planned.thinning.tier] if planned.thinning is not None else 0)


LOWEST = PAGE[Tier.BF16] + (PAGES - 1) * PAGE[I2]
FLOOR = PAGE[Tier.BF16] + (INST - 1) * PAGE[I2]


@given(st.integers(FLOOR, LOWEST - 1), st.integers(0, 99))
def test_whatever_the_budget_it_is_kept_and_instructions_stay_whole(limit, seed):
    mass = tuple(np.random.default_rng(seed).lognormal(0, 2, PAGES).tolist())
    signals = Signals(4, mass, (Tier.BF16,) + (I4,) * (PAGES - 1))
    planned = plan(limit, signals)
    assert spent(planned) <= limit
    assert Tier.EVICTED not in planned.tiers[:INST]
    if planned.thinning is None:
        return
    assert set(range(INST)) <= planned.thinning.spared
    assert planned.thinning.count <= planned.thinning.pages * PAGE_SIZE * FILL - SLACK
    # what waits to be thinned keeps its planes until then
    assert all(planned.tiers[p] is I4 for p in range(PAGES) if p not in planned.thinning.spared)
    # no more is lost than by whole pages alone, by the planner's own count
    assert planned.loss <= plan(limit, signals, thin=False).loss


def test_spared_roles_are_the_users_choice() -> None:
    limit = FLOOR // 2
    with pytest.raises(BudgetTooSmallError):
        plan(limit)
    planned = plan(limit, spare=())
    assert spent(planned) <= limit
    assert planned.thinning is not None
    assert any(p not in planned.thinning.spared for p in range(1, INST))
    assert 0 in planned.thinning.spared
    with pytest.raises(ValueError, match=r"spare is .*accepted: roles"):
        make_policy("strata", spare="inst")


def test_survivors_can_be_sold_but_not_bought_back() -> None:
    """Pages that were thinned to a half: what is paid for them never exceeds what they hold, and where all fits they stay as they are."""
    held = (Tier.BF16,) + (I2,) * 39 + (Tier.EVICTED,) * (PAGES - 40)
    alive = (0.0,) * 40 + (0.5,) * (PAGES - 40)
    pages = int(np.ceil((PAGES - 40) * 0.5 / FILL)) + 2
    paid = PAGE[Tier.BF16] + (39 + pages) * PAGE[I2]
    signals = Signals(4, (), held, 0, alive, pages, I2)
    for limit in (paid, 2 * paid):
        fits = plan(limit, signals)
        assert fits.thinning is None
        assert fits.tiers == held
    for less in (1, 10 * PAGE[I2]):
        short = plan(paid - less, signals)
        assert short.thinning is not None
        assert spent(short) <= paid - less
        # a page that is thinned too may add its own tokens, the others no more than live on
        fresh = sum(p not in short.thinning.spared for p in range(40))
        assert short.thinning.count <= (PAGES - 40) * PAGE_SIZE // 2 + fresh * PAGE_SIZE
        assert all(t is Tier.EVICTED for t in short.tiers[40:])


def test_survivors_take_the_tier_that_loses_least() -> None:
    """With nothing feared but what attention says, fewer tokens at INT4; where every lost token is dear, as many as there are, at INT2."""
    signals = Signals(4, (), (Tier.BF16,) + (I4,) * (PAGES - 1))
    cheap, dear = (plan(LOWEST // 2, signals, spare=(), regret=r).thinning for r in (0.2, 8.0))
    assert cheap is not None and dear is not None
    assert cheap.tier > I2
    assert dear.tier is I2
    assert dear.count > cheap.count
    # survivors that are there have the tier that they have
    there = Signals(4, (), (Tier.BF16,) + (I4,) * 40 + (Tier.EVICTED,) * (PAGES - 41), 0, (0.0,) * 41 + (0.5,) * (PAGES - 41), 20, I4)
    kept = plan(LOWEST // 2, there, spare=(), regret=8.0).thinning
    assert kept is not None and kept.tier is I4


def test_the_market_is_solved_to_the_best_there_is() -> None:
    """Against brute force: all choices of four pages, whole at each tier and by shares."""
    n = 5 * PAGE_SIZE
    spans = spans_of((40, Role.USER, 1), (60, Role.OBS, 1), (60, Role.TOOL_CALL, 2))
    signals = Signals(2, (1.0, 3.0, 0.2, 1.0, 0.7))
    for room in (0.4, 0.9):
        limit = PAGE[Tier.BF16] + int(room * PAGE[I2]) + 3 * PAGE[I2]
        policy = make_policy("strata", spare=(), solver="exact")
        planned = policy.plan(spans, n, signals, Budget(PAGE, n, ELEMENTS, bytes=limit))
        losses = policy._losses(page_tags(spans, n, 2)[1:], signals.mass[1:])
        options = [(PAGE[t], losses[:, 1 + i], False) for i, t in enumerate((I2, Tier.INT3, I4, Tier.INT8))] + [(0, losses[:, 0], False)]
        for f in SHARES:
            kept = f**0.4
            options.append((int(np.ceil(f * PAGE[I2] / FILL)), losses[:, 0] * (1 - kept) + losses[:, 1] * kept, True))
        best = np.inf
        for choice in itertools.product(options, repeat=4):
            # where tokens are bought, two pages for what gathers, and one that is not full
            if sum(o[0] for o in choice) + PAGE[Tier.BF16] + 3 * PAGE[I2] * any(o[2] for o in choice) <= limit:
                best = min(best, sum(o[1][i] for i, o in enumerate(choice)))
        assert planned.loss * n == pytest.approx(best)


# to a predicted KL


@pytest.fixture
def lawful(tmp_path) -> str:
    path = tmp_path / "profile.json"
    profile = dataclasses.replace(load_profile("qwen05"), law=Law(0.0, 300.0, 1.5, 1e-4, 1e-2))
    path.write_text(profile.to_json())
    assert Profile.from_json(path.read_text()).law == profile.law
    return str(path)


@given(st.lists(st.lists(st.floats(0, 5), min_size=4, max_size=4), min_size=1, max_size=5), st.floats(0, 12))
def test_cover_reaches_what_is_asked_at_the_least_cost_within_a_step(losses, most):
    price = np.array([2, 3, 4, 8])
    loss = np.sort(np.array(losses), 1)[:, ::-1]
    cost_ = np.tile(price, (len(loss), 1))
    chosen = cover(cost_, loss, most, np.arange(len(loss), dtype=float))
    rows = np.arange(len(loss))
    every = list(itertools.product(range(4), repeat=len(loss)))
    reaching = [price[list(c)].sum() for c in every if loss[rows, list(c)].sum() <= most + 1e-9]
    if not reaching:
        assert loss[rows, chosen].sum() == pytest.approx(loss.min(1).sum())
        return
    assert loss[rows, chosen].sum() <= most + 1e-6
    assert price[chosen].sum() <= min(reaching) + 6


def test_quality_is_met_at_the_fewest_bytes(lawful: str) -> None:
    law = load_profile(lawful).law
    assert law is not None
    policy, before = make_policy("strata", profile=lawful), None
    for quality in (0.0003, 0.001, 0.003, 0.01):
        planned = policy.plan(AGENT, N, Signals(4), Budget(PAGE, N, ELEMENTS, quality=quality))
        assert planned.predicted_kl is not None and planned.loss is not None
        assert planned.predicted_kl <= quality * (1 + 1e-9)
        assert planned.predicted_kl == pytest.approx(300 * planned.loss**1.5)
        assert planned.thinning is None and Tier.EVICTED not in planned.tiers
        bits = sum(planned.tiers)
        assert before is None or bits < before
        before = bits
        # three quarters are aimed at, in whole pages
        assert planned.predicted_kl > 0.65 * quality or set(planned.tiers[1:]) == {I2}
        # a budget of as many bytes predicts as much, and one of a few pages less does not meet it
        same = policy.plan(AGENT, N, Signals(4), Budget(PAGE, N, ELEMENTS, bytes=cost(planned.tiers)))
        assert same.predicted_kl == pytest.approx(planned.predicted_kl, rel=0.02)
        if set(planned.tiers[1:]) != {I2}:
            less = policy.plan(AGENT, N, Signals(4), Budget(PAGE, N, ELEMENTS, bytes=cost(planned.tiers) - 2 * PAGE[Tier.INT8]))
            assert less.predicted_kl is None or less.predicted_kl > 0.75 * quality


def test_what_was_given_up_is_predicted_too(lawful: str) -> None:
    """Pages that hold INT2 stay there, and the plan says that it misses what was asked."""
    policy = make_policy("strata", profile=lawful)
    planned = policy.plan(AGENT, N, Signals(4, (), (Tier.BF16,) + (I2,) * (PAGES - 1)), Budget(PAGE, N, ELEMENTS, quality=1e-4))
    assert planned.predicted_kl is not None and planned.predicted_kl > 1e-4
    assert set(planned.tiers[1:]) == {I2}


def test_a_quality_takes_no_planes_before_a_step_that_weighs(lawful: str) -> None:
    """What a new turn changes in the losses of what is stored is no reason to attend that at fewer planes."""
    policy, half = make_policy("strata", profile=lawful), PAGES // 2
    held = (Tier.BF16,) + (Tier.INT8,) * (half - 1)
    budget = Budget(PAGE, N, ELEMENTS, quality=0.003)
    before, after = (policy.plan(AGENT, N, Signals(4, (), held, choosing=choosing), budget) for choosing in (True, False))
    assert before.tiers[:half] == held
    assert before.tiers[half:] == after.tiers[half:]
    assert max(after.tiers[1:half]) < Tier.INT8
    assert before.loss is not None and after.loss is not None
    assert before.loss < after.loss
    assert before.predicted_kl is not None
    assert before.predicted_kl < 0.003


def test_a_quality_that_no_bytes_reach_is_refused(tmp_path) -> None:
    path = tmp_path / "profile.json"
    path.write_text(dataclasses.replace(load_profile("qwen05"), law=Law(0.002, 300.0, 1.5, 1e-4, 1e-2)).to_json())
    policy = make_policy("strata", profile=str(path))
    for quality in (1e-300, 0.001, 0.002):
        with pytest.raises(ValueError, match=rf"quality is {quality}; accepted: above 0.002 nats a token"):
            policy.plan(AGENT, N, Signals(4), Budget(PAGE, N, ELEMENTS, quality=quality))
    predicted = policy.plan(AGENT, N, Signals(4), Budget(PAGE, N, ELEMENTS, quality=0.0021)).predicted_kl
    assert predicted is not None and 0.002 < predicted <= 0.0021


def test_quality_needs_a_law_and_a_policy_that_predicts(tmp_path) -> None:
    path = tmp_path / "unlawful.json"
    path.write_text(dataclasses.replace(load_profile("qwen05"), law=None).to_json())
    with pytest.raises(ValueError, match="does not say what KL a loss means"):
        make_policy("strata", profile=str(path)).plan(AGENT, N, Signals(4), Budget(PAGE, N, ELEMENTS, quality=0.01))
    for bad in (
        {"floor": 0.0, "scale": 0.0, "power": 1.0, "low": 1.0, "high": 2.0},
        {"floor": 0.0, "scale": 1.0, "power": 1.0, "low": 2.0, "high": 1.0},
        {"scale": 1.0},
    ):
        document = json.loads(path.read_text()) | {"law": bad}
        path.write_text(json.dumps(document))
        with pytest.raises(ValueError, match=r"law|floor|scale"):
            Profile.from_json(path.read_text())
    with pytest.raises(ValueError, match="exactly one of them"):
        Budget(PAGE, N, ELEMENTS, bits=3.0, quality=0.01)
