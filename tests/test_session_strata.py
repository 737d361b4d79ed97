"""Sessions under policy strata: bytes at every step, instructions, and the same plan for the same tokens."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import PreTrainedTokenizerBase
from transformers.modeling_utils import PreTrainedModel

from kvstrata.policy.profile import Law, load_profile
from kvstrata.session import Session
from kvstrata.types import PAGE_SIZE, Role, Span, Tier
from tests.models import tiny

Tagged = tuple[list[int], tuple[Span, ...]]


INST = 1000


def conversation(tokens: int) -> Tagged:
    """A schema, then turns of a request, a call and an observation."""
    ids = torch.randint(10, 1000, (tokens,), generator=torch.Generator().manual_seed(0)).tolist()
    spans, turn = [Span(0, INST, Role.INST, 0)], 0
    while spans[-1].end < tokens:
        turn += 1
        for role, length in ((Role.USER, 50), (Role.TOOL_CALL, 30), (Role.OBS, 320)):
            start = spans[-1].end
            if start < tokens:
                spans.append(Span(start, min(start + length, tokens), role, turn))
    return ids, tuple(spans)


def until(spans: tuple[Span, ...], end: int) -> tuple[Span, ...]:
    return tuple(Span(s.start, min(s.end, end), s.role, s.turn) for s in spans if s.start < end)


def fed(session: Session, told: Tagged, ends: list[int]) -> list[list[Tier]]:
    """Tiers after each chunk."""
    out = []
    for end in ends:
        session.feed(told[0][:end], until(told[1], end), logits_to_keep=1)
        session.store.check_integrity()
        out.append(session.page_tiers())
    return out


def anchors_of(session: Session) -> list[bytes]:
    return [page.positions.tobytes() for page in session._sequence.anchors]


@pytest.mark.parametrize(
    ("bits", "thin", "rho"),
    [(3.0, True, 0.0), (1.6, False, 0.0), (1.6, True, 0.0), (3.0, True, (0.0, 0.02, 0.05)), (3.5, True, 0.1), (1.6, True, 0.05)],
)
def test_bytes_are_within_the_budget_after_every_step(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, bits: float, thin: bool, rho: Any
) -> None:
    told = conversation(3000)
    with Session(model, tokenizer, "strata", bits, policy_settings={"thin": thin, "rho": rho}, capacity_tokens=3200) as session:
        before: list[Tier] = []
        anchors = 0
        # turns, then a reply token by token
        for end in [2200, 2600, 2900, *range(2901, 2970)]:
            (tiers,) = fed(session, told, [end])
            assert session.frames_in_use * session.layout.frame_bytes <= bits * session.layout.elements(end) / 8
            assert session.report.floor_bytes == 0
            settled = end // PAGE_SIZE
            assert all(new <= old for new, old in zip(tiers[:settled], before, strict=False))
            assert Tier.EVICTED not in tiers[: INST // PAGE_SIZE]
            before = tiers[:settled]
            # what was bought is kept, and a step takes what replaces it besides
            assert len(session._sequence.anchors) >= anchors
            anchors = len(session._sequence.anchors)
            assert session.report.peak_bytes >= session.report.bytes_stored
        assert (anchors > 1) == (rho != 0.0 and bits > 2)
        assert (session.report.anchors > 0) == (anchors > 0)
        assert (Tier.EVICTED in before) == (bits < 2)
        assert (session.report.survivors > 100) == (session.report.thinned > 0) == (bits < 2 and thin)
        assert before[0] is Tier.BF16
        assert session.report.bytes_queries > 0


@pytest.mark.parametrize("rho", [0.0, (0.0, 0.02, 0.05)])
def test_the_same_tokens_get_the_same_plan(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, rho: Any) -> None:
    told, ends = conversation(2600), [2200, 2400, 2401, 2433, 2600]
    runs = []
    for _ in range(2):
        with Session(model, tokenizer, "strata", 3.0, policy_settings={"rho": rho}, capacity_tokens=2800) as session:
            runs.append((fed(session, told, ends), anchors_of(session)))
    assert runs[0] == runs[1]


def test_what_queries_look_at_changes_the_plan(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> None:
    told, tiers = conversation(2600), []
    for trust in (0.0, 1.0):
        with Session(model, tokenizer, "strata", 3.0, policy_settings={"trust": trust, "contrast": 1.0}, capacity_tokens=2800) as session:
            tiers.append(fed(session, told, [2600])[0])
            # what the pages cost is the same, which they are is not
            assert 2.7 < session.bits_per_element <= 3.0
    assert tiers[0] != tiers[1]


def test_a_failed_turn_leaves_weights_and_pages(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> None:
    told = conversation(2600)
    with Session(model, tokenizer, "strata", 3.0, policy_settings={"rho": 0.05}, capacity_tokens=2800) as session:
        (before,) = fed(session, told, [2300])
        weights, anchors = session._sequence.weights.tolist(), anchors_of(session)
        with pytest.raises(ValueError, match="spans end at 2600"):
            session.feed(told[0][:2500], told[1])
        assert session.page_tiers() == before
        assert session._sequence.weights.tolist() == weights
        assert anchors_of(session) == anchors != []
        session.store.check_integrity()


@pytest.mark.parametrize("rho", [0.0, 0.02])
def test_other_codecs_keep_their_tiers(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, rho: float) -> None:
    told = conversation(2400)
    with Session(model, tokenizer, "strata", 4.5, policy_settings={"rho": rho}, codec="kivi", capacity_tokens=2600) as session:
        tiers = fed(session, told, [2200, 2400])[-1]
        assert set(tiers[: 2400 // PAGE_SIZE]) <= {Tier.BF16, *session.layout.codec.tiers}
        assert session.bits_per_element <= 4.5
        assert {page.tier for page in session._sequence.anchors} == ({Tier.BF16} if rho else set())


def test_a_step_without_frames_for_anchors_keeps_those_that_are_held(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> None:
    told = conversation(2600)
    with Session(model, tokenizer, "strata", 3.5, policy_settings={"rho": 0.05}, capacity_tokens=2800) as session:
        fed(session, told, [2300])
        before = anchors_of(session)
        layout, arena = session.layout, session.store.arena
        # room for what is new where it is to be in the end, and for no page of anchors
        session.store.prefix.clear()
        taken = arena.allocate(arena.free - 3 * layout.frames(Tier.BF16))
        session.feed(told[0][:2500], until(told[1], 2500), logits_to_keep=1)
        arena.release(taken)
        session.store.check_integrity()
        assert anchors_of(session) == before != []
        assert session.frames_in_use * layout.frame_bytes <= 3.5 * layout.elements(2500) / 8
        assert session._sequence.plan.anchors is not None
        assert session._sequence.plan.anchors.count == len(before) * PAGE_SIZE


@pytest.mark.parametrize("bits", [3.2, 6.0])
def test_a_session_takes_over_the_anchors_of_a_prefix(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, bits: float) -> None:
    """They count as its own until it has chosen others; a crop cuts them off."""
    told, settings = conversation(2600), {"rho": 0.05}
    with Session(model, tokenizer, "strata", bits, policy_settings=settings, capacity_tokens=9000) as first:
        fed(first, told, [2300])
        with Session(model, tokenizer, "strata", bits, policy_settings=settings, store=first.store) as second:
            ids = [*told[0][:2300], *range(20, 320)]
            second._align(ids, told[1])
            # those of a neighbour whose pages gave up planes since they were offered belong to other pages
            adopted, there = (sum(page.tokens for page in x._sequence.anchors) for x in (second, first))
            assert (adopted > 0) == (bits > 5)
            assert adopted <= there
            second.feed(ids, told[1], logits_to_keep=1)
            second.store.check_integrity()
            assert second.report.reused_tokens > 2000
            assert second.bits_per_element <= bits
            assert second._sequence.chosen_at == 2600
            for end in (900, 901, 1300):
                fed(second, told, [end])
                assert second.frames_in_use * second.layout.frame_bytes <= bits * second.layout.elements(2048) / 8
                assert second.report.anchors > 0
                # no more than the share of what is left
                assert len(second._sequence.anchors) <= np.ceil(0.05 * (end // PAGE_SIZE - 1))


@pytest.mark.parametrize(
    ("settings", "match"),
    [({"budget_bytes": 0}, "budget_bytes is 0; accepted"), ({"budget_bytes": 2.5}, "budget_bytes is 2.5; accepted"),
     ({"budget_bytes": 10**6, "budget_bits": 3.0}, "budget_bits 3.0 and budget_bytes 1000000 exclude each other")],
)  # fmt: skip
def test_wrong_budgets_are_refused(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, settings: dict[str, float], match: str
) -> None:
    with pytest.raises(ValueError, match=match):
        Session(model, tokenizer, "strata", capacity_tokens=64, **settings)  # type: ignore[arg-type]


@pytest.mark.parametrize("rho", [0.0, 0.05])
def test_a_budget_in_bytes_holds_however_long_the_conversation_grows(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, rho: float
) -> None:
    told = conversation(3000)
    with Session(model, tokenizer, "strata", capacity_tokens=200) as other:
        fed(other, told, [100])
        limit = int(3.0 * other.layout.elements(1500) / 8) + other.report.bytes_queries
    with Session(model, tokenizer, "strata", budget_bytes=limit, policy_settings={"rho": rho}, capacity_tokens=3200) as session:
        for end in (1200, 1800, 2400, 3000):
            (tiers,) = fed(session, told, [end])
            # anchors go before any token does
            assert bool(session._sequence.anchors) == (rho > 0 and Tier.EVICTED not in tiers)
            # queries that are kept to weigh pages by are bytes too
            assert session.frames_in_use * session.layout.frame_bytes + session.report.bytes_queries == session.bytes_in_use <= limit
            assert session.report.bytes_queries > 0
            assert session.report.floor_bytes == 0
            assert Tier.EVICTED not in tiers[: INST // PAGE_SIZE]
        assert Tier.EVICTED in tiers


def test_a_budget_in_bytes_pays_for_sliding_windows(tokenizer: PreTrainedTokenizerBase) -> None:
    told, limit = conversation(3000), 700_000
    with Session(tiny("gemma3", vocab_size=1024), tokenizer, "strata", budget_bytes=limit, capacity_tokens=3200) as session:
        for end in (1200, 1800, *range(1801, 1840), 3000):
            fed(session, told, [end])
            assert session.bytes_in_use == session.report.bytes_stored <= limit
            assert session.report.floor_bytes == 0
        assert session.bytes_in_use - session.report.bytes_queries - session.frames_in_use * session.layout.frame_bytes > 200_000


@pytest.mark.parametrize("score", ["newest", "intent"])
def test_at_half_of_the_lowest_tier_tokens_of_all_pages_live_on(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, score: str
) -> None:
    told, tiers = conversation(2600), []
    settings = {"spare": (), "score": score, "intent": 0.3}
    for _ in range(2):
        with Session(model, tokenizer, "strata", 1.2, policy_settings=settings, capacity_tokens=2800) as session:
            tiers.append(fed(session, told, [2200, 2400, *range(2401, 2406), 2433, 2600]))
            report, s = session.report, session._sequence
            assert session.frames_in_use * session.layout.frame_bytes <= 1.2 * session.layout.elements(2600) / 8
            assert report.survivors > 400
            # each layer and KV head its own
            kept = np.concatenate([page.positions for page in s.survivors], -1)
            assert len({frozenset(row) for row in kept.reshape(-1, kept.shape[-1]).tolist()}) == kept.shape[0] * kept.shape[1]
            assert bool(s.memory.positions)
            # and what was computed after that serves nobody else
            assert s.salt
    assert tiers[0] == tiers[1]


def test_asks_are_remembered_before_anything_has_to_go(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> None:
    told, weights = conversation(2400), []
    for intent in (0.0, 1.0):
        with Session(model, tokenizer, "strata", 3.0, policy_settings={"intent": intent}, capacity_tokens=2600) as session:
            fed(session, told, [2200, 2400])
            s = session._sequence
            assert (len(s.memory.positions) > 0) == (intent > 0)
            assert not s.survivors and session.report.thinned == 0
            weights.append(s.weights / s.weights.sum())
    assert abs(weights[0] - weights[1]).max() > 1e-3


def test_quality_takes_the_bytes_that_it_needs(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, tmp_path: Path) -> None:
    told, bits, path = conversation(2600), [], tmp_path / "profile.json"
    path.write_text(replace(load_profile("qwen05"), law=Law(0.0, 666.0, 1.6, 1e-4, 1e-2)).to_json())
    for quality in (0.0005, 0.005, 0.05):
        with Session(model, tokenizer, "strata", quality=quality, policy_settings={"profile": str(path)}, capacity_tokens=2800) as session:
            for end in (2200, 2400, 2401, 2433, 2600):
                fed(session, told, [end])
                assert session.report.predicted_kl is not None
                assert session.report.predicted_kl <= quality
            bits.append(session.bits_per_element)
    assert bits[0] > bits[1] > bits[2]


@pytest.mark.parametrize(
    ("settings", "match"),
    [({"policy": "uniform", "quality": 0.01}, "policy 'uniform' predicts no KL.*accepted: strata"),
     ({"quality": 0.01, "budget_bits": 3.0}, "budget_bits 3.0 and quality 0.01 exclude each other"),
     ({"quality": -1.0}, "budget is -1.0"), ({"quality": "good"}, "quality is 'good'; accepted")],
)  # fmt: skip
def test_wrong_qualities_are_refused(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, settings: dict[str, Any], match: str
) -> None:
    with pytest.raises(ValueError, match=match):
        Session(model, tokenizer, **{"policy": "strata", "capacity_tokens": 64} | settings)
