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

SERVER = f"{foresay.server.__path__[0]}/"
PAGE = (Path(__file__).parents[2] / "docs" / "structures.md").read_text("utf-8")


async def test_the_page_lists_the_modules_that_a_request_passes(monkeypatch):
    tokenizer, passed, on = family_tokenizer("qwen3"), set[str](), False
    engine = engine_saying(tokenizer, "Sure.", 3)
    add = engine.add

    def note(frame, event, argument):
        if on and event == "call" and (file := frame.f_code.co_filename).startswith(SERVER):
            passed.add(file.removeprefix(SERVER))

    def arrive(*request):
        nonlocal on
        on = False
        add(*request)

    monkeypatch.setattr(engine, "add", arrive)
    threading.setprofile(note)  # a prompt is rendered in a thread
    try:
        async with served(engine, tokenizer) as client:
            await chunks_of(client, tools=[TOOL])
            on = True
            sys.setprofile(note)
            await chunks_of(client, tools=[TOOL])
    finally:
        sys.setprofile(None)
        threading.setprofile(None)
    count, text = re.split(r"functions of (\d+) modules of `server` run:", PAGE)[1:]
    named = re.findall(r"`([\w/]+)`: ([\w, /]+)", text.partition("\n\n`foresay generate`")[0])
    listed = {f"{room}/{name.strip()}.py" for room, names in named for name in names.split(",")}
    there = {module for module in listed if module.startswith("engine_process/")}  # the engine here is a script
    assert (passed, len(listed)) == (listed - there, int(count))
