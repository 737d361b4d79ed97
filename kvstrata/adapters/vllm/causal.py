"""Tiers decided page by page, each from the tokens before the page's end alone. Knows nothing of any engine.

An engine shares pages between requests by their token ids, and a page of the engine keeps its tier for life. So a tier must not depend on
what follows: two requests with a common prefix get the same tiers for it, and what a query sees depends on token ids, not on how a prompt
was cut, what was found in the cache, or who else runs. What is lost against policy/: pages age in the cache alone (ageing.py), and distance
is not known.

Under a budget page p may take what the allowance up to p leaves. `uniform` takes the highest tier that fits. `triaxial` finds the price
at which the tags seen so far (and those the profile expects) would fill the allowance, buys each page the planes worth that price, and
leaves what is not spent to later pages.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvstrata.adapters.vllm.ageing import Losses, Worth
from kvstrata.adapters.vllm.settings import EngineSettings, request_settings
from kvstrata.policy.profile import load_profile
from kvstrata.policy.tags import NUM_TAGS
from kvstrata.store.layout import Layout
from kvstrata.types import PAGE_SIZE, Tier

AXES = ("modal", "semantic")
"""What a loss can depend on when a page is written: every page is of the current turn then."""
TagPage = Callable[[Sequence[int]], NDArray[np.int64]]
"""Token ids of the next page -> how many of its tokens have each tag, int64 [56]. Called for each page once, in order."""
_TIE = 1e-9


@dataclass(frozen=True, slots=True)
class Allowance:
    """Frames that the pages of one request may take.

    rate: frames a page that the budget pays for. fixed: frames of sinks and of the group that is BF16. pages: of the horizon.
    """

    rate: float
    fixed: int
    sinks: int
    pages: int

    @classmethod
    def of(cls, settings: EngineSettings, layout: Layout) -> "Allowance":
        """Raises ValueError, naming the floor, where not even an endless request could have the lowest tier everywhere."""
        assert settings.budget_bits is not None
        rate = settings.budget_bits * layout.elements(PAGE_SIZE) / 8 / layout.frame_bytes
        lowest, dense, group = settings.tiers[0], layout.frames(Tier.BF16), settings.group // PAGE_SIZE
        if rate < layout.frames(lowest):
            floor = layout.bits_per_element(layout.frames(lowest), PAGE_SIZE)
            raise ValueError(
                f"budget_bits {settings.budget_bits:g} is below {floor:.2f}, what {lowest.name} takes however long the request; "
                "accepted: that or more"
            )
        return cls(rate, (settings.sinks + group) * dense, settings.sinks, max(settings.sinks + 1, settings.horizon // PAGE_SIZE))

    def up_to(self, page: int) -> float:
        """Frames that the pages from the sinks up to and with `page` may take: no token is counted on that is yet to come, but for the
        horizon's, of which each page has its share."""
        num_pages = page + 1
        if num_pages >= self.pages:
            return self.rate * num_pages - self.fixed
        return (self.rate * self.pages - self.fixed) * (num_pages - self.sinks) / (self.pages - self.sinks)


@dataclass(frozen=True, slots=True)
class Market:
    """What planes are worth, for each tag: the steps of every tag's lower convex hull, the best first.

    gain: loss that a page of this tag sheds for each frame more, float64 [steps], descending. tag, frames: int64 [steps].
    loss: of one token at each of `tiers`, float64 [56, tiers]. prior: tokens of each tag that are expected, float64 [56].
    """

    tiers: tuple[Tier, ...]
    frames_of: tuple[int, ...]
    loss: NDArray[np.float64]
    gain: NDArray[np.float64]
    tag: NDArray[np.int64]
    frames: NDArray[np.int64]
    prior: NDArray[np.float64]

    @classmethod
    def of(cls, settings: EngineSettings, layout: Layout) -> "Market":
        profile, tiers = load_profile(settings.profile), settings.tiers
        loss = profile.at(tiers, profile.per_token(AXES))
        frames = tuple(layout.frames(t) for t in tiers)
        steps = [(gain, tag, more) for tag in range(NUM_TAGS) for gain, more, _ in hull(loss[tag] * PAGE_SIZE, frames)]
        steps.sort(key=lambda s: (-s[0], s[1]))
        gain, tag, more = zip(*steps, strict=True) if steps else ((), (), ())
        prior = profile.tokens / profile.tokens.sum() * settings.horizon
        return cls(tiers, frames, loss, np.array(gain, np.float64), np.array(tag, np.int64), np.array(more, np.int64), prior)

    def price(self, tokens: NDArray[np.float64], frames: float) -> tuple[float, float]:
        """The least gain a frame that is worth buying when tokens of these tags share `frames` frames, and what share of the steps at
        exactly that gain can be bought."""
        left = frames - tokens.sum() / PAGE_SIZE * self.frames_of[0]
        cost = tokens[self.tag] / PAGE_SIZE * self.frames
        total = np.cumsum(cost)
        i = int(np.searchsorted(total, left, side="right"))
        if i == len(total):
            return 0.0, 1.0
        # several tags may have the same gain: the share is of all of them
        same = np.abs(self.gain - self.gain[i]) <= _TIE * self.gain[i]
        before = float(cost[self.gain > self.gain[i] * (1 + _TIE)].sum())
        return float(self.gain[i]), min(1.0, max(0.0, (left - before) / float(cost[same].sum())))


def hull(loss: NDArray[np.float64], frames: Sequence[int]) -> list[tuple[float, int, int]]:
    """Steps of the lower convex hull of (frames, loss), both by tier: (loss shed for each frame, frames, index of the tier reached)."""
    at, steps = 0, []
    while at + 1 < len(frames):
        gains = [(loss[at] - loss[j]) / (frames[j] - frames[at]) for j in range(at + 1, len(frames))]
        best = max(range(len(gains)), key=lambda j: (gains[j], j))
        if gains[best] <= 0:
            break
        steps.append((float(gains[best]), frames[at + 1 + best] - frames[at], at + 1 + best))
        at += 1 + best
    return steps


class CausalPlanner:
    """Tiers of one request's pages. `tiers` grows by `extend`; what is there never changes."""

    def __init__(
        self, settings: EngineSettings, layout: Layout, tag_page: TagPage | None = None, market: Market | None = None,
        worth: Worth | None = None,
    ) -> None:  # fmt: skip
        """tag_page, market: of policy triaxial. worth: where pages age; `losses` then grows beside `tiers`."""
        self.tiers: list[Tier] = []
        self.losses: list[Losses] = []
        self._worth_of = worth
        self._settings, self._layout, self._tag_page, self._market = settings, layout, tag_page, market
        self._allowance = None if settings.budget_bits is None else Allowance.of(settings, layout)
        self._spent = 0
        self._frames = {t: layout.frames(t) for t in settings.tiers}
        self._seen = np.zeros(NUM_TAGS) if market is None else market.prior.copy()
        self._seen_pages = 0.0 if market is None else float(market.prior.sum() / PAGE_SIZE)
        self._owed = 0.0

    def extend(self, token_ids: Sequence[int], num_pages: int) -> list[Tier]:
        """Tiers of at least the first `num_pages` pages of these token ids; pages that are decided already are not looked at again."""
        assert num_pages * PAGE_SIZE <= len(token_ids)
        for page in range(len(self.tiers), num_pages):
            self.tiers.append(self._decide(page, token_ids[page * PAGE_SIZE : (page + 1) * PAGE_SIZE]))
        return self.tiers

    def _decide(self, page: int, token_ids: Sequence[int]) -> Tier:
        counts = self._tag_page(token_ids) if self._tag_page is not None else None
        if self._worth_of is not None:
            self.losses.append(self._worth_of.losses(counts))
        if page < self._settings.sinks:
            return Tier.BF16
        if self._allowance is None:
            assert self._settings.tier is not None
            return self._settings.tier
        left = self._allowance.up_to(page) - self._spent
        wish = self._settings.tiers[-1] if counts is None else self._worth(page, counts)
        fits = [t for t in self._settings.tiers if t <= wish and self._frames[t] <= left]
        tier = fits[-1] if fits else self._settings.tiers[0]
        self._spent += self._frames[tier]
        return tier

    def _worth(self, page: int, counts: NDArray[np.int64]) -> Tier:
        """The highest tier whose last frame sheds as much loss as the price of a frame."""
        market = self._market
        assert market is not None and self._allowance is not None
        self._seen = self._seen + counts
        pages = page + 1 - self._settings.sinks
        # the allowance of those pages, and as much for each page that the profile expects
        share = max(self._allowance.up_to(page), 0.0) / pages
        price, part = market.price(self._seen, share * (pages + self._seen_pages))
        steps = hull(counts @ market.loss, market.frames_of)
        at = 0
        for gain, _, reached in steps:
            if gain > price * (1 + _TIE):
                at = reached
            elif gain >= price * (1 - _TIE):
                # a share of such steps fits: every 1/share-th is taken
                self._owed += part
                if self._owed < 1:
                    break
                self._owed -= 1
                at = reached
            else:
                break
        return market.tiers[at]


def check_request(settings: EngineSettings, layout: Layout, extra_args: Any) -> None:
    """Raises ValueError for extra arguments that no plan can be made of: a scheduler that meets them has nobody to tell, and ends."""
    own = request_settings(settings, extra_args)
    if own.budget_bits is not None:
        Allowance.of(own, layout)


def most_frames(settings: EngineSettings, layout: Layout, num_tokens: int) -> int:
    """Frames that a request of `num_tokens` tokens takes at most, its BF16 group included."""
    group = settings.group // PAGE_SIZE
    dense = layout.frames(Tier.BF16)
    pages = max(num_tokens - 1, 0) // settings.group * group
    sinks = min(settings.sinks, pages)
    body, fixed = pages - sinks, group * dense + sinks * dense
    if not body:
        return fixed
    if settings.budget_bits is None:
        assert settings.tier is not None
        return fixed + body * layout.frames(settings.tier)
    lowest, highest = layout.frames(settings.tiers[0]), layout.frames(settings.tiers[-1])
    allowed = math.floor(Allowance.of(settings, layout).up_to(pages - 1))
    # a page that nothing is left for takes the lowest tier all the same, and one that much is left for no more than the highest
    return fixed + min(max(allowed, body * lowest) + lowest, body * highest)
