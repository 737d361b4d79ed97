"""Profiles of several models joined into one: how the shipped default was made, and what leave-one-model-out compares.

python -m kvstrata.calibrate.join qwen05 qwen15 smollm2 --out profile.json
"""

from pathlib import Path
from typing import Annotated

import typer

from kvstrata.policy.profile import load_profile, mean_profile


def join(names: list[str], out: Path) -> None:
    """Write the mean of the profiles `names` (shipped names or files). Raises ValueError for an unknown name or unlike codecs."""
    profiles = [load_profile(name) for name in names]
    codecs = sorted({str(p.made["codec"]) for p in profiles})
    if len(codecs) > 1:
        raise ValueError(f"the profiles are of codecs {', '.join(codecs)}; only profiles of one codec can be joined")
    made = {"models": [p.made["model"] for p in profiles], "codec": codecs[0], "parts": [dict(p.made) for p in profiles]}
    new = out.with_suffix(out.suffix + ".new")
    new.write_text(mean_profile(profiles, made).to_json(), encoding="utf-8")
    new.replace(out)


def main(
    names: Annotated[list[str], typer.Argument(help="Shipped profiles or files.")],
    out: Annotated[Path, typer.Option(help="The joined profile.")],
) -> None:
    """Join profiles of several models."""
    try:
        join(names, out)
    except (ValueError, OSError, KeyError) as error:
        raise typer.BadParameter(str(error)) from error


if __name__ == "__main__":
    typer.run(main)
