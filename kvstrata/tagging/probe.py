"""Conversations of sentinels, rendered to see what a template puts around each kind of content. Knows nothing of marks."""

import itertools
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from kvstrata.tagging.automaton import HOLE
from kvstrata.tagging.roles import State

Render = Callable[..., str]
SENTINEL = re.compile(r"q7Z[a-z](\d{4})k")
"""Nine letters and digits: what the strictest template takes as a call's id."""


@dataclass(frozen=True, slots=True)
class Piece:
    """One content in a rendered text, the template's own text before it, and the message it belongs to (-1: the tools)."""

    before: str
    state: State
    message: int


@dataclass
class Probe:
    """A conversation whose contents are sentinels."""

    tools: list[dict[str, Any]] | None = None
    kinds: dict[int, tuple[State, int, int]] = field(default_factory=dict)
    messages: list[dict[str, Any]] = field(default_factory=list)
    calls: list[dict[str, Any]] = field(default_factory=list)
    absent: set[int] = field(default_factory=set)

    def new(self, state: State, owner: int = -1) -> str:
        n = len(self.kinds)
        self.kinds[n] = (state, owner, -1 if state is State.SCHEMA else len(self.messages))
        return f"q7Zx{n:04d}k"

    def say(self, role: str, state: State) -> "Probe":
        self.messages.append({"role": role, "content": self.new(state)})
        return self

    def answer(self, text: bool = True, thought: bool = False, calls: int = 0, shape: int = 0) -> "Probe":
        """An assistant message: its thought under the names that templates know, its text, its calls."""
        message: dict[str, Any] = {"role": "assistant", "content": ""}
        if thought:
            message["reasoning_content"] = message["reasoning"] = message["thinking"] = self.new(State.REASONING)
        if text:
            message["content"] += self.new(State.ASSISTANT)
        if calls:
            self.calls = [self.call(shape) for _ in range(calls)]
            message["tool_calls"] = self.calls
        self.messages.append(message)
        return self

    def call(self, shape: int) -> dict[str, Any]:
        owner = len(self.kinds)
        name, call_id, value = (self.new(State.CALL, owner) for _ in range(3))
        shapes: list[dict[str, Any]] = [{"aa": value}, {"aa": value, "bb": 1}, {"aa": [{"cc": value}]}, {"bb": True, "aa": value}]
        return {"id": call_id, "type": "function", "function": {"name": name, "arguments": shapes[shape]}}

    def results(self, role: str = "tool") -> "Probe":
        """A result for each call of the last answer."""
        for call in self.calls:
            name, call_id = call["function"]["name"], call["id"]
            self.messages.append({"role": role, "name": name, "tool_call_id": call_id, "content": self.new(State.OBS)})
        return self

    def stray_result(self) -> "Probe":
        """A result without a call; its name and id are no call's content."""
        self.absent.add(len(self.kinds))
        self.calls = [self.call(0)]
        return self.results()

    def tool(self, shape: int) -> None:
        name, description, value, about = (self.new(State.SCHEMA) for _ in range(4))
        properties: dict[str, Any] = {value: {"type": "string", "description": about}}
        parameters: dict[str, Any] = {"type": "object", "properties": properties}
        function: dict[str, Any] = {"name": name, "description": description, "parameters": parameters}
        if shape == 1:
            properties["zz"] = {"type": "array", "items": {"type": "integer"}}
            parameters["required"] = [value]
        elif shape == 2:
            function["strict"] = True
        self.tools = [*(self.tools or []), {"type": "function", "function": function}]

    def read(self, text: str) -> tuple[list[Piece], str]:
        """Contents in the order in which they were rendered, and the text after the last. Names and ids outside their call become holes."""
        pieces: list[Piece] = []
        done = set(self.absent)
        before, end, group = "", 0, -1
        for match in SENTINEL.finditer(text):
            n = int(match[1])
            state, owner, message = self.kinds[n]
            before += text[end : match.start()]
            end = match.end()
            if state is State.CALL and owner in done:
                before += HOLE
                continue
            last = pieces[-1].state if pieces else State.START
            if not (state is last is State.SCHEMA or (state is last is State.CALL and owner == group)):
                pieces.append(Piece(before, state, message))
            if state is State.CALL and n == owner + 2:
                done.add(owner)
            before, group = "", owner
        return pieces, before + text[end:]


def probes() -> Iterator[Probe]:
    """Every pair of neighbours that a conversation can hold, early and late in it."""
    user, inst = State.USER, State.INST
    for system, shapes in itertools.product((False, True), ((), (0,), (1,), (2,), (0, 1))):

        def start(system: bool = system, shapes: tuple[int, ...] = shapes) -> Probe:
            probe = Probe()
            if system:
                probe.say("system", inst)
            for shape in shapes:
                probe.tool(shape)
            return probe

        yield start().say("user", user)
        yield start().say("user", user).answer().say("user", user).answer().say("user", user)
        if shapes not in ((), (0,)):
            continue
        for thought in (False, True):
            yield start().say("user", user).answer(thought=thought).say("user", user).answer(thought=thought)
            for text, shape in ((False, 0), (True, 1)):
                probe = start().say("user", user).answer(text, thought, 1, shape)
                yield probe
                yield probe.results()
                yield probe.answer(text, thought, 1, shape + 2).results().answer(thought=thought).say("user", user).answer(text, thought, 1)
                yield probe.results()
            yield start().say("user", user).answer(False, thought, 2).results().answer(thought=thought).say("user", user)
    yield Probe().say("user", user).say("user", user).answer()
    yield Probe().say("user", user).say("system", inst).answer().say("system", inst).say("user", user)
    yield Probe().say("user", user).answer(False, False, 1).results().say("user", user)
    yield Probe().say("system", inst).answer().say("user", user)
    # a conversation whose beginning was cut off
    yield Probe().answer()
    yield Probe().answer().say("user", user).answer()
    for thought in (False, True):
        yield Probe().answer(False, thought, 1).results().answer()
    yield Probe().stray_result().answer().say("user", user)
