"""What is run on a conversation and which of its tokens are scored; the reference run, and a session's run against it.

turns    turn by turn as a session runs: each chunk dense inside and attending compressed history; every reply after the first is scored
oneshot  one full-precision prefill, stored once; the last 400 tokens are scored in one chunk
Questions, where there are some, are asked at the end in both, one after another, and their answers are scored too; turns also takes
questions in the middle, which are replies like others.

Knows nothing of how results are summed up or shown.
"""

import contextlib
import time
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

from kvstrata.adapters.capture import captured
from kvstrata.adapters.hf import cache_keyword
from kvstrata.eval.conversation import Asked, Conversation, context_end
from kvstrata.eval.metrics import Comparison, Scores, log_probs
from kvstrata.eval.replay import Prefill, Recorder, recorded
from kvstrata.ops.score import NUM_QUERIES
from kvstrata.session import CHUNK
from kvstrata.types import Role

PROTOCOLS = ("turns", "oneshot")
TAIL = 400
"""Tokens that oneshot scores; half of the conversation where it is shorter than twice that."""


@dataclass(frozen=True)
class Task:
    """chunks: ends of the chunks, ascending, the last the conversation's end. scored: positions of the tokens whose prediction is judged.

    context: tokens of the conversation proper; questions begin there. at_once: the first chunk is one prefill, before anything is evicted.
    """

    conversation: Conversation
    chunks: tuple[int, ...]
    scored: tuple[int, ...]
    context: int
    asked: tuple[Asked, ...] = ()
    at_once: bool = False

    def chunk_tokens(self) -> int:
        """Most tokens that a session may run at once: an evicting one else keeps to its budget within the first chunk."""
        return max(self.chunks[0], CHUNK) if self.at_once else CHUNK

    def rows(self, start: int, end: int) -> list[int]:
        """Rows of the logits of chunk [start, end) that predict scored tokens, counted from its end: negative numbers."""
        return [p - 1 - end for p in self.scored if start < p <= end]


def check_protocol(name: str) -> None:
    if name not in PROTOCOLS:
        raise ValueError(f"unknown protocol {name!r}; accepted: {', '.join(PROTOCOLS)}")


def make_task(protocol: str, conversation: Conversation, asked: tuple[Asked, ...] = ()) -> Task:
    """What `protocol` runs on a conversation. Raises ValueError for an unknown protocol and for a conversation with nothing to score."""
    check_protocol(protocol)
    n = len(conversation)
    chunks = conversation.chunks()
    answers = [p for a in asked for p in range(a.start, a.end)]
    last = sum(a.question.at < 0 for a in asked)
    if protocol == "oneshot" and last < len(asked):
        raise ValueError(f"trace {conversation.id}: oneshot asks at the end, and {len(asked) - last} questions come earlier")
    context = context_end(conversation, last) if last else n
    questions = [end for _, end in conversation.replies[len(conversation.replies) - last : -1]] if last else []
    if protocol == "oneshot":
        tail = min(TAIL, n // 2)
        chunks = [context, *questions, n] if last else [n - tail, n]
        scored = answers or list(range(n - tail + 1, n))
    else:
        told = conversation.replies[1 : len(conversation.replies) - last]
        chunks = [*(c for c in chunks if c < context), context, *questions, n]
        scored = sorted({p for start, end in told for p in range(start, end)}.union(answers))
    if not scored or chunks[0] < 1:
        raise ValueError(f"trace {conversation.id}: {protocol} has nothing to score in {n} tokens and {len(conversation.replies)} replies")
    return Task(conversation, tuple(sorted(set(chunks))), tuple(scored), context, asked, protocol == "oneshot")


@dataclass(frozen=True)
class Reference:
    """log_probs: float32 [scored, vocab] of the uncompressed model. prefill: its first chunk, which settings need not run again."""

    log_probs: Tensor
    prefill: Prefill | None
    seconds: float


@torch.inference_mode()
def run_reference(model: PreTrainedModel, task: Task, queries: int = NUM_QUERIES) -> Reference:
    """The model with transformers' own cache over the task's chunks; of the logits only the scored rows are kept.

    queries: how many of the first chunk's newest queries its prefill keeps, for settings that choose by more than NUM_QUERIES.
    """
    cache, prefill, start, rows = DynamicCache(config=model.config), None, 0, []
    started = time.perf_counter()
    for end in task.chunks:
        ids = task.conversation.token_ids[start:end]
        wanted = task.rows(start, end)
        kept = -min(wanted, default=-1)
        seen = Recorder(queries)
        with captured(model, seen.see) if start == 0 else contextlib.nullcontext():
            out = model(torch.tensor([ids], device=model.device), use_cache=True, logits_to_keep=kept, **{cache_keyword(model): cache})
        if wanted:
            rows.append(log_probs(out.logits[0, wanted].cpu()))
        if start == 0:
            prefill = recorded(cache, seen, ids, out.logits.float(), time.perf_counter() - started)
        start = end
    return Reference(torch.cat(rows), prefill, time.perf_counter() - started)


class SessionLike(Protocol):
    """The part of a session that an evaluation needs (kvstrata.session.Session)."""

    def feed(self, token_ids: list[int], spans: Any, *, logits_to_keep: int) -> Tensor: ...
    @property
    def report(self) -> Any: ...
    @property
    def reports(self) -> Any: ...
    @property
    def layout(self) -> Any: ...
    @property
    def frames_in_use(self) -> int: ...
    @property
    def bytes_in_use(self) -> int: ...
    @property
    def peak_bytes(self) -> int: ...
    def page_tiers(self) -> Any: ...


@dataclass(frozen=True)
class TurnBytes:
    """After one chunk: tokens held, bytes stored, and what bfloat16 would take."""

    tokens: int
    bytes_stored: int
    bytes_bf16: int


@dataclass(frozen=True)
class Outcome:
    """One conversation at one setting. Figures of storage are of the context's end, before any question.

    page_tiers: bits of each page's tier; page_bytes: bytes of a page at each tier, by its bits.
    anchors: tokens that are kept as such, a layer and KV head.
    """

    scores: Scores
    tokens: int
    bits_per_element: float
    bytes_in_use: int
    bytes_bf16: int
    peak_bytes: int
    reused_tokens: int
    fed_tokens: int
    seconds: float
    page_tiers: tuple[int, ...]
    page_bytes: dict[int, int]
    turns: tuple[TurnBytes, ...]
    dense_dtype: str | None = None
    anchors: int = 0


@torch.inference_mode()
def run_session(session: SessionLike, task: Task, reference: Reference | None) -> Outcome:
    """Feed a fresh session the task's chunks and compare its logits with the reference's; without one, only the text's own NLL is known.

    Inside `replayed`, the first chunk costs nothing; what it took the reference counts as the session's.
    """
    conversation, scored = task.conversation, task.scored
    ids = conversation.token_ids
    calls = [conversation.role_at(p) is Role.TOOL_CALL for p in scored]
    rows = reference.log_probs if reference is not None else None
    comparison = Comparison(rows, list(scored), [ids[p] for p in scored], calls, [_reply_of(conversation, p) for p in scored])
    started, start, turns = time.perf_counter(), 0, []
    stored: dict[str, Any] = {}
    for end in task.chunks:
        wanted = task.rows(start, end)
        logits = session.feed(ids[:end], conversation.spans_until(end), logits_to_keep=-min(wanted, default=-1))
        if wanted:
            comparison.add(logits[wanted].cpu())
        turns.append(TurnBytes(end, session.report.bytes_stored, session.report.bytes_bf16))
        if end <= task.context or not stored:
            stored = {
                "tokens": end,
                "bits_per_element": session.layout.bits_per_element(session.frames_in_use, end),
                "bytes_in_use": session.bytes_in_use,
                "bytes_bf16": session.report.bytes_bf16,
                "peak_bytes": session.peak_bytes,
                "anchors": session.report.anchors,
                "page_tiers": tuple(int(t) for t in session.page_tiers()),
                "page_bytes": {int(t): n for t, n in session.layout.tier_bytes().items()},
            }
        start = end
    shared = reference.prefill.seconds if reference is not None and reference.prefill is not None else 0.0
    reports = session.reports
    return Outcome(
        scores=comparison.scores(),
        reused_tokens=sum(r.reused_tokens for r in reports),
        fed_tokens=sum(r.reused_tokens + r.new_tokens for r in reports),
        seconds=time.perf_counter() - started + shared,
        turns=tuple(turns),
        **stored,
    )


def _reply_of(conversation: Conversation, position: int) -> int:
    """Index of the reply that holds a position; -1 outside of all."""
    return next((i for i, (start, end) in enumerate(conversation.replies) if start <= position < end), -1)
