"""The engine's environment, before it is imported; and a model that runs in milliseconds."""

import os

os.environ |= {
    "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind", "VLLM_LOGGING_LEVEL": "WARNING", "TOKENIZERS_PARALLELISM": "false",
    # the engine compiles parts of its sampler whatever its mode, once a process, for most of the time that a start takes
    "TORCHDYNAMO_DISABLE": "1",
}  # fmt: skip
# models this small gain nothing from threads, and two ranks of two threads each wait for one another on two cores
os.environ.setdefault("OMP_NUM_THREADS", "1")
# the engine looks for a GPU's compilers, not for an interpreter
os.environ.pop("TRITON_INTERPRET", None)

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

from .engines import Engine


@pytest.fixture(scope="session")
def tiny_model(model_path: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two layers of random weights, SmolLM2's tokenizer and template. Attention is peaked enough that greedy tokens are no coin tosses."""
    folder = tmp_path_factory.mktemp("tiny")
    tokenizer = AutoTokenizer.from_pretrained(model_path("smollm2"))
    tokenizer.save_pretrained(folder)
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(tokenizer), hidden_size=128, intermediate_size=256, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=64, max_position_embeddings=4096, tie_word_embeddings=False, initializer_range=0.08,
        bos_token_id=1, eos_token_id=2,
    )  # fmt: skip
    model = LlamaForCausalLM(config).float()
    with torch.no_grad():
        for name, p in model.named_parameters():
            if "q_proj" in name or "k_proj" in name:
                p.mul_(3)
    model.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def start(tiny_model: Path) -> Iterator[Callable[..., Engine]]:
    """An engine of these settings and arguments on the tiny model; one at a time, the last one is shut down first."""
    running: list[Engine] = []

    def begin(settings: dict[str, Any] | None, **arguments: Any) -> Engine:
        while running:
            running.pop().stop()
        running.append(Engine(settings, **{"model": str(tiny_model), **arguments}))
        return running[-1]

    yield begin
    while running:
        running.pop().stop()
