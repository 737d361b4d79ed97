"""Presses of kvpress: tokens are evicted once, when the prefix has been computed. Knows nothing of how a press scores.

kvpress 0.5.5 was written for older releases of transformers: attention layers are told here, by the names that it reads, the cache and
the positions that newer releases pass by other names or not at all.
"""

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from kvstrata.adapters.hf import cache_keyword
from kvstrata.eval.peers.held import held_bytes
from kvstrata.eval.peers.need import need
from kvstrata.eval.peers.session import Cache, dense_parts
from kvstrata.eval.replay import Prefill

MASKING = "AdaKVPress"
PIECE = 8
"""Tokens that run at once where tokens are masked: kvpress looks for one key that all their queries ignore."""


@dataclass(frozen=True)
class Press:
    """press: name of a class of kvpress. kept: share of the tokens. adaptive: AdaKV around it, which divides the heads' budgets, but
    masks tokens and holds all of them."""

    press: str
    kept: float
    adaptive: bool = False
    protocols = ("oneshot",)

    @property
    def masked(self) -> float:
        return 1 - self.kept if self.adaptive else 0.0

    def open(self, model: PreTrainedModel, protocol: str) -> Cache:
        with patches_undone():
            kvpress = need("kvpress")
        press = getattr(kvpress, self.press)(compression_ratio=1 - self.kept)
        return PressedCache(model, getattr(kvpress, MASKING)(press) if self.adaptive else press, self.adaptive)


@contextlib.contextmanager
def patches_undone() -> Iterator[None]:
    """Importing kvpress wraps transformers' attention functions for good; here they are put back."""
    before = dict(ALL_ATTENTION_FUNCTIONS._local_mapping)
    try:
        yield
    finally:
        ALL_ATTENTION_FUNCTIONS._local_mapping = before


def attention_layers(model: PreTrainedModel) -> list[Any]:
    return [layer.self_attn for layer in model.model.layers]


def told_of_cache(press: Any) -> Any:
    """The press, whose hook sees the cache and the positions of a first chunk by the names that it reads."""
    hook = press.forward_hook

    def forward_hook(module: Any, args: Any, kwargs: dict[str, Any], output: Any) -> Any:
        states, cache = kwargs["hidden_states"], kwargs.get("cache", kwargs.get("past_key_values"))
        positions = torch.arange(states.shape[1], device=states.device)
        return hook(module, args, kwargs | {"past_key_values": cache, "cache_position": positions}, output)

    press.forward_hook = forward_hook
    return press


class PressedCache:
    def __init__(self, model: PreTrainedModel, press: Any, masks: bool) -> None:
        self.model, self.press, self.masks = model, press, masks
        self.cache = DynamicCache(config=model.config)
        self.stored_tokens, self._length, self._bytes = 0, 0, 0

    def prefill(self, ids: Tensor, known: Prefill | None, rows: int) -> Tensor:
        # presses look at hidden states, which are not among what is known
        with self._patched(), told_of_cache(self.press)(self.model):
            logits = self._run(ids, rows)
        self.stored_tokens = ids.shape[1]
        self._bytes = held_bytes(dense_parts(self.cache), self.model.dtype)
        return logits

    def extend(self, ids: Tensor, rows: int) -> Tensor:
        step = PIECE if self.masks else ids.shape[1]
        with self._patched():
            logits = torch.cat([self._run(ids[:, i : i + step], step) for i in range(0, ids.shape[1], step)])
        return logits[-rows:]

    def _run(self, ids: Tensor, rows: int) -> Tensor:
        positions = torch.arange(self._length, self._length + ids.shape[1], device=ids.device)[None]
        self._length += ids.shape[1]
        logits: Tensor = self.model(
            ids, position_ids=positions, use_cache=True, logits_to_keep=rows, **{cache_keyword(self.model): self.cache}
        ).logits
        return logits[0]

    @contextlib.contextmanager
    def _patched(self) -> Iterator[None]:
        """kvpress's attention, which masks what AdaKV would evict."""
        if not self.masks:
            yield
            return
        with patches_undone():
            need("kvpress").attention_patch.patch_attention_functions()
            yield

    def close(self) -> None:
        for layer in attention_layers(self.model):
            for name in ("masked_key_indices", "rotary_emb"):
                if name in vars(layer) or name in layer._modules:
                    delattr(layer, name)

    @property
    def nbytes(self) -> int:
        return self._bytes
