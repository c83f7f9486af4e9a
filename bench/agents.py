"""Coding agents' sessions, replayed: ``python -m bench agents --target FILE --llama-server PROGRAM --gguf FILE``.

Each round is 20 turns of two sessions over one system prompt with tools, in the shape of public traces (a first prompt
of 24,800 tokens in the median) cut to what two cores can read: turns that grow by an answer and a tool's result, a
branch that takes a turn back, two sessions in turn, and a restart of the server. On the day before, which is not
counted, another session had the same system prompt. Prompts are passages of this repository after tokens that no other
run has, and answers are given: so all servers get the same requests, and find only what they got here. Ours runs as it
is, and as it was before: without KV on disk, and with a header that differs from session to session, as Claude Code's
does. llama.cpp's runs with its prompt cache, ``--cache-reuse``, and slots saved before each restart and restored after;
it gets no such header. Restarts themselves are not counted.
"""

from __future__ import annotations

import json
import random
import tempfile
import time
import urllib.request
from argparse import ArgumentParser, Namespace
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from statistics import median
from typing import Any

from bench import llama, record
from bench.experiment import Case, Experiment, Sample, Taken, Variant
from bench.serving import FORESAY, Server
from foresay.server.settings.config import EngineConfig
from foresay.server.settings.resolved import target_directory
from foresay.server.text.tokenizer import Tokenizer
from foresay.verifier.ops.kernels.cpu import threads

FIRST, FOUND = "first_token_s", "tokens_found"
THEIRS, BEFORE, OURS = "llama.cpp", "foresay, before", "foresay"
#: The client of each turn: session and number; the second A5 takes the first one back.
TURNS = (
    *("A1", "A2", "A3", "A4", "B1", "A5", "B2", "A5'", "B3", "A6"),
    *("B4", "A7", "B5", "A8", "B6", "A9", "B7", "A10", "A11", "A12"),
)
#: The day before; and before which turns servers are restarted.
YESTERDAY, RESTARTS = "Y1", ("A1", "A8")
#: Tokens that differ from run to run, and the position of a session's own header.
HEADER = 16
#: Tokens of a question, of an answer with a call, and the most of a tool's result, as shares of the system prompt.
QUESTION, ANSWER, RESULT = 0.03, 0.015, 0.07
#: Seconds between two turns, in which an agent's tool runs, and a server may write to disk.
PAUSE = 1.0


def options(parser: ArgumentParser) -> None:
    parser.add_argument("--target", default="bundled", help="what we serve: a GGUF file, a directory or a hub id")
    parser.add_argument("--gguf", type=Path, help="the same for llama.cpp")
    parser.add_argument("--llama-server", type=Path, help="llama.cpp's llama-server")
    parser.add_argument("--system", type=int, default=4000, help="tokens of the system prompt and its tools")
    parser.add_argument("--length", type=int, default=8192, help="tokens of the context")
    parser.add_argument("--rounds", type=int, default=2)


def main(args: Namespace) -> dict[str, Any]:
    ids = passages(args)
    new = random.choices(ids, k=HEADER)
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        servers = [stack.enter_context(one) for one in servers_of(args, folder)]
        taken, _ = Experiment(
            variants=[Variant(one.name, one.measure) for one in servers],
            cases=lambda turn: list(session(ids, new, args.system, turn)),
            figure=FIRST,
            rounds=args.rounds,
        ).run()
    return {"target": Path(args.target).name, "system": args.system, **summary(taken)}


# -- the prompts -----------------------------------------------------------------------------------------------------


def passages(args: Namespace) -> list[int]:
    """Tokens of this repository's documents and sources."""
    root, tokenizer = Path(__file__).parents[1], Tokenizer.load(target_directory(EngineConfig(target=args.target)))
    files = [*sorted(root.glob("docs/*.md")), *sorted(root.glob("spec/**/*.py")), *sorted(root.glob("server/**/*.py"))]
    return [token for file in files for token in tokenizer.encode(file.read_text("utf-8"), False)]


def session(ids: Sequence[int], new: Sequence[int], system: int, turn: int) -> Iterator[Case]:
    """The prompts of a round, as a client sends them. new: their first tokens."""
    rng, rest = random.Random(turn), iter(ids[turn * 20_000 :])
    begin, prompts = [*new, *islice(rest, system)], dict[str, list[int]]()
    for name in (YESTERDAY, *TURNS):
        number = int(name[1:].rstrip("'"))
        before = prompts.get(f"{name[0]}{number - 1}")
        more = QUESTION if before is None else ANSWER + rng.uniform(0.01, RESULT)
        prompt = prompts[f"{name[0]}{number}"] = [*(before or begin), *islice(rest, round(more * system))]
        yield Case("turns", name, prompt)


# -- the servers -----------------------------------------------------------------------------------------------------


@dataclass
class Restarted(Server):
    """A server that is restarted in mid-round. slots: how many are to be saved before. headed: whether each session has
    its own header."""

    slots: int = 0
    headed: bool = False

    def measure(self, case: Case, turn: int) -> Sample:
        """One turn."""
        if case.name in RESTARTS:
            self._slots("save")
            self.__exit__()
            self.__enter__()
            self._slots("restore")
        time.sleep(PAUSE)
        own = ord(case.name[0]) % HEADER if self.headed else 0
        answer = self.send([*case.input[own:HEADER], *case.input[:own], *case.input[HEADER:]], 16)
        return Sample({FIRST: answer.first, FOUND: answer.cached}, answer.text if self.name == OURS else None)

    def _slots(self, action: str) -> None:
        for slot in range(self.slots):
            address = f"http://127.0.0.1:{self.port}/slots/{slot}?action={action}"
            data = json.dumps({"filename": f"{slot}.bin"}).encode()
            urllib.request.urlopen(urllib.request.Request(address, data, {"Content-Type": "application/json"})).close()


def servers_of(args: Namespace, folder: Path) -> Iterator[Restarted]:
    """Ours twice, and llama.cpp's if it is given."""
    for name, disk in ((BEFORE, "off"), (OURS, "8GiB")):
        own = ["--kv-disk", disk, "--max-model-len", str(args.length)]
        yield Restarted(name, [*FORESAY, args.target, *own], "/ready", {"model": None}, headed=name == BEFORE)
    if args.llama_server:
        argv = llama.compiled(args.llama_server, args.gguf, llama.PLAIN, threads.num_threads(), 2, context=args.length)
        reuse = ["--cache-reuse", "256", "--slot-save-path", f"{folder}/"]
        yield Restarted(THEIRS, [*argv, *reuse], "/health", {"cache_prompt": True}, slots=2)


def summary(taken: Sequence[Taken]) -> dict[str, Any]:
    """By turn and server, and the sum of the waits of all turns of a round."""
    by: dict[str, dict[str, list[Mapping[str, float]]]] = defaultdict(lambda: defaultdict(list))
    for one in taken:
        by[one.case.name][one.variant].append(one.sample.figures)
    turns = {turn: {name: _medians(found) for name, found in of.items()} for turn, of in by.items()}
    names = list(turns[TURNS[0]])
    waited = {name: sum(turns[turn][name][FIRST] for turn in TURNS) for name in names}
    rows = [
        [turn, *(f"{of[name][FIRST]:.2f} s, {of[name][FOUND]:,.0f}" for name in names)] for turn, of in turns.items()
    ]
    together = ["together", *(f"{waited[name]:.2f} s" for name in names)]
    record.table("first token, and tokens found", ["", *names], [*rows, together])
    return {"turns": turns, "waited_s": waited}


def _medians(found: Sequence[Mapping[str, float]]) -> dict[str, float]:
    return {figure: median(one[figure] for one in found) for figure in (FIRST, FOUND)}
