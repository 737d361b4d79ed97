"""One planner: tiers of pages, eviction of pages and of tokens among them, under one budget in bytes, or to one predicted KL.

A page's loss at a tier is what its tags were measured to lose there (TriAxialKV's profile) times what the newest queries and the session's
asks make of the page, and the planner climbs the lower convex hulls of (bytes, loss) of all pages at once. Looks at tags, positions and
Signals; which tokens of a thinned page live on is chosen where their keys lie (store/thin.py).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from kvstrata.policy.anchored import buy
from kvstrata.policy.budget import QUANTIZED, Budget, Signals, check_sinks, check_tiers, num_pages
from kvstrata.policy.knapsack import SOLVERS
from kvstrata.policy.market import SLACK, Market
from kvstrata.policy.profile import distance_bins, load_profile
from kvstrata.policy.tags import ROLES, page_tags
from kvstrata.policy.thinned import ASKS, FILL
from kvstrata.policy.triaxial import token_losses
from kvstrata.types import PAGE_SIZE, SELECTORS, Anchors, Ask, Plan, Role, Span, Thinning, Tier, Weighing

Floats = NDArray[np.float64]
RHO = (0.0,)
"""Shares of anchors that are on offer by default."""
GONE = 0.5
"""Share of `contrast` for pages that go: a coarse page that is wanted after all is there, one that is gone is not."""
AIM = 0.75
"""Share of a KL that was asked for that plans aim at: what pages gave up is not to be had back when later queries think more of them."""


@dataclass(frozen=True, slots=True)
class Strata:
    """profile: as for `triaxial`. tiers: what the codec has; pages are evicted or thinned too, but only where not all fit at the lowest of
    them. sinks: pages at the start that are BF16. spare: roles whose pages are neither.
    trust: how much of a page's loss is said by the newest queries, 0 to 1, the rest by its tags: what was looked at just now is not all
    that will be. contrast: the power of a page's loss that is believed, 0 to 1; 0 takes all pages for alike. What is lost most dearly is
    what nobody looked at yet, so a page that seems to matter little is not as cheap as it seems (docs/planner.md).
    thin: whether tokens are evicted, each layer and KV head its own; False: whole pages alone, and so without staging, where what a step
    settled would wait for the next one. score: who lives on, as Thinning has it.
    regret: by how much a token that is gone loses more than its attention says, for facts are asked that nobody has looked for yet.
    intent: the power of a page's alignment with the session's asks in its weight (docs/intentkv.md); 0: none.
    staging: tier at which pages settle before they are weighed; None: they never are. refresh, decay: as Weighing has them.
    rho: shares of the body's tokens of which one is bought as anchors under a budget in bytes, or a single one; 0: none. anchor_tier:
    theirs, INT4 and above or BF16; where the codec lacks it, the next above. They are chosen anew as often as pages are weighed.
    solver: greedy or exact."""

    name: ClassVar[str] = "strata"
    WINDOW: ClassVar[int] = 0
    PREDICTS: ClassVar[bool] = True
    """Whether it can plan for a budget in quality."""

    profile: str = "default"
    tiers: tuple[Tier, ...] = QUANTIZED
    sinks: int = 1
    spare: tuple[Role, ...] = (Role.INST,)
    trust: float = 0.4
    contrast: float = 0.8
    thin: bool = True
    score: str = "newest"
    regret: float = 4.0
    intent: float = 0.0
    staging: Tier | None = Tier.INT4
    refresh: int = 64
    decay: float = 0.5
    rho: tuple[float, ...] = RHO
    anchor_tier: Tier = Tier.INT8
    solver: str = "greedy"

    def __post_init__(self) -> None:
        object.__setattr__(self, "tiers", check_tiers(self.tiers))
        check_sinks(self.sinks)
        if isinstance(self.spare, str) or not set(self.spare) <= set(Role):
            raise ValueError(f"spare is {self.spare!r}; accepted: roles out of {', '.join(Role)}")
        object.__setattr__(self, "spare", tuple(Role(role) for role in self.spare))
        for name, most in (("trust", 1.0), ("contrast", 1.0), ("regret", 1e6)):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= most:
                raise ValueError(f"{name} is {value!r}; accepted: 0 to {most:g}")
        if not isinstance(self.thin, bool):
            raise ValueError(f"thin is {self.thin!r}; accepted: True, False")
        if self.score not in SELECTORS:
            raise ValueError(f"score is {self.score!r}; accepted: {', '.join(SELECTORS)}")
        if self.staging is not None:
            staging = Tier.parse(self.staging)
            if staging not in QUANTIZED:
                raise ValueError(f"staging is {self.staging!r}; accepted: None, {', '.join(t.name for t in QUANTIZED)}")
            # a codec without it has one nearest to it
            object.__setattr__(self, "staging", max((t for t in self.tiers if t <= staging), default=self.tiers[0]))
        object.__setattr__(self, "rho", _shares(self.rho))
        anchors = Tier.parse(self.anchor_tier)
        if anchors < Tier.INT4:
            raise ValueError(f"anchor_tier is {anchors.name}; accepted: INT4 and above, if the codec has it, or BF16")
        object.__setattr__(self, "anchor_tier", min(t for t in (*self.tiers, Tier.BF16) if t >= anchors))
        if self.solver not in SOLVERS:
            raise ValueError(f"solver is {self.solver!r}; accepted: {', '.join(SOLVERS)}")
        Weighing(Tier.INT4, self.refresh, self.decay, self.intent)
        load_profile(self.profile)

    def plan(self, spans: Sequence[Span], num_tokens: int, signals: Signals, budget: Budget | None = None) -> Plan:
        """Without a budget: everything at the tier nearest to INT4. Raises BudgetTooSmallError where sinks, window and spared roles at the
        lowest tier cost more than a budget, ValueError for a quality where the profile does not say what losses mean."""
        pages, default = num_pages(num_tokens, budget), max((t for t in self.tiers if t <= Tier.INT4), default=self.tiers[0])
        sinks = min(self.sinks, pages)
        asks = tuple(Ask(s.start, s.end, s.turn) for s in spans if s.role in ASKS) if self.intent or self.score == "intent" else ()
        staging = self.staging if budget is None or budget.quality is None or self.staging is None else self.tiers[-1]
        weighing = None if staging is None else Weighing(staging, self.refresh, self.decay, self.intent)
        if budget is None:
            return Plan((Tier.BF16,) * sinks + (default,) * (pages - sinks), default, weighing=weighing)
        body = budget.body(self.sinks)
        counts = page_tags(spans, num_tokens, signals.current_turn)[body.start : body.stop]
        mass, alive = signals.mass[body.start : body.stop], np.zeros(len(body))
        alive[: len(signals.alive[body.start : body.stop])] = signals.alive[body.start : body.stop]
        held = np.full(len(body), int(Tier.BF16))
        stored = np.array(signals.held[body.start : body.stop], dtype=int)
        held[: len(stored)] = stored
        losses, highest = self._losses(counts, mass), held.copy()
        if len(stored) and self.staging is not None and budget.quality is None:
            # what is yet to be weighed takes no planes from what is stored before it is: it is staged, and planned anew as its step ends
            held[len(stored) :] = int(self.tiers[0])
            # but what is bought before that is not to cost it all of them
            highest[len(stored) :] = int(self.staging)
        anchored = buy(self.rho, self.anchor_tier, self.tiers, losses, highest, signals, budget, self.solver)
        market = Market.of(
            self.tiers,
            self.thin and self.staging is not None,
            losses * anchored.factors,
            self._kept(counts, body, budget),
            held,
            alive,
            signals,
            anchored.budget,
        )
        chosen = market.solve(self.solver, self._most(budget))
        if budget.quality is not None and signals.choosing:
            # what a turn changes, in what is said of its beginning, is no reason to attend that at fewer planes: pages are weighed first
            chosen = market.holding(chosen, len(stored))
        # past the window's start a tier is a promise for later; the newest pages keep the default at least
        tiers = (Tier.BF16,) * sinks + tuple(chosen.tiers) + (default,) * (pages - body.stop)
        if chosen.cost > market.limit:
            budget.check(tiers, self.name)
        thinning = None
        if chosen.survivors or asks:
            spared = frozenset([*range(body.start), *(np.flatnonzero(~chosen.thinned) + body.start).tolist(), *range(body.stop, pages)])
            slots = chosen.survivors * PAGE_SIZE
            # where nothing is to go, what a session asks is remembered all the same
            count = max(0, int(slots * FILL) - SLACK) if slots else pages * PAGE_SIZE
            most = chosen.survivors or pages
            thinning = Thinning(count, most, market.tier, spared, self.score, slack=SLACK if slots else 0, asks=asks)
        loss, law = chosen.loss / max(num_tokens, 1), load_profile(self.profile).law
        # what is gone is missed when it is asked for, which no mean KL tells; and the law was measured without anchors
        whole = Tier.EVICTED not in tiers and not chosen.survivors and not anchored.pages
        predicted = law.kl(loss) if law is not None and whole else None
        anchors = Anchors(anchored.pages * PAGE_SIZE, self.anchor_tier, refresh=self.refresh) if anchored.pages else None
        return Plan(tiers, default, anchors=anchors, thinning=thinning, weighing=weighing, loss=loss, predicted_kl=predicted)

    def _most(self, budget: Budget) -> float | None:
        """Loss that a plan may have in sum; None where bytes are what is given."""
        if budget.quality is None:
            return None
        law = load_profile(self.profile).law
        if law is None:
            raise ValueError(
                f"profile {self.profile!r} does not say what KL a loss means, so there is no plan of quality {budget.quality}; "
                "python -m kvstrata.eval.quality_study measures it"
            )
        if budget.quality <= law.floor:
            raise ValueError(
                f"quality is {budget.quality}; accepted: above {law.floor:.3g} nats a token, "
                f"which profile {self.profile!r} predicts at any bytes"
            )
        return law.loss(AIM * budget.quality) * budget.num_tokens

    def _kept(self, counts: NDArray[np.int32], body: range, budget: Budget) -> NDArray[np.bool_]:
        """Pages that are neither evicted nor thinned: spared roles, and one page of a sequence that would keep nothing."""
        spared = np.isin(np.arange(counts.shape[1]) % len(ROLES), [ROLES.index(r) for r in self.spare])
        kept = np.array((counts[:, spared] > 0).any(1), np.bool_)
        if len(kept) and not body.start and not budget.window_pages and not kept.any():
            kept[-1] = True
        return kept

    def _losses(self, counts: NDArray[np.int32], mass: Sequence[float]) -> Floats:
        """Loss of each page when it is gone and at each tier, float64 [pages, 1 + tiers]."""
        table = token_losses(self.profile, (Tier.EVICTED, *self.tiers))
        prior: Floats = (counts.astype(np.float64) @ table) * load_profile(self.profile).decay[distance_bins(len(counts))][:, None]
        weighed = np.flatnonzero(np.array(mass))
        # in logarithms of the loss at the lowest tier
        tags = np.log(np.maximum(prior[:, 1], 1e-30))
        believed = tags.copy()
        if len(weighed):
            # both of one mean over the pages that were weighed: of the others the tags say all
            told = np.log(np.array(mass)[weighed])
            believed[weighed] += self.trust * (told - told.mean() - tags[weighed] + tags[weighed].mean())
        mean = believed.mean() if len(believed) else 0.0
        losses = prior * np.exp(mean + self.contrast * (believed - mean) - tags)[:, None]
        losses[:, 0] = self.regret * prior[:, 0] * np.exp(mean + GONE * self.contrast * (believed - mean) - tags)
        return losses


def _shares(rho: float | Sequence[float]) -> tuple[float, ...]:
    """Ascending. Raises ValueError for what is no share, and for none at all."""
    given = tuple(rho) if isinstance(rho, Sequence) and not isinstance(rho, str) else (rho,)
    if not given or any(isinstance(x, bool) or not isinstance(x, int | float) or not 0 <= x <= 1 for x in given):
        raise ValueError(f"rho is {rho!r}; accepted: a share from 0 to 1, or several")
    return tuple(sorted({float(x) for x in given}))
