"""What attention's output loses when the tokens of one tag alone are coarsened (TriAxialKV's D_k(b), arXiv 2605.17170).

For a late query, the output is a ratio of two sums over tokens, sum(e v) / sum(e). Coarsening one tag changes that tag's summands and no
others, so one pass over the tokens at each tier gives every tag's distortion: no forward pass for each (tag, tier) is needed.
Knows nothing of models.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kvstrata.ops.codecs import Codec
from kvstrata.ops.quant import rotate
from kvstrata.policy.profile import NUM_BINS, distance_bins
from kvstrata.policy.tags import NUM_TAGS, tags_by_token
from kvstrata.types import PAGE_SIZE, Role, Span, Tier

GENERATED = (Role.ASSISTANT, Role.REASONING, Role.TOOL_CALL)
LAST_TURNS = 3
VIEWS, QUERIES = 8, 16
"""At most so many views a conversation, and queries a view."""


@dataclass(frozen=True)
class View:
    """A moment of a conversation: queries at positions `queries`, while tokens [start, end), whole pages, are stored and the rest dense.

    code: int64 [end - start], the tag of each stored token. far: int64 [pages], the bin of each page's distance to the window.
    """

    queries: Tensor
    start: int
    end: int
    code: NDArray[np.int64]
    far: NDArray[np.int64]

    @cached_property
    def tags(self) -> NDArray[np.int64]:
        return np.unique(self.code)

    @cached_property
    def pure(self) -> NDArray[np.int64]:
        """Pages that hold one tag alone."""
        pages = self.code.reshape(-1, PAGE_SIZE)
        return np.flatnonzero((pages == pages[:, :1]).all(1))

    @cached_property
    def far_cell(self) -> NDArray[np.int64]:
        """tag * NUM_BINS + bin of each pure page."""
        return self.code[self.pure * PAGE_SIZE] * NUM_BINS + self.far[self.pure]

    @cached_property
    def groups(self) -> list[tuple[Tensor, Tensor]]:
        """For each of `tags`: its pure pages, and its tokens in mixed pages."""
        mixed = np.ones(len(self.code), bool).reshape(-1, PAGE_SIZE)
        mixed[self.pure] = False
        pure_tag = self.code[self.pure * PAGE_SIZE]
        return [
            (torch.from_numpy(self.pure[pure_tag == tag]), torch.from_numpy(np.flatnonzero(mixed.ravel() & (self.code == tag))))
            for tag in self.tags
        ]


def make_views(spans: Sequence[Span], num_tokens: int, seed: int, *, window: int = 0, sinks: int = 1) -> list[View]:
    """Views of the last turns: runs of tokens that the model wrote, or the last tokens of a turn in which it wrote none."""
    random = np.random.default_rng(seed)
    last = max(s.turn for s in spans)
    runs = [(s.start, s.end, s.turn) for s in spans if s.role in GENERATED and s.turn > last - LAST_TURNS]
    wrote = {turn for _, _, turn in runs}
    for turn in range(max(1, last - LAST_TURNS + 1), last + 1):
        if turn not in wrote and (own := [s for s in spans if s.turn == turn]):
            runs.append((max(own[0].start, own[-1].end - QUERIES), own[-1].end, turn))
    views = []
    for start, end, turn in sorted(runs):
        # the aligned window: the group of `window` tokens that holds the first query, and the one before it
        stored = max(0, start // window - 1) * window // PAGE_SIZE if window else start // PAGE_SIZE
        if stored <= sinks or end > num_tokens:
            continue
        tags = tags_by_token(spans, num_tokens, turn).code[sinks * PAGE_SIZE : stored * PAGE_SIZE]
        picked = np.sort(random.permutation(np.arange(start, end))[:QUERIES])
        views.append(View(torch.from_numpy(picked), sinks * PAGE_SIZE, stored * PAGE_SIZE, tags, distance_bins(stored)[sinks:]))
    chosen = sorted(random.permutation(len(views))[:VIEWS].tolist())
    return [views[i] for i in chosen]


def coarsened(k: Tensor, v: Tensor, codec: Codec, tiers: Sequence[Tier]) -> list[tuple[Tensor, Tensor]]:
    """k, v [H, n, D], n whole pages, v rotated if the codec wants it -> the same as each tier gives them back, float32."""
    h, n, d = k.shape
    pages = [x.transpose(0, 1).reshape(n // PAGE_SIZE, PAGE_SIZE, h, d) for x in (k, v)]
    nested = codec.name == "planes"
    most = codec.encode(pages[0], pages[1], max(tiers)) if nested else None
    out = []
    for tier in tiers:
        # a page of fewer planes is a prefix of the frames of one of more
        frames = codec.encode(pages[0], pages[1], tier) if most is None else most[:, : codec.num_frames(tier, d)]
        out.append(tuple(x.reshape(n, h, d).transpose(0, 1) for x in codec.decode(frames, tier, d)))
    return [(a, b) for a, b in out]


@dataclass
class Losses:
    """Sums over views and layers. tag: float64 [measures, 56, bits]; far: float64 [56 * NUM_BINS, bits], of pages of one tag, each
    coarsened alone; measures: relative, mse."""

    tag: NDArray[np.float64]
    far: NDArray[np.float64]

    @classmethod
    def zeros(cls, num_bits: int) -> "Losses":
        return cls(np.zeros((2, NUM_TAGS, num_bits)), np.zeros((NUM_TAGS * NUM_BINS, num_bits)))


@torch.no_grad()
def measure_layer(
    q: Tensor, k: Tensor, v: Tensor, scale: float, views: Sequence[View], codec: Codec, tiers: Sequence[Tier], into: Losses
) -> None:
    """Add one layer's losses. q [Hq, T, D], k, v [H, T, D] after RoPE. Column 0 of the losses is eviction, the others are `tiers`.

    The loss of a tag is the mean squared error over queries and channels, at the head where it is largest; "relative" divides each
    head's by the mean square of its outputs first. Float32 throughout; differences are formed before sums, so small ones survive."""
    longest = max(view.end for view in views)
    k, v = k.float(), v.float()
    if codec.rotates_v:
        v = rotate(v)
    stored = coarsened(k[:, :longest], v[:, :longest], codec, tiers)
    group = q.shape[0] // k.shape[0]
    for view in views:
        seen = int(view.queries[-1]) + 1
        queries = q[:, view.queries].float().unflatten(0, (-1, group)) * scale
        queries = queries.flatten(1, 2)  # [H, group * Q, D]
        scores = queries @ k[:, :seen].transpose(1, 2)
        future = torch.arange(seen)[None, :] > view.queries.repeat(group)[:, None]
        scores.masked_fill_(future, -torch.inf)
        top = scores.amax(-1, keepdim=True)
        e = (scores - top).exp_()
        den, num = e.sum(-1, keepdim=True), e @ v[:, :seen]
        full = num / den
        power = full.unflatten(1, (group, -1)).square().mean((2, 3)).flatten().clamp(min=1e-20)
        body = slice(view.start, view.end)
        e_body, v_body = e[..., body], v[:, body]
        power_of = power[None]
        for column in range(1 + len(tiers)):
            if column:
                kt, vt = (x[:, body] for x in stored[column - 1])
                # a codec that ruins K may lift a score out of float32's reach; such a token then takes all of the mass
                after = (queries @ kt.transpose(1, 2) - top).clamp_(max=60).exp_()
            else:
                after, vt = torch.zeros_like(e_body), v_body
            grown, moved = after - e_body, vt - v_body
            dd = grown.unflatten(2, (-1, PAGE_SIZE))
            dn = _by_page(dd, vt) + _by_page(e_body.unflatten(2, (-1, PAGE_SIZE)), moved)  # [P, H, group * Q, D]
            dd = dd.sum(-1).permute(2, 0, 1)[..., None]
            far = (_loss(dn[view.pure], dd[view.pure], full, den, group) / power_of).amax(1)
            np.add.at(into.far[:, column], view.far_cell, far.numpy())
            tag_dn, tag_dd = [], []
            for pages, tokens in view.groups:
                x, y = dn[pages].sum(0), dd[pages].sum(0)
                if len(tokens):
                    part = grown[..., tokens]
                    x = x + part @ vt[:, tokens] + e_body[..., tokens] @ moved[:, tokens]
                    y = y + part.sum(-1, keepdim=True)
                tag_dn.append(x)
                tag_dd.append(y)
            near = _loss(torch.stack(tag_dn), torch.stack(tag_dd), full, den, group)
            into.tag[0, view.tags, column] += (near / power_of).amax(1).numpy()
            into.tag[1, view.tags, column] += near.amax(1).numpy()


def _by_page(e: Tensor, v: Tensor) -> Tensor:
    """e [H, Q, P, 32], v [H, P * 32, D] -> the sum over each page's tokens, [P, H, Q, D]."""
    return torch.matmul(e.permute(2, 0, 1, 3), v.unflatten(1, (-1, PAGE_SIZE)).transpose(0, 1))


def _loss(num_change: Tensor, den_change: Tensor, full: Tensor, den: Tensor, group: int) -> Tensor:
    """Mean squared change of the output for each head, [cells, Hq]."""
    # where nearly all of the mass is taken away, what is left is rounding
    change = (num_change - full * den_change) / torch.maximum(den + den_change, 1e-5 * den)
    return change.unflatten(2, (group, -1)).square().mean((3, 4)).flatten(1)
