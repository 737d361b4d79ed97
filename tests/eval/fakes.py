"""A session without compression, tiny models and conversations that tests of the evaluation share."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM

from kvstrata.adapters.hf import cache_keyword
from kvstrata.types import Tier

VOCAB = 49152
"""Of the SmolLM2 tokenizer, which the tiny model shares."""


def tiny_model(seed: int = 0) -> LlamaForCausalLM:
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=VOCAB, hidden_size=64, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=1,
        head_dim=64, max_position_embeddings=4096, tie_word_embeddings=True,
    )  # fmt: skip
    return LlamaForCausalLM(config).eval()


CALL = {"type": "function", "function": {"name": "cd", "arguments": {"folder": "documents"}}}
TOOL = {
    "type": "function",
    "function": {
        "name": "cd",
        "description": "Change folder.",
        "parameters": {"type": "object", "properties": {"folder": {"type": "string"}}},
    },
}
MESSAGES: list[dict[str, Any]] = [
    {"role": "system", "content": "You are an agent."},
    {"role": "user", "content": "Go to the documents folder, please. It is the one with the reports."},
    {"role": "assistant", "content": "", "tool_calls": [CALL]},
    {"role": "tool", "name": "cd", "content": '{"cwd": "documents"}'},
    {"role": "assistant", "content": "You are in documents now."},
    {"role": "user", "content": "And back?"},
    {"role": "assistant", "content": "", "tool_calls": [CALL]},
    {"role": "tool", "name": "cd", "content": '{"cwd": "/"}'},
]


@dataclass
class Report:
    bytes_stored: int
    bytes_bf16: int
    reused_tokens: int
    new_tokens: int
    anchors: int = 0


class Layout:
    def bits_per_element(self, frames: int, tokens: int) -> float:
        return 16.0

    def tier_bytes(self) -> dict[Tier, int]:
        return {Tier.BF16: 3200}


class DenseSession:
    """transformers' own cache behind a session's face; `noise` is added to its logits."""

    def __init__(self, model: LlamaForCausalLM, noise: float = 0.0) -> None:
        self.model, self.noise = model, noise
        self.cache = DynamicCache(config=model.config)
        self.reports: list[Report] = []
        self.layout = Layout()
        self.fed: list[int] = []
        self.spans: Any = ()

    def feed(self, token_ids: list[int], spans: Any, *, logits_to_keep: int) -> Tensor:
        old = self.cache.get_seq_length()
        assert spans[-1].end == len(token_ids)
        logits = self.model(torch.tensor([token_ids[old:]]), **{cache_keyword(self.model): self.cache}).logits[0].float()
        self.fed.append(len(token_ids))
        self.reports.append(Report(100 * len(token_ids), 100 * len(token_ids), old, len(token_ids) - old))
        return logits[-logits_to_keep:] + self.noise * torch.sin(torch.arange(logits.shape[-1]))

    @property
    def report(self) -> Report:
        return self.reports[-1]

    @property
    def frames_in_use(self) -> int:
        return self.fed[-1]

    @property
    def bytes_in_use(self) -> int:
        return 100 * self.fed[-1]

    @property
    def peak_bytes(self) -> int:
        return 100 * max(self.fed)

    def page_tiers(self) -> list[Tier]:
        return [Tier.BF16] * -(-self.fed[-1] // 32)
