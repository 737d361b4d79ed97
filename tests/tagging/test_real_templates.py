"""Real templates of many families: each content has its role and turn, and both entrances agree on every token."""

import re

import pytest
from transformers import AutoTokenizer

from kvstrata.tagging import Tagger, tag_ids, tag_messages
from kvstrata.tagging.template import reader
from tests.tagging.real_templates import fetch

UNREADABLE = {
    "Apriel-1.6-15b-Thinker-fixed": "an answer opens as a thought does, and nothing but its own words says which it is",
    "HuggingFaceTB-SmolLM3-3B": "drops tool calls, and writes a tool's result exactly as a user's message",
    "NVIDIA-Nemotron-Nano-v2": "a last message of the assistant opens as a thought does",
    "fireworks-ai-llama-3-firefunction-v2": "needs a variable beyond messages and tools",
}
"""Templates of the collection whose text does not say what its tokens are, and why."""
NAMES = sorted({path.stem for path in fetch().glob("*.jinja")} - set(UNREADABLE))
SPECIAL = re.compile(
    r"<[|｜][^<>\n{}'\"]{1,40}[|｜]>|</?(?:think|tool_call|tool_response|tools?_result|seed:[a-z_]+|minimax:[a-z_]+|observation)>"
    r"|\[/?[A-Z][A-Z_]{2,30}\]|<(?:start|end)_of_turn>|<bos>|<eos>|</?s>|\]~!?b?\[|\[e~\["
)
"""What such templates' own tokenizers hold as one token."""

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": name,
            "description": description,
            "parameters": {"type": "object", "properties": {key: {"type": "string", "description": about}}, "required": [key]},
        },
    }
    for name, description, key, about in (
        ("get_weather", "Report the weather of a town", "town", "Name of the town"),
        ("send_letter", "Post a letter to someone", "letter", "What to write"),
    )
]


def system():
    return {"role": "system", "content": "You serve patiently. Obey house rules always."}


def user(word):
    return {"role": "user", "content": f"Please look at question number {word} for me"}


def answer(word, thought=""):
    message = {"role": "assistant", "content": f"My reply about the {word} is ready now."}
    return {**message, "reasoning_content": thought, "thinking": thought} if thought else message


def call(i, name, **arguments):
    return {"id": f"abcdef{i:03d}", "type": "function", "function": {"name": name, "arguments": arguments}}


def calls(*made):
    return {"role": "assistant", "content": "", "tool_calls": list(made)}


def result(i, name, content):
    return {"role": "tool", "name": name, "tool_call_id": f"abcdef{i:03d}", "content": content}


RAIN, STORM, POSTED = "mild and rainy until Tuesday", "a storm is approaching fast", "the letter was posted"
CONVERSATIONS = {
    "plain": ([system(), user("seven"), answer("castle"), user("eleven"), answer("harbour"), user("nineteen")], None),
    "no system": ([user("seven"), answer("castle"), user("eleven"), answer("harbour"), user("nineteen")], None),
    "a tool": (
        [system(), user("seven"), calls(call(1, "get_weather", town="Lower Plovdiv")), result(1, "get_weather", RAIN), answer("castle"),
         user("eleven"), answer("meadow")], TOOLS),
    "parallel tools": (
        [system(), user("seven"), calls(call(1, "get_weather", town="Upper Varna"), call(2, "send_letter", letter="Dear aunt Petunia")),
         result(1, "get_weather", STORM), result(2, "send_letter", POSTED), answer("harbour"), user("eleven")], TOOLS),
    "thoughts": (
        [system(), user("seven"), answer("castle", "I ponder quietly over alpha first"), user("eleven"),
         answer("harbour", "I ponder quietly over beta first")], None),
}  # fmt: skip


def expected(messages, tools):
    """(text, roles it may have, turn) of each content. A template may drop one, or put the system message into the user's."""
    out = [(tool["function"]["description"], {"inst"}, None) for tool in tools or []]
    turn = 0
    for message in messages:
        turn += message["role"] == "user"
        role = {"system": {"inst"}, "user": {"user"}, "assistant": {"assistant"}, "tool": {"obs"}}[message["role"]]
        out += [(message.get("reasoning_content"), {"reasoning"}, turn), (message["content"], role, turn if role != {"inst"} else None)]
        out += [(value, {"tool_call"}, turn) for c in message.get("tool_calls", []) for value in c["function"]["arguments"].values()]
    return [item for item in out if item[0]]


@pytest.fixture(scope="session")
def vocabulary(model_path):
    """The vocabulary of a model that we have, with the special tokens of all templates added."""
    tokenizer = AutoTokenizer.from_pretrained(model_path("qwen05"))
    found = {token for name in NAMES for token in SPECIAL.findall((fetch() / f"{name}.jinja").read_text())}
    tokenizer.add_tokens(sorted(found), special_tokens=True)
    return tokenizer


@pytest.fixture(scope="session", params=NAMES)
def real(request, vocabulary):
    vocabulary.chat_template = (fetch() / f"{request.param}.jinja").read_text()
    return vocabulary


def test_each_content_has_its_role_and_both_entrances_agree(real):
    rendered = 0
    merged = reader(real).skeleton.merged_system
    for name, (messages, tools) in CONVERSATIONS.items():
        try:
            tagged = tag_messages(real, messages, tools)
        except ValueError as refusal:
            # no system role, no tools, one call at once: the template's own limits
            print(name, refusal)
            continue
        rendered += 1
        assert tagged.token_ids == real.apply_chat_template(messages, tools=tools, tokenize=True, return_dict=False)
        assert tag_ids(real, tagged.token_ids) == tagged.spans
        offsets = real(tagged.text, add_special_tokens=False, return_offsets_mapping=True)["offset_mapping"]
        labels = [(str(s.role), s.turn) for s in tagged.spans for _ in range(s.end - s.start)]
        assert len(labels) == len(tagged.token_ids)
        for text, roles, turn in expected(messages, tools):
            at = tagged.text.find(text)
            inside = [labels[i] for i, (start, end) in enumerate(offsets) if at >= 0 and at <= start and end <= at + len(text)]
            accepted = roles | {"user"} if merged and roles == {"inst"} else roles
            assert {role for role, _ in inside} <= accepted, (name, text)
            assert turn is None or {t for _, t in inside} <= {turn}, (name, text)
    assert rendered >= 1


NO_OPENING = {"deepseek-ai-DeepSeek-V3.1", "deepseek-ai-DeepSeek-V3.2", "unsloth-mistral-Devstral-Small-2507"}
"""Templates that write nothing before an answer which a conversation begins with: it is read as instructions."""


def test_a_conversation_that_begins_with_an_answer(real, request):
    """Its beginning was cut off."""
    for rest in ([], [user("seven"), answer("harbour")]):
        try:
            tagged = tag_messages(real, [answer("castle"), *rest])
        except ValueError as refusal:
            # the template's own limit
            assert "refuses this conversation" in str(refusal)
            continue
        at = tagged.text.find(answer("castle")["content"])
        if at < 0:
            continue
        assert tag_ids(real, tagged.token_ids) == tagged.spans
        offsets = real(tagged.text, add_special_tokens=False, return_offsets_mapping=True)["offset_mapping"]
        labels = [(str(s.role), s.turn) for s in tagged.spans for _ in range(s.end - s.start)]
        inside = {labels[i] for i, (start, end) in enumerate(offsets) if at <= start and end <= at + len(answer("castle")["content"])}
        assert inside == {("inst" if request.node.callspec.params["real"] in NO_OPENING else "assistant", 0)}


def takes_no_tools(tokenizer):
    try:
        tokenizer.apply_chat_template(CONVERSATIONS["no system"][0], tokenize=False)
    except TypeError:
        return False
    return True


def test_token_by_token_is_the_same(real):
    # some templates read the tools without asking whether there are any
    tools = None if takes_no_tools(real) else TOOLS
    ids = tag_messages(real, CONVERSATIONS["no system"][0], tools).token_ids
    tagger = Tagger(real)
    for token in ids:
        tagger.extend([token])
    assert tagger.spans == tag_ids(real, ids)
