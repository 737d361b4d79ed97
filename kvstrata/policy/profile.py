"""What it costs to coarsen each tag: TriAxialKV's sensitivity table D_k(b), measured by kvstrata.calibrate and read by policies.

A profile is a JSON file. Losses are sums over the views that were measured (a view: a few late queries of one conversation), tokens
too, so that loss / tokens is the loss of one token and profiles of the same model add up. Knows nothing of how losses are measured.
"""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import cache, cached_property
from importlib.resources import files
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvstrata.policy.tags import MODALITIES, NUM_TAGS, ROLES
from kvstrata.types import Age, Modality, Role, Tier

Floats = NDArray[np.float64]
SHAPE = (len(Age), len(MODALITIES), len(ROLES))
AXES = ("temporal", "modal", "semantic")
"""The axes of SHAPE. A table can do without any of them: its tags are then pooled along it."""
NUM_BINS = 9
"""Bins of the distance to the window, in pages: 0, 1, 2-3, 4-7, ... 128 and more."""
PRIOR_TOKENS = 512.0
"""A tag that was seen this often counts as much as what its age, modality and role suggest."""
MEASURES = ("relative", "mse")
_SMALLEST = 1e-30
LARGEST = 1e30
"""What sums of losses and tokens stay below: products of them are finite then."""


def distance_bins(num_pages: int) -> NDArray[np.int64]:
    """Bin of each of the pages [0, num_pages) before the window; the last page is nearest."""
    distance = np.arange(num_pages)[::-1]
    return np.minimum(np.ceil(np.log2(distance + 1)).astype(np.int64), NUM_BINS - 1)


@dataclass(frozen=True, slots=True)
class Law:
    """KL = floor + scale * loss ** power, in nats a token: what plans of so much loss a token were measured to lose
    (eval/quality_study.py).
    low, high: losses between which that was seen."""

    floor: float
    scale: float
    power: float
    low: float
    high: float

    def __post_init__(self) -> None:
        if not (0 <= self.floor < LARGEST and 0 < self.scale < LARGEST and 0 < self.power < 16 and 0 < self.low <= self.high < LARGEST):
            raise ValueError(f"{self} is no law; floor must be 0 or more, scale, power and low above 0, high no less than low, all finite")

    def kl(self, loss: float) -> float:
        return float(self.floor + self.scale * loss**self.power)

    def loss(self, kl: float) -> float:
        try:
            return float((max(kl - self.floor, 0.0) / self.scale) ** (1 / self.power))
        except OverflowError:
            return math.inf


@dataclass(frozen=True)
class Profile:
    """bits: tiers measured, ascending, 0 = evicted.

    tokens: float64 [56], loss[measure]: float64 [56, bits]: of each tag (tags.py's codes).
    far_tokens: float64 [56, NUM_BINS], far_loss: float64 [56, NUM_BINS, bits]: of pages of one tag, each coarsened alone, by
    distance to the window; measure "relative".
    made: how: model, codec, data hash, seed, versions. law: KL of plans by their losses; None where that was not measured.
    """

    bits: tuple[int, ...]
    tokens: Floats
    loss: Mapping[str, Floats]
    far_tokens: Floats
    far_loss: Floats
    made: Mapping[str, Any] = field(default_factory=dict)
    law: Law | None = None

    def __post_init__(self) -> None:
        n = len(self.bits)
        arrays = {"tokens": (self.tokens, (NUM_TAGS,)), "far_tokens": (self.far_tokens, (NUM_TAGS, NUM_BINS)),
                  "far_loss": (self.far_loss, (NUM_TAGS, NUM_BINS, n))}  # fmt: skip
        arrays |= {f"loss of {m}": (self.loss[m], (NUM_TAGS, n)) for m in MEASURES}
        for name, (array, shape) in arrays.items():
            if array.shape != shape or (array < 0).any() or not array.sum() < LARGEST:
                raise ValueError(
                    f"{name} has shape {array.shape}, or a value below 0 or not finite; needed: {shape}, below {LARGEST:g} in sum"
                )
        known = {t.value for t in Tier if t is not Tier.BF16}
        if not self.tokens.sum() or sorted(set(self.bits)) != list(self.bits) or not {0, 2, 4} <= set(self.bits) <= known:
            raise ValueError(
                f"a profile of {self.tokens.sum():g} tokens and bits {self.bits} says nothing; bits must ascend, 0, 2 and 4 among them; "
                f"accepted: {', '.join(map(str, sorted(known)))}"
            )
        for m in MEASURES:
            if not self.loss[m][:, self.bits.index(2)].sum():
                raise ValueError(f"loss of {m} is 0 at 2 bits for every tag; a profile must tell tags apart")

    # tables

    def per_token(self, axes: Sequence[str] = AXES, measure: str = "relative") -> Floats:
        """Loss of one token of each tag at each of `bits`, float64 [56, bits], pooled along the axes that are not in `axes`.

        Tags that were seen rarely or never are drawn to the product of what their age, modality and role suggest."""
        loss = self.loss[measure].reshape(*SHAPE, -1)
        tokens = self.tokens.reshape(*SHAPE, 1)
        for axis, name in enumerate(AXES):
            if name not in axes:
                loss = np.broadcast_to(loss.sum(axis, keepdims=True), loss.shape)
                tokens = np.broadcast_to(tokens.sum(axis, keepdims=True), tokens.shape)
        with np.errstate(divide="ignore", invalid="ignore"):
            seen = np.where(tokens > 0, np.log(np.maximum(loss / tokens, _SMALLEST)), 0.0)
        guess = np.stack([_product(seen[..., b], tokens[..., 0]) for b in range(len(self.bits))], -1)
        share = tokens / (tokens + PRIOR_TOKENS)
        return np.exp(share * seen + (1 - share) * guess).reshape(NUM_TAGS, -1)

    def at(self, tiers: Sequence[Tier], table: Floats) -> Floats:
        """Columns of `table` [..., bits] at `tiers`: BF16 loses nothing, and what was not measured lies on a straight line of logarithms,
        a factor of 4 a bit beyond the last."""
        logs = np.log(np.maximum(table[..., 1:], _SMALLEST))
        bits = np.array(self.bits[1:])
        columns = []
        for tier in tiers:
            if tier is Tier.EVICTED:
                columns.append(table[..., 0])
            elif tier is Tier.BF16:
                columns.append(np.zeros(table.shape[:-1]))
            else:
                i = min(int(np.searchsorted(bits, tier)), len(bits) - 1)
                j = max(i - 1, 0)
                if bits[i] < tier:
                    columns.append(np.exp(logs[..., i]) * 4.0 ** (int(bits[i]) - tier))
                else:
                    part = 1.0 if i == j else (tier - bits[j]) / (bits[i] - bits[j])
                    columns.append(np.exp(logs[..., j] * (1 - part) + logs[..., i] * part))
        return np.stack(columns, -1)

    @cached_property
    def decay(self) -> Floats:
        """float64 [NUM_BINS]: how much more or less a token of any tag matters at a distance from the window; 1 over the tokens seen."""
        at2 = self.far_loss[..., self.bits.index(2)]
        seen = (self.far_tokens > 0) & (at2 > 0)
        with np.errstate(divide="ignore", invalid="ignore"):
            y = np.where(seen, np.log(np.maximum(at2, _SMALLEST) / np.maximum(self.far_tokens, 1)), 0.0)
        weight = np.where(seen, np.minimum(self.far_tokens, 8 * PRIOR_TOKENS), 0.0)
        tag = np.zeros(NUM_TAGS)
        bins = np.zeros(NUM_BINS)
        for _ in range(200):  # alternating least squares of y = tag + bin
            tag = (weight * (y - bins)).sum(1) / np.maximum(weight.sum(1), 1e-9)
            bins = (weight * (y - tag[:, None])).sum(0) / (weight.sum(0) + PRIOR_TOKENS)
        values = np.exp(bins)
        return values / (values * self.far_tokens.sum(0)).sum() * self.far_tokens.sum()

    # files

    def to_json(self) -> str:
        rows = []
        for code in np.flatnonzero(self.tokens):
            age, modality, role = np.unravel_index(code, SHAPE)
            rows.append({
                "age": Age(int(age)).name.lower(), "modality": MODALITIES[modality].value, "role": ROLES[role].value,
                "tokens": self.tokens[code], **{m: _short(self.loss[m][code]) for m in MEASURES},
                "far_tokens": self.far_tokens[code].tolist(), "far_relative": [_short(x) for x in self.far_loss[code]],
            })  # fmt: skip
        lines = ",\n  ".join(json.dumps(row) for row in rows)
        law = "" if self.law is None else f' "law": {json.dumps(asdict(self.law))},\n'
        return f'{{\n "made": {json.dumps(dict(self.made))},\n{law} "bits": {list(self.bits)},\n "tags": [\n  {lines}\n ]\n}}\n'

    @classmethod
    def from_json(cls, text: str) -> "Profile":
        """Raises ValueError for what is no profile."""
        try:
            data = json.loads(text)
            bits = tuple(data["bits"])
            if not all(type(b) is int for b in bits):
                raise TypeError(f"bits {bits} are not all whole numbers")
            tokens, far_tokens = np.zeros(NUM_TAGS), np.zeros((NUM_TAGS, NUM_BINS))
            loss = {m: np.zeros((NUM_TAGS, len(bits))) for m in MEASURES}
            far_loss = np.zeros((NUM_TAGS, NUM_BINS, len(bits)))
            for row in data["tags"]:
                place = (Age[row["age"].upper()], MODALITIES.index(Modality(row["modality"])), ROLES.index(Role(row["role"])))
                code = int(np.ravel_multi_index(place, SHAPE))
                if tokens[code]:
                    raise KeyError(f"two rows of {row['age']} {row['modality']} {row['role']}")
                tokens[code] = _numbers(row["tokens"], ())
                far_tokens[code] = _numbers(row["far_tokens"], (NUM_BINS,))
                far_loss[code] = _numbers(row["far_relative"], (NUM_BINS, len(bits)))
                for m in MEASURES:
                    loss[m][code] = _numbers(row[m], (len(bits),))
            law = data.get("law")
            law = (
                None
                if law is None
                else Law(**{name: float(_numbers(law[name], ())) for name in ("floor", "scale", "power", "low", "high")})
            )
        except (KeyError, TypeError, AttributeError, ValueError, RecursionError, OverflowError) as error:
            raise ValueError(f"not a sensitivity profile: {type(error).__name__} {error}") from error
        made = data.get("made", {})
        if not isinstance(made, dict):
            raise ValueError(f"not a sensitivity profile: made is {str(made)[:40]!r}; accepted: an object")
        return cls(bits, tokens, loss, far_tokens, far_loss, made, law)


def _numbers(value: Any, shape: tuple[int, ...]) -> Floats:
    """value as float64 of exactly this shape: nothing is broadcast, and text is no number."""
    array = np.asarray(value)
    if array.shape != shape or array.dtype.kind not in "if":
        raise TypeError(f"{str(value)[:40]!r} is not {list(shape) or 'a'} number{'s' * bool(shape)}")
    return array.astype(np.float64)


def _short(values: Floats) -> list[float]:
    return [float(f"{v:.6g}") for v in values]


def _product(log_loss: Floats, tokens: Floats) -> Floats:
    """The model age x modality x role of log losses [4, 2, 7], fitted by weighted least squares with a little ridge; where an axis
    was never seen to matter it changes nothing."""
    weight = np.minimum(tokens, 8 * PRIOR_TOKENS)
    if not weight.any():
        return np.zeros(SHAPE)
    mean = (weight * log_loss).sum() / weight.sum()
    parts = [np.zeros([n if i == axis else 1 for i, n in enumerate(SHAPE)]) for axis in range(3)]
    for _ in range(50):
        for axis in range(3):
            others = tuple(i for i in range(3) if i != axis)
            rest = log_loss - mean - sum(p for i, p in enumerate(parts) if i != axis)
            parts[axis] = (weight * rest).sum(others, keepdims=True) / (weight.sum(others, keepdims=True) + PRIOR_TOKENS / 4)
    fitted: Floats = mean + parts[0] + parts[1] + parts[2]
    return fitted


def mean_profile(profiles: Sequence[Profile], made: Mapping[str, Any]) -> Profile:
    """One profile of several models: each is scaled so that one mean token loses 1 at 2 bits, then tokens and losses add up.

    Only bits that all have are kept. Raises ValueError for none."""
    if not profiles:
        raise ValueError("no profiles to join; one or more are needed")
    bits = tuple(sorted(set.intersection(*(set(p.bits) for p in profiles))))
    tokens, far_tokens = np.zeros(NUM_TAGS), np.zeros((NUM_TAGS, NUM_BINS))
    loss = {m: np.zeros((NUM_TAGS, len(bits))) for m in MEASURES}
    far_loss = np.zeros((NUM_TAGS, NUM_BINS, len(bits)))
    total = float(np.mean([p.tokens.sum() for p in profiles]))
    for p in profiles:
        columns = [p.bits.index(b) for b in bits]
        # models of equal say, however much each was fed
        share = total / p.tokens.sum() / len(profiles)
        at2 = p.bits.index(2)
        scale = {m: p.tokens.sum() / max(p.loss[m][:, at2].sum(), _SMALLEST) for m in MEASURES}
        tokens += p.tokens * share
        far_tokens += p.far_tokens * share
        for m in MEASURES:
            loss[m] += p.loss[m][:, columns] * scale[m] * share
        far_loss += p.far_loss[..., columns] * scale["relative"] * share
    return Profile(bits, tokens, loss, far_tokens, far_loss, made)


def shipped() -> list[str]:
    """Names of the profiles that come with the package."""
    return sorted(Path(f.name).stem for f in files("kvstrata.policy").joinpath("profiles").iterdir() if f.name.endswith(".json"))


@cache
def load_profile(name: str) -> Profile:
    """The profile of a file, or a shipped one by its name. Raises ValueError where there is none, or what is there is none."""
    if name in shipped():
        return Profile.from_json(files("kvstrata.policy").joinpath(f"profiles/{name}.json").read_text(encoding="utf-8"))
    try:
        text = Path(name).read_text(encoding="utf-8")
    except OSError as error:
        accepted = f"{', '.join(shipped())}, or a file that `kvstrata calibrate` wrote"
        raise ValueError(f"no profile {name!r} ({error.strerror}); accepted: {accepted}") from error
    except UnicodeDecodeError as error:
        raise ValueError(f"profile {name!r} is not a sensitivity profile: it is no text ({error.reason})") from error
    except ValueError as error:
        # a null byte, or half of a surrogate pair
        raise ValueError(f"no profile {name!r} ({error}); accepted: {', '.join(shipped())}, or a file's path") from error
    try:
        return Profile.from_json(text)
    except ValueError as error:
        raise ValueError(f"profile {name!r}: {error}") from error
