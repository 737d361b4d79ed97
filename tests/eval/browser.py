"""A real browser for tests of reports."""

import shutil
import subprocess
from pathlib import Path

FLAGS = ("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking",
         "--disable-component-update", "--disable-sync", "--hide-scrollbars")  # fmt: skip


def browse(report: Path, profile: Path, view: str, *flags: str) -> str:
    """What Chromium prints of a page. profile: a folder of its own; view: a fragment of the address."""
    chromium = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    assert chromium, "the report's tests need chromium: apt-get install -y chromium"
    command = [chromium, *FLAGS, f"--user-data-dir={profile}", *flags, f"{report.as_uri()}{view}"]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=True).stdout
