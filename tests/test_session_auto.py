"""Sessions of one small store that give way to each other: mode `auto`."""

import gc
import itertools
from typing import Any

import pytest
import torch
from transformers import PreTrainedTokenizerBase
from transformers.modeling_utils import PreTrainedModel

from kvstrata.adapters.hf import store_config
from kvstrata.session import Session
from kvstrata.store.arena import OutOfFramesError
from kvstrata.store.store import Store
from kvstrata.types import PAGE_SIZE, Role, Span, Tier

INST = 96


def told(seed: int, tokens: int) -> tuple[list[int], tuple[Span, ...]]:
    """Instructions, then turns of a request, a call and an observation."""
    ids = torch.randint(10, 1000, (tokens,), generator=torch.Generator().manual_seed(seed)).tolist()
    spans, turn = [Span(0, INST, Role.INST, 0)], 0
    while spans[-1].end < tokens:
        turn += 1
        for role, length in ((Role.USER, 32), (Role.TOOL_CALL, 32), (Role.OBS, 192)):
            start = spans[-1].end
            if start < tokens:
                spans.append(Span(start, min(start + length, tokens), role, turn))
    return ids, tuple(spans)


def feed(session: Session, seed: int, end: int) -> None:
    ids, spans = told(seed, end)
    session.feed(ids, spans, logits_to_keep=1)
    session.store.check_integrity()


def small(model: PreTrainedModel, tokens: int) -> Store:
    """Room for so many tokens in BF16."""
    return Store(store_config(model, tokens, window=0))


CASES: dict[str, dict[str, Any]] = {
    "strata": {"policy": "strata"},
    "role": {"policy": "role"},
    "strata, anchors": {"policy": "strata", "budget_bits": 5.0, "policy_settings": {"rho": 0.05}},
}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("count", [2, 3])
def test_nothing_is_refused_while_anything_can_give_way(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, case: str, count: int
) -> None:
    histories = []
    for _ in range(2):
        store = small(model, 420)
        sessions = [Session(model, tokenizer, store=store, auto=True, chunk_tokens=256, **CASES[case]) for _ in range(count)]
        history: list[list[Tier]] = []
        for end in (300, 500, 700, 900, 1100):
            for i, session in enumerate(sessions):
                feed(session, i, end)
                history += [s.page_tiers() for s in sessions]
        histories.append(history)
        # more was told than would fit at INT4; of three sessions, more than would at INT2
        assert sum(s._sequence.num_tokens for s in sessions) // PAGE_SIZE * store.layout.frames(Tier.INT4) > store.arena.num_frames
        for session in sessions:
            tiers = session.page_tiers()
            assert tiers[0] is Tier.BF16
            assert Tier.EVICTED not in tiers[: INST // PAGE_SIZE]
        # fair: no session holds much more a token than another
        held = [s.frames_in_use / len(s.token_ids) for s in sessions]
        assert max(held) < 1.8 * min(held)
        # no page flaps: what gave way stays as it is
        for i in range(count):
            mine = history[i::count]
            for before, now in itertools.pairwise(mine):
                settled = len(before) - 1
                assert all(new <= old for new, old in zip(now[:settled], before, strict=False))
        if count == 3:
            assert any(s._sequence.survivors for s in sessions)
            assert any(s.report.thinned for s in sessions)
        for session in sessions:
            session.reset()
        assert store.frames_in_use == 0
    assert histories[0] == histories[1]


def test_observations_give_way_before_calls_and_instructions_last(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> None:
    store = small(model, 260)
    first, second = (Session(model, tokenizer, "strata", store=store, auto=True) for _ in range(2))
    feed(first, 0, 700)
    before = first.page_tiers()
    assert set(before[1:-1]) == {Tier.INT4}
    feed(second, 1, 500)
    tiers = first.page_tiers()
    gave = [p for p in range(21) if tiers[p] < before[p]]
    assert gave
    roles = {p: {s.role for s in first.spans if s.start < (p + 1) * PAGE_SIZE and s.end > p * PAGE_SIZE} for p in range(21)}
    # what only observes is lower than what is more than that, up to the current turn
    lowest_other = min(tiers[p] for p in range(1, 21) if roles[p] != {Role.OBS})
    assert all(tiers[p] <= lowest_other for p in range(1, 19) if roles[p] == {Role.OBS})


def test_what_cannot_give_way_is_refused_and_leaves_all_as_it_was(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> None:
    store = small(model, 200)
    fixed, yielding = Session(model, tokenizer, "strata", store=store), Session(model, tokenizer, "strata", store=store, auto=True)
    feed(fixed, 0, 400)
    held = fixed.page_tiers()
    feed(yielding, 1, 96)
    # instructions alone: nothing of them may go
    ids = told(2, 3000)[0]
    with pytest.raises(OutOfFramesError):
        yielding.feed(ids, (Span(0, 3000, Role.INST, 0),), logits_to_keep=1)
    store.check_integrity()
    # who did not agree to it gives nothing
    assert fixed.page_tiers() == held
    feed(yielding, 1, 96)


def test_without_auto_a_full_store_refuses(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> None:
    store = small(model, 300)
    first, second = (Session(model, tokenizer, "strata", store=store) for _ in range(2))
    feed(first, 0, 700)
    with pytest.raises(OutOfFramesError):
        feed(second, 1, 700)


def test_a_session_that_is_gone_yields_nothing(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> None:
    store = small(model, 300)
    first = Session(model, tokenizer, "strata", store=store, auto=True)
    feed(first, 0, 300)
    assert len(store.lenders()) == 1
    first.reset()
    assert first.yields() is None
    del first
    gc.collect()
    assert store.lenders() == []
