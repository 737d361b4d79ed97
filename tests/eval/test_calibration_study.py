"""What a calibration study compares: tables, plans, and one small study from end to end on a tiny model."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import typer
from transformers import AutoTokenizer

from kvstrata.eval import calibration_study as study
from kvstrata.eval.conversation import render
from kvstrata.eval.traces import Trace, to_json
from kvstrata.policy.profile import load_profile
from kvstrata.types import Tier
from tests.eval.fakes import MESSAGES, TOOL, tiny_model


@pytest.fixture(scope="module")
def tokenizer(model_path: Callable[[str], Path]) -> Any:
    return AutoTokenizer.from_pretrained(model_path("smollm2"))


def trace(i: int) -> Trace:
    return Trace(f"t{i}", [MESSAGES[0], {"role": "user", "content": f"Line {i} of the report. " * 60}, *MESSAGES[1:]], [TOOL])


def test_a_table_times_a_constant_is_no_change_and_a_known_factor_is_found() -> None:
    p = load_profile("qwen05")
    scaled = replace(p, loss={m: x * 7 for m, x in p.loss.items()})
    change = study.table_change(scaled, p)
    assert change["factor"] == pytest.approx(1, abs=1e-6)
    assert change["correlation"] == pytest.approx(1)
    # what every tag but one kept, that one lost tenfold: an rms over n tags, less the common scale
    assert study.table_change(load_profile("smollm2"), p)["factor"] > 1.1


def test_moved_pages_are_counted_by_hand(tokenizer: Any) -> None:
    conversation = render(tokenizer, trace(0))
    pages = -(-len(conversation) // 32)
    one, other = [Tier.INT2] * pages, [Tier.INT2] * (pages - 1) + [Tier.INT4]
    change = study.plan_change(conversation, one, other)
    assert (change["pages"], change["moved"]) == (pages, 1)
    assert sum(t["tokens"] for t in change["tags"]) == len(conversation)
    # mean tiers, weighed by tokens, are those of the plans
    tokens = [32] * (pages - 1) + [len(conversation) - 32 * (pages - 1)]
    for key, tiers in (("tier", one), ("last", other)):
        mean = sum(t["tokens"] * t[key] for t in change["tags"]) / len(conversation)
        assert mean == pytest.approx(np.average([int(t) for t in tiers], weights=tokens))


def test_a_study_from_end_to_end_and_again(tokenizer: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source, out = tmp_path / "source.jsonl", tmp_path / "calibration"
    source.write_text("".join(to_json(trace(i)) + "\n" for i in range(4)))
    monkeypatch.setattr(study, "load", lambda name, device="cpu": (tiny_model(), tokenizer))
    monkeypatch.setattr(study, "BITS", 16.0)

    def main(**changes: Any) -> dict[str, Any]:
        arguments = {"model": "tiny", "source": str(source), "skip": 1, "counts": "1,2", "judged": "0", "also": ["shipped=smollm2"]}
        study.main(out, **arguments | {"only": "1,2", "work": tmp_path / "work"} | changes)
        return dict(json.loads(out.with_suffix(".json").read_text()))

    first = main()
    assert [(p["label"], p["conversations"]) for p in first["profiles"]] == [("shipped", 3), ("1", 1), ("2", 2)]
    assert first["profiles"][-1]["factor"] == pytest.approx(1)
    assert first["profiles"][-1]["plans"][0]["moved"] == 0
    assert sorted(r["label"] for r in first["runs"]) == ["1", "2"]
    table = out.with_suffix(".md").read_text()
    for p in first["profiles"]:
        assert f"| {p['label']} | {p['conversations']} | {p['window']} |" in table
    # nothing is measured or run again, and more conversations add to what there is
    monkeypatch.setattr(study, "run", lambda *a: pytest.fail("run again"))
    more = main(counts="1,2,3")
    assert more["runs"] == first["runs"]
    assert [p["label"] for p in more["profiles"]] == ["shipped", "1", "2", "3"]
    with pytest.raises(ValueError, match="3 conversations can be read; 9 are needed"):
        main(counts="9")
    with pytest.raises(typer.BadParameter, match="must ascend"):
        main(counts="2,1")
