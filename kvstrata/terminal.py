"""What the commands say to a terminal and how they fail: one line, no traceback. Imports torch and the rest inside functions."""

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer
from rich.console import Console
from rich.text import Text

if TYPE_CHECKING:
    from kvstrata.eval.evaluate import Progress

# what is printed holds text of users and models: brackets and colons in it are not markup
out, err = (Console(stderr=stderr, markup=False, emoji=False, highlight=False) for stderr in (False, True))
WIDEST = 1000
"""Columns that a table may take in a file or a pipe; it takes no more than its text needs."""


def complain(message: object) -> None:
    """One line on stderr."""
    line = " ".join(part.strip() for part in str(message).splitlines() if part.strip())
    err.print(Text.assemble(("error", "bold red"), ": ", line), soft_wrap=True)


def print_table(table: Any) -> None:
    """A table on stdout; in a file or a pipe, where nobody has set COLUMNS, as wide as its text rather than cut at 80 columns."""
    free = not out.is_terminal and "COLUMNS" not in os.environ
    (Console(width=WIDEST, markup=False, emoji=False, highlight=False) if free else out).print(table)


def fail(message: object, code: int = 2) -> typer.Exit:
    """One line on stderr; raise what comes back."""
    complain(message)
    return typer.Exit(code)


def check_output(option: str, path: Path) -> None:
    """Before anything runs: raise ValueError where no file can be written at `path`. What is there stays as it is."""
    try:
        if path.exists() and not path.is_file() and not path.is_dir():
            return  # a pipe or a device: opening it is an event to whoever reads
        is_new = not path.exists()
        with path.open("a"):
            pass
        if is_new:
            path.unlink()
    except OSError as error:
        raise ValueError(f"{option} {str(path)!r} cannot be written: {os.strerror(error.errno or 0)}; accepted: a file") from error


@contextlib.contextmanager
def usage_errors() -> Iterator[None]:
    """A ValueError or a file that cannot be read is the caller's mistake: one line and exit code 2."""
    try:
        yield
    except (ValueError, OSError) as error:
        raise fail(error) from error


def load_model(name: str, device: str = "cpu") -> tuple[Any, Any]:
    """Model in float32 and tokenizer of a folder, a hub id or a short name."""
    from transformers.utils import logging

    from kvstrata.eval.models import load

    logging.disable_progress_bar()
    try:
        return load(name, device=device)
    except (ValueError, OSError) as error:
        raise fail(error) from error
    except RuntimeError as error:  # it could not be fetched
        raise fail(error, 1) from error


@contextlib.contextmanager
def progress_bar() -> Iterator["Progress"]:
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    with Progress(TextColumn("{task.description}", markup=False), BarColumn(), TimeElapsedColumn(), console=err, transient=True) as bar:
        task = bar.add_task("", total=None)
        yield lambda what, done, total: bar.update(task, description=what, completed=done, total=total)


def load_tokenizer(name: str) -> Any:
    from transformers import AutoTokenizer

    from kvstrata.eval.models import MODELS, fetch

    try:
        return AutoTokenizer.from_pretrained(str(fetch(name)) if name in MODELS else name)
    except (OSError, ValueError) as error:
        raise fail(f"no tokenizer in {name!r}: {[*str(error).splitlines(), type(error).__name__][0]}") from error
    except RuntimeError as error:  # it could not be fetched
        raise fail(error, 1) from error
