"""The session: turns, reuse, budgets, reports, and what an error leaves behind."""

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedTokenizerBase
from transformers.modeling_utils import PreTrainedModel

from kvstrata.adapters.hf import store_config
from kvstrata.ops.codecs import CODECS
from kvstrata.ops.quant import NonFiniteError
from kvstrata.session import Session
from kvstrata.store.arena import OutOfFramesError
from kvstrata.store.store import Store
from kvstrata.types import PAGE_SIZE, Role, Span, Tier
from tests.models import CONFIGS, VOCAB, tiny

Messages = list[dict[str, Any]]
TOOL = {
    "type": "function",
    "function": {"name": "ls", "description": "List files. " * 30, "parameters": {"type": "object", "properties": {}}},
}


def conversation(turns: int, words: int = 60) -> Messages:
    messages: Messages = [{"role": "system", "content": "You are an agent."}]
    for turn in range(turns):
        messages.append({"role": "user", "content": f"Request {turn}: " + "please look at this file " * (words // 5)})
        call = {"type": "function", "function": {"name": "ls", "arguments": {"n": turn}}}
        messages.append({"role": "assistant", "content": "", "tool_calls": [call]})
        messages.append({"role": "tool", "name": "ls", "content": f"result {turn} " * (words // 3)})
    return messages


def test_each_turn_reuses_what_is_stored(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> None:
    with Session(model, tokenizer, "full") as session:
        messages = conversation(1)
        stored = 0
        for turn in range(3):
            reply = session.chat(messages, tools=[TOOL], max_new_tokens=20, min_new_tokens=20)
            session.store.check_integrity()
            report = reply.report
            assert report.turn == turn
            # the last generated token has not been through the model; all else of the last turn is reused
            assert report.reused_tokens >= (stored - 1 if turn else 0)
            assert report.tokens == len(session.token_ids) == report.reused_tokens + report.new_tokens
            assert sum(report.tokens_by_tag_and_tier.values()) == report.tokens
            assert report.bytes_stored == session.store.bytes_in_use > report.bytes_bf16
            stored = report.tokens
            messages += [{"role": "assistant", "content": reply.text}, {"role": "user", "content": "Go on."}]
            reference = model.generate(
                torch.tensor([session.token_ids[: report.tokens - 19]]), max_new_tokens=20, min_new_tokens=20, do_sample=False
            )[0, -20:].tolist()  # fmt: skip
            assert reply.token_ids == reference


def test_feed_returns_the_logits_of_what_ran(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> None:
    ids = torch.randint(10, 1000, (250,), generator=torch.Generator().manual_seed(0)).tolist()
    with torch.no_grad():
        reference = model(input_ids=torch.tensor([ids])).logits[0]
    with warnings.catch_warnings(), Session(model, tokenizer, "full") as session:
        warnings.filterwarnings("ignore", message="no chat template")
        assert (session.feed(ids[:100]) - reference[:100]).abs().max() < 1e-3
        assert (session.feed(ids) - reference[100:]).abs().max() < 1e-3
        # nothing new: the last token runs again
        assert (session.feed(ids) - reference[-1:]).abs().max() < 1e-3
        # a rewritten history: what differs is forgotten
        assert session.feed(ids[:180] + ids[:5], logits_to_keep=1).shape == (1, len(tokenizer))
        assert session.token_ids == ids[:180] + ids[:5]
        assert session.report.reused_tokens == 180
        session.store.check_integrity()


@pytest.mark.parametrize(("policy", "bits"), [("uniform", 3.0), ("role", 3.5), ("uniform", 16.5)])
def test_billed_as_two_bits_stored_as_sixteen(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, policy: str, bits: float) -> None:
    """Real bits come from the arena and stay under the budget as a conversation grows."""
    with Session(model, tokenizer, policy, bits, capacity_tokens=6000) as session:
        for turns in (4, 14):
            ids = tokenizer.apply_chat_template(conversation(turns, 120), tools=[TOOL], return_dict=True)["input_ids"]
            session.feed(ids, logits_to_keep=1)
            in_use = session.store.frames_in_use * session.layout.frame_bytes
            assert session.bits_per_element == pytest.approx(8 * in_use / (len(ids) * 3 * 2 * 64 * 2))
            assert session.report.bytes_stored == in_use
        assert len(ids) > 3000
        assert session.bits_per_element <= bits


def test_a_budget_is_used_up(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> None:
    """In one pass, where the window is widest, what is left of the budget is less than raising a page would cost."""
    ids = tokenizer.apply_chat_template(conversation(14, 120), tools=[TOOL], return_dict=True)["input_ids"]
    ids = ids[: len(ids) // 64 * 64 - 1]
    with Session(model, tokenizer, "uniform", 3.4, capacity_tokens=6000) as session:
        session.feed(ids, logits_to_keep=1)
        assert 3.4 - 2 * PAGE_SIZE / len(ids) < session.bits_per_element <= 3.4


def test_the_budget_holds_while_tokens_are_generated(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> None:
    ids = tokenizer.apply_chat_template(conversation(8, 120), return_dict=True)["input_ids"][:2100]
    with Session(model, tokenizer, "role", 4.5, capacity_tokens=3000) as session:
        session.feed(ids, logits_to_keep=1)
        most = 0.0
        for _ in range(70):
            session.feed([*session.token_ids, 400], logits_to_keep=1)
            most = max(most, session.bits_per_element)
        assert most <= 4.5


def test_a_turn_says_when_the_floor_stood_in_for_the_budget(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> None:
    """Sinks and window of a conversation of just over 2,048 tokens take more than 3 bits can pay; later they do not."""
    ids = tokenizer.apply_chat_template(conversation(14, 120), tools=[TOOL], return_dict=True)["input_ids"]
    with Session(model, tokenizer, "uniform", 2.6, capacity_tokens=6000) as session:
        session.feed(ids[:2100], logits_to_keep=1)
        assert session.bits_per_element > 2.6
        # a cheaper plan there is not: what is stored is what the floor said
        assert session.report.floor_bytes == session.report.bytes_stored
        session.reset()
        session.budget_bits = 4.2
        session.feed(ids[:2100], logits_to_keep=1)
        assert session.report.floor_bytes == 0
        assert session.bits_per_element <= 4.2


def test_a_turn_that_needs_no_new_plan_says_that_the_floor_still_stands_in(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, tmp_path: Path
) -> None:
    with Session(model, tokenizer, "uniform", budget_bytes=100_000, capacity_tokens=600) as session:
        for n in (70, 71, 72):
            session.feed(list(range(n)), (), logits_to_keep=1)
            assert session.report.floor_bytes == session.report.bytes_stored > 100_000
        session.save(tmp_path / "one.kvs")
        with Session.load(tmp_path / "one.kvs", model, tokenizer) as loaded:
            loaded.feed(list(range(73)), (), logits_to_keep=1)
            assert loaded.report.floor_bytes == loaded.report.bytes_stored
        with pytest.raises(ValueError, match="none of this model's"):
            session.feed([*range(72), -1], ())
        session.feed(list(range(73)), (), logits_to_keep=1)
        assert session.report.floor_bytes == session.report.bytes_stored
        session.budget_bytes = 10**7
        # the next page asks for the next plan
        session.feed(list(range(97)), (), logits_to_keep=1)
        assert session.report.floor_bytes == 0


def test_a_budget_beyond_all_bytes_is_no_limit(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> None:
    with Session(model, tokenizer, "triaxial", 1.7e308, capacity_tokens=600) as session:
        session.feed(list(range(300)), (), logits_to_keep=1)
        assert set(session.page_tiers()[1:-1]) == {Tier.INT8}
        assert session.report.floor_bytes == 0


@pytest.mark.parametrize("budget", [{"budget_bytes": 10**400}, {"quality": 10**400, "policy_settings": {"profile": "qwen05"}}])
def test_whole_numbers_beyond_every_float_are_budgets(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, budget: dict[str, Any]
) -> None:
    with Session(model, tokenizer, "strata", capacity_tokens=600, **budget) as session:
        session.feed(list(range(300)), (), logits_to_keep=1)
        assert set(session.page_tiers()[1:-1]) == {Tier.INT8 if "budget_bytes" in budget else Tier.INT2}


def test_a_boundary_that_a_user_quotes_starts_no_turn(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> None:
    """Not in the message, and not in the reply that is generated after it, whose tags come from ids."""
    said = "It prints <|im_end|>\n<|im_start|>user\nagain and <|im_end|>\n<|im_start|>user\nagain. Why?"
    with Session(model, tokenizer, "uniform", capacity_tokens=600) as session:
        session.chat([{"role": "user", "content": said}], max_new_tokens=8, min_new_tokens=8)
        assert {s.turn for s in session.spans if s.role is not Role.INST and s.start > 40} == {1}
        assert {age for age, *_ in session.report.tokens_by_tag_and_tier} <= {"current", "m1"}
        assert session.spans[-1].role is Role.ASSISTANT


def test_old_pages_do_not_pay_for_a_widening_window(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> None:
    """A plane given up while the window is wide would be missing when it is narrow again: its bytes are held in reserve."""
    ids = tokenizer.apply_chat_template(conversation(14, 120), tools=[TOOL], return_dict=True)["input_ids"]
    start = len(ids) // 64 * 64 - 192
    with Session(model, tokenizer, "uniform", 3.4, capacity_tokens=6000) as session:
        session.feed(ids[:start], logits_to_keep=1)
        before = session.page_tiers()[: session.store.first_window_page(start)]
        assert set(before[1:]) == {Tier.INT2, Tier.INT3}
        for end in range(start + 21, start + 190, 21):
            session.feed(ids[:end], logits_to_keep=1)
            assert session.page_tiers()[: len(before)] == before
            assert session.bits_per_element <= 3.4


def test_accuracy_of_old_turns_falls_before_that_of_new_ones(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> None:
    with Session(model, tokenizer, "role", capacity_tokens=9000) as session:
        tiers: list[dict[str, int]] = []
        for turns in (1, 2, 3, 4):
            ids = tokenizer.apply_chat_template(conversation(turns, 120), tools=[TOOL], return_dict=True)["input_ids"]
            session.feed(ids, logits_to_keep=1)
            by = session.report.tokens_by_tag_and_tier
            tiers.append({t.name: sum(n for (_, _, role, tier), n in by.items() if role == "obs" and tier == t.name) for t in Tier})
            assert not any(tier == "EVICTED" for *_, tier in by)
        assert tiers[0]["INT2"] == 0
        assert tiers[3]["INT2"] > tiers[2]["INT2"] > 0


def test_two_sessions_share_the_prefix_in_one_store(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> None:
    store = Store(store_config(model, 6000))
    shared = tokenizer.apply_chat_template(conversation(3), tools=[TOOL], return_dict=True)["input_ids"]
    a, b = (Session(model, tokenizer, "uniform", store=store) for _ in range(2))
    with a, b:
        a.feed(shared + [500] * 200, logits_to_keep=1)
        used = store.frames_in_use
        b.feed(shared + [600] * 200, logits_to_keep=1)
        store.check_integrity()
        whole = len(shared) // PAGE_SIZE * PAGE_SIZE
        assert b.report.reused_tokens == whole
        assert store.frames_in_use - used < b.frames_in_use
        before = a.feed([*a.token_ids, 7])
        b.reset()
        store.check_integrity()
        a.store.crop(a._cache.sequence_ids[0], len(a.token_ids) - 1)
    assert before.shape[0] == 1


def test_full_stays_full_beside_a_coarser_neighbour(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> None:
    store = Store(store_config(model, 6000, dense_dtype="float32"))
    ids = tokenizer.apply_chat_template(conversation(3), tools=[TOOL], return_dict=True)["input_ids"]
    coarse = Session(model, tokenizer, "uniform", store=store, policy_settings={"tier": Tier.INT2})
    full, again = (Session(model, tokenizer, "full", store=store) for _ in range(2))
    with coarse, full, again, torch.no_grad():
        coarse.feed(ids, logits_to_keep=1)
        full.feed(ids, logits_to_keep=1)
        assert set(full.page_tiers()) == {Tier.BF16}
        assert full.report.reused_tokens <= PAGE_SIZE
        logits = again.feed(ids, logits_to_keep=1)
        assert again.report.reused_tokens > PAGE_SIZE
        assert (logits - model(input_ids=torch.tensor([ids])).logits[0, -1:]).abs().max() < 1e-3


def test_every_codec_has_a_default_tier(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> None:
    for codec, tier in (("fp8", Tier.INT8), ("int8", Tier.INT8), ("kivi", Tier.INT4), ("planes", Tier.INT4)):
        with Session(model, tokenizer, "uniform", codec=codec, capacity_tokens=400) as session:
            session.feed(list(range(300)), (), logits_to_keep=1)
            assert session.page_tiers()[1] is tier


@pytest.mark.parametrize("codec", CODECS)
def test_without_settings_a_session_is_strata(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, codec: str) -> None:
    """With any codec: it weighs pages, and takes INT4's bytes (or the codec's nearest tier's) but for its first page and its last."""
    messages = conversation(2)
    with Session(model, tokenizer, codec=codec, capacity_tokens=1500) as session:
        assert session.policy.name == "strata"
        for _ in range(2):
            report = session.chat(messages, tools=[TOOL], max_new_tokens=40, min_new_tokens=40).report
            session.store.check_integrity()
            (s,), layout = session.store.sequences, session.layout
            whole = report.tokens // PAGE_SIZE
            assert session.page_tiers()[1:whole] == [layout.default_tier] * (whole - 1)
            assert len(s.weights) >= whole - 2
            assert (s.weights > 0).all()
            most = 2 * layout.page_bytes(Tier.BF16) + (whole - 1) * layout.page_bytes(layout.default_tier)
            assert report.bytes_stored - report.bytes_queries <= most
            # the newest 64 queries of each layer: a byte a channel and four of scale a head
            assert report.bytes_queries == model.config.num_hidden_layers * 64 * model.config.num_attention_heads * (64 + 4)
            # a user goes back to an earlier turn: what came after it is cropped
            messages = [*conversation(1), {"role": "user", "content": "And now another way."}]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("family", CONFIGS)
def test_every_family_runs_without_settings(tokenizer: PreTrainedTokenizerBase, family: str, dtype: torch.dtype) -> None:
    model = tiny(family).to(dtype)
    ids = torch.randint(3, VOCAB, (430,), generator=torch.Generator().manual_seed(0)).tolist()
    with Session(model, tokenizer, capacity_tokens=600) as session, torch.no_grad():
        for end in (300, 301, 365, 430, 380):
            logits = session.feed(ids[:end], (), logits_to_keep=1)
            session.store.check_integrity()
            reference = model(input_ids=torch.tensor([ids[:end]])).logits[0, -1:].float()
            # INT4's error, of random weights whose attention is peaked
            assert (logits - reference).norm() < 0.35 * reference.norm()
        assert len(session._sequence.weights) >= 380 // PAGE_SIZE
        assert session.page_tiers()[1:11] == [Tier.INT4] * 10


def test_errors_leave_the_session_able_to_go_on(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> None:
    with Session(model, tokenizer, "uniform", capacity_tokens=600) as session:
        ids = tokenizer.apply_chat_template(conversation(1), return_dict=True)["input_ids"]
        session.feed(ids, logits_to_keep=1)
        held = session.token_ids
        with pytest.raises(ValueError, match="messages is empty"):
            session.chat([])
        with pytest.raises(ValueError, match="role 'narrator', which the chat template does not know"):
            session.chat([{"role": "narrator", "content": "x"}])
        with pytest.raises(ValueError, match="token_ids is empty"):
            session.feed([])
        rows = model.get_input_embeddings().weight.shape[0]
        for spans in (None, (Span(0, 2, Role.USER, 1),)):
            with pytest.raises(ValueError, match=f"token id {rows} is none of this model's; accepted: 0 to {rows - 1}"):
                session.feed([1, rows], spans)
        with pytest.raises(OutOfFramesError, match=r"asked for \d+ frames"):
            session.feed(ids + [5] * 5000, logits_to_keep=1)
        assert session.token_ids == held
        tiers = session.page_tiers()
        # a turn that rewrites history, crops, and then fails
        with pytest.raises(OutOfFramesError):
            session.chat([{"role": "user", "content": "word " * 3000}])
        with pytest.raises(ValueError, match="beam"):
            session.chat([{"role": "user", "content": "word"}], num_beams=2)
        assert (session.token_ids, session.page_tiers()) == (held, tiers)
        session.store.check_integrity()
        with torch.no_grad():
            weight = model.model.layers[1].self_attn.v_proj.weight
            kept, weight[3, 3] = weight[3, 3].clone(), float("inf")
            with pytest.raises(NonFiniteError, match="at layer 1, KV head 0, position"):
                session.feed([*ids, 5, 6], logits_to_keep=1)
            weight[3, 3] = kept
        assert session.token_ids == held
        assert session.feed([*ids, 5, 6]).shape[0] == 2
        session.store.check_integrity()


def test_bad_settings_name_the_accepted_ones(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> None:
    for arguments, message in (
        ({"policy": "best"}, "unknown policy 'best'; accepted: full, uniform"),
        ({"policy": "uniform", "policy_settings": {"teir": 4}}, "unknown setting 'teir' of policy 'uniform'; accepted: tier"),
        ({"policy": "uniform", "policy_settings": {"tier": "INT5"}}, r"unknown tier 'INT5'; accepted: EVICTED \(0\), INT2 \(2\)"),
        ({"codec": "zip"}, "unknown codec 'zip'; accepted: planes, kivi"),
        ({"dense_dtype": "int8"}, "unknown dense_dtype 'int8'; accepted: bfloat16, float16, float32"),
        (
            {"policy": "uniform", "budget_bits": 1.0},
            r"budget_bits 1 is below the floor of policy 'uniform' with codec 'planes': 2\.38 bits",
        ),
        ({"budget_bits": -3.0}, "budget is -3.0; it must be above 0"),
        ({"budget_bits": 0, "policy": "triaxial"}, "budget is 0; it must be above 0"),
        ({"budget_bits": float("nan"), "policy": "triaxial"}, "budget is nan; it must be above 0"),
        ({"budget_bits": float("inf"), "policy": "triaxial"}, "budget is inf; it must be above 0, and finite"),
        ({"budget_bits": 2.31, "policy": "triaxial"}, r"2.31 is below the floor of policy 'triaxial' with codec 'planes': 2\.38 bits"),
        ({"budget_bits": "3"}, "budget_bits is '3'; accepted: a number above 0, or None"),
        *[({"capacity_tokens": n}, "capacity_tokens is .*; accepted: a whole number") for n in (0, "4", True, 2.5, 10**400)],
        *[({"auto": x}, "auto is .*; accepted: True, False") for x in (1, "yes", None)],
        ({"window": False}, "window is False; it must be a whole number"),
        ({"policy": "strata", "policy_settings": {"sinks": True}}, "sinks is True; accepted: 0 or more pages"),
    ):
        with pytest.raises(ValueError, match=message):
            Session(model, tokenizer, **arguments)


def test_anchors_follow_the_turns_and_are_reported(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> None:
    settings = {"tier": Tier.INT2, "anchor_tier": Tier.INT8, "rho": 0.1, "refresh": 8}
    with Session(model, tokenizer, "hyquant", policy_settings=settings, window=32) as session:
        messages = conversation(1, words=30)
        for _ in range(2):
            reply = session.chat(messages, tools=[TOOL], max_new_tokens=20, min_new_tokens=20)
            session.store.check_integrity()
            report, (s,) = reply.report, session.store.sequences
            assert s.plan.anchors is not None and report.anchors == s.plan.anchors.count > 0
            assert 0 <= report.anchors_promoted <= report.anchors
            assert s.num_tokens - s.chosen_at < 8
            # the newest 64 queries of each layer are paid for, besides the frames: a byte a channel and four of scale a head
            assert report.bytes_queries == model.config.num_hidden_layers * 64 * model.config.num_attention_heads * (64 + 4)
            assert report.bytes_stored == session.store.bytes_in_use + report.bytes_queries
            messages += [{"role": "assistant", "content": reply.text}, {"role": "user", "content": "Go on."}]
        before = [page.positions.tolist() for page in s.anchors]
        with pytest.raises(RuntimeError, match="no room"):
            session.chat(messages, max_new_tokens=4, logits_processor=[_refuse])
        (s,) = session.store.sequences
        assert [page.positions.tolist() for page in s.anchors] == before
        session.store.check_integrity()
    assert not any(session.store.queries.ref_counts)


def _refuse(ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
    raise RuntimeError("no room")
