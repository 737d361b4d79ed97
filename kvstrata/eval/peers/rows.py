"""The comparison's rows: ours, the papers alone, and every peer at its best settings, at about the same real bits. What makes a setting
best, and what was left out, is in docs/peers.md."""

from dataclasses import dataclass
from typing import Any

from kvstrata.eval.peers.caches import Quantized, TinyTurboQuant, TurboQuantPro
from kvstrata.eval.peers.formats import Format
from kvstrata.eval.peers.presses import Press
from kvstrata.eval.peers.session import Peer
from kvstrata.eval.results import Setting
from kvstrata.types import Tier

BITS = (2.6, 3.0, 3.5, 4.5, 5.4, 8.0)
"""Real bits at which all are compared."""
OURS = "strata"
GROUPS = ("ours", "papers", "quantizers", "formats", "eviction")
SINKS, WINDOW = 32, 64
"""Tokens kept dense beside quantizers that keep none themselves: as many as ours."""
PROFILES = {"qwen05": "qwen05-triaxial"}
"""Profiles measured with the paper's own layout, by model."""
SHIPPED = ("smollm2", "qwen05")
"""Models whose own profile ours are planned by; qwen15's, of four conversations, is worse than the default one (docs/planner.md)."""
HEADS = ("qwen05",)
"""Models that a head for intentkv is shipped for."""


@dataclass(frozen=True)
class Row:
    """family: what is one line of a chart. how: a setting of our sessions, or a peer."""

    group: str
    family: str
    label: str
    how: Setting | Peer

    @property
    def protocols(self) -> tuple[str, ...]:
        return ("oneshot", "turns") if isinstance(self.how, Setting) else self.how.protocols

    @property
    def masked(self) -> float:
        return 0.0 if isinstance(self.how, Setting) else self.how.masked


def chosen_rows(model: str, groups: str = "all", profile: str = "") -> list[Row]:
    """Rows of the named groups, separated by commas. profile: "": the model's own where one is shipped, else the default."""
    names = list(GROUPS) if groups == "all" else groups.split(",")
    if wrong := [n for n in names if n not in GROUPS]:
        raise ValueError(f"unknown group {wrong[0]!r}; accepted: all, or of {', '.join(GROUPS)}, separated by commas")
    return [r for r in make_rows(model, profile or (model if model in SHIPPED else "default")) if r.group in names]


def make_rows(model: str, profile: str) -> list[Row]:
    """model: its short name; profile: its own, for ours."""
    return [*ours(profile), *papers(model, profile), *quantizers(), *formats(), *eviction()]


def ours(profile: str) -> list[Row]:
    strata = [Row("ours", OURS, f"{OURS}, {b:g}", Setting("strata", budget_bits=b, options=(("profile", profile),))) for b in BITS]
    planes = [Row("ours", "planes", f"planes {t.name}", Setting(tier=t)) for t in (Tier.INT2, Tier.INT3, Tier.INT4, Tier.INT8)]
    return strata + planes


def papers(model: str, profile: str) -> list[Row]:
    """TriAxialKV in its own layout, HyQuant in its own tiles, IntentKV at BF16, with its head where there is one."""
    published: dict[str, Any] = {
        "profile": PROFILES.get(model, profile), "tiers": (2, 4), "unit": "tag", "sinks": 0, "measure": "mse",
        "axes": ("temporal", "modal", "semantic"),
    }  # fmt: skip
    rows = [
        Row("papers", "TriAxialKV", f"TriAxialKV, nominal {n:g}",
            Setting("triaxial", codec="triaxial", window=0, options=tuple((published | {"nominal": n}).items())))
        for n in (2.7, 4.0)
    ]  # fmt: skip
    anchors = (("rho", 0.05), ("refresh", 0))
    rows += [
        Row("papers", "HyQuant", f"HyQuant {name}, 5% anchors", Setting("hyquant", tier, codec=codec, window=128, options=anchors))
        for name, tier, codec in (("INT4", Tier.INT4, "hyquant"), ("FP4", Tier.INT4, "hyquant-fp"), ("INT8", Tier.INT8, "hyquant"))
    ]
    head = (("residual", model),) if model in HEADS else ()
    # instructions, which it spares, are nearly all of a conversation that is mostly tool schema
    evictable = (("spare", ()), *head)
    rows += [Row("papers", "IntentKV", f"IntentKV, {b:g}", Setting("intentkv", options=(("kept", b / 16), *evictable))) for b in BITS]
    rows.append(Row("papers", "IntentKV", "IntentKV, 3, instructions spared", Setting("intentkv", options=(("kept", 3 / 16), *head))))
    return rows


def quantizers() -> list[Row]:
    rows = [
        Row(
            "quantizers",
            "KIVI",
            f"KIVI {t.name}, sinks {32 * s}, window {w}",
            Setting(tier=t, codec="kivi", window=w, options=(("sinks", s),)),
        )
        for t in (Tier.INT2, Tier.INT4)
        for s, w in ((0, 128), (1, WINDOW))
    ]
    guarded: dict[str, Any] = {"sinks": SINKS, "window": WINDOW}
    quanto = [(f"int{b}", Quantized("quanto", b, -1, 0, **kept), kept) for b in (2, 4) for kept in ({}, guarded)]
    hqq = [(f"int{b}", Quantized("hqq", b, 1, 1, flat=True, **kept), kept)
           for b, kept in ((2, {}), (2, guarded), (3, guarded), (4, {}), (4, guarded), (8, {}))]  # fmt: skip
    hqq.append(("int4, as the class has it", Quantized("hqq", 4, 0, 1), {}))
    for family, peers in (("quanto", quanto), ("HQQ", hqq)):
        rows += [Row("quantizers", family, f"{family} {n}{', sinks and window' if kept else ''}", p) for n, p, kept in peers]
    # as its authors advise; then smaller blocks, and fewer dense tokens beside sinks
    tiny = [(4, 2, 128, 128, 0), (2, 2, 64, 32, SINKS), (3, 2, 64, 64, SINKS), (3, 2, 64, 32, SINKS), (4, 2, 64, 64, SINKS),
            (4, 2, 64, 32, SINKS), (3, 3, 64, 32, SINKS), (4, 4, 64, 64, SINKS), (4, 4, 64, 32, SINKS), (8, 8, 64, 64, SINKS)]  # fmt: skip
    for k, v, residual, block, sinks in tiny:
        label = f"tiny-turboquant K{k} V{v}, blocks of {block}, window {residual}{', sinks' if sinks else ''}"
        rows.append(Row("quantizers", "tiny-turboquant", label, TinyTurboQuant(k, v, residual, block, sinks)))
    turbo = [(2, 64, 0.0, SINKS), (2, 128, 0.02, SINKS), (3, 128, 0.02, SINKS), (4, 128, 0.02, SINKS), (4, 512, 0.02, 0)]
    for v, window, outliers, sinks in turbo:
        label = f"TurboQuant K4 V{v}, outliers {outliers:.0%}, window {window}{', sinks' if sinks else ''}"
        rows.append(Row("quantizers", "TurboQuant", label, TurboQuantPro(v, window, outliers, sinks)))
    return rows


def formats() -> list[Row]:
    names = {"nvfp4": "NVFP4", "int4": "INT4 by token", "fp8": "FP8", "int8": "INT8 by token", "bf16": "BF16"}
    return [Row("formats", name, name, Format(form)) for form, name in names.items()]


def eviction() -> list[Row]:
    """All at BF16: a share of the tokens is the same share of the bits."""
    rows = [
        Row("eviction", name, f"{name}, {b:g}", Setting(policy, options=(("kept", b / 16),)))
        for name, policy in (("H2O", "h2o"), ("StreamingLLM", "streaming"))
        for b in BITS
    ]
    presses = {"SnapKV": "SnapKVPress", "ExpectedAttention": "ExpectedAttentionPress", "KeyDiff": "KeyDiffPress", "TOVA": "TOVAPress"}
    rows += [Row("eviction", name, f"{name}, {b:g}", Press(press, b / 16)) for name, press in presses.items() for b in BITS]
    adaptive = (("AdaKV ExpectedAttention", "ExpectedAttentionPress"), ("AdaKV SnapKV", "SnapKVPress"))
    rows += [
        Row("eviction", name, f"{name}, {b:g} if it freed", Press(press, b / 16, adaptive=True))
        for name, press in adaptive
        for b in (3.0, 5.4)
    ]
    return rows
