"""What Prometheus is told of sessions, and what is logged, against the sessions' own pages."""

import itertools
import json
import logging
from pathlib import Path
from typing import Any

import prometheus_client
import pytest
from transformers import PreTrainedTokenizerBase
from transformers.modeling_utils import PreTrainedModel

from kvstrata.metrics import SessionMetrics
from kvstrata.session import Session
from kvstrata.types import PAGE_SIZE, Tier
from tests.test_session_strata import conversation, until

ENDS = (1500, 1900, 2300, 2310)


def fed(session: Session, ends: tuple[int, ...]) -> list[list[Tier]]:
    """Tiers after each turn."""
    ids, spans = conversation(max(ends))
    tiers = []
    for end in ends:
        session.feed(ids[:end], until(spans, end), logits_to_keep=1)
        tiers.append(session.page_tiers())
    return tiers


def values(metrics: SessionMetrics) -> dict[str, float]:
    """By name; labelled ones by name and labels, as a server would say them."""
    registry = prometheus_client.CollectorRegistry()
    registry.register(metrics)
    lines = prometheus_client.generate_latest(registry).decode().splitlines()
    return {line.rpartition(" ")[0]: float(line.rpartition(" ")[2]) for line in lines if not line.startswith("#")}


def falls(tiers: list[list[Tier]]) -> tuple[int, int]:
    """Pages that were seen quantized and then coarser, and seen and then evicted, from one turn to the next."""
    demoted = evicted = 0
    for before, after in itertools.pairwise(tiers):
        for old, new in zip(before, after, strict=False):
            demoted += Tier.EVICTED < new < old < Tier.BF16
            evicted += new is Tier.EVICTED < old
    return demoted, evicted


def test_metrics_are_what_sessions_hold_and_did(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> None:
    metrics = SessionMetrics()
    assert values(metrics)["kvstrata_turns_total"] == 0
    with Session(model, tokenizer, "triaxial", 2.4, capacity_tokens=2600) as session:
        metrics.watch(session)
        first = fed(session, ENDS[:2])
        early = values(metrics)
        metrics.watch(session)
        tiers = [*first, *fed(session, ENDS[2:])]
        got = values(metrics)
        assert (early["kvstrata_turns_total"], got["kvstrata_turns_total"]) == (2, 4)
        assert got["kvstrata_computed_tokens_total"] == ENDS[-1]
        assert got["kvstrata_reused_tokens_total"] == sum(ENDS[:-1])
        assert got["kvstrata_stored_bytes"] == session.bytes_in_use
        assert got["kvstrata_bf16_bytes"] == session.layout.bf16_bytes(ENDS[-1])
        assert got["kvstrata_turn_seconds_total"] == pytest.approx(sum(r.seconds for r in session.reports))
        assert 0 < got["kvstrata_plan_seconds_total"] < got["kvstrata_turn_seconds_total"]
        # every page by its tier: what a token of it takes, times the tokens
        for tier in set(session.page_tiers()):
            tokens = sum(min(PAGE_SIZE, ENDS[-1] - p * PAGE_SIZE) for p, t in enumerate(session.page_tiers()) if t is tier)
            told = sum(v for k, v in got.items() if k.startswith("kvstrata_token_bytes{age=") and f'tier="{tier.name}"' in k)
            assert told == pytest.approx(tokens * session.layout.page_bytes(tier) / PAGE_SIZE)
        arena = session.store.arena
        assert got['kvstrata_arena_bytes{state="used"}'] == arena.in_use * session.layout.frame_bytes
        assert got['kvstrata_arena_bytes{state="free"}'] == arena.free * session.layout.frame_bytes
        demoted, evicted = falls(tiers)
        assert demoted > 0
        assert got["kvstrata_demoted_pages_total"] >= demoted
        assert got["kvstrata_evicted_pages_total"] == evicted
    # a conversation that has ended holds nothing; what it did stays counted
    ended = values(metrics)
    assert (ended["kvstrata_sessions"], ended["kvstrata_stored_bytes"], ended["kvstrata_turns_total"]) == (0, 0, 4)
    with session:
        fed(session, ENDS[:1])
        # its counts begin anew, and the totals go on
        again = values(metrics)
        assert again["kvstrata_turns_total"] == 5
        assert again["kvstrata_demoted_pages_total"] >= got["kvstrata_demoted_pages_total"]
    del session
    assert values(metrics)["kvstrata_turns_total"] == 5


def test_evicted_pages_and_tokens_are_counted(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> None:
    metrics = SessionMetrics(prefix="cache")
    with Session(model, tokenizer, "streaming", policy_settings={"kept": 600}, capacity_tokens=2600) as session:
        metrics.watch(session)
        (*_, last) = fed(session, ENDS)
        got = values(metrics)
        assert got["cache_evicted_pages_total"] == last.count(Tier.EVICTED) > 20
        assert got["cache_evicted_tokens_total"] == session.report.thinned > 1000
        assert sum(v for k, v in got.items() if 'tier="EVICTED"' in k) == 0


def test_a_longer_conversation_after_a_reset_is_counted_whole(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, tmp_path: Path
) -> None:
    metrics = SessionMetrics()
    with Session(model, tokenizer, "streaming", policy_settings={"kept": 400}, capacity_tokens=2600) as session:
        metrics.watch(session)
        fed(session, (1500,))
        pages, tokens = session.report.evicted_pages, session.report.thinned
        assert values(metrics)["kvstrata_evicted_pages_total"] == pages > 10
        session.reset()
        session.save(tmp_path / "one.kvs")
        fed(session, (1900,))
        assert session.report.evicted_pages > pages
        got = values(metrics)
        assert got["kvstrata_evicted_pages_total"] == pages + session.report.evicted_pages
        assert got["kvstrata_evicted_tokens_total"] == tokens + session.report.thinned
        assert got["kvstrata_plan_seconds_total"] == pytest.approx(session.plan_seconds)
    again = SessionMetrics()
    with Session.load(tmp_path / "one.kvs", model, tokenizer) as loaded:
        again.watch(loaded)
        planned = loaded.plan_seconds
        fed(loaded, (1900,))
        got = values(again)
        # what it did from now on
        assert got["kvstrata_evicted_pages_total"] == loaded.report.evicted_pages
        assert got["kvstrata_plan_seconds_total"] == pytest.approx(loaded.plan_seconds - planned)


class Emptied(list[int]):
    """There when it is looked for, gone when it is taken."""

    def __bool__(self) -> bool:
        return True


@pytest.mark.parametrize("ids", [Emptied(), [999]], ids=["emptied", "released"])
def test_a_session_that_is_reset_while_it_is_scraped_holds_nothing(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, ids: list[int]
) -> None:
    metrics = SessionMetrics()
    with Session(model, tokenizer, capacity_tokens=900) as session:
        metrics.watch(session)
        fed(session, (200,))
        there, session._cache.sequence_ids = session._cache.sequence_ids, ids
        got = values(metrics)
        session._cache.sequence_ids = there
    assert (got["kvstrata_sessions"], got["kvstrata_stored_bytes"], got["kvstrata_turns_total"]) == (0, 0, 1)


def test_two_sessions_of_one_store_are_added_up(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> None:
    metrics = SessionMetrics()
    with Session(model, tokenizer, capacity_tokens=4000) as one, Session(model, tokenizer, store=one.store) as two:
        for session in (one, two):
            metrics.watch(session)
            fed(session, (700,))
        got = values(metrics)
        assert got["kvstrata_sessions"] == 2
        # the second found the first one's pages
        assert got["kvstrata_reused_tokens_total"] == two.report.reused_tokens > 500
        assert got["kvstrata_stored_bytes"] == one.bytes_in_use + two.bytes_in_use
        # the arena is one
        assert got['kvstrata_arena_bytes{state="used"}'] == one.store.arena.in_use * one.layout.frame_bytes


def test_a_turn_is_one_json_object_in_the_log(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, caplog: Any) -> None:
    assert logging.getLogger("kvstrata").handlers == []
    with caplog.at_level(logging.WARNING, "kvstrata"), Session(model, tokenizer, capacity_tokens=900) as session:
        fed(session, (200,))
        assert caplog.records == []
        with caplog.at_level(logging.INFO, "kvstrata"):
            fed(session, (700,))
        (record,) = caplog.records
        told = json.loads(record.getMessage())
        report = session.report
        assert (told["event"], told["turn"], told["tokens"]) == ("turn", 1, 700)
        assert (told["bytes_stored"], told["new_tokens"], told["reused_tokens"]) == (report.bytes_stored, 500, 200)
        assert sum(told["tokens_by_tier"].values()) == 700
        assert set(told["tokens_by_tier"]) == {t.name for t in session.page_tiers()}
        assert told["plan_seconds"] > 0
