import json
from pathlib import Path

import pytest

from kvstrata.eval import traces
from kvstrata.eval.traces import Question, Trace, load_traces, parse, to_json


def write(path: Path, *lines: str) -> str:
    path.write_text("\n".join(lines) + "\n")
    return str(path)


GOOD = json.dumps({"messages": [{"role": "user", "content": "hello"}]})


def test_a_broken_line_is_named_by_number_and_the_rest_is_read(tmp_path: Path) -> None:
    path = write(tmp_path / "t.jsonl", GOOD, '{"messages": [', "", '{"messages": []}', '{"tools": []}', GOOD)
    found = load_traces(path)
    assert [t.id for t in found.traces] == ["t_1", "t_6"]
    assert [e.split(": ")[0] for e in found.errors] == [f"{path}, line {n}" for n in (2, 4, 5)]


@pytest.mark.parametrize(
    "record",
    ['{"messages": "hello"}', '{"messages": [{"role": "wizard", "content": "?"}]}', '{"messages": ["hello"]}', "[]", "3", "null",
     '{"messages": [{"role": "user", "content": "?"}], "tools": {"cd": {}}}',
     '{"messages": [{"role": "user", "content": "?"}], "questions": [{"txt": "?"}]}',
     '{"messages": [{"role": "user", "content": "?"}], "questions": [{"text": "?", "answer": 3}]}',
     '{"messages": [{"role": "user", "content": "?"}], "questions": [{"text": "?", "answer": ""}]}',
     '{"messages": [{"role": "user", "content": "?"}], "tools": [3]}',
     '{"messages": [{"role": "user", "content": "?"}], "tools": [{"function": {}}]}',
     '{"messages": [{"role": ["user"], "content": "?"}]}',
     '{"messages": [{"role": "user", "content": 3}]}',
     '{"messages": [{"role": "user", "content": {"text": "?"}}]}',
     '{"messages": [{"role": "user", "content": ["?"]}]}',
     '{"messages": [{"role": "user", "content": [{"type": "text"}]}]}',
     '{"messages": [{"role": "user", "content": "\\ud83d"}]}',
     "[" * 100_000,
     *(f'{{"messages": [{{"role": "assistant", "tool_calls": {calls}}}]}}' for calls in (
         "3", '{"name": "cd"}', "[3]", '[{"function": {}}]', '[{"function": 3}]', '[{"function": {"name": ""}}]',
         '[{"function": {"name": "cd"}}]', '[{"function": {"name": "cd", "arguments": null}}]',
     ))],
)  # fmt: skip
def test_what_is_no_conversation_is_an_error_line(tmp_path: Path, record: str) -> None:
    found = load_traces(write(tmp_path / "t.jsonl", record, GOOD))
    assert len(found.traces) == len(found.errors) == 1
    assert ", line 1: " in found.errors[0]


@pytest.mark.parametrize(
    "message",
    [{"role": "assistant"}, {"role": "assistant", "content": None}, {"role": "user", "content": [{"type": "text", "text": "a"}]},
     {"role": "user", "content": [{"type": "image"}]}, {"role": "assistant", "tool_calls": None},
     {"role": "assistant", "tool_calls": [{"function": {"name": "cd", "arguments": "{}"}}, {"name": "cd", "arguments": {}}]}],
)  # fmt: skip
def test_what_clients_send_is_a_conversation(tmp_path: Path, message: dict[str, object]) -> None:
    found = load_traces(write(tmp_path / "t.jsonl", json.dumps({"messages": [message]})))
    assert found.errors == ()
    assert found.traces[0].messages == [message]


def test_an_unknown_role_names_the_accepted_ones() -> None:
    with pytest.raises(ValueError, match=r"message 0 has role 'wizard'; accepted: system"):
        Trace("t", [{"role": "wizard", "content": ""}])


def test_a_limit_counts_conversations_not_lines(tmp_path: Path) -> None:
    path = write(tmp_path / "t.jsonl", "broken", GOOD, GOOD, GOOD)
    found = load_traces(path, 2)
    assert len(found.traces) == 2
    assert len(found.errors) == 1
    with pytest.raises(ValueError, match="limit is 0"):
        load_traces(path, 0)


def test_sources_that_name_nothing_say_what_is_accepted(tmp_path: Path) -> None:
    for source in ("nowhere.jsonl", "bfcl:multi_turn_bass", "bfcl:memory:plumber", "bfcl:memory", "bfcl:multi_turn_base:1:2"):
        with pytest.raises(ValueError, match=r"accepted: .*bfcl:"):
            load_traces(source)
    for source in ("recall:0", "recall:x", "bfcl:multi_turn_base:0", "bfcl:multi_turn_base:-1", "recall:²", "recall:٤",
                   "bfcl:multi_turn_base:²", "bfcl:memory:student:²", "recall:" + "9" * 5000):  # fmt: skip
        with pytest.raises(ValueError, match="not a positive number"):
            load_traces(source)
    with pytest.raises(ValueError, match="hold no conversation"):
        load_traces(write(tmp_path / "empty.jsonl", ""))


def test_json_lines_are_read_back() -> None:
    trace = Trace(
        "a", [{"role": "user", "content": "é"}], [{"type": "function", "function": {"name": "cd"}}], (Question("q", "a", "p", "s"),)
    )
    assert parse(json.loads(to_json(trace)), "?") == trace


def test_recall_tells_each_key_once_and_asks_every_third() -> None:
    trace = traces.recall(144)
    told = [m["content"] for m in trace.messages if m["role"] == "user"]
    assert len(set(told)) == 144
    assert len(trace.questions) == 48
    assert all(q.source in told and q.answer in q.source for q in trace.questions)
    assert len({q.text for q in trace.questions}) == 48
    with pytest.raises(ValueError, match="accepted: 1 to 144"):
        traces.recall(145)


def test_a_question_in_the_middle_comes_before_a_message_of_the_user() -> None:
    messages = [{"role": r, "content": r} for r in ("user", "assistant", "user")]
    asked = Trace("t", messages, [], (Question("q", "a", at=2), Question("r", "b")))
    assert parse(json.loads(to_json(asked)), "") == asked
    assert [q.at for q in traces.at_end(asked.questions)] == [-1, -1]
    for at in (1, 3):
        with pytest.raises(ValueError, match=f"before message {at}, which is no message of the user"):
            Trace("t", messages, [], (Question("q", "a", at=at),))
    for wrong in (-2, True, 1.0, "1"):
        with pytest.raises(ValueError, match="accepted: the index of a message, or -1"):
            Question("q", "a", at=wrong)
