"""Spans as compact arrays, by token and by page. Knows nothing of templates."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvstrata.types import PAGE_SIZE, Age, Modality, Role, Span

ROLES = tuple(Role)
"""Role of code i."""
MODALITIES = tuple(Modality)
"""Modality of code i."""
NUM_TAGS = len(Age) * len(MODALITIES) * len(ROLES)


class TokenTags(NamedTuple):
    """int8 [n] each: Age, index into MODALITIES, index into ROLES."""

    age: NDArray[np.int8]
    modality: NDArray[np.int8]
    role: NDArray[np.int8]

    @property
    def code(self) -> NDArray[np.int64]:
        """int64 [n]: one number in [0, 56) a tag."""
        return (self.age.astype(np.int64) * len(MODALITIES) + self.modality) * len(ROLES) + self.role


def tags_by_token(spans: Sequence[Span], num_tokens: int, current_turn: int | None = None) -> TokenTags:
    """Tags of tokens [0, num_tokens). current_turn: None takes the newest of the spans.

    Tokens past the last span, such as those that are yet to be generated, are an assistant's of the current turn.
    Raises ValueError where spans leave a gap or overlap, or end beyond num_tokens.
    """
    turn = max((s.turn for s in spans), default=0) if current_turn is None else current_turn
    turn = max(turn, 0)
    age, modality = np.zeros(num_tokens, np.int8), np.zeros(num_tokens, np.int8)
    role = np.full(num_tokens, ROLES.index(Role.ASSISTANT), np.int8)
    end = 0
    for span in spans:
        check_follows(span, end)
        end = span.end
        tag = span.tag(turn)
        age[span.start : end] = tag.age
        modality[span.start : end] = MODALITIES.index(tag.modality)
        role[span.start : end] = ROLES.index(tag.role)
    check_ends(end, num_tokens)
    return TokenTags(age, modality, role)


def page_tags(spans: Sequence[Span], num_tokens: int, current_turn: int | None = None) -> NDArray[np.int32]:
    """int32 [pages, 56]: how many tokens of each tag a page holds; arguments and errors as of tags_by_token.

    A histogram, not one tag: a page of 32 tokens often holds a call, its delimiters and a result, and which of them decides is for a
    policy to say. Counted by runs of one tag in one page, which are far fewer than tokens.
    """
    turn = max(max((s.turn for s in spans), default=0) if current_turn is None else current_turn, 0)
    starts, codes, end = [], [], 0
    for span in spans:
        check_follows(span, end)
        tag, end = span.tag(turn), span.end
        starts.append(span.start)
        codes.append((tag.age * len(MODALITIES) + MODALITIES.index(tag.modality)) * len(ROLES) + ROLES.index(tag.role))
    check_ends(end, num_tokens)
    if end < num_tokens:
        starts.append(end)
        codes.append(ROLES.index(Role.ASSISTANT))
    num_pages = -(-num_tokens // PAGE_SIZE)
    bounds = np.union1d(np.array(starts, np.int64), np.arange(0, num_tokens, PAGE_SIZE))
    code = np.array(codes, np.int64)[np.searchsorted(starts, bounds, side="right") - 1] if num_tokens else np.zeros(0, np.int64)
    counts = np.zeros(num_pages * NUM_TAGS, np.int32)
    np.add.at(counts, bounds // PAGE_SIZE * NUM_TAGS + code, np.diff(bounds, append=num_tokens).astype(np.int32))
    return counts.reshape(num_pages, NUM_TAGS)


def check_follows(span: Span, end: int) -> None:
    if span.start != end:
        raise ValueError(f"span [{span.start}, {span.end}) follows one that ends at {end}; spans must partition the tokens in order")


def check_ends(end: int, num_tokens: int) -> None:
    if end > num_tokens:
        raise ValueError(f"spans end at {end}; there are {num_tokens} tokens")
