"""What a generated reply says: text, thoughts and tool calls. Knows nothing of templates: the markup is the ChatML family's."""

import json
import re
from typing import Any

_CALL = re.compile(r"<tool_call>\s*(.*?)\s*(?:</tool_call>|\Z)", re.DOTALL)
_THINK = re.compile(r"\A\s*(?:<think>)?(.*?)</think>", re.DOTALL)


def parse_reply(text: str) -> dict[str, Any]:
    """A reply as an OpenAI-style assistant message.

    Thoughts go to `reasoning_content`, each well-formed <tool_call> to `tool_calls`; what does not parse stays in `content`.
    """
    message: dict[str, Any] = {"role": "assistant"}
    thought = _THINK.match(text) if "</think>" in text else None
    if thought:
        message["reasoning_content"] = thought[1].strip()
        text = text[thought.end() :]
    calls: list[dict[str, Any]] = []

    def take(match: re.Match[str]) -> str:
        try:
            call = json.loads(match[1])
            function = {"name": call["name"], "arguments": call.get("arguments", {})}
        except (ValueError, KeyError, TypeError, AttributeError):
            return match[0]
        calls.append({"type": "function", "function": function})
        return ""

    message["content"] = _CALL.sub(take, text).strip()
    if calls:
        message["tool_calls"] = calls
    return message
