"""Tiny random models of the supported families: the real code of transformers at a size that runs in milliseconds."""

from typing import Any

import torch
from transformers import AutoModelForCausalLM, Gemma3TextConfig, LlamaConfig, Qwen2Config, Qwen3Config
from transformers.modeling_utils import PreTrainedModel

VOCAB = 320
_SIZE: dict[str, Any] = {
    "vocab_size": VOCAB, "hidden_size": 96, "intermediate_size": 128, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 64, "max_position_embeddings": 4096, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
CONFIGS: dict[str, Any] = {
    "llama": LlamaConfig(**_SIZE),
    "qwen2": Qwen2Config(**_SIZE),
    "qwen3": Qwen3Config(**_SIZE),
    "gemma3": Gemma3TextConfig(
        **_SIZE | {"num_hidden_layers": 4}, sliding_window=40, layer_types=["sliding_attention", "full_attention"] * 2
    ),
}


def tiny(family: str, **changes: Any) -> PreTrainedModel:
    """A model of random weights, the same each time. Its attention is peaked enough to tell tokens apart."""
    torch.manual_seed(0)
    config = CONFIGS[family].__class__(**CONFIGS[family].to_dict() | changes)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    with torch.no_grad():
        for name, p in model.named_parameters():
            if "q_proj" in name or "k_proj" in name:
                p.mul_(4)
    return model
