"""A chunk of new tokens over a stored prefix: ours against flash attention over a prefix in bfloat16 of the same length.

Timed is the kernel that `extend` picks; Triton's is timed beside it."""

from functools import partial

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.bias import causal_lower_right
from torch.nn.functional import scaled_dot_product_attention as attend

from benchmarks.common import check, microseconds, random_arena, relative_error, save, softmax_scale
from kvstrata.ops.extend import extend, extend_ref
from kvstrata.ops.extend_kernel import extend_triton
from kvstrata.types import PAGE_SIZE, Tier

HEADS, HEAD_DIM, GROUP = 8, 128, 4
SHAPES = ((32768, 2048), (32768, 512), (8192, 8192), (131072, 2048), (1024, 100))
TIERS = (Tier.INT2, Tier.INT3, Tier.INT4, Tier.INT8, Tier.BF16)


def main() -> None:
    rows: list[dict[str, object]] = []
    scale = softmax_scale(HEAD_DIM)
    for tier in TIERS:
        arena, table, _ = random_arena({tier: [9, 4]}, HEADS, HEAD_DIM)
        q, k, v = (torch.randn(300, n, HEAD_DIM, device="cuda", dtype=torch.bfloat16) for n in (HEADS * GROUP, HEADS, HEADS))
        ref = extend_ref(q, k, v, [0, 260, 300], arena, table, scale, dense_dtype=torch.bfloat16)
        for kernel in (extend, extend_triton):
            out = kernel(q, k, v, [0, 260, 300], arena, table, scale, dense_dtype=torch.bfloat16)
            check(f"{kernel.__name__} {tier.name}", relative_error(out, ref), 6e-3)
    for prefix, chunk in SHAPES:
        q, k, v = (torch.randn(1, n, chunk, HEAD_DIM, device="cuda", dtype=torch.bfloat16) for n in (HEADS * GROUP, HEADS, HEADS))
        keys, values = (torch.randn(1, HEADS, prefix + chunk, HEAD_DIM, device="cuda", dtype=torch.bfloat16) for _ in range(2))
        bias = causal_lower_right(chunk, prefix + chunk)
        bf16 = {}
        for name, kind in (("flash", SDPBackend.FLASH_ATTENTION), ("cudnn", SDPBackend.CUDNN_ATTENTION)):
            try:
                with sdpa_kernel(kind):
                    bf16[name] = microseconds(partial(attend, q, keys, values, attn_mask=bias, enable_gqa=True), graph=False)
            except RuntimeError as error:
                # a backend may not take a lower-right mask
                print(f"{name}: {str(error)[:80]}")
        del keys, values
        tokens = [x[0].transpose(0, 1).contiguous() for x in (q, k, v)]
        for tier in TIERS:
            arena, table, _ = random_arena({tier: [prefix // PAGE_SIZE]}, HEADS, HEAD_DIM)
            run = {"dense_dtype": torch.bfloat16}
            us, triton_us = (
                microseconds(partial(kernel, *tokens, [0, chunk], arena, table, scale, **run), graph=False, budget_ms=40)
                for kernel in (extend, extend_triton)
            )
            flops = 4 * HEADS * GROUP * HEAD_DIM * chunk * (prefix + (chunk + 1) / 2)
            row = {"prefix": prefix, "chunk": chunk, "tier": tier.name, "us": us, "triton_us": triton_us, "tflops": flops / us / 1e6}
            row |= {f"{name}_us": t for name, t in bf16.items()} | {f"speed_over_{name}": t / us for name, t in bf16.items()}
            rows.append(row)
            speeds = ", ".join(f"{t / us:.2f} x {n}" for n, t in {**bf16, "triton": triton_us}.items())
            print(f"{prefix} + {chunk} {tier.name}: {us:.0f} us, {row['tflops']:.0f} TFLOP/s, {speeds}", flush=True)
            del arena, table
        save("extend", rows)


if __name__ == "__main__":
    main()
