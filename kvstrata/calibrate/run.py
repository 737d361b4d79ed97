"""Calibration: conversations -> a sensitivity profile, one forward pass a conversation; what is done survives an interruption.

Beside OUT.json lies OUT.parts.json with the losses of each conversation: a run that was interrupted, or that is given more
conversations, measures only what is missing. Knows nothing of where conversations come from.
"""

import hashlib
import importlib.metadata
import json
import platform
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedModel

import kvstrata
from kvstrata.adapters.capture import captured
from kvstrata.calibrate.distortion import Losses, make_views, measure_layer
from kvstrata.ops.codecs import make_codec
from kvstrata.policy.profile import MEASURES, NUM_BINS, Profile
from kvstrata.policy.tags import NUM_TAGS
from kvstrata.types import PAGE_SIZE, Span, Tier

MEASURED = (Tier.INT2, Tier.INT3, Tier.INT4, Tier.INT8)
Progress = Callable[[str, int, int], None]
"""Called with what runs now, the conversations done and all of them."""


@dataclass(frozen=True)
class Sample:
    """A conversation as tokens and tags."""

    id: str
    token_ids: Sequence[int]
    spans: tuple[Span, ...]

    @property
    def digest(self) -> str:
        tags = [(s.start, s.end, s.role.value, s.turn, s.modality.value) for s in self.spans]
        return hashlib.sha256(json.dumps([list(self.token_ids), tags]).encode()).hexdigest()


def samples(render: Callable[[Any], Any], traces: Sequence[Any]) -> tuple[list[Sample], list[str]]:
    """Traces as samples, and a line for each that `render` (kvstrata.eval.conversation) does not take."""
    read, failed = [], []
    for trace in traces:
        try:
            conversation = render(trace)
        except ValueError as error:
            failed.append(str(error))
        else:
            read.append(Sample(conversation.id, conversation.token_ids, conversation.spans))
    return read, failed


@dataclass
class Part:
    """What one conversation adds to a profile; the fields are Profile's."""

    tokens: Any
    far_tokens: Any
    losses: Losses

    def to_dict(self) -> dict[str, Any]:
        def sparse(x: Any) -> dict[str, Any]:
            rows = x.reshape(-1, x.shape[-1])
            return {str(i): rows[i].tolist() for i in np.flatnonzero(rows.any(1))}

        return {"tokens": self.tokens.tolist(), "far_tokens": sparse(self.far_tokens), "tag": sparse(self.losses.tag),
                "far": sparse(self.losses.far)}  # fmt: skip

    @classmethod
    def from_dict(cls, data: dict[str, Any], num_bits: int) -> "Part":
        def dense(rows: dict[str, Any], shape: tuple[int, ...]) -> Any:
            out = np.zeros(shape)
            for i, row in rows.items():
                out.reshape(-1, shape[-1])[int(i)] = row
            return out

        losses = Losses(dense(data["tag"], (2, NUM_TAGS, num_bits)), dense(data["far"], (NUM_TAGS * NUM_BINS, num_bits)))
        return cls(np.array(data["tokens"]), dense(data["far_tokens"], (NUM_TAGS, NUM_BINS)), losses)


@torch.no_grad()
def measure(model: PreTrainedModel, sample: Sample, codec: str = "planes", seed: int = 0, window: int = 0) -> Part | None:
    """One conversation's losses; None for one too short to have stored pages before a late query. window: of the policy that will read
    them, tokens of its aligned group."""
    made = make_codec(codec)
    tiers = [t for t in MEASURED if t in made.tiers]
    losses = Losses.zeros(1 + len(tiers))
    views = make_views(sample.spans, len(sample.token_ids), seed, window=window)
    if not views:
        return None
    with captured(model, lambda layer, q, k, v, scale: measure_layer(q, k, v, scale, views, made, tiers, losses)):
        model(torch.tensor([list(sample.token_ids)], device=model.device), use_cache=False, logits_to_keep=1)
    tokens = sum(np.bincount(view.code, minlength=NUM_TAGS) for view in views)
    pages = sum(np.bincount(view.far_cell, minlength=NUM_TAGS * NUM_BINS) for view in views)
    return Part(np.asarray(tokens, np.float64), np.asarray(pages, np.float64).reshape(NUM_TAGS, NUM_BINS) * PAGE_SIZE, losses)


def join(parts: Sequence[Part], bits: tuple[int, ...], made: dict[str, Any]) -> Profile:
    """The profile of some conversations. Raises ValueError where nothing was measured."""
    if not parts:
        raise ValueError("no conversation is long enough to measure; it needs stored pages beyond the sinks and the recent window")
    tag = sum(p.losses.tag for p in parts)
    far_loss = np.asarray(sum(p.losses.far for p in parts)).reshape(NUM_TAGS, NUM_BINS, len(bits))
    return Profile(bits, sum(p.tokens for p in parts), dict(zip(MEASURES, np.asarray(tag), strict=True)),
                   sum(p.far_tokens for p in parts), far_loss, made)  # fmt: skip


def calibrate(
    model: PreTrainedModel,
    name: str,
    samples: Sequence[Sample],
    out: Path,
    *,
    codec: str = "planes",
    seed: int = 0,
    window: int = 0,
    progress: Progress = lambda what, done, total: None,
) -> Profile:
    """Measure `samples` and write the profile to `out`. The same model, samples and seed give the same file but for its time.

    Raises ValueError for no samples, none long enough, one that is longer than the model takes, an unknown codec, a window that is not
    whole pages or a model that is not supported."""
    if window < 0 or window % PAGE_SIZE:
        raise ValueError(f"window is {window}; it must be 0 or a multiple of the page size, {PAGE_SIZE}")
    most = getattr(model.config.get_text_config(decoder=True), "max_position_embeddings", None)
    for sample in samples:
        if most is not None and len(sample.token_ids) > most:
            raise ValueError(f"trace {sample.id}: {len(sample.token_ids)} tokens, but the model takes {most}")
    bits = (0, *(t.value for t in MEASURED if t in make_codec(codec).tiers))
    beside = out.with_suffix(".parts.json")
    key = f"{name} {codec} seed {seed} window {window} {_shape(model)} {_versions()}"
    parts = _read(beside, key)
    used: dict[str, Part] = {}
    started = time.perf_counter()
    out.parent.mkdir(parents=True, exist_ok=True)
    for i, sample in enumerate(samples):
        progress(sample.id, i, len(samples))
        if sample.digest not in parts:
            part = measure(model, sample, codec, seed, window)
            parts[sample.digest] = part.to_dict() if part is not None else None
            _write(beside, json.dumps({"key": key, "parts": parts}))
        if (found := parts[sample.digest]) is not None:
            try:
                used[sample.digest] = Part.from_dict(found, len(bits))
            except (KeyError, TypeError, ValueError, AttributeError, IndexError) as error:
                raise ValueError(f"{beside} was altered: {type(error).__name__} {error}; delete it to measure anew") from error
    progress("done", len(samples), len(samples))
    made = {
        "model": name, "codec": codec, "seed": seed, "window": window, "conversations": [s.id for s in samples if s.digest in used],
        "data": hashlib.sha256("".join(used).encode()).hexdigest(), "seconds": round(time.perf_counter() - started, 1),
        "versions": _versions(),
    }  # fmt: skip
    profile = join(list(used.values()), bits, made)
    _write(out, profile.to_json())
    return profile


def _shape(model: PreTrainedModel) -> str:
    c = model.config.get_text_config(decoder=True)
    return f"{c.model_type} {c.num_hidden_layers}x{c.hidden_size} {model.dtype} {_digest(model)}"


def _digest(model: PreTrainedModel) -> str:
    """Of the weights: of each tensor its name and the sum of its absolute values, so that a tuned checkpoint is another model."""
    digest = hashlib.sha256()
    for name, weight in model.named_parameters():
        digest.update(f"{name} {weight.detach().abs().sum(dtype=torch.float64).item():.17g}".encode())
    return digest.hexdigest()[:16]


def _versions() -> dict[str, str]:
    packages = {p: importlib.metadata.version(p) for p in ("torch", "transformers")}
    return {"kvstrata": kvstrata.__version__, "python": platform.python_version(), **packages}


def _read(path: Path, key: str) -> dict[str, Any]:
    """Parts of an earlier run with the same key; none of another's."""
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return {}
    parts = data.get("parts") if isinstance(data, dict) and data.get("key") == key else None
    return parts if isinstance(parts, dict) else {}


def _write(path: Path, text: str) -> None:
    """All or nothing: the file appears under its name when it is whole."""
    new = path.with_name(path.name + ".new")
    new.write_text(text, encoding="utf-8")
    new.replace(path)
