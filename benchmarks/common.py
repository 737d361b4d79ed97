"""What the benchmarks share: timing, the floor, arenas of random pages, the baselines and where results go."""

import json
import math
import platform
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from kvstrata.ops import dense, frame
from kvstrata.ops.table import PageTable, Segment
from kvstrata.types import PAGE_SIZE, Tier

RESULTS = Path(__file__).parent / "results"


def graphed(run: Callable[[], object]) -> Callable[[], object]:
    """`run` as a CUDA graph, so that the host's launches are not what is timed."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(2):
            run()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    return graph.replay


def microseconds(run: Callable[[], object], *, budget_ms: float = 60.0, graph: bool = True) -> float:
    """Median time of `run` on the device, with a cold L2 cache, in microseconds."""
    run = graphed(run) if graph else run
    cold = torch.empty(256 << 20, dtype=torch.uint8, device="cuda")
    run()
    torch.cuda.synchronize()
    start = time.perf_counter()
    run()
    torch.cuda.synchronize()
    repeats = max(10, min(200, int(budget_ms / 1e3 / max(time.perf_counter() - start, 1e-4))))
    events = [(torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in range(repeats)]
    for begin, end in events:
        cold.zero_()
        begin.record()
        run()
        end.record()
    torch.cuda.synchronize()
    return statistics.median(begin.elapsed_time(end) for begin, end in events) * 1e3


def copy_bandwidth() -> float:
    """Bytes a second of a large copy on the device, read and written: the floor's yardstick."""
    x = torch.randint(0, 255, (1 << 30,), dtype=torch.uint8, device="cuda")
    y = torch.empty_like(x)
    # not as a graph: that would be another copy engine
    return 2 * x.numel() / microseconds(lambda: y.copy_(x), graph=False) * 1e6


def random_arena(counts: dict[Tier, list[int]], heads: int, head_dim: int, *, live_fraction: dict[Tier, float] | None = None,
                 seed: int = 0) -> tuple[Tensor, PageTable, int]:  # fmt: skip
    """Pages of random codes, scattered over an arena, with metadata of ordinary size, and the bytes that decode reads.

    counts: pages of each sequence by tier; live_fraction: tiers with live masks a KV head, and the share of tokens that live.
    """
    gen = torch.Generator(device="cuda").manual_seed(seed)
    live_fraction = live_fraction or {}
    frame_bytes = frame.frame_bytes(head_dim)
    per_page = {t: t.value if t.k_planes else dense.num_frames(head_dim, 2, frame_bytes) for t in counts}
    total = sum(sum(c) * per_page[t] for t, c in counts.items())
    arena = torch.randint(0, 256, (total + 1, heads, frame_bytes), dtype=torch.uint8, device="cuda", generator=gen)
    words = arena.view(torch.int16)
    # scale bytes 0x58 to 0x67: between 0.09 and 0.18 for K, an eighth of that for V; offsets between -31 and -12 steps
    shape = (total + 1, heads, frame_bytes // 2 - frame.plane_words(head_dim))
    scale = torch.randint(0x58, 0x68, shape, device="cuda", generator=gen)
    offset = torch.randint(0x80 + 0x28, 0x80 + 0x40, shape, device="cuda", generator=gen)
    words[..., frame.plane_words(head_dim) :] = (scale | offset << 8).to(torch.int16)
    ids = torch.randperm(total, device="cuda", generator=gen).int() + 1
    segments, moved, batch = [], 0, len(next(iter(counts.values())))
    for tier, pages in counts.items():
        n = per_page[tier]
        frames = torch.zeros(batch, max(pages), n, dtype=torch.int32, device="cuda")
        for b, count in enumerate(pages):
            frames[b, :count] = ids[: count * n].view(count, n)
            ids = ids[count * n :]
        if not tier.k_planes:
            used = frames[frames > 0].long()
            values = torch.randn(len(used), heads, frame_bytes // 2, device="cuda", generator=gen)
            arena[used] = values.to(torch.bfloat16).view(torch.uint8)
        live = None
        if tier in live_fraction:
            alive = torch.rand(batch, max(pages), heads, PAGE_SIZE, device="cuda", generator=gen) < live_fraction[tier]
            live = (alive.long() << torch.arange(PAGE_SIZE, device="cuda")).sum(-1).to(torch.int32)
        segments.append(Segment(tier, frames, torch.tensor(pages, dtype=torch.int32, device="cuda"), live))
        moved += sum(pages) * heads * page_bytes(tier, head_dim)
    return arena, PageTable(tuple(segments), batch), moved


def page_bytes(tier: Tier, head_dim: int) -> int:
    """Bytes of one page and KV head that attention reads: planes, and the metadata of the base frames."""
    if not tier.k_planes:
        return 4 * PAGE_SIZE * head_dim
    return 2 * frame.plane_words(head_dim) * tier.value + 4 * frame.metadata_words(head_dim)


def environment() -> dict[str, str]:
    import triton

    driver = Path("/proc/driver/nvidia/version")
    return {
        "gpu": torch.cuda.get_device_name(),
        "driver": driver.read_text().split("Module")[-1].split("  ")[1].strip() if driver.exists() else "",
        "cuda": torch.version.cuda or "",
        "torch": torch.__version__,
        "triton": triton.__version__,
        "python": platform.python_version(),
    }


def relative_error(out: Tensor, ref: Tensor) -> float:
    return ((out.double() - ref.double()).norm() / ref.double().norm()).item()


def check(name: str, error: float, bound: float) -> None:
    """Stops the benchmark: nothing is timed that is wrong."""
    if not error < bound:
        raise SystemExit(f"{name}: relative error {error:.1e} is not below {bound:.0e}")


def save(name: str, rows: list[dict[str, object]], folder: Path | None = None) -> Path:
    folder = folder or RESULTS
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{name}.json"
    path.write_text(json.dumps({"environment": environment(), "rows": rows}, indent=1) + "\n")
    return path


def softmax_scale(head_dim: int) -> float:
    return 1 / math.sqrt(head_dim)
