"""The knapsack against brute force, the policy's budgets and axes, and profiles as files."""

import itertools
import json
import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstrata.policy import Budget, Signals, make_policy
from kvstrata.policy.knapsack import exact, greedy, hull
from kvstrata.policy.profile import MEASURES, NUM_BINS, Profile, distance_bins, load_profile, mean_profile
from kvstrata.policy.tags import NUM_TAGS, ROLES, tags_by_token
from kvstrata.types import PAGE_SIZE, Age, Modality, Role, Span, Tier

PAGE = {Tier.INT2: 2368, Tier.INT3: 3552, Tier.INT4: 4736, Tier.INT8: 9472, Tier.BF16: 16576}
ELEMENTS = 2 * 32 * 128
BITS = (0, 2, 3, 4, 8)
NOW = Signals(current_turn=4)


def code(age: Age, role: Role, modality: Modality = Modality.TEXT) -> int:
    return (int(age) * 2 + list(Modality).index(modality)) * 7 + ROLES.index(role)


def profile(**loss_at_2: float) -> Profile:
    """Each role's loss a token at 2 bits; a bit more is worth a factor of 3. Tags that are not named lose 1e-6."""
    per_role = np.array([loss_at_2.get(role.value, 1e-6) for role in ROLES])
    per_tag = np.tile(per_role, 8)
    loss = per_tag[:, None] * np.array([9.0, 1.0, 1 / 3, 1 / 9, 1 / 729]) * 1000
    far = np.full((NUM_TAGS, NUM_BINS), 1000 / NUM_BINS)
    return Profile(
        BITS, np.full(NUM_TAGS, 1000.0), dict.fromkeys(MEASURES, loss), far, loss[:, None, :] * np.full((NUM_BINS, 1), 1 / NUM_BINS)
    )


def saved(tmp_path: Path, p: Profile) -> str:
    path = tmp_path / "profile.json"
    path.write_text(p.to_json())
    load_profile.cache_clear()
    return str(path)


tables = st.integers(1, 5).flatmap(
    lambda items: st.integers(1, 4).flatmap(
        lambda choices: st.tuples(
            st.lists(st.lists(st.integers(0, 12), min_size=choices, max_size=choices), min_size=items, max_size=items),
            st.lists(st.lists(st.integers(0, 100), min_size=choices, max_size=choices), min_size=items, max_size=items),
        )
    )
)


@given(tables, st.integers(0, 60))
def test_exact_is_the_best_of_all_choices(table, limit):
    cost, loss = np.array(table[0], np.int64), np.array(table[1], np.float64)
    items, choices = cost.shape
    rows = np.arange(items)
    fitting = [c for c in itertools.product(range(choices), repeat=items) if cost[rows, list(c)].sum() <= limit]
    chosen = exact(cost, loss, limit, np.zeros(items))
    climbed = greedy(cost, loss, limit, np.zeros(items))
    if not fitting:
        assert cost[rows, climbed].sum() == cost.min(1).sum()
        return
    best = min(loss[rows, list(c)].sum() for c in fitting)
    assert cost[rows, chosen].sum() <= limit
    assert loss[rows, chosen].sum() == pytest.approx(best)
    assert cost[rows, climbed].sum() <= limit
    assert loss[rows, climbed].sum() >= best - 1e-9
    # the gap is at most what one step of one item gains
    assert loss[rows, climbed].sum() - best <= (loss.max(1) - loss.min(1)).max() + 1e-9


def test_greedy_climbs_in_the_order_of_gains_and_fills_what_is_left():
    # steps by gain: item 1 0->2 (10 each), item 0 0->2 (4), item 2 0->4 (2, does not fit), then item 0 2->3 (1), which does
    cost = np.array([[0, 2, 3], [0, 2, 8], [0, 4, 9]], np.int64)
    loss = np.array([[20.0, 12.0, 11.0], [30.0, 10.0, 9.0], [9.0, 1.0, 1.0]])
    assert greedy(cost, loss, 5, np.zeros(3)).tolist() == [2, 1, 0]
    assert greedy(cost, loss, -1, np.zeros(3)).tolist() == [0, 0, 0]
    # of equals the one with the lowest preference, whatever its place
    alike = np.array([[5.0, 1.0, 1.0]] * 3)
    assert greedy(np.array([[0, 2, 3]] * 3, np.int64), alike, 4, np.array([2.0, 0.0, 1.0])).tolist() == [0, 1, 1]


def test_hull_drops_what_a_mixture_beats():
    # at cost 3 a mixture of costs 2 and 4 loses (10 + 2) / 2 = 6 < 7
    assert hull(np.array([2, 3, 4, 8]), np.array([10.0, 7.0, 2.0, 2.0])) == [0, 2]
    assert hull(np.array([2, 3, 4]), np.array([10.0, 4.0, 2.0])) == [0, 1, 2]


def spans_of(*runs: tuple[int, Role, int]) -> tuple[Span, ...]:
    ends = np.cumsum([n for n, _, _ in runs])
    return tuple(Span(int(e - n), int(e), role, turn) for e, (n, role, turn) in zip(ends, runs, strict=True))


AGENT = spans_of((960, Role.INST, 0), (320, Role.USER, 1), (640, Role.OBS, 2), (320, Role.TOOL_CALL, 3), (96, Role.USER, 4))
N = AGENT[-1].end


def budget(bits: float, window_pages: int = 3) -> Budget:
    return Budget(PAGE, N, ELEMENTS, bits=bits, window_pages=window_pages)


LONG = spans_of((2880, Role.INST, 0), (960, Role.USER, 1), (1910, Role.OBS, 2), (970, Role.TOOL_CALL, 3), (96, Role.USER, 4))


def loss_of(p: Profile, tiers: tuple[Tier, ...]) -> float:
    """Of LONG, counted token by token."""
    table = p.at(tuple(Tier), p.per_token(("temporal", "modal", "semantic")))
    codes = tags_by_token(LONG, LONG[-1].end, 4).code
    return float(sum(table[codes[t], list(Tier).index(tiers[t // PAGE_SIZE])] for t in range(PAGE_SIZE, LONG[-1].end - 3 * PAGE_SIZE)))


@pytest.mark.parametrize("bits", [3.3, 3.6, 4.1, 4.7, 5.3, 6.0])
def test_greedy_is_within_a_hundredth_of_exact_on_a_real_table(bits):
    p = load_profile("default")
    n = LONG[-1].end
    limit = Budget(PAGE, n, ELEMENTS, bits=bits, window_pages=3)
    plans = {
        solver: make_policy("triaxial", solver=solver, axes=("temporal", "modal", "semantic")).plan(LONG, n, NOW, limit)
        for solver in ("greedy", "exact")
    }
    losses = {solver: loss_of(p, plan.tiers) for solver, plan in plans.items()}
    assert losses["exact"] <= losses["greedy"] * (1 + 1e-9)
    assert losses["greedy"] <= losses["exact"] * 1.01


def test_the_tag_that_suffers_most_is_protected_first(tmp_path):
    name = saved(tmp_path, profile(tool_call=1.0, obs=0.001, inst=0.1, user=0.1))
    plan = make_policy("triaxial", profile=name, axes=("semantic",)).plan(AGENT, N, NOW, budget(4.0))
    by_role = {s.role: [int(plan.tiers[p]) for p in range(max(1, s.start // 32), min(N // 32 - 3, s.end // 32))] for s in AGENT[:4]}
    assert min(by_role[Role.TOOL_CALL]) >= max(by_role[Role.INST] + by_role[Role.USER])
    assert set(by_role[Role.OBS]) == {2}


def test_the_paper_rule_by_hand(tmp_path):
    """60 pages of instructions, obs and calls, at a mean of 2.7 bits: 0.35 of the tokens may have 4 bits."""
    spans = spans_of((32 * 40, Role.INST, 0), (32 * 12, Role.OBS, 1), (32 * 8, Role.TOOL_CALL, 1))
    settings = {"profile": saved(tmp_path, profile(inst=0.5, obs=0.2, tool_call=0.9)), "unit": "tag", "tiers": (2, 4), "sinks": 0,
                "axes": ("semantic",), "nominal": 2.7}  # fmt: skip
    plan = make_policy("triaxial", **settings).plan(spans, 32 * 60, Signals(1))
    # rho: calls, then inst (which does not fit: 48 > 21 pages), then obs
    assert plan.tiers == (Tier.INT2,) * 40 + (Tier.INT4,) * 20
    richer = make_policy("triaxial", **settings | {"nominal": 3.65}).plan(spans, 32 * 60, Signals(1))
    assert richer.tiers == (Tier.INT4,) * 40 + (Tier.INT2,) * 12 + (Tier.INT4,) * 8


def test_without_an_axis_plans_do_not_see_it(tmp_path):
    name = saved(tmp_path, profile(tool_call=1.0, inst=0.1, user=0.1))
    blind = make_policy("triaxial", profile=name, axes=("temporal", "modal"))
    other = tuple(replace(s, role=Role.USER) for s in AGENT)
    assert blind.plan(AGENT, N, NOW, budget(4.0)) == blind.plan(other, N, NOW, budget(4.0))
    seeing = make_policy("triaxial", profile=name)
    assert seeing.plan(AGENT, N, NOW, budget(4.0)) != seeing.plan(other, N, NOW, budget(4.0))
    no_time = make_policy("triaxial", profile=name, axes=("modal", "semantic"))
    assert no_time.plan(AGENT, N, Signals(4), budget(4.0)) == no_time.plan(AGENT, N, Signals(40), budget(4.0))


def test_only_what_is_allowed_is_evicted_and_never_instructions():
    policy = make_policy("triaxial", tiers=(0, 2, 3, 4, 8, 16))
    plan = policy.plan(AGENT, N, NOW, budget(2.2, window_pages=2))
    assert Tier.EVICTED in plan.tiers
    assert all(t > Tier.EVICTED for t in plan.tiers[:30])
    with pytest.raises(ValueError, match="below the floor of policy 'triaxial'"):
        make_policy("triaxial").plan(AGENT, N, NOW, budget(2.2, window_pages=2))


@given(st.floats(2.9, 17.0), st.sampled_from(["page", "tag"]), st.sampled_from(["greedy", "exact"]), st.integers(0, 4))
def test_budgets_hold_and_more_bytes_never_lose_more(bits, unit, solver, window):
    policy = make_policy("triaxial", unit=unit, solver=solver, tiers=(2, 3, 4, 8, 16))
    b = budget(bits, window)
    try:
        plan = policy.plan(AGENT, N, NOW, b)
    except ValueError as error:
        assert "below the floor" in str(error)
        return
    assert b.cost(plan.tiers) <= b.limit
    if unit == "page":
        # nothing that would fit is left unbought
        spare = b.limit - b.cost(plan.tiers)
        steps = [PAGE[Tier.INT3] - PAGE[Tier.INT2]] if Tier.INT2 in [plan.tiers[p] for p in b.body(1)] else []
        assert all(spare < s for s in steps)


def test_a_page_of_the_current_turn_falls_as_turns_pass():
    """The default profile: the same observations, one turn after another."""
    p = load_profile("default").per_token()[:, 1]
    losses = [p[code(age, Role.TOOL_CALL)] for age in Age]
    assert losses[0] > losses[3]
    ages = [int(make_policy("triaxial").plan(AGENT, N, Signals(turn), budget(3.6)).tiers[35]) for turn in (1, 2, 3, 9)]
    assert ages == sorted(ages, reverse=True)


def test_profiles_survive_a_file_and_join(tmp_path):
    p = profile(inst=0.5, obs=0.25)
    again = Profile.from_json(p.to_json())
    for m in MEASURES:
        np.testing.assert_allclose(again.loss[m], p.loss[m], rtol=1e-5)
    np.testing.assert_allclose(again.far_loss, p.far_loss, rtol=1e-5)
    twice = replace(p, loss={m: x * 7 for m, x in p.loss.items()}, far_loss=p.far_loss * 7)
    joined = mean_profile([p, twice], {})
    # a model whose errors are seven times as large says the same about tags
    a, b = joined.per_token(), p.per_token()
    np.testing.assert_allclose(a / a[0, 1], b / b[0, 1], rtol=1e-6)
    np.testing.assert_allclose(p.decay, 1, rtol=1e-6)


def test_rare_tags_lean_on_what_their_axes_suggest():
    p = profile(inst=0.5, obs=0.25)
    tokens, loss = p.tokens.copy(), p.loss["relative"].copy()
    unseen = code(Age.OLDER, Role.OBS)
    tokens[unseen], loss[unseen] = 0, 0
    table = replace(p, tokens=tokens, loss=dict.fromkeys(MEASURES, loss)).per_token()
    assert table[unseen, 1] == pytest.approx(0.25, rel=0.35)
    assert table[code(Age.OLDER, Role.INST), 1] == pytest.approx(0.5, rel=0.1)


def test_tiers_between_are_interpolated():
    p = profile(inst=0.5)
    table = p.at((Tier.EVICTED, Tier.INT2, Tier.INT3, Tier.BF16), p.per_token())
    two = replace(p, bits=(0, 2, 4), loss={m: x[:, [0, 1, 3]] for m, x in p.loss.items()}, far_loss=p.far_loss[..., [0, 1, 3]])
    coarse = two.at((Tier.EVICTED, Tier.INT2, Tier.INT3, Tier.INT8, Tier.BF16), two.per_token())
    np.testing.assert_allclose(coarse[:, 2], table[:, 2], rtol=1e-6)
    np.testing.assert_allclose(coarse[:, 3], coarse[:, 1] / 9 / 256, rtol=1e-6)
    assert not coarse[:, 4].any()


def test_distance_bins_double():
    assert distance_bins(10).tolist() == [4, 4, 3, 3, 3, 3, 2, 2, 1, 0]
    assert distance_bins(3000).max() == NUM_BINS - 1


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"solver": "magic"}, "solver is 'magic'; accepted: greedy, exact"),
        ({"unit": "token"}, "unit is 'token'; accepted: page, tag"),
        ({"axes": ("spatial",)}, "accepted: temporal, modal, semantic, distance"),
        ({"measure": "kl"}, "measure is 'kl'"),
        ({"nominal": 0}, "nominal is 0"),
        ({"tiers": (16,)}, "a quantized one among them"),
        ({"profile": "/nowhere.json"}, "no profile '/nowhere.json'.*accepted: default"),
    ],
)
def test_a_wrong_setting_is_named(settings, message):
    with pytest.raises(ValueError, match=message):
        make_policy("triaxial", **settings)


@pytest.mark.parametrize("text", ["", "{}", '{"bits": [0, 2, 4], "tags": []}', '{"bits": [0, 2, 4], "tags": [{"age": "old"}]}'])
def test_what_is_no_profile_is_refused(text, tmp_path):
    path = tmp_path / "bad.json"
    path.write_text(text)
    with pytest.raises(ValueError, match="profile"):
        make_policy("triaxial", profile=str(path))


def test_every_length_from_one_up():
    for n in range(1, 200):
        b = Budget(PAGE, n, ELEMENTS, bits=900.0, window_pages=math.ceil(n / PAGE_SIZE) // 2)
        for limit in (None, b):
            for unit in ("page", "tag"):
                assert len(make_policy("triaxial", unit=unit).plan((), n, Signals(), limit).tiers) == math.ceil(n / PAGE_SIZE)


def test_bytes_are_not_spent_on_planes_that_pages_have_lost():
    policy, b = make_policy("triaxial"), budget(4.0)
    wished = policy.plan(AGENT, N, NOW, b)
    held = (Tier.BF16,) + (Tier.INT2,) * 60
    plan = policy.plan(AGENT, N, Signals(4, held=held), b)
    assert set(plan.tiers[1:61]) == {Tier.INT2}
    assert b.cost(plan.tiers) <= b.limit
    # what old pages cannot take goes to the pages that are written now
    assert sum(plan.tiers[61:70]) > sum(wished.tiers[61:70])
    uniform = make_policy("uniform").plan(AGENT, N, Signals(4, held=held), budget(3.4))
    assert all(t is Tier.INT3 for t in uniform.tiers[61:70])
    assert all(t is Tier.INT2 for t in uniform.tiers[1:61])


def test_frozen_pages_neither_rise_nor_fall():
    held = (Tier.BF16, *[Tier.INT4, Tier.INT2] * 20)
    for turn in (1, 9):
        plan = make_policy("triaxial", frozen=True).plan(AGENT, N, Signals(turn, held=held), budget(4.5))
        assert plan.tiers[:41] == held
    ageing = make_policy("triaxial").plan(AGENT, N, Signals(9, held=held), budget(3.2))
    assert all(a <= b for a, b in zip(ageing.tiers, held, strict=False))
    assert ageing.tiers[:41] != held


def test_frozen_pages_give_way_to_a_budget_that_they_exceed():
    held = (Tier.BF16, *[Tier.INT8] * 40)
    for bits in (3.1, 3.4, 4.5, 9.0):
        b = budget(bits)
        plan = make_policy("triaxial", frozen=True).plan(AGENT, N, Signals(4, held=held), b)
        assert b.cost(plan.tiers) <= b.limit
        # only where there is no other way
        fits = b.cost([*held, *[Tier.INT2] * (N // PAGE_SIZE - 41)]) <= b.limit
        assert (plan.tiers[:41] == held) == fits
    assert fits
    with pytest.raises(ValueError, match="below the floor of policy 'triaxial'"):
        make_policy("triaxial", frozen=True).plan(AGENT, N, Signals(4, held=held), budget(2.3))


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"bits": [-2, 0, 2, 4, 8]}, "bits must ascend"),
        ({"bits": [0, 2.7, 3, 4, 8]}, "not all whole numbers"),
        ({"bits": [0, 2, 3, 4, float("inf")]}, "not all whole numbers"),
        ({"row": {"relative": 1.0}}, r"'1\.0' is not \[5\] numbers"),
        ({"row": {"tokens": "5"}}, "'5' is not a number"),
        ({"twice": True}, "two rows of"),
        ({"zero": True}, "must tell tags apart"),
    ],
)
def test_an_altered_profile_is_refused(change, told):
    data = json.loads(load_profile("smollm2").to_json())
    data["bits"] = change.get("bits", data["bits"])
    data["tags"][0] |= change.get("row", {})
    if "twice" in change:
        data["tags"].append(data["tags"][0])
    if "zero" in change:
        for row in data["tags"]:
            row["relative"] = [0.0] * len(data["bits"])
    with pytest.raises(ValueError, match=told):
        Profile.from_json(json.dumps(data))


def test_what_is_no_json_at_all_is_refused():
    for text in ("[" * 100000, "null", "{}"):
        with pytest.raises(ValueError, match="not a sensitivity profile"):
            Profile.from_json(text)


@pytest.mark.parametrize(
    ("setting", "told"),
    [({"nominal": float("inf")}, "nominal is inf"), ({"sinks": 1.5}, "sinks is 1.5"), ({"frozen": "no"}, "frozen is 'no'")],
)
def test_settings_of_another_kind_are_refused(setting, told):
    with pytest.raises(ValueError, match=told):
        make_policy("triaxial", **setting)


@pytest.mark.parametrize(
    ("text", "told"),
    [
        (load_profile("smollm2").to_json()[:-200], "JSONDecodeError"),
        (load_profile("smollm2").to_json().replace('"tokens": ', '"tokens": NaN, "was": ', 1), "below 0 or not finite"),
        (load_profile("smollm2").to_json().replace('"tokens": ', '"tokens": 1e300, "was": ', 1), "below 0 or not finite"),
        (load_profile("smollm2").to_json().replace('"relative"', '"mean"', 1), "KeyError 'relative'"),
        (load_profile("smollm2").to_json().replace('"inst"', '"wizard"', 1), "'wizard' is not a valid Role"),
        (json.dumps({**json.loads(load_profile("smollm2").to_json()), "made": ["x"]}), "made is"),
        (json.dumps({**json.loads(load_profile("smollm2").to_json()), "tags": {"a": 1}}), "TypeError"),
        (b"\xff\xfe\x00profile", "it is no text"),
    ],
)
def test_a_broken_file_is_refused_by_its_name(text, told, tmp_path):
    path = tmp_path / "broken.json"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(ValueError, match=f"profile '.*broken.json'.*{told}"):
        make_policy("triaxial", profile=str(path))


def test_a_huge_budget_is_an_unlimited_one():
    plans = [make_policy("triaxial", tiers=(2, 4, 16)).plan(AGENT, N, NOW, budget(bits)) for bits in (20.0, 1e30, 1.7e308)]
    assert plans[0] == plans[1] == plans[2]
    assert set(plans[0].tiers[:-3]) == {Tier.BF16}
