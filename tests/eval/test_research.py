"""Research conversations: where facts lie, where they are asked, and that nothing but the passages tells them."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from kvstrata.eval import bfcl, research
from kvstrata.eval.conversation import ask, context_end
from kvstrata.eval.protocols import make_task
from kvstrata.eval.research_leads import LEADS
from kvstrata.eval.traces import Trace, at_end, load_traces, parse, to_json

LENGTHS = (3000, 8000, 16000)


@pytest.fixture(scope="module")
def tokenizer(model_path: Callable[[str], Path]) -> Any:
    return AutoTokenizer.from_pretrained(model_path("smollm2"))


@pytest.fixture(scope="module", params=[(s, n) for s in research.SCENARIOS for n in LENGTHS], ids=lambda p: f"{p[0]}-{p[1]}")
def trace(request: Any) -> Trace:
    scenario, tokens = request.param
    return load_traces(f"research:{scenario}:{tokens}").traces[0]


def searches(trace: Trace) -> list[int]:
    return [i for i, m in enumerate(trace.messages) if m["role"] == "tool"]


def test_two_readings_are_equal_and_files_hold_them(trace: Trace) -> None:
    scenario, tokens = trace.id.split("_")[1:]
    assert load_traces(f"research:{scenario}:{tokens}").traces == (trace,)
    assert parse(json.loads(to_json(trace)), "") == trace


def test_a_fact_is_told_once_and_asked_much_later(trace: Trace) -> None:
    found = searches(trace)
    for question in trace.questions:
        (told,) = [i for i in found if question.source in trace.messages[i]["content"]]
        assert question.answer in question.source
        asked = question.at if question.at >= 0 else len(trace.messages)
        between = sum(told < i < asked for i in found)
        assert between >= (research.BACK if question.at >= 0 else research.CLOSING)


def test_only_passages_tell_the_answers(trace: Trace) -> None:
    said = "\n".join(str(m["content"]) + str(m.get("tool_calls", "")) for m in trace.messages if m["role"] != "tool")
    for question in trace.questions:
        elsewhere = said + "".join(q.text + q.prefix + (q is not question) * q.answer for q in trace.questions)
        # a digit may be in the instructions by chance, a name may not
        if len(question.answer) > 2:
            assert not research._says(elsewhere, question.answer), question
        assert question.text not in said


def test_the_first_request_tells_the_intent(trace: Trace) -> None:
    person = research.PEOPLE[trace.id.split("_")[1]]
    first = trace.messages[1]["content"]
    assert f"the {person}" in first
    own = [p for i in searches(trace) for p in trace.messages[i]["content"].split("\n\n[") if f"Interview with the {person}:" in p]
    topics = {p.split(": ", 1)[1].rsplit(", passage", 1)[0] for p in own}
    assert topics and all(topic in first for topic in topics)
    everything = sum(len(trace.messages[i]["content"]) for i in searches(trace))
    # most of what is read is of no use for the report
    assert 0.1 < sum(map(len, own)) / everything < 0.55


def test_there_are_enough_questions_where_there_is_room(trace: Trace) -> None:
    tokens = int(trace.id.rsplit("_", 1)[1])
    assert len(trace.questions) >= (10 if tokens >= 8000 else 6)
    asides = [q.at for q in trace.questions if q.at >= 0]
    assert asides and asides == sorted(asides)


def test_passages_are_all_that_was_said() -> None:
    for person in research.PEOPLE:
        told = [text for _, texts in bfcl.told_sessions(person) for text in texts]
        pieces = research.passages(person)
        assert "".join("".join(told).split()) == "".join("".join(p.text for p in pieces).split())
        assert max(len(p.text) for p in pieces) < 2 * research.PASSAGE


def test_every_lead_leads_to_a_fact() -> None:
    for person, leads in LEADS.items():
        facts = research.facts(person)
        assert sorted(f.question.answer for f in facts) == sorted(leads)
        assert all(f.question.text.endswith("?") and f.question.prefix[-1] in " -'" for f in facts)


def test_without_evidence_the_rest_stays(trace: Trace) -> None:
    bare = research.without_evidence(trace)
    text = "\n".join(str(m["content"]) for m in bare.messages)
    assert not any(q.source in text for q in trace.questions)
    assert [m["role"] for m in bare.messages] == [m["role"] for m in trace.messages]
    assert bare.questions == trace.questions
    before, after = (t.messages[i]["content"].split("\n\n") for t in (trace, bare) for i in [searches(trace)[0]])
    assert [p for p in before if not any(q.source in p for q in trace.questions)] == after
    assert all(bare.messages[i]["content"].startswith("[Interview") for i in searches(bare))


@pytest.mark.parametrize(
    "source",
    [
        "research:",
        "research:notetaker",
        "research:student:x",
        "research:student:0",
        "research:student:8000:student+finance:2",
        "research:a:9",
    ],
)
def test_sources_that_are_none_are_refused(source: str) -> None:
    with pytest.raises(ValueError, match=r"accepted: research:customer|not a positive number"):
        load_traces(source)


@pytest.mark.parametrize("people", ["2", "student", "finance+customer", "student+nobody", "student+finance+finance", ""])
def test_people_that_are_none_are_refused(people: str) -> None:
    with pytest.raises(ValueError, match="accepted: student and others of customer, finance"):
        load_traces(f"research:student:8000:{people}")


def test_only_the_people_named_are_read() -> None:
    (trace,) = load_traces("research:student:5000:student+finance").traces
    text = json.dumps(trace.messages)
    assert trace.id == "research_student_5000_student+finance"
    assert research.PEOPLE["finance"] in text
    assert not any(f"Interview with the {research.PEOPLE[p]}" in text for p in ("customer", "healthcare", "notetaker"))
    with pytest.raises(ValueError, match="fill 11 of its"):
        research.research("customer", 30000, ("customer", "healthcare"))


@pytest.mark.parametrize("tokens", [1, research.MIN_TOKENS - 1, research.MAX_TOKENS + 1])
def test_lengths_that_cannot_be_are_refused(tokens: int) -> None:
    with pytest.raises(ValueError, match=f"research of {tokens} tokens; accepted"):
        load_traces(f"research:student:{tokens}")


@pytest.mark.parametrize("scenario", research.SCENARIOS)
def test_the_longest_has_text_enough(scenario: str) -> None:
    assert len(searches(research.research(scenario, research.MAX_TOKENS))) == round(research.MAX_TOKENS / 950)


def test_a_conversation_has_about_its_tokens_and_knows_its_answers(tokenizer: Any) -> None:
    trace = load_traces("research:healthcare:4000").traces[0]
    conversation, asked = ask(tokenizer, trace, trace.questions)
    last = sum(q.at < 0 for q in trace.questions)
    assert context_end(conversation, last) == pytest.approx(4000, rel=0.1)
    assert 0 < last < len(asked) == len(trace.questions)
    for a in asked:
        assert tokenizer.decode(conversation.token_ids[a.start : a.end]).strip() == a.question.answer
        assert 0 < a.source < a.start
    asides = [a for a in asked if a.question.at >= 0]
    assert all(a.end < context_end(conversation, last) for a in asides)
    task = make_task("turns", conversation, asked)
    assert {p for a in asked for p in range(a.start, a.end)} <= set(task.scored)
    assert list(task.scored) == sorted(set(task.scored))
    with pytest.raises(ValueError, match="oneshot asks at the end, and 1 questions come earlier"):
        make_task("oneshot", conversation, asked)
    task = make_task("oneshot", *ask(tokenizer, trace, at_end(trace.questions)))
    assert len(task.scored) == sum(a.end - a.start for a in task.asked)
