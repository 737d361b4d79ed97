"""A peer behind a session's face (eval/protocols.py): fed chunk by chunk, scored like ours, its bytes measured after each chunk."""

from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel
from transformers.cache_utils import DynamicLayer

from kvstrata.adapters.hf import cache_keyword, store_config
from kvstrata.eval.replay import Prefill
from kvstrata.store.layout import Layout
from kvstrata.types import PAGE_SIZE, Tier


class Cache(Protocol):
    """What a peer holds of one conversation, and how a model runs on it."""

    def prefill(self, ids: Tensor, known: Prefill | None, rows: int) -> Tensor:
        """Hold the first chunk, ids [1, T]. known: what it computes, where that is known. -> logits of the last `rows` positions."""
        ...

    def extend(self, ids: Tensor, rows: int) -> Tensor:
        """Run a further chunk on what is held. -> logits [rows, vocab]."""
        ...

    def close(self) -> None:
        """Leave the model as it was."""
        ...

    @property
    def nbytes(self) -> int: ...

    @property
    def stored_tokens(self) -> int:
        """Tokens that nbytes is of: those that were stored, be they kept or not; without what only waits to be scored."""
        ...


class Peer(Protocol):
    """One peer at one setting.

    protocols: those that its own code permits. masked: share of the tokens that it masks but goes on holding; 0 for most.
    """

    @property
    def protocols(self) -> tuple[str, ...]: ...
    @property
    def masked(self) -> float: ...

    def open(self, model: PreTrainedModel, protocol: str) -> Cache:
        """A cache for one conversation. Raises MissingPeerError where the peer's package is not there."""
        ...


@dataclass(frozen=True)
class Report:
    """As much of a session's as an evaluation reads."""

    bytes_stored: int
    bytes_bf16: int
    bits_per_element: float
    reused_tokens: int
    new_tokens: int
    bytes_queries: int = 0
    anchors: int = 0


class PeerLayout:
    """Bits of a peer: of what it stores. A frame is a byte."""

    def __init__(self, model: PreTrainedModel) -> None:
        self.layout = Layout.of(store_config(model, PAGE_SIZE))

    def bits_per_element(self, frames: int, tokens: int) -> float:
        return 8 * frames / self.layout.elements(tokens) if tokens else 0.0

    def tier_bytes(self) -> dict[Tier, int]:
        return {}


class PeerSession:
    """Feeds a peer one conversation. known: the first chunk, computed already."""

    def __init__(self, model: PreTrainedModel, peer: Peer, protocol: str, known: Prefill | None = None) -> None:
        if protocol not in peer.protocols:
            raise ValueError(f"{peer} does not run protocol {protocol!r}; accepted: {', '.join(peer.protocols)}")
        self.model, self.cache, self.known = model, peer.open(model, protocol), known
        self.layout = PeerLayout(model)
        self.reports: list[Report] = []
        self._fed: list[int] = []
        self.peak_bytes = 0

    def __enter__(self) -> "PeerSession":
        return self

    def __exit__(self, *error: object) -> None:
        self.cache.close()

    @torch.inference_mode()
    def feed(self, token_ids: list[int], spans: Any, *, logits_to_keep: int) -> Tensor:
        """Logits float32 [logits_to_keep, vocab] of the last positions. ValueError: `token_ids` does not continue what was fed."""
        old = len(self._fed)
        if token_ids[:old] != self._fed or len(token_ids) == old:
            raise ValueError(f"{len(token_ids)} tokens do not continue the {old} that were fed")
        ids = torch.tensor([token_ids[old:]], device=self.model.device)
        rows = max(logits_to_keep, 1)
        if old:
            logits = self.cache.extend(ids, rows)
        else:
            known = self.known if self.known is not None and self.known.token_ids == tuple(token_ids) else None
            logits = self.cache.prefill(ids, known, rows)
        self._fed = list(token_ids)
        stored = self.cache.stored_tokens
        bits = self.layout.bits_per_element(self.bytes_in_use, stored)
        dense = self.layout.layout.bf16_bytes(stored)
        self.reports.append(Report(self.bytes_in_use, dense, bits, old, len(token_ids) - old))
        self.peak_bytes = max(self.peak_bytes, self.bytes_in_use)
        return logits.float()

    @property
    def report(self) -> Report:
        return self.reports[-1]

    @property
    def bytes_in_use(self) -> int:
        return self.cache.nbytes

    @property
    def frames_in_use(self) -> int:
        """Bytes, as if those that were stored were of all tokens: what run_session divides by the conversation's length."""
        return round(self.bytes_in_use * len(self._fed) / max(self.cache.stored_tokens, 1))

    def page_tiers(self) -> list[Tier]:
        return []


def dense_prefill(model: PreTrainedModel, ids: Tensor, rows: int) -> tuple[list[Tensor], list[Tensor], Tensor]:
    """Keys and values of each layer, [1, H, T, D], and logits [rows, vocab]."""
    cache = DynamicCache(config=model.config)
    out = model(ids, use_cache=True, logits_to_keep=rows, **{cache_keyword(model): cache})
    held = dense_parts(cache)
    return [k for k, _ in held], [v for _, v in held], out.logits[0]


def dense_parts(cache: DynamicCache) -> list[tuple[Tensor, Tensor]]:
    """Keys and values of each layer of transformers' own cache."""
    parts = []
    for layer in cache.layers:
        assert isinstance(layer, DynamicLayer) and layer.keys is not None and layer.values is not None
        parts.append((layer.keys, layer.values))
    return parts
