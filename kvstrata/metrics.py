"""Sessions as Prometheus sees them: bytes by tier and tag, demotions, evictions, reuse, time of planning.

    from prometheus_client import REGISTRY, start_http_server
    metrics = SessionMetrics()
    REGISTRY.register(metrics)
    metrics.watch(session)
    start_http_server(9400)

Needs prometheus-client (`pip install 'kvstrata[metrics]'`). Nothing is counted inside a turn: reports that turns leave behind are read
when metrics are collected. Knows nothing of servers.
"""

import threading
from collections import defaultdict
from collections.abc import Iterator
from typing import Any, Protocol
from weakref import WeakKeyDictionary

from kvstrata.store.store import Store
from kvstrata.turn import TurnReport
from kvstrata.types import PAGE_SIZE, Tier


class Watchable(Protocol):
    """The part of a session that is read (kvstrata.session.Session)."""

    reports: list[TurnReport]
    starts: set[int]
    """Reports with which a conversation begins, and with it what was done so far."""

    @property
    def store(self) -> Store: ...
    @property
    def bytes_in_use(self) -> int: ...
    @property
    def token_ids(self) -> list[int]: ...


OF_CONVERSATION = {"demoted_pages", "evicted_pages", "thinned"}
RUNNING = OF_CONVERSATION | {"plan_seconds"}
"""Fields of a report that say how many so far: of a session, and some of a conversation, from nothing again in the next."""
COUNTERS = {
    "turns": ("Turns that ended.", "turns"),
    "turn_seconds": ("Time that turns took.", "seconds"),
    "plan_seconds": ("Of that, time that policies took to plan.", "plan_seconds"),
    "computed_tokens": ("Tokens that ran through the model.", "new_tokens"),
    "reused_tokens": ("Tokens of prompts that were stored already.", "reused_tokens"),
    "demoted_pages": ("Pages that gave up planes, or were stored coarser.", "demoted_pages"),
    "evicted_pages": ("Pages that were evicted, all of their tokens or but for survivors.", "evicted_pages"),
    "evicted_tokens": ("Tokens that were thinned away, a layer and KV head on average.", "thinned"),
}
"""Name, help and the report's field."""


class SessionMetrics:
    """A collector for prometheus_client's registries. Sessions that are gone stay in the counters; gauges are of those that live."""

    def __init__(self, prefix: str = "kvstrata") -> None:
        # fails here, not at the first scrape
        from prometheus_client import core

        self._gauges: Any = core.GaugeMetricFamily
        self._counters: Any = core.CounterMetricFamily
        self.prefix = prefix
        self._lock = threading.Lock()
        self._seen: WeakKeyDictionary[Any, int] = WeakKeyDictionary()
        self._last: WeakKeyDictionary[Any, TurnReport] = WeakKeyDictionary()
        self._totals: defaultdict[str, float] = defaultdict(float)

    def watch(self, session: Watchable) -> None:
        """Count what a session's turns do from now on; once more changes nothing."""
        with self._lock:
            if session not in self._seen:
                self._seen[session] = len(session.reports)
                if session.reports:
                    self._last[session] = session.reports[-1]

    def collect(self) -> Iterator[Any]:
        """Metric families, as prometheus_client asks for them."""
        with self._lock:
            sessions = list(self._seen)
            for session in sessions:
                self._count(session)
            totals = dict(self._totals)
        for name, (text, _) in COUNTERS.items():
            yield self._counters(f"{self.prefix}_{name}", text, value=totals.get(name, 0))
        held = {s: taken for s in sessions if s.reports and (taken := _held_bytes(s))}
        holding = list(held)
        yield self._gauge("sessions", "Sessions that hold a conversation.", len(holding))
        yield self._gauge("stored_bytes", "Bytes that their conversations take, all counted.", sum(held.values()))
        dense = sum(s.reports[-1].bytes_bf16 for s in holding)
        yield self._gauge("bf16_bytes", "Bytes that they would take uncompressed in bfloat16.", dense)
        by_tag = self._gauges(
            f"{self.prefix}_token_bytes", "Bytes of the tokens, by tier and tag.", labels=("tier", "role", "age", "modality")
        )
        for labels, num_bytes in bytes_by_tag(holding).items():
            by_tag.add_metric(labels, num_bytes)
        yield by_tag
        arena = self._gauges(f"{self.prefix}_arena_bytes", "Bytes of the stores' arenas.", labels=("state",))
        stores = {id(s.store): s.store for s in sessions}.values()
        arena.add_metric(("used",), sum(s.arena.in_use * s.layout.frame_bytes for s in stores))
        arena.add_metric(("free",), sum(s.arena.free * s.layout.frame_bytes for s in stores))
        yield arena

    def _gauge(self, name: str, text: str, value: float) -> Any:
        return self._gauges(f"{self.prefix}_{name}", text, value=value)

    def _count(self, session: Watchable) -> None:
        """Add what turns since the last time did."""
        for report in session.reports[self._seen[session] :]:
            before, begins = self._last.get(session), self._seen[session] in session.starts
            for name, (_, field) in COUNTERS.items():
                value = 1.0 if field == "turns" else getattr(report, field)
                if field in RUNNING and before is not None and not (begins and field in OF_CONVERSATION):
                    value -= getattr(before, field)
                self._totals[name] += value
            self._last[session] = report
            self._seen[session] += 1


def _held_bytes(session: Watchable) -> int:
    """Bytes of a session's conversation; 0 where it holds none."""
    try:
        return session.bytes_in_use if session.token_ids else 0
    except (IndexError, ValueError):
        # a turn in another thread has let go of it since it was looked for
        return 0


def bytes_by_tag(sessions: list[Any]) -> dict[tuple[str, str, str, str], float]:
    """Bytes of tokens by (tier, role, age, modality), after each session's last turn: a token's share of a page of its tier."""
    out: defaultdict[tuple[str, str, str, str], float] = defaultdict(float)
    for session in sessions:
        layout = session.store.layout
        for (age, modality, role, tier), tokens in session.reports[-1].tokens_by_tag_and_tier.items():
            out[tier, role, age, modality] += tokens * layout.page_bytes(Tier[tier]) / PAGE_SIZE
    return dict(out)
