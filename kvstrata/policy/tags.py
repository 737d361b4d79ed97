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
        if span.start != end:
            raise ValueError(f"span [{span.start}, {span.end}) follows one that ends at {end}; spans must partition the tokens in order")
        end = span.end
        tag = span.tag(turn)
        age[span.start : end] = tag.age
        modality[span.start : end] = MODALITIES.index(tag.modality)
        role[span.start : end] = ROLES.index(tag.role)
    if end > num_tokens:
        raise ValueError(f"spans end at {end}; there are {num_tokens} tokens")
    return TokenTags(age, modality, role)


def page_tags(tags: TokenTags) -> NDArray[np.int32]:
    """int32 [pages, 56]: how many tokens of each tag a page holds.

    A histogram, not one tag: a page of 32 tokens often holds a call, its delimiters and a result, and which of them decides is for a
    policy to say.
    """
    num_pages = -(-len(tags.role) // PAGE_SIZE)
    page = np.arange(len(tags.role)) // PAGE_SIZE
    counts = np.bincount(page * NUM_TAGS + tags.code, minlength=num_pages * NUM_TAGS)
    return counts.reshape(num_pages, NUM_TAGS).astype(np.int32)
