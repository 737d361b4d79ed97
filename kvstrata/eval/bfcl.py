"""Agent conversations with real tool outputs, out of the bfcl-eval package (Apache-2.0): its data, its Python back ends.

The set's ground-truth calls are executed in order, one call a step, so that every observation is what the tool really said.
Knows nothing of tokenizers. Nothing is fetched; `pip install --no-deps bfcl-eval mpmath` is what it needs.
"""

import ast
import importlib.util
import itertools
import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from kvstrata.eval.traces import Question, Trace, count

CATEGORIES = ("multi_turn_base", "multi_turn_long_context", "multi_turn_miss_func", "multi_turn_miss_param")
SCENARIOS = ("customer", "finance", "healthcare", "notetaker", "student")
_SCHEMAS = {
    "GorillaFileSystem": "gorilla_file_system",
    "MathAPI": "math_api",
    "MessageAPI": "message_api",
    "TwitterAPI": "posting_api",
    "TicketAPI": "ticket_api",
    "TradingBot": "trading_bot",
    "TravelAPI": "travel_booking",
    "VehicleControlAPI": "vehicle_control",
}
_runs = itertools.count()
_AGENT = "You are an agent. Carry out each request of the user with the functions you have, and say what you did when it is done."
_LISTENER = "You are the user's assistant. Remember what they tell you. Answer questions with the bare fact, in as few words as you can."
_MORE_TOOLS = "More functions are available now; please go on with the request.\n"


def load(source: str, limit: int | None = None) -> Iterator[Trace]:
    """Traces of `bfcl:CATEGORY[:N]` (its first N conversations) or `bfcl:memory:SCENARIO[:N]` (one trace of its first N sessions)."""
    _, name, *rest = source.split(":")
    if name == "memory" and rest and rest[0] in SCENARIOS and len(rest) <= 2:
        yield memory(rest[0], count(rest[1], source) if len(rest) == 2 else None)
    elif name in CATEGORIES and len(rest) <= 1:
        n = count(rest[0], source) if rest else None
        yield from multi_turn(name, min((x for x in (n, limit) if x is not None), default=None))
    else:
        accepted = [f"bfcl:{c}[:N]" for c in CATEGORIES] + [f"bfcl:memory:{s}[:N]" for s in SCENARIOS]
        raise ValueError(f"unknown traces {source!r}; accepted: {', '.join(accepted)}")


def _root() -> Path:
    found = importlib.util.find_spec("bfcl_eval")
    if found is None or not found.submodule_search_locations:
        raise ValueError("bfcl: traces need the package bfcl-eval: pip install --no-deps bfcl-eval mpmath")
    return Path(found.submodule_search_locations[0]) / "data"


def _read(name: str) -> list[dict[str, Any]]:
    with (_root() / name).open(encoding="utf-8") as file:
        return [json.loads(line) for line in file if line.strip()]


def _json_schema(node: Any) -> Any:
    """The set's parameter types (Python's) in JSON schema's words."""
    if isinstance(node, list):
        return [_json_schema(x) for x in node]
    if not isinstance(node, dict):
        return node
    renamed = {"dict": "object", "float": "number", "tuple": "array"}
    return {k: renamed.get(v, v) if k == "type" and isinstance(v, str) else _json_schema(v) for k, v in node.items()}


def _tools(classes: Iterable[str]) -> list[dict[str, Any]]:
    out = []
    for name in classes:
        for entry in _read(f"multi_turn_func_doc/{_SCHEMAS[name]}.json"):
            function = {"name": entry["name"], "description": entry["description"], "parameters": _json_schema(entry["parameters"])}
            out.append({"type": "function", "function": function})
    return out


def _call(code: str, tools: list[dict[str, Any]]) -> tuple[str, dict[str, Any]]:
    """`move(source='a', b)` -> ("move", {"source": "a", ...}); positional arguments are named in the schema's order."""
    node = ast.parse(code.strip(), mode="eval").body
    assert isinstance(node, ast.Call), code
    name = node.func.id if isinstance(node.func, ast.Name) else node.func.attr  # type: ignore[attr-defined]
    schema: dict[str, Any] = next((t["function"]["parameters"] for t in tools if t["function"]["name"] == name), {})
    names = list(schema.get("properties", {}))
    arguments = {names[i] if i < len(names) else f"arg{i}": ast.literal_eval(arg) for i, arg in enumerate(node.args)}
    return name, arguments | {str(k.arg): ast.literal_eval(k.value) for k in node.keywords}


def multi_turn(category: str, limit: int | None = None) -> Iterator[Trace]:
    """Conversations of user requests, tool calls and what the tools returned."""
    from bfcl_eval.eval_checker.multi_turn_eval.multi_turn_utils import execute_multi_turn_func_call as execute

    answers = {x["id"]: x["ground_truth"] for x in _read(f"possible_answer/BFCL_v4_{category}.json")}
    for entry in _read(f"BFCL_v4_{category}.json")[:limit]:
        everything = _tools(entry["involved_classes"])
        late = entry.get("missed_function") or {}
        absent = {name for names in late.values() for name in names} | set(entry.get("excluded_function") or ())
        messages: list[dict[str, Any]] = [{"role": "system", "content": _AGENT}]
        # the back ends keep their state under this name, between turns as wanted but between two calls of ours too
        run = f"kvstrata{next(_runs)}"
        for turn, request in enumerate(entry["question"]):
            messages += request
            if str(turn) in late:
                schemas = [json.dumps(t) for t in everything if t["function"]["name"] in late[str(turn)]]
                messages.append({"role": "user", "content": _MORE_TOOLS + "\n".join(schemas)})
            calls = answers[entry["id"]][turn] if turn < len(answers[entry["id"]]) else []
            if not calls:
                continue
            long = "long_context" in category
            results, _ = execute(calls, entry["initial_config"], entry["involved_classes"], run, entry["id"], long_context=long)
            for code, result in zip(calls, results, strict=True):
                name, arguments = _call(code, everything)
                function = {"name": name, "arguments": arguments}
                messages.append({"role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": function}]})
                messages.append({"role": "tool", "name": name, "content": result})
        yield Trace(entry["id"], messages, [t for t in everything if t["function"]["name"] not in absent])


def memory(scenario: str, sessions: int | None = None) -> Trace:
    """What a user told over several sessions, and the set's questions about it, with their answers and source sentences."""
    texts = [text for _, told in told_sessions(scenario)[:sessions] for text in told]
    messages = [{"role": "system", "content": _LISTENER}] + [{"role": "user", "content": text} for text in texts]
    answers = {x["id"]: x for x in _read("possible_answer/BFCL_v4_memory.json")}
    questions = []
    for entry in _read("BFCL_v4_memory.json"):
        if entry["scenario"] != scenario:
            continue
        truth = answers[entry["id"]]
        source = _find_source(str(truth["source"]), texts)
        if source or sessions is None:
            answer = _as_told([str(a) for a in truth["ground_truth"]], source)
            questions.append(Question(entry["question"][0][0]["content"], answer, source=source))
    return Trace(f"memory_{scenario}", messages, [], tuple(questions))


def told_sessions(scenario: str) -> list[tuple[str, list[str]]]:
    """The topic of each session of a memory scenario, and what the user said in it."""
    sessions = _read(f"memory_prereq_conversation/memory_{scenario}.json")
    return [(s["topic"], [message["content"] for turn in s["question"] for message in turn]) for s in sessions]


def _find_source(source: str, texts: list[str]) -> str:
    """The source sentence as it stands in the conversation; empty where no text holds it.

    The set quotes some sentences, joins distant ones by `...` and opens notes by their day (`Monday: ...`).
    """
    for part in (source, *source.split("..."), source.partition(": ")[2]):
        wanted = part.strip().strip('"“”').rstrip(",.…").strip()
        if wanted and any(wanted in text for text in texts):
            return wanted
    return ""


def _as_told(answers: list[str], source: str) -> str:
    """Of the accepted answers the longest that the source holds, in its spelling; the first where it holds none."""
    for answer in sorted(answers, key=len, reverse=True):
        at = source.lower().find(answer.lower())
        if at >= 0:
            return source[at : at + len(answer)]
    return answers[0]
