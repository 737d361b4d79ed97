"""A template's skeleton, learned by rendering sentinels: what it writes between two contents, and which role that text has.

Where a message's plain envelope (what stands around a user's or an assistant's bare text) recurs, it is `delim`. What is left on either
side is the markup of the content beside it: `<tool_call>` belongs to the call, `<think>` to the thought, a preamble to `inst`.
Knows nothing of tokens.
"""

import difflib
import functools
import re
from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from kvstrata.tagging.automaton import WHITESPACE, Mark, header_length, is_special
from kvstrata.tagging.probe import Piece, Probe, Render, probes
from kvstrata.tagging.roles import ROLES, State
from kvstrata.types import Role

ROLE_NAMES = ("system", "developer", "user", "assistant", "tool", "function", "ipython", "observation", "tool_response")
THINK = ("<think>", "</think>")
TOOL_CALL = ("<tool_call>", "</tool_call>")
_TAG = re.compile(r"[ \n\t\r]*(?:[\u1000-\uffff]|<[^<>\s=]{1,40}[>\s=]|\[[^\[\]\s]{1,40}\])")
_HEADING = re.compile(r"[A-Za-z_][^\n<\[{\u1000-\uffff]{0,80}(?=[\n<\[{\u1000-\uffff]|\Z)[\u1000-\uffff]?[ \n\t\r]*")
_CLOSED = re.compile(r"\s*\S{0,60}\s*")
_NAME = re.compile(r"[\w .=:\u0fff-]{1,80}", re.ASCII)
_PLAIN = (State.USER, State.ASSISTANT)
_DEEP = (State.CALL, State.REASONING, State.OBS, State.INST, State.SCHEMA)
_INST = (State.START, State.INST, State.SCHEMA)
Parts = tuple[tuple[str, Role], ...]
Literals = dict[tuple[State, State], dict[str, None]]


@dataclass(frozen=True, slots=True)
class Skeleton:
    """marks: for the automaton. merged_system: the system message stands inside the first user message without a boundary.
    roles: message roles that the template renders."""

    marks: tuple[Mark, ...]
    merged_system: bool
    roles: tuple[str, ...]


def learn(render: Render, units: Callable[[str], str]) -> Skeleton:
    """render(messages, tools, **kwargs) -> text, or raises; units: text -> units (vocabulary.py)."""
    literals = _literals(render, units)
    merged = any(not text.strip(WHITESPACE) for text in literals.get((State.INST, State.USER), ()))
    if merged:
        literals = _merge_system(literals)
    thinks = _thinks(literals, units)
    for (_, target), texts in literals.items():
        if target is State.ASSISTANT:
            # an opened thought is no part of the envelope: the automaton sees to it from inside the answer
            kept = [_before_thought(text, thinks) for text in texts]
            texts.clear()
            texts.update(dict.fromkeys(kept))
    for source in State:
        # a prompt that opens a thought opens no answer
        thoughts = {text.rstrip(WHITESPACE) for text in literals.get((source, State.REASONING), ())}
        for text in [t for t in literals.get((source, State.ASSISTANT), {}) if t.rstrip(WHITESPACE) in thoughts]:
            del literals[source, State.ASSISTANT][text]
        # all that stands after the last message may open the answer: to a user or a tool it does, an answer it ends
        answers = literals.get((source, State.ASSISTANT), {})
        wrong = State.ASSISTANT if source in (State.ASSISTANT, State.REASONING, State.CALL) else State.GAP
        for text in [t for t in literals.get((source, State.GAP), {}) if t in answers]:
            del literals[source, wrong][text]
    _drop_ambiguous_starts(literals)
    envelopes = dict.fromkeys(min(texts, key=len) for pair, texts in literals.items() if texts and _is_plain(*pair))
    label = _Labeller(tuple(envelopes))
    marks = [mark for pair in literals for mark in _marks(*pair, literals, label, thinks)]
    if not any(mark.source is State.SCHEMA and mark.parts[0][1] is Role.INST for mark in marks):
        # a schema that ends like any instruction is one
        marks = [mark for mark in marks if mark.source not in _INST or mark.target is not State.SCHEMA]
    marks = _shared(marks) + _inner(marks, thinks, units) + marks
    return Skeleton(tuple(_split_footers(marks)), merged, _roles(render))


def _is_plain(source: State, target: State) -> bool:
    return source in _PLAIN and target in (State.USER, State.ASSISTANT, State.GAP) and source is not target


def _render_all(render: Render) -> Iterable[tuple[Probe, bool, str]]:
    for probe in probes():
        for prompt in (False, True):
            try:
                yield probe, prompt, render(probe.messages, probe.tools, add_generation_prompt=prompt)
            except Exception:  # noqa: BLE001  a template may refuse a conversation in any way it likes
                continue


def _literals(render: Render, units: Callable[[str], str]) -> Literals:
    """Texts between neighbours by (source, target), in the order in which they were met."""
    seen: Literals = defaultdict(dict)
    for probe, prompt, text in _render_all(render):
        pieces, rest = probe.read(units(text))
        last = Piece("", State.START, -1)
        for piece in pieces:
            # a message between the two that shows nothing, such as a call that the template ignores, would be taken for template text
            is_hidden = last.state is State.START and any(m["role"] == "assistant" for m in probe.messages[: max(piece.message, 0)])
            if piece.message - last.message <= 1 or ({piece.state, last.state} & {*_INST} and not is_hidden):
                seen[last.state, piece.state][piece.before] = None
            last = piece
        if last.message == len(probe.messages) - 1:
            seen[last.state, State.ASSISTANT if prompt else State.GAP][rest] = None
    return seen


def _merge_system(literals: Literals) -> Literals:
    """Literals of a template whose system message begins a user's, with nothing between: by ids alone it is the user's text."""
    out: Literals = defaultdict(dict)
    for (source, target), texts in literals.items():
        if source is not State.INST:
            out[source, State.USER if target is State.INST else target].update(texts)
    return out


def _drop_ambiguous_starts(literals: Literals) -> None:
    """A conversation may begin with an answer or a result, but where the template writes nothing of its own before it, instructions and
    users' messages, with which nearly all begin, go first."""
    usual = [text for target in (State.INST, State.SCHEMA, State.USER) for text in literals.get((State.START, target), ())]
    for target in (State.ASSISTANT, State.REASONING, State.CALL, State.OBS):
        texts = literals.get((State.START, target), {})
        # white space at a mark's end is optional, so it tells nothing apart
        for text in [t for t in texts if any(u.startswith(t.rstrip(WHITESPACE)) for u in usual)]:
            del texts[text]


def _before_thought(text: str, thinks: tuple[str, ...]) -> str:
    """A literal up to the thought that it opens, or opens and closes, at its end; instructions before that may speak of thoughts too."""
    opened = [at for tag in thinks if (at := text.rfind(tag)) >= 0 and _CLOSED.fullmatch(text, at + len(tag))]
    return text[: min(opened)] if opened else text


def _thinks(literals: Literals, units: Callable[[str], str]) -> tuple[str, ...]:
    """Tags that open a thought."""
    found = {units(THINK[0]): None}
    closers = [t.strip(WHITESPACE) for t in literals.get((State.REASONING, State.ASSISTANT), ()) if t.strip(WHITESPACE)]
    for source in (State.USER, State.OBS):
        answers = [*literals.get((source, State.ASSISTANT), ())]
        plain = min(answers, key=len, default="")
        for text in literals.get((source, State.REASONING), ()):
            tag = _TAG.match(text.removeprefix(plain))
            if not plain or not text.startswith(plain) or not tag:
                continue
            # an answer that begins likewise has an empty thought, or the tag opens more than thoughts
            rests = [a[len(plain + tag[0]) :] for a in answers if a.startswith(plain + tag[0])]
            if all(any(closer in rest for closer in closers) for rest in rests):
                found[tag[0].strip(WHITESPACE)] = None
    return tuple(found)


class _Labeller:
    """Roles of the parts of a literal, given the envelopes of plain messages."""

    def __init__(self, envelopes: tuple[str, ...]) -> None:
        self.envelopes = envelopes

    @functools.cache  # noqa: B019  lives as long as its learning
    def core(self, text: str) -> tuple[int, int]:
        """[start, end) of the longest stretch of an envelope in `text`, or (0, 0)."""
        best, most = (0, 0), 0
        for envelope in self.envelopes:
            # a word of prose is no envelope where envelopes are made of special tokens
            least = 5 if any(map(is_special, envelope)) else 3
            runs: list[tuple[int, int, int]] = []
            for block in difflib.SequenceMatcher(None, text, envelope, autojunk=False).get_matching_blocks():
                found = text[block.a : block.a + block.size]
                weight = sum(5 if is_special(c) else c not in WHITESPACE for c in found)
                if weight < least:
                    continue
                if runs and _NAME.fullmatch(text, runs[-1][1], block.a):
                    # the same envelope with another role's name in it
                    runs[-1] = (runs[-1][0], block.a + block.size, runs[-1][2] + weight)
                else:
                    runs.append((block.a, block.a + block.size, weight))
            for start, end, weight in runs:
                if weight > most:
                    best, most = (start, end), weight
        return best

    def parts(self, source: State, target: State, text: str) -> list[tuple[str, Role]]:
        start, end = self.core(text)
        if start == end:
            header = header_length(text) if source is State.START else 0
            bare = ((text[:header], Role.DELIM), (text[header:], self._inside(source, target)))
            return [part for part in bare if part[0]]
        heading = _HEADING.match(text, end) if target is not State.SCHEMA and text[end - 1] not in WHITESPACE else None
        stop = heading.end() if heading else end
        left = Role.DELIM if source in (*_PLAIN, State.GAP) else ROLES[source]
        right = ROLES[target] if target in _DEEP else Role.DELIM
        return [part for part in ((text[:start], left), (text[start:stop], Role.DELIM), (text[stop:], right)) if part[0]]

    @staticmethod
    def _inside(source: State, target: State) -> Role:
        """The role of text between two contents of one message."""
        states = (s for s in (State.CALL, State.REASONING, *_INST, State.OBS) if s in (source, target))
        return next((ROLES[s] for s in states), Role.DELIM)


def _marks(source: State, target: State, literals: Literals, label: _Labeller, thinks: tuple[str, ...]) -> list[Mark]:
    guard = ""
    closers = tuple(literals.get((State.REASONING, State.ASSISTANT), ()))
    texts: Iterable[str] = literals[source, target]
    others = [t for (s, other), found in literals.items() if s is source and other not in (target, State.GAP) for t in found]
    if target is State.SCHEMA:
        # the preamble is the mark, not the JSON, whose shape varies
        texts = [re.sub(r"[ \n\t\r\[]*\{.*\Z", "", text, flags=re.DOTALL) for text in texts]
    elif source in (State.SCHEMA, State.CALL):
        bare = [text for text in texts if label.core(text) == (0, 0)]
        texts = [text for text in texts if text not in bare] + ([functools.reduce(_common_suffix, bare)] if bare else [])
        guard = "{" if source is State.SCHEMA else ""
    marks = []
    for text in filter(str.strip, dict.fromkeys(texts)):
        parts = label.parts(source, target, text)
        left: list[tuple[str, Role]] = []
        if len(parts) > 1 and parts[0][1] is ROLES[source]:
            # what stands before the first delimiter varies with the content, and in the source's state it has its role anyway
            left, parts = parts[:1], parts[1:]
        last, role = parts[-1]
        tag = _TAG.match(last)
        if target in (State.CALL, State.REASONING, State.OBS) and role is ROLES[target] and tag and (len(parts) > 1 or source in _PLAIN):
            if target is not State.REASONING and tag[0].strip(WHITESPACE) in thinks:
                continue
            # the tag alone is enough, and robust, unless something else begins with it too
            opening = text[: len(text) - len(last) + tag.end()]
            if not any(other.startswith(opening) for other in others):
                parts[-1] = (tag[0], role)
        if source is State.REASONING and len(parts) == 1 and target is State.CALL and text.startswith(closers):
            # the thought's end, then the call's beginning: two marks
            continue
        if target in (State.INST, State.SCHEMA) and parts[-1][1] is Role.INST:
            # a long preamble may hold a date
            parts[-1] = (parts[-1][0][:60], Role.INST)
        bare_mark = all(role is not Role.DELIM for _, role in parts)
        if bare_mark and (target is State.GAP or (source in _INST and target is State.ASSISTANT)):
            # no end of a message; an answer straight after the instructions, whose end comes before every user's message too
            continue
        sources = _INST if source in _INST and not bare_mark else (State.START, State.INST) if source is State.START else (source,)
        marks += [Mark(s, target, tuple(parts), guard=guard if bare_mark else "") for s in sources]
        if left and source not in (State.CALL, State.SCHEMA, State.START) and len(left[0][0]) < 80:
            # whole, it is longer than a mark that begins likewise
            marks.append(Mark(source, target, (*left, *parts)))
    return marks


def _common_suffix(a: str, b: str) -> str:
    n = 0
    while n < min(len(a), len(b)) and a[-1 - n] == b[-1 - n]:
        n += 1
    return a[len(a) - n :]


def _shared(marks: list[Mark]) -> list[Mark]:
    """What ends an answer ends it too in the middle of a thought or a call, and the other way round."""
    inside = (State.ASSISTANT, State.REASONING, State.CALL)
    ends = [mark for mark in marks if mark.source in inside and mark.parts[0][1] is Role.DELIM]
    # an answer's own ends come last: where two marks have one text, the later one counts
    ends.sort(key=lambda mark: inside[::-1].index(mark.source))
    return [Mark(state, mark.target, mark.parts) for state in inside for mark in ends if mark.source is not state]


def _inner(marks: list[Mark], thinks: tuple[str, ...], units: Callable[[str], str]) -> list[Mark]:
    """Marks inside an answer, wherever in it a model writes them; the usual ones where the template has none."""
    out: dict[Mark, None] = {}
    for mark in marks:
        text, role = mark.parts[-1]
        if mark.target in (State.CALL, State.REASONING) and role is ROLES[mark.target] and _TAG.fullmatch(text):
            out[Mark(State.ASSISTANT, mark.target, ((text.strip(WHITESPACE), role),))] = None
    for tag in thinks:
        out[Mark(State.ASSISTANT, State.REASONING, ((tag, Role.REASONING),))] = None
    if not any(m.source is State.REASONING and m.target is State.ASSISTANT for m in marks):
        out[Mark(State.REASONING, State.ASSISTANT, ((units(THINK[1]) + "\n\n", Role.REASONING),))] = None
    if not any(m.target is State.CALL for m in marks):
        out[Mark(State.ASSISTANT, State.CALL, ((units(TOOL_CALL[0]), Role.TOOL_CALL),))] = None
        out[Mark(State.CALL, State.ASSISTANT, ((units(TOOL_CALL[1]), Role.TOOL_CALL),))] = None
    return list(out)


def _split_footers(marks: list[Mark]) -> list[Mark]:
    """Cut each opening delimiter into the last message's end and the next one's beginning: the turn grows between them, and the beginning
    is a mark of its own after an end that was met alone."""
    ends = [mark for mark in marks if mark.target is State.GAP and any(role is Role.DELIM for _, role in mark.parts)]
    footers = sorted({m.parts[0][0] for m in marks if m.target is State.GAP and m.parts[0][1] is Role.DELIM}, key=len, reverse=True)
    out = []
    for mark in marks:
        # the markup that ends a result or a call stands before the delimiter
        lead = mark.parts[:1] if mark.parts[0][1] is not Role.DELIM and len(mark.parts) > 1 else ()
        (text, role), *rest = mark.parts[len(lead) :]
        if role is not Role.DELIM or mark.target is State.GAP:
            out.append(Mark(mark.source, mark.target, mark.parts, len(mark.parts) if mark.target is State.USER else -1, mark.guard))
            continue
        n = next((len(f.rstrip(WHITESPACE)) for f in footers if f.strip(WHITESPACE) and text.startswith(f.rstrip(WHITESPACE))), 0)
        n += len(text[n:]) - len(text[n:].lstrip(WHITESPACE)) if n else 0
        head = ((text[n:], role), *rest) if text[n:] else tuple(rest)
        parts = lead + (((text[:n], role),) if n else ()) + head
        out.append(Mark(mark.source, mark.target, parts, len(lead) + min(n, 1) if mark.target is State.USER else -1, mark.guard))
        if head and (is_special(head[0][0][0]) or len(head[0][0].strip(WHITESPACE)) > 3):
            out.append(Mark(State.GAP, mark.target, head, 0 if mark.target is State.USER else -1))
    # neighbours that no probe could bring together
    starts = [mark for mark in out if mark.source is State.GAP]
    crossed = [Mark(e.source, s.target, e.parts + s.parts, len(e.parts) if s.turn_part == 0 else -1) for e in ends for s in starts]
    return crossed + out


def _shows(render: Render, messages: list[dict[str, Any]]) -> bool:
    probe = Probe()
    probe.tool(0)
    for tools in (None, probe.tools):
        try:
            if "q7Zy0000k" in render(messages, tools):
                return True
        except Exception:  # noqa: BLE001  as above
            continue
    return False


def _roles(render: Render) -> tuple[str, ...]:
    """Which of the usual message roles the template renders somewhere."""
    out = []
    for role in ROLE_NAMES:
        message = {"role": role, "content": "q7Zy0000k", "name": "q7Zz0000k", "tool_call_id": "q7Zz0001k"}
        user, call = Probe().say("user", State.USER).messages, Probe().say("user", State.USER).answer(False, False, 1).messages
        if any(_shows(render, [*before, message, *after]) for before in ([], user, call) for after in ([], user)):
            out.append(role)
    return tuple(out)
