"""The store against a plain reference: every token's K and V, kept in a list."""

import pytest
import torch

from kvstrata.config import StoreConfig
from kvstrata.ops import quant
from kvstrata.store.arena import OutOfFramesError
from kvstrata.store.page import FULL
from kvstrata.types import PAGE_SIZE, Plan, Tier
from tests.store.reference import TOLERANCE, L, check_content, feed, kv, make_store, stored


@pytest.mark.parametrize("length", [1, 2, 31, 32, 33, 63, 64, 65, 95, 127, 128, 129, 191, 192, 200])
@pytest.mark.parametrize("chunk", [1, 7, 64, 1000])
def test_every_length_from_one_up_whatever_the_chunking(length: int, chunk: int) -> None:
    store = make_store()
    i = store.add_sequence(Plan((Tier.BF16,), Tier.INT4))
    for start in range(0, length, chunk):
        feed(store, [i], [list(range(start, min(start + chunk, length)))])
    s = store.sequence(i)
    first = max(0, length // 64 - 1) * 2
    assert [p.tier for p in s.pages] == [Tier.BF16 if n == 0 or n >= first else Tier.INT4 for n in range(-(-length // 32))]
    assert set(stored(store, i, 0)[0]) == set(range(length))
    check_content(store, i)


def test_the_same_tokens_give_the_same_bytes_whatever_the_chunking() -> None:
    pages = []
    for chunk in (1, 13, 300):
        store = make_store()
        i = store.add_sequence(Plan((Tier.BF16,), Tier.INT3))
        for start in range(0, 300, chunk):
            feed(store, [i], [list(range(start, min(start + chunk, 300)))])
        pages.append([store.arena.buffer[:, list(p.frames)] for p in store.sequence(i).pages[:8]])
    for a, b, c in zip(*pages, strict=True):
        assert torch.equal(a, b) and torch.equal(a, c)


def test_only_the_first_sequence_of_a_batch_compressed() -> None:
    """Bytes are asserted for each sequence of a ragged batch."""
    store = make_store()
    ids = [store.add_sequence(Plan((), Tier.INT2)) for _ in range(3)]
    feed(store, ids, [list(range(500)), list(range(40)), list(range(300))])
    for i, n in zip(ids, (500, 40, 300), strict=True):
        window = -(-n // 32) - max(0, n // 64 - 1) * 2
        assert store.sequence(i).frames == window * store.layout.frames(Tier.BF16) + 2 * (-(-n // 32) - window)
        check_content(store, i)


def test_memory_does_not_fall_when_a_plan_is_lowered() -> None:
    """Frames come back to the arena at once, and demotion drops planes without touching the others."""
    store = make_store()
    i = store.add_sequence(Plan((Tier.BF16,), Tier.INT8))
    feed(store, [i], [list(range(400))])
    store.prefix.clear()
    held = [p.frames for p in store.sequence(i).pages]
    before, free = store.arena.buffer.clone(), store.arena.free
    for tier, planes in ((Tier.INT4, 4), (Tier.INT3, 3), (Tier.INT2, 2)):
        freed = store.set_plan(i, Plan((Tier.BF16,), tier))
        store.check_integrity()
        assert freed == store.arena.free - free > 0
        free = store.arena.free
        assert [p.frames for p in store.sequence(i).pages[1:10]] == [f[:planes] for f in held[1:10]]
        assert torch.equal(store.arena.buffer, before)
        check_content(store, i)
    # what was lost is not gained back
    assert store.set_plan(i, Plan((), Tier.BF16)) == 0
    assert store.sequence(i).pages[3].tier is Tier.INT2


def test_evicted_pages_free_their_frames_and_dead_tokens_are_masked() -> None:
    store = make_store()
    i = store.add_sequence(Plan((Tier.BF16,), Tier.INT4))
    feed(store, [i], [list(range(300))])
    store.prefix.clear()
    free = store.arena.free
    store.set_plan(i, Plan((Tier.BF16, Tier.EVICTED), Tier.INT4, dead={2: 0xFF, 3: 0xFFFFFFFF}))
    store.check_integrity()
    assert store.arena.free == free + 8
    positions = set(stored(store, i, 0)[0])
    assert positions == set(range(32)) | set(range(72, 96)) | set(range(128, 300))
    check_content(store, i)


def test_out_of_frames_says_who_holds_them_and_changes_nothing() -> None:
    store = make_store(num_frames=1 + 27 * 4 + 40)
    a, b = store.add_sequence(Plan((), Tier.INT4)), store.add_sequence(Plan((), Tier.INT4))
    feed(store, [a], [list(range(100))])
    before = store.sequence(a).token_ids[:]
    with pytest.raises(OutOfFramesError, match=r"asked for 54 frames, \d+ are free; held by: sequence 1 \(100 tokens\) 108") as error:
        store.begin([a, b], [[1], list(range(64))])
    assert error.value.asked == 54 and error.value.free == 40 and error.value.holders == {"sequence 1 (100 tokens)": 108}
    store.check_integrity()
    assert store.sequence(a).token_ids == before and not store.sequence(b).pages
    feed(store, [a], [[100, 101]])
    check_content(store, a)


def test_an_aborted_step_leaves_everything_as_it_was() -> None:
    store = make_store()
    i = store.add_sequence(Plan((), Tier.INT4))
    feed(store, [i], [list(range(130))])
    s = store.sequence(i)
    pages, free = list(s.pages), store.arena.free
    feed(store, [i], [list(range(1000, 1100))], commit=False)
    assert (s.pages, s.num_tokens, store.arena.free) == (pages, 130, free)
    check_content(store, i)
    feed(store, [i], [list(range(130, 200))])
    check_content(store, i)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_nan_and_inf_are_named_by_layer_head_and_position(value: float) -> None:
    store = make_store()
    a, b = store.add_sequence(), store.add_sequence()
    feed(store, [a, b], [list(range(10)), list(range(20))])
    step = store.begin([a, b], [[1, 2, 3], [4, 5, 6]])
    k, v = kv([1, 2, 3, 4, 5, 6], 0)
    v[4, 1, 7] = value
    step.write(0, *kv([1, 2, 3, 4, 5, 6], 0))
    with pytest.raises(quant.NonFiniteError, match=r"V is -?(nan|inf) at layer 1, KV head 1, position 21 of sequence 2, channel 7"):
        step.write(1, k, v)
    step.abort()
    store.check_integrity()
    assert store.sequence(b).num_tokens == 20


def test_a_step_with_a_missing_layer_stores_nothing() -> None:
    store = make_store()
    i = store.add_sequence()
    step = store.begin([i], [[1, 2]])
    step.write(0, *kv([1, 2], 0))
    with pytest.raises(RuntimeError, match=r"layers \[1\] were not written"):
        step.commit()
    store.check_integrity()
    assert store.sequence(i).num_tokens == 0


def test_forks_share_frames_until_they_part() -> None:
    store = make_store()
    a = store.add_sequence(Plan((Tier.BF16,), Tier.INT4))
    feed(store, [a], [list(range(150))])
    used = store.arena.in_use
    b = store.fork(a)
    assert store.arena.in_use == used
    feed(store, [b], [[7, 8, 9]])
    feed(store, [a], [list(range(150, 260))])
    check_content(store, a)
    check_content(store, b)
    store.release(a)
    store.check_integrity()
    check_content(store, b)


def test_prefix_reuse_and_what_the_index_gives_back() -> None:
    store = make_store()
    a = store.add_sequence(Plan((Tier.BF16,), Tier.INT4))
    feed(store, [a], [list(range(300))])
    b = store.add_sequence(Plan((Tier.BF16,), Tier.INT4))
    # 300 tokens: pages from 192 on are still in the window
    assert store.match_prefix(b, list(range(300))) == 192
    assert store.sequence(b).pages == store.sequence(a).pages[:6]
    feed(store, [b], [list(range(192, 250)) + [9] * 100])
    check_content(store, b)
    c = store.add_sequence()
    assert store.match_prefix(c, list(range(70, 400))) == 0
    for i in (a, b, c):
        store.release(i)
    store.check_integrity()
    assert store.frames_in_use == 0 and store.arena.in_use == store.prefix.frames > 0
    d = store.add_sequence(Plan((), Tier.INT4))
    assert store.match_prefix(d, list(range(100))) == 0  # all of it would be window
    assert store.match_prefix(d, list(range(200))) == 128


def test_prefix_hit_and_first_chunk_in_one_batch_lose_the_prefix() -> None:
    """They do not: a sequence that starts with reused pages and one that starts from nothing, in the same step."""
    store = make_store()
    a = store.add_sequence(Plan((Tier.BF16,), Tier.INT4))
    feed(store, [a], [list(range(300))])
    hit, fresh = (store.add_sequence(Plan((Tier.BF16,), Tier.INT4)) for _ in range(2))
    assert store.match_prefix(hit, list(range(290))) == 192
    feed(store, [fresh, hit, a], [list(range(5000, 5100)), list(range(192, 290)), [300]])
    for i, tokens in ((hit, list(range(290))), (fresh, list(range(5000, 5100))), (a, list(range(301)))):
        assert store.sequence(i).token_ids == tokens
        assert set(stored(store, i, 0)[0]) == set(range(len(tokens)))
        check_content(store, i)


def test_demotion_keeps_planes_for_those_who_share_them() -> None:
    store = make_store()
    a = store.add_sequence(Plan((Tier.BF16,), Tier.INT4))
    feed(store, [a], [list(range(300))])
    b = store.fork(a)
    store.set_plan(a, Plan((Tier.BF16,), Tier.INT2))
    store.check_integrity()
    assert store.sequence(b).pages[2].tier is Tier.INT4 and store.sequence(a).pages[2].frames == store.sequence(b).pages[2].frames[:2]
    check_content(store, b)


def test_what_is_computed_after_an_eviction_serves_nobody_else() -> None:
    store = make_store()
    a = store.add_sequence(Plan((Tier.BF16,), Tier.INT4))
    feed(store, [a], [list(range(256))])
    store.set_plan(a, Plan((Tier.BF16, Tier.EVICTED), Tier.INT4))
    feed(store, [a], [list(range(256, 512))])
    b = store.add_sequence(Plan((Tier.BF16,), Tier.INT4))
    # pages 0 to 5 settled before the eviction (page 1 too: the index still has it), the rest saw a pruned context
    assert store.match_prefix(b, list(range(512))) == 192


def test_crop_that_does_nothing() -> None:
    """Every cut point, in the window and in settled pages; the sequence goes on from there."""
    for keep in (0, 1, 31, 32, 40, 95, 96, 130, 191, 192, 239, 240):
        store = make_store()
        i = store.add_sequence(Plan((Tier.BF16, Tier.EVICTED), Tier.INT4))
        feed(store, [i], [list(range(240))])
        store.crop(i, keep)
        store.check_integrity()
        assert store.sequence(i).num_tokens == keep
        assert set(stored(store, i, 1)[0]) == set(range(keep)) - set(range(32, 64))
        feed(store, [i], [list(range(5000, 5150))])
        s = store.sequence(i)
        assert s.token_ids == list(range(keep)) + list(range(5000, 5150))
        # a token of a quantized page that was cut keeps the error it had, whatever its page is now
        k_ref, _ = kv(s.token_ids, 0)
        for position, k in stored(store, i, 0)[0].items():
            assert (k - k_ref[position]).abs().max() < (0.2 if position < keep else TOLERANCE[s.pages[position // 32].tier] * 1.5)


def test_what_frames_held_before_is_never_read() -> None:
    """Cropping into an evicted page: its positions stay dead, and what settles later is neither NaN nor coarser for it."""
    store = make_store()
    i = store.add_sequence(Plan((Tier.BF16,), Tier.EVICTED))
    feed(store, [i], [list(range(300))])
    store.crop(i, 40)
    store.set_plan(i, Plan((Tier.BF16,), Tier.INT4))
    feed(store, [i], [list(range(5000, 5200))])
    s = store.sequence(i)
    assert set(stored(store, i, 0)[0]) == set(range(32)) | set(range(40, 240))
    assert s.pages[1].tier is Tier.INT4
    assert s.pages[1].live == FULL ^ 0xFF
    k, v = store.read_pages(store.arena.buffer[0], torch.tensor([s.pages[1].frames], dtype=torch.int32), Tier.INT4)
    assert torch.isfinite(k).all()
    assert torch.isfinite(v).all()
    for p in store.sequence(i).pages:
        assert (store.arena.buffer[:, list(p.frames)].view(torch.int16) != -1).any()
    k_ref, _ = kv(s.token_ids, 0)
    assert all((x - k_ref[position]).abs().max() < TOLERANCE[Tier.INT4] for position, x in stored(store, i, 0)[0].items() if position >= 40)


def test_dead_tokens_do_not_widen_the_range_of_the_living() -> None:
    store = make_store()
    i = store.add_sequence(Plan((Tier.BF16,), Tier.INT4, dead={2: 1 << 5}))
    tokens = list(range(200))
    step = store.begin([i], [tokens])
    for layer in range(L):
        k, v = kv(tokens, layer)
        k[2 * PAGE_SIZE + 5] = 500.0
        step.write(layer, k, v)
    step.commit()
    k, _ = stored(store, i, 0)
    k_ref, _ = kv(tokens, 0)
    assert 69 not in k
    assert all((k[p] - k_ref[p]).abs().max() < TOLERANCE[Tier.INT4] for p in range(64, 96) if p != 69)


def test_nothing_changes_under_an_open_step() -> None:
    store = make_store()
    a, b = store.add_sequence(), store.add_sequence()
    feed(store, [a, b], [list(range(100)), list(range(100))])
    step = store.begin([a], [[1, 2]])
    for call in (lambda: store.release(a), lambda: store.crop(a, 10), lambda: store.set_plan(a, Plan((), Tier.INT2))):
        with pytest.raises(ValueError, match=r"sequence 1 while a step that appends to it is open; commit or abort it first"):
            call()
    store.crop(b, 10)
    store.release(b)
    for layer in range(L):
        with pytest.raises(ValueError, match=r"both must be \[2, 2, 64\]"):
            step.write(layer, *kv([1, 2, 3], layer))
        step.write(layer, *kv([1, 2], layer))
    step.commit()
    store.check_integrity()
    check_content(store, a)


def test_demotion_relieves_a_full_arena() -> None:
    store = make_store(num_frames=1 + 27 * 7)
    i = store.add_sequence(Plan((), Tier.BF16))
    feed(store, [i], [list(range(7 * 32))])
    store.prefix.clear()
    assert store.arena.free == 0
    assert store.set_plan(i, Plan((), Tier.INT4)) == 4 * 23
    store.check_integrity()
    check_content(store, i)


def test_keys_beyond_float16_are_named() -> None:
    store = make_store(dense_dtype="float16")
    i = store.add_sequence()
    step = store.begin([i], [[1, 2]])
    k, v = kv([1, 2], 0)
    k[1, 1, 3] = 1e5
    with pytest.raises(quant.NonFiniteError, match="K is inf in float16 at layer 0, KV head 1, position 1 of sequence 1, channel 3"):
        step.write(0, k, v)
    step.abort()


def test_bad_calls_name_the_value() -> None:
    store = make_store(codec="kivi")
    i = store.add_sequence()
    with pytest.raises(ValueError, match="unknown sequence 9; known: 1"):
        store.release(9)
    with pytest.raises(ValueError, match=r"codec 'kivi' has no tier INT8; accepted: EVICTED, INT2, INT4, BF16"):
        store.set_plan(i, Plan((), Tier.INT8))
    with pytest.raises(ValueError, match="cannot crop sequence 1 of 0 tokens to 3"):
        store.crop(i, 3)
    with pytest.raises(ValueError, match="twice"):
        store.begin([i, i], [[1], [2]])
    step = store.begin([i], [[1]])
    with pytest.raises(ValueError, match="a step is open"):
        store.begin([i], [[1]])
    step.abort()
    with pytest.raises(ValueError, match="window is 48"):
        make_store(window=48)
    with pytest.raises(ValueError, match="StoreConfig lacks num_kv_heads, head_dim, num_frames"):
        StoreConfig.from_dict({"num_layers": 3})
    with pytest.raises(ValueError, match=r"num_frames is 10\.5; it must be a whole number"):
        make_store(num_frames=10.5)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="1 sequence ids and 0 lists of token ids"):
        store.begin([i], [])
    with pytest.raises(ValueError, match=r"codec 'kivi' has no tier INT8"):
        store.add_sequence(Plan((), Tier.INT8))
    with pytest.raises(ValueError, match="tier 'INT4' is no Tier"):
        store.add_sequence(Plan(("INT4",)))  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="unknown StoreConfig key 'pages'; accepted: num_layers"):
        StoreConfig.from_dict({"pages": 3})


@pytest.mark.parametrize("codec", ["kivi", "triaxial", "hyquant", "hyquant-fp", "fp8", "int8"])
def test_other_codecs_store_what_they_should(codec: str) -> None:
    for window in (0, 64):
        store = make_store(codec=codec, window=window)
        tier = store.layout.codec.tiers[-1]
        i = store.add_sequence(Plan((), tier))
        for start, end in ((0, 5), (5, 6), (6, 40), (40, 170), (170, 171)):
            feed(store, [i], [list(range(start, end))])
        s = store.sequence(i)
        k_ref, v_ref = kv(s.token_ids, 0)
        k, v = stored(store, i, 0)
        assert set(k) == set(range(171))
        assert all((k[p] - k_ref[p]).abs().max() < 0.3 and (v[p] - v_ref[p]).abs().max() < 0.3 for p in k)
        if window == 0:
            assert s.pages[-1].tier is (Tier.INT4 if codec == "triaxial" else Tier.BF16)
            assert all(page.tier is tier for page in s.pages[:-1])
