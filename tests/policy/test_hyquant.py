"""policy=hyquant: how many anchors, at which tier, and what they leave of a budget for the body."""

import math

import pytest

from kvstrata.policy import Signals, make_policy, recent_window
from kvstrata.types import PAGE_SIZE, Tier
from tests.policy.test_policies import PAGE, budget


def test_the_share_is_of_what_is_neither_sink_nor_window_and_fills_its_pages() -> None:
    policy = make_policy("hyquant", rho=0.05)
    for pages, window in ((100, 4), (100, 0), (7, 4), (5, 4), (3, 8), (0, 0)):
        body = max(0, pages - 1 - window) * PAGE_SIZE
        free = policy.plan((), pages * PAGE_SIZE, Signals(window_pages=window))
        assert free.anchors is not None and free.anchors.count == math.ceil(0.05 * body / PAGE_SIZE) * PAGE_SIZE
        assert free.tiers == (Tier.BF16,) * min(1, pages) + (Tier.INT4,) * (pages - 1)
        if body:
            paid = policy.plan((), pages * PAGE_SIZE, Signals(), budget(pages * PAGE_SIZE, window_pages=window, bits=900.0))
            assert paid.anchors is not None and paid.anchors.count == free.anchors.count


def test_settings_reach_the_plan() -> None:
    plan = make_policy("hyquant", tier="int2", anchor_tier="int8", score="linear", refresh=0, alone=True).plan((), 3200, Signals())
    assert plan.anchors is not None and plan.default is Tier.INT2
    assert (plan.anchors.tier, plan.anchors.score, plan.anchors.refresh, plan.anchors.alone) == (Tier.INT8, "linear", 0, True)
    assert recent_window("hyquant") == 128 and recent_window("uniform") == 64
    wrongs: list[dict[str, object]] = [{"rho": 1.5}, {"rho": "a tenth"}, {"rho": math.nan}]
    wrongs += [{"refresh": 1.5}, {"refresh": -1}, {"alone": "False"}]
    wrongs += [{"anchor_tier": "int2"}, {"tier": "bf16"}, {"score": "l2"}]
    for wrong in wrongs:
        with pytest.raises(ValueError, match=f"^{next(iter(wrong))} .*accepted|tier BF16"):
            make_policy("hyquant", **wrong)


@pytest.mark.parametrize("anchor_tier", [Tier.BF16, Tier.INT8])
def test_a_budget_pays_for_anchors_first_and_for_no_more_than_it_can(anchor_tier: Tier) -> None:
    n = 100 * PAGE_SIZE
    policy = make_policy("hyquant", rho=0.2, anchor_tier=anchor_tier)
    least = 99 * PAGE[Tier.INT2] + PAGE[Tier.BF16]
    for spare in (0, PAGE[anchor_tier] - 1, 3 * PAGE[anchor_tier], 500 * PAGE[Tier.BF16]):
        limit = budget(n, bytes=least + spare)
        plan = policy.plan((), n, Signals(), limit)
        assert plan.anchors is not None
        pages = -(-plan.anchors.count // PAGE_SIZE)
        assert limit.cost(plan.tiers) + pages * PAGE[anchor_tier] <= least + spare
        assert plan.anchors.count == min(math.ceil(0.2 * 99) * PAGE_SIZE, spare // PAGE[anchor_tier] * PAGE_SIZE)
