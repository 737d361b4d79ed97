from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from kvstrata.eval.conversation import ask, context_end, render, renders_tools, splice
from kvstrata.eval.needles import facts, plant
from kvstrata.eval.traces import Question, Trace
from kvstrata.types import Role
from tests.eval.fakes import MESSAGES, TOOL

TRACE = Trace("t", MESSAGES, [TOOL])


@pytest.fixture(scope="module", params=["smollm2", "qwen05"])
def tokenizer(request: Any, model_path: Callable[[str], Path]) -> Any:
    return AutoTokenizer.from_pretrained(model_path(request.param))


def check_spans(conversation: Any) -> None:
    assert [s.start for s in conversation.spans] == [0, *(s.end for s in conversation.spans[:-1])]
    assert conversation.spans[-1].end == len(conversation) == len(conversation.starts)
    assert "".join(conversation.token_text(i) for i in range(len(conversation))) == conversation.text


def test_replies_are_what_the_model_generated(tokenizer: Any) -> None:
    conversation = render(tokenizer, TRACE)
    check_spans(conversation)
    replies = [tokenizer.decode(conversation.token_ids[a:b]) for a, b in conversation.replies]
    call = '<tool_call>\n{"name": "cd", "arguments": {"folder": "documents"}}\n</tool_call><|im_end|>'
    assert replies == [call, "You are in documents now.<|im_end|>", call]
    assert all(conversation.text[: conversation.starts[a]].endswith("<|im_start|>assistant\n") for a, _ in conversation.replies)


def test_calls_and_schema_are_in_the_prompt_whatever_the_template(tokenizer: Any) -> None:
    # SmolLM2's template leaves both out; Qwen's writes them itself
    assert renders_tools(tokenizer) == ("Qwen" in (tokenizer.chat_template or ""))
    conversation = render(tokenizer, TRACE)
    assert "Change folder." in conversation.text
    calls = [p for s in conversation.spans if s.role is Role.TOOL_CALL for p in range(s.start, s.end)]
    assert sum(a <= p < b for p in calls for a, b in conversation.replies) == len(calls) > 20


def test_chunks_end_where_a_session_would_stop(tokenizer: Any) -> None:
    conversation = render(tokenizer, TRACE)
    assert conversation.chunks() == [e for r in conversation.replies for e in r] + [len(conversation)]
    # user turns without a reply are chunks of their own
    monologue = Trace("m", [{"role": "user", "content": f"This is fact number {i}."} for i in range(4)])
    conversation = render(tokenizer, monologue)
    starts = [s.start for a, s in zip(conversation.spans, conversation.spans[1:], strict=False) if s.turn > max(a.turn, 1)]
    assert conversation.chunks() == [*starts, len(conversation)]


def test_questions_follow_the_conversation_and_point_at_their_source(tokenizer: Any) -> None:
    question = Question("Which folder?", "documents", "It is ", "You are in documents now.")
    conversation, (asked,) = ask(tokenizer, TRACE, [question])
    plain = render(tokenizer, TRACE)
    end = context_end(conversation, 1)
    assert conversation.token_ids[:end] == plain.token_ids[:end]
    assert len(plain) - end <= 1
    assert tokenizer.decode(conversation.token_ids[asked.start : asked.end]).strip() == "documents"
    assert conversation.text[conversation.starts[asked.source] :].startswith("You are in documents now.")


def test_a_source_that_is_not_there_has_no_place(tokenizer: Any) -> None:
    _, (asked,) = ask(tokenizer, TRACE, [Question("Why?", "because", source="nowhere to be found")])
    assert asked.source == -1


def test_questions_in_the_middle_are_asked_where_they_say(tokenizer: Any) -> None:
    # the second user message is the sixth; questions come in the order of the conversation
    late, early = Question("Late?", "the last"), Question("Early?", "documents", "It is ", at=5)
    conversation, asked = ask(tokenizer, TRACE, [late, early])
    check_spans(conversation)
    assert [a.question for a in asked] == [early, late]
    assert [tokenizer.decode(conversation.token_ids[a.start : a.end]).strip() for a in asked] == ["documents", "the last"]
    texts = ("You are in documents now.", "Early?", "It is documents", "And back?", "Late?", "the last")
    places = [conversation.text.index(text) for text in texts]
    assert places == sorted(places)
    end = context_end(conversation, 1)
    before, after = (tokenizer.decode(ids) for ids in (conversation.token_ids[:end], conversation.token_ids[end:]))
    assert "And back?" in before and "Late?" not in before and after.count("Late?") == 1


def test_planted_facts_lie_at_their_depths_and_answers_stay_in_place(tokenizer: Any) -> None:
    filler = {"role": "user", "content": " ".join(f"Line {i} says little." for i in range(200))}
    trace = replace(TRACE, messages=[*MESSAGES, filler])
    conversation, asked = plant(tokenizer, trace, facts(5))
    check_spans(conversation)
    context = context_end(conversation, 5)
    for depth, a in zip((0.1, 0.3, 0.5, 0.7, 0.9), asked, strict=True):
        assert conversation.text[conversation.starts[a.source] :].lstrip().startswith(a.question.source)
        assert abs(a.source / context - depth) < 0.06
        assert tokenizer.decode(conversation.token_ids[a.start : a.end]).strip() == a.question.answer
        assert any(start <= a.start < a.end <= end for start, end in conversation.replies)


def test_splicing_keeps_roles_and_moves_the_rest(tokenizer: Any) -> None:
    before = render(tokenizer, TRACE)
    ids = tokenizer(" A fact.", add_special_tokens=False)["input_ids"]
    for at in (1, before.spans[1].start, before.spans[1].start + 1, len(before) - 1):
        after = splice(before, at, ids, " A fact.")
        check_spans(after)
        n = len(ids)
        assert after.token_ids[:at] + after.token_ids[at + n :] == before.token_ids
        assert [after.role_at(p) for p in [*range(at), *range(at + n, len(after))]] == [before.role_at(p) for p in range(len(before))]
        assert [after.token_ids[a:b] for a, b in after.replies if not a < at < b] == [
            before.token_ids[a:b] for a, b in before.replies if not a < at < b
        ]


def test_messages_that_the_template_refuses_name_the_trace(tokenizer: Any) -> None:
    with pytest.raises(ValueError, match="trace t: the chat template does not take its messages: the chat template refuses"):
        render(tokenizer, Trace("t", [{"role": "user", "content": [{"type": "image"}]}]))


def test_contents_as_clients_send_them_render_as_plain_text_does(tokenizer: Any) -> None:
    def in_parts(message: dict[str, Any]) -> dict[str, Any]:
        return message | {"content": [{"type": "text", "text": message["content"]}] if message["content"] else None}

    plain = render(tokenizer, Trace("t", MESSAGES, [TOOL]))
    assert render(tokenizer, Trace("t", [in_parts(m) for m in MESSAGES], [TOOL])) == plain


def test_a_template_that_fails_in_its_own_way_names_the_trace(tokenizer: Any) -> None:
    template, tokenizer.chat_template = tokenizer.chat_template, "{{ raise_exception('not today') if tools }}{{ messages[0].content }}"
    try:
        with pytest.raises(ValueError, match=r"trace t: .*not today"):
            render(tokenizer, Trace("t", MESSAGES, [TOOL]))
    finally:
        tokenizer.chat_template = template
