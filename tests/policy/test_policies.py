"""Plans: within the budget always, pure, complete, and what each policy promises."""

import itertools
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstrata.policy import POLICIES, Budget, Signals, make_policy
from kvstrata.policy.role import TABLE
from kvstrata.types import PAGE_SIZE, Modality, Plan, Role, Span, Tier

PAGE = {Tier.INT2: 2368, Tier.INT3: 3552, Tier.INT4: 4736, Tier.INT8: 9472, Tier.BF16: 16576}
ELEMENTS = 2 * 32 * 128
NOW = Signals(current_turn=4)


def budget(num_tokens: int, window_pages: int = 0, **limit: float | int) -> Budget:
    return Budget(PAGE, num_tokens, ELEMENTS, window_pages=window_pages, **limit)  # type: ignore[arg-type]


def spans_of(runs: list[tuple[int, Role, int, Modality]]) -> tuple[Span, ...]:
    out, start = [], 0
    for length, role, turn, modality in runs:
        out.append(Span(start, start + length, role, turn, modality))
        start += length
    return tuple(out)


runs = st.lists(st.tuples(st.integers(1, 90), st.sampled_from(Role), st.integers(0, 4), st.sampled_from(Modality)), max_size=12)
codecs = st.sampled_from([(Tier.INT2, Tier.INT3, Tier.INT4, Tier.INT8), (Tier.INT2, Tier.INT4), (Tier.INT4,), (Tier.INT8,)])


def bill(plan: Plan, num_tokens: int, window_pages: int) -> int:
    """Bytes of a plan, counted anew."""
    pages = math.ceil(num_tokens / PAGE_SIZE)
    assert len(plan.tiers) == pages
    prices = {**PAGE, Tier.EVICTED: 0}
    anchors = math.ceil(plan.anchors.count / PAGE_SIZE) * prices[plan.anchors.tier] if plan.anchors else 0
    paid = [prices[Tier.BF16] if i >= pages - window_pages else prices[t] for i, t in enumerate(plan.tiers)]
    if plan.thinning is None:
        return anchors + sum(paid)
    stays = {*plan.thinning.spared, *range(pages - window_pages, pages)}
    thinned = sum(cost for i, cost in enumerate(paid) if i not in stays)
    return sum(paid) - thinned + min(thinned, plan.thinning.pages * prices[plan.thinning.tier])


@pytest.mark.parametrize("name", POLICIES)
@given(runs=runs, bits=st.floats(0.2, 18.0), window=st.integers(0, 5), sinks=st.integers(0, 2), tiers=codecs, extra=st.integers(0, 70))
def test_plan_is_within_budget_or_names_its_floor(name, runs, bits, window, sinks, tiers, extra):
    spans = spans_of(runs)
    num_tokens = sum(r[0] for r in runs) + extra
    policy = (
        make_policy(name)
        if name == "full"
        else make_policy(name, sinks=sinks, tiers=tiers, **({} if name in ("role", "triaxial", "strata") else {"tier": tiers[-1]}))
    )
    limit = budget(num_tokens, window, bits=bits)
    try:
        plan = policy.plan(spans, num_tokens, NOW, limit)
    except ValueError as error:
        message = str(error)
        floor_bits = float(message.partition(" bits an element")[0].split()[-1])
    else:
        message = ""
    if message:
        assert "below the floor" in message
        assert f"{bits} bits" in message
        assert floor_bits >= bits - 0.005
        return
    assert bill(plan, num_tokens, window) * 8 <= bits * num_tokens * ELEMENTS / PAGE_SIZE
    assert set(plan.tiers) <= {Tier.EVICTED, Tier.BF16, *tiers}
    if name != "full":
        assert all(t is Tier.BF16 for t in plan.tiers[:sinks])
    if plan.tiers and window == 0:
        assert any(t > Tier.EVICTED for t in plan.tiers)
    assert plan == policy.plan(spans, num_tokens, NOW, limit)


@given(num_tokens=st.integers(1, 4000), pages=st.integers(0, 60), extra=st.integers(0, 2367))
def test_a_budget_in_bytes_is_used_up_by_uniform(num_tokens, pages, extra):
    total = math.ceil(num_tokens / PAGE_SIZE)
    limit = PAGE[Tier.BF16] + (total - 1) * PAGE[Tier.INT2] + min(pages, total - 1) * (PAGE[Tier.INT3] - PAGE[Tier.INT2]) + min(extra, 1183)
    plan = make_policy("uniform").plan((), num_tokens, Signals(), budget(num_tokens, bytes=limit))
    raised = [i for i, t in enumerate(plan.tiers[1:]) if t is Tier.INT3]
    assert len(raised) == min(pages, total - 1)
    assert bill(plan, num_tokens, 0) <= limit
    gaps = [b - a for a, b in itertools.pairwise(raised)]
    # three distances at most (the three-distance theorem), none far above the mean
    assert not gaps or (len(set(gaps)) <= 3 and max(gaps) <= 2.7 * total / len(raised))
    more = make_policy("uniform").plan((), num_tokens, Signals(), budget(num_tokens, bytes=limit + PAGE[Tier.INT3] - PAGE[Tier.INT2]))
    assert all(a <= b for a, b in zip(plan.tiers, more.tiers, strict=True))


def test_uniform_takes_the_highest_tier_that_fits():
    policy = make_policy("uniform")
    for tier in (Tier.INT2, Tier.INT3, Tier.INT4, Tier.INT8):
        limit = 2 * PAGE[Tier.BF16] + 98 * PAGE[tier]
        plan = policy.plan((), 3200, Signals(), budget(3200, window_pages=1, bytes=limit))
        assert plan.tiers[1:99] == (tier,) * 98
        assert plan.default is tier
    assert policy.plan((), 3200, Signals()).tiers == (Tier.BF16,) + (Tier.INT4,) * 99
    assert make_policy("uniform", tier="int2", sinks=0).plan((), 33, Signals()).tiers == (Tier.INT2,) * 2


def test_window_keeps_sinks_and_recent():
    plan = make_policy("window", recent=100).plan((), 1000, Signals())
    # tokens 900 to 999 lie on pages 28 to 31
    assert plan.tiers == (Tier.BF16,) + (Tier.EVICTED,) * 27 + (Tier.BF16,) * 4
    plan = make_policy("window").plan((), 1000, Signals(), budget(1000, window_pages=2, bytes=5 * PAGE[Tier.BF16] + 1))
    assert plan.tiers == (Tier.BF16,) + (Tier.EVICTED,) * 27 + (Tier.BF16,) * 4


def test_role_is_its_table():
    page = PAGE_SIZE
    rows = [(Role.INST, 0), (Role.INST, 0), (Role.OBS, 1), (Role.OBS, 3), (Role.OBS, 4), (Role.TOOL_CALL, 1), (Role.DELIM, 1),
            (Role.USER, 4), (Role.REASONING, 2)]  # fmt: skip
    spans = spans_of([(page, role, turn, Modality.TEXT) for role, turn in rows])
    plan = make_policy("role").plan(spans, page * len(rows), NOW)
    assert [t.name for t in plan.tiers] == ["BF16", "INT3", "INT2", "INT3", "INT4", "INT4", "INT4", "INT4", "INT2"]
    assert set(TABLE) == {*Role, Modality.IMAGE}


def test_role_takes_the_best_of_a_mixed_page_but_not_a_stray_token():
    mixed = spans_of([(24, Role.OBS, 0, Modality.TEXT), (8, Role.TOOL_CALL, 0, Modality.TEXT)])
    stray = spans_of([(30, Role.OBS, 0, Modality.TEXT), (2, Role.TOOL_CALL, 0, Modality.TEXT)])
    policy = make_policy("role", sinks=0)
    assert policy.plan(mixed, 32, NOW).tiers == (Tier.INT4,)
    assert policy.plan(stray, 32, NOW).tiers == (Tier.INT2,)


def test_role_uses_only_tiers_of_the_codec():
    spans = spans_of([(320, Role.INST, 0, Modality.TEXT)])
    assert set(make_policy("role", tiers=(Tier.INT2, Tier.INT4)).plan(spans, 320, NOW).tiers[1:]) == {Tier.INT2}
    assert set(make_policy("role", tiers=(Tier.INT8,)).plan(spans, 320, NOW).tiers[1:]) == {Tier.INT8}


def test_eviction_never_forgets_the_system_prompt():
    spans = spans_of([(320, Role.INST, 0, Modality.TEXT), (640, Role.OBS, 1, Modality.TEXT), (64, Role.USER, 4, Modality.TEXT)])
    floor = PAGE[Tier.BF16] + 9 * PAGE[Tier.INT2]
    plan = make_policy("role").plan(spans, 1024, NOW, budget(1024, bytes=floor))
    assert plan.tiers == (Tier.BF16,) + (Tier.INT2,) * 9 + (Tier.EVICTED,) * 22
    with pytest.raises(ValueError, match=f"floor of policy 'role'.*{floor} bytes"):
        make_policy("role").plan(spans, 1024, NOW, budget(1024, bytes=floor - 1))


def test_role_gives_up_old_observations_first():
    spans = spans_of([(320, Role.INST, 0, Modality.TEXT), (320, Role.OBS, 3, Modality.TEXT), (320, Role.TOOL_CALL, 3, Modality.TEXT),
                      (320, Role.OBS, 4, Modality.TEXT)])  # fmt: skip
    policy = make_policy("role")
    wish = policy.plan(spans, 1280, NOW)
    for saved in range(1, 11):
        limit = bill(wish, 1280, 0) - saved * (PAGE[Tier.INT3] - PAGE[Tier.INT2])
        plan = policy.plan(spans, 1280, NOW, budget(1280, bytes=limit))
        lowered = [i for i in range(40) if plan.tiers[i] < wish.tiers[i]]
        assert lowered == list(range(10, 10 + saved))


def test_plans_of_every_length():
    for num_tokens in range(130):
        for name in POLICIES:
            plan = make_policy(name).plan((), num_tokens, Signals(), budget(num_tokens, window_pages=2, bits=700.0) if num_tokens else None)
            assert len(plan.tiers) == math.ceil(num_tokens / PAGE_SIZE)


@pytest.mark.parametrize(
    ("name", "settings", "message"),
    [
        ("nope", {}, "unknown policy 'nope'; accepted: full, uniform, window, role"),
        ("uniform", {"teir": 2}, "unknown setting 'teir' of policy 'uniform'; accepted: tier, sinks, tiers"),
        ("role", {"tier": 2}, "unknown setting 'tier' of policy 'role'; accepted: sinks, tiers"),
        ("full", {"tier": 2}, "unknown setting 'tier' of policy 'full'; accepted: none"),
        ("uniform", {"sinks": "two"}, "sinks is 'two'; accepted: 0 or more pages"),
        ("uniform", {"tiers": 3}, "policy 'uniform' does not take tiers=3: "),
        ("uniform", {"tier": "²"}, "unknown tier '²'; accepted: EVICTED"),
        ("uniform", {"tier": "٤"}, "unknown tier '٤'; accepted: EVICTED"),
        ("uniform", {"tier": "9" * 5000}, "unknown tier '999"),
        ("uniform", {"tier": "INT5"}, "unknown tier 'INT5'"),
        ("uniform", {"tier": "INT8", "tiers": ("INT2", "INT4")}, "tier INT8 is none of the codec's; accepted: INT2, INT4, BF16"),
        ("window", {"recent": 0}, "recent is 0"),
        ("window", {"sinks": -1}, "sinks is -1"),
        ("role", {"tiers": ()}, "accepted: one or more of INT2"),
        ("role", {"tiers": ("BF16",)}, "accepted: one or more of INT2"),
    ],
)
def test_unknown_policy_setting_or_value_is_named(name, settings, message):
    with pytest.raises(ValueError, match=message):
        make_policy(name, **settings)


@pytest.mark.parametrize(
    ("limit", "message"),
    [({}, "exactly one"), ({"bits": 3.0, "bytes": 4}, "exactly one"), ({"bits": 0.0}, "above 0"), ({"bits": float("nan")}, "above 0")],
)
def test_a_senseless_budget_is_refused(limit, message):
    with pytest.raises(ValueError, match=message):
        budget(100, **limit)


def test_a_budget_of_another_sequence_is_refused():
    with pytest.raises(ValueError, match="the budget is for 64 tokens, the sequence has 65"):
        make_policy("uniform").plan((), 65, Signals(), budget(64, bits=4.0))
