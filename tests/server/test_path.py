"""A streamed chat with tools passes the modules that docs/structures.md lists, on its way to the engine."""

from __future__ import annotations

import re
import sys
import threading
from pathlib import Path

import foresay.server
from tests.parsers.asking import TOOL, chunks_of, engine_saying
from tests.parsers.families import family_tokenizer
from tests.server.scripted import served

SERVER = Path(foresay.server.__path__[0])
STRUCTURES = Path(__file__).parents[2] / "docs" / "structures.md"
CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris"}}\n</tool_call>'


def listed() -> tuple[int, set[str]]:
    """How many modules the page counts, and those that it names."""
    count, rest = re.split(r"functions of (\d+) modules of `server` run:", STRUCTURES.read_text("utf-8"))[1:]
    named = re.findall(r"`([\w/]+)`: ([\w, /]+)", rest.partition("\n\nforesay")[0].partition("\n\n`foresay")[0])
    return int(count), {f"{room}/{name.strip()}.py" for room, names in named for name in names.split(",")}


async def test_the_page_lists_the_modules_that_a_request_passes(monkeypatch):
    passed: set[str] = set()
    begun = False

    def note(frame, event, argument):
        file = frame.f_code.co_filename
        if begun and event == "call" and file.startswith(f"{SERVER}/"):
            passed.add(file.removeprefix(f"{SERVER}/"))

    tokenizer = family_tokenizer("qwen3")
    engine = engine_saying(tokenizer, CALL, 3)
    add = engine.add

    def arrive(*request):
        nonlocal begun
        begun = False
        add(*request)

    monkeypatch.setattr(engine, "add", arrive)
    threading.setprofile(note)  # a prompt is rendered in a thread
    try:
        async with served(engine, tokenizer) as client:
            await chunks_of(client, tools=[TOOL])
            begun = True
            sys.setprofile(note)
            await chunks_of(client, tools=[TOOL])
    finally:
        sys.setprofile(None)
        threading.setprofile(None)
    count, modules = listed()
    there = {module for module in modules if module.startswith("engine_process/")}  # the engine here is a script
    assert passed == modules - there
    assert count == len(modules)
