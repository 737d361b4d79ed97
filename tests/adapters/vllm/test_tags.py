"""Tags page by page are those of the whole conversation, but at a page's end, and never look ahead."""

from typing import Any

import numpy as np
import pytest
from transformers import AutoTokenizer

from kvstrata.adapters.vllm.tags import PageTagger, code, served_reader
from kvstrata.policy.tags import NUM_TAGS
from kvstrata.tagging.template import tag_ids
from kvstrata.types import PAGE_SIZE, Modality


@pytest.fixture(scope="module")
def tokenizer(model_path: Any) -> Any:
    return AutoTokenizer.from_pretrained(model_path("smollm2"))


def conversation(tokenizer: Any) -> list[int]:
    messages = [{"role": "system", "content": "You are a helpful assistant of few words."}]
    for turn in range(6):
        messages += [{"role": "user", "content": f"Tell me about the number {turn} and what comes after it. " * 4}]
        messages += [{"role": "assistant", "content": f"{turn} is followed by {turn + 1}. " * 5}]
    return list(tokenizer.apply_chat_template(messages, tokenize=True, return_dict=False))


def pages(tagger: PageTagger, ids: list[int]) -> list[Any]:
    return [tagger(ids[i : i + PAGE_SIZE]) for i in range(0, len(ids) - PAGE_SIZE + 1, PAGE_SIZE)]


def test_pages_have_the_roles_of_the_whole(tokenizer: Any) -> None:
    ids = conversation(tokenizer)
    found = pages(PageTagger(served_reader(tokenizer, None)), ids)
    want = np.zeros((len(ids), NUM_TAGS), np.int64)
    for span in tag_ids(tokenizer, ids):
        want[span.start : span.end, code(span.role, span.modality is Modality.IMAGE)] = 1
    differ = 0
    for p, counts in enumerate(found):
        assert counts.sum() == PAGE_SIZE
        differ += int(np.abs(counts - want[p * PAGE_SIZE : (p + 1) * PAGE_SIZE].sum(0)).sum()) // 2
    # a mark that a page's end cuts through is known only with what follows
    assert differ <= 0.03 * len(ids), differ


def test_what_follows_changes_nothing(tokenizer: Any) -> None:
    ids = conversation(tokenizer)
    learned = served_reader(tokenizer, None)
    whole = pages(PageTagger(learned), ids)
    for cut in (40, 100, 230):
        other = ids[: cut // PAGE_SIZE * PAGE_SIZE] + ids[5 : 5 + PAGE_SIZE * 3]
        for a, b in zip(whole[: cut // PAGE_SIZE], pages(PageTagger(learned), other), strict=False):
            assert (a == b).all()


def test_ids_that_no_tokenizer_has_are_text(tokenizer: Any) -> None:
    tagger = PageTagger(served_reader(tokenizer, None))
    assert tagger([-1, 10**9, 0, 5] * 8).sum() == PAGE_SIZE


def test_the_served_template_stands_in_for_the_tokenizers_own(tokenizer: Any, tmp_path: Any) -> None:
    template = (
        "{% for m in messages %}[{{ m['role'] }}]{{ m['content'] }}[end]{% endfor %}{% if add_generation_prompt %}[assistant]{% endif %}"
    )
    own = tokenizer.chat_template
    (tmp_path / "t.jinja").write_text(template)
    for given in (template, str(tmp_path / "t.jinja")):
        learned = served_reader(tokenizer, given)
        assert any("[user]" in mark.text or "user]" in mark.text for mark in learned.skeleton.marks)
    assert tokenizer.chat_template == own


@pytest.mark.parametrize("name", ["nowhere.jinja", ".", "", "a\0b", "\ud800", "x" * 10_000])
def test_a_template_that_cannot_be_read_is_refused_in_a_line(tokenizer: Any, name: str) -> None:
    with pytest.raises(ValueError, match=r"chat_template .* accepted: a file's path, or a text") as caught:
        served_reader(tokenizer, name)
    assert "\n" not in str(caught.value)
