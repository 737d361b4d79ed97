"""Tags of a request's tokens as an engine has them: token ids alone, page by page, with the served chat template's automaton.

What follows a page does not enter its tags, so that requests with a common prefix agree on them. Ages are not told apart: when a page is
written, it is of the current turn. Knows nothing of any engine.
"""

import copy
from bisect import bisect_right
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvstrata.policy.tags import MODALITIES, NUM_TAGS, ROLES
from kvstrata.tagging.automaton import Scanner
from kvstrata.tagging.template import Reader, reader
from kvstrata.types import Age, Modality, Role


def code(role: Role, image: bool) -> int:
    """The tag's number in [0, 56) (policy/tags.py) in the current turn."""
    modality = MODALITIES.index(Modality.IMAGE if image else Modality.TEXT)
    return (int(Age.CURRENT) * len(MODALITIES) + modality) * len(ROLES) + ROLES.index(role)


def served_reader(tokenizer: Any, chat_template: str | None) -> Reader:
    """The automaton of the template that a server renders conversations with. chat_template: a file or a text; None: the tokenizer's own.
    The tokenizer stays as it is."""
    own = copy.copy(tokenizer)
    if chat_template is not None:
        own.chat_template = template_text(chat_template)
    return reader(own)


def template_text(chat_template: str) -> str:
    """Raises ValueError where a file of that name cannot be read as text."""
    if "{" in chat_template or "\n" in chat_template:
        return chat_template
    try:
        return Path(chat_template).read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise ValueError(f"chat_template {chat_template[:200]!r} cannot be read ({error}); accepted: a file's path, or a text") from error


class PageTagger:
    """Counts of tags of one request's pages. Call it with the ids of each page, in order."""

    def __init__(self, learned: Reader) -> None:
        self._vocabulary = learned.vocabulary
        self._scanner = Scanner(learned.automaton)
        self._units = 0

    def __call__(self, token_ids: Sequence[int]) -> NDArray[np.int64]:
        """-> int64 [56]. Ids that no tokenizer has are an assistant's text of no length: a server has checked a prompt's ids."""
        given = np.asarray(token_ids, np.int64)
        ids = self._vocabulary.check(np.where((given < 0) | (given >= self._vocabulary.known), 0, given))
        lengths = self._vocabulary.lengths[ids]
        starts = self._units + np.cumsum(lengths) - lengths
        self._scanner.feed(self._vocabulary.join(ids))
        self._units += int(lengths.sum())
        segments = self._scanner.segments if self._scanner.matched else []
        counts = np.zeros(NUM_TAGS, np.int64)
        for start, image in zip(starts.tolist(), self._vocabulary.is_image[ids].tolist(), strict=True):
            at = bisect_right(segments, start, key=lambda s: s.start) - 1
            counts[code(segments[at].role if at >= 0 else Role.USER, bool(image))] += 1
        return counts
