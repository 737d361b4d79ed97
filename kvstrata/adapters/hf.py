"""The transformers adapter: a cache and an attention function, attached to a model and removed again.

    with attached(model, store) as cache:
        model.generate(**inputs, **{cache_keyword(model): cache})

Inside the context every forward pass that is given the cache is one step of the store. Knows nothing of tags or policies: who wants
pages planned sets plans on the store, or passes `planner`.
"""

import contextlib
import inspect
import itertools
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from transformers import AttentionInterface, PreTrainedModel

from kvstrata.adapters.hf_cache import Planner, StrataCache, UnsupportedModelError, layer_types, text_config
from kvstrata.config import StoreConfig
from kvstrata.ops.frame import HEAD_DIMS
from kvstrata.store.store import Store
from kvstrata.types import PAGE_SIZE

__all__ = ["Planner", "StrataCache", "UnsupportedModelError", "attached", "cache_keyword", "store_config"]
_names = itertools.count()


def store_config(
    model: PreTrainedModel, num_tokens: int, *, codec: str = "planes", window: int = 64, dense_dtype: str | None = None
) -> StoreConfig:
    """Geometry of a store that holds `num_tokens` tokens of this model at BF16.

    dense_dtype: default bfloat16, or float16 for a float16 model.
    """
    config = text_config(model)
    types = layer_types(config)
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    if head_dim not in HEAD_DIMS:
        raise UnsupportedModelError(f"head_dim {head_dim} is not supported; accepted: {', '.join(map(str, HEAD_DIMS))}")
    geometry: dict[str, Any] = {
        "num_layers": types.count("full_attention"), "num_kv_heads": config.num_key_value_heads, "head_dim": head_dim, "codec": codec,
        "window": window, "dense_dtype": dense_dtype or ("float16" if model.dtype is torch.float16 else "bfloat16"),
    }  # fmt: skip
    from kvstrata.store.layout import Layout

    layout = Layout.of(StoreConfig(num_frames=2, **geometry))
    # a page more for each end, and pages that settle hold old and new frames until the step ends
    slack = 2 * window // PAGE_SIZE + 4
    return StoreConfig(num_frames=1 + layout.frames_for(num_tokens) + slack * layout.frames_for(PAGE_SIZE), **geometry)


def cache_keyword(model: PreTrainedModel) -> str:
    """Name of the forward argument that takes the cache: `cache` in new versions of transformers, `past_key_values` in older ones."""
    return "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"


@contextlib.contextmanager
def attached(
    model: PreTrainedModel, store: Store, planner: Planner | None = None, *, cache: StrataCache | None = None
) -> Iterator[StrataCache]:
    """Attach a store to a model; yields the cache to pass to its forward passes. Detaching leaves the model as it was.

    cache: continue with this one, made by an earlier `StrataCache(model, store)`, and keep what it holds at the end. Without it a new
    cache is made, and its sequences are released at the end.
    planner: called for each sequence before a forward pass in which it takes a new page or settles one.

    Raises UnsupportedModelError for a family, layer type or head_dim that is not supported, ValueError where the store's geometry is not
    the model's or the model is attached already.
    """
    config = text_config(model)
    expected = store_config(model, PAGE_SIZE, codec=store.config.codec)
    for name in ("num_layers", "num_kv_heads", "head_dim"):
        if getattr(expected, name) != getattr(store.config, name):
            raise ValueError(f"the store has {name} {getattr(store.config, name)}, the model {getattr(expected, name)}")
    if str(config._attn_implementation).startswith("kvstrata"):
        raise ValueError("a store is attached to this model already; detach it first")
    strata = StrataCache(model, store, planner) if cache is None else cache
    if strata.store is not store:
        raise ValueError("the cache belongs to another store")
    name = f"kvstrata_{next(_names)}"

    def attention(
        module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, scaling: float | None = None, **kwargs: Any
    ) -> tuple[Tensor, None]:
        scale = query.shape[-1] ** -0.5 if scaling is None else scaling
        if kwargs.get("softcap") is not None:
            raise UnsupportedModelError("attention with a soft cap is not supported")
        if strata.is_sliding[module.layer_idx]:
            return strata.sliding_attention(module.layer_idx, query, key, value, scale), None
        return strata.attention(module.layer_idx, query, key, value, scale), None

    def before(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        given = kwargs.get("cache", kwargs.get("past_key_values"))
        if given is not strata:
            raise ValueError(f"the model is attached to a store: pass its cache as {cache_keyword(model)}=, got {type(given).__name__}")
        ids, embeds = args[0] if args else kwargs.get("input_ids"), kwargs.get("inputs_embeds")
        chunk = ids if ids is not None else embeds
        if chunk is None:
            raise ValueError("the model was called without input_ids and without inputs_embeds")
        strata.begin(ids, (chunk.shape[0], chunk.shape[1]), kwargs.get("attention_mask"))

    def after(module: Any, args: Any, kwargs: Any, output: Any) -> None:
        if output is None:
            strata.abort()
        else:
            strata.commit()

    previous = config._attn_implementation
    AttentionInterface.register(name, attention)
    hooks = [
        model.register_forward_pre_hook(before, with_kwargs=True),
        model.register_forward_hook(after, with_kwargs=True, always_call=True),
    ]
    try:
        config._attn_implementation = name
        yield strata
    finally:
        for hook in hooks:
            hook.remove()
        config._attn_implementation = previous
        strata.abort()
        if cache is None:
            strata.reset()
        AttentionInterface._global_mapping.pop(name, None)
