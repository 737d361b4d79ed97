"""Settings of the engine adapter, as `--additional-config '{"kvstrata": {...}}'` holds them. Knows nothing of any engine."""

from dataclasses import dataclass, replace
from typing import Any, Self

from kvstrata.config import StoreConfig, from_dict
from kvstrata.policy.budget import QUANTIZED, check_tiers
from kvstrata.policy.profile import load_profile
from kvstrata.store.layout import Layout
from kvstrata.types import PAGE_SIZE, Tier

CONFIG_KEY = "kvstrata"
"""The key of the engine's additional config."""
POLICIES = ("uniform", "triaxial")
MAX_WINDOW = 4096
MAX_BITS = 64
"""More than any tier takes: a larger number is a mistake of units."""
MAX_SHOWN = 60


class UnsupportedEngineError(ValueError):
    """The engine, its version or its configuration is not supported; the message names the reason and what is accepted."""


@dataclass(frozen=True, slots=True)
class EngineSettings:
    """policy: uniform or triaxial. tier: of all pages but sinks, for uniform without a budget.
    budget_bits: real bits a KV element, averaged over each request; a request counts as `horizon` tokens while it is shorter.
    tiers: that a page may have under a budget. profile: losses of each tag (triaxial).
    window: tokens of the aligned group that is BF16 until it is full; 0: the unfinished page alone. sinks: first pages, BF16.
    ageing: lowest tier that pages of the prefix cache are demoted to when the pool runs short; None: they are lost as a whole.
    dense_dtype: what BF16 pages hold; None: bfloat16, or the model's own where that is float16.
    chat_template: the served template, as a file or as text, where it is not the tokenizer's own (triaxial's tags).
    """

    policy: str = "triaxial"
    tier: Tier | None = None
    budget_bits: float | None = None
    tiers: tuple[Tier, ...] = QUANTIZED
    profile: str = "default"
    window: int = 0
    sinks: int = 1
    horizon: int = 2048
    ageing: Tier | None = None
    dense_dtype: str | None = None
    chat_template: str | None = None

    def __post_init__(self) -> None:
        if self.policy not in POLICIES:
            raise ValueError(f"policy is {shown(self.policy)}; accepted: {', '.join(POLICIES)}")
        for name, least, most, unit in (("window", 0, MAX_WINDOW, PAGE_SIZE), ("sinks", 0, 1 << 20, 1), ("horizon", PAGE_SIZE, 1 << 24, 1)):
            value = getattr(self, name)
            if type(value) is not int or not least <= value <= most or value % unit:
                raise ValueError(f"{name} is {shown(value)}; accepted: {least} to {most}, in steps of {unit}")
        for name in ("profile", "dense_dtype", "chat_template"):
            value = getattr(self, name)
            if not isinstance(value, str) and (value is not None or name == "profile"):
                raise ValueError(f"{name} is {shown(value)}; accepted: text")
        if self.dense_dtype not in (None, "bfloat16", "float16", "float32"):
            raise ValueError(f"dense_dtype is {shown(self.dense_dtype)}; accepted: bfloat16, float16, float32")
        if not isinstance(self.tiers, tuple | list):
            raise ValueError(f"tiers is {shown(self.tiers)}; accepted: a list of {', '.join(t.name for t in QUANTIZED)}")
        object.__setattr__(self, "tiers", check_tiers([check_quantized(t, "tiers") for t in self.tiers]))
        if self.tier is not None:
            object.__setattr__(self, "tier", check_quantized(self.tier))
        if self.budget_bits is not None:
            object.__setattr__(self, "budget_bits", check_bits(self.budget_bits))
        if self.policy == "triaxial" and self.budget_bits is None:
            raise ValueError("policy 'triaxial' needs budget_bits; accepted: real bits a KV element, such as 3.0")
        if self.tier is not None and self.budget_bits is not None:
            raise ValueError(f"tier {self.tier.name} and budget_bits {self.budget_bits:g} are both given; accepted: one of them")
        if self.tier is None and self.budget_bits is None:
            object.__setattr__(self, "tier", Tier.INT4)
        if self.ageing is not None:
            object.__setattr__(self, "ageing", check_quantized(self.ageing, "ageing"))
            if self.tier is None and self.ageing not in self.tiers[:-1]:
                lower = ", ".join(t.name for t in self.tiers[:-1]) or "none, for there is one tier"
                raise ValueError(f"ageing is {self.ageing.name}; accepted: a tier below the highest of tiers: {lower}")
        if self.policy == "triaxial" or self.ageing is not None:
            load_profile(self.profile)

    @classmethod
    def from_dict(cls, values: Any) -> Self:
        """Raises ValueError for what is no mapping, and for an unknown key or value, by name."""
        if not isinstance(values, dict):
            raise ValueError(f"{CONFIG_KEY} is {shown(values)}; accepted: a mapping of settings")
        try:
            settings = from_dict(cls, values)
            # a request may ask for a tier that has nothing to give up; a server that does was set up by mistake
            if settings.ageing is not None and settings.tier is not None and settings.ageing >= settings.tier:
                raise ValueError(f"ageing is {settings.ageing.name}; accepted: a tier below that of the pages, {settings.tier.name}")
            return settings
        except ValueError as error:
            raise ValueError(f"{CONFIG_KEY}: {error}") from error

    @property
    def aged_tiers(self) -> tuple[Tier, ...]:
        """Tiers that a page may have before it is demoted or after, ascending, but for BF16."""
        if self.tier is None:
            return self.tiers
        return tuple(t for t in QUANTIZED if t <= self.tier)

    @property
    def group(self) -> int:
        """Tokens that settle together."""
        return max(self.window, PAGE_SIZE)

    def layout(self, num_kv_heads: int, head_dim: int) -> Layout:
        """Frames and bytes of one layer. Raises ValueError for a head_dim that has no planes."""
        dense = self.dense_dtype or "bfloat16"
        return Layout.of(StoreConfig(1, num_kv_heads, head_dim, 2, dense_dtype=dense))

    def override(self, values: dict[str, Any]) -> Self:
        """Settings of one request. Values are lower than the server's or equal: capacity was reserved for those. Raises ValueError."""
        budget, tier = values.get("budget_bits"), values.get("tier")
        if budget is not None and tier is not None:
            raise ValueError("budget_bits and tier are both given; accepted: one of them")
        if budget is not None:
            if self.budget_bits is None:
                raise ValueError(
                    f"budget_bits is {shown(budget)}, but this server runs at tier {self.tier and self.tier.name}; accepted: a tier"
                )
            bits = check_bits(budget)
            if bits > self.budget_bits:
                raise ValueError(f"budget_bits is {bits:g}; accepted: at most the server's, {self.budget_bits:g}")
            return replace(self, budget_bits=bits)
        if tier is not None:
            if self.tier is None:
                raise ValueError(f"tier is {shown(tier)}, but this server runs under a budget; accepted: budget_bits")
            wanted = check_quantized(tier)
            if wanted > self.tier:
                raise ValueError(f"tier is {wanted.name}; accepted: at most the server's, {self.tier.name}")
            return replace(self, tier=wanted)
        return self


def shown(value: Any) -> str:
    """What a message says of a wrong value: one line, no longer than can be read."""
    try:
        text = repr(value[: MAX_SHOWN + 1] if isinstance(value, str) else value)
    except ValueError:
        return "a number of too many digits"
    return text if len(text) <= MAX_SHOWN else f"{text[:MAX_SHOWN]}..."


def check_quantized(value: Any, name: str = "tier") -> Tier:
    if type(value) is bool or not isinstance(value, str | int):
        raise ValueError(f"{name} is {shown(value)}; accepted: {', '.join(t.name for t in QUANTIZED)}")
    try:
        tier = Tier.parse(value)
    except ValueError:
        raise ValueError(f"{name}: unknown tier {shown(value)}; accepted: {', '.join(t.name for t in QUANTIZED)}") from None
    if tier not in QUANTIZED:
        raise ValueError(f"{name} is {tier.name}; accepted: {', '.join(t.name for t in QUANTIZED)}")
    return tier


def check_bits(value: Any) -> float:
    if type(value) is bool or not isinstance(value, int | float) or not 0 < value <= MAX_BITS:
        raise ValueError(f"budget_bits is {shown(value)}; accepted: a number above 0, {MAX_BITS} at most")
    return float(value)


REQUEST_KEYS = {f"{CONFIG_KEY}_budget_bits": "budget_bits", f"{CONFIG_KEY}_tier": "tier"}
"""A request's own settings, among its extra arguments."""


def request_settings(settings: EngineSettings, extra_args: Any) -> EngineSettings:
    """Settings of a request with these extra arguments; those that are not ours are let through. Raises ValueError for an unknown one of
    ours, by name, and for a value that is not accepted."""
    if not isinstance(extra_args, dict):
        return settings
    given = {key: value for key, value in extra_args.items() if isinstance(key, str) and key.startswith(CONFIG_KEY)}
    unknown = [key for key in given if key not in REQUEST_KEYS]
    if unknown:
        raise ValueError(f"unknown extra argument {unknown[0][:60]!r}; accepted: {', '.join(REQUEST_KEYS)}")
    return settings.override({REQUEST_KEYS[key]: value for key, value in given.items()})
