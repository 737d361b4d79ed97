"""Writing pages: bytes read and written over copy bandwidth. KVSTRATA_BACKEND chooses the kernels that are timed."""

import torch

from benchmarks.common import check, copy_bandwidth, microseconds, page_bytes, save
from kvstrata.ops import dense, frame, quant
from kvstrata.ops.gather import gather_pages, gather_pages_ref
from kvstrata.ops.write import settle_pages, write_dense, write_pages
from kvstrata.types import PAGE_SIZE, Tier

HEADS, HEAD_DIM, PAGES = 8, 128, 4096
FRAME_BYTES = frame.frame_bytes(HEAD_DIM)
DENSE_FRAMES = dense.num_frames(HEAD_DIM, 2, FRAME_BYTES)


def main() -> None:
    rows: list[dict[str, object]] = []
    copy = copy_bandwidth()
    k, v = (torch.randn(PAGES, PAGE_SIZE, HEADS, HEAD_DIM, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    page_in = 4 * PAGE_SIZE * HEAD_DIM * HEADS

    def report(name: str, us: float, moved: int) -> None:
        rows.append({"op": name, "pages": PAGES, "us": us, "bytes": moved, "percent_of_copy": 100 * moved / us * 1e6 / copy})
        print(f"{name}: {us:.0f} us, {moved / us / 1e6:.2f} TB/s, {rows[-1]['percent_of_copy']:.0f}% of copy", flush=True)

    ids = torch.randperm(PAGES * (DENSE_FRAMES + 8), device="cuda").int() + 1
    arena = torch.zeros(len(ids) + 1, HEADS, FRAME_BYTES, dtype=torch.uint8, device="cuda")
    src = ids[: PAGES * DENSE_FRAMES].view(PAGES, DENSE_FRAMES)
    arena[src.flatten().long()] = dense.to_frames(k, v, FRAME_BYTES).flatten(0, 1)
    for tier in (Tier.INT2, Tier.INT3, Tier.INT4, Tier.INT8):
        frames = ids[PAGES * DENSE_FRAMES :][: PAGES * tier.value].view(PAGES, tier.value)
        expected = quant.encode(k[:8].cpu(), v[:8].cpu(), tier)
        moved = PAGES * (page_in + HEADS * page_bytes(tier, HEAD_DIM))
        for name, run in (
            ("write", lambda f=frames, t=tier: write_pages(arena, f, k, v, t)),
            ("settle", lambda f=frames, t=tier: settle_pages(arena, src, f, t, HEAD_DIM, torch.bfloat16)),
        ):
            arena[frames.flatten().long()] = 255
            run()
            wrong = (arena[frames[:8].long()].cpu() != expected).float().mean().item()
            check(f"{name} {tier.name}", wrong, 1e-9)
            report(f"{name} {tier.name}", microseconds(run), moved)
    tokens = torch.arange(PAGES * PAGE_SIZE, device="cuda")
    page_of, inside = src[tokens // PAGE_SIZE].contiguous(), (tokens % PAGE_SIZE).int()
    flat_k, flat_v = k.flatten(0, 1), v.flatten(0, 1)
    report("write dense", microseconds(lambda: write_dense(arena, page_of, inside, flat_k, flat_v)), 2 * PAGES * page_in)
    half = src[: PAGES // 2]
    # any token of any page: each slot of a page comes from another one
    anywhere = torch.randint(0, PAGES * PAGE_SIZE, (PAGES // 2, PAGE_SIZE, HEADS), device="cuda").int()
    # the same, each slot's choices in their order from page to page
    scattered = anywhere.sort(0).values.contiguous()
    # every page thinned to half of its tokens, another half for each head: survivors in their order
    chosen = torch.rand(PAGES, PAGE_SIZE, HEADS, device="cuda").argsort(1)[:, : PAGE_SIZE // 2].sort(1).values
    in_order = (chosen + PAGE_SIZE * torch.arange(PAGES, device="cuda")[:, None, None]).view(PAGES // 2, PAGE_SIZE, HEADS).int()
    gathers = {
        Tier.INT4: {"": scattered, " in order": in_order, " anywhere": anywhere},
        Tier.INT2: {"": scattered},
        Tier.INT8: {"": scattered},
    }
    for tier, choices in gathers.items():
        frames = ids[PAGES * DENSE_FRAMES :][: PAGES * tier.value].view(PAGES, tier.value)
        write_pages(arena, frames, k, v, tier)
        for name, picks in choices.items():
            # against the reference: pages that take from the first 64
            few = (picks[:4] % (64 * PAGE_SIZE)).contiguous()
            gather_pages(arena, frames[:64], tier, few, half[:4], HEAD_DIM, torch.bfloat16)
            got = dense.from_frames(arena[half[:4].long()], HEAD_DIM, torch.bfloat16)
            gather_pages_ref(arena, frames[:64], tier, few, half[:4], HEAD_DIM, torch.bfloat16)
            expected_pages = dense.from_frames(arena[half[:4].long()], HEAD_DIM, torch.bfloat16)
            wrong = sum((a != b).float().mean().item() for a, b in zip(got, expected_pages, strict=True))
            check(f"gather {tier.name}{name}", wrong, 1e-9)
            us = microseconds(lambda f=frames, t=tier, p=picks: gather_pages(arena, f, t, p, half, HEAD_DIM, torch.bfloat16))
            report(f"gather {tier.name}{name}", us, PAGES // 2 * (page_in + HEADS * page_bytes(tier, HEAD_DIM)))
    save("write", rows)


if __name__ == "__main__":
    main()
