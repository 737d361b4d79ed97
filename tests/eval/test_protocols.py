from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoTokenizer

from kvstrata.eval.conversation import ask, render
from kvstrata.eval.needles import facts, judge, plant
from kvstrata.eval.protocols import PROTOCOLS, TAIL, make_task, run_reference, run_session
from kvstrata.eval.traces import Question, Trace
from kvstrata.types import Role
from tests.eval.fakes import MESSAGES, TOOL, DenseSession, tiny_model

TRACE = Trace("t", MESSAGES, [TOOL])


@pytest.fixture(scope="module")
def tokenizer(model_path: Callable[[str], Path]) -> Any:
    return AutoTokenizer.from_pretrained(model_path("smollm2"))


@pytest.fixture(scope="module")
def model() -> Any:
    return tiny_model()


def test_turns_scores_every_reply_after_the_first(tokenizer: Any) -> None:
    conversation = render(tokenizer, TRACE)
    task = make_task("turns", conversation)
    assert list(task.scored) == [p for a, b in conversation.replies[1:] for p in range(a, b)]
    assert list(task.chunks) == conversation.chunks()


def test_oneshot_scores_the_last_tokens_in_one_chunk(tokenizer: Any) -> None:
    long = Trace("l", [{"role": "user", "content": "word " * 2000}])
    task = make_task("oneshot", render(tokenizer, long))
    n = len(task.conversation)
    assert task.chunks == (n - TAIL, n)
    assert task.scored == tuple(range(n - TAIL + 1, n))
    short = make_task("oneshot", render(tokenizer, TRACE))
    assert short.chunks[0] == len(short.conversation) - len(short.conversation) // 2


def test_questions_are_asked_one_after_another(tokenizer: Any) -> None:
    questions = [Question("Where?", "documents"), Question("Who?", "nobody", "It was ")]
    conversation, asked = ask(tokenizer, TRACE, questions)
    for protocol in PROTOCOLS:
        task = make_task(protocol, conversation, asked)
        assert task.chunks[-2:] == (conversation.replies[-2][1], len(conversation))
        assert task.context in task.chunks
        assert conversation.replies[-3][1] <= task.context < asked[0].start
        assert set(range(asked[1].start, asked[1].end)) < set(task.scored)


def test_unknown_protocols_and_nothing_to_score_are_refused(tokenizer: Any) -> None:
    with pytest.raises(ValueError, match="unknown protocol 'twice'; accepted: turns, oneshot"):
        make_task("twice", render(tokenizer, TRACE))
    with pytest.raises(ValueError, match="trace t: turns has nothing to score"):
        make_task("turns", render(tokenizer, Trace("t", MESSAGES[:3], [TOOL])))


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_an_uncompressed_session_loses_nothing(protocol: str, tokenizer: Any, model: Any) -> None:
    task = make_task(protocol, render(tokenizer, TRACE))
    session = DenseSession(model)
    outcome = run_session(session, task, run_reference(model, task))
    assert abs(outcome.scores.kl_mean) < 1e-6
    assert outcome.scores.top1 == 1
    assert session.fed == list(task.chunks)
    assert outcome.tokens == len(task.conversation)
    assert outcome.fed_tokens == sum(task.chunks)
    assert outcome.reused_tokens == sum(task.chunks[:-1])
    roles = [task.conversation.role_at(p) is Role.TOOL_CALL for p in task.scored]
    assert outcome.scores.tool_call.tolist() == roles


def test_the_reference_is_the_model_over_the_whole_text(tokenizer: Any, model: Any) -> None:
    task = make_task("turns", render(tokenizer, TRACE))
    with torch.inference_mode():
        logits = model(torch.tensor([task.conversation.token_ids])).logits[0]
    whole = torch.log_softmax(logits[[p - 1 for p in task.scored]], -1)
    torch.testing.assert_close(run_reference(model, task).log_probs, whole, rtol=1e-4, atol=1e-4)


def test_what_a_session_loses_is_measured(tokenizer: Any, model: Any) -> None:
    task = make_task("turns", render(tokenizer, TRACE))
    outcome = run_session(DenseSession(model, noise=0.5), task, run_reference(model, task))
    assert 0.001 < outcome.scores.kl_mean < 1


def test_storage_is_that_of_the_context_and_facts_are_judged(tokenizer: Any, model: Any) -> None:
    task = make_task("turns", *plant(tokenizer, TRACE, facts(3)))
    outcome = run_session(DenseSession(model), task, None)
    assert outcome.tokens == task.context < len(task.conversation)
    assert outcome.bytes_in_use == 100 * task.context
    found = judge(task.asked, outcome.scores, task.context)
    assert [n.answer for n in found] == [q.answer for q in facts(3)]
    # a random model gives each of about 49,152 tokens the same chance
    for needle, asked in zip(found, task.asked, strict=True):
        assert needle.log_p / (asked.end - asked.start) == pytest.approx(-np.log(49152), abs=1)
        assert not needle.hit
        assert 0 < needle.depth < 1
