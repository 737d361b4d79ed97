"""Where the contents of messages lie in a rendered conversation, found by rendering it once more with markers inside them.

Text that looks like a boundary is then not taken for one: a user's, a tool's, and what an answer, its thoughts and its calls' arguments
say. From ids alone nobody can tell, and the model cannot either: a control token in a content is encoded as the real one.
"""

import itertools
import re
from collections.abc import Sequence
from typing import Any

from jinja2.exceptions import TemplateError

from kvstrata.tagging.automaton import WHITESPACE, Automaton, Pin
from kvstrata.tagging.roles import State
from kvstrata.tagging.skeleton import THINK, Skeleton
from kvstrata.tagging.vocabulary import Vocabulary
from kvstrata.types import Role

TEMPLATE_ERRORS = (TemplateError, TypeError, LookupError, AttributeError, ValueError, ArithmeticError, RuntimeError)
"""What a template may raise for a conversation that it does not take."""
_MARKER = re.compile(r"q7Z([bc])(\d{4})k")
_THOUGHT = re.compile(f"({'|'.join(map(re.escape, THINK))})")
_STATES = {"system": State.INST, "developer": State.INST, "user": State.USER, "assistant": State.ASSISTANT}
_THOUGHTS = ("reasoning_content", "reasoning", "thinking")


def find_pins(
    tokenizer: Any, messages: Sequence[dict[str, Any]], tools: Any, kwargs: dict[str, Any], text: str, vocabulary: Vocabulary,
    skeleton: Skeleton, automaton: Automaton,
) -> list[Pin]:  # fmt: skip
    """Pins in units of `text`, which is what the tokenizer's template makes of `messages`; none where markers change what is rendered."""
    for answers in (True, False):
        wrapper = _Wrapper(vocabulary, skeleton, automaton, answers)
        wrapped = [wrapper.message(message) for message in messages]
        try:
            marked = tokenizer.apply_chat_template(wrapped, tools=tools, **kwargs)
        except TEMPLATE_ERRORS:
            marked = ""
        if _MARKER.sub("", marked) == text:
            return _read_markers(vocabulary.units(marked), wrapper.states)
        # a template that takes an answer apart may do without its markers, but not without the users'
        if not any(m.get("role") == "assistant" and w is not m for m, w in zip(messages, wrapped, strict=True)):
            break
    return []


class _Wrapper:
    """Puts markers into messages. states: of each pair of markers. answers: whether those of the assistant are marked."""

    def __init__(self, vocabulary: Vocabulary, skeleton: Skeleton, automaton: Automaton, answers: bool) -> None:
        self.vocabulary, self.skeleton, self.automaton, self.answers = vocabulary, skeleton, automaton, answers
        self.states: list[State] = []

    def message(self, message: dict[str, Any]) -> dict[str, Any]:
        """The message with markers; itself where there are none to put in."""
        state = _STATES.get(message["role"], State.OBS)
        if state is State.ASSISTANT:
            return self._answer(message) if self.answers else message
        if (state is State.INST and self.skeleton.merged_system) or self._is_result(message.get("content")):
            return message
        return self._with_content(message, state)

    def _with_content(self, message: dict[str, Any], state: State) -> dict[str, Any]:
        content = message.get("content")
        if isinstance(content, str):
            return {**message, "content": self._text(content, state)}
        if isinstance(content, list):
            has_text = [isinstance(part, dict) and isinstance(part.get("text"), str) for part in content]
            parts = [{**p, "text": self._text(p["text"], state)} if has else p for p, has in zip(content, has_text, strict=True)]
            return {**message, "content": parts}
        return message

    def _answer(self, message: dict[str, Any]) -> dict[str, Any]:
        """An answer holds thoughts and calls, which only the automaton tells apart: it is marked where it must be."""
        out = self._with_content(message, State.ASSISTANT) if self._would_end(message.get("content")) else message
        for name in _THOUGHTS:
            if isinstance(message.get(name), str) and self._would_end(message[name]):
                out = {**out, name: self._text(message[name], State.REASONING)}
        if self._would_end(message.get("tool_calls")):
            out = {**out, "tool_calls": [self._call(call) for call in message["tool_calls"]]}
        return out

    def _call(self, call: Any) -> Any:
        function = call.get("function", call) if isinstance(call, dict) else None
        if not isinstance(function, dict) or "arguments" not in function:
            return call
        arguments = function["arguments"]
        if isinstance(arguments, str):
            # text of JSON: a marker inside its strings leaves it JSON, and letters and digits are no escapes
            marked: Any = re.sub(r'"((?:[^"\\]|\\.)*)"(?!\s*:)', lambda m: f'"{self._leaf(m[1])}"', arguments)
        else:
            marked = self._leaves(arguments)
        function = {**function, "arguments": marked}
        return {**call, "function": function} if "function" in call else function

    def _leaves(self, value: Any) -> Any:
        if isinstance(value, str):
            return self._leaf(value)
        if isinstance(value, dict):
            return {key: self._leaves(x) for key, x in value.items()}
        return [self._leaves(x) for x in value] if isinstance(value, list) else value

    def _leaf(self, value: str) -> str:
        return self._text(value, State.CALL) if self._would_end(value) else value

    def _would_end(self, content: Any) -> bool:
        """Whether anywhere in a content, to its deepest part, stands what the automaton would take for the end of an answer."""
        if isinstance(content, str):
            return self.automaton.looks_like_a_boundary(self.vocabulary.units(content))
        if isinstance(content, dict):
            return any(map(self._would_end, content.values()))
        return isinstance(content, list) and any(map(self._would_end, content))

    def _text(self, content: str, state: State) -> str:
        # templates cut an answer at its thoughts' tags, and drop what stands before
        pieces = _THOUGHT.split(content) if state is State.ASSISTANT else [content]
        return "".join(piece if piece in THINK else self._piece(piece, state) for piece in pieces)

    def _piece(self, content: str, state: State) -> str:
        core = content.strip()
        if not core:
            return content
        head, tail = content[: content.index(core)], content[content.index(core) + len(core) :]
        self.states.append(state)
        return f"{head}q7Zb{len(self.states) - 1:04d}k{core}q7Zc{len(self.states) - 1:04d}k{tail}"

    def _is_result(self, content: Any) -> bool:
        """A tool's result that a caller wrote into a user's message with the template's own markup."""
        if not isinstance(content, str):
            return False
        start = self.vocabulary.units(content[:200]).strip(WHITESPACE)
        tags = {m.parts[-1][0].strip(WHITESPACE) for m in self.skeleton.marks if m.target is State.OBS and m.parts[-1][1] is Role.OBS}
        return any(tag and start.startswith(tag) for tag in tags)


def _read_markers(units: str, states: list[State]) -> list[Pin]:
    opened: dict[str, int] = {}
    pins, removed = [], 0
    for match in _MARKER.finditer(units):
        at = match.start() - removed
        removed += len(match[0])
        if match[1] == "b":
            opened[match[2]] = at
        elif match[2] in opened:
            pins.append(Pin(opened.pop(match[2]), at, states[int(match[2])]))
    # a content that is rendered inside another, or twice, is left to the automaton
    ordered = sorted(pins, key=lambda pin: (pin.start, pin.end))
    return [p for p, after in itertools.pairwise([*ordered, None]) if p is not None and (after is None or p.end <= after.start)]
