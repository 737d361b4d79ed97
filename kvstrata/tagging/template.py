"""Spans of a conversation, from its messages or from token ids alone, for any chat template. Knows nothing of models.

Both entrances read the same automaton (automaton.py), learned once a template (skeleton.py). From messages one thing more is known: where
each content lies, so that text which looks like a marker inside a content is not taken for one.
"""

import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from kvstrata.tagging.automaton import Automaton, Pin, Scanner, Segment
from kvstrata.tagging.pins import TEMPLATE_ERRORS, find_pins
from kvstrata.tagging.probe import Render
from kvstrata.tagging.skeleton import Skeleton, learn
from kvstrata.tagging.vocabulary import Vocabulary
from kvstrata.types import Modality, Role, Span

UNKNOWN_TURN = -3
"""The turn of text without a template: older than anything, in whatever turn it is read."""
_ROLES = tuple(Role)


@dataclass(frozen=True, slots=True)
class Tagged:
    """Spans partition [0, len(token_ids)) in order."""

    token_ids: list[int]
    spans: tuple[Span, ...]
    text: str


@dataclass(frozen=True, slots=True)
class Reader:
    """A tokenizer's template, learned: made once, kept on the tokenizer."""

    vocabulary: Vocabulary
    skeleton: Skeleton
    automaton: Automaton
    takes_parts: frozenset[str]
    """Message roles whose content may be text parts; they render as the text does."""


def reader(tokenizer: Any) -> Reader:
    """The learned template. Learned at the first call for a tokenizer and template, about half a second."""
    template = getattr(tokenizer, "chat_template", None)
    key = (str(template), len(tokenizer))
    kept: tuple[Any, Reader] | None = getattr(tokenizer, "_kvstrata_reader", None)
    if kept is not None and kept[0] == key:
        return kept[1]
    vocabulary = Vocabulary(tokenizer)

    def render(messages: list[dict[str, Any]], tools: list[dict[str, Any]] | None, **kwargs: Any) -> str:
        return str(tokenizer.apply_chat_template(messages, tools=tools, tokenize=False, **kwargs))

    skeleton = learn(render, vocabulary.units) if template else Skeleton((), False, ())
    made = Reader(vocabulary, skeleton, Automaton(skeleton.marks), frozenset(role for role in skeleton.roles if _takes_parts(render, role)))
    tokenizer._kvstrata_reader = (key, made)
    return made


def _takes_parts(render: Render, role: str) -> bool:
    def said(content: Any) -> str:
        message, user = {"role": role, "content": content}, {"role": "user", "content": "q"}
        turns = {"user": [message], "system": [message, user], "developer": [message, user]}
        return render(turns.get(role, [user, message]), None)

    try:
        return said([{"type": "text", "text": "q7Zb0000k"}]) == said("q7Zb0000k")
    except Exception:  # noqa: BLE001  a template may refuse in any way it likes
        return False


class Tagger:
    """Spans of token ids as they come: `extend` with a prompt, then with each generated token.

    What follows may still change the spans of the last few tokens.
    """

    def __init__(self, tokenizer: Any) -> None:
        self._reader = reader(tokenizer)
        self._scanner = Scanner(self._reader.automaton)
        self._ids: list[np.ndarray[Any, np.dtype[np.int64]]] = []
        self._warned = False

    @property
    def turn(self) -> int:
        """The newest user turn."""
        return self._scanner.turn

    def extend(self, token_ids: Sequence[int], pins: Sequence[Pin] = ()) -> None:
        """Read on. pins: places known from messages, with the first piece only (units, see automaton.Pin)."""
        ids = self._reader.vocabulary.check(token_ids)
        self._ids.append(ids)
        self._scanner.feed(self._reader.vocabulary.join(ids), pins)

    @property
    def spans(self) -> tuple[Span, ...]:
        if not self._ids:
            return ()
        ids = np.concatenate(self._ids)
        self._ids = [ids]
        segments: Sequence[Segment] = self._scanner.segments
        if not self._scanner.matched:
            if not self._warned:
                warnings.warn("no chat template was recognized; every token is tagged as a user's, older than any turn", stacklevel=2)
                self._warned = True
            segments = (Segment(0, Role.USER, UNKNOWN_TURN),)
        return _spans(ids, segments, self._reader.vocabulary)


def tag_ids(tokenizer: Any, token_ids: Sequence[int]) -> tuple[Span, ...]:
    """Spans of token ids alone, as an engine has them. Without a known template: one span, user, older than any turn, and a warning."""
    tagger = Tagger(tokenizer)
    tagger.extend(token_ids)
    return tagger.spans


def tag_messages(tokenizer: Any, messages: Sequence[dict[str, Any]], tools: Sequence[dict[str, Any]] | None = None, *,
                 add_generation_prompt: bool = False, **template_kwargs: Any) -> Tagged:  # fmt: skip
    """Render messages and tag every token.

    The ids are those of `tokenizer.apply_chat_template(plain_messages(tokenizer, messages), tools=tools, ...)`. Raises ValueError for no
    messages, a tokenizer without a chat template, a role that the template does not know, or a conversation that it refuses.
    """
    messages = plain_messages(tokenizer, messages)
    learned = reader(tokenizer)
    kwargs = {"tokenize": False, "add_generation_prompt": add_generation_prompt, **template_kwargs}
    tools = list(tools) if tools else None
    try:
        text = tokenizer.apply_chat_template(messages, tools=tools, **kwargs)
    except TEMPLATE_ERRORS as error:
        raise ValueError(f"the chat template refuses this conversation: {error}") from error
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ValueError(f"a message holds half a character, {text[error.start]!a}; accepted: whole Unicode") from error
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    pins = find_pins(tokenizer, messages, tools, kwargs, text, learned.vocabulary, learned.skeleton, learned.automaton)
    tagger = Tagger(tokenizer)
    if learned.vocabulary.join(learned.vocabulary.check(ids)) != learned.vocabulary.units(text):
        pins = []
    tagger.extend(ids, pins)
    return Tagged(list(ids), tagger.spans, text)


def plain_messages(tokenizer: Any, messages: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Messages as the tokenizer's template takes them: no content, None or no parts become ""; text parts are put end to end
    where the template takes strings alone. Raises ValueError as tag_messages does, the template's own refusals aside."""
    learned = _check(tokenizer, messages)
    return [{**m, "content": _plain_content(m.get("content"), m["role"] in learned.takes_parts)} for m in messages]


def _plain_content(content: Any, takes_parts: bool) -> Any:
    if not content:
        return ""
    if isinstance(content, str) or takes_parts or not all(p.get("type") == "text" for p in content):
        return content
    return "".join(part["text"] for part in content)


def check_content(content: Any) -> None:
    """Raises ValueError unless it is a string, None, or a list of parts whose texts are strings."""
    if content is not None and not isinstance(content, (str, list)):
        raise ValueError(f"content {content!r}; accepted: a string, a list of parts, or None")
    for part in content if isinstance(content, list) else ():
        if not isinstance(part, dict) or (part.get("type") == "text" and not isinstance(part.get("text"), str)):
            raise ValueError(f"content part {part!r}; accepted: {{'type': 'text', 'text': ...}} or a part of another type")


def _check(tokenizer: Any, messages: Sequence[dict[str, Any]]) -> Reader:
    if isinstance(messages, str) or not isinstance(messages, Sequence):
        raise ValueError(f"messages is {messages!r}; accepted: a list of {{'role': ..., 'content': ...}}")
    if not messages:
        raise ValueError("messages is empty; at least one {'role': ..., 'content': ...} is needed")
    if not getattr(tokenizer, "chat_template", None):
        name = getattr(tokenizer, "name_or_path", "")
        raise ValueError(f"tokenizer {name!r} has no chat template; accepted: one with tokenizer.chat_template set, or tag_ids")
    learned = reader(tokenizer)
    for i, message in enumerate(messages):
        if not isinstance(message, dict):
            raise ValueError(f"message {i} is {message!r}; accepted: {{'role': ..., 'content': ...}}")
        role = message.get("role")
        if role not in learned.skeleton.roles:
            accepted = ", ".join(learned.skeleton.roles)
            raise ValueError(f"message {i} has role {role!r}, which the chat template does not know; accepted: {accepted}")
        try:
            check_content(message.get("content"))
        except ValueError as error:
            raise ValueError(f"message {i} has {error}") from None
    return learned


def _spans(ids: np.ndarray[Any, np.dtype[np.int64]], segments: Sequence[Segment], vocabulary: Vocabulary) -> tuple[Span, ...]:
    """A token has the label of its first unit."""
    n = len(ids)
    if n == 0:
        return ()
    ends = np.cumsum(vocabulary.lengths[ids])
    starts = ends - vocabulary.lengths[ids]
    at = np.searchsorted(np.array([s.start for s in segments]), starts, side="right") - 1
    labels = np.array([(_ROLES.index(s.role), s.turn) for s in segments], np.int64)[np.maximum(at, 0)]
    rows = np.column_stack([labels, vocabulary.is_image[ids]])
    cuts = np.flatnonzero((rows[1:] != rows[:-1]).any(1)) + 1
    return tuple(
        Span(start, end, _ROLES[role], turn, Modality.IMAGE if image else Modality.TEXT)
        for start, end, (role, turn, image) in zip([0, *cuts.tolist()], [*cuts.tolist(), n], rows[[0, *cuts]].tolist(), strict=True)
    )
