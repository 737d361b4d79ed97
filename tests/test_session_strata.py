"""Sessions under policy strata: bytes at every step, instructions, and the same plan for the same tokens."""

import pytest
import torch
from transformers import PreTrainedTokenizerBase
from transformers.modeling_utils import PreTrainedModel

from kvstrata.session import Session
from kvstrata.types import PAGE_SIZE, Role, Span, Tier

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


@pytest.mark.parametrize(("bits", "evicts"), [(3.0, False), (1.6, True)])
def test_bytes_are_within_the_budget_after_every_step(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, bits: float, evicts: bool
) -> None:
    told = conversation(3000)
    with Session(model, tokenizer, "strata", bits, capacity_tokens=3200) as session:
        before: list[Tier] = []
        # turns, then a reply token by token
        for end in [2200, 2600, 2900, *range(2901, 2970)]:
            (tiers,) = fed(session, told, [end])
            assert session.frames_in_use * session.layout.frame_bytes <= bits * session.layout.elements(end) / 8
            assert session.report.floor_bytes == 0
            settled = end // PAGE_SIZE
            assert all(new <= old for new, old in zip(tiers[:settled], before, strict=False))
            assert Tier.EVICTED not in tiers[: INST // PAGE_SIZE]
            before = tiers[:settled]
        assert (Tier.EVICTED in before) == evicts
        assert before[0] is Tier.BF16
        assert session.report.bytes_queries > 0


def test_the_same_tokens_get_the_same_plan(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> None:
    told, ends = conversation(2600), [2200, 2400, 2401, 2433, 2600]
    runs = []
    for _ in range(2):
        with Session(model, tokenizer, "strata", 3.0, capacity_tokens=2800) as session:
            runs.append(fed(session, told, ends))
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
    with Session(model, tokenizer, "strata", 3.0, capacity_tokens=2800) as session:
        (before,) = fed(session, told, [2300])
        weights = session._sequence.weights.tolist()
        with pytest.raises(ValueError, match="spans end at 2600"):
            session.feed(told[0][:2500], told[1])
        assert session.page_tiers() == before
        assert session._sequence.weights.tolist() == weights
        session.store.check_integrity()


def test_other_codecs_keep_their_tiers(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> None:
    told = conversation(2400)
    with Session(model, tokenizer, "strata", 4.5, codec="kivi", capacity_tokens=2600) as session:
        tiers = fed(session, told, [2200, 2400])[-1]
        assert set(tiers[: 2400 // PAGE_SIZE]) <= {Tier.BF16, *session.layout.codec.tiers}
        assert session.bits_per_element <= 4.5


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


def test_a_budget_in_bytes_holds_however_long_the_conversation_grows(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> None:
    told = conversation(3000)
    with Session(model, tokenizer, "strata", capacity_tokens=64) as other:
        limit = int(3.0 * other.layout.elements(1500) / 8)
    with Session(model, tokenizer, "strata", budget_bytes=limit, capacity_tokens=3200) as session:
        for end in (1200, 1800, 2400, 3000):
            (tiers,) = fed(session, told, [end])
            assert session.frames_in_use * session.layout.frame_bytes <= limit
            assert session.report.floor_bytes == 0
            assert Tier.EVICTED not in tiers[: INST // PAGE_SIZE]
        assert Tier.EVICTED in tiers
