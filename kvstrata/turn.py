"""What a turn did, as a session reports it. Knows a store and tags; nothing of models."""

import json
import logging
from collections import defaultdict
from collections.abc import Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvstrata.store.gathered import EMPTY
from kvstrata.store.page import Sequence
from kvstrata.store.store import Store
from kvstrata.types import PAGE_SIZE, Span, Tier

LOG = logging.getLogger("kvstrata")


@dataclass(frozen=True, slots=True)
class TurnReport:
    """What a turn did. Bytes count all layers; bits are real: metadata, sinks, window and padding included."""

    turn: int
    tokens: int
    tokens_by_tag_and_tier: Mapping[tuple[str, str, str, str], int]
    """Tokens by (age, modality, role, tier)."""
    bytes_stored: int
    bytes_dead: int
    """Of bytes_stored: what belongs to dead tokens inside living pages, and to empty slots of survivors' pages."""
    bytes_bf16: int
    """What an uncompressed bfloat16 cache of the same tokens takes."""
    bits_per_element: float
    reused_tokens: int
    new_tokens: int
    seconds: float
    anchors: int = 0
    """Tokens kept as anchors, a layer and KV head on average."""
    anchors_promoted: int = 0
    """Of those: made of planes, whose loss stays."""
    bytes_queries: int = 0
    """Of bytes_stored, but not in bits_per_element: the queries, and what else is watched, by which anchors and survivors are chosen."""
    survivors: int = 0
    """Tokens that live on of thinned pages, a layer and KV head on average."""
    thinned: int = 0
    """Tokens that were thinned away so far, a layer and KV head."""
    bytes_freed: int = 0
    """What thinned pages took, less what their survivors take."""
    peak_bytes: int = 0
    """Most bytes that the conversation ever took, those of a forward pass's new pages included."""
    peak_tokens: int = 0
    """Most tokens that lived at once, a layer and KV head on average."""
    floor_bytes: int = 0
    """Bytes of the policy's cheapest plan, where at some time of the turn it stood in for one within the budget, be it since an earlier
    turn, less what the window was yet to grow by; 0 where the budget was always enough."""
    plan_loss: float | None = None
    """Loss a token of the plan, as its policy counts it; None where it does not."""
    predicted_kl: float | None = None
    """KL against an uncompressed cache, nats a token, that the plan is predicted to have; None where nobody says, or something is gone."""
    demoted_pages: int = 0
    """Pages that were made coarser so far: gave up planes, or were stored anew."""
    evicted_pages: int = 0
    """Pages that were evicted so far, all of their tokens or but for survivors."""
    plan_seconds: float = 0.0
    """Time that the session's policy took to plan so far."""


def turn_report(
    store: Store, s: Sequence, spans: Seq[Span], *, turn: int, reused_tokens: int, seconds: float, bytes_queries: int,
    bytes_outside: int, floor_bytes: int, plan_seconds: float = 0.0,
) -> TurnReport:  # fmt: skip
    """spans: tags of all tokens of `s`. bytes_queries, bytes_outside: what the conversation takes beside its frames. floor_bytes,
    plan_seconds: the report's. Logs the report as one JSON object, at level INFO of logger "kvstrata"."""
    layout, n = store.layout, s.num_tokens
    dead = sum(layout.dead_bytes(page.tier, min(PAGE_SIZE, n - p * PAGE_SIZE) - page.live_tokens) for p, page in enumerate(s.pages))
    holes = sum(layout.dead_bytes(page.tier, PAGE_SIZE - round(_mean(store, page.tokens))) for page in s.survivors)
    evicted = sum(not page.frames for page in s.pages[: s.settled])
    full = evicted * layout.page_bytes(s.plan.thinning.tier) if s.plan.thinning is not None else 0
    survivors = round(_mean(store, sum(page.tokens for page in s.survivors)))
    report = TurnReport(
        turn=turn, tokens=n, tokens_by_tag_and_tier=_by_tag_and_tier(store, s, spans),
        bytes_stored=s.frames * layout.frame_bytes + bytes_queries + bytes_outside, bytes_dead=dead + holes,
        bytes_bf16=layout.bf16_bytes(n),
        bits_per_element=layout.bits_per_element(s.frames, n), reused_tokens=reused_tokens, new_tokens=n - reused_tokens, seconds=seconds,
        anchors=round(_mean(store, sum(page.tokens for page in s.anchors))),
        anchors_promoted=round(_mean(store, sum(page.promoted for page in s.anchors))),
        bytes_queries=bytes_queries, survivors=survivors, thinned=s.thinned,
        bytes_freed=full - sum(layout.page_bytes(page.tier) for page in s.survivors) if full else 0,
        peak_bytes=max(s.peak_frames, s.frames) * layout.frame_bytes + bytes_queries + bytes_outside,
        peak_tokens=max(s.peak_tokens, sum(page.live_tokens for page in s.pages) + survivors), floor_bytes=floor_bytes,
        plan_loss=s.plan.loss, predicted_kl=s.plan.predicted_kl,
        demoted_pages=s.demoted_pages, evicted_pages=s.evicted_pages, plan_seconds=plan_seconds,
    )  # fmt: skip
    if LOG.isEnabledFor(logging.INFO):
        LOG.info("%s", json.dumps({"event": "turn", "sequence": s.id} | facts(report)))
    return report


def facts(report: TurnReport) -> dict[str, Any]:
    """A report as JSON has it, the tokens by tier alone."""
    out = {f.name: getattr(report, f.name) for f in fields(report) if f.name != "tokens_by_tag_and_tier"}
    tokens: defaultdict[str, int] = defaultdict(int)
    for (*_, tier), count in report.tokens_by_tag_and_tier.items():
        tokens[tier] += count
    return out | {"tokens_by_tier": dict(tokens)}


def _mean(store: Store, tokens: int) -> float:
    """A layer and KV head's share of a number over all of them."""
    return tokens / (store.config.num_layers * store.config.num_kv_heads)


def _survival(store: Store, s: Sequence) -> dict[Tier, NDArray[np.float64]]:
    """By tier of survivors' pages: share of layers and KV heads in which each token lives there, [tokens]."""
    shares: dict[Tier, NDArray[np.float64]] = {}
    for page in s.survivors:
        share = shares.setdefault(page.tier, np.zeros(s.num_tokens))
        np.add.at(share, page.positions[page.positions != EMPTY], _mean(store, 1))
    return shares


def _by_tag_and_tier(store: Store, s: Sequence, spans: Seq[Span]) -> dict[tuple[str, str, str, str], int]:
    """Tokens by (age, modality, role, tier). A survivor counts for as much as there are layers and KV heads that keep it."""
    current = max((span.turn for span in spans), default=0)
    tokens: defaultdict[tuple[str, str, str, str], float] = defaultdict(float)
    shares = _survival(store, s)
    for span in spans:
        tag = span.tag(current)
        name = (tag.age.name.lower(), tag.modality.value, tag.role.value)
        for p in range(span.start // PAGE_SIZE, (span.end - 1) // PAGE_SIZE + 1):
            at = slice(max(span.start, p * PAGE_SIZE), min(span.end, (p + 1) * PAGE_SIZE))
            page, n = s.pages[p], at.stop - at.start
            if page.frames or not shares:
                tokens[*name, page.tier.name] += n
                continue
            rest = float(n)
            for tier, share in shares.items():
                lived = float(share[at].sum())
                tokens[*name, tier.name] += lived
                rest -= lived
            tokens[*name, Tier.EVICTED.name] += rest
    return {key: round(value) for key, value in tokens.items() if round(value)}
