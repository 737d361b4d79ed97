"""Deep research as a conversation: an agent searches an archive of interviews topic by topic for a report on one person.

The first message says whom the report is on. Every search brings passages of that person's interviews among more of other people's;
single facts are asked while the reading goes on, and the rest when it is over. All texts are of `bfcl:memory` (bfcl.py); what a
passage answers is known from the set's `source` sentences. Nothing is drawn at random. Knows nothing of tokenizers.
"""

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from kvstrata.eval import bfcl
from kvstrata.eval.research_leads import LEADS
from kvstrata.eval.traces import Question, Trace, count

PEOPLE = {"customer": "customer", "finance": "managing director", "healthcare": "patient", "student": "student", "notetaker": "note taker"}
"""How each memory scenario's speaker is called."""
SCENARIOS = ("customer", "finance", "healthcare", "student")
"""Whom a report can be on; the note taker's sessions are too short for one."""
TOKENS, MIN_TOKENS, MAX_TOKENS = 16000, 3000, 30000
PASSAGE = 600
"""Characters of a passage, at most, unless one sentence is longer."""
CLOSING = 2
"""Last searches, which are about other people: every fact lies further back than that."""
BACK = 4
"""Searches between a passage and a question in the middle that it answers, at least."""
ASIDE = 3
"""Every how many searches a fact is asked while the reading goes on."""
_CHARACTERS, _FIXED, _SEARCH = 4.8, 450, 110
"""Characters of this text a token; tokens of instructions, schema and first request; tokens of a search besides its passages."""
_SHARE = 0.45
"""Of what is read, how much is on the person of the report."""
_AGENT = (
    "You are a research agent. Search the interview archive as the user asks and remember what you read. "
    "When the user asks for a fact, answer with the bare fact, in as few words as you can."
)
_SEARCH_TOOL = {
    "type": "function",
    "function": {
        "name": "search",
        "description": "Search the archive of interviews. Returns the passages that match best, most of them by chance.",
        "parameters": {
            "type": "object",
            "properties": {"query": {"type": "string", "description": "Whom and what the passages should be about."}},
            "required": ["query"],
        },
    },
}


@dataclass(frozen=True)
class Passage:
    """A few sentences of one interview. person: its memory scenario; session: the interview's number; number: of the passage in it."""

    person: str
    topic: str
    session: int
    number: int
    text: str

    def rendered(self) -> str:
        return f"[Interview with the {PEOPLE[self.person]}: {self.topic}, passage {self.number}]\n{self.text}"


@dataclass(frozen=True)
class Fact:
    question: Question
    passage: Passage


def load(source: str) -> Trace:
    """The trace of `research:SCENARIO[:TOKENS[:PEOPLE]]`, PEOPLE whose interviews are searched, joined by +; all by default.
    Raises ValueError for an unknown scenario or person, and for a length that can't be."""
    _, scenario, *rest = source.split(":")
    if scenario not in SCENARIOS or len(rest) > 2:
        raise ValueError(f"unknown traces {source!r}; accepted: {', '.join(f'research:{s}[:TOKENS[:PEOPLE]]' for s in SCENARIOS)}")
    people = tuple(rest[1].split("+")) if len(rest) > 1 else tuple(PEOPLE)
    if scenario not in people or not set(people) <= set(PEOPLE) or len(set(people)) < max(2, len(people)):
        raise ValueError(f"people of {source!r}; accepted: {scenario} and others of {', '.join(PEOPLE)}, joined by +")
    return research(scenario, count(rest[0], source) if rest else TOKENS, people)


def passages(person: str) -> list[Passage]:
    """Everything that a person says, in order, cut between sentences."""
    out: list[Passage] = []
    for session, (topic, texts) in enumerate(bfcl.told_sessions(person)):
        cut = [piece for text in texts for piece in _pieces(text)]
        out += [Passage(person, topic, session, i + 1, piece) for i, piece in enumerate(cut)]
    return out


def _pieces(text: str) -> list[str]:
    pieces: list[str] = []
    for sentence in re.split(r"(?<=[.!?]) +", text.strip()):
        if pieces and len(pieces[-1]) + len(sentence) < PASSAGE:
            pieces[-1] += f" {sentence}"
        else:
            pieces.append(sentence)
    return pieces


def facts(person: str) -> list[Fact]:
    """The set's questions about a person that have a lead, and whose answer one passage holds word for word, hardly any other, and no
    other question."""
    told, questions, leads = passages(person), bfcl.memory(person).questions, LEADS[person]
    out = []
    for q in questions:
        holding = [p for p in told if q.source and q.answer in q.source and q.source in p.text]
        elsewhere = sum(_says(p.text, q.answer) for p in told)
        known = any(_says(other.text, q.answer) for other in questions)
        if q.answer in leads and len(holding) == 1 and elsewhere <= 2 and not known:
            # a lead that ends in a hyphen or an opening quote goes on without a space
            prefix = leads[q.answer] + " " * (not leads[q.answer].endswith(("-", "'")))
            # the set says after its question how an answer is to be written, which the lead does here
            text = q.text[: q.text.rindex("?") + 1]
            out.append(Fact(replace(q, text=f"For the report on the {PEOPLE[person]}: {text}", prefix=prefix), holding[0]))
    return out


def _says(text: str, words: str) -> bool:
    return re.search(rf"(?<!\w){re.escape(words)}(?!\w)", text, re.IGNORECASE) is not None


def research(scenario: str, tokens: int = TOKENS, people: Sequence[str] = tuple(PEOPLE)) -> Trace:
    """The conversation on a person, about `tokens` tokens long before the last questions. Raises ValueError where what `people`
    say does not fill it."""
    if not MIN_TOKENS <= tokens <= MAX_TOKENS:
        raise ValueError(f"research of {tokens} tokens; accepted: {MIN_TOKENS} to {MAX_TOKENS}")
    # short conversations have shorter turns, not fewer than can be told apart
    searches = max(8, round(tokens / 950))
    room = round(((tokens - _FIXED) / searches - _SEARCH) * _CHARACTERS)
    readings = _readings(scenario, searches - CLOSING, round(_SHARE * room))
    others = _others(scenario, people)
    asked = {f.question.text: f for f in facts(scenario) if any(f.passage in reading for reading in readings)}
    waiting = sorted(asked.values(), key=lambda f: next(i for i, reading in enumerate(readings) if f.passage in reading))
    topics = list(dict.fromkeys(reading[0].topic for reading in readings))
    messages: list[dict[str, Any]] = [{"role": "system", "content": _AGENT}]
    questions: list[Question] = []
    for i in range(searches):
        on_topic = readings[i] if i < len(readings) else []
        if not others:
            raise ValueError(f"research of {tokens} tokens; the interviews with {', '.join(people)} fill {i} of its {searches} searches")
        person, topic = (scenario, on_topic[0].topic) if on_topic else (others[0].person, others[0].topic)
        noise = _taken(others, room - sum(len(p.rendered()) for p in on_topic))
        again = bool(on_topic) and any(r[0].topic == topic for r in readings[:i])
        request = _request(PEOPLE[person], topic, again, not on_topic) if i else _first_request(PEOPLE[scenario], topics)
        messages.append({"role": "user", "content": request})
        if i > BACK and i % ASIDE == 0 and (ripe := [f for f in waiting if any(f.passage in r for r in readings[: i - BACK])]):
            questions.append(replace(ripe[0].question, at=len(messages) - 1))
            waiting.remove(ripe[0])
        query = f"{PEOPLE[person]} {topic}{' more' if again else ''}"
        call = {"type": "function", "function": {"name": "search", "arguments": {"query": query}}}
        messages.append({"role": "assistant", "content": "", "tool_calls": [call]})
        messages.append({"role": "tool", "name": "search", "content": "\n\n".join(p.rendered() for p in _mixed(on_topic, noise))})
        messages.append({"role": "assistant", "content": _note(PEOPLE[scenario], on_topic, noise)})
    questions += [f.question for f in waiting]
    among = "" if set(people) == set(PEOPLE) else "_" + "+".join(people)
    return Trace(f"research_{scenario}_{tokens}{among}", messages, [_SEARCH_TOOL], tuple(questions))


def _readings(person: str, count: int, room: int) -> list[list[Passage]]:
    """What `count` searches bring of a person: passages of one interview each, in the order of the interviews, about `room` characters.
    Passages that answer something come before others where there is no room for all."""
    told = passages(person)
    answering = [f.passage for f in facts(person)]
    sessions = [s for s in dict.fromkeys(p.session for p in told) if any(p.session == s for p in answering)]
    if len(sessions) > count:
        sessions = sorted(sorted(sessions, key=lambda s: -sum(p.session == s for p in answering))[:count])
    out: list[list[Passage]] = []
    for place, session in enumerate(sessions):
        turns = (count * (place + 1)) // len(sessions) - (count * place) // len(sessions)
        mine = sorted((p for p in told if p.session == session), key=lambda p: -answering.count(p))
        sizes = [sum(len(p.rendered()) for p in mine[: k + 1]) for k in range(len(mine))]
        # one passage for each turn at least, and no more than fit
        chosen = sorted(mine[: max(turns, sum(size <= turns * room for size in sizes))], key=lambda p: p.number)
        turns = min(turns, len(chosen))
        out += [chosen[len(chosen) * t // turns : len(chosen) * (t + 1) // turns] for t in range(turns)]
    return out


def _others(person: str, people: Sequence[str]) -> list[Passage]:
    """Passages of the other people, two at a time of an interview, people taking turns."""
    queues = [passages(p) for p in people if p != person]
    out: list[Passage] = []
    while any(queues):
        for queue in queues:
            out += queue[:2]
            del queue[:2]
    return out


def _taken(others: list[Passage], room: int) -> list[Passage]:
    """The next passages that fill `room` characters, taken out of the list: one at least, and the last may stick out by half."""
    out = [others.pop(0)]
    room -= len(out[0].rendered())
    while others and len(others[0].rendered()) / 2 < room:
        out.append(others.pop(0))
        room -= len(out[-1].rendered())
    return out


def _mixed(wanted: Sequence[Passage], noise: Sequence[Passage]) -> list[Passage]:
    """Wanted passages spread evenly among the others."""
    places = [((k + 0.5) / len(group), p) for group in (wanted, noise) for k, p in enumerate(group)]
    return [p for _, p in sorted(places, key=lambda x: x[0])]


def _first_request(person: str, topics: Iterable[str]) -> str:
    listed = "; ".join(topics)
    return (
        f"I am writing a report on one person in our archive of interviews, the {person}. It has to get the {person}'s facts right: names, "
        f"numbers, places, dates. Topics: {listed}. Searches also bring passages of interviews with other people; the report has no use "
        f"for those. Search topic by topic and read; I will ask for facts on the {person} as I write. Begin with the first topic."
    )


def _request(person: str, topic: str, again: bool, closing: bool) -> str:
    if closing:
        return f"Just to see what else there is: what does the {person} say on {topic}?"
    return f"Is there more on {topic}?" if again else f"Go on with {topic}."


def _note(person: str, on_topic: Sequence[Passage], noise: Sequence[Passage]) -> str:
    if not on_topic:
        return f"No passage is on the {person}."
    return f"{len(on_topic)} of {len(on_topic) + len(noise)} passages are on the {person}. I have read them."


def without_evidence(trace: Trace) -> Trace:
    """The conversation without the passages that answer its questions: what a model answers then it has not read."""
    sources = [q.source for q in trace.questions]
    messages = []
    for message in trace.messages:
        if message["role"] == "tool":
            kept = [p for p in message["content"].split("\n\n[") if not any(s in p for s in sources)]
            text = "\n\n[".join(kept)
            message = message | {"content": text if text.startswith("[") or not text else f"[{text}"}
        messages.append(message)
    return replace(trace, id=f"{trace.id}_without_evidence", messages=messages)
