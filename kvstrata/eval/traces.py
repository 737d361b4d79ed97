"""Conversations to judge on, and where they come from. Knows nothing of models, tokenizers or metrics.

A source is the path of a JSONL file of OpenAI-style `{"messages": [...], "tools": [...]}`, `bfcl:CATEGORY[:N]` (bfcl.py),
`research:SCENARIO[:TOKENS]` (research.py) or `recall[:TURNS]` (key-value facts told over many turns, asked at the end).
"""

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from kvstrata.tagging.template import check_content

ROLES = ("system", "developer", "user", "assistant", "tool")


@dataclass(frozen=True)
class Question:
    """Asked after the conversation: `text` by the user; the reply is `prefix` (given) and then `answer` (scored).

    source: the sentence of the conversation that holds the answer; empty where none is known.
    at: index of the user message before which it is asked; -1: after the conversation.
    """

    text: str
    answer: str
    prefix: str = ""
    source: str = ""
    at: int = -1

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if name != "at" and not isinstance(value, str):
                raise ValueError(f"question has {name} {value!r}; a string is needed")
        if type(self.at) is not int or self.at < -1:
            raise ValueError(f"question {self.text!r} has at {self.at!r}; accepted: the index of a message, or -1 for the end")
        if not self.text or not self.answer:
            raise ValueError(f"question {self.text!r} with answer {self.answer!r}; both need text")


@dataclass(frozen=True)
class Trace:
    id: str
    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]] = field(default_factory=list)
    questions: tuple[Question, ...] = ()

    def __post_init__(self) -> None:
        if not isinstance(self.messages, list) or not self.messages:
            raise ValueError(f"trace {self.id}: messages are {self.messages!r}; a non-empty list of {{role, content}} is needed")
        if not isinstance(self.tools, list):
            raise ValueError(f"trace {self.id}: tools are {type(self.tools).__name__}; a list of function schemas is needed")
        for i, message in enumerate(self.messages):
            try:
                check_message(message)
            except ValueError as error:
                raise ValueError(f"trace {self.id}: message {i} {error}") from None
        for i, tool in enumerate(self.tools):
            function = tool.get("function", tool) if isinstance(tool, dict) else None
            if not isinstance(function, dict) or not isinstance(function.get("name"), str):
                raise ValueError(f"trace {self.id}: tool {i} is {tool!r}; a function schema with a name is needed")
        for question in self.questions:
            if question.at >= len(self.messages) or (question.at >= 0 and self.messages[question.at]["role"] != "user"):
                raise ValueError(f"trace {self.id}: a question is asked before message {question.at}, which is no message of the user")


def check_message(message: Any) -> None:
    """Raises ValueError for what is no message: a role, a content that is text or parts, calls that have a name and arguments."""
    if not isinstance(message, dict):
        raise ValueError(f"is {message!r}; an object of role and content is needed")
    if message.get("role") not in ROLES:
        raise ValueError(f"has role {message.get('role')!r}; accepted: {', '.join(ROLES)}")
    try:
        check_content(message.get("content"))
    except ValueError as error:
        raise ValueError(f"has {error}") from None
    calls = message.get("tool_calls")
    if calls is not None and not isinstance(calls, list):
        raise ValueError(f"has tool_calls {calls!r}; a list is needed")
    for call in calls or ():
        function = call.get("function", call) if isinstance(call, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str) or not function["name"]:
            raise ValueError(f"has tool call {call!r}; a function with a name is needed")
        if not isinstance(function.get("arguments"), (dict, str)):
            raise ValueError(f"has tool call {call!r}; its arguments must be an object or a string of JSON")


@dataclass(frozen=True)
class TraceSet:
    """Traces of one source. errors: one line for each that could not be read; the others still run."""

    source: str
    traces: tuple[Trace, ...]
    errors: tuple[str, ...] = ()


def load_traces(source: str, limit: int | None = None) -> TraceSet:
    """Traces of a source, the first `limit` of them. Raises ValueError for a source that names nothing."""
    from kvstrata.eval import bfcl, research  # import this module's nouns

    if limit is not None and limit < 1:
        raise ValueError(f"limit is {limit}; it must be at least 1")
    errors: list[str] = []
    if source.startswith("bfcl:"):
        traces = list(bfcl.load(source, limit))
    elif source.startswith("research:"):
        traces = [research.load(source)]
    elif source == "recall" or source.startswith("recall:"):
        traces = [recall(count(source.partition(":")[2] or "24", source))]
    else:
        traces, errors = read_jsonl(Path(source), limit)
    if not traces and not errors:
        raise ValueError(f"traces {source!r} hold no conversation")
    return TraceSet(source, tuple(traces), tuple(errors))


def count(text: str, source: str) -> int:
    """The number at the end of a source name; ValueError unless it is a positive integer."""
    # ten digits are more than there are conversations, and int() takes neither endless ones nor all that are digits somewhere
    if not (text.isascii() and text.isdecimal() and len(text) <= 10) or int(text) < 1:
        raise ValueError(f"{text!r} in traces {source!r} is not a positive number")
    return int(text)


def read_jsonl(path: Path, limit: int | None = None) -> tuple[list[Trace], list[str]]:
    """Traces of a JSONL file, and a message for each broken line (`FILE, line N: why`)."""
    if not path.is_file():
        raise ValueError(
            f"traces {str(path)!r}: no such file; accepted: a JSONL file, bfcl:CATEGORY[:N], research:SCENARIO[:TOKENS], recall[:TURNS]"
        )
    traces: list[Trace] = []
    errors: list[str] = []
    for number, line in _lines(path):
        if limit is not None and len(traces) == limit:
            break
        try:
            traces.append(parse(json.loads(line), f"{path.stem}_{number}"))
        except (ValueError, RecursionError) as error:
            errors.append(f"{path}, line {number}: {error}")
    return traces, errors


def _lines(path: Path) -> Iterator[tuple[int, str]]:
    with path.open(encoding="utf-8", errors="replace") as file:
        for number, line in enumerate(file, 1):
            if line.strip():
                yield number, line


def parse(record: Any, default_id: str) -> Trace:
    """A trace of one JSON object. Keys other than id, messages, tools and questions are left alone."""
    if not isinstance(record, dict) or "messages" not in record:
        raise ValueError("no object with a 'messages' list")
    try:
        json.dumps(record, ensure_ascii=False).encode()
    except UnicodeEncodeError as error:
        raise ValueError(f"half of a surrogate pair, {error.object[error.start : error.end]!r}, is no text") from None
    try:
        questions = tuple(Question(**q) for q in record.get("questions") or ())
    except TypeError as error:
        raise ValueError(f"questions need 'text' and 'answer', and may have 'prefix', 'source' and 'at': {error}") from None
    return Trace(str(record.get("id", default_id)), record["messages"], record.get("tools") or [], questions)


def to_json(trace: Trace) -> str:
    """One line of JSONL; parse() reads it back."""
    record: dict[str, Any] = {"id": trace.id, "messages": trace.messages, "tools": trace.tools}
    if trace.questions:
        record["questions"] = [vars(q) for q in trace.questions]
    return json.dumps(record, ensure_ascii=False)


def at_end(questions: Sequence[Question]) -> tuple[Question, ...]:
    """The same questions, all asked after the conversation."""
    return tuple(replace(q, at=-1) for q in questions)


_COLOURS = ("amber", "cobalt", "coral", "ebony", "ivory", "jade", "khaki", "lilac", "maroon", "ochre", "olive", "pearl")
_THINGS = ("locker", "garage", "safe", "vault", "cabinet", "studio", "cellar", "archive", "hangar", "kiosk", "depot", "shed")


def recall(turns: int) -> Trace:
    """A conversation of `turns` turns that each tell one key and its value; every third key is asked at the end, oldest first."""
    if not 1 <= turns <= len(_COLOURS) * len(_THINGS):
        raise ValueError(f"recall of {turns} turns; accepted: 1 to {len(_COLOURS) * len(_THINGS)}")
    messages: list[dict[str, Any]] = [{"role": "system", "content": "You keep the user's codes and repeat them when asked."}]
    questions = []
    for i in range(turns):
        name = f"{_COLOURS[i % 12]} {_THINGS[(i + i // 12) % 12]}"
        value = str(1000 + (7919 * (i + 1)) % 9000)
        fact = f"The code of the {name} is {value}."
        messages += [{"role": "user", "content": fact}, {"role": "assistant", "content": f"Noted: {name}."}]
        if i % 3 == 0:
            questions.append(Question(f"What is the code of the {name}?", value, f"The code of the {name} is ", fact))
    return Trace(f"recall_{turns}", messages, [], tuple(questions))
