"""Queries, keys and values of each layer of one forward pass, as attention sees them: after RoPE, before anything is stored.

    with captured(model, see):
        model(ids)

Knows nothing of what is done with them.
"""

import contextlib
import itertools
from collections.abc import Callable, Iterator
from typing import Any

from torch import Tensor
from transformers import AttentionInterface, PreTrainedModel
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, AttentionMaskInterface

from kvstrata.adapters.hf_cache import layer_types

See = Callable[[int, Tensor, Tensor, Tensor, float], None]
"""Called with the layer (counted among full-attention layers), q [Hq, T, D], k and v [H, T, D], and the softmax scale."""

_names = itertools.count()


@contextlib.contextmanager
def captured(model: PreTrainedModel, see: See) -> Iterator[None]:
    """Forward passes of the model, one row each, call `see` in every full-attention layer. The model is left as it was.

    Raises UnsupportedModelError for a family that stores do not take."""
    config = model.config.get_text_config(decoder=True)
    types = layer_types(config)
    number = {i: types[:i].count("full_attention") for i, t in enumerate(types) if t == "full_attention"}
    name, previous = f"kvstrata_capture_{next(_names)}", config._attn_implementation
    plain = AttentionInterface()["sdpa"]

    def attention(module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, **kwargs: Any) -> Any:
        if module.layer_idx in number:
            scale = kwargs.get("scaling") or query.shape[-1] ** -0.5
            see(number[module.layer_idx], query[0], key[0], value[0], scale)
        return plain(module, query, key, value, mask, **kwargs)

    AttentionInterface.register(name, attention)
    AttentionMaskInterface.register(name, ALL_MASK_ATTENTION_FUNCTIONS["sdpa"])
    try:
        config._attn_implementation = name
        yield
    finally:
        config._attn_implementation = previous
        AttentionInterface._global_mapping.pop(name, None)
        AttentionMaskInterface._global_mapping.pop(name, None)
