"""A single-pass automaton over units (vocabulary.py): which kind of text each position is. Knows nothing of where its marks come from.

In a state only the marks that can end that kind of text are looked for, so `<tool_call>` inside a user's message is the user's text.
Every mark is a literal piece of template; reading one labels its parts and enters its target.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass

from kvstrata.tagging.roles import ROLES, State
from kvstrata.types import Role

HOLE = "\u0fff"
"""In a mark's text: anything short on one line, such as a tool's name or a call's id."""
WHITESPACE = " \n\t\r"
_OPENERS = r"[ \n\t\r\u1000-\uffff]*"
_HEADER = re.compile(_OPENERS + r"[\u1000-\uffff](?:[ \n\t\r]*[A-Za-z_]{1,20}(?=[ \n\t\r\u1000-\uffff]|\Z))?" + _OPENERS)


@dataclass(frozen=True, slots=True)
class Mark:
    """Template text that ends `source` and enters `target`. Its parts are (text, role) in order; the turn grows before part `turn_part`
    where the target is a new user message (-1: it does not). `guard`: text that must not follow."""

    source: State
    target: State
    parts: tuple[tuple[str, Role], ...]
    turn_part: int = -1
    guard: str = ""

    @property
    def text(self) -> str:
        return "".join(text for text, _ in self.parts)

    @property
    def stays_inside(self) -> bool:
        """Whether it leads from one part of an answer to another."""
        return self.source in INSIDE and self.target in INSIDE and all(role is not Role.DELIM for _, role in self.parts)


@dataclass(frozen=True, slots=True)
class Segment:
    """Units from `start` to the next segment's start."""

    start: int
    role: Role
    turn: int


INSIDE = (State.ASSISTANT, State.REASONING, State.CALL)
"""What an answer is made of."""


@dataclass(frozen=True, slots=True)
class Pin:
    """Units [start, end) known to be the content of a message of this kind: no mark is looked for inside, whatever it holds.

    Of an answer's content (state among INSIDE) only the outer marks are not: thoughts and calls may begin and end in it."""

    start: int
    end: int
    state: State


def is_special(char: str) -> bool:
    return char > HOLE


def header_length(units: str) -> int:
    """Length of the opening delimiters: special tokens, white space and the role's name."""
    match = _HEADER.match(units)
    return match.end() if match else 0


def _pattern(text: str, first: bool, loose: bool | None) -> str:
    """Regular expression of one part.

    White space beside a special token may be missing, as in generated text; so may that at the mark's end, if the mark is `loose` (None:
    this part is not the end).
    """
    runs = re.findall(r"[ \n\t\r]+|\u0fff|[^ \n\t\r\u0fff]+", text)
    out = []
    for i, run in enumerate(runs):
        is_end = i == len(runs) - 1 and loose is not None
        beside = (i > 0 and is_special(runs[i - 1][-1])) or (i + 1 < len(runs) and is_special(runs[i + 1][0])) or (i == 0 and not first)
        optional = run[0] in WHITESPACE and (bool(loose) and (i > 0 or not first) if is_end else beside)
        # older tokenizers write a space after each special token; at the mark's very end it would be the content's own
        inner, last = (run[:-1], run[-1]) if is_end else (run, "")
        spaced = re.sub(r"([\u1000-\uffff])", r"\1 ?", re.escape(inner)) + re.escape(last)
        piece = r"[^\n\u1000-\uffff]{0,200}?" if run == HOLE else spaced
        out.append(f"(?:{piece})?" if optional else piece)
    return "".join(out)


def _patterns(mark: Mark) -> list[str]:
    n = len(mark.parts)
    # where white space alone tells the mark from other text, it is not optional
    loose = not mark.guard and (mark.target is not State.USER or any(role is Role.DELIM for _, role in mark.parts))
    parts = [_pattern(text, i == 0 and not loose, loose if i == n - 1 else None) for i, (text, _) in enumerate(mark.parts)]
    return [*parts, f"(?!{re.escape(mark.guard)})"] if mark.guard else parts


def _search(marks: Sequence[Mark]) -> re.Pattern[str]:
    """Where any of the marks begins. Each branch begins with a plain character, so that the search skips what cannot begin one."""
    bodies = ["".join(_patterns(mark)) for mark in marks]
    starts = [re.match(r"\(\?:([^()]*)\)\?(?=.)", body, re.DOTALL) for body in bodies]
    branches = [
        b
        for body, start in zip(bodies, starts, strict=True)
        for b in ([start[1] + body[start.end() :], body[start.end() :]] if start else [body])
    ]
    return re.compile("|".join(branches))


def _parts(mark: Mark) -> re.Pattern[str]:
    return re.compile("".join(p if p.startswith("(?!") else f"({p})" for p in _patterns(mark)))


def _precedence(mark: Mark) -> tuple[bool, bool, bool]:
    """Of marks with one text, the greatest counts.

    Where a template gives a result the envelope of a user's message, what follows a call or a result is a result, and anything else is the
    user's; where it writes what is said before a call as a thought, it is one.
    """
    after_call = mark.source in (State.CALL, State.OBS)
    return (mark.target is (State.OBS if after_call else State.USER), mark.target is State.REASONING, mark.target is not State.GAP)


class Automaton:
    def __init__(self, marks: Sequence[Mark]) -> None:
        ranked = sorted(marks, key=_precedence)
        unique = {(m.source, m.text): m for m in ranked if m.text.strip(WHITESPACE + HOLE)}
        self.marks: dict[State, list[Mark]] = {state: [] for state in State}
        # the longest first, so that a call's opening is preferred to the bare header that begins it
        for mark in sorted(unique.values(), key=lambda m: (-len(m.text), m.text)):
            self.marks[mark.source].append(mark)
        self.search = {state: _search(found) for state, found in self.marks.items() if found}
        inner = {state: [mark for mark in self.marks[state] if mark.stays_inside] for state in INSIDE}
        outer = {state: [mark for mark in self.marks[state] if not mark.stays_inside] for state in (*INSIDE, State.GAP)}
        self.inner_search = {state: _search(found) for state, found in inner.items() if found}
        self.outer_search = [_search(found) for found in outer.values() if found]
        self.parts = {state: [_parts(mark) for mark in found] for state, found in self.marks.items()}
        holes = max((m.text.count(HOLE) for ms in self.marks.values() for m in ms), default=0)
        self.reach = max((len(m.text) + len(m.guard) for ms in self.marks.values() for m in ms), default=0) + 200 * holes + 1
        """No match can begin further than this from the text that completes it."""

    def looks_like_a_boundary(self, units: str) -> bool:
        """Whether an answer that holds these units would seem to end in them."""
        return any(search.search(units) for search in self.outer_search)


@dataclass(frozen=True, slots=True)
class _Point:
    """Where a region begins. `began`: where the mark that led here begins, or -1 where nothing can change it any more."""

    pos: int
    state: State
    turn: int
    num_segments: int
    began: int = -1


class Scanner:
    """Reads units as they come. `segments` holds the labels of all that was read; the last few may still change with what follows."""

    def __init__(self, automaton: Automaton) -> None:
        self.automaton = automaton
        self.segments: list[Segment] = []
        self.length = 0
        self.turn = 0
        self.state = State.START
        self._tail, self._offset = "", 0
        self._points = [_Point(0, State.START, 0, 0)]

    @property
    def matched(self) -> bool:
        """Whether anything of the template was found."""
        return len(self._points) > 1 or self._points[0].pos > 0

    def feed(self, units: str, pins: Sequence[Pin] = ()) -> None:
        """Read on. Pins, in units from the very start, may be given with the first piece only."""
        assert not pins or self.length == 0
        clean = self._rewind()
        self._tail += units
        self.length += len(units)
        self._scan(clean, pins)

    def _rewind(self) -> int:
        """Back to the last point that further text cannot change; -> where the next mark can begin at the earliest."""
        settled = self.length - self.automaton.reach
        while self._points[-1].began > max(settled, -1):
            self._points.pop()
        point = self._points[-1]
        self._points = [point]
        del self.segments[point.num_segments :]
        self.state, self.turn = point.state, point.turn
        clean = max(point.pos, settled)
        # the opening header is labelled only when its region ends, so its text is kept until then
        keep = point.pos if point.state is State.START else clean
        self._tail, self._offset = self._tail[keep - self._offset :], keep
        return clean

    def _scan(self, clean: int, pins: Sequence[Pin]) -> None:
        pos = self._points[-1].pos
        pending = list(reversed(pins))
        while True:
            pin = pending[-1] if pending else None
            limit = pin.start if pin else self.length
            found = self._find(max(pos, clean), limit)
            if found is not None:
                mark, match = found
                began = match.start() + self._offset
                self._label(pos, began)
                pos = self._read(mark, match)
            elif pin is not None:
                pending.pop()
                self._label(pos, pin.start)
                self._enter(pin)
                pos = pin.start
                while pin.state in INSIDE and (inner := self._find(pos, pin.end, inside=True)):
                    self._label(pos, inner[1].start() + self._offset)
                    pos = self._read(*inner)
                self._label(pos, pin.end)
                began, pos = -1, pin.end
            else:
                break
            self._points.append(_Point(pos, self.state, self.turn, len(self.segments), began))
        self._label(pos, self.length)

    def _enter(self, pin: Pin) -> None:
        """The state at a pin's start; within an answer the one that its marks led to."""
        if self.state is not pin.state and not (self.state in INSIDE and pin.state in INSIDE):
            self.turn += pin.state is State.USER
            self.state = pin.state

    def _find(self, pos: int, limit: int, *, inside: bool = False) -> tuple[Mark, re.Match[str]] | None:
        """The next mark at or after `pos` that ends by `limit`: the leftmost, and of those the longest. inside: of those that do not
        leave the answer."""
        regex = (self.automaton.inner_search if inside else self.automaton.search).get(self.state)
        begin = regex.search(self._tail, pos - self._offset, limit - self._offset) if regex else None
        if begin is None:
            return None
        for mark, parts in zip(self.automaton.marks[self.state], self.automaton.parts[self.state], strict=True):
            if (not inside or mark.stays_inside) and (match := parts.match(self._tail, begin.start(), limit - self._offset)):
                return mark, match
        raise AssertionError("a mark was found that none matches")

    def _read(self, mark: Mark, match: re.Match[str]) -> int:
        """Label the parts of a mark, enter its target; -> where the mark ends."""
        for i, (_, role) in enumerate(mark.parts):
            self.turn += i == mark.turn_part
            if match.end(i + 1) > match.start(i + 1):
                self.segments.append(Segment(match.start(i + 1) + self._offset, role, self.turn))
        self.turn += mark.turn_part == len(mark.parts)
        self.state = mark.target
        return match.end() + self._offset

    def _label(self, start: int, end: int) -> None:
        """Units [start, end) are text of the current state."""
        if self.state is State.START and end > start:
            header = header_length(self._tail[start - self._offset : end - self._offset])
            if header:
                self.segments.append(Segment(start, Role.DELIM, self.turn))
            start += header
        if end > start:
            self.segments.append(Segment(start, ROLES[self.state], self.turn))
