"""Quality on a real model that low bits are known to ruin: Qwen2.5, whose keys have outlier channels."""

from collections.abc import Callable
from pathlib import Path

import pytest

from kvstrata.eval.evaluate import evaluate
from kvstrata.eval.models import load
from kvstrata.eval.results import Result, Setting
from kvstrata.eval.traces import load_traces
from kvstrata.types import Tier

EXAMPLES = Path(__file__).parents[1] / "examples"
SETTINGS = (
    Setting("full", dense_dtype="float32"),
    *(Setting(tier=t) for t in (Tier.INT4, Tier.INT3, Tier.INT2)),
    Setting(tier=Tier.INT4, codec="triaxial"),
    Setting(tier=Tier.INT2, codec="kivi"),
    Setting("role"),
)


@pytest.fixture(scope="module")
def results(model_path: Callable[[str], Path]) -> dict[str, Result]:
    """A real agent conversation: its prefix stored once, the last 400 tokens scored against the uncompressed cache."""
    model, tokenizer = load(model_path("qwen05"))
    traces = load_traces(str(EXAMPLES / "agent.jsonl")).traces
    done = evaluate(model, tokenizer, traces, SETTINGS, name="qwen05", protocol="oneshot", needles=0)
    assert done.errors == ()
    return {r.label: r for r in done.results}


def test_quantized_cache_ruins_qwen(results: dict[str, Result]) -> None:
    """The planes codec does not; INT4 with K per token, as published, does."""
    assert results["full"].kl_mean < 1e-5
    assert results["uniform INT4"].kl_mean < 0.008
    assert results["uniform INT3"].kl_mean < 0.02
    assert results["uniform INT2"].kl_mean < 0.1
    assert results["triaxial INT4"].kl_mean > 0.2
    assert results["kivi INT2"].kl_mean > results["uniform INT2"].kl_mean
    assert results["kivi INT2"].bits_per_element > results["uniform INT2"].bits_per_element


def test_quantized_cache_breaks_tool_calls(results: dict[str, Result]) -> None:
    """Tokens of tool calls keep the model's choice at every tier that protects them."""
    for label in ("uniform INT4", "role"):
        assert results[label].tool_call_top1 >= 0.97, label
    assert results["uniform INT3"].tool_call_top1 >= 0.95
    assert results["uniform INT2"].tool_call_top1 >= 0.9
