"""The papers' codecs against references written here in plain float arithmetic, at the bytes they bill."""

import itertools
import math

import pytest
import torch
from torch import Tensor

from kvstrata.ops import quant
from kvstrata.ops.codec_bytes import MAX_FILL, PackedCodec, fit_frame, pack_bits, unpack_bits
from kvstrata.ops.codec_scaled import FP4_VALUES, fp4_codes, fp8_codes
from kvstrata.ops.codecs import CODECS, make_codec
from kvstrata.ops.frame import HEAD_DIMS
from kvstrata.types import PAGE_SIZE, Tier

PAPERS = [name for name in CODECS if name != "planes"]
CASES = [(name, tier) for name in CODECS for tier in make_codec(name).tiers]
PAPER_CASES = [(name, tier) for name, tier in CASES if name != "planes"]
TINY16 = 2.0**-24


def pages(head_dim: int, seed: int = 0, num: int = 2, heads: int = 3, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    """Channels of different scales and offsets, as K has them; V plain."""
    g = torch.Generator().manual_seed(seed)
    k = torch.randn(num, PAGE_SIZE, heads, head_dim, generator=g) * torch.rand(head_dim, generator=g) * 4
    k += torch.randn(heads, head_dim, generator=g) * 3
    return k.to(dtype), torch.randn(num, PAGE_SIZE, heads, head_dim, generator=g).to(dtype)


def asymmetric(x: Tensor, bits: int, dim: int) -> Tensor:
    """Groups along `dim` -> what fp16 scale and zero point and round-to-nearest make of them."""
    top = 2**bits - 1
    zero = x.amin(dim, keepdim=True).half().float()
    scale = ((x.amax(dim, keepdim=True) - zero) / top).half().float().clamp(min=TINY16)
    return ((x - zero) / scale).round().clamp(0, top) * scale + zero


def by_channel(x: Tensor, bits: int) -> Tensor:
    return asymmetric(x, bits, 1)


def by_token(x: Tensor, bits: int) -> Tensor:
    return torch.cat([asymmetric(part, bits, 3) for part in x.split(32, 3)], 3)


def nearest(x: Tensor, numbers: Tensor) -> Tensor:
    """Distance to the nearest of the format's numbers; ties leave the number open, not the distance."""
    distance = torch.full_like(x, math.inf)
    for number in numbers:
        distance = torch.minimum(distance, (x - number).abs())
    return distance


INT4_NUMBERS = torch.arange(-7.0, 8.0)
INT8_NUMBERS = torch.arange(-127.0, 128.0)
FP4_NUMBERS = torch.tensor([s * x for x in FP4_VALUES for s in (1, -1)])
FP8_NUMBERS = torch.tensor([s * m * 2.0 ** (e - 10) for s in (1, -1) for e in range(1, 16) for m in range(8, 16) if (e, m) != (15, 15)]
                           + [s * m * 2.0**-9 for s in (1, -1) for m in range(8)])  # fmt: skip


@pytest.mark.parametrize("head_dim", HEAD_DIMS)
@pytest.mark.parametrize("tier", [Tier.INT2, Tier.INT4])
@pytest.mark.parametrize("name", ["kivi", "triaxial"])
def test_grouped_codecs_are_round_to_nearest_in_fp16_groups(name: str, tier: Tier, head_dim: int) -> None:
    codec = make_codec(name)
    k, v = pages(head_dim, num=1, heads=2)
    got_k, got_v = codec.decode(codec.encode(k, v, tier), tier, head_dim)
    group_k = by_token if name == "triaxial" and tier is Tier.INT4 else by_channel
    torch.testing.assert_close(got_k, group_k(k, tier.value), rtol=0, atol=1e-6)
    torch.testing.assert_close(got_v, by_token(v, tier.value), rtol=0, atol=1e-6)


@pytest.mark.parametrize("head_dim", HEAD_DIMS)
@pytest.mark.parametrize(
    "name, tier, numbers",
    [("hyquant", Tier.INT4, INT4_NUMBERS), ("hyquant", Tier.INT8, INT8_NUMBERS), ("hyquant-fp", Tier.INT4, FP4_NUMBERS),
     ("hyquant-fp", Tier.INT8, FP8_NUMBERS), ("int8", Tier.INT8, INT8_NUMBERS), ("fp8", Tier.INT8, FP8_NUMBERS)],
)  # fmt: skip
def test_scaled_codecs_take_the_nearest_number_of_the_format(name: str, tier: Tier, numbers: Tensor, head_dim: int) -> None:
    codec = make_codec(name)
    k, v = pages(head_dim, num=1, heads=2)
    for x, got in zip((k, v), codec.decode(codec.encode(k, v, tier), tier, head_dim), strict=True):
        dims = {"int8": (3,), "fp8": ()}.get(name, (1, 3))
        scale = x.abs().amax(dims, keepdim=True) / numbers.max() if dims else torch.ones(())
        torch.testing.assert_close((got / scale - x / scale).abs(), nearest(x / scale, numbers), rtol=1e-5, atol=1e-4)
        # what comes back is one of the format's numbers
        assert nearest(got / scale, numbers).max() < 1e-4
        assert got.unique().numel() > len(numbers) / 2


@pytest.mark.parametrize("codes", [4, 2, 8])
def test_packing_is_undone_and_puts_the_first_code_lowest(codes: int) -> None:
    x = torch.randint(0, 1 << codes, (3, 5, 64), dtype=torch.uint8, generator=torch.Generator().manual_seed(1))
    packed = pack_bits(x, codes)
    assert packed.shape == (3, 5, 64 * codes // 8)
    assert torch.equal(unpack_bits(packed, codes), x)
    assert packed[0, 0, 0] == sum(int(x[0, 0, i]) << (codes * i) for i in range(8 // codes))


def test_symmetric_int4_reaches_all_fifteen_levels() -> None:
    k = torch.arange(-7.0, 8.0).repeat(200)[: PAGE_SIZE * 64].view(1, PAGE_SIZE, 1, 64)
    codec = make_codec("hyquant")
    got, _ = codec.decode(codec.encode(k, k, Tier.INT4), Tier.INT4, 64)
    assert torch.equal(got, k)
    assert got.unique().numel() == 15


def test_fp4_ties_go_to_the_even_code_and_fp8_saturates() -> None:
    ties = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 100.0, -0.75, -100.0])
    assert fp4_codes(ties).tolist() == [0, 2, 2, 4, 4, 6, 6, 7, 10, 15]
    beyond = fp8_codes(torch.tensor([448.0, 449.0, 1e30, -1e30])).view(torch.float8_e4m3fn).float()
    assert beyond.tolist() == [448, 448, 448, -448]


# bytes

BITS = {
    ("kivi", Tier.INT2): 3.0, ("kivi", Tier.INT4): 5.0, ("triaxial", Tier.INT2): 3.0, ("triaxial", Tier.INT4): 5.0,
    ("hyquant", Tier.INT4): 4.0, ("hyquant", Tier.INT8): 8.0, ("hyquant-fp", Tier.INT4): 4.0, ("hyquant-fp", Tier.INT8): 8.0,
    ("fp8", Tier.INT8): 8.0, ("int8", Tier.INT8): 8.5,
    ("planes", Tier.INT2): 2.375, ("planes", Tier.INT3): 3.5625, ("planes", Tier.INT4): 4.75, ("planes", Tier.INT8): 9.5,
}  # fmt: skip


@pytest.mark.parametrize("name, tier", CASES)
def test_real_bits_at_head_dim_64(name: str, tier: Tier) -> None:
    codec = make_codec(name)
    k, v = pages(64)
    frames = codec.encode(k, v, tier)
    bits = 8 * frames.numel() / (k.numel() + v.numel())
    assert BITS[name, tier] <= bits <= BITS[name, tier] * (1 + MAX_FILL)


@pytest.mark.parametrize("head_dim", HEAD_DIMS)
@pytest.mark.parametrize("name, tier", CASES)
def test_frames_are_what_num_frames_bills(name: str, tier: Tier, head_dim: int) -> None:
    codec = make_codec(name)
    frames = codec.encode(*pages(head_dim, num=2, heads=3), tier)
    assert frames.dtype is torch.uint8
    assert frames.shape == (2, codec.num_frames(tier, head_dim), 3, codec.frame_bytes(head_dim))
    assert frames.is_contiguous()


@pytest.mark.parametrize("head_dim", HEAD_DIMS)
@pytest.mark.parametrize("name", PAPERS)
def test_a_page_is_neither_inflated_nor_deflated(name: str, head_dim: int) -> None:
    codec = make_codec(name)
    assert isinstance(codec, PackedCodec)
    dense = 2 * PAGE_SIZE * head_dim * 2
    for tier, size in [*((t, codec.page_bytes(t, head_dim)) for t in codec.tiers), (Tier.BF16, dense)]:
        billed = codec.num_frames(tier, head_dim) * codec.frame_bytes(head_dim)
        assert size <= billed <= size * (1 + MAX_FILL)
    assert codec.num_frames(Tier.EVICTED, head_dim) == 0
    assert codec.num_frames(Tier.BF16, head_dim, 4) * codec.frame_bytes(head_dim) >= 2 * dense


@pytest.mark.parametrize("name", PAPERS)
def test_every_byte_of_a_page_matters(name: str) -> None:
    """Whole codec state lies in the billed bytes: a byte that changes, changes K or V, but for the fill at the end."""
    codec = make_codec(name)
    assert isinstance(codec, PackedCodec)
    tier = codec.tiers[0]
    frames = codec.encode(*pages(64, num=1, heads=1), tier)
    before = torch.cat(codec.decode(frames, tier, 64))
    size = codec.page_bytes(tier, 64)
    for byte in [0, 1, size // 4, size // 2, size - 1]:
        changed = frames.clone().flatten()
        changed[byte] ^= 0x12
        after = torch.cat(codec.decode(changed.view(frames.shape), tier, 64))
        assert not torch.equal(before, after), byte


def test_frames_of_equal_size_with_a_common_divisor_waste_nothing() -> None:
    assert fit_frame((1536, 2560, 8192)) == 512
    assert fit_frame((4096,)) == 4096


@pytest.mark.parametrize("name, tier", PAPER_CASES)
def test_heads_and_pages_do_not_mix(name: str, tier: Tier) -> None:
    codec = make_codec(name)
    k, v = pages(80)
    whole = codec.decode(codec.encode(k, v, tier), tier, 80)
    alone = codec.decode(codec.encode(k[1:, :, 2:], v[1:, :, 2:], tier), tier, 80)
    for a, b in zip(whole, alone, strict=True):
        assert torch.equal(a[1:, :, 2:], b)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name, tier", CASES)
def test_a_narrow_dtype_is_taken_at_its_own_values(name: str, tier: Tier, dtype: torch.dtype) -> None:
    codec = make_codec(name)
    k, v = pages(64, dtype=dtype)
    assert torch.equal(codec.encode(k, v, tier), codec.encode(k.float(), v.float(), tier))
    assert all(x.dtype is torch.float32 for x in codec.decode(codec.encode(k, v, tier), tier, 64))


# guards, named after what users of other caches met


@pytest.mark.parametrize("name, tier", CASES)
@pytest.mark.parametrize("value", [0.0, 1.0, -3.25, 1e-42, -6e-8, 60000.0])
def test_all_scales_zero(name: str, tier: Tier, value: float) -> None:
    """Groups without range, of zeros and of denormal numbers: finite, and as near as the format allows."""
    codec = make_codec(name)
    x = torch.full((1, PAGE_SIZE, 2, 64), value)
    for got in codec.decode(codec.encode(x, x, tier), tier, 64):
        assert got.isfinite().all()
        bound = {"fp8": 2**-4 * abs(value) + 2**-10}.get(name, 2**-7 * abs(value) + 2**-11)
        if not ((name == "planes" and abs(value) > 8000) or (name == "fp8" and abs(value) > 448)):
            assert (got - x).abs().max() <= bound


@pytest.mark.parametrize("name, tier", CASES)
@pytest.mark.parametrize("value", [torch.finfo(torch.float32).max, torch.finfo(torch.bfloat16).max, 1e-30, 1e-44])
def test_huge_and_denormal_values_stay_finite_and_keep_their_sign(name: str, tier: Tier, value: float) -> None:
    codec = make_codec(name)
    x = torch.full((1, PAGE_SIZE, 1, 64), value)
    x[:, ::2, :, ::2] *= -1
    x[:, 7] = 0
    for got in codec.decode(codec.encode(x, x, tier), tier, 64):
        assert got.isfinite().all()
        if value > 1:
            assert torch.equal(got.sign() * x.abs().sign(), x.sign())


@pytest.mark.parametrize("name, tier", CASES)
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_number_that_is_none_is_refused_with_its_place(name: str, tier: Tier, bad: float) -> None:
    k, v = pages(64)
    v[1, 30, 2, 5] = bad
    with pytest.raises(quant.NonFiniteError, match=r"V is .* at page 1, token 30, KV head 2, channel 5") as error:
        make_codec(name).encode(k, v, tier)
    assert error.value.where == ("V", 1, 30, 2)


def test_refusals_name_what_is_accepted() -> None:
    with pytest.raises(ValueError, match="'int5'; accepted: planes, kivi, triaxial, hyquant, hyquant-fp, fp8, int8"):
        make_codec("int5")
    k, v = pages(64)
    for name in PAPERS:
        codec = make_codec(name)
        with pytest.raises(ValueError, match=f"'{name}' has no tier INT3; accepted: .*INT"):
            codec.encode(k, v, Tier.INT3)
        with pytest.raises(ValueError, match="has no tier INT3"):
            codec.num_frames(Tier.INT3, 64)
        with pytest.raises(ValueError, match="head_dim 72 is not supported; accepted: 64"):
            codec.frame_bytes(72)
        with pytest.raises(ValueError, match=r"must both be \[pages, 32, KV heads, head_dim\]"):
            codec.encode(k[:, :31], v[:, :31], codec.tiers[0])
        with pytest.raises(ValueError, match=r"must be \[pages, "):
            codec.decode(torch.zeros(1, 999, 2, 8, dtype=torch.uint8), codec.tiers[0], 64)


# what the codecs are known for


def test_only_planes_rotates_v_and_only_triaxial_sends_residuals_to_int4() -> None:
    assert [name for name in CODECS if make_codec(name).rotates_v] == ["planes"]
    assert {name: make_codec(name).residual_tier for name in CODECS if make_codec(name).residual_tier} == {"triaxial": Tier.INT4}
    for name in CODECS:
        codec = make_codec(name)
        assert codec.name == name
        assert list(codec.tiers) == sorted(codec.tiers)


def error(name: str, tier: Tier, k: Tensor, v: Tensor) -> tuple[float, float]:
    codec = make_codec(name)
    got = codec.decode(codec.encode(k, v, tier), tier, k.shape[-1])
    return tuple(float((a - b).pow(2).mean()) for a, b in zip(got, (k, v), strict=True))  # type: ignore[return-value]


def test_outlier_channels_of_k_ruin_what_is_grouped_by_token_or_tile() -> None:
    """Qwen2.5's K: a few channels a hundred times larger. Groups by channel shut them in."""
    k, v = pages(128)
    k[..., [3, 77]] = k[..., [3, 77]] * 5 + 150
    kivi, triaxial, hyquant, planes = (error(name, Tier.INT4, k, v)[0] for name in ("kivi", "triaxial", "hyquant", "planes"))
    assert max(kivi, planes) * 10 < min(triaxial, hyquant)


def test_errors_fall_with_bits_and_rise_with_the_group() -> None:
    k, v = pages(128)
    for name in ("kivi", "triaxial", "hyquant", "hyquant-fp", "planes"):
        codec = make_codec(name)
        errors = [error(name, tier, k, v) for tier in codec.tiers]
        assert all(b[1] <= a[1] for a, b in itertools.pairwise(errors))
        assert errors[-1][0] < errors[0][0] / 8
    by_group = [error(name, Tier.INT4, k, v)[1] for name in ("kivi", "hyquant")]
    assert by_group[0] < by_group[1]
    # a float format spends its codes near zero, which suits a tile with a wide range
    assert error("hyquant-fp", Tier.INT4, k, v)[1] < error("hyquant", Tier.INT4, k, v)[1]
    assert error("int8", Tier.INT8, k, v)[1] < error("fp8", Tier.INT8, k, v)[1]
