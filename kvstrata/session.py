"""A conversation over many turns: the file to read first.

    session = Session(model, tokenizer, budget_bits=3.5)
    reply = session.chat(messages, tools=tools)

A turn: messages are tagged, the policy plans a tier for each page, what is stored of the prefix is reused, the rest runs through the
model as one chunk (dense inside, attending the stored pages), and its keys and values settle page by page to their planned tiers.
"""

import contextlib
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from kvstrata import saving
from kvstrata.adapters.hf import StrataCache, attached, cache_keyword, store_config
from kvstrata.allowance import Allowance, check_capacity
from kvstrata.policy import POLICIES, BudgetTooSmallError, Signals, make_policy, recent_window
from kvstrata.policy.pressure import rank_pages
from kvstrata.policy.tags import page_tags
from kvstrata.policy.thinned import Thinned
from kvstrata.store.anchors import holding
from kvstrata.store.layout import Layout
from kvstrata.store.page import Sequence
from kvstrata.store.queries import NONE
from kvstrata.store.store import Store
from kvstrata.store.thin import living
from kvstrata.tagging.calls import parse_reply
from kvstrata.tagging.template import Tagged, tag_ids, tag_messages
from kvstrata.turn import TurnReport, turn_report
from kvstrata.types import PAGE_SIZE, Plan, Span, Tier

CHUNK = 1024
"""Tokens that run at once, by default, under a policy that evicts."""


@dataclass(frozen=True, slots=True)
class Reply:
    text: str
    token_ids: list[int]
    message: dict[str, Any]
    """The reply as an OpenAI-style assistant message, tool calls parsed; append it to `messages` for the next turn."""
    report: TurnReport


def _common(a: list[int], b: list[int]) -> int:
    """Length of the longest common prefix."""
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


class Session:
    """One conversation in a store.

    policy, policy_settings: as kvstrata.policy.make_policy takes them. `strata`, the default, works with every codec; without a budget it
    keeps all pages but the first at the codec's tier nearest to INT4 (planes: 4.6 bits an element at head_dim 128). The newest 64 queries
    of each layer, by which it weighs pages, are held at INT8: they are in bytes_stored, not in bits_per_element.
    budget_bits: real bits a K and V element, averaged over the conversation, which counts as BUDGET_HORIZON tokens while it is shorter;
    where the recent window alone takes more, the policy's cheapest plan stands in, and the report says so (floor_bytes). budget_bytes:
    bytes that the conversation may take however long it grows, what is held beside its frames included (bytes_in_use), instead. quality: KL
    against an uncompressed cache, nats a token, that plans are predicted to stay under, at the fewest bytes, instead.
    codec, window, dense_dtype, capacity_tokens: of the store made for this session; store: share this one instead (sessions of one
    model then reuse each other's prefixes). window defaults to the policy's (64; strata, triaxial: 0), dense_dtype to bfloat16, and to the
    model's own type for policy "full". chunk_tokens: of a turn, that run at once under a policy that evicts: a session keeps to its budget,
    and one chunk, within a long turn too; other policies run a turn whole.

    auto: when the store has no frames left for a step of any session, this one gives way with others that do, oldest observations first,
    instructions last and never below the lowest tier (docs/planner.md); a step is refused only when none of them can give up more.

    Raises ValueError for an unknown policy, setting, tier or codec, an unsupported model, and a budget below the policy's floor.
    After an error in a turn the session holds what it held before the turn, less what an evicting policy has evicted since.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        policy: str = "strata",
        budget_bits: float | None = None,
        *,
        budget_bytes: int | None = None,
        quality: float | None = None,
        policy_settings: Mapping[str, Any] | None = None,
        codec: str = "planes",
        window: int | None = None,
        dense_dtype: str | None = None,
        capacity_tokens: int | None = None,
        chunk_tokens: int = CHUNK,
        store: Store | None = None,
        auto: bool = False,
    ) -> None:
        self.model, self.tokenizer = model, tokenizer
        self.budget_bits, self.budget_bytes, self.quality = budget_bits, budget_bytes, quality
        if store is None:
            if dense_dtype is None and policy == "full":
                dense_dtype = str(model.dtype).removeprefix("torch.")
            check_capacity(capacity_tokens)
            window = recent_window(policy) if window is None else window
            capacity = capacity_tokens or min(getattr(model.config, "max_position_embeddings", 32768), 32768)
            store = Store(store_config(model, capacity, codec=codec, window=window, dense_dtype=dense_dtype), model.device)
        if isinstance(chunk_tokens, bool) or not isinstance(chunk_tokens, int) or chunk_tokens < 1:
            raise ValueError(f"chunk_tokens is {chunk_tokens!r}; it must be at least 1")
        self.store, self.chunk_tokens = store, chunk_tokens
        settings = dict(policy_settings or {})
        # what the codec has stands in for settings that are not given
        defaults = {f.name: f.default for f in fields(POLICIES[policy])} if policy in POLICIES else {}
        if "tiers" in defaults:
            settings.setdefault("tiers", store.layout.codec.tiers)
        if "tier" in defaults and defaults["tier"] not in store.layout.tiers:
            settings.setdefault("tier", store.layout.default_tier)
        self.policy = make_policy(policy, **settings)
        if not isinstance(auto, bool):
            raise ValueError(f"auto is {auto!r}; accepted: True, False")
        self.auto = auto
        # a snapshot would hold what gives way
        self._evicts = isinstance(self.policy, Thinned) or auto
        if self._evicts:
            store.check_plan(self.policy.plan((), 0, Signals()))
        self.reports: list[TurnReport] = []
        # of the reports, those of first turns: what a report says was done so far begins anew there
        self.starts = {0}
        self.plan_seconds = 0.0
        self._cache = StrataCache(model, store, self._plan)
        self._spans: tuple[Span, ...] = ()
        self._known = 0
        # of this turn, and of the newest plan, which holds in later turns too
        self._floor = self._standing_floor = 0
        self._allowance.check(self.policy)
        if auto:
            store.add_lender(self)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.reset()

    # turns

    def chat(
        self, messages: list[dict[str, Any]], tools: list[dict[str, Any]] | None = None, *, max_new_tokens: int = 512, **generate: Any
    ) -> Reply:
        """Answer a conversation: `messages` is all of it, earlier replies included. Further arguments go to `model.generate`.

        Raises ValueError for no messages or a role that the chat template does not know.
        """
        tagged = tag_messages(self.tokenizer, messages, tools, add_generation_prompt=True)
        with self._all_or_nothing():
            return self._chat(tagged, max_new_tokens, generate)

    def _chat(self, tagged: Tagged, max_new_tokens: int, generate: dict[str, Any]) -> Reply:
        start = time.perf_counter()
        reused = self._align(tagged.token_ids, tagged.spans)
        ids = torch.tensor([tagged.token_ids], device=self.model.device)
        generate = {"do_sample": False} | generate
        with attached(self.model, self.store, cache=self._cache), torch.no_grad():
            pieces = self._pieces(reused, len(tagged.token_ids))
            for start_, end in pieces[:-1]:
                self.model(input_ids=ids[:, start_:end], **{cache_keyword(self.model): self._cache}, logits_to_keep=1)
            generate |= {cache_keyword(self.model): self._cache, "max_new_tokens": max_new_tokens}
            out: Tensor = self.model.generate(ids, attention_mask=torch.ones_like(ids), **generate)  # type: ignore[operator]
        new = out[0, len(tagged.token_ids) :].tolist()
        text = str(self.tokenizer.decode(new, skip_special_tokens=True))
        report = self._end_turn(reused, time.perf_counter() - start)
        return Reply(text, new, parse_reply(text), report)

    def feed(self, token_ids: list[int], spans: tuple[Span, ...] | None = None, *, logits_to_keep: int = 0) -> Tensor:
        """Make the session hold exactly `token_ids`, the whole conversation so far, running what is not stored as one chunk.

        spans: tags of the tokens, partitioning them; None: found from the ids. logits_to_keep: how many of the last positions to
        return logits for; 0: all that ran. -> float32 [positions, vocabulary]. Tokens that are stored already run again only where
        nothing else would run: the last one always does.
        """
        if not token_ids:
            raise ValueError("token_ids is empty; a turn needs at least one token")
        start = time.perf_counter()
        spans = tag_ids(self.tokenizer, token_ids) if spans is None else spans
        rows = int(self.model.config.get_text_config().vocab_size)
        # a device that is asked for a row that is not there may be lost to the whole process
        if wrong := [i for i in token_ids if not 0 <= i < rows]:
            raise ValueError(f"token id {wrong[0]} is none of this model's; accepted: 0 to {rows - 1}")
        with self._all_or_nothing():
            reused = self._align(token_ids, spans)
            logits, n = [], len(token_ids)
            with attached(self.model, self.store, cache=self._cache), torch.no_grad():
                for first, end in self._pieces(reused, n):
                    new = torch.tensor([token_ids[first:end]], device=self.model.device)
                    # of pieces before the last wanted position one row is kept, and left out
                    wanted = end - first if not logits_to_keep else max(0, min(end - first, logits_to_keep - (n - end)))
                    out = self.model(input_ids=new, **{cache_keyword(self.model): self._cache}, logits_to_keep=max(wanted, 1))
                    logits.append(out.logits[0, -wanted:] if wanted else out.logits[0, :0])
        self._end_turn(reused, time.perf_counter() - start)
        return torch.cat(logits).float()

    def _pieces(self, start: int, end: int) -> list[tuple[int, int]]:
        """Chunks in which [start, end) runs: one, but for policies that evict, which keep to their budget within a long turn too."""
        step = self.chunk_tokens if self._evicts else end - start
        return [(i, min(i + step, end)) for i in range(start, end, step)]

    def reset(self) -> None:
        """Forget the conversation; its settled pages stay reusable in the store until their frames are wanted."""
        self._cache.reset()
        self._spans, self._known = (), 0
        self.starts.add(len(self.reports))

    def save(self, path: str | Path) -> None:
        """Write all of it to a file, which is compared before it takes its name (docs/architecture.md). Raises OSError where that fails,
        ValueError for a session with a setting of a type that no file keeps."""
        saving.save(self, path)

    @classmethod
    def load(
        cls, path: str | Path, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, *, store: Store | None = None,
        capacity_tokens: int | None = None,
    ) -> Self:  # fmt: skip
        """Continue a saved session; store, capacity_tokens: as for a new one. ValueError: what is wrong with the file, or not as saved."""
        return saving.load(cls, path, model, tokenizer, store, capacity_tokens)

    # what it holds

    @property
    def layout(self) -> Layout:
        return self.store.layout

    @property
    def report(self) -> TurnReport:
        if not self.reports:
            raise ValueError("no turn has ended yet; call chat or feed first")
        return self.reports[-1]

    @property
    def token_ids(self) -> list[int]:
        return list(self._sequence.token_ids) if self._cache.sequence_ids else []

    @property
    def spans(self) -> tuple[Span, ...]:
        """Tags of the stored tokens."""
        return self._spans_of(self.token_ids)

    @property
    def frames_in_use(self) -> int:
        return self._sequence.frames if self._cache.sequence_ids else 0

    @property
    def bytes_in_use(self) -> int:
        """Bytes of this conversation's frames, of what chooses anchors and survivors, and of sliding-window layers outside the store."""
        return self.frames_in_use * self.layout.frame_bytes + self._query_bytes + self._cache.sliding_bytes

    @property
    def _query_bytes(self) -> int:
        if not self._cache.sequence_ids:
            return 0
        s = self._sequence
        return (
            (self.store.queries.ring_bytes if s.ring != NONE else 0)
            + s.memory.nbytes
            + sum(x.nbytes for x in (s.received, s.worth) if x is not None)
        )

    @property
    def peak_bytes(self) -> int:
        """Most bytes that the store's sequences and prefix index ever held."""
        return self.store.arena.peak_in_use * self.layout.frame_bytes

    @property
    def bits_per_element(self) -> float:
        return self.layout.bits_per_element(self.frames_in_use, len(self.token_ids))

    def page_tiers(self) -> list[Tier]:
        """Tier of each page of the conversation; pages of the recent window are BF16."""
        return [page.tier for page in self._sequence.pages] if self._cache.sequence_ids else []

    def yields(self) -> tuple[int, tuple[int, ...], frozenset[int]] | None:
        """Which of its pages give way first under pressure, and which never lose a token (store/pressure.py)."""
        if not self._cache.sequence_ids:
            return None
        ids = self.token_ids
        return self._cache.sequence_ids[0], *rank_pages(page_tags(self._spans_of(ids), len(ids)))

    # inside a turn

    @contextlib.contextmanager
    def _all_or_nothing(self) -> Iterator[None]:
        """A turn that fails leaves what was held before it: what it cropped, demoted or aged away is there again."""
        self._floor = 0
        held = (self._spans, self._known, self._standing_floor)
        if self._evicts:
            # a snapshot would hold what is evicted in mid-turn: the budget would be twice itself
            before_ids = self.token_ids
            try:
                yield
            except BaseException:
                self._back_to(before_ids)
                self._spans, self._known, self._standing_floor = held
                raise
            return
        before = self._cache.snapshot()
        try:
            yield
        except BaseException:
            self._cache.restore(before)
            self._spans, self._known, self._standing_floor = held
            raise
        self._cache.discard(before)

    def _back_to(self, token_ids: list[int]) -> None:
        """Hold of `token_ids` what is still there; the rest is computed anew when it is wanted."""
        self._cache.abort()
        if not self._cache.sequence_ids:
            return
        common = _common(self.token_ids, token_ids)
        if not common:
            self.reset()
        elif common < len(self.token_ids):
            self._cache.crop(common - len(self.token_ids))

    @property
    def _sequence(self) -> Any:
        return self.store.sequence(self._cache.sequence_ids[0])

    def _align(self, token_ids: list[int], spans: tuple[Span, ...]) -> int:
        """Let the cache hold the longest stored prefix of `token_ids`, less the last token; how many tokens that is."""
        last = len(token_ids) - 1
        if self._cache.sequence_ids:
            stored = self._sequence.token_ids
            common = self._sequence.found(spans, min(_common(stored, token_ids), last))
            if common < len(stored):
                self._cache.crop(common - len(stored))
        else:
            self._spans, self._known = spans, len(token_ids)
            plan = self._plan(token_ids)
            sequence_id = self.store.add_sequence(plan)
            # pages coarser than any of ours are not taken from a neighbour: "full" stays full
            self.store.match_prefix(sequence_id, token_ids, plan.coarsest)
            self._cache.adopt(sequence_id)
        self._spans, self._known = spans, len(token_ids)
        return int(self._sequence.num_tokens)

    def _spans_of(self, token_ids: list[int]) -> tuple[Span, ...]:
        """Spans of exactly `token_ids`; those of generated tokens are found from the ids."""
        n = len(token_ids)
        if n == self._known:
            return self._spans
        spans = [Span(s.start, min(s.end, n), s.role, s.turn, s.modality) for s in self._spans if s.start < n]
        if n > self._known:
            found = tag_ids(self.tokenizer, token_ids)
            # ids alone may count turns otherwise than messages do, which know a boundary from one that a content quotes
            later = next((s.turn for s in found if s.end >= self._known), 0) - (spans[-1].turn if spans else 0)
            spans += [Span(max(s.start, self._known), s.end, s.role, s.turn - later, s.modality) for s in found if s.end > self._known]
        return tuple(spans)

    def _plan(self, token_ids: list[int]) -> Plan:
        started = time.perf_counter()
        try:
            return self._planned(token_ids)
        finally:
            self.plan_seconds += time.perf_counter() - started

    def _planned(self, token_ids: list[int]) -> Plan:
        spans, n = self._spans_of(token_ids), len(token_ids)
        s = self._sequence if self._cache.sequence_ids else Sequence(0)
        window = -(-n // PAGE_SIZE) - self.store.first_window_page(n)
        held, turn = tuple(page.tier for page in s.pages[: s.settled]), max((span.turn for span in spans), default=0)
        signals = Signals(turn, tuple(s.weights.tolist()), held, window, *living(self.store, s), *holding(self.store, s, n))
        budget = self._allowance.budget(n, self._query_bytes + self._cache.sliding_bytes)
        try:
            plan, self._standing_floor = self.policy.plan(spans, n, signals, budget), 0
            return plan
        except BudgetTooSmallError as error:
            assert budget is not None
            # the window's fixed cost outweighs a short conversation
            self._standing_floor, self._floor = error.floor, max(self._floor, error.floor)
            return self.policy.plan(spans, n, signals, replace(budget, bits=None, bytes=max(error.floor, 1)))

    @property
    def _allowance(self) -> Allowance:
        return Allowance(self.store, self.budget_bits, self.budget_bytes, self.quality)

    def _end_turn(self, reused: int, seconds: float) -> TurnReport:
        token_ids, sequence = self.token_ids, self._sequence
        if self._evicts:
            self.store.set_plan(sequence.id, self._plan(token_ids))
        report = turn_report(
            self.store, sequence, self._spans_of(token_ids), turn=len(self.reports), reused_tokens=reused, seconds=seconds,
            bytes_queries=self._query_bytes, bytes_outside=self._cache.sliding_bytes,
            floor_bytes=max(self._floor, self._standing_floor),
            plan_seconds=self.plan_seconds,
        )  # fmt: skip
        self.reports.append(report)
        return report
