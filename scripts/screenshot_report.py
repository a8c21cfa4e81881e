"""Write a picture of a run's report: `python scripts/screenshot_report.py RUN_DIR [docs/report.png]`.

The page is drawn in headless Chromium without a network, at twice the resolution.
"""

from __future__ import annotations

import argparse
import shutil
import sys
from pathlib import Path

from playwright.sync_api import sync_playwright

from pilotage.core.store import write_file
from pilotage.report.browser import ARGUMENTS, chromium
from pilotage.report.page import build


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("run_dir", type=Path)
    parser.add_argument("output", type=Path, nargs="?", default=Path("docs/report.png"))
    parser.add_argument("--width", type=int, default=1184)
    parser.add_argument("--height", type=int, default=1500, help="0 takes the whole page")
    parser.add_argument("--dark", action="store_true")
    options = parser.parse_args()

    page_file = build(options.run_dir).resolve()
    executable = chromium()
    if executable is None:
        print("no Chromium found; run scripts/install-chromium.sh", file=sys.stderr)
        return 2
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=executable, args=ARGUMENTS)
        context = browser.new_context(
            viewport={"width": options.width, "height": options.height or 1000},
            device_scale_factor=2,
            color_scheme="dark" if options.dark else "light",
            offline=True,
        )
        page = context.new_page()
        page.goto(page_file.as_uri())

        def write(temporary: Path) -> None:
            picture = temporary.with_suffix(".png")
            page.screenshot(path=str(picture), full_page=not options.height)
            shutil.move(picture, temporary)

        write_file(options.output, write)
        browser.close()
    print(options.output)
    return 0


if __name__ == "__main__":
    sys.exit(main())
