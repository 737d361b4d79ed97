"""A layer's part of the engine's block pool: one block is one frame. Bytes come from store/layout.py. Knows nothing of who owns a block."""

from dataclasses import dataclass, fields, replace
from typing import Any, Self

import torch
from vllm.model_executor.layers.attention.attention import Attention
from vllm.v1.kv_cache_interface import FullAttentionSpec
from vllm.v1.kv_cache_spec_registry import KVCacheSpecRegistry

from kvstrata.adapters.vllm.causal import most_frames
from kvstrata.adapters.vllm.settings import EngineSettings, UnsupportedEngineError
from kvstrata.adapters.vllm.v026.config import settings_of
from kvstrata.store.layout import Layout
from kvstrata.types import Tier

_MARK = "_kvstrata_original"


@dataclass(frozen=True, kw_only=True)
class FrameSpec(FullAttentionSpec):
    """block_size is a page's tokens, which is what prefixes are hashed by; a block's bytes are a frame's."""

    settings: EngineSettings

    @property
    def layout(self) -> Layout:
        return self.settings.layout(self.num_kv_heads, self.head_size)

    @property
    def real_page_size_bytes(self) -> int:
        return self.layout.frame_bytes

    @property
    def dense_dtype(self) -> torch.dtype:
        return {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}[self.settings.dense_dtype or "bfloat16"]

    def frames(self) -> dict[Tier, int]:
        """Frames of a page, by tier."""
        return {t: self.layout.frames(t) for t in self.layout.tiers if t is not Tier.EVICTED}

    def max_frames(self, num_tokens: int) -> int:
        return most_frames(self.settings, self.layout, num_tokens)

    def max_memory_usage_bytes(self, vllm_config: Any) -> int:
        return self.max_frames(vllm_config.model_config.max_model_len) * self.page_size_bytes

    def max_num_blocks_per_req(self, vllm_config: Any, max_len: int) -> int:
        return self.max_frames(max_len)

    @classmethod
    def merge(cls, specs: list[Self]) -> Self:
        first = specs[0]
        assert all(spec == first for spec in specs), "layers of one pool must be alike"
        return replace(first)


def register_spec() -> None:
    """Layers of full attention ask for frames where the config asks for kvstrata."""
    from kvstrata.adapters.vllm.v026.manager import FrameManager

    # the built-in specs are registered when the first spec is asked for, and never where one is there already
    KVCacheSpecRegistry._ensure_registered()
    KVCacheSpecRegistry.register(FrameSpec, FrameManager, uniform_type_base_spec=FullAttentionSpec)
    if hasattr(Attention, _MARK):
        return
    original = Attention.get_kv_cache_spec

    def get_kv_cache_spec(self: Any, vllm_config: Any) -> Any:
        spec, settings = original(self, vllm_config), settings_of(vllm_config)
        if settings is None or spec is None:
            return spec
        if type(spec) is not FullAttentionSpec or spec.head_size_v != spec.head_size:
            raise UnsupportedEngineError(f"kvstrata: layer {self.layer_name} is of {type(spec).__name__}; accepted: full attention")
        base = {f.name: getattr(spec, f.name) for f in fields(FullAttentionSpec)}
        return FrameSpec(**base | {"dtype": torch.uint8, "settings": settings})

    Attention.get_kv_cache_spec = get_kv_cache_spec
    setattr(Attention, _MARK, original)
