"""Losses of tags against the plain way: coarsen the tag's tokens, run attention again, compare outputs."""

import numpy as np
import pytest
import torch

from kvstrata.calibrate.distortion import Losses, View, coarsened, make_views, measure_layer
from kvstrata.ops.codecs import make_codec
from kvstrata.ops.quant import rotate
from kvstrata.policy.profile import NUM_BINS
from kvstrata.policy.tags import NUM_TAGS, ROLES, tags_by_token
from kvstrata.types import PAGE_SIZE, Role, Span, Tier

SPANS = (Span(0, 150, Role.INST, 0), Span(150, 170, Role.USER, 1), Span(170, 230, Role.TOOL_CALL, 1), Span(230, 350, Role.OBS, 1),
         Span(350, 360, Role.USER, 2), Span(360, 391, Role.ASSISTANT, 2))  # fmt: skip
N = 391
TIERS = {"planes": (Tier.INT2, Tier.INT3, Tier.INT4, Tier.INT8), "triaxial": (Tier.INT2, Tier.INT4)}


def attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, queries: list[int], gone: np.ndarray | None = None) -> torch.Tensor:
    """float64 [Hq, Q, D], one query and head at a time; `gone` tokens are left out."""
    out = torch.zeros(q.shape[0], len(queries), q.shape[2], dtype=torch.float64)
    group = q.shape[0] // k.shape[0]
    for h in range(q.shape[0]):
        for i, p in enumerate(queries):
            s = (k[h // group, : p + 1].double() @ q[h, p].double()) * 0.125
            if gone is not None:
                s[torch.from_numpy(gone[: p + 1])] = -torch.inf
            out[h, i] = torch.softmax(s, 0) @ v[h // group, : p + 1].double()
    return out


@pytest.mark.parametrize("name", ["planes", "triaxial"])
def test_losses_are_those_of_attention_run_again(name: str) -> None:
    torch.manual_seed(0)
    q, k, v = torch.randn(4, N, 64) * 2, torch.randn(2, N, 64), torch.randn(2, N, 64)
    codec, tiers = make_codec(name), TIERS[name]
    views = make_views(SPANS, N, seed=3)
    assert len(views) == 2
    losses = Losses.zeros(1 + len(tiers))
    measure_layer(q, k, v, 0.125, views, codec, tiers, losses)
    expected = np.zeros_like(losses.tag)
    far = np.zeros_like(losses.far)
    if codec.rotates_v:
        v = rotate(v)
    for view in views:
        turn = 2 if view.queries[0] >= 350 else 1
        codes = tags_by_token(SPANS, N, turn).code
        stored = np.zeros(N, bool)
        stored[view.start : view.end] = True
        positions = view.queries.tolist()
        full = attention(q, k, v, positions)
        power = full.square().mean((1, 2))

        def loss(mask: np.ndarray, column: int, positions: list[int] = positions, full: torch.Tensor = full) -> torch.Tensor:
            if column == 0:
                return (attention(q, k, v, positions, mask) - full).square().mean((1, 2))
            whole = N // PAGE_SIZE * PAGE_SIZE
            ((kt, vt),) = coarsened(k[:, :whole], v[:, :whole], codec, [tiers[column - 1]])
            kq, vq = k.clone(), v.clone()
            index = torch.from_numpy(np.flatnonzero(mask))
            kq[:, index], vq[:, index] = kt[:, index], vt[:, index]
            return (attention(q, kq, vq, positions) - full).square().mean((1, 2))

        for column in range(1 + len(tiers)):
            for tag in np.unique(codes[stored]):
                each = loss(stored & (codes == tag), column)
                expected[0, tag, column] += float((each / power).max())
                expected[1, tag, column] += float(each.max())
            for page in range(view.start // PAGE_SIZE, view.end // PAGE_SIZE):
                own = codes[page * PAGE_SIZE : (page + 1) * PAGE_SIZE]
                if len(set(own)) == 1:
                    mask = np.zeros(N, bool)
                    mask[page * PAGE_SIZE : (page + 1) * PAGE_SIZE] = True
                    bin_ = int(np.ceil(np.log2(view.end // PAGE_SIZE - page)))
                    far[own[0] * NUM_BINS + bin_, column] += float((loss(mask, column) / power).max())
    np.testing.assert_allclose(losses.tag, expected, rtol=2e-3, atol=1e-9)
    np.testing.assert_allclose(losses.far, far, rtol=2e-3, atol=1e-9)
    assert (losses.tag[0, :, 1] >= losses.tag[0, :, -1]).all()


@pytest.mark.parametrize("window", [0, 64])
def test_views_stand_where_the_model_wrote(window: int) -> None:
    views = make_views(SPANS, N, seed=0, window=window)
    for view, (start, end) in zip(views, [(170, 230), (360, 391)], strict=True):
        assert start <= int(view.queries[0])
        assert int(view.queries[-1]) < end
        assert len(view.queries) == 16
        # sinks are never coarsened, nor is the aligned window (170 lies in group 2 of 64, 360 in group 5), nor the page that fills
        assert (view.start, view.end) == (32, (start // 64 - 1) * 64 if window else start // 32 * 32)
        assert len(view.code) == view.end - view.start
    # the same calls have aged by a turn; without a window a turn's own request is stored when it is answered
    asked = ROLES.index(Role.USER)
    assert set(views[0].tags.tolist()) & set(views[1].tags.tolist()) == (set() if window else {asked})


def test_views_of_turns_without_replies_and_of_short_texts() -> None:
    told = tuple(Span(i * 100, (i + 1) * 100, Role.USER, i + 1) for i in range(5))
    views = make_views(told, 500, seed=0)
    assert [int(v.queries[-1]) for v in views] == [299, 399, 499]
    assert make_views((Span(0, 60, Role.USER, 1),), 60, seed=0) == []
    # 16 queries at the end, the group of the first one and the one before it: nothing is stored but the sink
    short = (Span(0, 140, Role.USER, 1),)
    assert make_views(short, 140, seed=0, window=64) == []
    assert [v.end for v in make_views(short, 140, seed=0)] == [96]


def test_groups_partition_the_stored_tokens() -> None:
    for view in make_views(SPANS, N, seed=0):
        seen = np.zeros(view.end - view.start, int)
        for tag, (pages, tokens) in zip(view.tags, view.groups, strict=True):
            mine = [t for p in pages.tolist() for t in range(p * PAGE_SIZE, (p + 1) * PAGE_SIZE)] + tokens.tolist()
            seen[mine] += 1
            assert set(view.code[mine]) == {tag}
        assert (seen == 1).all()
        assert view.far_cell.max() < NUM_TAGS * NUM_BINS
        assert isinstance(view, View)
