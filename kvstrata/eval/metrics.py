"""How far logits are from the reference's. Works row block by row block; knows nothing of models, caches or conversations."""

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

ROWS = 64
"""Rows of logits that are in floating-point flight at once."""


@dataclass(frozen=True)
class Scores:
    """One entry a scored token, in nats. position: of the scored token; tool_call: whether it is part of a call; group: its reply."""

    position: NDArray[np.int64]
    kl: NDArray[np.float64]
    agree: NDArray[np.bool_]
    nll_reference: NDArray[np.float64]
    nll: NDArray[np.float64]
    hit: NDArray[np.bool_]
    tool_call: NDArray[np.bool_]
    group: NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.kl)

    def only(self, keep: NDArray[np.bool_]) -> "Scores":
        return Scores(**{name: values[keep] for name, values in vars(self).items()})

    @property
    def kl_mean(self) -> float:
        """Mean KL(reference || ours); NaN where nothing was scored, as all of these."""
        return _mean(self.kl)

    @property
    def kl_p95(self) -> float:
        return float(np.percentile(self.kl, 95)) if len(self) else float("nan")

    @property
    def top1(self) -> float:
        """Share of tokens whose most likely token is the reference's."""
        return _mean(self.agree)

    @property
    def nll_delta(self) -> float:
        """Mean of what the text itself costs more under ours than under the reference."""
        return _mean(self.nll - self.nll_reference)

    @property
    def tool_calls(self) -> "Scores":
        return self.only(self.tool_call)

    @property
    def calls_kept(self) -> tuple[int, int]:
        """Calls of which every token's most likely choice is the reference's, and all calls."""
        calls = self.tool_calls
        groups = np.unique(calls.group)
        return sum(bool(calls.agree[calls.group == g].all()) for g in groups), len(groups)


def _mean(values: NDArray[np.float64] | NDArray[np.bool_]) -> float:
    return float(np.mean(values)) if len(values) else float("nan")


def join(parts: Iterable[Scores]) -> Scores:
    """Scores of several conversations as one; groups stay apart."""
    shifted, base = [], 0
    for part in parts:
        shifted.append(vars(part) | {"group": part.group + base})
        base += int(part.group.max(initial=-1)) + 1
    if not shifted:
        return empty()
    return Scores(**{name: np.concatenate([part[name] for part in shifted]) for name in shifted[0]})


def empty() -> Scores:
    floats, bools, ints = np.zeros(0), np.zeros(0, bool), np.zeros(0, np.int64)
    return Scores(ints, floats, bools, floats, floats, bools, bools, ints)


def divergence(reference: Tensor, ours: Tensor) -> Tensor:
    """KL(reference || ours) of each row, in nats: log-probabilities [n, vocab] -> [n]."""
    return (reference.exp() * (reference - ours)).sum(-1)


def log_probs(logits: Tensor) -> Tensor:
    """Logits [T, vocab] of any float dtype -> float32 log-probabilities [T, vocab], computed a block of rows at a time."""
    out = torch.empty(logits.shape, dtype=torch.float32)
    for i in range(0, len(logits), ROWS):
        out[i : i + ROWS] = torch.log_softmax(logits[i : i + ROWS].float(), -1)
    return out


class Comparison:
    """Collects Scores while logits come in, chunk by chunk.

    reference: float32 log-probabilities [scored, vocab], one row a scored token in order of position; None where only the text's own
    NLL is wanted: then KL is NaN and nothing agrees.
    targets, tool_call, group: [scored].
    """

    def __init__(self, reference: Tensor | None, positions: list[int], targets: list[int], tool_call: list[bool], group: list[int]) -> None:
        self.reference = reference
        self.targets = torch.tensor(targets, dtype=torch.int64)
        self._labels = (np.array(positions, np.int64), np.array(tool_call, bool), np.array(group, np.int64))
        self._parts: list[tuple[Tensor, ...]] = []
        self._seen = 0

    def add(self, logits: Tensor) -> None:
        """Logits [n, vocab] that predict the next n scored tokens."""
        for i in range(0, len(logits), ROWS):
            ours = torch.log_softmax(logits[i : i + ROWS].float(), -1)
            rows = slice(self._seen, self._seen + len(ours))
            targets = self.targets[rows, None]
            reference = torch.full_like(ours, torch.nan) if self.reference is None else self.reference[rows]
            kl = divergence(reference, ours)
            best = ours.argmax(-1)
            agree = (best == reference.argmax(-1)) & (self.reference is not None)
            nll_reference, nll = (-x.gather(1, targets).squeeze(1) for x in (reference, ours))
            self._parts.append((kl, agree, nll_reference, nll, best == targets.squeeze(1)))
            self._seen += len(ours)

    def scores(self) -> Scores:
        if self._seen != len(self.targets):
            raise ValueError(f"{self._seen} of {len(self.targets)} scored tokens have logits")
        if not self._parts:
            return empty()
        kl, agree, nll_reference, nll, hit = (torch.cat(column) for column in zip(*self._parts, strict=True))
        position, tool_call, group = self._labels
        losses = (kl.double().numpy(), agree.numpy(), nll_reference.double().numpy(), nll.double().numpy())
        return Scores(position, *losses, hit.numpy(), tool_call, group)
