"""The plugin on a GPU: its kernels against the PyTorch reference inside the engine, with and without CUDA graphs, a step ahead or not.

Numbers of 16 bits: another order of summation may turn a coin toss between two tokens, and all that follows. So logits are compared for as
long as the tokens are the same, and few requests may part.
"""

import gc
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM
from vllm.config import CUDAGraphMode

from kvstrata.adapters.vllm.v026.worker import builder_of

from .engines import Engine, Result, growing_work, mixed_work, tokens

pytestmark = pytest.mark.gpu
VOCABULARY = 2048
WORK = mixed_work(seed=3, vocabulary=VOCABULARY - 1)
GROWING = growing_work(seed=4, vocabulary=VOCABULARY - 1)
SETTINGS: dict[str, Any] = {"policy": "uniform", "budget_bits": 4.0, "horizon": 512, "window": 64}
GRAPHS: dict[str, Any] = {
    "enforce_eager": False,
    "compilation_config": {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY", "cudagraph_capture_sizes": [1, 2, 4, 8, 16]},
}
COMMON: dict[str, Any] = {"dtype": "bfloat16", "skip_tokenizer_init": True, "gpu_memory_utilization": 0.2}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two layers of random weights at head_dim 128, four query heads a KV head. Attention is peaked, and so are the logits."""
    folder = tmp_path_factory.mktemp("shape")
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=1024, intermediate_size=2048, num_hidden_layers=2, num_attention_heads=8, num_key_value_heads=2,
        head_dim=128, max_position_embeddings=4096, tie_word_embeddings=False, initializer_range=0.08, bos_token_id=1, eos_token_id=2,
    )  # fmt: skip
    LlamaForCausalLM(config).bfloat16().save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def begin(model: Path) -> Iterator[Callable[..., Engine]]:
    running: list[Engine] = []

    def start(settings: dict[str, Any], **arguments: Any) -> Engine:
        while running:
            running.pop().stop()
            gc.collect()
        running.append(Engine(settings, model=str(model), **COMMON, **arguments))
        return running[-1]

    yield start
    while running:
        running.pop().stop()


def agree(got: list[Result], want: list[Result], apart: int, bound: float) -> None:
    """At most so many requests part, and logits are within `bound` of each other until they do."""
    parted, worst = 0, 0.0
    for a, b in zip(got, want, strict=True):
        same = next((i for i, (x, y) in enumerate(zip(a.tokens, b.tokens, strict=True)) if x != y), len(a.tokens))
        parted += same < len(a.tokens)
        if a.logits is not None and b.logits is not None:
            n = min(same + 1, len(a.tokens))
            # of tokens that have a chance
            likely = b.logits[:n] > -8
            worst = max(worst, float((a.logits[:n] - b.logits[:n])[likely].abs().max()))
    print(f"{parted} of {len(want)} part; logits differ by {worst:.4f} at most")
    assert parted <= apart and worst <= bound


def captured(engine: Engine) -> int:
    runner = engine.core.model_executor.driver_worker.worker.model_runner
    assert runner.compilation_config.cudagraph_mode is CUDAGraphMode.FULL_DECODE_ONLY
    return len(runner.cudagraph_dispatcher.cudagraph_keys[CUDAGraphMode.FULL])


@pytest.fixture(scope="module")
def want(begin: Callable[..., Engine]) -> list[Result]:
    """Of the PyTorch reference, one request alone after another; and the kernels that are chosen here beside it in the same engine."""
    engine = begin(SETTINGS, async_scheduling=False, max_logprobs=VOCABULARY)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("KVSTRATA_BACKEND", "torch")
        reference = engine.alone(WORK, logits=True)
    print("alone, against the reference:", end=" ")
    agree(engine.alone(WORK, logits=True), reference, 3, 0.5)
    print("all at once:", end=" ")
    agree(engine.run(WORK, logits=True), reference, 3, 0.5)
    return reference


def test_graphs_replay_what_was_planned(begin: Callable[..., Engine], want: list[Result]) -> None:
    """A step ahead, with graphs of decoding: the engine as it runs by default."""
    engine = begin(SETTINGS, max_logprobs=VOCABULARY, **GRAPHS)
    assert engine.scheduler.scheduler_config.async_scheduling and captured(engine) == 5
    for wave in (WORK, WORK[::-1], WORK[::2] + WORK[1::2]):
        agree(engine.run(wave, logits=True), [want[WORK.index(item)] for item in wave], 4, 0.5)
    builder = builder_of(engine.core.model_executor.driver_worker.worker.model_runner)
    assert builder is not None and builder.planner.rows.workspace is not None


def test_preempted_and_resumed_with_graphs(begin: Callable[..., Engine]) -> None:
    small: dict[str, Any] = {
        "num_gpu_blocks_override": 150, "max_model_len": 512, "max_num_batched_tokens": 96, "scheduler_reserve_full_isl": False,
    }  # fmt: skip
    engine = begin(SETTINGS | {"window": 0}, **small, **GRAPHS)
    alone = engine.alone(GROWING)
    together = engine.run(GROWING)
    assert engine.seen.preempted > 3
    parted = sum(a != b for a, b in zip(tokens(together), tokens(alone), strict=True))
    print(f"{parted} of {len(GROWING)} part")
    assert parted <= 3
