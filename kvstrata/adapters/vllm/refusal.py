"""What the plugin does in a version of the engine that was not tested: it lets the engine run, unless a config asks for kvstrata."""

from typing import Any

from kvstrata.adapters.vllm.settings import CONFIG_KEY


def asks(vllm_config: Any) -> bool:
    """Whether a config of the engine asks for kvstrata."""
    additional = getattr(vllm_config, "additional_config", None)
    return isinstance(additional, dict) and CONFIG_KEY in additional


def refuse(found: str | None) -> None:
    """Let every config that asks for kvstrata be refused, naming the tested versions."""
    from vllm.config import VllmConfig

    from kvstrata.adapters.vllm import check_version

    original = VllmConfig.__post_init__

    def checked(self: Any) -> None:
        if asks(self):
            check_version(found)
        original(self)

    VllmConfig.__post_init__ = checked
