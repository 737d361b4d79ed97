"""Why test_gpu.py compares calls and not tokens: in 16 bits the reference parts from itself where nothing but rounding differs."""

import gc
from pathlib import Path

import pytest
import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from kvstrata.adapters.vllm.attention import LayerAttention, StepPlan

from .engines import Engine, Result, mixed_work

WORK = [(ids[:200], 24) for ids, _ in mixed_work(seed=3, vocabulary=2047)[:4]]
SETTINGS = {"policy": "uniform", "budget_bits": 4.0, "horizon": 512, "window": 64}


@pytest.mark.parametrize("spread", [0.04, 0.08])
def test_requests_part_where_the_same_sums_round_otherwise(spread: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=2048, hidden_size=1024, intermediate_size=2048, num_hidden_layers=2, num_attention_heads=8, num_key_value_heads=2,
        head_dim=128, max_position_embeddings=4096, tie_word_embeddings=False, initializer_range=spread, bos_token_id=1, eos_token_id=2,
    )  # fmt: skip
    LlamaForCausalLM(config).bfloat16().save_pretrained(tmp_path)
    engine = Engine(SETTINGS, model=str(tmp_path), dtype="bfloat16", skip_tokenizer_init=True, max_logprobs=2048)
    try:
        want = engine.alone(WORK, logits=True)
        assert apart(engine.alone(WORK, logits=True), want) == (0, 0.0)
        forward, noise = LayerAttention.forward, torch.Generator().manual_seed(1)

        def noisy(layer: LayerAttention, arena: Tensor, plan: StepPlan, q: Tensor, k: Tensor, v: Tensor, out: Tensor) -> None:
            """What products of numbers in bfloat16 do to a sum: half of its last bit."""
            forward(layer, arena, plan, q, k, v, out)
            out.copy_(out.float() * (1 + 2**-10 * torch.randn(out.shape, generator=noise)))

        monkeypatch.setattr(LayerAttention, "forward", noisy)
        parted, difference = apart(engine.alone(WORK, logits=True), want)
    finally:
        engine.stop()
        gc.collect()
    print(f"weights of {spread}: {parted} of {len(WORK)} part; logits differ by {difference:.2f} at most until then")
    assert parted > len(WORK) // 2 and difference > 0.1


def apart(got: list[Result], want: list[Result]) -> tuple[int, float]:
    """Requests whose tokens part, and the largest difference of a likely token's logit until they do."""
    parted, worst = 0, 0.0
    for a, b in zip(got, want, strict=True):
        assert a.logits is not None and b.logits is not None
        same = next((i for i, (x, y) in enumerate(zip(a.tokens, b.tokens, strict=True)) if x != y), len(a.tokens))
        parted += same < len(a.tokens)
        rows = slice(0, min(same + 1, len(a.tokens)))
        worst = max(worst, float((a.logits[rows] - b.logits[rows])[b.logits[rows] > -8].abs().max()))
    return parted, worst
