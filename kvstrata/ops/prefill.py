"""Causal attention of a prompt over itself in 8 bits, with the tokens of most attention and the newest ones whole.

After HyQuant (Ding et al. 2026), Algorithm 2. For each tile of TILE queries the keys before it are split three ways, each key in one part:

    body      not a line, before the window: 8-bit codes, one scale a tile of TILE keys
    lines     vertical lines, before the window: 16 bits
    window    the `window` keys before the tile and those of the tile itself: 16 bits

They are scanned in this order by one kernel with one online softmax. The body comes first, so that the running maximum that its
probabilities are quantized against is that of the body alone. Knows nothing of stores, pages or of how lines are chosen.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from kvstrata.ops import backend, prefill_cuda

TILE = 128
"""Queries of a tile, and keys of a tile of codes."""
FORMATS = {"int8": 127.0, "fp8": 448.0}
"""Largest number of each format; fp8 is e4m3."""


@dataclass(frozen=True)
class Precision:
    """scores, values: format of Q·K and of P·V. smooth: K's mean over tokens is taken off before K is quantized (SageAttention), which
    changes all logits of a query by one number, given back beside the 16-bit parts."""

    scores: str = "int8"
    values: str = "fp8"
    smooth: bool = True

    def __post_init__(self) -> None:
        for name in (self.scores, self.values):
            if name not in FORMATS:
                raise ValueError(f"format {name!r} of a prefill; accepted: {', '.join(FORMATS)}")


INT8_FP8 = Precision()


def prefill(q: Tensor, k: Tensor, v: Tensor, lines: Tensor, scale: float, *,
            window: int = 128, precision: Precision = INT8_FP8) -> Tensor:  # fmt: skip
    """q [T, Hq, D], k, v [T, H, D] of one whole sequence; query head i reads KV head i // (Hq / H). -> out [T, Hq, D] in q's dtype.

    lines: int32 [H, L], positions of each KV head's vertical lines, ascending, no two equal (not looked at: that would wait for the
    device). window: keys before a tile of queries that are whole; 0: none are, nor are the tile's own: uniform quantization.
    """
    check(q, k, v, lines, window)
    if backend.use_cuda(q) and prefill_cuda.accepts(q, window, precision.values):
        return prefill_cuda.prefill_cuda(q, k, v, lines, scale, window=window, scores=precision.scores, smooth=precision.smooth)
    if backend.use_triton(q) and q.dtype in (torch.bfloat16, torch.float16):
        from kvstrata.ops.prefill_kernel import prefill_triton

        return prefill_triton(q, k, v, lines, scale, window=window, precision=precision)
    return prefill_ref(q, k, v, lines, scale, window=window, precision=precision)


def check(q: Tensor, k: Tensor, v: Tensor, lines: Tensor, window: int) -> None:
    """Raises ValueError for shapes that are not those of `prefill`."""
    t, h = len(q) if q.ndim else 0, k.shape[1] if k.ndim == 3 else 0
    if q.ndim != 3 or not t or not h or q.shape[1] % h or k.shape != v.shape or k.shape != (t, h, q.shape[2]):
        raise ValueError(f"q {list(q.shape)}, k {list(k.shape)}, v {list(v.shape)}; accepted: [T, Hq, D] and twice [T, H, D], T from 1 up")
    if lines.dtype != torch.int32 or lines.ndim != 2 or lines.shape[0] != h or lines.shape[1] > t:
        raise ValueError(f"lines are {lines.dtype} {list(lines.shape)}; accepted: int32 [{h}, at most {t}]")
    if not isinstance(window, int) or window < 0:
        raise ValueError(f"window is {window!r}; accepted: 0 (uniform quantization) or more keys")


def prefill_ref(q: Tensor, k: Tensor, v: Tensor, lines: Tensor, scale: float, *,
                window: int = 128, precision: Precision = INT8_FP8) -> Tensor:  # fmt: skip
    """The mathematics of `prefill`, on any device."""
    t, hq, d = q.shape
    h = k.shape[1]
    out = torch.empty(t, hq, d, dtype=q.dtype, device=q.device)
    grouped, result = (x.unflatten(1, (h, hq // h)) for x in (q, out))
    position = torch.arange(t, device=q.device)
    for head in range(h):
        keys, values = k[:, head].float(), v[:, head].float()
        mean = keys.mean(0) if precision.smooth else torch.zeros_like(keys[0])
        body = rest(lines[head : head + 1], t)[0]
        codes, key_scale = quantize_tiles(keys[body] - mean, precision.scores)
        value_codes, value_scale = quantize_tiles(values[body], precision.values)
        coarse = value_codes * value_scale
        for i in range(0, t, TILE):
            row = position[i : i + TILE]
            first = max(0, i - window) if window else t
            near = position[first : max(first, i + TILE)]
            queries = grouped[i : i + TILE, head].float()  # [rows, G, D]
            q_codes, q_scale = quantize(queries, precision.scores, -1)
            n, whole = int((body < first).sum()), torch.cat([lines[head][lines[head] < first].long(), near])
            x = (q_codes @ codes[:n].T) * q_scale * (key_scale[:n, 0] * scale) + (queries @ mean * scale)[..., None]
            x = x.masked_fill(body[:n] > row[:, None, None], -torch.inf)
            y = (queries @ keys[whole].T * scale).masked_fill(whole > row[:, None, None], -torch.inf)
            m = torch.cat([x, y], -1).amax(-1, keepdim=True)
            total = (x - m).exp().sum(-1, keepdim=True) + (y - m).exp().sum(-1, keepdim=True)
            p = quantize_probabilities(x, m, precision.values)
            result[i : i + TILE, head] = ((p @ coarse[:n] + (y - m).exp() @ values[whole]) / total).to(q.dtype)
    return out


def rest(lines: Tensor, tokens: int) -> Tensor:
    """lines int32 [H, L] -> int64 [H, tokens - L], ascending: the positions that are none."""
    free = torch.ones(lines.shape[0], tokens, dtype=torch.bool, device=lines.device)
    free.scatter_(1, lines.long(), False)
    # a stable sort puts what is free first, in order
    return torch.sort(free.byte(), dim=1, descending=True, stable=True).indices[:, : tokens - lines.shape[1]]


def quantize(x: Tensor, form: str, *dims: int) -> tuple[Tensor, Tensor]:
    """-> codes as float32, and their scale: largest magnitude over `dims` (kept, of size 1) over the format's."""
    scale = x.abs().amax(dims, keepdim=True).clamp(min=1e-20) / FORMATS[form]
    return to_format(x / scale, form), scale


def to_format(x: Tensor, form: str) -> Tensor:
    """Nearest number of the format, ties to even, as float32."""
    return x.round() if form == "int8" else x.clamp(-448, 448).to(torch.float8_e4m3fn).float()


def quantize_tiles(x: Tensor, form: str) -> tuple[Tensor, Tensor]:
    """x [n, D] -> codes [n, D], and scales [n, 1], one value for each TILE rows."""
    tiles = torch.nn.functional.pad(x, (0, 0, 0, -len(x) % TILE)).view(-1, TILE, x.shape[1])
    codes, scale = quantize(tiles, form, 1, 2)
    return codes.flatten(0, 1)[: len(x)], scale.expand(-1, TILE, 1).reshape(-1, 1)[: len(x)]


def quantize_probabilities(x: Tensor, m: Tensor, form: str) -> Tensor:
    """Logits x [..., n] -> exp(x - m) as it is after quantizing, tile by tile of keys: fp8 against the running maximum of the tiles so
    far, int8 against the tile's own."""
    n = x.shape[-1]
    tiles = torch.nn.functional.pad(x, (0, -n % TILE), value=-torch.inf).unflatten(-1, (-1, TILE))
    top = tiles.amax(-1, keepdim=True)
    if form == "fp8":
        top = top.cummax(-2).values
    top = top.clamp(min=-1e30)
    p = to_format((tiles - top).exp() * FORMATS[form], form) / FORMATS[form]
    return (p * (top - m[..., None]).exp()).flatten(-2)[..., :n]
