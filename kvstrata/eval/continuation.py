"""A long reply of the uncompressed model, and how far a compressed cache is from it at each of its tokens.

Knows nothing of files or tables.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from transformers import DynamicCache, PreTrainedModel, PreTrainedTokenizerBase

from kvstrata.adapters.hf import attached, cache_keyword, store_config
from kvstrata.eval.conversation import Conversation
from kvstrata.eval.metrics import divergence, log_probs
from kvstrata.eval.protocols import Reference, Task, run_reference
from kvstrata.eval.replay import replayed
from kvstrata.eval.results import Setting
from kvstrata.eval.traces import Trace
from kvstrata.policy import Plan, Signals, make_policy, recent_window
from kvstrata.store.store import Store
from kvstrata.tagging.template import tag_messages
from kvstrata.types import PAGE_SIZE

ASK = "Now write a long and detailed report of everything that was done so far, step by step, with the result of each call."
SLACK = 64
"""Tokens of room beyond the reply."""


def reporting(tokenizer: PreTrainedTokenizerBase, trace: Trace) -> list[int]:
    """Token ids of a conversation that ends with the request for a long reply."""
    messages = [*trace.messages, {"role": "user", "content": ASK}]
    return tag_messages(tokenizer, messages, trace.tools, add_generation_prompt=True).token_ids


@torch.inference_mode()
def continue_greedily(model: PreTrainedModel, context: list[int], count: int) -> tuple[Reference, list[int]]:
    """The uncompressed model's own continuation of `count` tokens, whether or not it would have stopped, and its log-probabilities."""
    conversation = Conversation("", [*context, *([0] * count)], (), (), "", ())
    task = Task(conversation, (len(context),), (len(context),), len(context))
    # scored at the context's end: the row that predicts the first token
    reference = run_reference(model, task)
    assert reference.prefill is not None
    cache, rows, tokens = _cache_of(reference), [reference.log_probs], [int(reference.log_probs[0].argmax())]
    while len(tokens) < count:
        out = model(torch.tensor([tokens[-1:]]), use_cache=True, **{cache_keyword(model): cache})
        rows.append(log_probs(out.logits[0, -1:].float()))
        tokens.append(int(rows[-1].argmax()))
    return replace(reference, log_probs=torch.cat(rows)), tokens


def _cache_of(reference: Reference) -> Any:
    assert reference.prefill is not None
    cache = DynamicCache()
    for i, (k, v) in enumerate(zip(reference.prefill.keys, reference.prefill.values, strict=True)):
        cache.update(k, v, i)
    return cache


@torch.inference_mode()
def along(model: PreTrainedModel, setting: Setting, reference: Reference, tokens: Sequence[int]) -> list[float]:
    """KL to the uncompressed model at each token of its own continuation, fed token by token as generation does."""
    assert reference.prefill is not None
    context = list(reference.prefill.token_ids)
    arguments = setting.session_arguments()
    window = recent_window(setting.policy) if setting.window is None else setting.window
    capacity = len(context) + len(tokens) + SLACK
    store = Store(store_config(model, capacity, window=window, dense_dtype=setting.dense_dtype), model.device)
    policy = make_policy(setting.policy, **arguments["policy_settings"])

    def planner(ids: list[int]) -> Plan:
        return policy.plan((), len(ids), Signals(window_pages=-(-len(ids) // PAGE_SIZE) - store.first_window_page(len(ids))))

    out: list[float] = []
    with attached(model, store, planner) as cache:
        with replayed(model, reference.prefill):
            model(input_ids=torch.tensor([context]), logits_to_keep=1, **{cache_keyword(model): cache})
        for i in range(1, len(tokens)):
            got = log_probs(model(input_ids=torch.tensor([[tokens[i - 1]]]), **{cache_keyword(model): cache}).logits[0, -1:].float())
            out.append(float(divergence(reference.log_probs[i : i + 1], got)))
    return out
