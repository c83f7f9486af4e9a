"""Races in the playground of a running server, in a real browser: what the page says of each, and a film of one.

::

    foresay serve smollm2 &
    python -m bench race --prompts mt_bench_question.jsonl --count 20 --busy 2
    python -m bench race --film docs/race.webp

Needs Chromium; `make setup` installs the rest (playwright, and Pillow for the film).
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import time
from argparse import ArgumentParser, Namespace
from collections.abc import Iterator
from contextlib import contextmanager
from io import BytesIO
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bench import BadOption, prompts

if TYPE_CHECKING:
    from playwright.sync_api import Page

#: Milliseconds that one race may take, and between two frames of a film, which stands still at its end for longer.
PATIENCE, FRAME, STILL = 300_000, 100, 3_000
FORM = "#playground form"
TIMES = re.compile(r"^(\S+ m?s) with drafts, (\S+ m?s) without\. (.*)$")


def options(parser: ArgumentParser) -> None:
    """Add its flags."""
    parser.add_argument("--url", default="http://127.0.0.1:8000", help="the server (default: %(default)s)")
    parser.add_argument("--prompts", type=Path, help="a file of prompts (default: those of the bench)")
    parser.add_argument("--count", type=int, default=20, help="races (default: %(default)s)")
    parser.add_argument("--skip", type=int, default=0, help="prompts of the file to leave out first")
    parser.add_argument("--length", type=int, default=128, help="tokens of an answer (default: %(default)s)")
    parser.add_argument("--busy", type=int, default=0, help="processes that keep cores busy meanwhile")
    parser.add_argument("--film", type=Path, metavar="FILE.webp", help="film one race, of the page's own first prompt")


def main(args: Namespace) -> dict[str, Any] | None:
    """Race, and return what the page said; nothing for a film."""
    with _page(args.url, args.film is not None) as page, _load(args.busy):
        if args.film:
            _film(page, args.film)
            return None
        rows = prompts.load(args.prompts, args.skip + args.count)[args.skip :]
        if len(rows) < args.count:
            raise BadOption(
                f"--prompts has {len(rows)} prompts after the first {args.skip}, and --count is {args.count}"
            )
        page.evaluate("document.querySelector('.settings').open = true")
        page.fill("[name=max_output_tokens]", str(args.length))
        races = [_race(page, row.text, number) for number, row in enumerate(rows, 1)]
    verdicts = sum(not one["open"] for one in races)
    print(f"{verdicts} of {len(races)} with a verdict on time")
    return {"busy": args.busy, "length": args.length, "verdicts": verdicts, "races": races}


@contextmanager
def _page(url: str, dark: bool) -> Iterator[Page]:
    from playwright.sync_api import sync_playwright

    chromium = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        page = browser.new_page(viewport={"width": 1100, "height": 760}, color_scheme="dark" if dark else "light")
        page.set_default_timeout(PATIENCE)
        page.goto(f"{url}/#playground")
        page.wait_for_selector("html[data-ready=yes]", state="attached")
        yield page
        browser.close()


@contextmanager
def _load(count: int) -> Iterator[None]:
    """So many processes that never wait."""
    busy = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(count)]
    try:
        yield
    finally:
        for one in busy:
            one.kill()
            one.wait()


def _race(page: Page, prompt: str, number: int) -> dict[str, Any]:
    """Ask both ways; what the page says then."""
    anew = page.locator("#playground button.anew")
    if anew.is_visible():  # or the context would grow from race to race
        anew.click()
    _begin(page, prompt)
    page.wait_for_selector(f"{FORM}[data-busy=false]")
    outcome = page.locator(".turn:last-child .race .outcome")
    passes, said = outcome.locator("b").inner_text(), outcome.locator("span").inner_text()
    clocks = page.locator(".turn:last-child .lanes .clock").all_inner_texts()
    found = TIMES.match(said)
    verdict = found[3] if found else said
    print(f"{number:3} {passes}; {' and '.join(clocks)}; {verdict}", flush=True)
    return {
        "passes": passes,
        "clocks": clocks,
        "agrees": found is not None and [found[1], found[2]] == clocks,
        "verdict": verdict,
        "open": verdict.startswith("Which is faster cannot be told"),
    }


def _begin(page: Page, prompt: str = "") -> None:
    page.check("#playground input[value=compare]", force=True)
    if prompt:
        page.fill("#prompt", prompt)
    page.click("#playground button[type=submit]")
    page.wait_for_selector(f"{FORM}[data-busy=true]")


def _film(page: Page, file: Path) -> None:
    """Write what the page shows from the click to the verdict, in real time."""
    from PIL import Image

    frames, begun = [], time.monotonic()
    _begin(page)
    while page.get_attribute(FORM, "data-busy") == "true":
        frames.append((time.monotonic() - begun, page.screenshot()))
        time.sleep(max(0.0, begun + len(frames) * FRAME / 1000 - time.monotonic()))
    frames.append((time.monotonic() - begun, page.screenshot()))
    lasts = [round(1000 * (then - at)) for (at, _), (then, _) in pairwise(frames)]
    first, *others = [Image.open(BytesIO(picture)) for _, picture in frames]
    first.save(file, save_all=True, append_images=others, duration=[*lasts, STILL], loop=0, quality=60, method=4)
    print(f"{file}: {len(frames)} frames, {file.stat().st_size / 1024:.0f} KB")
