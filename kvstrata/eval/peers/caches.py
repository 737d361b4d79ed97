"""Peers that are cache classes of their own packages: transformers' QuantizedCache on quanto or HQQ, and two of TurboQuant."""

from dataclasses import dataclass
from functools import partial
from typing import Any

from transformers import Cache as TransformersCache
from transformers import PreTrainedModel, QuantizedCache

from kvstrata.eval.peers.need import need
from kvstrata.eval.peers.session import Cache
from kvstrata.eval.peers.stored import CacheQuantizer, Kept, StoredCache

BOTH, ONCE = ("oneshot", "turns"), ("oneshot",)
GROUP = 64
"""Elements of a group of transformers' QuantizedCache, its default."""


@dataclass(frozen=True)
class Quantized:
    """transformers.QuantizedCache. backend: quanto (axes 0 and -1) or hqq (0 and 1); sinks, window: kept dense beside it, which the class
    itself does not offer, and rounded so that no group of a channel mixes heads. By channel (axis -1) quanto takes no other lengths: it
    runs no turns then. flat: K and V as matrices, K of a row a channel, so that groups along axis 1 are of a channel's tokens: HQQ's axis 0
    groups elements from all over a tensor, of several heads."""

    backend: str
    bits: int
    axis_key: int
    axis_value: int
    sinks: int = 0
    window: int = 0
    flat: bool = False
    masked = 0.0

    @property
    def protocols(self) -> tuple[str, ...]:
        return ONCE if self.flat or self.sinks or self.window or -1 in (self.axis_key, self.axis_value) else BOTH

    def open(self, model: PreTrainedModel, protocol: str) -> Cache:
        need({"quanto": "optimum.quanto", "hqq": "hqq.core.quantize"}[self.backend])
        cache = QuantizedCache(
            self.backend, model.config, nbits=self.bits, axis_key=self.axis_key, axis_value=self.axis_value, q_group_size=GROUP
        )
        protected = Kept(self.sinks, self.window, GROUP)
        once = protocol == "oneshot"
        # quanto would first compile kernels, most of which have nothing to do with caches
        device = "cpu" if once and self.backend == "quanto" else None
        return StoredCache(model, CacheQuantizer(cache, quantized_parts, device, self.flat), protected, once)


def quantized_parts(layer: Any) -> list[Any]:
    return [layer._quantized_keys, layer._quantized_values, layer.keys, layer.values] if layer.is_initialized else []


@dataclass(frozen=True)
class TinyTurboQuant:
    """tiny-turboquant's TinyKVCache: K by channel over blocks of tokens, V by token, fp16 metadata, the newest tokens dense.

    Models of newer releases of transformers pass it arguments that it does not take, so it runs no turns."""

    key_bits: int
    value_bits: int
    residual: int = 128
    block: int = 32
    sinks: int = 0
    masked = 0.0
    protocols = ONCE

    def open(self, model: PreTrainedModel, protocol: str) -> Cache:
        cache = need("tiny_turboquant").TinyKVCache.for_model(
            model, key_bits=self.key_bits, value_bits=self.value_bits, residual_len=self.residual, block_size=self.block
        )
        return StoredCache(model, CacheQuantizer(cache, tiny_parts), Kept(self.sinks), protocol == "oneshot")


def tiny_parts(layer: Any) -> list[Any]:
    return [value for name, value in vars(layer).items() if name.startswith(("_key_", "_value_", "_residual_"))]


@dataclass(frozen=True)
class TurboQuantPro:
    """turboquant-pro's TurboQuantCache: K in NF4 by channel with fp16 outliers, V rotated on a Lloyd-Max grid, the newest tokens dense."""

    value_bits: int
    hot_window: int = 128
    outliers: float = 0.02
    sinks: int = 0
    masked = 0.0

    @property
    def protocols(self) -> tuple[str, ...]:
        return BOTH if not self.sinks else ONCE

    def open(self, model: PreTrainedModel, protocol: str) -> Cache:
        layer = need("turboquant_pro").TurboQuantLayer
        # newer releases of transformers ask by another name
        layer = type("Layer", (layer,), {"get_max_length": layer.get_max_cache_shape})
        settings = {"hot_window": self.hot_window, "value_bits": self.value_bits, "outlier_frac": self.outliers}
        make: Any = partial(layer, **settings)
        cache = TransformersCache(layer_class_to_replicate=make)
        return StoredCache(model, CacheQuantizer(cache, turbo_parts), Kept(self.sinks), protocol == "oneshot")


def turbo_parts(layer: Any) -> list[Any]:
    return [layer._hot_keys, layer._hot_values, layer._cold_keys, layer._cold_values]
