"""Where a Chromium is, for the test and the picture of the report. The product itself never starts one."""

from __future__ import annotations

import os
import shutil

# No background traffic: the test asserts that the page asks the network for nothing.
ARGUMENTS = [
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
]


def chromium() -> str | None:
    """The path of a Chromium, or None. `PILOTAGE_CHROMIUM` names another one."""
    named = os.environ.get("PILOTAGE_CHROMIUM")
    if named:
        return shutil.which(named)
    for name in ("chromium", "chromium-browser", "google-chrome"):
        found = shutil.which(name)
        if found:
            return found
    return None
