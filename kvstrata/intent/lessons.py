"""What a residual head learns from: at the end of each turn of a conversation, which tokens later turns would attend.

One forward pass a conversation, at full precision and with nothing evicted; each layer is looked at once and forgotten. Labels are the
largest attention that a later query pays a token, over queries of users, assistants, thoughts and calls: what is read asks for nothing.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from kvstrata.adapters.capture import captured
from kvstrata.adapters.hf_cache import inv_freq
from kvstrata.ops.residual import features, log_score
from kvstrata.ops.rotary import moved
from kvstrata.ops.score import linear_score, query_scores
from kvstrata.policy.tags import ROLES, tags_by_token
from kvstrata.policy.thinned import ASKS
from kvstrata.store.memory import QueryMemory, newest_ask, places
from kvstrata.types import PAGE_SIZE, Ask, Role, Span

ASKING = (Role.USER, Role.ASSISTANT, Role.REASONING, Role.TOOL_CALL)
"""Roles whose queries a label is taken from."""
BLOCK = 128
"""Queries looked at at once."""
MOST_CUTS = 6
"""Ends of turns of a conversation that lessons are taken at, evenly spread."""


@dataclass(frozen=True, eq=False)
class Lesson:
    """One layer at the end of one turn, for m tokens: known [H, m, F] (ops/residual.py), keys [m, H, D], asks [A, H, D]; rule [H, m], the
    logarithm of the rule's score; label [H, m], the attention that was paid later."""

    layer: int
    known: Tensor
    keys: Tensor
    asks: Tensor
    rule: Tensor
    label: Tensor


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
    model: PreTrainedModel, token_ids: Sequence[int], spans: Sequence[Span], *, tokens: int = 384, decay: float = 0.1, seed: int = 0
) -> list[Lesson]:
    """tokens: of each layer and turn, drawn by `seed`. Raises ValueError for a conversation of fewer than three turns."""
    cuts, n = cuts_of(spans), len(token_ids)
    if not cuts:
        raise ValueError(f"a conversation of {n} tokens has fewer than three user turns; nothing can be learned from it")
    out: list[Lesson] = []
    rotations = inv_freq(model)

    def see(layer: int, q: Tensor, k: Tensor, v: Tensor, scale: float) -> None:
        q, k = q.transpose(0, 1).float(), k.transpose(0, 1).float()
        sums, peaks = _by_segment(q, k, scale, cuts, _asking(spans, n))
        for i, cut in enumerate(cuts):
            generator = torch.Generator().manual_seed(seed + 1000 * i + layer)
            got = sums[: i + 1].sum(0), peaks[i + 1 :].amax(0)
            out.append(_lesson(layer, q, k, scale, spans, cut, *got, rotations, tokens, decay, generator))

    with captured(model, see):
        model(torch.tensor([list(token_ids)], device=model.device), use_cache=False, logits_to_keep=1)
    return out


def _asking(spans: Sequence[Span], n: int) -> Tensor:
    asking = torch.zeros(n, dtype=torch.bool)
    for span in spans:
        asking[span.start : span.end] = span.role in ASKING
    return asking


def _by_segment(q: Tensor, k: Tensor, scale: float, cuts: list[int], asking: Tensor) -> tuple[Tensor, Tensor]:
    """Attention that each key gets from the queries of each segment between cuts, float32 [segments, H, n]: the sum over all of them, and
    the largest of one that asks. q [n, Hq, D], k [n, H, D]."""
    n, heads, _ = k.shape
    ends = [*cuts, n]
    sums, peaks = (torch.zeros(len(ends), heads, n, device=k.device) for _ in range(2))
    for segment, (first, last) in enumerate(zip([0, *cuts], ends, strict=True)):
        for start in range(first, last, BLOCK):
            end = min(start + BLOCK, last)
            hidden = torch.arange(end, device=k.device)[None, :] > torch.arange(start, end, device=k.device)[:, None]
            grouped = q[start:end].unflatten(1, (heads, -1)) * scale
            for head in range(heads):
                logits = (grouped[:, head] @ k[:end, head].T).masked_fill_(hidden[:, None], -torch.inf)
                paid = torch.softmax(logits, -1)
                sums[segment, head, :end] += paid.sum((0, 1))
                loud = paid[asking[start:end].to(paid.device)]
                if len(loud):
                    peaks[segment, head, :end] = torch.maximum(peaks[segment, head, :end], loud.amax((0, 1)))
    return sums, peaks


def _lesson(
    layer: int, q: Tensor, k: Tensor, scale: float, spans: Sequence[Span], cut: int, received: Tensor, paid: Tensor,
    rotations: Tensor | None, tokens: int, decay: float, generator: torch.Generator,
) -> Lesson:  # fmt: skip
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
    known = features(rule, linear_score(queries, weights, keys, scale), received[:, :cut], keys, age, role)
    # instructions, sinks and the newest turn are not up for eviction
    movable = (tags.role != ROLES.index(Role.INST)) & (tags.age != 0)
    movable[:PAGE_SIZE] = False
    places_ = torch.from_numpy(np.flatnonzero(movable))
    chosen = places_[torch.randperm(len(places_), generator=generator)[:tokens].sort().values].to(k.device)
    asked = torch.tensor(newest_ask(asks), device=k.device)
    tensors = (known[:, chosen], keys[chosen], keys[asked], log_score(rule)[:, chosen], paid[:, :cut][:, chosen])
    return Lesson(layer, *(x.half().cpu() if x is not tensors[-1] else x.float().cpu() for x in tensors))
