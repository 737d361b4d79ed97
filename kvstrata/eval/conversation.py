"""A trace as a model reads it: token ids, spans, the chunks a session would run them in, and the tokens that are scored.

Knows nothing of caches or metrics. Spans come from tagging; here they are only cut, joined and looked up.
"""

import itertools
import json
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from transformers import PreTrainedTokenizerBase

from kvstrata.eval.traces import Question, Trace
from kvstrata.tagging.template import plain_messages, tag_messages
from kvstrata.types import Role, Span


@dataclass(frozen=True)
class Conversation:
    """Token ids and spans of a whole conversation.

    replies: (start, end) of what each assistant turn generated, its end-of-turn token included.
    text, starts: the rendered template and the character at which each token begins in it.
    """

    id: str
    token_ids: list[int]
    spans: tuple[Span, ...]
    replies: tuple[tuple[int, int], ...]
    text: str
    starts: tuple[int, ...]

    def __len__(self) -> int:
        return len(self.token_ids)

    def role_at(self, position: int) -> Role:
        i = bisect_right(self.spans, position, key=lambda s: s.start) - 1
        return self.spans[i].role

    def token_text(self, position: int) -> str:
        end = self.starts[position + 1] if position + 1 < len(self) else len(self.text)
        return self.text[self.starts[position] : end]

    def span_text(self, span: Span) -> str:
        end = self.starts[span.end] if span.end < len(self) else len(self.text)
        return self.text[self.starts[span.start] : end]

    def find(self, sentence: str) -> int:
        """Position of the token with which a sentence begins; -1 where it does not occur."""
        at = self.text.find(sentence) if sentence else -1
        return bisect_right(self.starts, at) - 1 if at >= 0 else -1

    def spans_until(self, end: int) -> tuple[Span, ...]:
        """Spans of the first `end` tokens; the last one is cut there."""
        return tuple(replace(s, end=min(s.end, end)) for s in self.spans if s.start < end)

    def chunks(self) -> list[int]:
        """Ends of the chunks that a session runs: prompts (up to where a reply begins), replies, user turns without a reply, the rest."""
        ends = {end for reply in self.replies for end in reply} | {len(self)}
        turns = [after.start for before, after in itertools.pairwise(self.spans) if after.turn > before.turn]
        for start, end in itertools.pairwise(turns):
            if not any(start <= reply[0] < end for reply in self.replies):
                ends.add(end)
        return sorted(ends)


def renders_tools(tokenizer: PreTrainedTokenizerBase) -> bool:
    """Whether the chat template writes tool schemas and tool calls into the prompt."""
    call = {"type": "function", "function": {"name": "kvs_called", "arguments": {}}}
    tool = {"type": "function", "function": {"name": "kvs_schema", "description": "", "parameters": {"type": "object", "properties": {}}}}
    messages: list[dict[str, Any]] = [{"role": "user", "content": "?"}, {"role": "assistant", "content": "", "tool_calls": [call]}]
    text = str(tokenizer.apply_chat_template(messages, tools=[tool], tokenize=False))
    return "kvs_called" in text and "kvs_schema" in text


def spelled_out(trace: Trace) -> Trace:
    """The trace with its schema in the system message and its calls as text, for templates that would leave both out."""
    first = trace.messages[0]
    own = first["role"] == "system"
    system, rest = (first.get("content"), trace.messages[1:]) if own else ("You are a helpful assistant.", trace.messages)
    if trace.tools:
        schemas = "\n".join(json.dumps(tool) for tool in trace.tools)
        text = f"\n\n# Tools\n\nYou may call these functions.\n<tools>\n{schemas}\n</tools>\n\n"
        system = _extended(system, text + 'For each call write <tool_call>\n{"name": ..., "arguments": {...}}\n</tool_call>')
    messages = [{"role": "system", "content": system}]
    for message in rest:
        content = message.get("content") or ""
        for call in message.get("tool_calls") or ():
            function = call.get("function", call)
            body = json.dumps({"name": function["name"], "arguments": function["arguments"]})
            content = _extended(content, f"{chr(10) if content else ''}<tool_call>\n{body}\n</tool_call>")
        messages.append({"role": message["role"], "content": content})
    return replace(trace, messages=messages, tools=[])


def _extended(content: str | list[dict[str, Any]] | None, text: str) -> str | list[dict[str, Any]]:
    """A content, be it a string or parts, with more text at its end."""
    return [*content, {"type": "text", "text": text}] if isinstance(content, list) else (content or "") + text


def render(tokenizer: PreTrainedTokenizerBase, trace: Trace) -> Conversation:
    """Tokenize and tag a trace. Raises ValueError for messages that the template does not take."""
    try:
        if (trace.tools or any(m.get("tool_calls") for m in trace.messages)) and not renders_tools(tokenizer):
            trace = spelled_out(trace)
        messages = plain_messages(tokenizer, trace.messages)
        whole = tag_messages(tokenizer, messages, trace.tools or None)
        if not whole.token_ids:
            raise ValueError("nothing is rendered of them")
        replies = [_reply(tokenizer, whole.token_ids, messages, trace.tools, i) for i, m in enumerate(messages) if m["role"] == "assistant"]
    except Exception as error:  # a template raises what its author chose
        raise ValueError(f"trace {trace.id}: the chat template does not take its messages: {error}") from error
    encoded = tokenizer(whole.text, add_special_tokens=False, return_offsets_mapping=True)
    ids = list(whole.token_ids)
    # a tagger that tokenizes piece by piece may differ from the whole text's tokens: then texts come token by token
    pieces = [str(tokenizer.decode([i])) for i in ids] if encoded["input_ids"] != ids else None
    text = "".join(pieces) if pieces else whole.text
    starts = tuple(itertools.accumulate(map(len, pieces[:-1]), initial=0)) if pieces else tuple(a for a, _ in encoded["offset_mapping"])
    return Conversation(trace.id, ids, tuple(whole.spans), tuple((a, b) for a, b in replies if a < b), text, starts)


def _reply(
    tokenizer: PreTrainedTokenizerBase, ids: Sequence[int], messages: list[dict[str, Any]], tools: list[dict[str, Any]], i: int
) -> tuple[int, int]:
    """What the model generated as message i: from where the generation prompt ends to its end-of-turn token."""

    def shared(upto: int, prompt: bool) -> int:
        if not upto:
            return 0
        schemas: list[Any] | None = tools or None
        text = tokenizer.apply_chat_template(messages[:upto], tools=schemas, tokenize=False, add_generation_prompt=prompt)
        part = tokenizer(str(text), add_special_tokens=False)["input_ids"]
        return next((n for n, (a, b) in enumerate(zip(part, ids, strict=False)) if a != b), min(len(part), len(ids)))

    start, end = shared(i, True), shared(i + 1, False)
    # templates write a newline after the token that ends the turn; the model never generates it
    while end > start and tokenizer.eos_token_id in ids[start:end] and ids[end - 1] != tokenizer.eos_token_id:
        end -= 1
    return start, end


@dataclass(frozen=True)
class Asked:
    """A question in a conversation, mostly at its end: the answer's tokens [start, end), and where its source lies (-1: unknown)."""

    question: Question
    start: int
    end: int
    source: int = -1


def ask(tokenizer: PreTrainedTokenizerBase, trace: Trace, questions: Sequence[Question]) -> tuple[Conversation, tuple[Asked, ...]]:
    """The conversation with each question and its true answer as further turns: where the question's `at` says, the others last."""
    messages: list[dict[str, Any]] = []
    # of each question: how many replies follow it
    places: list[tuple[Question, int]] = []
    for i in range(len(trace.messages) + 1):
        for q in questions:
            if q.at == i or (q.at < 0 and i == len(trace.messages)):
                messages += [{"role": "user", "content": q.text}, {"role": "assistant", "content": q.prefix + q.answer}]
                places.append((q, len(messages)))
        messages += trace.messages[i : i + 1]
    conversation = render(tokenizer, replace(trace, messages=messages, questions=()))
    ids = conversation.token_ids
    asked = []
    for question, end_of in places:
        index = len(conversation.replies) - 1 - sum(m["role"] == "assistant" for m in messages[end_of:])
        if index < 0:
            raise ValueError(f"trace {trace.id}: the chat template leaves out the answers to its questions")
        start, end = conversation.replies[index]
        first = max((s for s in range(start, end) if question.answer in tokenizer.decode(ids[s:end])), default=start)
        asked.append(Asked(question, first, end - (ids[end - 1] == tokenizer.eos_token_id), conversation.find(question.source)))
    return conversation, tuple(asked)


def context_end(conversation: Conversation, questions: int) -> int:
    """Where the user turn of the first of `questions` questions begins."""
    first = conversation.spans[-1].turn - questions + 1
    return next(s.start for s in conversation.spans if s.turn >= first)


def splice(conversation: Conversation, at: int, token_ids: Sequence[int], text: str) -> Conversation:
    """The conversation with tokens put in before position `at`, inside the span that holds it."""
    n = len(token_ids)

    def moved(start: int, end: int) -> tuple[int, int]:
        return start + n * (start >= at), end + n * (end > at)

    spans = []
    for span in conversation.spans:
        grows = span.start < at < span.end or span.end == at
        start = span.start + n * (span.start >= at)
        spans.append(replace(span, start=start, end=max(span.end + n * (span.end > at or grows), start + 1)))
    char = conversation.starts[at]
    starts = [*conversation.starts[:at], *[char] * n, *(s + len(text) for s in conversation.starts[at:])]
    return Conversation(
        conversation.id,
        [*conversation.token_ids[:at], *token_ids, *conversation.token_ids[at:]],
        tuple(spans),
        tuple(moved(*reply) for reply in conversation.replies),
        conversation.text[:char] + text + conversation.text[char:],
        tuple(starts),
    )
