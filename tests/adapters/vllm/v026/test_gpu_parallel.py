"""Two GPUs: the tokens of one, in float32 through the PyTorch reference. In bfloat16, with the kernels, their graphs and a step ahead,
rounding parts tokens (test_gpu.py): there the first token's logits, beside the noise of cutting chunks otherwise."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from .engines import Engine, Result, tokens
from .test_gpu import COMMON, GRAPHS, VOCABULARY
from .test_gpu import WORK as ALL

# tensor parallelism takes as many devices as ranks
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(torch.cuda.device_count() < 2, reason="two ranks need two GPUs")]
WORK = ALL[:8]
SETTINGS: dict[str, Any] = {"policy": "uniform", "budget_bits": 5.0, "horizon": 1024}
TWO: dict[str, Any] = {"tensor_parallel_size": 2, "distributed_executor_backend": "mp", "disable_custom_all_reduce": True}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two layers of random weights whose attention is peaked enough that greedy tokens are no coin tosses in float32 (conftest.py)."""
    folder = tmp_path_factory.mktemp("peaked")
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=128, intermediate_size=256, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        head_dim=64, max_position_embeddings=4096, tie_word_embeddings=False, initializer_range=0.08, bos_token_id=1, eos_token_id=2,
    )  # fmt: skip
    model = LlamaForCausalLM(config).float()
    with torch.no_grad():
        for name, p in model.named_parameters():
            if "q_proj" in name or "k_proj" in name:
                p.mul_(3)
    model.save_pretrained(folder)
    return folder


@pytest.fixture
def start(model: Path) -> Iterator[Callable[..., Engine]]:
    running: list[Engine] = []

    def begin(settings: dict[str, Any], **arguments: Any) -> Engine:
        while running:
            running.pop().stop()
        running.append(Engine(settings, **{"model": str(model), **COMMON, "max_logprobs": VOCABULARY, **arguments}))
        return running[-1]

    yield begin
    while running:
        running.pop().stop()


def test_two_gpus_give_the_tokens_of_one(start: Callable[..., Engine], monkeypatch: pytest.MonkeyPatch) -> None:
    """Hits, and pages that gave up planes, among them."""
    monkeypatch.setenv("KVSTRATA_BACKEND", "torch")
    seen = []
    for parallel in ({}, TWO):
        settings = SETTINGS | {"dense_dtype": "float32", "ageing": "INT2"}
        engine = start(settings, dtype="float32", async_scheduling=False, num_gpu_blocks_override=300, **parallel)
        waves = [engine.run(wave) for wave in (WORK, WORK[::-1])]
        cached = engine.scheduler.frames.cached
        assert cached.demoted > 0
        seen.append(([tokens(w) for w in waves], [[r.found for r in w] for w in waves], cached.demoted, cached.dropped))
    assert seen[0] == seen[1]


def test_kernels_of_two_ranks_are_within_the_noise_of_one(start: Callable[..., Engine]) -> None:
    first = [(ids, 1) for ids, _ in WORK]
    one = start(SETTINGS, **GRAPHS).run(first, logits=True)
    cut = start(SETTINGS, max_num_batched_tokens=96, **GRAPHS).run(first, logits=True)
    engine = start(SETTINGS, **TWO, **GRAPHS)
    two = engine.run(first, logits=True)
    noise, difference = apart(cut, one), apart(two, one)
    print(f"two ranks differ from one by {difference:.3f}, one from itself by {noise:.3f}")
    assert [r.found for r in two] == [r.found for r in one] and difference < 3 * noise
    # steps of decoding, in graphs
    assert all(len(r.tokens) == n for r, (_, n) in zip(engine.run(WORK), WORK, strict=True))


def apart(a: list[Result], b: list[Result]) -> float:
    pairs = [(x.logits, y.logits) for x, y in zip(a, b, strict=True)]
    return max(float((x - y)[y > -8].abs().max()) for x, y in pairs if x is not None and y is not None)
