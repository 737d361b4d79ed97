"""Tool calls that a real model writes over a cache held to a budget: they parse, name a tool, and have its arguments."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kvstrata.eval.models import load
from kvstrata.session import Session
from kvstrata.store.queries import ring_bytes


def tool(name: str, description: str, **parameters: str) -> dict[str, Any]:
    properties = {key: {"type": "string", "description": value} for key, value in parameters.items()}
    schema = {"type": "object", "properties": properties, "required": list(parameters)}
    return {"type": "function", "function": {"name": name, "description": description, "parameters": schema}}


TOOLS = [
    tool("get_weather", "Current weather of a city, with temperature, wind and humidity.", city="Name of the city",
         unit="celsius or fahrenheit"),
    tool("send_mail", "Send a mail to one person.", to="Address of the person", subject="Subject line", body="Text of the mail"),
    tool("list_files", "List the files of a folder, hidden ones too.", folder="Path of the folder"),
    tool("book_table", "Book a table in a restaurant.", restaurant="Name of the restaurant", time="Time of the day, such as 19:30",
         guests="How many people come"),
    tool("convert_money", "Convert an amount of one currency into another at today's rate.", amount="The amount",
         source="Currency code", target="Currency code"),
]  # fmt: skip
REQUIRED = {t["function"]["name"]: set(t["function"]["parameters"]["required"]) for t in TOOLS}
ASKS = {
    "What is the weather in Oslo, in celsius?": ("get_weather", {"city": "Oslo", "unit": "celsius"}),
    "Please list the files in /var/log.": ("list_files", {"folder": "/var/log"}),
}


@pytest.fixture(scope="module")
def qwen(model_path: Callable[[str], Path]) -> Any:
    return load(model_path("qwen05"))


@pytest.mark.parametrize("ask", ASKS)
def test_calls_written_under_a_budget_are_valid(qwen: Any, ask: str) -> None:
    model, tokenizer = qwen
    messages = [{"role": "system", "content": "You are an assistant that answers by calling tools."}, {"role": "user", "content": ask}]
    with Session(model, tokenizer, "full", capacity_tokens=64) as other:
        # 3.8 bits of what the conversation will be: sinks and the unfinished page are a fifth of that
        frames = int(3.8 * other.layout.elements(680) / 8)
    c = model.config
    # a ceiling in bytes is for the newest queries too
    limit = frames + ring_bytes(c.num_hidden_layers, c.num_attention_heads, c.hidden_size // c.num_attention_heads)
    with Session(model, tokenizer, "strata", budget_bytes=limit, policy_settings={"profile": "qwen05"}, capacity_tokens=900) as session:
        reply = session.chat(messages, TOOLS, max_new_tokens=45)
        assert reply.report.floor_bytes == 0
        assert session.frames_in_use * session.layout.frame_bytes <= frames
        assert session.bytes_in_use <= limit
        assert session.bits_per_element < 4.2
    # this model writes its calls as a fenced block
    text = reply.text
    call = json.loads(text[text.index("{") : text.rindex("}") + 1])
    assert set(call["arguments"]) == REQUIRED[call["name"]]
    assert (call["name"], call["arguments"]) == ASKS[ask]
