"""The states of the automaton, and the role that a token has in each."""

from enum import StrEnum

from kvstrata.types import Role


class State(StrEnum):
    """What the text at a place is. Before the first mark it is START; between two messages, GAP."""

    START = "start"
    INST = "inst"
    SCHEMA = "schema"
    USER = "user"
    ASSISTANT = "assistant"
    REASONING = "reasoning"
    CALL = "call"
    OBS = "obs"
    GAP = "gap"


ROLES = {State.START: Role.INST, State.INST: Role.INST, State.SCHEMA: Role.INST, State.USER: Role.USER, State.ASSISTANT: Role.ASSISTANT,
         State.REASONING: Role.REASONING, State.CALL: Role.TOOL_CALL, State.OBS: Role.OBS, State.GAP: Role.DELIM}  # fmt: skip
