"""What cached pages are worth: old and cheap tags first, coarse planes last; and the queue of their next steps down."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstrata.adapters.vllm.ageing import OLDEST, Queue, Worth
from kvstrata.adapters.vllm.settings import EngineSettings
from kvstrata.adapters.vllm.tags import code
from kvstrata.policy.profile import load_profile
from kvstrata.policy.tags import MODALITIES, NUM_TAGS, ROLES
from kvstrata.types import PAGE_SIZE, Role, Tier

KV_HEADS, DIM = 8, 128


def worth(**values: object) -> Worth:
    settings = EngineSettings.from_dict({"budget_bits": 4.0, "ageing": "INT2", **values})
    return Worth(settings, settings.layout(KV_HEADS, DIM))


def page_of(role: Role) -> np.ndarray:
    counts = np.zeros(NUM_TAGS, np.int64)
    counts[code(role, False)] = PAGE_SIZE
    return counts


def test_losses_are_the_profiles_by_age_and_tier() -> None:
    w = worth()
    profile = load_profile("default")
    table = profile.at(w.tiers, profile.per_token())
    losses = np.array(w.losses(page_of(Role.OBS)))
    for age in range(OLDEST + 1):
        tag = age * len(MODALITIES) * len(ROLES) + ROLES.index(Role.OBS)
        np.testing.assert_allclose(losses[age], table[tag] * PAGE_SIZE)
    assert losses[0][-1] == 0.0 and w.tiers[0] is Tier.EVICTED and w.tiers[-1] is Tier.BF16


def test_a_page_steps_down_to_the_floor_at_rising_prices() -> None:
    for floor in (Tier.INT2, Tier.INT3, Tier.INT4):
        w = worth(ageing=floor.name)
        losses = w.losses(page_of(Role.OBS))
        tier, prices = Tier.INT8, []
        while (step := w.step(losses, 1, tier)) is not None:
            assert floor <= step.tier < tier
            tier = step.tier
            prices.append(step.price)
        assert tier is floor and prices == sorted(prices)
        # what is left of a page is worth more than a plane of a page that has more
        assert w.whole(losses, 1, tier) > prices[0]


def test_a_price_is_the_loss_of_each_frame_that_is_freed() -> None:
    w = worth(tiers=["INT2", "INT4"])
    losses = w.losses(page_of(Role.USER))
    step = w.step(losses, 2, Tier.INT4)
    assert step is not None and step.tier is Tier.INT2
    of = dict(zip(w.tiers, losses[2], strict=True))
    assert 2**step.price == pytest.approx((of[Tier.INT2] - of[Tier.INT4]) / 2)
    assert 2 ** w.whole(losses, 2, Tier.INT4) == pytest.approx((of[Tier.EVICTED] - of[Tier.INT4]) / 4)


def test_what_is_older_and_what_is_cheaper_goes_first() -> None:
    w = worth()

    def price(role: Role, age: int) -> float:
        step = w.step(w.losses(page_of(role)), age, Tier.INT4)
        assert step is not None
        return step.price

    assert price(Role.OBS, OLDEST) < price(Role.OBS, 1) < price(Role.OBS, 0)
    assert price(Role.INST, 1) < price(Role.OBS, 1) < price(Role.TOOL_CALL, 1)


def test_sinks_and_pages_at_the_floor_have_nothing_to_give() -> None:
    w = worth()
    losses = w.losses(None)
    assert w.step(losses, 1, Tier.BF16) is None and w.step(losses, 1, Tier.INT2) is None
    # a request may have asked for less than the floor
    assert worth(ageing="INT3").step(losses, 1, Tier.INT2) is None


def test_a_mean_page_is_between_the_tags() -> None:
    w = worth(policy="uniform")
    mean = np.array(w.losses(None))[0]
    each = np.array([w.losses(page_of(role))[0] for role in Role])
    assert (each.min(0)[:-1] < mean[:-1]).all() and (mean[:-1] < each.max(0)[:-1]).all()


@given(st.lists(st.tuples(st.sampled_from(["add", "remove", "take"]), st.integers(0, 5), st.integers(0, 3)), max_size=400))
def test_the_queue_gives_the_cheapest_and_of_equals_the_first(actions: list[tuple[str, int, int]]) -> None:
    queue: Queue[int] = Queue()
    want: dict[int, tuple[int, int]] = {}
    for i, (action, page, price) in enumerate(actions):
        if action == "add":
            queue.add(page, price, Tier.INT2)
            want[page] = price, i
        elif action == "remove":
            queue.remove(page)
            want.pop(page, None)
        first = queue.first()
        cheapest = min(want, key=lambda p: want[p], default=None)
        assert (None if first is None else first[1]) == cheapest and len(queue) == len(want) and set(queue) == set(want)
        if action == "take" and cheapest is not None:
            queue.remove(cheapest)
            del want[cheapest]


def test_entries_that_are_passed_over_do_not_pile_up() -> None:
    queue: Queue[int] = Queue()
    for i in range(10_000):
        queue.add(i % 3, -i, Tier.INT2)
    assert len(queue) == 3 and len(queue._heap) < 100 and queue.first() == (-9999, 0, Tier.INT2)
