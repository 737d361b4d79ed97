"""The OpenAI-compatible server over HTTP, as `kvstrata serve` starts it: tools over many turns, many clients, hostile ones, a restart."""

import asyncio
import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import openai
import pytest

MODEL = "smollm2"
PARAMETERS = {"type": "object", "properties": {"word": {"type": "string", "enum": ["strata", "rock"]}}, "required": ["word"]}
TOOLS: Any = [{"type": "function", "function": {"name": "look_up", "parameters": PARAMETERS}}]


class Server:
    """`kvstrata serve` in a process of its own."""

    def __init__(self, model: Path, log: Path) -> None:
        with contextlib.closing(socket.socket()) as s:
            s.bind(("127.0.0.1", 0))
            self.port = s.getsockname()[1]
        flags = f"--port {self.port} --served-model-name {MODEL} --max-model-len 2048 --max-num-batched-tokens 512 --enforce-eager"
        flags += " --enable-auto-tool-choice --tool-call-parser hermes --num-gpu-blocks-override 4000"
        line = [sys.executable, "-m", "kvstrata", "serve", str(model), "--budget-bits", "5.0", "--set", "horizon=1024", *flags.split()]
        env = os.environ | {"VLLM_ENABLE_V1_MULTIPROCESSING": "1", "VLLM_LOGGING_LEVEL": "INFO"}
        self.log = log
        with log.open("a") as out:
            self.process = subprocess.Popen(line, env=env, stdout=out, stderr=subprocess.STDOUT, start_new_session=True)
        self._wait()
        self.client = openai.OpenAI(base_url=f"http://127.0.0.1:{self.port}/v1", api_key="none", timeout=300, max_retries=0)

    def _wait(self) -> None:
        end = time.monotonic() + 900
        while time.monotonic() < end:
            assert self.process.poll() is None, self.log.read_text()[-3000:]
            with contextlib.suppress(OSError):
                self.get("/health")
                return
            time.sleep(1)
        raise AssertionError(f"no server within 900 s: {self.log.read_text()[-3000:]}")

    def get(self, path: str) -> str:
        with urllib.request.urlopen(f"http://127.0.0.1:{self.port}{path}", timeout=30) as answer:
            return str(answer.read().decode())

    def metric(self, name: str, label: str = "") -> float:
        found = re.findall(rf"^{name}{{[^}}]*{label}[^}}]*}} (\S+)$", self.get("/metrics"), re.MULTILINE)
        assert found, (name, label)
        return sum(map(float, found))

    def stop(self, how: signal.Signals = signal.SIGTERM) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, how)
        self.process.wait(60)


@pytest.fixture(scope="module")
def server(model_path: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    running = Server(model_path("smollm2"), tmp_path_factory.mktemp("server") / "log")
    yield running
    running.stop()


def ask(server: Server, content: str, **arguments: Any) -> Any:
    given = {"max_tokens": 16, "temperature": 0, **arguments}
    return server.client.chat.completions.create(model=MODEL, messages=[{"role": "user", "content": content}], **given)


def test_the_capacity_is_in_the_log_and_in_the_metrics(server: Server) -> None:
    ask(server, "Hello")
    log = server.log.read_text()
    found = re.search(r"KV capacity ([\d,]+) tokens, ([\d.]+) times the ([\d,]+) of bfloat16", log)
    assert found, log[-2000:]
    capacity, times, dense = (float(x.replace(",", "")) for x in found.groups())
    assert server.metric("kvstrata_capacity_tokens") == capacity and server.metric("kvstrata_bf16_tokens") == dense
    assert times == pytest.approx(capacity / dense, abs=0.01) and times > 2.5
    assert server.metric("kvstrata_frames") == 3999
    assert server.metric("kvstrata_held_frames") == server.metric("kvstrata_computed_tokens") == 0, "nothing runs any more"
    # the engine's own line says the same, within one request
    own = re.search(r"GPU KV cache size: ([\d,]+) tokens", log)
    assert own is not None and float(own[1].replace(",", "")) == pytest.approx(capacity, rel=0.01)


def test_a_conversation_of_many_turns_with_tools(server: Server) -> None:
    messages: list[Any] = [{"role": "system", "content": "You look words up in a dictionary. " * 12}]
    hits = []
    for turn in range(4):
        messages.append({"role": "user", "content": f"What does word number {turn} mean?"})
        before = server.metric("kvstrata_found_pages_total")
        reply = server.client.chat.completions.create(model=MODEL, messages=messages, tools=TOOLS, max_tokens=24, temperature=0)
        hits.append(server.metric("kvstrata_found_pages_total") - before)
        message = reply.choices[0].message
        assert reply.usage is not None and reply.usage.completion_tokens > 0
        # SmolLM2-135M writes no calls of its own; the history has them, as an agent's has
        call = {"id": f"c{turn}", "type": "function", "function": {"name": "look_up", "arguments": f'{{"word": "{turn}"}}'}}
        messages.append({"role": "assistant", "content": message.content or "", "tool_calls": [call]})
        messages.append({"role": "tool", "tool_call_id": f"c{turn}", "content": f"word number {turn}: a thing of {turn} parts"})
    # each turn finds the pages of the one before
    assert hits[1] > 0 and hits[3] > hits[1]


def test_a_forced_tool_call_is_parsed(server: Server) -> None:
    choice: Any = {"type": "function", "function": {"name": "look_up"}}
    reply = ask(server, "Look up the word strata.", tools=TOOLS, tool_choice=choice, max_tokens=60)
    (call,) = reply.choices[0].message.tool_calls
    assert call.function.name == "look_up" and json.loads(call.function.arguments)["word"] in ("strata", "rock")


def test_streaming_gives_the_same_tokens(server: Server) -> None:
    whole = ask(server, "Count to ten.").choices[0].message.content
    parts = [c.choices[0].delta.content or "" for c in ask(server, "Count to ten.", stream=True) if c.choices]
    assert len(parts) > 3 and "".join(parts) == whole


def test_sixteen_mixed_requests_at_once(server: Server) -> None:
    client = openai.AsyncOpenAI(base_url=f"http://127.0.0.1:{server.port}/v1", api_key="none", timeout=500, max_retries=0)
    prefix = "Strata are layers of rock. " * 40

    async def one(i: int) -> int:
        content = (prefix if i % 2 else "") + f"Question {i}: " + "why? " * (i * 7)
        reply = await client.chat.completions.create(
            model=MODEL,
            messages=[{"role": "user", "content": content}],
            max_tokens=8 + 3 * i,
            temperature=0,
            extra_body={"ignore_eos": True},
        )
        assert reply.usage is not None
        return reply.usage.completion_tokens

    async def all_of_them() -> list[int]:
        return await asyncio.gather(*(one(i) for i in range(16)))

    assert asyncio.run(all_of_them()) == [8 + 3 * i for i in range(16)]


def test_a_prompt_that_is_too_long_is_refused(server: Server) -> None:
    with pytest.raises(openai.BadRequestError, match="2048"):
        ask(server, "word " * 5000)
    assert ask(server, "Hello").choices


@pytest.mark.parametrize(
    ("extra", "message"),
    [
        ({"kvstrata_budget_bits": 16}, "accepted: at most the server's, 5"),
        ({"kvstrata_budget_bits": 1.5}, "budget_bits 1.5 is below 2.38"),
        ({"kvstrata_budget_bits": "many"}, "a number above 0"),
        ({"kvstrata_budget_bits": [3.0]}, "a number above 0"),
        ({"kvstrata_tier": "INT2"}, "runs under a budget"),
        ({"kvstrata_bits": 3}, "unknown extra argument"),
        ({"kvstrata_budget_bits": "9" * 3_000_000}, "a number above 0"),
    ],
    ids=["above", "below", "text", "list", "tier", "name", "huge"],
)
def test_hostile_extra_arguments_get_400_and_others_go_on(server: Server, extra: dict[str, Any], message: str) -> None:
    with pytest.raises(openai.BadRequestError, match=message) as caught:
        ask(server, "Hello", extra_body={"vllm_xargs": extra})
    assert caught.value.status_code == 400 and len(str(caught.value)) < 1000
    assert ask(server, "Hello").choices


def test_a_request_may_ask_for_less(server: Server) -> None:
    reply = ask(server, "Tell me of rocks. " * 30, extra_body={"vllm_xargs": {"kvstrata_budget_bits": 4.0}})
    assert reply.choices[0].message.content


def test_killed_and_started_again(server: Server, model_path: Callable[[str], Path]) -> None:
    want = ask(server, "Count to five.").choices[0].message.content
    server.stop(signal.SIGKILL)
    with pytest.raises(openai.APIConnectionError):
        ask(server, "Count to five.")
    server.__init__(model_path("smollm2"), server.log)
    assert ask(server, "Count to five.").choices[0].message.content == want
