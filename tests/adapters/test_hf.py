"""The adapter against transformers' own cache, on tiny models of each family."""

from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import DynamicCache, FalconMambaConfig, FalconMambaForCausalLM
from transformers.modeling_utils import PreTrainedModel

from kvstrata.adapters.hf import StrataCache, UnsupportedModelError, attached, cache_keyword, store_config
from kvstrata.config import StoreConfig
from kvstrata.ops.quant import NonFiniteError
from kvstrata.store.store import Store
from kvstrata.types import Plan, Tier
from tests.models import VOCAB, tiny

FAMILIES = ["llama", "qwen2", "qwen3", "gemma3"]
FULL = Plan((), Tier.BF16)


def make_store(model: PreTrainedModel, dense_dtype: str = "float32", **changes: Any) -> Store:
    store = Store(store_config(model, 1500, dense_dtype=dense_dtype, **changes))
    # what was never written must never be read
    store.arena.buffer.fill_(0xFF)
    store.arena.buffer[:, 0] = 0
    return store


def prompt(batch: int, length: int, seed: int = 1) -> Tensor:
    return torch.randint(3, VOCAB, (batch, length), generator=torch.Generator().manual_seed(seed))


@torch.no_grad()
def forward(model: PreTrainedModel, cache: StrataCache, ids: Tensor, mask: Tensor | None = None) -> Tensor:
    logits: Tensor = model(input_ids=ids, attention_mask=mask, **{cache_keyword(model): cache}).logits
    cache.store.check_integrity()
    return logits


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("cuts", [(0, 150), (0, 1, 2, 3, 70, 150), (0, 64, 128, 150), (0, 33, 100, 101, 102, 150)])
def test_with_full_the_logits_equal_transformers_own_cache(family: str, cuts: tuple[int, ...]) -> None:
    model = tiny(family)
    ids = prompt(2, 150)
    with torch.no_grad():
        reference = model(input_ids=ids).logits
    with attached(model, make_store(model), lambda _: FULL) as cache:
        logits = torch.cat([forward(model, cache, ids[:, a:b]) for a, b in pairwise(cuts)], 1)
    assert (logits - reference).abs().max() < 2e-4 * reference.abs().max()


@pytest.mark.parametrize("family", FAMILIES)
def test_padding_on_either_side_changes_nothing(family: str) -> None:
    model = tiny(family)
    ids, lengths = prompt(3, 90), (90, 17, 64)
    for left in (True, False):
        mask = torch.zeros(3, 90, dtype=torch.long)
        for row, n in zip(mask, lengths, strict=True):
            row[90 - n :] = 1 if left else row[90 - n :]
            row[:n] = 1 if not left else row[:n]
        store = make_store(model)
        with attached(model, store, lambda _: FULL) as cache, torch.no_grad():
            positions = (mask.cumsum(1) - 1).clamp(min=0)
            logits = model(input_ids=ids, attention_mask=mask, position_ids=positions, **{cache_keyword(model): cache}).logits
            assert [store.sequence(i).num_tokens for i in cache.sequence_ids] == list(lengths)
            for b in range(3):
                real = ids[b : b + 1, mask[b].bool()]
                reference = model_alone(model, real)
                assert (logits[b, mask[b].bool()] - reference).abs().max() < 2e-4 * reference.abs().max()


def model_alone(model: PreTrainedModel, ids: Tensor) -> Tensor:
    """Logits of one unpadded row, in a store of its own."""
    twin = tiny(model.config.model_type.removesuffix("_text"))
    with torch.no_grad():
        out: Tensor = twin(input_ids=ids).logits[0]
    return out


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("sample", [False, True])
def test_generate_greedy_and_sampling_with_a_ragged_batch(family: str, sample: bool) -> None:
    model = tiny(family)
    ids = prompt(2, 70)
    mask = torch.ones_like(ids)
    mask[1, :30] = 0
    arguments: dict[str, Any] = {"attention_mask": mask, "max_new_tokens": 80, "min_new_tokens": 80, "do_sample": sample}
    torch.manual_seed(3)
    reference = model.generate(ids, **arguments)
    with attached(model, make_store(model), lambda _: FULL) as cache:
        torch.manual_seed(3)
        out = model.generate(ids, **arguments, **{cache_keyword(model): cache})
        cache.store.check_integrity()
    assert torch.equal(out, reference)


@pytest.mark.parametrize("family", FAMILIES)
def test_quantized_cache_turns_to_garbage_from_turn_two(family: str) -> None:
    """Three turns on one cache: each turn's logits stay close to the uncompressed run's."""
    model = tiny(family)
    ids = prompt(1, 330)
    reference = model_alone(model, ids).log_softmax(-1)
    for plan, limit in ((Plan((Tier.BF16,), Tier.INT8), 2e-3), (Plan((Tier.BF16,), Tier.INT4), 0.05)):
        with attached(model, make_store(model), lambda _, plan=plan: plan) as cache:
            for a, b in ((0, 150), (150, 230), (230, 330)):
                logits = forward(model, cache, ids[:, a:b])[0].log_softmax(-1)
                kl = (reference[a:b].exp() * (reference[a:b] - logits)).sum(-1).mean()
                assert kl < limit, (plan.default, a, kl)


def test_several_turns_and_crop_in_between() -> None:
    model = tiny("qwen2")
    ids = prompt(2, 200)
    with torch.no_grad():
        reference = model(input_ids=ids).logits
    with attached(model, make_store(model), lambda _: FULL) as cache:
        forward(model, cache, ids[:, :100])
        forward(model, cache, prompt(2, 60, seed=9))
        cache.crop(-60)
        assert cache.get_seq_length() == 100
        logits = forward(model, cache, ids[:, 100:])
        cache.crop(130)
        again = forward(model, cache, ids[:, 130:])
        with pytest.raises(ValueError, match=r"cannot crop a cache of 200 positions by -201; accepted: -200 to 200"):
            cache.crop(-201)
    assert (logits - reference[:, 100:]).abs().max() < 2e-4 * reference.abs().max()
    assert (again - reference[:, 130:]).abs().max() < 2e-4 * reference.abs().max()


def test_crop_of_sliding_layers_gives_back_what_it_can_and_says_when_it_cannot() -> None:
    model = tiny("gemma3")
    ids = prompt(1, 220)
    with torch.no_grad():
        reference = model(input_ids=ids).logits
    with attached(model, make_store(model), lambda _: FULL) as cache:
        forward(model, cache, ids[:, :150])
        forward(model, cache, ids[:, 150:200])
        assert cache.sliding_bytes == 2 * 2 * 2 * (39 + 64) * 64 * 4
        with pytest.raises(ValueError, match="cannot crop 65 positions: sliding-window layers keep 64 behind their window"):
            cache.crop(-65)
        cache.crop(-64)
        assert cache.get_seq_length() == 136
        logits = forward(model, cache, ids[:, 136:])
    assert (logits - reference[:, 136:]).abs().max() < 2e-4 * reference.abs().max()


def test_detaching_leaves_the_model_as_it_was() -> None:
    model = tiny("llama")
    ids = prompt(1, 40)
    before = (model.config._attn_implementation, dict(model._forward_hooks), dict(model._forward_pre_hooks), set(model.__dict__))
    with torch.no_grad():
        reference = model(input_ids=ids).logits
        store = make_store(model)
        with pytest.raises(KeyError, match="stop"), attached(model, store):
            raise KeyError("stop")
        assert torch.equal(model(input_ids=ids).logits, reference)
        own = DynamicCache()
        model(input_ids=ids, **{cache_keyword(model): own})
    after = (model.config._attn_implementation, dict(model._forward_hooks), dict(model._forward_pre_hooks), set(model.__dict__))
    assert after == before
    assert own.get_seq_length() == 40
    assert store.frames_in_use == 0


def test_two_caches_take_turns_on_one_model() -> None:
    model = tiny("qwen3")
    store = make_store(model)
    a, b = prompt(1, 80, seed=4), prompt(1, 90, seed=5)
    caches = [StrataCache(model, store, lambda _: FULL) for _ in range(2)]
    got: list[list[Tensor]] = [[], []]
    for start in range(0, 80, 20):
        for i, ids in enumerate((a, b)):
            with attached(model, store, cache=caches[i]) as cache:
                got[i].append(forward(model, cache, ids[:, start : start + 20]))
    for i, ids in enumerate((a, b)):
        reference = model_alone(model, ids[:, :80])
        assert (torch.cat(got[i], 1)[0] - reference).abs().max() < 2e-4 * reference.abs().max()


def test_a_failed_pass_is_undone_and_the_cache_goes_on() -> None:
    model = tiny("gemma3")
    ids = prompt(1, 130)
    with torch.no_grad():
        reference = model(input_ids=ids).logits
    layer = model.model.layers[3]
    with attached(model, make_store(model), lambda _: FULL) as cache:
        forward(model, cache, ids[:, :100])
        hook = layer.mlp.register_forward_hook(lambda *_: (_ for _ in ()).throw(MemoryError("no memory")))
        with pytest.raises(MemoryError):
            forward(model, cache, ids[:, 100:120])
        hook.remove()
        cache.store.check_integrity()
        assert cache.get_seq_length() == 100
        with torch.no_grad():
            layer.self_attn.k_proj.weight[70, 3] = float("nan")
        with pytest.raises(NonFiniteError, match=r"K is nan at layer 1, KV head 1, position 100 of sequence 1"):
            forward(model, cache, ids[:, 100:110])
        with torch.no_grad():
            layer.self_attn.k_proj.weight.copy_(tiny("gemma3").model.layers[3].self_attn.k_proj.weight)
        logits = forward(model, cache, ids[:, 100:])
    assert (logits - reference[:, 100:]).abs().max() < 2e-4 * reference.abs().max()


def test_refusals_name_what_is_not_supported() -> None:
    model = tiny("llama")
    store = make_store(model)
    with attached(model, store) as cache:
        with pytest.raises(UnsupportedModelError, match="beam search is not supported"):
            model.generate(prompt(1, 5), num_beams=2, max_new_tokens=4, **{cache_keyword(model): cache})
        with pytest.raises(ValueError, match="pass its cache"):
            model(input_ids=prompt(1, 5), **{cache_keyword(model): DynamicCache()})
        with pytest.raises(ValueError, match="attached to this model already"), attached(model, store):
            pass
        cache.reset()
        forward(model, cache, prompt(2, 5))
        with pytest.raises(ValueError, match="the cache holds 2 sequences, the batch has 3"):
            forward(model, cache, prompt(3, 5))
        with pytest.raises(ValueError, match=r"attention_mask has shape \[2, 4\]; accepted: \[2, 10\] or \[2, 5\]"):
            forward(model, cache, prompt(2, 5), torch.ones(2, 4))
    with pytest.raises(UnsupportedModelError, match=r"head_dim 32 is not supported; accepted: 64, 80, 96, 128, 256"):
        store_config(tiny("llama", head_dim=32), 10)
    mamba = FalconMambaForCausalLM(FalconMambaConfig(vocab_size=10, hidden_size=16, num_hidden_layers=1, state_size=4))
    with pytest.raises(UnsupportedModelError, match="model family 'falcon_mamba' is not supported"):
        store_config(mamba, 10)
    with (
        pytest.raises(ValueError, match="the store has num_layers 5, the model 3"),
        attached(model, Store(StoreConfig(5, 2, 64, 10))),
    ):
        pass


def test_grouped_query_heads_are_stored_expanded() -> None:
    """They are not: two KV heads for four query heads, and the bytes say so."""
    model = tiny("llama")
    assert (model.config.num_attention_heads, model.config.num_key_value_heads) == (4, 2)
    store = make_store(model, "bfloat16")
    with attached(model, store, lambda _: Plan((), Tier.INT4)) as cache:
        forward(model, cache, prompt(1, 1024))
        # 30 pages of 4 planes and 2 of bfloat16; a frame is 3 layers of 2 KV heads of 608 bytes
        assert store.bytes_in_use == (30 * 4 + 2 * 14) * 3 * 2 * 608


def test_embeddings_instead_of_ids_are_stored_but_not_shared() -> None:
    model = tiny("llama")
    ids = prompt(1, 300)
    store = make_store(model)
    with attached(model, store, lambda _: FULL) as cache, torch.no_grad():
        model(inputs_embeds=model.get_input_embeddings()(ids), **{cache_keyword(model): cache})
        assert store.sequence(cache.sequence_ids[0]).num_tokens == 300
        assert len(store.prefix) == 0
