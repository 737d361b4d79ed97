"""Files of tensors and a JSON document that say themselves whether they are whole. Knows nothing of what is in them.

A file is a safetensors file. Its metadata hold the document and the SHA-256 of the whole file, in which the 64 digits of that number
itself count as zeros: no byte can change, be added or be missing unseen.
"""

import contextlib
import hashlib
import json
import os
import tempfile
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

FORMAT = "kvstrata session"
VERSION = "2"
_ZEROS = "0" * 64
_PIECE = 1 << 20

Tensors = dict[str, Tensor]


def write(path: str | Path, document: dict[str, Any], tensors: Tensors) -> None:
    """Write a file under a temporary name beside `path`, read it back, compare, and only then let it take its name: until then what was
    there stays. Raises OSError where it cannot be written or does not read back the same; nothing is left behind then."""
    path = Path(path)
    if path.exists() and not path.is_file():
        # a device or a pipe would be replaced by a file
        raise OSError(f"{path} is a folder or a device; accepted: the name of an ordinary file, new or old")
    handle, name = tempfile.mkstemp(prefix=f".{path.name}.", suffix=".tmp", dir=path.parent)
    os.close(handle)
    temporary = Path(name)
    try:
        text = json.dumps(document)
        save_file(tensors, temporary, metadata={"format": FORMAT, "version": VERSION, "document": text, "sha256": _ZEROS})
        _seal(temporary)
        try:
            there = read(temporary)
        except ValueError as error:
            raise OSError(f"{path} was not saved: {error}") from error
        if json.dumps(there[0]) != text or not _same(there[1], tensors):
            raise OSError(f"{path} was not saved: it reads back otherwise than it was written")
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    _sync(path.parent)


def read(path: str | Path) -> tuple[dict[str, Any], Tensors]:
    """The document and the tensors of a file, on the CPU. Raises ValueError, saying what is wrong, for a file that is none of ours, of
    another version, truncated or altered."""
    path = Path(path)
    metadata = _checked(path)
    try:
        return json.loads(metadata["document"]), load_file(path)
    except (SafetensorError, KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{path} cannot be read: {error}") from error


def _same(a: Tensors, b: Tensors) -> bool:
    """Bit by bit: NaN equals itself."""
    return a.keys() == b.keys() and all(a[k].dtype is b[k].dtype and a[k].shape == b[k].shape and _bits_same(a[k], b[k]) for k in a)


def _bits_same(x: Tensor, y: Tensor) -> bool:
    # no bytes can be seen of a tensor without any
    return not x.numel() or torch.equal(x.reshape(-1).view(torch.uint8), y.reshape(-1).view(torch.uint8))


def _checked(path: Path) -> dict[str, str]:
    """Metadata of a file that is whole."""
    size = path.stat().st_size
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if size < 8 or length > size - 8:
            raise ValueError(f"{path} is no saved session, or is truncated: it has {size} bytes")
        header = file.read(length)
    try:
        entries = json.loads(header)
        metadata = entries.pop("__metadata__")
        told, version, sha256 = metadata["format"], metadata["version"], metadata["sha256"]
        end = 8 + length + max((entry["data_offsets"][1] for entry in entries.values()), default=0)
    except (AttributeError, LookupError, TypeError, ValueError, RecursionError) as error:
        raise ValueError(f"{path} is no saved session, or its header is altered: {error!r}") from error
    if told != FORMAT:
        raise ValueError(f"{path} is of format {told!r}; accepted: {FORMAT!r}")
    if version != VERSION:
        raise ValueError(f"{path} is of version {version!r}; accepted: {VERSION!r}")
    if size < end:
        raise ValueError(f"{path} is truncated: it has {size} bytes of {end}")
    found = _digest(path, header, str(sha256))
    if found != sha256:
        raise ValueError(f"{path} is altered: its SHA-256 is {found}, and {sha256} when it was saved")
    return dict(metadata)


def _field(sha256: str) -> bytes:
    return f'"sha256":"{sha256}"'.encode()


def _digest(path: Path, header: bytes, sha256: str) -> str:
    """SHA-256 of a file whose header says that it is `sha256`, those digits as zeros."""
    digest = hashlib.sha256(len(header).to_bytes(8, "little") + header.replace(_field(sha256), _field(_ZEROS)))
    with path.open("rb") as file:
        file.seek(8 + len(header))
        while piece := file.read(_PIECE):
            digest.update(piece)
    return digest.hexdigest()


def _seal(path: Path) -> None:
    """Put the checksum into a file that has zeros there, and everything on the disk."""
    with path.open("r+b") as file:
        header = file.read(int.from_bytes(file.read(8), "little"))
        assert header.count(_field(_ZEROS)) == 1, "the checksum has one place"
        file.seek(8 + header.index(_field(_ZEROS)))
        file.write(_field(_digest(path, header, _ZEROS)))
        file.flush()
        os.fsync(file.fileno())


def _sync(folder: Path) -> None:
    """Put a new name on the disk, where the system can."""
    with contextlib.suppress(OSError):
        handle = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)
