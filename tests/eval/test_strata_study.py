"""The study's rows and tables; one small study on a tiny model, interrupted and continued."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from kvstrata.eval import strata_study as study
from kvstrata.eval.traces import Trace
from kvstrata.session import Session
from tests.eval.fakes import MESSAGES, TOOL, tiny_model


@pytest.fixture(scope="module")
def tokenizer(model_path: Callable[[str], Path]) -> Any:
    return AutoTokenizer.from_pretrained(model_path("smollm2"))


def test_every_row_is_a_setting_that_a_session_takes(tokenizer: Any) -> None:
    rows, model = study.make_rows("default"), tiny_model()
    assert len({r.label for r in rows}) == len(rows)
    for row in rows:
        Session(model, tokenizer, capacity_tokens=64, **row.setting.session_arguments())


def run(label: str, trace: str, kl: float, bits: float) -> dict[str, Any]:
    return {"group": "budgets", "label": label, "trace": trace, "tokens": 100, "bits": bits, "scored": 10, "kl": kl, "top1": 1.0,
            "call_tokens": 0, "call_kl": None, "call_top1": None, "fact_logp": [], "facts_hit": 0, "pages": {"2": 3}}  # fmt: skip


def test_verdicts_pool_conversations_and_say_met_or_missed() -> None:
    runs = [run("strata, 3", "a", 0.008, 2.9), run("strata, 3", "b", 0.012, 3.0), run("triaxial, 3", "a", 0.01, 3.0)]
    (line,) = study.verdicts(runs)
    assert line == "KL at most 0.011 at 3 bits: 0.0100 at 2.95, 2 conversations (from 0.0080 to 0.0120): met"
    runs += [run("triaxial, 3", "b", 0.03, 3.0), run("strata, 3.8", "a", 0.004, 3.8)]
    first, second = study.verdicts(runs)
    assert first.endswith("met; triaxial at the same budget 0.0200")
    assert second.endswith("MISSED")
    text = study.markdown({"model": "tiny", "runs": runs})
    assert "| strata, 3 | 2.95 | 0.0100 |" in text
    assert "strata, 3.8 (1 of 2 conversations)" in text


def test_an_interrupted_study_goes_on(tokenizer: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trace = Trace("one", [*MESSAGES[:1], {"role": "user", "content": "A line of the report. " * 40}, *MESSAGES[1:]], [TOOL])
    monkeypatch.setattr(study, "load", lambda name, device="cpu": (tiny_model(), tokenizer))
    monkeypatch.setattr(study, "load_traces", lambda source, count: type("Loaded", (), {"traces": (trace,)}))
    out = tmp_path / "strata"
    study.main(out, "tiny", "budgets", "0", "default", "strata, 3")
    study.main(out, "tiny", "budgets", "0", "default", "strata, 3;uniform, 3")
    data = json.loads(out.with_suffix(".json").read_text())
    assert [r["label"] for r in data["runs"]] == ["strata, 3", "uniform, 3"]
    assert abs(data["runs"][0]["kl"]) < 1e-3
    assert "strata, 3" in out.with_suffix(".md").read_text()
