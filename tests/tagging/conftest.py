"""Tokenizers, and a template of our own with all that a ChatML template can do."""

import copy
from typing import Any

import pytest
from transformers import AutoTokenizer

THINKING = """{%- if tools %}{{ '<|im_start|>system\\n' }}{% if messages[0].role == 'system' %}
{{- messages[0].content + '\\n\\n' }}{% endif %}
{{- '# Tools\\n<tools>' }}{% for tool in tools %}{{ '\\n' + tool | tojson }}{% endfor %}
{{- '\\n</tools>\\nCall: <tool_call>{}</tool_call><|im_end|>\\n' }}
{%- elif messages[0].role == 'system' %}{{ '<|im_start|>system\\n' + messages[0].content + '<|im_end|>\\n' }}{% endif %}
{%- set ns = namespace(last=0) %}{% for m in messages %}{% if m.role == 'user' %}{% set ns.last = loop.index0 %}{% endif %}{% endfor %}
{%- for m in messages %}{% if m.role == 'user' or (m.role == 'system' and not loop.first) %}
{{- '<|im_start|>' + m.role + '\\n' }}{% if m.content is string %}{{ m.content }}{% else %}{% for part in m.content %}
{{- part.text if part.type == 'text' else '<|vision_start|><|image_pad|><|vision_end|>' }}{% endfor %}{% endif %}{{ '<|im_end|>\\n' }}
{%- elif m.role == 'assistant' %}{{ '<|im_start|>assistant\\n' }}
{%- if m.reasoning_content and loop.index0 > ns.last %}
{{- '<think>\\n' + m.reasoning_content + '\\n</think>\\n\\n' }}{% endif %}{{ m.content }}
{%- for c in m.tool_calls or [] %}{{ '\\n' if m.content or not loop.first }}
{{- '<tool_call>\\n{"name": "' + c.function.name + '", "arguments": ' }}
{{- c.function.arguments | tojson + '}\\n</tool_call>' }}{% endfor %}{{ '<|im_end|>\\n' }}
{%- elif m.role == 'tool' %}{% if loop.first or messages[loop.index0 - 1].role != 'tool' %}{{ '<|im_start|>user' }}{% endif %}
{{- '\\n<tool_response>\\n' + m.content + '\\n</tool_response>' }}
{%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}{{ '<|im_end|>\\n' }}{% endif %}{% endif %}{% endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"""
"""Thoughts of the current turn only, parallel calls, results in a user's block, images: Qwen3's habits, in our words."""


@pytest.fixture(scope="session")
def smollm2(model_path) -> Any:
    return AutoTokenizer.from_pretrained(model_path("smollm2"))


@pytest.fixture(scope="session")
def qwen(model_path) -> Any:
    return AutoTokenizer.from_pretrained(model_path("qwen05"))


@pytest.fixture(scope="session")
def thinking(qwen) -> Any:
    tokenizer = copy.deepcopy(qwen)
    tokenizer.add_tokens(["<think>", "</think>", "<tool_response>", "</tool_response>"])
    tokenizer.chat_template = THINKING
    return tokenizer


@pytest.fixture(scope="session", params=["smollm2", "qwen", "thinking"])
def tokenizer(request) -> Any:
    return request.getfixturevalue(request.param)
