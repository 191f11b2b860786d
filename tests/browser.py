"""A page in headless Chromium: what it looks like after its script has run, and what it wrote to the console."""

from __future__ import annotations

import re
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

import pytest

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")
CHROMIUM = next((path for name in NAMES if (path := shutil.which(name))), None)

needs_chromium = pytest.mark.skipif(CHROMIUM is None, reason="no Chromium on this machine")


@dataclass(frozen=True)
class Loaded:
    """A page after its script has run."""

    dom: str
    console: list[str]
    """Errors and other lines of the page's console."""

    def charts(self) -> dict[str, str]:
        """The markup of each card with a chart, by its id."""
        parts = re.split(r'data-chart="([^"]+)"', self.dom)[1:]
        return dict(zip(parts[::2], parts[1::2], strict=True))


def load(page: Path, profile: Path, suffix: str = "", width: int = 1200) -> Loaded:
    """Open a page from its file, without a network.

    Args:
        page: the HTML file.
        profile: an empty folder for the browser's own files.
        suffix: of the address, e.g. ``#sample=1``.
        width: of the window.
    """
    assert CHROMIUM is not None
    options = ["--headless=new", "--disable-gpu", "--no-first-run", f"--user-data-dir={profile}"]
    options += [f"--window-size={width},900", "--enable-logging=stderr", "--virtual-time-budget=4000"]
    options += ["--host-resolver-rules=MAP * ~NOTFOUND"]
    options.append("--no-sandbox")  # it needs rights that root and containers lack; the page is our own
    done = subprocess.run(
        [CHROMIUM, *options, "--dump-dom", f"{page.resolve().as_uri()}{suffix}"],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return Loaded(done.stdout, [line for line in done.stderr.splitlines() if "CONSOLE" in line])
