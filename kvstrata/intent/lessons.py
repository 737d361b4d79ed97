"""What a residual head learns from: at the end of each turn of a conversation, which tokens later turns would attend.

Two forward passes a conversation, at full precision and with nothing evicted; each layer is looked at once and forgotten. A label has two
halves: the largest attention that a later query pays a token, over queries of users, assistants, thoughts and calls, for what is read asks
for nothing; and the largest that it is paid while the conversation is told once more, which speaks of tokens that no later turn of this
conversation asked for, but another might (KVzip, Kim et al. 2025, ranks by that alone).
"""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Self

import numpy as np
import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

from kvstrata.adapters.capture import captured
from kvstrata.adapters.hf import cache_keyword
from kvstrata.adapters.hf_cache import inv_freq
from kvstrata.ops.residual import at_rest, features, log_score
from kvstrata.ops.rotary import moved
from kvstrata.ops.score import column_scores, linear_score, query_scores
from kvstrata.policy.tags import ROLES, tags_by_token
from kvstrata.policy.thinned import ASKS
from kvstrata.store.memory import QueryMemory, newest_ask, places
from kvstrata.types import PAGE_SIZE, Ask, Role, Span

ASKING = (Role.USER, Role.ASSISTANT, Role.REASONING, Role.TOOL_CALL)
"""Roles whose queries a label is taken from."""
BLOCK, BLOCK_GPU = 128, 1024
"""Queries looked at at once."""
MOST_CUTS = 6
"""Ends of turns of a conversation that lessons are taken at, evenly spread."""


@dataclass(frozen=True, eq=False)
class Lesson:
    """The end of one turn, `cut` tokens in, for m tokens, in all L layers: own [L, m, channels] and known [L, H, m, F] (ops/residual.py),
    keys [L, m, H, D], asks [L, A, H, D]; rule [L, H, m], the logarithm of the rule's score; label [L, H, m], sums to 2, or 1 where
    nothing is asked later; later [L, H, m], the attention that later turns paid."""

    cut: int
    own: Tensor
    known: Tensor
    keys: Tensor
    asks: Tensor
    rule: Tensor
    label: Tensor
    later: Tensor

    def to(self, device: torch.device) -> Self:
        return type(self)(self.cut, *(getattr(self, name).to(device) for name in TENSORS))


TENSORS = ("own", "known", "keys", "asks", "rule", "label", "later")
"""Of a lesson."""


def cuts_of(spans: Sequence[Span]) -> list[int]:
    """Where user turns end that have one before them, for the newest is not up for eviction, and one behind; MOST_CUTS at most."""
    starts: dict[int, int] = {}
    for span in spans:
        starts.setdefault(span.turn, span.start)
    ends = [start for turn, start in sorted(starts.items()) if turn > 2 and start > 2 * PAGE_SIZE]
    if len(ends) <= MOST_CUTS:
        return ends
    return [ends[round(i * (len(ends) - 1) / (MOST_CUTS - 1))] for i in range(MOST_CUTS)]


@torch.no_grad()
def lessons(
    model: PreTrainedModel, token_ids: Sequence[int], spans: Sequence[Span], *, tokens: int = 1024, decay: float = 0.1, seed: int = 0
) -> list[Lesson]:
    """One lesson for each turn of `cuts_of`.

    tokens: of each layer and turn, drawn by `seed`. Raises ValueError for a conversation of fewer than three turns.
    """
    cuts, n = cuts_of(spans), len(token_ids)
    if not cuts:
        raise ValueError(f"a conversation of {n} tokens has fewer than three user turns; nothing can be learned from it")
    half: list[tuple[int, Lesson, Tensor]] = []
    rotations = inv_freq(model)

    def see(layer: int, q: Tensor, k: Tensor, v: Tensor, scale: float) -> None:
        q, k, v = (x.transpose(0, 1).float() for x in (q, k, v))
        peaks = _by_segment(q, k, scale, cuts, _asking(spans, n))
        paid = _received(q, k, scale, cuts)
        for i, cut in enumerate(cuts):
            generator = torch.Generator().manual_seed(seed + 1000 * i + layer)
            half.append(_lesson(layer, q, k, v, scale, spans, cut, peaks[i:].amax(0), paid[i], rotations, tokens, decay, generator))

    cache, ids = DynamicCache(config=model.config), torch.tensor([list(token_ids)], device=model.device)
    with captured(model, see):
        model(ids, use_cache=True, logits_to_keep=1, **{cache_keyword(model): cache})
    again = retold(model, ids, cache)
    # each half counts as much as the other, whatever its sum
    whole = [replace(x, label=_share(x.later) + _share(again[layer][:, at].cpu())) for layer, x, at in half]
    return [Lesson(cut, *(torch.stack([getattr(x, name) for x in whole if x.cut == cut]) for name in TENSORS)) for cut in cuts]


def _share(x: Tensor) -> Tensor:
    return x / x.sum(-1, keepdim=True).clamp(min=1e-9)


@torch.no_grad()
def retold(model: PreTrainedModel, ids: Tensor, cache: DynamicCache, *, block: int = 1024) -> list[Tensor]:
    """The largest attention that each token of a conversation, ids [1, n], is paid while it is told again, `block` tokens at a time right
    behind its end: float32 [H, n] a layer. cache: of the conversation, left as it was. Nothing but the conversation's own tokens is used,
    so any model and template will do."""
    n, keyword = ids.shape[1], cache_keyword(model)
    peaks: dict[int, Tensor] = {}

    def see(layer: int, q: Tensor, k: Tensor, v: Tensor, scale: float) -> None:
        q, k = q.transpose(0, 1).float(), k.transpose(0, 1).float()
        paid = _peaks(q, k, scale, slice(0, len(q)), len(k) - len(q))[:, :n]
        peaks[layer] = torch.maximum(peaks[layer], paid) if layer in peaks else paid

    with captured(model, see):
        for start in range(0, n, block):
            model(ids[:, start : start + block], use_cache=True, logits_to_keep=1, **{keyword: cache})
            cache.crop(n - cache.get_seq_length())
    return [peaks[layer] for layer in sorted(peaks)]


def _asking(spans: Sequence[Span], n: int) -> Tensor:
    asking = torch.zeros(n, dtype=torch.bool)
    for span in spans:
        asking[span.start : span.end] = span.role in ASKING
    return asking


def _by_segment(q: Tensor, k: Tensor, scale: float, cuts: list[int], asking: Tensor) -> Tensor:
    """The largest attention that each key gets from a query that asks, of each segment that begins at a cut: float32 [cuts, H, n].
    q [n, Hq, D], k [n, H, D]."""
    segments = itertools.pairwise([*cuts, len(q)])
    return torch.stack([_peaks(q, k, scale, asking[first:last].nonzero()[:, 0].to(q.device) + first, 0) for first, last in segments])


def _peaks(q: Tensor, k: Tensor, scale: float, rows: Tensor | slice, before: int) -> Tensor:
    """The largest attention that each key is paid by one of the queries `rows`, query i of q standing at position before + i: [H, n]."""
    n, heads, _ = k.shape
    at, q = torch.arange(len(q), device=q.device)[rows] + before, q[rows].unflatten(1, (heads, -1)) * scale
    peaks, block = torch.zeros(heads, n, device=k.device), BLOCK if k.device.type == "cpu" else BLOCK_GPU
    for start in range(0, len(q), block):
        hidden = torch.arange(n, device=k.device)[None, :] > at[start : start + block, None]
        for head in range(heads):
            logits = (q[start : start + block, head] @ k[:, head].T).masked_fill_(hidden[:, None], -torch.inf)
            peaks[head] = torch.maximum(peaks[head], torch.softmax(logits, -1).amax((0, 1)))
    return peaks


def _received(q: Tensor, k: Tensor, scale: float, cuts: list[int]) -> list[Tensor]:
    """What each key before a cut has received of the attention of all queries before it, summed: float32 [H, cut] a cut."""
    total, out, block = torch.zeros(k.shape[1], cuts[-1], device=k.device), [], BLOCK if k.device.type == "cpu" else BLOCK_GPU
    for first, last in itertools.pairwise([0, *cuts]):
        for start in range(first, last, block):
            end = min(start + block, last)
            total[:, :end] += column_scores(q[start:end], k[:end], scale)
        out.append(total[:, :last].clone())
    return out


def _lesson(
    layer: int, q: Tensor, k: Tensor, v: Tensor, scale: float, spans: Sequence[Span], cut: int, paid: Tensor, received: Tensor,
    rotations: Tensor | None, tokens: int, decay: float, generator: torch.Generator,
) -> tuple[int, Lesson, Tensor]:  # fmt: skip
    """The layer, its part of a lesson without the dimension of layers, and which tokens it is of."""
    told = [Span(s.start, min(s.end, cut), s.role, s.turn, s.modality) for s in spans if s.start < cut]
    asks = [Ask(s.start, s.end, s.turn) for s in told if s.role in ASKS]
    remembered = [(p, ask.turn) for ask in asks for p in places(ask)]
    memory = QueryMemory().grown([p for p, _ in remembered], [t for _, t in remembered], q[[p for p, _ in remembered]][:, None], cut)
    queries, weights = memory.of(0), memory.weights(decay).to(k.device)
    if rotations is not None:
        queries = moved(queries, cut - torch.tensor(memory.positions, device=k.device), rotations.to(k.device))
    keys, there = k[:cut], torch.ones(cut, k.shape[1], dtype=torch.bool, device=k.device)
    rule = query_scores(queries, weights, keys, scale, there)
    tags = tags_by_token(told, cut)
    age, role = (torch.from_numpy(x.astype(np.int64)).to(k.device) for x in (tags.age, tags.role))
    known = features(rule, linear_score(queries, weights, keys, scale), keys, age, role, received)
    # instructions, sinks and the newest turn are not up for eviction
    movable = (tags.role != ROLES.index(Role.INST)) & (tags.age != 0)
    movable[:PAGE_SIZE] = False
    places_ = torch.from_numpy(np.flatnonzero(movable))
    chosen = places_[torch.randperm(len(places_), generator=generator)[:tokens].sort().values].to(k.device)
    own = at_rest(q[chosen], k[chosen], v[chosen], chosen, None if rotations is None else rotations.to(k.device))
    later = paid[:, :cut][:, chosen].float().cpu()
    asked = keys[torch.tensor(newest_ask(asks), device=k.device)]
    own, known, kept, asked, score = (x.half().cpu() for x in (own, known[:, chosen], keys[chosen], asked, log_score(rule)[:, chosen]))
    return layer, Lesson(cut, own, known, kept, asked, score, later, later), chosen
