"""The screens of `rooftree plan` in docs/images: its table, its page on a phone, its pictures.

    python -m lab.studies.plan_screens

Chromium photographs the page, light and dark, where it is installed; that is said where it is not.
"""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess
import tempfile
from pathlib import Path

from rich.console import Console
from rich.text import Text

from lab.studies.planning_page import output_of

IMAGES = Path(__file__).parents[2] / "docs" / "images"
COMMAND = """rooftree plan --target Qwen/Qwen3-8B \\
    --gpus a100-sxm-80gb,h100-sxm,l40s,rtx-pro-6000-server \\
    --prompt-tokens 1000 --output-tokens 400 --rate 5/s \\
    --slo tpot=30ms,ttft=1s --acceptance gsm8k \\
    --price a100-sxm-80gb=1.5,h100-sxm=2.5,l40s=0.9,rtx-pro-6000-server=1.6"""
PHONE = (390, 1700)  # pixels
SHOWN_LINES = 60  # of the terminal


def table_screen(path: Path, shown: str) -> None:
    """The terminal of 80 columns with the command and its output, as SVG."""
    lines = f"$ {COMMAND}\n{shown}".splitlines()[:SHOWN_LINES]
    with open("/dev/null", "w", encoding="utf-8") as nowhere:
        console = Console(record=True, width=80, file=nowhere, highlight=False)
        console.print(Text("\n".join(lines)))
    svg = console.export_svg(title="80 columns", unique_id="plan")
    svg = re.sub(r"@font-face \{.*?\}\n", "", svg, flags=re.DOTALL)  # fonts that it would fetch
    path.write_text("\n".join(line.rstrip() for line in svg.splitlines()) + "\n", encoding="utf-8")


def page_screens(page: Path) -> list[Path]:
    """The page as a phone shows it, light and dark; none where there is no Chromium."""
    browser = shutil.which("chromium")
    if browser is None:
        return []
    screens = {
        IMAGES / "plan-phone.png": [],
        IMAGES / "plan-phone-dark.png": ["--blink-settings=preferredColorScheme=0"],
    }
    for path, options in screens.items():
        with tempfile.TemporaryDirectory() as profile:
            subprocess.run(
                [browser, "--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars",
                 "--disable-dev-shm-usage", f"--user-data-dir={profile}", *options,
                 f"--window-size={PHONE[0]},{PHONE[1]}", f"--screenshot={path}", page.as_uri()],
                check=True, capture_output=True, timeout=120,
            )  # fmt: skip
    return list(screens)


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        page = Path(folder) / "plan.html"
        words = ["--html", str(page), "--plot", str(IMAGES / "plan.png")]
        shown = output_of(f"{COMMAND} {shlex.join(words)}")
        lines = [line for line in shown.splitlines() if not line.startswith(("picture:", "page:"))]
        table_screen(IMAGES / "plan-table.svg", "\n".join(lines))
        if not page_screens(page):
            print("the page was not photographed: chromium is not installed")
    output_of(f"rooftree profiles plot h100-sxm/qwen3-8b --output {IMAGES / 'profile.png'}")


if __name__ == "__main__":
    main()
