"""One preallocated buffer of equal frames a layer, one free list for all, reference counts. Knows nothing of pages or sequences."""

import numpy as np
import torch
from torch import Tensor

from kvstrata.store.layout import Layout

DEAD_SLOT = 0
"""The frame that is never handed out."""


class OutOfFramesError(RuntimeError):
    """The arena cannot give the frames asked for. asked, free: frames; holders: frames held, by holder, largest first."""

    def __init__(self, asked: int, free: int, holders: dict[str, int]) -> None:
        self.asked, self.free, self.holders = asked, free, holders
        held = ", ".join(f"{name} {n}" for name, n in holders.items()) or "nobody"
        super().__init__(f"asked for {asked} frames, {free} are free; held by: {held}")


class Arena:
    """buffer: uint8 [num_layers, num_frames, num_kv_heads, head_frame_bytes]. Untouched frames cost no physical memory on a CPU."""

    def __init__(self, layout: Layout, num_frames: int, device: torch.device) -> None:
        shape = (layout.num_layers, num_frames, layout.num_kv_heads, layout.head_frame_bytes)
        self.buffer: Tensor = torch.empty(shape, dtype=torch.uint8, device=device)
        # masked-out reads of the dead slot must not meet NaN patterns
        self.buffer[:, DEAD_SLOT] = 0
        self.num_frames = num_frames
        self.ref_counts = np.zeros(num_frames, dtype=np.int32)
        # a stack, lowest ids on top: the touched part of the buffer stays compact
        self._free = list(range(num_frames - 1, DEAD_SLOT, -1))
        self.peak_in_use = 0

    @property
    def free(self) -> int:
        return len(self._free)

    @property
    def in_use(self) -> int:
        return self.num_frames - 1 - len(self._free)

    def allocate(self, n: int) -> list[int]:
        """`n` frames with a reference each. Raises OutOfFramesError, with no holders named, and changes nothing where too few are free."""
        if n > len(self._free):
            raise OutOfFramesError(n, len(self._free), {})
        if n == 0:
            return []
        ids = self._free[-n:][::-1]
        del self._free[-n:]
        self.ref_counts[ids] = 1
        self.peak_in_use = max(self.peak_in_use, self.in_use)
        return ids

    def retain(self, ids: tuple[int, ...] | list[int]) -> None:
        for i in ids:
            assert self.ref_counts[i] > 0, f"frame {i} is free"
            self.ref_counts[i] += 1

    def release(self, ids: tuple[int, ...] | list[int]) -> int:
        """Give up one reference each; returns how many frames became free."""
        freed = 0
        for i in ids:
            assert self.ref_counts[i] > 0, f"frame {i} is free"
            self.ref_counts[i] -= 1
            if self.ref_counts[i] == 0:
                self._free.append(i)
                freed += 1
        return freed

    def shared(self, ids: tuple[int, ...]) -> bool:
        return any(self.ref_counts[i] > 1 for i in ids)

    def check_integrity(self, references: np.ndarray) -> None:
        """`references[i]`: references to frame i that the owners know of. Raises AssertionError where the books disagree."""
        assert self.ref_counts[DEAD_SLOT] == 0, "the dead slot was handed out"
        assert DEAD_SLOT not in self._free, "the dead slot is free"
        wrong = np.nonzero(self.ref_counts != references)[0]
        assert not len(wrong), f"frame {wrong[0]}: {self.ref_counts[wrong[0]]} references counted, {references[wrong[0]]} held"
        assert len(set(self._free)) == len(self._free), "a frame is free twice"
        assert all(self.ref_counts[i] == 0 for i in self._free), "a free frame has a reference"
        assert len(self._free) + int((self.ref_counts > 0).sum()) == self.num_frames - 1, "frames leaked"
