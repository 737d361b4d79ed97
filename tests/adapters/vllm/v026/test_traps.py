"""Where an add-on's cache has gone wrong inside an engine before, each as a test.

Refusals at start are in test_config.py; two ranks in test_parallel.py; a step ahead in test_async.py. Pages computed in a pruned context do
not exist, for nothing that a request holds is evicted; what is found never spans a page that was lost (test_cached.py).
"""

from collections.abc import Callable
from typing import Any

import pytest
from vllm import SamplingParams
from vllm.v1.attention.backend import AttentionCGSupport

from kvstrata.adapters.vllm.causal import most_frames
from kvstrata.adapters.vllm.v026.backend import FrameBuilder
from kvstrata.adapters.vllm.v026.worker import builder_of
from kvstrata.types import PAGE_SIZE

from .engines import Engine, Work, mixed_work

SETTINGS: dict[str, Any] = {"policy": "triaxial", "budget_bits": 5.0, "horizon": 1024, "dense_dtype": "float32"}
WORK = mixed_work(seed=11)


def watch(engine: Engine, look: Callable[[Any], None]) -> None:
    schedule = engine.scheduler.schedule

    def watched(*args: Any, **kwargs: Any) -> Any:
        out = schedule(*args, **kwargs)
        look(out)
        return out

    engine.scheduler.schedule = watched


def test_in_one_engine(start: Callable[..., Engine]) -> None:
    """One engine for all that needs one: it takes longer to start than to run."""
    engine = start(SETTINGS, num_gpu_blocks_override=700, scheduler_reserve_full_isl=False)
    a_hit_and_a_first_chunk_share_a_batch(engine)
    rows_only_grow_and_no_worker_is_told_otherwise(engine)
    a_first_chunk_of_one_token(engine)
    a_prompt_found_in_the_step_that_computes_it(engine)
    prompts_of_every_length_around_a_page(engine)
    an_aborted_request_gives_its_blocks_back(engine)
    a_session_of_streaming_inputs_is_refused(engine)


def a_hit_and_a_first_chunk_share_a_batch(engine: Engine) -> None:
    shared, fresh = (WORK[0][0][:200] + [77] * 40, 20), (WORK[1][0][-150:], 20)
    want = engine.alone([shared, fresh])
    engine.run([(WORK[0][0][:200], 1)])
    mixed: list[set[bool]] = []
    watch(engine, lambda out: mixed.append({r.num_computed_tokens > 0 for r in out.scheduled_new_reqs}))
    got = engine.run([shared, fresh])
    assert [r.tokens for r in got] == [r.tokens for r in want]
    assert got[0].found > 0 and {True, False} in mixed


def rows_only_grow_and_no_worker_is_told_otherwise(engine: Engine) -> None:
    """A running request's row is appended to: an exchanged block would leave a stale id on the worker. And no row outgrows the table."""
    rows: dict[str, list[int]] = {}
    widest = 0
    runner = engine.core.model_executor.driver_worker.worker.model_runner
    builder = builder_of(runner)
    assert isinstance(builder, FrameBuilder)

    def look(out: Any) -> None:
        nonlocal widest
        for request_id in out.kvstrata.preempted:
            rows.pop(request_id, None)
        for request_id in out.num_scheduled_tokens:
            row = [b.block_id for b in engine.scheduler.frames.req_to_blocks[request_id]]
            known = rows.get(request_id, [])
            assert row[: len(known)] == known and 0 not in row
            rows[request_id] = row
            widest = max(widest, len(row))

    watch(engine, look)
    engine.run(WORK)
    table = runner.input_batch.block_table.block_tables[0]
    spec = builder.spec
    assert widest <= most_frames(spec.settings, spec.layout, 1024) <= table.max_num_blocks_per_req
    # what workers hold is gone with the requests, but for those of the very last step
    assert len(builder.planner.tables) <= len(WORK)


def a_first_chunk_of_one_token(engine: Engine) -> None:
    """The engine puts it behind longer chunks, for it decodes nothing."""
    work = [(WORK[0][0][:255], 10), (WORK[3][0][:50], 10)]
    want = engine.alone(work)
    sizes: list[list[int]] = []
    watch(engine, lambda out: sizes.append(list(out.num_scheduled_tokens.values())))
    assert [r.tokens for r in engine.run(work)] == [r.tokens for r in want]
    assert [255, 1] in sizes


def a_prompt_found_in_the_step_that_computes_it(engine: Engine) -> None:
    twins = [(WORK[0][0][:180], 25)] * 3
    (want, *_) = engine.alone(twins[:1])
    got = engine.run(twins)
    assert all(r.tokens == want.tokens for r in got) and got[1].found == got[2].found == 160


def prompts_of_every_length_around_a_page(engine: Engine) -> None:
    work: list[Work] = [(WORK[3][0][:1] + WORK[4][0][:n], 5) for n in (0, 1, 29, 30, 31, 32, 33, 62, 63, 64, 65)]
    want = engine.alone(work)
    assert [r.tokens for r in engine.run(work)] == [r.tokens for r in want]


def an_aborted_request_gives_its_blocks_back(engine: Engine) -> None:
    llm = engine.llm.llm_engine
    for i, (ids, _) in enumerate(WORK[:4]):
        llm.add_request(f"abort-{i}", {"prompt_token_ids": ids}, SamplingParams(max_tokens=50, ignore_eos=True, detokenize=False))
    for _ in range(4):
        llm.step()
    assert engine.scheduler.frames.check_integrity()["held"] > 0
    llm.abort_request([f"abort-{i}" for i in range(4)])
    while llm.has_unfinished_requests():
        llm.step()
    assert engine.scheduler.frames.check_integrity()["held"] == 0


def test_graphs_are_declared_for_what_has_fixed_addresses_alone() -> None:
    """Steps of one token a request (tests/adapters/vllm/test_rows.py); what a chunk reads is made anew."""
    assert FrameBuilder._cudagraph_support is AttentionCGSupport.UNIFORM_SINGLE_TOKEN_DECODE
    assert PAGE_SIZE == 32


def a_session_of_streaming_inputs_is_refused(engine: Engine) -> None:
    processor = engine.llm.llm_engine.input_processor
    with pytest.raises(ValueError, match="streaming input sessions are not supported; accepted: requests whose prompt is whole"):
        processor.process_inputs("a", {"prompt_token_ids": [1, 2, 3]}, SamplingParams(), ("generate",), resumable=True)
