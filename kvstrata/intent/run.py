"""Conversations -> a residual head in a file, with the report of its training beside it. Knows nothing of where conversations come from."""

import importlib.metadata
import json
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel

import kvstrata
from kvstrata.adapters.hf import store_config
from kvstrata.calibrate.run import Sample
from kvstrata.intent.lessons import Lesson, cuts_of, lessons
from kvstrata.intent.train import split, train
from kvstrata.ops.residual import HeadConfig
from kvstrata.types import PAGE_SIZE

Progress = Callable[[str, int, int], None]


def train_on(
    model: PreTrainedModel, name: str, conversations: Sequence[Sample], out: Path, *, judges: int = 0, rank: int = 0, width: int = 32,
    received: bool = False, epochs: int = 12, seed: int = 0, progress: Progress = lambda what, done, total: None,
) -> dict[str, Any]:  # fmt: skip
    """Write OUT and OUT.json, whole or not at all; -> the report. judges: the last conversations, that many, judge and teach nothing; 0:
    every fourth. rank, width, received: as HeadConfig has them. Raises ValueError for too few conversations or turns."""
    for c in conversations:
        check_turns(c)
    split([c.id for c in conversations], judges)
    started, taught = time.perf_counter(), []
    for i, conversation in enumerate(conversations):
        progress(f"{conversation.id}: attention", i, len(conversations))
        taught.append(_taught(model, conversation, seed))
    looked = time.perf_counter() - started
    geometry = store_config(model, PAGE_SIZE)
    heads = int(model.config.get_text_config().num_attention_heads)
    config = HeadConfig(geometry.num_layers, heads, geometry.num_kv_heads, geometry.head_dim, width=width, rank=rank, received=received)
    trained = train(
        config, [c.id for c in conversations], taught, judges=judges, epochs=epochs, seed=seed, device=model.device, progress=progress
    )
    report = {
        "model": name, "kvstrata": kvstrata.__version__, "torch": importlib.metadata.version("torch"),
        "attention_seconds": round(looked, 1),
    } | trained.report  # fmt: skip
    new = out.with_name(out.name + ".new")
    trained.head.save(new, **report)
    new.replace(out)
    out.with_suffix(".json").write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    return report


def check_turns(conversation: Sample) -> None:
    """Raise ValueError for one that nothing can be learned from."""
    if not cuts_of(conversation.spans):
        n = len(conversation.token_ids)
        raise ValueError(f"{conversation.id}: a conversation of {n} tokens has fewer than three user turns; nothing can be learned from it")


def _taught(model: PreTrainedModel, conversation: Sample, seed: int) -> list[Lesson]:
    try:
        return lessons(model, conversation.token_ids, conversation.spans, seed=seed)
    except ValueError as error:
        raise ValueError(f"{conversation.id}: {error}") from error
