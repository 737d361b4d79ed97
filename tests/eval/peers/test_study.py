"""The comparison's rows and tables; a small study on a tiny model, interrupted and continued, with a peer that is not there."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from kvstrata.eval import peers_study as study
from kvstrata.eval.peers import compare, need
from kvstrata.eval.peers.rows import BITS, GROUPS, make_rows
from kvstrata.eval.results import Setting
from kvstrata.eval.traces import Trace
from kvstrata.session import Session
from tests.eval.fakes import MESSAGES, TOOL, tiny_model


@pytest.fixture(scope="module")
def tokenizer(model_path: Callable[[str], Path]) -> Any:
    return AutoTokenizer.from_pretrained(model_path("smollm2"))


def test_every_row_is_there_once_and_ours_are_settings_that_a_session_takes(tokenizer: Any) -> None:
    rows, model = make_rows("qwen15", "default"), tiny_model()
    assert len({r.label for r in rows}) == len(rows)
    assert tuple(dict.fromkeys(r.group for r in rows)) == GROUPS
    for row in rows:
        assert "oneshot" in row.protocols
        if isinstance(row.how, Setting):
            Session(model, tokenizer, capacity_tokens=64, **row.how.session_arguments())
    # what is masked is held, and said to be
    assert {r.masked for r in rows if r.family.startswith("AdaKV")} == {1 - 3 / 16, 1 - 5.4 / 16}


def run(group: str, family: str, label: str, trace: str, bits: float, kl: float, **more: Any) -> dict[str, Any]:
    return {"group": group, "family": family, "label": label, "trace": trace, "tokens": 100, "bits": bits, "held": bits, "scored": 10,
            "kl": kl, "top1": 1.0, "call_tokens": 5, "call_kl": kl, "call_top1": 0.9, "fact_logp": [-1.0, -3.0], "facts_hit": 1,
            "masked": 0.0, "protocol": "oneshot", "source": "here"} | more  # fmt: skip


def test_verdicts_compare_with_the_best_that_takes_no_more_bits() -> None:
    runs = [
        run("ours", "strata", "strata, 3", "a", 3.0, 0.01), run("ours", "strata", "strata, 3", "b", 2.9, 0.03),
        run("quantizers", "quanto", "quanto int2", "a", 2.5, 0.2), run("quantizers", "quanto", "quanto int2", "b", 2.5, 0.4),
        run("formats", "FP8", "FP8", "a", 8.0, 0.001), run("formats", "FP8", "FP8", "b", 8.0, 0.001),
        run("eviction", "H2O", "H2O, 3", "a", 3.0, 0.001),
    ]  # fmt: skip
    rows = compare.pools(runs)
    assert [r["label"] for r in rows] == ["strata, 3", "quanto int2", "FP8", "H2O, 3 (1 of 2 conversations)"]
    lines = compare.verdicts([r for r in rows if r["family"] != "H2O"], "bits")
    assert lines[0] == "3 bits: KL 0.0200 (strata, 3), best peer 0.3000 (quanto int2): 15.0 times lower, 4 wanted: met"
    assert lines[1] == "3 bits: tool-call top-1 0.900, best peer 0.900 (quanto int2): met"
    assert lines[2].startswith("3 bits: facts' log p -2.000, best peer -2.000")
    # three bits are no answer to what is done with eight
    assert not any(line.startswith("8 bits") for line in lines)
    eight = compare.pools([*runs, run("ours", "strata", "strata, 8", "a", 7.0, 0.01), run("ours", "strata", "strata, 8", "b", 7.0, 0.01)])
    (line,) = [line for line in compare.verdicts(eight, "bits") if line.startswith("8 bits: KL")]
    assert line == "8 bits: KL 0.0100 (strata, 8), best peer 0.0010 (FP8): 0.1 times lower, 1 wanted: MISSED"
    held = [r | {"held": r["bits"] + 0.8 * (r["group"] == "ours")} for r in rows]
    assert not any(line.startswith("3 bits") for line in compare.verdicts(held, "held"))
    text = study.markdown({"model": "tiny", "runs": runs, "missing": {"TOVA": "not here"}})
    assert "| strata, 3 | 2.95 | 2.95 | 0.0200 |" in text
    assert "- Not run: TOVA: not here" in text
    # what ran after all is not said to be missing
    assert "Not run" not in study.markdown({"model": "tiny", "runs": runs, "missing": {"FP8": "not here"}})


def test_an_interrupted_study_goes_on_and_names_what_is_not_installed(
    tokenizer: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    trace = Trace("one", [*MESSAGES[:1], {"role": "user", "content": "A line of the report. " * 60}, *MESSAGES[1:]], [TOOL])
    monkeypatch.setattr(study, "load", lambda name, device: (tiny_model(), tokenizer))
    monkeypatch.setattr(study, "load_traces", lambda source, count: type("Loaded", (), {"traces": (trace,)}))
    monkeypatch.setitem(need.REQUIREMENTS, "kvpress_that_is_not_there", "kvpress==9")
    monkeypatch.setattr("kvstrata.eval.peers.presses.need", lambda name: need.need("kvpress_that_is_not_there"))
    out = tmp_path / "peers"

    def go(only: str) -> dict[str, Any]:
        study.main(out, "tiny", "here", "0", "oneshot", ",".join(GROUPS), only, "default", 2)
        return json.loads(out.with_suffix(".json").read_text())

    first = go("strata, 8;FP8;SnapKV, 8")
    assert [r["label"] for r in first["runs"]] == ["strata, 8", "FP8"]
    assert list(first["missing"]) == ["SnapKV"]
    assert "kvpress==9 is needed" in first["missing"]["SnapKV"]
    second = go("strata, 8;FP8;INT8 by token;planes INT4")
    assert [r["label"] for r in second["runs"]] == ["strata, 8", "FP8", "planes INT4", "INT8 by token"]
    assert second["runs"][:2] == first["runs"]
    ours, fp8, _, int8 = second["runs"]
    assert fp8["bits"] == pytest.approx(8.0, rel=1e-3)
    assert fp8["end_bits"] == pytest.approx(8.0, rel=1e-3)
    assert int8["bits"] == pytest.approx(8.5)
    assert 0 < int8["kl"] < fp8["kl"]
    assert len(ours["fact_logp"]) == 2
    # the newest queries, by which pages are weighed, are held besides
    assert ours["held"] > ours["bits"]
    assert "Not run: SnapKV" in out.with_suffix(".md").read_text()
    assert "SnapKV, 8: kvpress==9" in capsys.readouterr().out


def test_turns_are_run_by_those_whose_code_permits_them(tokenizer: Any) -> None:
    trace = Trace("one", [*MESSAGES[:1], {"role": "user", "content": "A line of the report. " * 60}, *MESSAGES[1:]], [TOOL])
    rows = [r for r in make_rows("tiny", "default") if r.label in ("planes INT4", "HQQ int4, as the class has it", "FP8")]
    model = tiny_model()
    done = {}
    for row in rows:
        if "turns" in row.protocols:
            ((_, done[row.label]),) = compare.compared(model, tokenizer, trace, "here", [row], "turns", 0)
    assert set(done) == {"planes INT4", "HQQ int4, as the class has it"}
    for got in done.values():
        assert isinstance(got, dict), got
        assert 0 < got["kl"] < 0.01
        # of the whole context: of what comes last, HQQ keeps less than its residual of 128 tokens dense
        assert 4.5 < got["bits"] < 4.5 + 11.5 * 140 / got["tokens"] + 2
        assert got["fact_logp"] == []


def test_targets_are_those_that_the_verdicts_have() -> None:
    assert set(BITS) == set(compare.TIMES)
