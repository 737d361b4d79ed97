"""The first chunk of a conversation, run once for all settings: nothing is compressed before it, so they all compute the same.

    with replayed(model, prefill):
        session.feed(...)      # writes the recorded keys and values, and returns the recorded logits

Knows nothing of what settings do with the keys and values.
"""

import contextlib
import functools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel
from transformers.cache_utils import DynamicLayer
from transformers.modeling_outputs import CausalLMOutputWithPast

from kvstrata.adapters.hf import cache_keyword
from kvstrata.ops.score import NUM_QUERIES


@dataclass(frozen=True)
class Prefill:
    """keys, values: a layer each, [1, H, tokens, D], keys after RoPE. queries: a layer each, of the last tokens, [Hq, as many as were
    recorded, D], and scale, of q·k: what is kept is chosen by them. logits: float32 [1, kept, vocab] of the last positions."""

    token_ids: tuple[int, ...]
    keys: tuple[Tensor, ...]
    values: tuple[Tensor, ...]
    queries: tuple[Tensor, ...]
    scale: float
    logits: Tensor
    seconds: float


class Recorder:
    """Sees a forward pass's attention (adapters/capture.py) and keeps the newest queries, `count` of them."""

    def __init__(self, count: int = NUM_QUERIES) -> None:
        self.queries: dict[int, Tensor] = {}
        self.scale, self.count = 1.0, count

    def see(self, layer: int, q: Tensor, k: Tensor, v: Tensor, scale: float) -> None:
        self.queries[layer], self.scale = q[:, -self.count :].clone(), scale


def recorded(cache: DynamicCache, seen: Recorder, token_ids: list[int], logits: Tensor, seconds: float) -> Prefill | None:
    """What the first chunk left in transformers' own cache; None for models with sliding-window layers, which keep only a part."""
    n = len(token_ids)
    keys, values = [], []
    for layer in cache.layers:
        if not isinstance(layer, DynamicLayer) or layer.is_sliding or layer.keys is None or layer.values is None:
            return None
        keys.append(layer.keys[:, :, :n].clone())
        values.append(layer.values[:, :, :n].clone())
    queries = tuple(seen.queries[i] for i in range(len(keys)))
    return Prefill(tuple(token_ids), tuple(keys), tuple(values), queries, seen.scale, logits, seconds)


@contextlib.contextmanager
def replayed(model: PreTrainedModel, prefill: Prefill | None) -> Iterator[None]:
    """Let forward passes of an attached model over the recorded tokens skip the computation; None changes nothing."""
    if prefill is None:
        yield
        return
    keyword = cache_keyword(model)
    original = model.forward

    @functools.wraps(original)
    def forward(input_ids: Tensor, logits_to_keep: int = 0, **kwargs: Any) -> CausalLMOutputWithPast:
        if tuple(input_ids[0].tolist()) != prefill.token_ids or not 0 < logits_to_keep <= prefill.logits.shape[1]:
            return original(input_ids=input_ids, logits_to_keep=logits_to_keep, **kwargs)
        for i, (k, v, q) in enumerate(zip(prefill.keys, prefill.values, prefill.queries, strict=True)):
            # attention's output is not wanted; of the queries only those that choose what is kept
            older = q.new_zeros(q.shape[0], k.shape[2] - q.shape[1], q.shape[2])
            kwargs[keyword].write(i, torch.cat([older, q], 1)[None], k, v, prefill.scale)
        return CausalLMOutputWithPast(logits=prefill.logits[:, -logits_to_keep:])

    model.forward = forward
    try:
        yield
    finally:
        del model.forward
