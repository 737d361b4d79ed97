"""The one place where bytes are counted. Knows nothing of which pages exist, only of what a page costs."""

from dataclasses import dataclass

from kvstrata.config import StoreConfig
from kvstrata.ops import quant
from kvstrata.ops.codecs import Codec, make_codec
from kvstrata.ops.decode import DecodePages
from kvstrata.ops.write import EncodePages
from kvstrata.types import PAGE_SIZE, Tier

_ITEMSIZE = {"bfloat16": 2, "float16": 2, "float32": 4}


@dataclass(frozen=True, slots=True)
class Layout:
    """Frames and bytes of a store. A frame id stands for one frame in every layer, so bytes count all layers."""

    num_layers: int
    num_kv_heads: int
    head_dim: int
    codec: Codec
    dense_itemsize: int

    @classmethod
    def of(cls, config: StoreConfig) -> "Layout":
        return cls(config.num_layers, config.num_kv_heads, config.head_dim, make_codec(config.codec), _ITEMSIZE[config.dense_dtype])

    @property
    def head_frame_bytes(self) -> int:
        """Bytes of one frame for one layer and KV head."""
        return self.codec.frame_bytes(self.head_dim)

    @property
    def frame_bytes(self) -> int:
        """Bytes of one frame id: all layers and KV heads."""
        return self.num_layers * self.num_kv_heads * self.head_frame_bytes

    @property
    def encode(self) -> EncodePages:
        """The planes codec's is handed out as the function that has a kernel."""
        return quant.encode if self.codec.name == "planes" else self.codec.encode

    @property
    def decode(self) -> DecodePages:
        return quant.decode if self.codec.name == "planes" else self.codec.decode

    @property
    def tiers(self) -> tuple[Tier, ...]:
        """Tiers that a page can have in this store, ascending."""
        return (Tier.EVICTED, *self.codec.tiers, Tier.BF16)

    @property
    def default_tier(self) -> Tier:
        """INT4, or the codec's nearest to it."""
        return max((t for t in self.codec.tiers if t <= Tier.INT4), default=self.codec.tiers[0])

    def check_tier(self, tier: Tier) -> Tier:
        if not isinstance(tier, Tier):
            raise ValueError(f"tier {tier!r} is no Tier; accepted: {', '.join(t.name for t in self.tiers)}")
        if tier not in self.tiers:
            raise ValueError(f"codec {self.codec.name!r} has no tier {tier.name}; accepted: {', '.join(t.name for t in self.tiers)}")
        return tier

    def frames(self, tier: Tier) -> int:
        """Frames of a page."""
        return self.codec.num_frames(tier, self.head_dim, self.dense_itemsize)

    def page_bytes(self, tier: Tier) -> int:
        return self.frames(tier) * self.frame_bytes

    def tier_bytes(self) -> dict[Tier, int]:
        return {tier: self.page_bytes(tier) for tier in self.tiers}

    def elements(self, tokens: int) -> int:
        """K and V elements of `tokens` tokens."""
        return tokens * self.num_layers * self.num_kv_heads * self.head_dim * 2

    def bf16_bytes(self, tokens: int) -> int:
        """What an uncompressed bfloat16 cache of `tokens` tokens takes."""
        return 2 * self.elements(tokens)

    def bits_per_element(self, frames: int, tokens: int) -> float:
        """Real bits: everything that `frames` frames hold, over the elements of `tokens` tokens; 0 without tokens."""
        return 8 * frames * self.frame_bytes / self.elements(tokens) if tokens else 0.0

    def dead_bytes(self, tier: Tier, dead_tokens: int) -> int:
        """Share of a page's bytes that belongs to tokens that are dead but whose frames are not freed."""
        return self.page_bytes(tier) * dead_tokens // PAGE_SIZE

    def frames_for(self, tokens: int, tier: Tier = Tier.BF16) -> int:
        """Frames that hold `tokens` tokens of one sequence at `tier`, the last page whole."""
        return -(-tokens // PAGE_SIZE) * self.frames(tier)
