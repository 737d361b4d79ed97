"""Formats against plain arithmetic, and bytes counted by hand."""

import numpy as np
import torch

from kvstrata.eval.peers.formats import decode_by_token, decode_fp8, decode_nvfp4, encode_by_token, encode_fp8, encode_nvfp4
from kvstrata.eval.peers.held import held_bytes
from kvstrata.eval.peers.stored import Kept

FP4 = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]


def numbers(*shape: int) -> torch.Tensor:
    x = torch.randn(*shape, generator=torch.Generator().manual_seed(3))
    x[0, 0, 3] *= 40
    return x


def test_nvfp4_takes_the_nearest_number_of_its_grid() -> None:
    x = numbers(1, 2, 9, 64)
    parts = encode_nvfp4(x)
    got = decode_nvfp4(parts)
    scales = parts[1].view(torch.float8_e4m3fn).double() * parts[2].double()
    grid = torch.tensor(sorted({s * v for v in FP4 for s in (1, -1)}), dtype=torch.float64)
    for group, scale, out in zip(x.reshape(-1, 16), scales.reshape(-1), got.reshape(-1, 16), strict=True):
        nearest = (group.double()[:, None] - grid * scale).abs().amin(1)
        assert torch.allclose((group.double() - out.double()).abs(), nearest, rtol=1e-5, atol=1e-5)  # of numbers up to 120 in float32
    # the largest group's scale is the largest that e4m3 has
    assert scales.max() / parts[2].double() == 448
    assert held_bytes(parts, torch.bfloat16) == x.numel() // 2 + x.numel() // 16 + 4


def test_integers_by_token_are_within_half_a_step() -> None:
    x = numbers(1, 2, 9, 64)
    for bits in (4, 8):
        parts = encode_by_token(x, bits)
        step = (x.amax(-1) - x.amin(-1)) / (2**bits - 1)
        # half a step, and what fp16 metadata adds to it
        assert ((decode_by_token(parts, bits) - x).abs().amax(-1) <= 0.52 * step + 4e-3 * x.abs().amax(-1)).all()
        assert held_bytes(parts, torch.bfloat16) == x.numel() * bits // 8 + 4 * 18


def test_fp8_reaches_its_largest_number_and_zeros_stay_zero() -> None:
    x = numbers(1, 2, 9, 64)
    parts = encode_fp8(x)
    assert parts[0].view(torch.float8_e4m3fn).float().abs().max() == 448
    assert ((decode_fp8(parts) - x).abs() <= x.abs() / 16 + 1e-3 * x.abs().max()).all()
    zeros = torch.zeros(1, 2, 4, 64)
    for encode, decode in ((encode_fp8, decode_fp8), (encode_nvfp4, decode_nvfp4)):
        assert torch.equal(decode(encode(zeros)), zeros)
    assert torch.equal(decode_by_token(encode_by_token(zeros, 4), 4), zeros)


def test_held_bytes_counts_each_tensor_once_wherever_it_lies() -> None:
    class Holder:
        def __init__(self, inside: object) -> None:
            self.inside = inside

    a, b = torch.zeros(10, dtype=torch.float32), torch.zeros(6, dtype=torch.uint8)
    norms = np.zeros(5, np.float32)
    assert held_bytes([a, a, {"x": (a, b)}, Holder([norms, None, 3, "text"])], torch.float32) == 10 * 2 + 6 + 20
    # of a model in bfloat16, float32 is the peer's own choice
    assert held_bytes([a], torch.bfloat16) == 40
    # a view counts as what it shows
    assert held_bytes([b[:2]], torch.float32) == 2


def test_what_is_cut_off_for_the_peer() -> None:
    assert Kept().cut(100) == (0, 100)
    assert Kept(32, 64).cut(500) == (32, 436)
    assert Kept(32, 64, 64).cut(500) == (32, 32 + 384)
    for tokens in (0, 1, 32, 33, 96, 97):
        start, end = Kept(32, 64, 64).cut(tokens)
        assert start == end == min(32, tokens)
