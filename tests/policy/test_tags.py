"""Spans as arrays."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstrata.policy.tags import MODALITIES, NUM_TAGS, ROLES, page_tags, tags_by_token
from kvstrata.types import Age, Modality, Role, Span

SPANS = (Span(0, 10, Role.INST, 0), Span(10, 40, Role.USER, 1), Span(40, 70, Role.OBS, 3, Modality.IMAGE))


def test_tags_by_token_agree_with_each_span():
    tags = tags_by_token(SPANS, 70, current_turn=3)
    for span in SPANS:
        for i in range(span.start, span.end):
            tag = span.tag(3)
            assert (Age(tags.age[i]), MODALITIES[tags.modality[i]], ROLES[tags.role[i]]) == (tag.age, tag.modality, tag.role)
    assert {a.dtype for a in tags} == {np.dtype(np.int8)}


def test_tokens_to_come_are_the_assistants():
    tags = tags_by_token(SPANS, 75)
    assert [ROLES[r] for r in tags.role[70:]] == [Role.ASSISTANT] * 5
    assert tags.age[70:].tolist() == [Age.CURRENT] * 5
    assert tags.age[0] == Age.OLDER


def test_page_tags_count_every_token_once():
    tags = tags_by_token(SPANS, 70, 3)
    counts = page_tags(SPANS, 70, 3)
    assert counts.shape == (3, NUM_TAGS)
    assert counts.sum(1).tolist() == [32, 32, 6]
    assert counts[0, tags.code[0]] == 10
    assert counts[0, tags.code[10]] == 22
    assert page_tags((), 0).shape == (0, NUM_TAGS)


@given(st.lists(st.tuples(st.integers(1, 90), st.sampled_from(Role), st.integers(0, 5)), max_size=12), st.integers(0, 70))
def test_page_tags_are_the_histograms_of_tokens(runs, extra):
    spans, end = [], 0
    for length, role, turn in runs:
        spans.append(Span(end, end + length, role, turn))
        end += length
    codes = tags_by_token(spans, end + extra).code
    counts = page_tags(spans, end + extra)
    for page in range(len(counts)):
        assert counts[page].tolist() == np.bincount(codes[page * 32 : page * 32 + 32], minlength=NUM_TAGS).tolist()


@pytest.mark.parametrize("spans", [(SPANS[0], SPANS[2]), (SPANS[1],), (SPANS[0], SPANS[0])])
def test_spans_that_are_no_partition_are_refused(spans):
    with pytest.raises(ValueError, match="must partition"):
        tags_by_token(spans, 70)
    with pytest.raises(ValueError, match="must partition"):
        page_tags(spans, 70)


def test_spans_beyond_the_end_are_refused():
    with pytest.raises(ValueError, match="spans end at 70; there are 60 tokens"):
        tags_by_token(SPANS, 60)
    with pytest.raises(ValueError, match="spans end at 70; there are 60 tokens"):
        page_tags(SPANS, 60)
