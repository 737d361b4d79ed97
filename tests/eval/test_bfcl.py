import json

import pytest

from kvstrata.eval import bfcl
from kvstrata.eval.traces import load_traces


def test_observations_are_what_the_tools_said() -> None:
    trace = load_traces("bfcl:multi_turn_base:1").traces[0]
    roles = [m["role"] for m in trace.messages]
    assert roles[:4] == ["system", "user", "assistant", "tool"]
    calls = [m["tool_calls"][0]["function"] for m in trace.messages if m["role"] == "assistant"]
    names = {t["function"]["name"] for t in trace.tools}
    assert calls[0] == {"name": "cd", "arguments": {"folder": "document"}}
    assert all(c["name"] in names for c in calls)
    first = next(m for m in trace.messages if m["role"] == "tool")
    assert json.loads(first["content"]) == {"current_working_directory": "document"}
    assert not any(m["content"].startswith("Error during") for m in trace.messages if m["role"] == "tool")


def test_two_readings_of_a_conversation_are_equal() -> None:
    # the back ends keep state between calls: a second reading must not go on where the first ended
    assert load_traces("bfcl:multi_turn_base:2").traces == load_traces("bfcl:multi_turn_base:2").traces


def test_schemas_are_json_schema() -> None:
    text = json.dumps(load_traces("bfcl:multi_turn_base:1").traces[0].tools)
    assert '"type": "object"' in text
    assert '"type": "dict"' not in text
    assert '"type": "float"' not in text


def test_held_back_functions_come_later_in_the_dialogue() -> None:
    trace = load_traces("bfcl:multi_turn_miss_func:1").traces[0]
    assert "sort" not in {t["function"]["name"] for t in trace.tools}
    late = [m for m in trace.messages if m["role"] == "user" and '"name": "sort"' in m["content"]]
    assert len(late) == 1


def test_the_smaller_of_limit_and_source_counts() -> None:
    assert len(load_traces("bfcl:multi_turn_base:3", 2).traces) == 2
    assert len(load_traces("bfcl:multi_turn_long_context:1", 2).traces) == 1


@pytest.mark.parametrize("scenario", bfcl.SCENARIOS)
def test_most_questions_have_their_source_in_the_conversation(scenario: str) -> None:
    trace = bfcl.memory(scenario)
    told = "\n".join(m["content"] for m in trace.messages)
    found = [q for q in trace.questions if q.source]
    assert len(found) >= 0.8 * len(trace.questions)
    assert all(q.source in told for q in found)


def test_fewer_sessions_keep_the_questions_they_answer() -> None:
    one, all_ = bfcl.memory("student", 1), bfcl.memory("student")
    assert 0 < len(one.questions) < len(all_.questions)
    assert all(q.source for q in one.questions)
    assert [q.answer for q in one.questions][:3] == ["Advanced Algorithms", "One", "2631"]
