"""The store: sequences of pages in one arena, shared by prefix. Knows nothing of models, tags or policies."""

import dataclasses
import itertools
import weakref

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kvstrata.config import StoreConfig
from kvstrata.ops import dense
from kvstrata.ops.read import read_pages
from kvstrata.store.anchors import eligible
from kvstrata.store.arena import Arena, OutOfFramesError
from kvstrata.store.contents import Overlay
from kvstrata.store.gathered import keep
from kvstrata.store.integrity import check_integrity
from kvstrata.store.layout import Layout
from kvstrata.store.page import Page, Sequence
from kvstrata.store.prefix import PrefixIndex, page_key
from kvstrata.store.pressure import Lender, make_room, relieve
from kvstrata.store.queries import NONE, Queries
from kvstrata.store.signals import check_head, remember, scored, wants_newest
from kvstrata.store.step import Step
from kvstrata.store.tables import TableBuilder, alone
from kvstrata.store.thin import is_due, staged, thin, thinnable
from kvstrata.types import PAGE_SIZE, Plan, Thinning, Tier


class Store:
    """Sequences, by id. At most one step is open at a time; a step that fails leaves everything as it was.

    Every method that names a sequence raises ValueError for an unknown one; every method that needs frames raises OutOfFramesError
    where the arena, without what only the prefix index holds, cannot give them.
    """

    def __init__(self, config: StoreConfig, device: torch.device | str = "cpu") -> None:
        self.config = config
        self.layout = Layout.of(config)
        self.dense_dtype: torch.dtype = getattr(torch, config.dense_dtype)
        self.arena = Arena(self.layout, config.num_frames, torch.device(device))
        self.tables = TableBuilder(torch.device(device))
        self.prefix = PrefixIndex(self.arena)
        self.queries = Queries(config.num_layers, self.dense_dtype, torch.device(device))
        # rotations of the model's RoPE, float [R / 2] (ops/rotary.py); None: unknown, and remembered queries stay where they were asked
        self.inv_freq: Tensor | None = None
        self._sequences: dict[int, Sequence] = {}
        self._ids = itertools.count(1)
        self._epochs = itertools.count(1)
        self._step: Step | None = None
        self._lenders: weakref.WeakValueDictionary[int, Lender] = weakref.WeakValueDictionary()

    # sequences

    def add_sequence(self, plan: Plan | None = None) -> int:
        """A new, empty sequence; its id. Without a plan, the codec's tier nearest to INT4 for all pages.

        Raises ValueError for a tier that the codec lacks.
        """
        plan = plan or Plan((), self.layout.default_tier)
        self.check_plan(plan)
        s = Sequence(next(self._ids), plan=plan)
        self._sequences[s.id] = s
        return s.id

    def check_plan(self, plan: Plan) -> None:
        """Raises ValueError for a tier that the codec lacks, and for a residual head that is none or is another model's."""
        chosen = [x.tier for x in (plan.anchors, plan.thinning, plan.weighing) if x is not None]
        for tier in {*plan.tiers, plan.default, *chosen}:
            self.layout.check_tier(tier)
        if plan.thinning is not None and plan.thinning.residual is not None:
            check_head(self, plan.thinning.residual)

    def _check_idle(self, sequence_id: int, what: str) -> Sequence:
        s = self.sequence(sequence_id)
        if self._step is not None and s in self._step.sequences:
            raise ValueError(f"cannot {what} sequence {sequence_id} while a step that appends to it is open; commit or abort it first")
        return s

    def sequence(self, sequence_id: int) -> Sequence:
        if sequence_id not in self._sequences:
            raise ValueError(f"unknown sequence {sequence_id}; known: {', '.join(map(str, self._sequences)) or 'none'}")
        return self._sequences[sequence_id]

    @property
    def sequences(self) -> list[Sequence]:
        return list(self._sequences.values())

    def fork(self, sequence_id: int) -> int:
        """A copy that shares every frame; whoever appends to a shared page copies it first."""
        s = self.sequence(sequence_id)
        twin = dataclasses.replace(
            s, id=next(self._ids), token_ids=list(s.token_ids), pages=list(s.pages), keys=list(s.keys), anchors=list(s.anchors),
            survivors=list(s.survivors),
            # an open step writes into the ring
            ring=NONE if self._step is not None and s in self._step.sequences else self.queries.share(s.ring),
        )  # fmt: skip
        for frames in s.held:
            self.arena.retain(frames)
        self._sequences[twin.id] = twin
        return twin.id

    def release(self, sequence_id: int) -> int:
        """End a sequence. Its settled pages stay in the prefix index until their frames are wanted; returns how many frames became free."""
        s = self._check_idle(sequence_id, "release")
        del self._sequences[sequence_id]
        self.tables.forget(sequence_id)
        self.queries.drop(s.ring)
        return sum(map(self.arena.release, s.held))

    def match_prefix(self, sequence_id: int, token_ids: list[int], min_tier: Tier = Tier.EVICTED) -> int:
        """Give an empty sequence the stored pages of the longest known prefix of `token_ids`; how many tokens that is.

        min_tier: a page with fewer planes ends the match. By default none does: how many planes are left is not part of a page's
        identity, so a sequence may take over what a neighbour with a coarser plan has stored.

        Pages that would still be in the recent window after `token_ids` are not taken: they are computed anew, so that what later
        queries see does not depend on who came before.
        """
        s = self.sequence(sequence_id)
        if s.num_tokens:
            raise ValueError(f"sequence {sequence_id} has {s.num_tokens} tokens; only an empty one can take a prefix")
        last = max(0, min((len(token_ids) - 1) // PAGE_SIZE, self.first_window_page(len(token_ids))))
        keys: list[bytes] = []
        for p in range(last):
            page_ids = token_ids[p * PAGE_SIZE : (p + 1) * PAGE_SIZE]
            keys.append(page_key(keys[-1] if keys else b"", page_ids, self.codec_name))
        found = self.prefix.match(keys, min_tier)
        for page in found:
            self.arena.retain(page.frames)
        s.pages, s.keys, s.settled = list(found), keys[: len(found)], len(found)
        s.token_ids = token_ids[: len(found) * PAGE_SIZE]
        s.version += 1
        self._adopt_anchors(s)
        return s.num_tokens

    def _adopt_anchors(self, s: Sequence) -> None:
        """Take over the anchors of a sequence whose pages s has taken: they hold what the planes have lost. s chooses its own later."""
        donors = [d for d in self._sequences.values() if d.anchors and d.settled >= s.settled and d.pages[: s.settled] == s.pages]
        if s.plan.anchors is None or not s.settled or not donors:
            return
        s.anchors = list(donors[-1].anchors)
        for page in s.anchors:
            self.arena.retain(page.frames)
        self._keep_anchors(s)

    @property
    def codec_name(self) -> str:
        return f"{self.layout.codec.name}/{self.config.dense_dtype}/{self.config.window}"

    def first_window_page(self, num_tokens: int) -> int:
        """First page of the recent window after `num_tokens` tokens: the current aligned group of `window` tokens and the one before
        it; the unfinished page alone where the window is 0."""
        window = self.config.window
        return max(0, num_tokens // window - 1) * window // PAGE_SIZE if window else num_tokens // PAGE_SIZE

    @property
    def widest_window_pages(self) -> int:
        """Pages of the recent window just before a group settles, the unfinished one included."""
        return 2 * self.config.window // PAGE_SIZE or 1

    # a forward pass

    def begin(self, sequence_ids: list[int], token_ids: list[list[int]], *, shareable: bool = True) -> Step:
        """Reserve what a forward pass over `token_ids[i]`, appended to sequence `sequence_ids[i]`, will write.

        shareable: whether token ids identify the tokens (False for embeddings): other sequences may reuse the pages then.
        Raises ValueError for a sequence named twice or an open step, OutOfFramesError before anything is written.
        """
        if self._step is not None:
            raise ValueError("a step is open; commit or abort it first")
        if len(set(sequence_ids)) != len(sequence_ids):
            raise ValueError(f"sequence ids {sequence_ids} name a sequence twice")
        if len(sequence_ids) != len(token_ids) or not sequence_ids:
            raise ValueError(f"{len(sequence_ids)} sequence ids and {len(token_ids)} lists of token ids; both must be the same, above 0")
        sequences = [self.sequence(i) for i in sequence_ids]
        for s in sequences:
            s.shareable &= shareable
        while True:
            try:
                self._step = Step(self, sequences, token_ids)
                return self._step
            except OutOfFramesError as error:
                if not relieve(self, error.asked - error.free):
                    raise

    def step_ended(self, step: Step) -> None:
        """Called by the step itself."""
        self._step = None

    def allocate(self, n: int) -> list[int]:
        """Frames for a sequence, at the cost of pages that only the prefix index holds. Raises OutOfFramesError, naming the holders."""
        short = n - self.arena.free
        if short > 0:
            self.prefix.evict(short)
        if n > self.arena.free:
            raise OutOfFramesError(n, self.arena.free, self.holders())
        return self.arena.allocate(n)

    def publish(self, s: Sequence, first: int) -> None:
        """Offer pages that have settled since page `first` to other sequences; called at the end of a step."""
        for p in range(first, s.settled):
            page = s.pages[p]
            if page.live != (1 << PAGE_SIZE) - 1:
                self.new_epoch(s)
            if len(s.keys) != p:
                continue
            ids = s.token_ids[p * PAGE_SIZE : (p + 1) * PAGE_SIZE]
            s.keys.append(page_key(s.keys[-1] if s.keys else b"", ids, self.codec_name, s.salt))
            if s.shareable and not s.salt:
                self.prefix.insert(s.keys[-1], page)

    def new_epoch(self, s: Sequence) -> None:
        """What s computes from now on saw a pruned context: its keys must match nobody else's."""
        s.salt = f"{s.id}:{next(self._epochs)}".encode()

    def read_pages(self, arena: Tensor, frames: Tensor, tier: Tier) -> tuple[Tensor, Tensor]:
        """Pages of one layer in floating point: frames int32 [P, n] -> k, v [P, 32, H, D], v as stored."""
        if tier is Tier.BF16 or self.layout.codec.name == "planes":
            return read_pages(arena, frames, tier, self.config.head_dim, self.dense_dtype)
        return self.layout.decode(arena[frames.long()], tier, self.config.head_dim)

    # precision and residency

    def set_plan(self, sequence_id: int, plan: Plan) -> int:
        """Give a sequence a new plan: settled pages are demoted, evicted or thinned where it says so, and never gain what they lost; pages
        that settle later follow it. Returns how many frames became free. Raises ValueError for a tier that the codec lacks."""
        s = self._check_idle(sequence_id, "replan")
        self.check_plan(plan)
        # what is attended of the same pages depends on it
        s.version += alone(plan) != alone(s.plan)
        s.plan = plan
        if plan.thinning is not None:
            remember(self, s, plan.thinning)
        self.forget_queries(s)
        before = self.arena.free
        waiting = staged(s, plan)
        for p in range(s.settled):
            page = s.pages[p]
            live = page.live & ~plan.dead.get(p, 0)
            tier = min(page.tier if p in waiting else plan.tier(p), page.tier) if live else Tier.EVICTED
            if tier == page.tier and live == page.live:
                continue
            s.replace_page(p, self._demote(page, tier, live))
            s.version += 1
            if s.pages[p].live != page.live:
                self.new_epoch(s)
        if plan.thinning is not None:
            self._thin(s, plan.thinning)
        self._keep_anchors(s)
        return self.arena.free - before

    def _thin(self, s: Sequence, thinning: Thinning) -> None:
        if not is_due(s, thinning):
            for p in thinnable(s, thinning):
                # what may be thinned takes no more than what is left of it would
                if s.pages[p].tier > thinning.tier:
                    s.pages[p] = self._demote(s.pages[p], thinning.tier, s.pages[p].live)
                    s.version += 1
            return
        s.thinned += thin(self, s, thinning, lambda layer, k, v, there: scored(self, s, thinning, layer, k, there))
        self.new_epoch(s)

    def _keep_anchors(self, s: Sequence) -> None:
        """Let go of anchors beyond the plan's, and of those whose token does not live in a quantized page any more."""
        if not s.anchors:
            return
        wanted = 0 if s.plan.anchors is None else -(-s.plan.anchors.count // PAGE_SIZE)
        live = eligible(s.pages[: s.settled])
        kept = [keep(page, live) for page in s.anchors[:wanted]]
        if sum(page.tokens for page in kept) == sum(page.tokens for page in s.anchors):
            return
        gone = s.anchors[wanted:] + [page for page in kept if not page.tokens]
        s.anchors = [page for page in kept if page.tokens]
        for page in gone:
            self.arena.release(page.frames)
        s.version += 1

    def forget_queries(self, s: Sequence) -> None:
        """Let go of queries that will choose nothing any more."""
        chooses = s.plan.anchors is not None and not (s.anchors and not s.plan.anchors.refresh)
        if not chooses and not wants_newest(s.plan):
            self.queries.drop(s.ring)
            s.ring = NONE

    def _demote(self, page: Page, tier: Tier, live: int) -> Page:
        if tier is Tier.EVICTED:
            self.arena.release(page.frames)
            return Page(Tier.EVICTED, (), 0)
        n = self.layout.frames(tier)
        if tier == page.tier or (page.tier.k_planes and self.layout.codec.name == "planes"):
            # a coarser page is a prefix of its frames: nothing is read, moved or requantized
            self.arena.release(page.frames[n:])
            return Page(tier, page.frames[:n], live)
        content = [self.read_pages(arena, self._frames_tensor(page), page.tier) for arena in self.arena.buffer]
        if self.arena.shared(page.frames):
            frames = self.allocate(n)
            self.arena.release(page.frames)
        else:
            # the page's own frames pay for its coarser self: demotion works in a full arena
            self.arena.release(page.frames)
            frames = self.arena.allocate(n)
        self._put(frames, content, tier)
        return Page(tier, tuple(frames), live)

    def _frames_tensor(self, page: Page) -> Tensor:
        return torch.tensor([page.frames], dtype=torch.int32, device=self.arena.buffer.device)

    def _put(self, frames: list[int], content: list[tuple[Tensor, Tensor]], tier: Tier) -> None:
        """Write one page, its K and V of each layer [1, 32, H, D] as stored, into `frames`."""
        for arena, (k, v) in zip(self.arena.buffer, content, strict=True):
            if tier is Tier.BF16:
                arena[frames] = dense.to_frames(k.to(self.dense_dtype), v.to(self.dense_dtype), arena.shape[-1])[0]
            else:
                arena[frames] = self.layout.encode(k, v, tier)[0]

    def crop(self, sequence_id: int, num_tokens: int) -> None:
        """Forget all but the first `num_tokens` tokens. A quantized page that is cut goes on as a BF16 page of the values it had."""
        s = self._check_idle(sequence_id, "crop")
        if not 0 <= num_tokens <= s.num_tokens:
            raise ValueError(f"cannot crop sequence {sequence_id} of {s.num_tokens} tokens to {num_tokens}; accepted: 0 to {s.num_tokens}")
        whole, rest = divmod(num_tokens, PAGE_SIZE)
        tail: list[Page] = []
        if rest and num_tokens < s.num_tokens and s.pages[whole].tier is not Tier.BF16:
            # before the page is looked at: it may be one of those that give way
            make_room(self, self.layout.frames(Tier.BF16))
        if rest and num_tokens < s.num_tokens:
            page = s.pages[whole]
            live = page.live & ((1 << rest) - 1)
            if page.tier is Tier.BF16:
                tail = [Page(Tier.BF16, page.frames, live)]
                self.arena.retain(page.frames)
            else:
                frames = self.allocate(self.layout.frames(Tier.BF16))
                # an evicted page goes on empty: zeros, for what frames held before must not be read, not even masked
                self.arena.buffer[:, frames] = 0
                if page.frames:
                    content = [self.read_pages(arena, self._frames_tensor(page), page.tier) for arena in self.arena.buffer]
                    if s.anchors:
                        anchors = Overlay(self, s.anchors, whole * PAGE_SIZE, PAGE_SIZE)
                        content = [anchors.over(i, self.arena.buffer[i], *page) for i, page in enumerate(content)]
                    self._put(frames, content, Tier.BF16)
                tail = [Page(Tier.BF16, tuple(frames), live)]
        elif rest:
            return
        for page in s.pages[whole:]:
            self.arena.release(page.frames)
        s.pages[whole:] = tail
        s.token_ids = s.token_ids[:num_tokens]
        s.settled, s.keys, s.version = min(s.settled, whole), s.keys[:whole], s.version + 1
        s.queries_from, s.chosen_at, s.weighed_at = (min(x, num_tokens) for x in (s.queries_from, s.chosen_at, s.weighed_at))
        s.weights = s.weights[:whole]
        s.memory = s.memory.cropped(num_tokens)
        s.received, s.worth = (None if x is None else x[..., :num_tokens] for x in (s.received, s.worth))
        self.keep_survivors(s, np.ones(num_tokens, np.bool_))
        self._keep_anchors(s)

    def keep_survivors(self, s: Sequence, kept_tokens: NDArray[np.bool_]) -> None:
        """Let go of survivors at positions that `kept_tokens` [positions] does not name."""
        kept = [keep(page, kept_tokens) for page in s.survivors]
        for frames in [page.frames for page in kept if not page.tokens]:
            self.arena.release(frames)
        s.survivors = [page for page in kept if page.tokens]

    def add_lender(self, lender: Lender) -> None:
        """From now on, and for as long as it lives, the sequence of `lender` gives way when the arena has no room for a step."""
        self._lenders[next(self._ids)] = lender

    def lenders(self) -> list[Lender]:
        """In the order in which they were added."""
        return [lender for _, lender in sorted(self._lenders.items())]

    # books

    @property
    def frames_in_use(self) -> int:
        """Frames that sequences hold, shared ones once; what only the prefix index holds can be had back at any time."""
        return self.arena.in_use - self.prefix.reclaimable()

    @property
    def bytes_in_use(self) -> int:
        return self.frames_in_use * self.layout.frame_bytes

    def bits_per_element(self) -> float:
        """Real bits per K and V element, over the tokens of all sequences."""
        return self.layout.bits_per_element(self.frames_in_use, sum(s.num_tokens for s in self.sequences))

    def holders(self) -> dict[str, int]:
        """Frames held, by sequence and by the prefix index alone, largest first. A frame that several share counts for each."""
        held = {f"sequence {s.id} ({s.num_tokens} tokens)": s.frames for s in self.sequences}
        held["prefix index"] = self.prefix.reclaimable()
        return {name: n for name, n in sorted(held.items(), key=lambda item: -item[1]) if n}

    def check_integrity(self) -> None:
        """Raises AssertionError where frames, references, pages and sequences disagree."""
        check_integrity(self, [] if self._step is None else self._step.reserved, [] if self._step is None else self._step.rings)
