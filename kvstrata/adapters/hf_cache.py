"""What transformers sees of a store: a cache whose tokens are sequences of the store. Knows nothing of attaching, tags or policies."""

import itertools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from transformers import PreTrainedModel
from transformers.cache_utils import Cache, CacheLayerMixin

from kvstrata.attend import attend
from kvstrata.store.page import Sequence
from kvstrata.store.step import Step
from kvstrata.store.store import Store
from kvstrata.store.weigh import is_due, weigh
from kvstrata.types import PAGE_SIZE, Plan

Planner = Callable[[list[int]], Plan]
"""Token ids of a sequence, those of the coming forward pass included -> its plan."""

FAMILIES = ("llama", "qwen2", "qwen3", "gemma3_text", "qwen3_vl_text")
"""Values of config.model_type that are tested (SmolLM2 is a llama)."""

SLIDING_ROLLBACK = 64
"""Positions that sliding-window layers keep behind their window, so that the newest ones can be cropped."""


class UnsupportedModelError(ValueError):
    """The model cannot be attached; the message names the reason and what is accepted."""


def text_config(model: PreTrainedModel) -> Any:
    return model.config.get_text_config(decoder=True)


def inv_freq(model: PreTrainedModel) -> Tensor | None:
    """Rotations of the model's RoPE, the same in every full-attention layer, float [R / 2]; None where positions have several axes."""
    if "mrope_section" in (getattr(text_config(model), "rope_parameters", None) or {}):
        return None
    for module in model.modules():
        for name in ("full_attention_inv_freq", "inv_freq"):
            found = getattr(module, name, None)
            if isinstance(found, Tensor):
                return found.detach().float()
    return None


def layer_types(config: Any) -> list[str]:
    """The type of each layer, full_attention or sliding_attention. Raises UnsupportedModelError for anything else, by name."""
    if config.model_type not in FAMILIES:
        reason = ""
        if getattr(config, "kv_lora_rank", None):
            reason = " (multi-head latent attention keeps no keys and values to store)"
        elif any("linear" in t or t in ("conv", "mamba", "hybrid") for t in getattr(config, "layer_types", None) or ()):
            reason = " (linear attention keeps a state, not keys and values)"
        raise UnsupportedModelError(f"model family {config.model_type!r} is not supported{reason}; accepted: {', '.join(FAMILIES)}")
    types = list(getattr(config, "layer_types", None) or ["full_attention"] * config.num_hidden_layers)
    for t in types:
        if t not in ("full_attention", "sliding_attention"):
            raise UnsupportedModelError(f"layers of type {t!r} are not supported; accepted: full_attention, sliding_attention")
    return types


class StrataLayer(CacheLayerMixin):
    """What transformers sees of one full-attention layer: its length, and the chunk handed back as it came."""

    is_compileable = False
    is_croppable = True
    supports_early_init = False

    def __init__(self, cache: "StrataCache") -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.is_initialized = True
        self._cache = cache

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        pass

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        return key_states, value_states

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.get_seq_length() + query_length, 0

    def get_seq_length(self) -> int:
        return self._cache.padded_length

    def get_max_length(self) -> int:
        return -1

    # releases before 5.20 ask by this name
    get_max_cache_shape = get_max_length

    def crop(self, tokens_to_remove: int) -> None:
        """The cache crops all layers at once."""


class SlidingLayer(CacheLayerMixin):
    """The dense cache of one sliding-window layer, [B, H, S, D]: the window, and SLIDING_ROLLBACK positions behind it."""

    is_compileable = False
    is_croppable = True
    is_sliding = True
    supports_early_init = False

    def __init__(self, window: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.is_initialized = True
        self.window = window
        self.length = 0

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        pass

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Append the chunk; returns what its queries may see."""
        keys, values = key_states, value_states
        if self.keys is not None and self.values is not None:
            keys, values = torch.cat([self.keys, keys], 2), torch.cat([self.values, values], 2)
        self.keys, self.values = keys, values
        self.length += key_states.shape[2]
        seen = self.window - 1 + key_states.shape[2]
        return keys[:, :, -seen:], values[:, :, -seen:]

    def trim(self) -> None:
        """Forget what no later query can see, even after a crop."""
        if self.keys is not None and self.values is not None:
            kept = self.window - 1 + SLIDING_ROLLBACK
            self.keys, self.values = (x[:, :, -kept:].clone() if x.shape[2] > kept else x for x in (self.keys, self.values))

    def forgets(self, num_tokens: int) -> bool:
        """Whether cropping to `num_tokens` positions needs keys that are gone."""
        held = 0 if self.keys is None else self.keys.shape[2]
        return held - (self.length - num_tokens) < min(self.window - 1, num_tokens)

    def crop_to(self, num_tokens: int) -> None:
        surplus = self.length - num_tokens
        if surplus and self.keys is not None and self.values is not None:
            self.keys, self.values = self.keys[:, :, :-surplus], self.values[:, :, :-surplus]
            self.length = num_tokens

    def reset(self) -> None:
        self.keys = self.values = None
        self.length = 0

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.length + query_length, 0

    def get_seq_length(self) -> int:
        return self.length

    def get_max_length(self) -> int:
        return self.window

    get_max_cache_shape = get_max_length

    def crop(self, tokens_to_remove: int) -> None:
        """The cache crops all layers at once."""


@dataclass(frozen=True, slots=True)
class Snapshot:
    """An earlier state of a cache; its sequences are forks of the cache's."""

    sequence_ids: list[int]
    mask: Tensor | None
    sliding: list[tuple[Tensor | None, Tensor | None, int]]


class StrataCache(Cache):
    """A transformers cache whose tokens live in a store: one sequence of the store for each row of the batch.

    Padding is not stored: `padded_length` is what transformers counts, the store counts real tokens.
    """

    def __init__(self, model: PreTrainedModel, store: Store, planner: Planner | None = None) -> None:
        config = text_config(model)
        types = layer_types(config)
        self.store = store
        store.inv_freq = inv_freq(model)
        self.planner = planner
        self.sequence_ids: list[int] = []
        self._mask: Tensor | None = None
        self._before: Tensor | None = None
        self._step: Step | None = None
        self._rows: Tensor | None = None
        self._store_layer = {i: types[:i].count("full_attention") for i, t in enumerate(types) if t == "full_attention"}
        layers: list[Any] = [StrataLayer(self) if t == "full_attention" else SlidingLayer(config.sliding_window) for t in types]
        super().__init__(layers=layers)
        self._sliding = {i: layer for i, layer in enumerate(layers) if isinstance(layer, SlidingLayer)}

    @property
    def padded_length(self) -> int:
        """Positions before the forward pass that is open, or all of them where none is."""
        mask = self._mask if self._step is None else self._before
        return 0 if mask is None else mask.shape[1]

    @property
    def batch_size(self) -> int:
        return len(self.sequence_ids) or -1

    @property
    def sliding_layers(self) -> list[SlidingLayer]:
        return list(self._sliding.values())

    @property
    def sliding_bytes(self) -> int:
        """Bytes that sliding-window layers hold outside the store."""
        return sum(x.nbytes for layer in self.sliding_layers for x in (layer.keys, layer.values) if x is not None)

    def adopt(self, sequence_id: int) -> None:
        """Continue a sequence that is in the store already (a matched prefix, a fork). Only for an empty cache of one row."""
        if self.sequence_ids:
            raise ValueError(f"the cache already holds sequences {self.sequence_ids}; only an empty one can adopt")
        n = self.store.sequence(sequence_id).num_tokens
        if n and len(self._store_layer) != len(self.layers):
            raise UnsupportedModelError("sliding-window layers keep no reusable prefix; adopt an empty sequence")
        self.sequence_ids = [sequence_id]
        self._mask = torch.ones(1, n, dtype=torch.bool)

    def snapshot(self) -> "Snapshot":
        """What the cache holds now: forks that share every frame. Ends in `restore` or `discard`."""
        sliding = [(layer.keys, layer.values, layer.length) for layer in self._sliding.values()]
        return Snapshot([self.store.fork(i) for i in self.sequence_ids], self._mask, sliding)

    def restore(self, snapshot: "Snapshot") -> None:
        """Hold again what the snapshot holds."""
        self.reset()
        self.sequence_ids, self._mask = snapshot.sequence_ids, snapshot.mask
        for layer, (keys, values, length) in zip(self._sliding.values(), snapshot.sliding, strict=True):
            layer.keys, layer.values, layer.length = keys, values, length

    def discard(self, snapshot: "Snapshot") -> None:
        for i in snapshot.sequence_ids:
            self.store.release(i)

    # a forward pass, called by the hooks

    def begin(self, input_ids: Tensor | None, shape: tuple[int, int], mask: Tensor | None) -> None:
        """Open a step for a chunk of shape [batch, tokens]. mask: 2-D, 1 = real token, over the chunk alone or past and chunk."""
        self.abort()
        batch, length = shape
        if not batch or not length:
            raise ValueError(f"the chunk has shape [{batch}, {length}]; a forward pass needs at least one token")
        if self.sequence_ids and batch != len(self.sequence_ids):
            raise ValueError(f"the cache holds {len(self.sequence_ids)} sequences, the batch has {batch}; beam search and other "
                             "ways of multiplying rows are not supported")  # fmt: skip
        valid = self._valid(batch, length, mask)
        past = self._mask if self._mask is not None else torch.zeros(batch, 0, dtype=torch.bool)
        ids = input_ids.tolist() if input_ids is not None else [[-1] * length] * batch
        tokens = [[t for t, ok in zip(row, flags, strict=True) if ok] for row, flags in zip(ids, valid.tolist(), strict=True)]
        added = [] if self.sequence_ids else [self.store.add_sequence() for _ in range(batch)]
        sequence_ids = self.sequence_ids or added
        try:
            for i, new in zip(sequence_ids, tokens, strict=True):
                self._replan(i, new)
            self._step = self.store.begin(sequence_ids, tokens, shareable=input_ids is not None)
        except BaseException:
            for i in added:
                self.store.release(i)
            raise
        self._before, self._added = self._mask, added
        self.sequence_ids, self._mask = sequence_ids, torch.cat([past, valid], 1)
        self._chunk = valid
        self._rows = valid.flatten().nonzero()[:, 0]
        self._all_rows = bool(valid.all())

    def _replan(self, sequence_id: int, new: list[int]) -> None:
        s = self.store.sequence(sequence_id)
        pages, first = -(-(s.num_tokens + len(new)) // PAGE_SIZE), self.store.first_window_page(s.num_tokens + len(new))
        # a plan of more pages was for what a crop has cut off
        if self.planner is not None and (pages > len(s.pages) or pages < len(s.plan.tiers) or first > s.settled):
            self.store.set_plan(sequence_id, self.planner(s.token_ids + new))

    def _valid(self, batch: int, length: int, mask: Tensor | None) -> Tensor:
        if mask is None:
            return torch.ones(batch, length, dtype=torch.bool)
        if mask.ndim != 2 or mask.shape[0] != batch or mask.shape[1] not in (length, self.padded_length + length):
            accepted = f"[{batch}, {self.padded_length + length}] or [{batch}, {length}]"
            raise ValueError(f"attention_mask has shape {list(mask.shape)}; accepted: {accepted}")
        mask = mask.bool().cpu()
        if self._mask is not None and mask.shape[1] > length and not torch.equal(mask[:, :-length], self._mask):
            raise ValueError("attention_mask hides or shows tokens that were stored otherwise; it must continue that of earlier passes")
        return mask[:, -length:]

    def attention(self, layer_idx: int, q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
        """q [B, Hq, T, D], k, v [B, H, T, D] of the chunk -> out [B, T, Hq, D]; rows of padding are 0."""
        step, layer = self._open_step, self._store_layer[layer_idx]
        b, hq, t, d = q.shape
        q, k, v = map(self._packed, (q, k, v))
        out = attend(self.store, step, layer, q, k, v, scale)
        step.write(layer, k, v, q, scale)
        if not self._all_rows:
            full = out.new_zeros(b * t, hq, d)
            full[self._rows] = out
            out = full
        return out.view(b, t, hq, d)

    def write(self, layer_idx: int, q: Tensor, k: Tensor, v: Tensor, scale: float) -> None:
        """Store a chunk whose attention nobody wants; arguments as of `attention`."""
        q, k, v = map(self._packed, (q, k, v))
        self._open_step.write(self._store_layer[layer_idx], k, v, q, scale)

    @property
    def _open_step(self) -> Step:
        if self._step is None:
            raise RuntimeError("no forward pass is open: call the attached model itself, not a part of it, and give it this cache")
        return self._step

    def _packed(self, x: Tensor) -> Tensor:
        """x [B, H, T, D] -> its rows of real tokens, [N, H, D]."""
        x = x.transpose(1, 2).flatten(0, 1)
        return x if self._all_rows else x[self._rows]

    def sliding_attention(self, layer_idx: int, q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
        """Dense attention of a sliding-window layer: k, v [B, H, S, D], the window and the chunk."""
        assert self._mask is not None
        t, s = q.shape[2], k.shape[2]
        end = self._mask.shape[1]
        q_pos = torch.arange(end - t, end, device=q.device)[:, None]
        k_pos = torch.arange(end - s, end, device=q.device)[None, :]
        seen = (k_pos <= q_pos) & (q_pos - k_pos < self._sliding[layer_idx].window)
        seen = seen & self._mask[:, None, None, end - s :].to(q.device)
        # a query of padding sees itself: a row without keys would be NaN
        seen = seen | (k_pos == q_pos)
        out = scaled_dot_product_attention(q, k, v, attn_mask=seen, scale=scale, enable_gqa=True)
        return out.transpose(1, 2)

    def commit(self) -> None:
        if self._step is not None:
            step, self._step = self._step, None
            settled = [s.settled for s in step.sequences]
            step.commit()
            # what they hold counts where the next plan is made
            for layer in self._sliding.values():
                layer.trim()
            for s, before, tokens in zip(step.sequences, settled, itertools.pairwise(step.cu_seqlens), strict=True):
                self._settle(s, before, tokens[1] - tokens[0])

    def _settle(self, s: Sequence, settled: int, new: int) -> None:
        """Weigh a sequence's pages after a step of `new` tokens, if that is due, and take from them what the next plan does."""
        due = is_due(s, new)
        if due:
            weigh(self.store, s)
        if self.planner is not None and s.plan.weighing is not None and (due or s.settled > settled):
            self.store.set_plan(s.id, self.planner(s.token_ids))

    def abort(self) -> None:
        """Undo a forward pass that did not end."""
        if self._step is None:
            return
        step, self._step = self._step, None
        step.abort()
        for layer in self._sliding.values():
            layer.crop_to(0 if self._before is None else self._before.shape[1])
        for i in self._added:
            self.store.release(i)
        self.sequence_ids = [] if self._added else self.sequence_ids
        self._mask = self._before

    # what users of a cache call

    def crop(self, tokens: int) -> None:
        """Negative: forget the last -tokens positions. 0: nothing. Positive: keep the first `tokens` (older versions' meaning)."""
        length = self.padded_length
        keep = length + tokens if tokens <= 0 else tokens
        if keep < 0 or keep > length:
            raise ValueError(f"cannot crop a cache of {length} positions by {tokens}; accepted: {-length} to {length}")
        if keep == length or self._mask is None:
            return
        for layer in self._sliding.values():
            if layer.forgets(keep):
                lost = length - keep
                raise ValueError(f"cannot crop {lost} positions: sliding-window layers keep {SLIDING_ROLLBACK} behind their window")
        for layer in self._sliding.values():
            layer.crop_to(keep)
        for i, row in zip(self.sequence_ids, self._mask[:, :keep], strict=True):
            self.store.crop(i, int(row.sum()))
        self._mask = self._mask[:, :keep]

    def reset(self) -> None:
        """Forget everything; the sequences are released."""
        self.abort()
        for i in self.sequence_ids:
            self.store.release(i)
        self.sequence_ids, self._mask = [], None
        for layer in self._sliding.values():
            layer.reset()

    def reorder_cache(self, beam_idx: Tensor) -> None:
        raise UnsupportedModelError("beam search is not supported; use greedy decoding or sampling")

    def batch_repeat_interleave(self, repeats: int) -> None:
        raise UnsupportedModelError("repeating rows of a cache is not supported; fork the sequence in the store")

    def batch_select_indices(self, indices: Tensor) -> None:
        raise UnsupportedModelError("selecting rows of a cache is not supported; release the sequence in the store")
