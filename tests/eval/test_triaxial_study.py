"""The study's rows, tables and files; one small study on a tiny model, interrupted and continued."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from kvstrata.eval import triaxial_study as study
from kvstrata.eval.results import Setting
from kvstrata.eval.traces import Question, Trace, recall
from kvstrata.session import Session
from kvstrata.types import Tier
from tests.eval.fakes import MESSAGES, TOOL, tiny_model

LONG = Trace("long_1", [*MESSAGES[:1], {"role": "user", "content": "A line of the report. " * 40}, *MESSAGES[1:]], [TOOL])


@pytest.fixture(scope="module")
def tokenizer(model_path: Callable[[str], Path]) -> Any:
    return AutoTokenizer.from_pretrained(model_path("smollm2"))


def test_every_row_is_a_setting_that_a_session_takes(tokenizer: Any) -> None:
    rows, model = study.make_rows("default", "default", {"default": "default"}), tiny_model()
    assert len({r.label for r in rows}) == len(rows)
    for row in rows:
        assert not row.needs or row.needs in [r.label for r in rows[: rows.index(row)]]
        if row.group != "scan":
            Session(model, tokenizer, capacity_tokens=64, **row.setting.session_arguments())


def test_an_interrupted_study_goes_on(tokenizer: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [
        study.Row("comparison", "uniform, 3.2", Setting(tier=Tier.INT3)),
        study.Row("comparison", "ours, 3.0", study.triaxial(None), needs="uniform, 3.2"),
        study.Row("comparison", "nothing to lean on", study.triaxial(None), needs="absent"),
    ]
    out, model = tmp_path / "study", tiny_model()
    data: dict[str, Any] = {"model": "tiny", "runs": [], "turns": []}
    plain, budgets = study.run, []

    def once(*args: Any) -> Any:
        monkeypatch.setattr(study, "run", stop)
        return plain(*args)

    def stop(*args: Any) -> Any:
        raise KeyboardInterrupt

    monkeypatch.setattr(study, "run", once)
    with pytest.raises(KeyboardInterrupt):
        study.study(model, tokenizer, LONG, rows, data, out)
    saved = json.loads(out.with_suffix(".json").read_text())
    assert [r["label"] for r in saved["runs"]] == ["uniform, 3.2"]

    def seen(model: Any, tokenizer: Any, setting: Setting, *rest: Any) -> Any:
        budgets.append(setting.budget_bits)
        return plain(model, tokenizer, setting, *rest)

    monkeypatch.setattr(study, "run", seen)
    study.study(model, tokenizer, LONG, rows, saved, out)
    done = json.loads(out.with_suffix(".json").read_text())["runs"]
    assert [r["label"] for r in done] == ["uniform, 3.2", "ours, 3.0"]
    # the second row was given the first one's bytes
    assert budgets == [done[0]["bits"]]
    table = out.with_suffix(".md").read_text()
    assert f"| ours, 3.0 | {done[1]['bits']:.2f} | {done[1]['kl']:.4f} |" in table


def test_pooling_weighs_tokens() -> None:
    def run(trace: str, scored: int, kl: float, calls: int) -> dict[str, Any]:
        called = {"call_kl": kl, "call_top1": 0.5} if calls else {"call_kl": None, "call_top1": None}
        return called | {
            "group": "comparison", "label": "ours, 3.0", "trace": trace, "tokens": 5000, "bits": 3.0, "scored": scored, "kl": kl,
            "top1": 1.0, "call_tokens": calls, "fact_logp": [], "facts_hit": 0,
        }  # fmt: skip

    both = study.pooled([run("a_0", 100, 0.01, 10), run("a_1", 300, 0.03, 0)])
    assert both["kl"] == pytest.approx(0.025)
    assert both["call_top1"] == 0.5
    lines = study.verdicts([run("a_0", 100, 0.01, 10), {**run("a_0", 100, 0.03, 10), "label": "uniform, 3.2"}])
    assert lines == [
        "ours, 3.0: KL at most half of uniform's at the same bytes: 0.0100 at 3.00 bits, uniform 0.0300 at 3.00 bits, ratio 0.33: met"
    ]
    missed = study.verdicts([run("a_0", 100, 0.02, 10), {**run("a_0", 100, 0.03, 10), "label": "uniform, 3.2"}])
    assert missed[0].endswith("ratio 0.67: MISSED")


def test_memory_is_cut_to_what_it_can_answer() -> None:
    told = [{"role": "user", "content": f"Fact {i}."} for i in range(100)]
    trace = Trace("memory_x", told, questions=tuple(Question("?", "a", source=f"Fact {i}.") for i in (2, 50, 7)))
    cut = study.memory(trace)
    assert len(cut.messages) == study.MEMORY_MESSAGES
    assert [q.source for q in cut.questions] == ["Fact 2.", "Fact 7."]


def test_bytes_of_old_turns_fall_as_the_conversation_ages(tokenizer: Any) -> None:
    trace = replace(recall(8), questions=())
    table = study.bytes_by_turn(tiny_model(), tokenizer, trace, study.triaxial(3.0))
    assert len(table) >= 8
    widths = [len(row) for row in table]
    assert widths == sorted(widths)
    first = max(range(len(table[-1])), key=lambda t: table[-1][t])
    history = [row[first] for row in table if len(row) > first]
    assert history[-1] <= max(history)
