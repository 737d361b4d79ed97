"""Settings, and what was measured at them: one Result for a setting over all conversations. Knows nothing of how a run is made."""

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from typing import Any

import numpy as np

from kvstrata.eval.metrics import join
from kvstrata.eval.needles import Needle
from kvstrata.eval.protocols import Outcome
from kvstrata.types import Tier


@dataclass(frozen=True)
class Setting:
    """How the cache is stored.

    tier: for the policies that take one. window, dense_dtype: None = the session's choice. options: further settings of the policy.
    quality: predicted KL.
    """

    policy: str = "uniform"
    tier: Tier | None = None
    budget_bits: float | None = None
    codec: str = "planes"
    window: int | None = None
    dense_dtype: str | None = None
    options: tuple[tuple[str, Any], ...] = ()
    quality: float | None = None

    def __post_init__(self) -> None:
        for name, value in (("tier", self.tier), ("budget_bits", self.budget_bits)):
            if value is not None and self.quality is not None:
                raise ValueError(f"{name} {value:g} and quality {self.quality:g} exclude each other; give one")
        if self.quality is not None and not (math.isfinite(self.quality) and self.quality > 0):
            raise ValueError(f"quality is {self.quality}; it must be a positive number of nats a token")
        if self.tier is not None and self.budget_bits is not None:
            raise ValueError(f"tier {self.tier.name} and budget_bits {self.budget_bits:g} exclude each other; give one")
        if self.budget_bits is not None and not (math.isfinite(self.budget_bits) and self.budget_bits > 0):
            raise ValueError(f"budget_bits is {self.budget_bits}; it must be a positive number of bits per KV element")

    @property
    def label(self) -> str:
        parts = [self.codec if self.codec != "planes" and self.policy == "uniform" else self.policy]
        if self.tier is not None:
            parts.append(self.tier.name)
        if self.budget_bits is not None:
            parts.append(f"{self.budget_bits:g} bits")
        if self.quality is not None:
            parts.append(f"KL {self.quality:g}")
        if self.codec != "planes" and self.policy != "uniform":
            parts.append(f"({self.codec})")
        return " ".join(parts)

    def session_arguments(self) -> dict[str, Any]:
        """Keyword arguments of Session."""
        return {
            "policy": self.policy,
            "budget_bits": self.budget_bits,
            "quality": self.quality,
            "policy_settings": dict(self.options) | ({} if self.tier is None else {"tier": self.tier}),
            "codec": self.codec,
            "window": self.window,
            "dense_dtype": self.dense_dtype,
        }


@dataclass(frozen=True)
class Result:
    """Field names are the JSON keys. KL and NLL in nats; budget_bits and bits_per_element are real bits per KV element."""

    model: str
    policy: str
    tier: str | None
    codec: str
    budget_bits: float | None
    protocol: str
    dense_dtype: str | None
    tokens: int
    bits_per_element: float
    bytes_per_token: float
    peak_bytes: int
    kl_mean: float
    kl_p95: float
    top1: float
    nll_delta: float
    tool_call_top1: float
    tool_call_kl: float
    needle_hits: int
    needles: int
    needle_logp: float
    reuse: float
    seconds: float
    label: str = field(default="", compare=False)
    outcomes: tuple[Outcome, ...] = field(default=(), repr=False, compare=False)
    facts: tuple[Needle, ...] = field(default=(), repr=False, compare=False)

    def to_dict(self) -> dict[str, Any]:
        """The measured figures; what could not be measured is None."""
        values = {f.name: getattr(self, f.name) for f in fields(self) if f.name not in ("label", "outcomes", "facts")}
        return {k: None if isinstance(v, float) and math.isnan(v) else v for k, v in values.items()}

    def to_json(self) -> str:
        return json.dumps(self.to_dict(), indent=2)

    @property
    def calls_kept(self) -> tuple[int, int]:
        return join(o.scores for o in self.outcomes).calls_kept


def summarize(model: str, setting: Setting, protocol: str, outcomes: Sequence[Outcome], facts: Sequence[Needle]) -> Result:
    """One Result of a setting's outcomes: losses are means over scored tokens, storage over tokens held."""
    scores = join(o.scores for o in outcomes)
    calls = scores.tool_calls
    tokens = sum(o.tokens for o in outcomes)
    fed = sum(o.fed_tokens for o in outcomes)
    return Result(
        model=model,
        policy=setting.policy,
        tier=setting.tier.name if setting.tier is not None else None,
        codec=setting.codec,
        budget_bits=setting.budget_bits,
        protocol=protocol,
        dense_dtype=outcomes[0].dense_dtype if outcomes else setting.dense_dtype,
        tokens=tokens,
        bits_per_element=_ratio(sum(o.bits_per_element * o.tokens for o in outcomes), tokens),
        bytes_per_token=_ratio(sum(o.bytes_in_use for o in outcomes), tokens),
        peak_bytes=max((o.peak_bytes for o in outcomes), default=0),
        kl_mean=scores.kl_mean,
        kl_p95=scores.kl_p95,
        top1=scores.top1,
        nll_delta=scores.nll_delta,
        tool_call_top1=calls.top1,
        tool_call_kl=calls.kl_mean,
        needle_hits=sum(n.hit for n in facts),
        needles=len(facts),
        needle_logp=float(np.mean([n.log_p for n in facts])) if facts else float("nan"),
        reuse=_ratio(sum(o.reused_tokens for o in outcomes), fed),
        seconds=sum(o.seconds for o in outcomes),
        label=setting.label,
        outcomes=tuple(outcomes),
        facts=tuple(facts),
    )


def _ratio(part: float, whole: float) -> float:
    return part / whole if whole else float("nan")
