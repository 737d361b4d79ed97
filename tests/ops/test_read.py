"""Reading stored pages whole: what was written, and what is refused."""

import pytest
import torch

from kvstrata.ops import dense, frame, quant
from kvstrata.ops.read import read_pages
from kvstrata.types import PAGE_SIZE, Tier

FRAMES = torch.tensor([[3, 1], [2, 5]], dtype=torch.int32)


def test_pages_are_read_as_they_were_written():
    k, v = (torch.randn(2, PAGE_SIZE, 3, 64, generator=torch.Generator().manual_seed(i)) for i in range(2))
    arena = torch.zeros(40, 3, frame.frame_bytes(64), dtype=torch.uint8)
    arena[FRAMES.flatten().long()] = quant.encode(k, v, Tier.INT2).flatten(0, 1)
    for x, y in zip(
        read_pages(arena, FRAMES, Tier.INT2, 64, torch.float32), quant.decode(arena[FRAMES.long()], Tier.INT2, 64), strict=True
    ):
        assert torch.equal(x, y)
    n = dense.num_frames(64, 4, arena.shape[2])
    frames = torch.arange(6, 6 + n, dtype=torch.int32)[None]
    arena[frames.long()] = dense.to_frames(k[:1], v[:1], arena.shape[2])
    for x, y in zip(read_pages(arena, frames, Tier.BF16, 64, torch.float32), (k[:1], v[:1]), strict=True):
        assert torch.equal(x, y)


@pytest.mark.parametrize(
    "change, message",
    [
        ({"tier": Tier.EVICTED}, "tier EVICTED"),
        ({"tier": Tier.INT3}, r"accepted: int32 \[2, 3\]"),
        ({"frames": FRAMES.long()}, "frames are torch.int64"),
        ({"head_dim": 128}, "frame"),
        ({"head_dim": 72}, "head_dim 72"),
    ],
)
def test_bad_arguments_are_named(change, message):
    arena = torch.zeros(40, 3, frame.frame_bytes(64), dtype=torch.uint8)
    good = {"arena": arena, "frames": FRAMES, "tier": Tier.INT2, "head_dim": 64, "dtype": torch.float32}
    with pytest.raises(ValueError, match=message):
        read_pages(**(good | change))
