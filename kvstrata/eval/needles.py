"""Facts that a conversation must still know later: planted at several depths, or the trace's own questions.

A fact is asked after the context; its log p is that of the true answer's tokens together, a hit is an answer whose every
token is the most likely one. Knows nothing of how a conversation is run.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from transformers import PreTrainedTokenizerBase

from kvstrata.eval.conversation import Asked, Conversation, ask, context_end, splice
from kvstrata.eval.metrics import Scores
from kvstrata.eval.traces import Question, Trace

DEPTHS = (0.1, 0.3, 0.5, 0.7, 0.9)
_PLACES = (
    "harbour",
    "orchard",
    "quarry",
    "lighthouse",
    "foundry",
    "vineyard",
    "windmill",
    "glacier",
    "bakery",
    "theatre",
    "reservoir",
    "chapel",
)


@dataclass(frozen=True)
class Needle:
    """depth: where the fact lies, as a share of the context; -1 where that is not known. log_p in nats."""

    question: str
    answer: str
    depth: float
    log_p: float
    hit: bool


def facts(count: int) -> list[Question]:
    """`count` facts that no model knows. Raises ValueError for more than there are names."""
    if not 0 <= count <= len(_PLACES):
        raise ValueError(f"{count} needles; accepted: 0 to {len(_PLACES)}")
    out = []
    for i, place in enumerate(_PLACES[:count]):
        code = str(1000 + (4243 * (i + 3)) % 9000)
        fact = f"The access code of the {place} is {code}."
        out.append(Question(f"What is the access code of the {place}?", code, f"The access code of the {place} is ", fact))
    return out


def depths(count: int) -> tuple[float, ...]:
    return DEPTHS if count == len(DEPTHS) else tuple((i + 0.5) / count for i in range(count))


def plant(tokenizer: PreTrainedTokenizerBase, trace: Trace, questions: Sequence[Question]) -> tuple[Conversation, tuple[Asked, ...]]:
    """The conversation with each question's source sentence at its depth (the nearest end of a sentence or line) and asked at the end."""
    conversation, asked = ask(tokenizer, trace, questions)
    context = context_end(conversation, len(questions))
    breaks = [p for p in range(1, context) if conversation.text[: conversation.starts[p]].endswith((". ", ".", "\n"))] or [1]
    places = [min(breaks, key=lambda p, d=d: abs(p - d * context)) for d in depths(len(questions))]  # type: ignore[misc]
    for at, question in sorted(zip(places, questions, strict=True), key=lambda x: -x[0]):
        text = f" {question.source}"
        ids = list(tokenizer(text, add_special_tokens=False)["input_ids"])
        conversation = splice(conversation, at, ids, text)
        asked = tuple(_moved(a, at, len(ids), is_here=a.question is question) for a in asked)
    return conversation, asked


def _moved(asked: Asked, at: int, count: int, is_here: bool) -> Asked:
    """The question after `count` tokens were put in before position `at`; is_here: they are its source."""
    source = at if is_here else asked.source + count * (asked.source >= at)
    return replace(asked, start=asked.start + count, end=asked.end + count, source=source)


def judge(asked: Sequence[Asked], scores: Scores, context: int) -> list[Needle]:
    """One Needle for each question, from the scores of its answer's tokens."""
    out = []
    for a in asked:
        rows = scores.only(np.isin(scores.position, np.arange(a.start, a.end)))
        assert len(rows) == a.end - a.start, f"of the answer {a.question.answer!r} {len(rows)} tokens of {a.end - a.start} are scored"
        depth = a.source / context if a.source >= 0 else -1.0
        out.append(Needle(a.question.text, a.question.answer, depth, float(-rows.nll.sum()), bool(rows.hit.all())))
    return out
