"""A session as a file, and back: what Session.save and Session.load do. Knows nothing of how a turn runs."""

import dataclasses
import hashlib
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from kvstrata.adapters.hf import store_config
from kvstrata.adapters.hf_cache import Snapshot, inv_freq, layer_types, text_config
from kvstrata.allowance import check_capacity
from kvstrata.config import StoreConfig
from kvstrata.policy import POLICIES
from kvstrata.store.plain import parsed, plain
from kvstrata.store.saved import pack, place, unpack
from kvstrata.store.store import Store
from kvstrata.store.verified import Tensors, read, write
from kvstrata.turn import TurnReport
from kvstrata.types import Span

if TYPE_CHECKING:
    from kvstrata.session import Session

S = TypeVar("S", bound="Session")
SAMPLE = 64
"""Numbers of each parameter that tell a model from another of the same geometry."""


@dataclass(frozen=True, slots=True)
class Identity:
    """What a model must be to continue with another's keys and values. weights: SHA-256 of a sample of each parameter and of RoPE."""

    family: str
    layer_types: tuple[str, ...]
    hidden_size: int
    num_qo_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    sliding_window: int | None
    dtype: str
    weights: str

    @classmethod
    def of(cls, model: PreTrainedModel) -> "Identity":
        c, geometry = text_config(model), store_config(model, 1)
        types = tuple(layer_types(c))
        window = int(c.sliding_window) if "sliding_attention" in types else None
        return cls(
            str(c.model_type), types, int(c.hidden_size), int(c.num_attention_heads), geometry.num_kv_heads, geometry.head_dim,
            int(c.vocab_size), window, str(model.dtype).removeprefix("torch."), _fingerprint(model),
        )  # fmt: skip


def _fingerprint(model: PreTrainedModel) -> str:
    digest, rotations = hashlib.sha256(), inv_freq(model)
    for name, p in (*model.named_parameters(), *([] if rotations is None else [("inv_freq", rotations)])):
        sample = p.detach().reshape(-1)[:: max(1, p.numel() // SAMPLE)].cpu().contiguous()
        digest.update(f"{name} {list(p.shape)} {p.dtype} ".encode() + sample.view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


@dataclass(frozen=True, slots=True)
class Facts:
    """What of a session is neither its sequence nor a setting of its policy. known: tokens that spans were told of; sliding: positions that
    each sliding-window layer has seen."""

    model: Identity
    store: StoreConfig
    policy: str
    budget_bits: float | None
    budget_bytes: int | None
    quality: float | None
    auto: bool
    chunk_tokens: int
    spans: tuple[Span, ...]
    known: int
    reports: tuple[TurnReport, ...]
    sliding: tuple[int, ...]


def save(session: "Session", path: str | Path) -> None:
    cache, store = session._cache, session.store
    facts = Facts(
        Identity.of(session.model), store.config, session.policy.name, session.budget_bits, session.budget_bytes, session.quality,
        session.auto,
        session.chunk_tokens,
        session._spans, session._known, tuple(session.reports), tuple(layer.length for layer in cache.sliding_layers),
    )  # fmt: skip
    document = {"session": plain(facts), "settings": plain(session.policy), "sequence": None}
    try:
        # what load would refuse is not called saved
        parsed(Facts, document["session"])
        parsed(type(session.policy), document["settings"])
    except ValueError as error:
        raise ValueError(f"{path} was not saved, for it could not be loaded: {error}") from error
    tensors: Tensors = {}
    if cache.sequence_ids:
        document["sequence"], tensors = pack(store, store.sequence(cache.sequence_ids[0]))
    for i, layer in enumerate(cache.sliding_layers):
        for name, x in (("keys", layer.keys), ("values", layer.values)):
            if x is not None:
                tensors[f"sliding.{i}.{name}"] = x.detach().cpu().contiguous().clone()
    write(path, document, tensors)


def load(
    cls: type[S], path: str | Path, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, store: Store | None, capacity: int | None
) -> S:
    document, tensors = read(path)
    try:
        return _load(cls, document, tensors, model, tokenizer, store, capacity)
    except ValueError as error:
        raise ValueError(f"{path} cannot be loaded: {error}") from error


def _load(
    cls: type[S], document: dict[str, Any], tensors: Tensors, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase,
    store: Store | None, capacity: int | None,
) -> S:  # fmt: skip
    """Everything is checked before anything changes."""
    facts = parsed(Facts, document.get("session"))
    if facts.policy not in POLICIES:
        raise ValueError(f"unknown policy {facts.policy!r}; accepted: {', '.join(POLICIES)}")
    policy = parsed(POLICIES[facts.policy], document.get("settings"))
    _agree("model", facts.model, Identity.of(model), tuple(f.name for f in dataclasses.fields(Identity)))
    geometry = ("num_layers", "num_kv_heads", "head_dim", "codec", "dense_dtype", "window")
    if store is None:
        config, c = facts.store, facts.store
        if capacity is not None:
            check_capacity(capacity)
            config = store_config(model, capacity, codec=c.codec, window=c.window, dense_dtype=c.dense_dtype)
        store = Store(config, model.device)
    _agree("store", facts.store, store.config, geometry)
    if len(facts.sliding) != facts.model.layer_types.count("sliding_attention"):
        raise ValueError(f"it has {len(facts.sliding)} sliding-window layers; the model's are {facts.model.layer_types}")
    sliding = [(tensors.get(f"sliding.{i}.keys"), tensors.get(f"sliding.{i}.values"), n) for i, n in enumerate(facts.sliding)]
    unplaced = None if document.get("sequence") is None else unpack(store, document["sequence"], tensors)
    session = cls(
        model, tokenizer, facts.policy, facts.budget_bits, budget_bytes=facts.budget_bytes, quality=facts.quality, auto=facts.auto,
        chunk_tokens=facts.chunk_tokens, store=store,
        policy_settings={f.name: getattr(policy, f.name) for f in dataclasses.fields(policy)},
    )  # fmt: skip
    if unplaced is not None:
        mask = torch.ones(1, len(unplaced.tensors["token_ids"]), dtype=torch.bool)
        there = [(None if k is None else k.to(model.device), None if v is None else v.to(model.device), n) for k, v, n in sliding]
        session._cache.restore(Snapshot([place(store, unplaced)], mask, there))
    session._spans, session._known = facts.spans, facts.known
    session.reports.extend(facts.reports)
    if facts.reports:
        session.plan_seconds = facts.reports[-1].plan_seconds
    if unplaced is None:
        session.starts.add(len(facts.reports))
    # what stands in for a plan within the budget does so until the next plan is made
    session._standing_floor = facts.reports[-1].floor_bytes if facts.reports and unplaced is not None else 0
    return session


def _agree(what: str, saved: Any, given: Any, names: tuple[str, ...]) -> None:
    """Raise ValueError naming the first of the fields in which two differ."""
    for name in names:
        if getattr(saved, name) != getattr(given, name):
            raise ValueError(
                f"it was saved with a {what} whose {name} is {getattr(saved, name)}; that of this {what} is {getattr(given, name)}"
            )
