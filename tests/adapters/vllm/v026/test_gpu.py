"""The plugin on a GPU: each call of its kernels inside the engine, with CUDA graphs and without, against the reference and float64.

Tokens are not compared. A code flips where two sums of the same numbers round otherwise, what follows then differs in more than rounding,
and a model of random weights makes other tokens of it: the reference parts from itself where its chunks are cut otherwise (docs/vllm.md).
"""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM
from vllm.config import CUDAGraphMode
from vllm.v1.worker.gpu_model_runner import GPUModelRunner

from kvstrata.adapters.vllm.v026.worker import builder_of
from kvstrata.types import Tier
from tests.adapters.vllm.shadow import MOVED, Seen, Shadow

from .engines import Engine, growing_work, mixed_work

pytestmark = pytest.mark.gpu
VOCABULARY = 2048
WORK = [*mixed_work(seed=3, vocabulary=VOCABULARY - 1), (list(range(100, 980)), 40)]
GROWING = growing_work(seed=4, vocabulary=VOCABULARY - 1)
SETTINGS: dict[str, Any] = {"policy": "uniform", "budget_bits": 8.0, "horizon": 512, "window": 64}
# those that share a prefix ask for the same, so that they share its pages
ASKED: list[dict[str, Any] | None] = [None, {"kvstrata_budget_bits": 4.0}, {"kvstrata_budget_bits": 3.0}, {"kvstrata_budget_bits": 6.0}]
EXTRA = [ASKED[i % 4] for i in range(10)] + [ASKED[0], ASKED[1], ASKED[1]]
# more requests decode at once than the largest graph has rows: those steps run without
GRAPHS: dict[str, Any] = {
    "enforce_eager": False,
    "compilation_config": {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY", "cudagraph_capture_sizes": [1, 2, 4, 8]},
}
COMMON: dict[str, Any] = {"dtype": "bfloat16", "skip_tokenizer_init": True, "gpu_memory_utilization": 0.2}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two layers of random weights at head_dim 128, four query heads a KV head. Attention is flat enough that each page counts."""
    folder = tmp_path_factory.mktemp("shape")
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=1024, intermediate_size=2048, num_hidden_layers=2, num_attention_heads=8, num_key_value_heads=2,
        head_dim=128, max_position_embeddings=4096, tie_word_embeddings=False, initializer_range=0.04, bos_token_id=1, eos_token_id=2,
    )  # fmt: skip
    LlamaForCausalLM(config).bfloat16().save_pretrained(folder)
    return folder


@pytest.fixture
def shadow(monkeypatch: pytest.MonkeyPatch) -> Shadow:
    shadow, forward = Shadow(monkeypatch), GPUModelRunner._model_forward

    def watched(*args: Any, **kwargs: Any) -> Any:
        out = forward(*args, **kwargs)
        shadow.after_step()
        return out

    monkeypatch.setattr(GPUModelRunner, "_model_forward", watched)
    return shadow


@pytest.fixture
def begin(model: Path, shadow: Shadow) -> Iterator[Callable[..., Engine]]:
    """An engine in the shadow, which counts what comes after the start."""
    running: list[Engine] = []

    def start(settings: dict[str, Any], **arguments: Any) -> Engine:
        running.append(Engine(settings, model=str(model), **COMMON, **arguments))
        shadow.seen = Seen()
        return running[-1]

    yield start
    while running:
        running.pop().stop()


def captured(engine: Engine) -> int:
    runner = engine.core.model_executor.driver_worker.worker.model_runner
    assert runner.compilation_config.cudagraph_mode is CUDAGraphMode.FULL_DECODE_ONLY
    return len(runner.cudagraph_dispatcher.cudagraph_keys[CUDAGraphMode.FULL])


def check(shadow: Shadow, kinds: list[str]) -> None:
    print(shadow.report())
    assert not shadow.wrong
    assert not [kind for kind in kinds if not shadow.seen.calls[kind]]
    assert shadow.seen.moved <= MOVED * shadow.seen.values


def test_as_it_runs_by_default(begin: Callable[..., Engine], shadow: Shadow) -> None:
    """A step ahead, with graphs of decoding."""
    engine = begin(SETTINGS, **GRAPHS)
    assert engine.scheduler.scheduler_config.async_scheduling
    assert captured(engine) == 4
    first = engine.run(WORK, extra=EXTRA)
    again = engine.run(WORK[::-1], extra=EXTRA[::-1])
    check(shadow, ["chunk", "chunk on pages", "decode and chunk", "decode", "replay", "settle"])
    assert shadow.seen.tiers == {Tier.BF16, Tier.INT8, Tier.INT4, Tier.INT3, Tier.INT2}
    # several blocks share a row's pages
    assert shadow.seen.most_shares > 3
    assert sum(r.found for r in again) > sum(r.found for r in first) > 0
    builder = builder_of(engine.core.model_executor.driver_worker.worker.model_runner)
    assert builder is not None and builder.planner.rows.workspace is not None


def test_preempted_and_resumed(begin: Callable[..., Engine], shadow: Shadow) -> None:
    small: dict[str, Any] = {
        "num_gpu_blocks_override": 150, "max_model_len": 512, "max_num_batched_tokens": 96, "scheduler_reserve_full_isl": False,
    }  # fmt: skip
    engine = begin(SETTINGS | {"budget_bits": 6.0, "window": 0}, **small, **GRAPHS)
    engine.run(GROWING)
    assert engine.seen.preempted > 3
    check(shadow, ["chunk on pages", "decode and chunk", "replay", "settle"])
