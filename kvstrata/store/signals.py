"""What is watched during steps so that a sequence can be thinned between them, and the scores that come of it.

Knows nothing of how much goes or where survivors are put (store/thin.py).
"""

from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn.functional import avg_pool1d, pad

from kvstrata.ops.residual import ResidualHead, at_rest, features, load_head, log_score
from kvstrata.ops.rotary import moved
from kvstrata.ops.score import NUM_QUERIES, column_scores, linear_score, query_scores
from kvstrata.store.contents import Contents
from kvstrata.store.memory import newest_ask, places
from kvstrata.store.page import Sequence
from kvstrata.types import Age, Plan, Thinning

if TYPE_CHECKING:
    from kvstrata.store.store import Store

BLOCK = 256
"""Queries whose attention is looked at at once."""
POOL = 7
"""Neighbours that share the newest queries' attention (SnapKV, Li et al. 2024, which pools over 7 or 13)."""


def wants_newest(plan: Plan) -> bool:
    """Whether the newest queries have to be kept (store/queries.py): they weigh pages for the next plan, choose who survives a thinning,
    or are remembered once known as asks."""
    return plan.weighing is not None or (plan.thinning is not None and (plan.thinning.score == "newest" or plan.thinning.remembers))


class Watch:
    """One sequence's thinning signals in one step of rows [start, stop) of the chunk. What it saw becomes the sequence's at `commit`."""

    def __init__(self, store: "Store", s: Sequence, thinning: Thinning, rows: slice) -> None:
        self._store, self._s, self._thinning, self._rows = store, s, thinning, rows
        self._before, self._after = s.num_tokens, s.num_tokens + rows.stop - rows.start
        self._asked: list[tuple[int, int]] = []
        # a token that was just generated is not known to be an ask yet: its query waits among the newest
        if thinning.remembers and rows.stop - rows.start > 1:
            self._asked = asked(thinning, max(self._before, s.memory.until), self._after)
        self._queries: dict[int, Tensor] = {}
        self._received: dict[int, Tensor] = {}
        self._worth: dict[int, Tensor] = {}
        self._head = None if thinning.residual is None else check_head(store, thinning.residual)
        # for a head a generated token alone is not worth reading everything that is stored
        counts = self._head is not None and self._head.config.received and rows.stop - rows.start > 1
        self._contents = Contents(store, s, self._after) if counts or thinning.score == "received" else None

    def write(self, layer: int, arena: Tensor, k: Tensor, v: Tensor, q: Tensor, scale: float) -> None:
        """k, v [N, H, D] and q [N, Hq, D] of the step's chunk."""
        if self._asked:
            at = torch.tensor([self._rows.start + p - self._before for p, _ in self._asked], device=q.device)
            self._queries[layer] = q[at].detach().to(self._store.dense_dtype)
        if self._head is not None:
            # only now are a token's query and unrounded key and value at hand
            if q.shape[1] != self._head.config.num_heads:
                raise ValueError(f"{self._thinning.residual} is for {self._head.config.num_heads} query heads; the model has {q.shape[1]}")
            rows, positions = self._rows, torch.arange(self._before, self._after, device=q.device)
            own = at_rest(q[rows], k[rows], v[rows], positions, self._inv_freq(q.device))
            self._worth[layer] = self._head.to(q.device).worth(layer, own)
        if self._contents is not None:
            keys, _, _, there = self._contents.read(layer, arena)
            keys[self._before :], there[self._before :] = k[self._rows], True
            self._received[layer] = self._attention(keys, there, q[self._rows].to(keys.dtype), scale)

    def _inv_freq(self, device: torch.device) -> Tensor | None:
        return None if self._store.inv_freq is None else self._store.inv_freq.to(device)

    def _attention(self, keys: Tensor, there: Tensor, q: Tensor, scale: float) -> Tensor:
        total = keys.new_zeros(keys.shape[1], self._after, dtype=torch.float32)
        for start in range(0, len(q), BLOCK):
            end = min(start + BLOCK, len(q))
            seen = self._before + end
            total[:, :seen] += column_scores(q[start:end], keys[:seen], scale, "mass", there[:seen])
        return total

    def commit(self) -> None:
        s, layers = self._s, range(self._store.config.num_layers)
        if self._contents is not None:
            new = torch.stack([self._received[layer] for layer in layers])
            old = s.received if s.received is not None else new.new_zeros(*new.shape[:2], 0)
            s.received = new + pad(old[..., : self._before], (0, self._after - min(old.shape[-1], self._before)))
        if self._head is not None:
            most = torch.finfo(torch.float16).max
            told = torch.stack([self._worth[layer] for layer in layers]).clamp(-most, most).half()
            known = s.worth is not None and s.told_by == self._head.digest
            before = s.worth[..., : self._before] if s.worth is not None and known else told.new_zeros(*told.shape[:2], 0)
            # of what another session computed nothing is known
            s.worth = torch.cat([pad(before, (0, self._before - before.shape[-1]), value=torch.nan), told], -1)
            s.told_by = self._head.digest
        if self._rows.stop - self._rows.start > 1 and self._thinning.remembers:
            queries = torch.stack([self._queries[layer] for layer in layers], 1) if self._asked else None
            s.memory = s.memory.grown([p for p, _ in self._asked], [t for _, t in self._asked], queries, self._after)


def asked(thinning: Thinning, start: int, end: int) -> list[tuple[int, int]]:
    """(position, turn) of what is remembered of positions [start, end)."""
    return [(p, ask.turn) for ask in thinning.asks if ask.start < end and ask.end > start for p in places(ask) if start <= p < end]


def remember(store: "Store", s: Sequence, thinning: Thinning) -> None:
    """Remember asks among the tokens that were generated since; their queries are among the newest."""
    start = max(s.memory.until, s.queries_from)
    if not thinning.remembers or start >= s.num_tokens or not store.queries.holds(s.ring):
        return
    new = asked(thinning, start, s.num_tokens)
    queries = None
    if new:
        at = torch.tensor([p - start for p, _ in new])
        newest = [store.queries.read(layer, s.ring, start, s.num_tokens) for layer in range(store.config.num_layers)]
        queries = torch.stack([q[at.to(q.device)] for q in newest], 1)
    s.memory = s.memory.grown([p for p, _ in new], [t for _, t in new], queries, s.num_tokens)


def scored(store: "Store", s: Sequence, thinning: Thinning, layer: int, keys: Tensor, there: Tensor) -> Tensor:
    """The rule's score of each token: keys [n, H, D] and which are there, bool [n, H] -> float32 [H, n]."""
    n, heads, _ = keys.shape
    positions = torch.arange(n, dtype=torch.float32, device=keys.device)
    if thinning.score == "random":
        # multiples of an irrational number, shifted by layer and head: the same token has another fate in each
        shift = torch.arange(heads, device=keys.device)[:, None] * 0.414 + layer * 0.732
        return torch.frac(positions.double() * 0.6180339887498949 * 7919 + shift).float()
    if thinning.score == "received" and s.received is not None:
        return pad(s.received[layer], (0, n - s.received.shape[-1]))
    if thinning.score == "newest" and store.queries.holds(s.ring) and s.queries_from < s.num_tokens:
        newest = store.queries.read(layer, s.ring, max(s.queries_from, s.num_tokens - NUM_QUERIES), s.num_tokens)
        return avg_pool1d(column_scores(newest, keys, s.scale, "mass", there), POOL, 1, POOL // 2)
    if thinning.score == "intent" and s.memory.positions:
        return by_intent(store, s, thinning, layer, keys, there)
    # what is newest is the best guess where nothing else is known
    return positions.expand(heads, n)


def by_intent(store: "Store", s: Sequence, thinning: Thinning, layer: int, keys: Tensor, there: Tensor) -> Tensor:
    """As scored, by what is remembered of the session's asks, of which there is some."""
    q, weights = s.memory.of(layer), s.memory.weights(thinning.decay).to(keys.device)
    if thinning.rope == "moved" and store.inv_freq is not None:
        by = s.num_tokens - torch.tensor(s.memory.positions, device=q.device)
        q = moved(q, by, store.inv_freq.to(q.device))
    rule = query_scores(q, weights, keys, s.scale, there, thinning.pool)
    asked = [p for p in newest_ask(thinning.asks) if p < len(keys)]
    if thinning.residual is None or not asked:
        return rule
    head, n = load_head(thinning.residual), len(keys)
    codes = torch.zeros(n, dtype=torch.int64)
    told = torch.frombuffer(bytearray(thinning.tags), dtype=torch.uint8)[:n].long() if thinning.tags else codes[:0]
    codes[: len(told)] = told
    codes = codes.to(keys.device)
    received = None
    if head.config.received:
        told = rule.new_zeros(len(rule), 0) if s.received is None else s.received[layer].to(keys.device)
        received = pad(told, (0, n - told.shape[-1]))
    known = features(rule, linear_score(q, weights, keys, s.scale), keys, codes % len(Age), codes // len(Age), received)
    # numbers of 0 and more, as the rule's are, in the order of log rule + correction; the best has 1, for the largest would overflow
    asks = keys[torch.tensor(asked, device=keys.device)]
    final = log_score(rule) + head.to(keys.device)(layer, known, _worth(s, head, layer, rule), keys, asks)
    return torch.exp(final - final.masked_fill(~there.T, -torch.inf).amax(-1, keepdim=True).nan_to_num(0.0, neginf=0.0)).clamp(max=1.0)


def _worth(s: Sequence, head: ResidualHead, layer: int, like: Tensor) -> Tensor:
    """float32 [H, n]: what was told of tokens when they were stored; of others, the mean."""
    if s.worth is None or s.told_by != head.digest:
        return torch.zeros_like(like)
    told = s.worth[layer].to(like.device).float()
    told = pad(told, (0, like.shape[-1] - told.shape[-1]), value=torch.nan)
    return torch.where(told.isnan(), told.nanmean(-1, keepdim=True).nan_to_num(0.0), told)


def check_head(store: "Store", path: str) -> ResidualHead:
    """The residual head of a file. Raises ValueError unless it is one for the store's model."""
    head, c = load_head(path), store.config
    has = head.config
    wanted = (c.num_layers, c.num_kv_heads, c.head_dim)
    if (has.num_layers, has.num_kv_heads, has.head_dim) != wanted:
        raise ValueError(
            f"{path} is for {has.num_layers} layers, {has.num_kv_heads} KV heads, head_dim {has.head_dim}; the model has {wanted}"
        )
    return head
