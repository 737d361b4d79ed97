"""Settings on conversations with real sessions and a tiny model, and one check on SmolLM2."""

import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoTokenizer

from kvstrata.eval.conversation import render
from kvstrata.eval.evaluate import evaluate, run
from kvstrata.eval.figures import gates, markdown
from kvstrata.eval.models import load
from kvstrata.eval.protocols import PROTOCOLS, make_task, run_reference
from kvstrata.eval.results import Setting, summarize
from kvstrata.eval.traces import Question, Trace, load_traces, recall
from kvstrata.types import Tier
from tests.eval.fakes import MESSAGES, TOOL, tiny_model

FULL, INT2 = Setting("full", dense_dtype="float32"), Setting(tier=Tier.INT2)
LONG = Trace("long", [*MESSAGES[:1], {"role": "user", "content": "A line of the report. " * 40}, *MESSAGES[1:]], [TOOL])


@pytest.fixture(scope="module")
def tokenizer(model_path: Callable[[str], Path]) -> Any:
    return AutoTokenizer.from_pretrained(model_path("smollm2"))


@pytest.fixture(scope="module")
def model() -> Any:
    return tiny_model()


def test_full_loses_nothing_and_planes_lose_something(tokenizer: Any, model: Any) -> None:
    done = evaluate(model, tokenizer, [LONG], [FULL, INT2], name="tiny", needles=0)
    assert done.errors == ()
    full, int2 = done.results
    assert full.kl_mean < 1e-5
    assert full.top1 == 1
    assert 1e-9 < int2.kl_mean < 1
    # float32 pages against planes, the sink page and a window
    assert 32 <= full.bits_per_element < 35
    assert int2.bits_per_element < full.bits_per_element / 2
    assert int2.bytes_per_token == pytest.approx(int2.bits_per_element / 8 * 2 * 64 * 2)
    assert 0 < int2.reuse < 1
    assert int2.needles == 0
    assert np.isnan(int2.needle_logp)


def test_a_replayed_first_chunk_changes_nothing(tokenizer: Any, model: Any) -> None:
    task = make_task("turns", render(tokenizer, LONG))
    reference = run_reference(model, task)
    assert reference.prefill is not None
    replayed = run(model, tokenizer, INT2, task, reference)
    plain = run(model, tokenizer, INT2, task, type(reference)(reference.log_probs, None, 0.0))
    np.testing.assert_allclose(replayed.scores.kl, plain.scores.kl, atol=1e-6)
    assert replayed.page_tiers == plain.page_tiers
    assert replayed.turns == plain.turns
    assert "forward" not in vars(model)


def test_json_has_the_documented_keys(tokenizer: Any, model: Any) -> None:
    done = evaluate(model, tokenizer, [LONG], [INT2], name="tiny", protocol="oneshot", needles=2)
    record = done.results[0].to_dict()
    assert list(record) == [
        "model", "policy", "tier", "codec", "budget_bits", "protocol", "dense_dtype", "tokens", "bits_per_element", "bytes_per_token",
        "peak_bytes", "kl_mean", "kl_p95", "top1", "nll_delta", "tool_call_top1", "tool_call_kl", "needle_hits", "needles", "needle_logp",
        "reuse", "seconds",
    ]  # fmt: skip
    assert record["needles"] == 2
    assert record["needle_logp"] < -20
    assert record["tier"] == "INT2"
    # the session's own choice is recorded
    assert record["dense_dtype"] == "bfloat16"


def test_a_conversation_that_cannot_run_is_named_and_the_others_run(tokenizer: Any, model: Any) -> None:
    huge = Trace("huge", [{"role": "user", "content": "word " * 5000}, *MESSAGES])
    done = evaluate(model, tokenizer, [huge, LONG], [FULL], name="tiny", needles=0)
    assert [e.split(":")[0] for e in done.errors] == ["trace huge"]
    assert "the model takes 4096" in done.errors[0]
    assert len(done.results[0].outcomes) == 1


def test_settings_are_judged_on_the_same_conversations(tokenizer: Any, model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def run_short_of_memory(model: Any, tokenizer: Any, setting: Setting, task: Any, reference: Any) -> Any:
        if setting is INT2 and task.conversation.id == "first":
            raise RuntimeError("out of memory")
        return run(model, tokenizer, setting, task, reference)

    monkeypatch.setattr("kvstrata.eval.evaluate.run", run_short_of_memory)
    traces = [replace(LONG, id="first"), LONG]
    done = evaluate(model, tokenizer, traces, [FULL, INT2], name="tiny", needles=1)
    assert done.errors == ("trace first: out of memory",)
    assert [len(r.outcomes) for r in done.results] == [1, 1]
    assert [r.needles for r in done.results] == [1, 1]


def test_own_questions_take_the_place_of_planted_facts(tokenizer: Any, model: Any) -> None:
    trace = Trace("q", MESSAGES, [TOOL], (Question("Which folder?", "documents", source="documents"),))
    done = evaluate(model, tokenizer, [trace, recall(4)], [FULL], name="tiny", needles=5)
    assert done.errors == ()
    assert [n.answer for n in done.results[0].facts] == ["documents", *(q.answer for q in recall(4).questions)]
    assert all(0 < n.depth < 1 for n in done.results[0].facts)


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_questions_in_the_middle_are_judged_too(protocol: str, tokenizer: Any, model: Any) -> None:
    # oneshot asks them at the end
    questions = (Question("Which folder?", "documents", source="documents", at=5), Question("Where?", "here", source="documents"))
    done = evaluate(model, tokenizer, [Trace("q", MESSAGES, [TOOL], questions)], [FULL], name="tiny", protocol=protocol)
    assert done.errors == ()
    (outcome,), facts = done.results[0].outcomes, done.results[0].facts
    assert [n.answer for n in facts] == ["documents", "here"]
    assert all(n.log_p < -1 for n in facts) and outcome.scores.kl_mean < 1e-5


def test_settings_that_exclude_each_other_are_refused() -> None:
    with pytest.raises(ValueError, match="exclude each other"):
        Setting(tier=Tier.INT4, budget_bits=3)
    for bits in (0, -1, float("nan"), float("inf")):
        with pytest.raises(ValueError, match="budget_bits is"):
            Setting(budget_bits=bits)


def test_figures_show_every_setting_and_gate(tokenizer: Any, model: Any) -> None:
    done = evaluate(model, tokenizer, [LONG], [FULL, INT2, Setting(tier=Tier.INT2, codec="kivi")], name="tiny", needles=0)
    text = markdown("tiny", "here", {"turns": done.results})
    names = [line.split("|")[1].strip() for line in text.splitlines() if line.startswith("| ")]
    assert names == ["setting", "full", "uniform INT2", "kivi INT2"]
    lines = gates(done.results)
    assert len(lines) == 2
    assert lines[0].startswith("full: KL 0 (at most 1e-05) at 3")
    # a short conversation is mostly window
    assert lines[1].endswith("MISSED")
    twice = markdown("tiny", "here", {"turns": [summarize("tiny", INT2, "turns", done.results[1].outcomes * 2, ())]})
    assert re.search(r"Conversations of (\d+), \1 tokens", twice)


def test_smollm2_remembers_at_int4_what_it_is_told(model_path: Callable[[str], Path]) -> None:
    loaded, tokenizer = load(model_path("smollm2"), torch.float32)
    settings = [FULL, Setting(tier=Tier.INT4), Setting("window", options=(("recent", 64),))]
    done = evaluate(loaded, tokenizer, load_traces("recall:9").traces, settings, name="smollm2", protocol="oneshot")
    full, int4, window = done.results
    assert full.kl_mean < 1e-5
    assert int4.kl_mean < 0.02
    assert full.needles == 3
    # chance is about -9 nats for four digits
    assert full.needle_logp > -3
    assert abs(int4.needle_logp - full.needle_logp) < 1
    # eviction forgets what was told first
    assert window.needle_logp < full.needle_logp - 3
