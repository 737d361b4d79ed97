"""Real chat templates, from a source archive of llama-cpp-python, which carries a collection of them."""

import hashlib
import os
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

ROOT = Path(__file__).parents[2]
REQUIREMENT = "llama-cpp-python==0.3.36"
SHA256 = "832db0699007f1be95a7e41ef12e88926b02ba836461e36a36372db2760c1a2e"
MEMBER = "/vendor/llama.cpp/models/templates/"


def folder() -> Path:
    """Beside the test models: a folder that git ignores."""
    return Path(os.environ.get("KVSTRATA_MODELS", ROOT / "models")) / "templates"


def fetch() -> Path:
    """Folder of *.jinja; downloaded once, hash pinned. Raises RuntimeError with pip's words where that fails."""
    target = folder()
    if (target / ".whole").exists():
        return target
    target.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as scratch:
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--no-binary", ":all:", "--dest", scratch, REQUIREMENT]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        archives = list(Path(scratch).glob("*.tar.gz"))
        if not archives:
            raise RuntimeError(f"pip could not download {REQUIREMENT}: {done.stderr.strip()[-500:]}")
        if (digest := hashlib.sha256(archives[0].read_bytes()).hexdigest()) != SHA256:
            raise RuntimeError(f"{REQUIREMENT} has SHA-256 {digest}; {SHA256} is pinned")
        with tarfile.open(archives[0]) as archive:
            for member in archive:
                source = archive.extractfile(member) if MEMBER in member.name and member.name.endswith(".jinja") else None
                if source is not None:
                    (target / Path(member.name).name).write_bytes(source.read())
    (target / ".whole").touch()
    return target
