"""The study's rows, measures and files; small studies on a tiny model, interrupted and continued."""

import itertools
import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import AutoTokenizer

from kvstrata.adapters.capture import captured
from kvstrata.eval import intent_study as study
from kvstrata.eval.conversation import Conversation
from kvstrata.eval.protocols import run_reference
from kvstrata.eval.research import without_evidence
from kvstrata.eval.results import Setting
from kvstrata.eval.traces import Trace, load_traces
from kvstrata.policy import POLICIES
from kvstrata.session import Session
from tests.eval.fakes import tiny_model

EXACT = study.Row("budget", study.FULL, Setting("full", dense_dtype="float32"))
NEWEST = study.Row("budget", "newest 512", Setting("window", options=(("recent", 512),)))


@pytest.fixture(scope="module")
def tokenizer(model_path: Callable[[str], Path]) -> Any:
    return AutoTokenizer.from_pretrained(model_path("smollm2"))


@pytest.fixture(scope="module")
def trace() -> Trace:
    return load_traces("research:student:3000").traces[0]


def test_every_row_is_a_setting_that_a_session_takes(tokenizer: Any) -> None:
    rows, model = study.make_rows("head.safetensors"), tiny_model()
    assert len({r.label for r in rows}) == len(rows)
    assert {r.group for r in rows} == set(study.GROUPS)
    assert rows[0].label == study.FULL and len([r for r in rows if r.group == "budget"]) == 1 + 3 * 6
    for row in rows:
        known = row.setting.policy in POLICIES
        assert known or row.setting.policy in (study.OURS, *study.BASELINES)
        # a head is a file, which is not here
        if known and "residual" not in dict(row.setting.options):
            Session(model, tokenizer, capacity_tokens=64, **row.setting.session_arguments())


def test_an_interrupted_study_goes_on(tokenizer: Any, trace: Trace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out, model = tmp_path / "study", tiny_model()
    plain = study.run_row
    data: dict[str, Any] = {"model": "tiny", "runs": []}
    rows = [
        EXACT,
        study.Row("budget", "later", Setting("not_written_yet")),
        NEWEST,
        study.Row("control", study.CONTROL, EXACT.setting, False),
    ]

    def once(*args: Any) -> Any:
        monkeypatch.setattr(study, "run_row", stop)
        return plain(*args)

    def stop(*args: Any) -> Any:
        raise KeyboardInterrupt

    monkeypatch.setattr(study, "run_row", once)
    with pytest.raises(KeyboardInterrupt):
        study.study(model, tokenizer, trace, rows, "oneshot", data, out)
    saved = json.loads(out.with_suffix(".json").read_text())
    assert [r["label"] for r in saved["runs"]] == [study.FULL]
    monkeypatch.setattr(study, "run_row", plain)
    study.study(model, tokenizer, trace, rows, "oneshot", saved, out)
    text = out.with_suffix(".json").read_text()
    runs = {r["label"]: r for r in json.loads(text)["runs"]}
    assert list(runs) == [study.FULL, "newest 512", study.CONTROL]
    full, newest, control = runs.values()
    questions = len(trace.questions)
    assert full["kl"] < 1e-5 < newest["kl"]
    assert full["peak_tokens"] > newest["peak_tokens"] > 512 and full["peak_bytes"] > newest["peak_bytes"]
    assert full["kv_read"] > newest["kv_read"] > 0
    assert len(full["fact_logp"]) == len(full["hits"]) == len(full["answers"]) == questions
    assert control["trace"] == without_evidence(trace).id and control["tokens"] < full["tokens"]
    table = out.with_suffix(".md").read_text()
    assert "## oneshot, 3000 tokens: budget" in table and "## oneshot, 3000 tokens: control" in table
    assert (
        f"| newest 512 | 1 | {newest['facts_hit']}/{questions} | {sum(newest['fact_logp']) / questions:.2f} | - | {newest['kl']:.4f} |"
        in table
    )
    study.study(model, tokenizer, trace, rows, "oneshot", json.loads(text), out)
    assert out.with_suffix(".json").read_text() == text


def test_in_turns_an_answer_is_a_step_of_its_own(tokenizer: Any, trace: Trace) -> None:
    model = tiny_model()
    task = study.research_task(tokenizer, trace, "turns")
    ends = [0, *task.chunks]
    assert all(any(start < a.start < end for start, end in task.conversation.replies) for a in task.asked)
    steps = list(itertools.pairwise(ends))
    assert all((start, end) in steps for start, end in task.conversation.replies)
    run = study.run_row(model, tokenizer, EXACT, "turns", task, run_reference(model, task))
    assert run["kl"] < 1e-5
    assert run["fed"] == sum(task.chunks) and run["reused"] == sum(task.chunks[:-1])
    assert run["peak_tokens"] == len(task.conversation)


def test_a_session_answers_as_generate_does(tokenizer: Any, trace: Trace) -> None:
    model = tiny_model()
    task = study.research_task(tokenizer, trace, "oneshot")
    with Session(model, tokenizer, "full", capacity_tokens=4000) as session:
        session.feed(task.conversation.token_ids, task.conversation.spans, logits_to_keep=1)
        told = study.generated(session, tokenizer, task, 4)
    assert len(told) == len(task.asked)
    for a, text in ((task.asked[0], told[0]), (task.asked[-1], told[-1])):
        ids = torch.tensor([task.conversation.token_ids[: a.start]])
        out = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=4, do_sample=False)[0, a.start :]
        assert text == tokenizer.decode(out, skip_special_tokens=True)


def test_a_prefill_keeps_as_many_queries_as_are_wanted(tokenizer: Any, trace: Trace) -> None:
    model, seen = tiny_model(), {}
    task = study.research_task(tokenizer, trace, "oneshot")
    end = task.chunks[0]
    with captured(model, lambda layer, q, k, v, scale: seen.update({layer: q.clone()})), torch.inference_mode():
        model(torch.tensor([task.conversation.token_ids[:end]]), logits_to_keep=1)
    for wanted, count in ((len(task.conversation), end), (100, 100)):
        prefill = run_reference(model, task, queries=wanted).prefill
        assert prefill is not None
        for layer, q in enumerate(prefill.queries):
            assert q.shape[1] == count
            torch.testing.assert_close(q, seen[layer][:, -count:])


def test_what_a_reply_says() -> None:
    assert study.says(" 'The Infinity Courts' by", "The Infinity Courts") and study.says("maine.", "Maine")
    assert not study.says("in Maine", "Maine")


def test_bytes_read_count_a_prompt_once_and_each_token_of_a_reply() -> None:
    conversation = Conversation("c", [0] * 20, (), ((4, 7), (12, 15)), "", ())
    reports: Any = [SimpleNamespace(bytes_stored=n) for n in (10, 100, 1000, 10000, 7)]
    # prompt, reply of three, prompt, reply of three and its newline, prompt
    assert study.kv_read(conversation, (4, 7, 12, 16, 20), reports) == 10 + 3 * 100 + 1000 + 4 * 10000 + 7
    # the first step is one prefill; of the second, a prompt and three replied
    assert study.kv_read(conversation, (8, 15), reports[:2]) == 10 + 4 * 100


def test_verdicts_compare_the_same_conversations() -> None:
    def run(label: str, hits: int, trace: str = "research_a_9", reused: int = 80, logp: float = -1.0) -> dict[str, Any]:
        return {
            "protocol": "oneshot", "label": label, "trace": trace, "facts_hit": hits, "fact_logp": [logp] * 10, "reused": reused,
            "fed": 100,
        }  # fmt: skip

    ours = study.name_of(study.OURS, study.MAIN)
    runs = [run(study.FULL, 10), run(ours, 9), run("snapkv 25%", 8), run("streaming 25%", 9), run("streaming 25%", 0, "research_b_9")]
    runs.append(run(f"{ours}, residual", 9, logp=-1.5))
    lines = study.verdicts(runs)
    assert lines[0].endswith("gives 9 of full's 10 answers, 90% wanted: met")
    assert lines[1].endswith("80.0%, full 80.0%, within 2 points wanted: met")
    # of streaming the other conversation, which ours did not run, does not count
    assert lines[2].endswith("+0.0 points over streaming, 10 wanted: MISSED")
    assert lines[3].endswith("+10.0 points over snapkv, 10 wanted: met")
    assert lines[4].endswith("mean log p -1.50 with the residual, -1.00 by rule alone: MISSED")
    assert study.verdicts(runs[:1]) == []
