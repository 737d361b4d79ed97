"""Moving what RoPE has rotated, against the model's own rotation."""

import torch
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding, apply_rotary_pos_emb

from kvstrata.ops.rotary import moved


def test_moved_is_as_if_it_stood_elsewhere() -> None:
    rotary = LlamaRotaryEmbedding(LlamaConfig(hidden_size=128, num_attention_heads=2, head_dim=64))
    x = torch.randn(5, 2, 64, generator=torch.Generator().manual_seed(0))

    def at(positions: torch.Tensor) -> torch.Tensor:
        cos, sin = rotary(x, positions[None])
        return apply_rotary_pos_emb(x.transpose(0, 1)[None], x.transpose(0, 1)[None], cos, sin)[0][0].transpose(0, 1)

    first, then = torch.tensor([0, 3, 17, 100, 200]), torch.tensor([5, 3, 0, 90, 300])
    assert torch.allclose(moved(at(first), then - first, rotary.inv_freq), at(then), atol=1e-4)


def test_channels_beyond_the_rotated_ones_stay() -> None:
    x = torch.randn(3, 2, 64, generator=torch.Generator().manual_seed(1))
    out = moved(x, torch.tensor([1, 2, 3]), torch.tensor([1.0, 0.1]))
    assert torch.equal(out[..., 4:], x[..., 4:])
    assert torch.allclose(out[..., :4].norm(dim=-1), x[..., :4].norm(dim=-1), atol=1e-5)
