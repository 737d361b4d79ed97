"""Sessions that evict: budgets within long turns, prefixes that stay whole, reports, and what an error leaves."""

from typing import Any

import pytest
import torch
from transformers import PreTrainedTokenizerBase
from transformers.modeling_utils import PreTrainedModel

from kvstrata.adapters.hf import store_config
from kvstrata.ops.quant import NonFiniteError
from kvstrata.session import CHUNK, Session
from kvstrata.store.contents import Contents
from kvstrata.store.store import Store
from kvstrata.types import PAGE_SIZE, Role, Span, Tier
from tests.models import tiny
from tests.test_session import TOOL, conversation

POLICIES = ("intentkv", "streaming", "snapkv", "h2o", "recent", "random")


def long_turn(tokens: int) -> tuple[list[int], tuple[Span, ...]]:
    ids = torch.randint(10, 1000, (tokens,), generator=torch.Generator().manual_seed(0)).tolist()
    spans = (Span(0, 40, Role.INST, 0), Span(40, 60, Role.USER, 1), Span(60, 70, Role.TOOL_CALL, 1), Span(70, tokens, Role.OBS, 1))
    return ids, spans


@pytest.mark.parametrize("policy", POLICIES)
def test_a_long_turn_keeps_to_its_tokens_and_one_chunk(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, policy: str) -> None:
    ids, spans = long_turn(3400)
    with Session(model, tokenizer, policy, policy_settings={"kept": 800}, capacity_tokens=4000) as session:
        session.feed(ids, spans, logits_to_keep=1)
        session.store.check_integrity()
        report = session.report
        assert report.peak_tokens <= 800 + CHUNK + PAGE_SIZE
        assert report.tokens - report.thinned <= 800 + PAGE_SIZE
        assert report.thinned > 2000
        assert report.bytes_freed > 0
        assert abs(sum(report.tokens_by_tag_and_tier.values()) - report.tokens) <= 6
        assert report.bytes_stored - report.bytes_queries < 0.5 * report.bytes_bf16
        # generated tokens count too
        for token in range(100, 230):
            session.feed([*session.token_ids, token], (*spans, Span(3400, len(session.token_ids) + 1, Role.ASSISTANT, 1)), logits_to_keep=1)
            assert session.report.tokens - session.report.thinned <= 800 + 64 + 2 * PAGE_SIZE


@pytest.mark.parametrize("policy", ["intentkv", "streaming"])
def test_budgets_in_bits_hold_at_the_end_of_each_turn(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, policy: str) -> None:
    ids, spans = long_turn(3400)
    with Session(model, tokenizer, policy, budget_bits=2.0, policy_settings={"tier": "INT4"}, capacity_tokens=4000) as session:
        for end in (2100, 2700, 3400):
            session.feed(ids[:end], tuple(Span(s.start, min(s.end, end), s.role, s.turn) for s in spans), logits_to_keep=1)
            session.store.check_integrity()
            assert session.bits_per_element <= 2.0
        assert session.report.survivors > 200


@pytest.mark.parametrize("tier", [Tier.INT2, Tier.INT4])
def test_survivors_are_quantized_once(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, tier: Tier) -> None:
    """Pages wait for the choice at more planes than survivors have: what is gathered from planes of the same tier is off by twice that."""
    ids, spans = long_turn(700)
    off = []
    for policy, settings in (("full", {}), ("uniform", {"tier": tier}), ("intentkv", {"kept": 0.8, "tier": tier, "spare": (), "turns": 0})):
        with Session(model, tokenizer, policy, policy_settings=settings, capacity_tokens=1000) as session:
            session.feed(ids, spans, logits_to_keep=1)
            contents = Contents(session.store, session._sequence, len(ids))
            # the first layer's keys depend on nothing that was stored
            keys, _, _, there = contents.read(0, session.store.arena.buffer[0])
            if policy == "full":
                want = keys.float()
                continue
            old = torch.zeros_like(there)
            old[64:576] = there[64:576]
            off.append(float((keys.float() - want)[old].pow(2).mean().sqrt()))
    assert session.report.survivors > 300
    assert off[1] < 1.35 * off[0]


@pytest.mark.parametrize("tier", [Tier.INT2, Tier.INT4])
def test_a_newest_turn_is_billed_as_it_lies(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, tier: Tier) -> None:
    """Its pages wait at INT4 for INT2's sake, and no higher; nothing else is left above the tier."""
    ids, spans = long_turn(1500)
    with Session(model, tokenizer, "intentkv", policy_settings={"kept": 0.88, "tier": tier}, capacity_tokens=2000) as session:
        session.feed(ids, spans, logits_to_keep=1)
        tiers = session.page_tiers()
        assert set(tiers) <= {Tier.EVICTED, tier, Tier.INT4, Tier.BF16}
        newest = session.store.sequence(session._cache.sequence_ids[0]).plan.thinning
        assert newest is not None
        assert all(t in (tier, Tier.EVICTED, Tier.BF16) or p in newest.spared for p, t in enumerate(tiers))


@pytest.mark.parametrize(("tier", "capacity"), [(Tier.INT2, 300), (Tier.INT2, 400), (Tier.INT4, 400)])
def test_an_arena_without_room_for_staging_is_enough(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, tier: Tier, capacity: int
) -> None:
    ids, spans = long_turn(1500)
    settings = {"tier": tier, "kept": 1.0}
    with Session(model, tokenizer, "intentkv", policy_settings=settings, capacity_tokens=capacity, chunk_tokens=100) as session:
        for end in range(100, 1501, 100):
            session.feed(ids[:end], tuple(Span(s.start, min(s.end, end), s.role, s.turn) for s in spans if s.start < end), logits_to_keep=1)
            session.store.check_integrity()
        assert len(session.token_ids) == 1500


@pytest.mark.parametrize("policy", ["streaming", "intentkv"])
def test_neighbours_of_the_same_tier_are_reused(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, policy: str) -> None:
    ids, spans = long_turn(900)
    store = Store(store_config(model, 4000))
    with Session(model, tokenizer, "uniform", policy_settings={"tier": "INT4"}, store=store) as first:
        first.feed(ids, spans, logits_to_keep=1)
        settings = {"tier": "INT4", "kept": 0.9, "spare": ()}
        with Session(model, tokenizer, policy, policy_settings=settings, store=store) as second:
            second.feed(ids, spans, logits_to_keep=1)
            assert second.report.reused_tokens == 832


def test_masking_frees_no_bytes_and_takes_no_budget(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> None:
    with pytest.raises(ValueError, match="repack is False under a budget"):
        Session(model, tokenizer, "intentkv", budget_bits=2.0, policy_settings={"per_head": False, "repack": False}, capacity_tokens=1000)


def test_settings_that_evict_nothing_change_nothing(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> None:
    ids, spans = long_turn(400)
    out = []
    for settings in ({"policy": "full"}, {"policy": "intentkv", "policy_settings": {"kept": 1.0}, "dense_dtype": "float32"}):
        with Session(model, tokenizer, capacity_tokens=1000, chunk_tokens=150, **settings) as session:  # type: ignore[arg-type]
            out.append(session.feed(ids, spans))
    assert out[0].shape == out[1].shape
    assert (out[0] - out[1]).abs().max() < 1e-3


@pytest.mark.parametrize("keep", [0, 100, 300])
def test_wanted_logits_come_from_whatever_piece_they_are_in(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, keep: int) -> None:
    ids, spans = long_turn(500)
    settings: dict[str, Any] = {"policy_settings": {"kept": 1.0}, "dense_dtype": "float32", "chunk_tokens": 200, "capacity_tokens": 1000}
    with Session(model, tokenizer, "intentkv", **settings) as session:
        got = session.feed(ids, spans, logits_to_keep=keep)
    with torch.no_grad():
        want = model(input_ids=torch.tensor([ids])).logits[0, -keep:]
    assert got.shape == want.shape
    assert (got - want).abs().max() < 1e-3


@pytest.mark.parametrize("chunk", [0, -1, True, 2.5, "many"])
def test_bad_chunks_are_refused(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, chunk: Any) -> None:
    with pytest.raises(ValueError, match="chunk_tokens"):
        Session(model, tokenizer, "intentkv", chunk_tokens=chunk)


def test_the_next_turn_reuses_as_much_as_without_eviction(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> None:
    reused: dict[str, list[int]] = {}
    for policy in ("full", "intentkv"):
        settings: dict[str, Any] = {} if policy == "full" else {"kept": 400, "spare": ()}
        with Session(model, tokenizer, policy, policy_settings=settings, capacity_tokens=4000) as session:
            messages = conversation(2, 200)
            for _ in range(3):
                reply = session.chat(messages, tools=[TOOL], max_new_tokens=4, min_new_tokens=4)
                session.store.check_integrity()
                messages += [{"role": "assistant", "content": "Done."}, *conversation(1, 200)[1:]]
                reused.setdefault(policy, []).append(reply.report.reused_tokens)
            assert policy == "full" or reply.report.thinned > 300
    assert reused["full"] == reused["intentkv"]


def test_a_pruned_session_does_not_change_what_others_get(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> None:
    ids, spans = long_turn(1500)
    with Session(model, tokenizer, "full", capacity_tokens=2000) as alone:
        want = alone.feed(ids, spans, logits_to_keep=5)
    with Session(model, tokenizer, "intentkv", policy_settings={"kept": 300}, dense_dtype="float32", capacity_tokens=6000) as pruned:
        pruned.feed(ids[:1200], (*spans[:3], Span(70, 1200, Role.OBS, 1)), logits_to_keep=1)
        pruned.feed(ids[:1450], (*spans[:3], Span(70, 1450, Role.OBS, 1)), logits_to_keep=1)
        other = Session(model, tokenizer, "full", store=pruned.store)
        got = other.feed(ids, spans, logits_to_keep=5)
        assert other.report.reused_tokens > 0
        assert (got - want).abs().max() < 1e-3
        assert (pruned.feed(ids, spans, logits_to_keep=5) - want).abs().max() > 1e-2
        other.reset()


def test_an_error_leaves_what_lives_of_the_turns_before(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> None:
    ids, spans = long_turn(1500)
    with Session(model, tokenizer, "intentkv", policy_settings={"kept": 400}, capacity_tokens=3000) as session:
        session.feed(ids, spans, logits_to_keep=1)
        weight = model.model.layers[1].self_attn.k_proj.weight
        before = weight.data.clone()
        weight.data[0, 0] = float("nan")
        with pytest.raises(NonFiniteError):
            session.feed([*ids, *range(100, 200)], (*spans, Span(1500, 1600, Role.OBS, 1)))
        weight.data.copy_(before)
        session.store.check_integrity()
        assert session.token_ids == ids
        assert session.feed([*ids, *range(100, 200)], (*spans, Span(1500, 1600, Role.OBS, 1)), logits_to_keep=1).isfinite().all()
        assert session.report.reused_tokens == 1500


@pytest.mark.parametrize(("policy", "found"), [("intentkv", 64), ("snapkv", 32)])
def test_what_is_renumbered_is_not_found_by_the_next_request(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, policy: str, found: int
) -> None:
    ids, spans = long_turn(1500)
    reply, asked = Span(1500, 1600, Role.ASSISTANT, 1), Span(1600, 1700, Role.USER, 2)
    ids, out = [*ids, *range(100, 300)], []
    for renumber in (False, True):
        settings = {"kept": 400, "renumber": renumber, "tier": "BF16"}
        with Session(model, tokenizer, policy, policy_settings=settings, capacity_tokens=4000) as session:
            session.feed(ids[:1500], spans, logits_to_keep=1)
            # a reply belongs to the request that it answers
            session.feed(ids[:1600], (*spans, reply), logits_to_keep=1)
            assert session.report.reused_tokens == 1500
            out.append(session.feed(ids, (*spans, reply, asked), logits_to_keep=1))
            session.store.check_integrity()
            # the instructions' two pages are spared by one, the sink page alone by the other
            assert session.report.reused_tokens == (found if renumber else 1600)
            # and so where a request leaves what is stored before its end
            session.feed([*ids[:1650], *range(50)], (*spans, reply, asked), logits_to_keep=1)
            assert session.report.reused_tokens == (found if renumber else 1650)
            assert session.report.thinned > 1000
    assert all(x.isfinite().all() for x in out)


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"kept": 0}, "kept is 0"), ({"kept": 1.5}, "kept is 1.5"), ({"kept": float("nan")}, "kept is nan"), ({"kept": True}, "kept is Tr"),
        ({"spare": "inst"}, "spare"), ({"spare": ("judge",)}, "judge"), ({"turns": -1}, "turns"), ({"slack": 0.5}, "slack"),
        ({"per_head": 1}, "per_head"), ({"tier": "EVICTED"}, "EVICTED"), ({"decay": -1}, "decay"), ({"memory": "yes"}, "memory"),
        ({"rope": "left"}, "rope"), ({"pool": "mean"}, "pool"), ({"kept": "half"}, "half"),
        ({"repack": False}, "repack"), ({"renumber": 1}, "renumber"),
    ],
)  # fmt: skip
def test_bad_settings_are_refused_by_name(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, settings: dict[str, Any], named: str
) -> None:
    with pytest.raises(ValueError, match=named):
        Session(model, tokenizer, "intentkv", policy_settings=settings)


def test_survivors_may_be_planes(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> None:
    ids, spans = long_turn(2400)
    stored = {}
    for tier in (Tier.BF16, Tier.INT4):
        with Session(model, tokenizer, "intentkv", policy_settings={"kept": 800, "tier": tier}, capacity_tokens=4000) as session:
            session.feed(ids, spans, logits_to_keep=1)
            stored[tier] = session.report.bytes_stored - session.report.bytes_queries
    assert stored[Tier.INT4] < 0.6 * stored[Tier.BF16]


@pytest.mark.parametrize("limit", [{"policy_settings": {"kept": 800}}, {"budget_bytes": 1_382_400}])
def test_a_turn_that_grows_takes_its_room_from_survivors(limit: dict[str, Any]) -> None:
    ids, spans = long_turn(1500)
    ids = ids + [token % 300 for token in ids]
    with Session(tiny("llama"), None, "intentkv", capacity_tokens=4000, **limit) as session:  # type: ignore[arg-type]
        session.feed([token % 300 for token in ids[:1500]], spans, logits_to_keep=1)
        for n in range(1540, 2300, 60):
            session.feed([token % 300 for token in ids[:n]], (*spans, Span(1500, n, Role.USER, 2)), logits_to_keep=1)
            session.store.check_integrity()
            report = session.report
            assert session._sequence.held_tokens <= 800 + 64 + PAGE_SIZE
            assert "budget_bytes" not in limit or report.bytes_stored - report.bytes_queries <= limit["budget_bytes"]
