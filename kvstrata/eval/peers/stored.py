"""Peers that store every token, coarser: the first and the newest tokens stay as they are where asked for, the rest goes to the peer.

Protocol "oneshot": the prefix is stored once, read back by the peer's own code, and the rest runs dense on what came back. "turns": the
model runs on the peer's cache itself. Knows nothing of how a peer quantizes.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

from kvstrata.adapters.hf import cache_keyword
from kvstrata.eval.peers.held import held_bytes
from kvstrata.eval.peers.session import dense_prefill
from kvstrata.eval.replay import Prefill


class Quantizer(Protocol):
    """Keys and values [1, H, T, D] of each layer, stored coarser."""

    def store(self, layer: int, keys: Tensor, values: Tensor) -> None: ...
    def read(self, layer: int) -> tuple[Tensor, Tensor]: ...

    def held(self) -> Iterable[Any]:
        """All that is kept of keys and values: codes, metadata, what stays dense."""
        ...


class CacheQuantizer:
    """A cache class of transformers' contract: `update` stores, and returns what is stored. parts: a layer's attributes that hold it.

    device: where it stores; None: where the model runs. flat: as matrices, K of a row a channel of a head, V of a row a token of a head:
    for a cache that groups along rows.
    """

    def __init__(self, cache: Any, parts: Callable[[Any], Iterable[Any]], device: str | None = None, flat: bool = False) -> None:
        self.cache, self.parts, self.device, self.flat, self._like = cache, parts, device, flat, torch.empty(0)

    def store(self, layer: int, keys: Tensor, values: Tensor) -> None:
        self._like = keys[0]
        if self.flat:
            keys, values = keys[0].transpose(1, 2).flatten(0, 1), values[0].flatten(0, 1)
        self.cache.update(keys.to(self.device), values.to(self.device), layer)

    def read(self, layer: int) -> tuple[Tensor, Tensor]:
        heads, tokens, dim = self._like.shape
        like = self._like.to(self.device)
        nothing = (like.new_empty(0, tokens), like.new_empty(0, dim)) if self.flat else (like[None, :, :0],) * 2
        keys, values = (x.to(self._like.device) for x in self.cache.update(*nothing, layer))
        if self.flat:
            keys, values = keys.view(1, heads, dim, tokens).transpose(2, 3), values.view(1, heads, tokens, dim)
        return keys, values

    def held(self) -> list[Any]:
        return [part for layer in self.cache.layers for part in self.parts(layer)]


@dataclass(frozen=True)
class Kept:
    """Tokens that stay dense. multiple: the rest is a multiple of so many tokens; what is over stays dense too, among the newest."""

    sinks: int = 0
    window: int = 0
    multiple: int = 1

    def cut(self, tokens: int) -> tuple[int, int]:
        """Where what is quantized begins and ends."""
        start = min(self.sinks, tokens)
        middle = max(0, tokens - start - self.window)
        return start, start + middle // self.multiple * self.multiple


class StoredCache:
    """A conversation in a Quantizer. once: protocol "oneshot"."""

    def __init__(self, model: PreTrainedModel, quantizer: Any, kept: Kept, once: bool) -> None:
        self.model, self.quantizer, self.kept, self.once = model, quantizer, kept, once
        self.stored_tokens = 0
        self._dense: list[Tensor] = []
        self._continuation: DynamicCache | None = None

    def prefill(self, ids: Tensor, known: Prefill | None, rows: int) -> Tensor:
        if known is None:
            keys, values, logits = dense_prefill(self.model, ids, rows)
        else:
            keys, values, logits = list(known.keys), list(known.values), known.logits[0, -rows:]
        self.stored_tokens = ids.shape[1]
        start, end = self.kept.cut(ids.shape[1])
        read = DynamicCache(config=self.model.config)
        for i, (k, v) in enumerate(zip(keys, values, strict=True)):
            k, v = k.to(self.model.device), v.to(self.model.device)
            middle = []
            if end > start:
                self.quantizer.store(i, k[:, :, start:end].contiguous(), v[:, :, start:end].contiguous())
                middle = list(self.quantizer.read(i)) if self.once else []
            dense = [(x[:, :, :start], x[:, :, end:]) for x in (k, v)]
            self._dense += [part for pair in dense for part in pair]
            if self.once:
                k, v = (torch.cat([first, *middle[j : j + 1], last], 2) for j, (first, last) in enumerate(dense))
                read.update(k, v, i)
        self._continuation = read if self.once else None
        return logits

    def extend(self, ids: Tensor, rows: int) -> Tensor:
        cache = self.quantizer.cache if self._continuation is None else self._continuation
        logits: Tensor = self.model(ids, use_cache=True, logits_to_keep=rows, **{cache_keyword(self.model): cache}).logits
        self.stored_tokens += 0 if self.once else ids.shape[1]
        return logits[0]

    def close(self) -> None:
        self._continuation = None

    @property
    def nbytes(self) -> int:
        return held_bytes([self._dense, self.quantizer.held()], self.model.dtype)
