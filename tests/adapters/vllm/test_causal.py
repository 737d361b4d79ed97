"""Tiers decided page by page: within the allowance at every length, the same for a common prefix, dear tags before cheap ones."""

from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from kvstrata.adapters.vllm.causal import Allowance, CausalPlanner, Market, check_request, hull, most_frames
from kvstrata.adapters.vllm.settings import EngineSettings
from kvstrata.adapters.vllm.tags import code
from kvstrata.policy.tags import NUM_TAGS
from kvstrata.types import PAGE_SIZE, Role, Tier

KV_HEADS, DIM = 8, 128


def tag_by_id(token_ids: Sequence[int]) -> NDArray[np.int64]:
    """A page whose first id is i is all of role i."""
    counts = np.zeros(NUM_TAGS, np.int64)
    counts[code(tuple(Role)[token_ids[0] % len(Role)], False)] = PAGE_SIZE
    return counts


def plan(settings: EngineSettings, roles: Sequence[int]) -> list[Tier]:
    layout = settings.layout(KV_HEADS, DIM)
    market = Market.of(settings, layout) if settings.policy == "triaxial" else None
    planner = CausalPlanner(settings, layout, tag_by_id if market else None, market)
    return planner.extend([r for r in roles for _ in range(PAGE_SIZE)], len(roles))


def frames(settings: EngineSettings, tiers: Sequence[Tier]) -> int:
    layout = settings.layout(KV_HEADS, DIM)
    return sum(layout.frames(t) for t in tiers)


@pytest.mark.parametrize("policy", ["uniform", "triaxial"])
@given(
    st.floats(2.4, 9.5), st.sampled_from([0, 64]), st.integers(0, 2), st.sampled_from([1024, 4096]),
    st.lists(st.tuples(st.integers(0, 6), st.integers(1, 60)), max_size=6),
)  # fmt: skip
def test_no_length_takes_more_than_the_budget(
    policy: str, bits: float, window: int, sinks: int, horizon: int, runs: list[tuple[int, int]]
) -> None:
    s = EngineSettings(policy=policy, budget_bits=bits, window=window, sinks=sinks, horizon=horizon)
    layout, group = s.layout(KV_HEADS, DIM), s.group // PAGE_SIZE
    roles = [role for role, n in runs for _ in range(n)]
    tiers = plan(s, roles)
    ring, lowest = group * layout.frames(Tier.BF16), layout.frames(s.tiers[0])
    for n in range(1, len(tiers) + 1):
        held = ring + frames(s, tiers[:n])
        counted = max(n * PAGE_SIZE, horizon) * bits * layout.elements(1) / 8 / layout.frame_bytes
        cheapest = ring + min(n, sinks) * layout.frames(Tier.BF16) + max(0, n - sinks) * lowest
        assert held <= max(counted, cheapest)
        if n % group == 0:
            assert held <= most_frames(s, layout, n * PAGE_SIZE + 1)


@pytest.mark.parametrize("policy", ["uniform", "triaxial"])
@given(st.lists(st.integers(0, 6), min_size=1, max_size=40), st.lists(st.integers(0, 6), max_size=20))
def test_what_follows_changes_no_tier(policy: str, roles: list[int], more: list[int]) -> None:
    s = EngineSettings(policy=policy, budget_bits=3.3, horizon=1024)
    assert plan(s, [*roles, *more])[: len(roles)] == plan(s, roles)


def test_a_long_request_uses_its_budget() -> None:
    for policy in ("uniform", "triaxial"):
        s = EngineSettings(policy=policy, budget_bits=3.0)
        rng = np.random.default_rng(0)
        tiers = plan(s, rng.integers(0, 7, 1000).tolist())
        layout = s.layout(KV_HEADS, DIM)
        bits = layout.bits_per_element(frames(s, tiers) + layout.frames(Tier.BF16), len(tiers) * PAGE_SIZE)
        assert 2.95 <= bits <= 3.0, (policy, bits)


def test_dear_tags_get_the_planes() -> None:
    s = EngineSettings(policy="triaxial", budget_bits=3.0)
    layout = s.layout(KV_HEADS, DIM)
    market = Market.of(s, layout)
    inst = tuple(Role).index(Role.INST)
    obs = tuple(Role).index(Role.OBS)
    losses = {r: market.loss[code(tuple(Role)[r], False), 0] for r in (inst, obs)}
    cheap, dear = sorted(losses, key=lambda r: losses[r])
    tiers = plan(s, [cheap, cheap, cheap, dear] * 100)[4:]
    by_role = {r: [t for i, t in enumerate(tiers) if [cheap, cheap, cheap, dear][i % 4] == r] for r in (cheap, dear)}
    assert np.mean(by_role[dear]) > np.mean(by_role[cheap]) + 0.5


def test_the_hull_skips_what_is_above_it() -> None:
    assert hull(np.array([10.0, 9.0, 2.0, 1.0]), (2, 3, 4, 8)) == [(4.0, 2, 2), (0.25, 4, 3)]
    assert hull(np.array([1.0, 1.0, 1.0]), (2, 3, 4)) == []


def test_a_budget_below_the_lowest_tier_is_refused_by_its_floor() -> None:
    s = EngineSettings(policy="uniform", budget_bits=2.0)
    with pytest.raises(ValueError, match=r"budget_bits 2 is below 2\.31, what INT2 takes"):
        Allowance.of(s, s.layout(KV_HEADS, DIM))


@pytest.mark.parametrize("budget", [5e-324, 1, True, 2.3])
def test_a_request_below_the_lowest_tier_is_refused_before_a_scheduler_meets_it(budget: float) -> None:
    server = EngineSettings(budget_bits=3.0)
    layout = server.layout(1, DIM)
    with pytest.raises(ValueError, match="budget_bits") as caught:
        check_request(server, layout, {"kvstrata_budget_bits": budget})
    assert "\n" not in str(caught.value) and "accepted: " in str(caught.value)
    # what a request of the same bits on any number of heads is held to
    floor = layout.bits_per_element(2, PAGE_SIZE)
    check_request(server, layout, {"kvstrata_budget_bits": floor})
    CausalPlanner(EngineSettings(policy="uniform", budget_bits=floor), server.layout(KV_HEADS, DIM))
    check_request(server, layout, None)


@pytest.mark.parametrize("tiers", [["INT2"], ["INT2", "INT3"], ["INT4"]])
@pytest.mark.parametrize("budget", [5.0, 10.0, 64.0])
def test_no_more_is_kept_for_a_page_than_the_highest_tier_takes(tiers: list[str], budget: float) -> None:
    s = EngineSettings.from_dict({"policy": "uniform", "budget_bits": budget, "tiers": tiers, "horizon": 64})
    layout = s.layout(KV_HEADS, DIM)
    taken = sum(layout.frames(t) for t in plan(s, [0] * 200)) + layout.frames(Tier.BF16)
    assert taken <= most_frames(s, layout, 200 * PAGE_SIZE + 1) == 2 * 14 + 199 * layout.frames(s.tiers[-1])


def test_a_tier_without_budget_is_everywhere_but_at_the_sinks() -> None:
    s = EngineSettings(policy="uniform", tier=Tier.INT3, sinks=2)
    assert plan(s, [0] * 5) == [Tier.BF16, Tier.BF16, Tier.INT3, Tier.INT3, Tier.INT3]
    layout = s.layout(KV_HEADS, DIM)
    # 161 tokens: five pages are stored, the ring holds the sixth
    assert most_frames(s, layout, 161) == 3 * 14 + 3 * 3
    assert most_frames(s, layout, 160) == 3 * 14 + 2 * 3
    assert most_frames(s, layout, 1) == 14
