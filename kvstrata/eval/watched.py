"""A session on one conversation, and what of each token became: its tier, whether it is an anchor or lives on, how much it is looked at.

Knows nothing of how it is shown.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from kvstrata.adapters.capture import captured
from kvstrata.eval.conversation import Conversation, render
from kvstrata.eval.evaluate import SLACK, check_length
from kvstrata.eval.protocols import make_task
from kvstrata.eval.results import Setting
from kvstrata.eval.traces import Trace
from kvstrata.ops.score import NUM_QUERIES, column_scores
from kvstrata.session import Session
from kvstrata.store.gathered import EMPTY, Gathered
from kvstrata.turn import TurnReport


@dataclass(frozen=True)
class Watched:
    """ends: tokens after each step. page_bits: of each page's tier. anchors, survivors: share of layers and KV heads in which a token is
    one, float64 [tokens]; evicted pages live in their survivors alone. attention: share of the newest queries' attention, float64 [tokens],
    the sum 1. page_bytes: of a page, by its bits."""

    conversation: Conversation
    label: str
    model: str
    ends: tuple[int, ...]
    reports: tuple[TurnReport, ...]
    page_bits: tuple[int, ...]
    page_bytes: dict[int, int]
    anchors: NDArray[np.float64]
    survivors: NDArray[np.float64]
    attention: NDArray[np.float64]

    @property
    def tokens(self) -> int:
        return len(self.conversation)


def watch(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, trace: Trace, setting: Setting, name: str) -> Watched:
    """Run a setting over a conversation, turn by turn. Raises ValueError where the conversation or the setting does not run."""
    conversation = render(tokenizer, trace)
    task = make_task("turns", conversation)
    check_length(model, task)
    ids = conversation.token_ids
    session = Session(model, tokenizer, capacity_tokens=len(ids) + SLACK, **setting.session_arguments())
    with session:
        for end in task.chunks:
            session.feed(ids[:end], conversation.spans_until(end), logits_to_keep=1)
        held: Any = session._sequence
        tiers = tuple(int(page.tier) for page in held.pages)
        anchors, survivors = (shares(pages, len(ids)) for pages in (held.anchors, held.survivors))
        page_bytes = {int(t): n for t, n in session.layout.tier_bytes().items()}
        reports = tuple(session.reports)
    return Watched(
        conversation, setting.label, name, task.chunks, reports, tiers, page_bytes, anchors, survivors, attention_of(model, ids)
    )  # fmt: skip


def shares(pages: list[Gathered], tokens: int) -> NDArray[np.float64]:
    """Share of layers and KV heads whose `pages` hold each token."""
    out = np.zeros(tokens)
    for page in pages:
        layers, heads, _ = page.positions.shape
        np.add.at(out, page.positions[page.positions != EMPTY], 1 / (layers * heads))
    return out


@torch.inference_mode()
def attention_of(model: PreTrainedModel, token_ids: list[int]) -> NDArray[np.float64]:
    """Share of the uncompressed model's attention that each token gets from the newest queries, over layers and heads."""
    total = np.zeros(len(token_ids))

    def see(layer: int, q: Tensor, k: Tensor, v: Tensor, scale: float) -> None:
        newest = q[:, -NUM_QUERIES:].transpose(0, 1)
        total[:] += column_scores(newest, k.transpose(0, 1), scale).sum(0).double().cpu().numpy()

    with captured(model, see):
        model(torch.tensor([token_ids], device=model.device), use_cache=False, logits_to_keep=1)
    return total / max(total.sum(), 1e-30)
