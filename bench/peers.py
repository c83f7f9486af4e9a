"""Foresay beside llama.cpp on a real file: ``python -m bench.peers --target FILE --llama-server PROGRAM --gguf FILE``.

Everybody serves over HTTP, is asked for the same ids by the same client, streamed, and answers in turns and in random
order. Each way of ours and each of theirs has a server of its own, which is asked each prompt once: no drafter that
remembers has seen an answer, nor has a cache of prompts (there is none). Every second prompt goes to each temperature.
Answers end where the model ends them; those of fewer than 16 tokens have no decode rate.

``--at-once 1 2 4`` measures so many requests at once instead: tokens per second of all together, of answers that do not
end before ``--max-tokens``, also on prompts that nobody was asked before.
"""

from __future__ import annotations

import argparse
import random
import shlex
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from bench import llama, prompts, record
from bench.decode import progress
from bench.drive import Options
from bench.edits import edited
from bench.http import Timed, started, timed
from bench.stats import spread
from bench.versus import COLUMNS, OURS, TOGETHER, rows, sentences, summary
from foresay.verifier.ops.kernels.cpu import threads

EDITING = "editing"
#: What is asked of a text that is not a user's message.
ASKED = {
    EDITING: "Correct the mistakes in this text. Answer with the whole text, and change nothing else.\n\n{}",
    "code": "Complete this Python function. Answer with the whole function.\n\n```python\n{}\n```",
}
#: Of the text that is to be edited: characters, and the share of its words that are wrong.
EDITED_CHARACTERS, WRONG = 1600, 0.02


@dataclass(frozen=True, slots=True)
class Server:
    """One that runs. body: what its requests have beside the prompt."""

    name: str
    port: int
    body: Mapping[str, Any]

    def ask(self, ids: Sequence[int], temperature: float, seed: int, most: int, endless: bool = False) -> Timed:
        """One streamed answer."""
        sampling = {"temperature": temperature, "top_k": 0, "top_p": 1.0, "seed": seed}
        body = {"prompt": list(ids), "max_tokens": most, "ignore_eos": endless, **sampling, **self.body}
        return timed(self.port, body)


@dataclass(frozen=True, slots=True)
class Asked:
    """A prompt as everybody gets it."""

    kind: str
    name: str
    ids: tuple[int, ...]
    temperature: float = 0.0


def kind_and_file(text: str) -> tuple[str, Path]:
    """``maths=FILE``."""
    kind, equals, file = text.partition("=")
    if not (kind and equals and file):
        raise argparse.ArgumentTypeError(f"{text!r} is not KIND=FILE, such as maths=gsm8k.jsonl")
    return kind, Path(file)


def evenly(items: Sequence[Any], count: int) -> list[Any]:
    """So many of them (all, if there are fewer) from everywhere in the list."""
    return [items[at * len(items) // count] for at in range(count)] if count < len(items) else list(items)


def passages(paths: Sequence[Path], rng: random.Random) -> list[prompts.Prompt]:
    """Passages of these files with mistakes in them."""
    found = []
    for path in paths:
        text = path.read_text("utf-8")
        for begin in range(0, len(text) - EDITED_CHARACTERS + 1, EDITED_CHARACTERS):
            passage = edited(text[begin : begin + EDITED_CHARACTERS], rng, WRONG)
            found.append(prompts.Prompt(f"{path.name}:{begin}", passage, chat=False))
    return found


def asked_of(args: argparse.Namespace, wanted: int) -> list[Asked]:
    """So many prompts of each kind, the kinds in turns, each prompt once. Raises BadPrompts if one comes twice."""
    encode = prompts.Encoder(Options(args.target).tokenizer)
    kinds = {kind: prompts.load(file) for kind, file in args.prompts}
    if args.edits:
        kinds[EDITING] = passages(args.edits, random.Random(args.seed))
    asked = []
    for number in range(wanted):
        for kind, found in kinds.items():
            if number < len(chosen := evenly(found, wanted)):
                prompt = instructed(kind, chosen[number])
                temperature = args.temperatures[number % len(args.temperatures)]
                asked.append(Asked(kind, f"{kind} {prompt.name}", tuple(encode(prompt)), temperature))
    if len({one.ids for one in asked}) < len(asked):
        raise prompts.BadPrompts("a prompt comes twice: whoever remembers answers would know its answer")
    return asked


def instructed(kind: str, prompt: prompts.Prompt) -> prompts.Prompt:
    """Code and texts to edit become a user's message; other texts are continued as they are."""
    if prompt.chat or kind not in ASKED:
        return prompt
    return replace(prompt, text=ASKED[kind].format(prompt.text), chat=True)


#: How a server is started, where it says that it is ready, and what its requests have beside the prompt.
Command = tuple[list[str], str, Mapping[str, Any]]


def commands(args: argparse.Namespace, slots: int) -> dict[str, Command]:
    """Everybody's, by name."""
    found: dict[str, Command] = {}
    count = args.threads or threads.wanted()
    serve = [sys.executable, "-m", "foresay.server.cli.main", "serve", args.target, "--threads", str(count)]
    for way in args.ways:
        draft, *flags = shlex.split(way)
        shown = " ".join(Path(word).name for word in draft.replace(":", " ").split())
        sized = ["--draft", draft, *flags, "--max-seqs", str(slots), "--no-prefix-cache"]
        found[OURS + " ".join([shown, *flags])] = [*serve, *sized], "/ready", {"model": None}
    for file in args.gguf:
        for way in args.llama_ways:
            if args.llama_server:
                command = llama.compiled(args.llama_server, file, way, args.draft_gguf, count, slots)
                found[f"llama.cpp {file.stem} {way}"] = command, "/health", llama.BODY
            if args.xllamacpp and way != llama.DRAFT:
                command = llama.prebuilt(args.xllamacpp, file, way, count, slots)
                found[f"xllamacpp {file.stem} {way}"] = command, "/health", llama.BODY
    return found


@contextmanager
def servers(args: argparse.Namespace, slots: int) -> Iterator[list[Server]]:
    """All of them, warm. slots: requests at once."""
    with ExitStack() as stack:
        running = []
        for name, (command, ready, body) in commands(args, slots).items():
            _, port = stack.enter_context(started(command, ready, errors=subprocess.DEVNULL))
            running.append(server := Server(name, port, body))
            server.ask([1, 2, 3, 4], 1.0, args.seed, 16, endless=True)
        yield running


def in_turns(
    running: Sequence[Server], asked: Sequence[Asked], args: argparse.Namespace
) -> dict[str, dict[str, Timed]]:
    """The answers, by server and prompt."""
    answers: dict[str, dict[str, Timed]] = {server.name: {} for server in running}
    order, begun = random.Random(args.seed), time.perf_counter()
    for number, one in enumerate(asked, 1):
        for server in order.sample(running, len(running)):
            answer = server.ask(one.ids, one.temperature, args.seed, args.max_tokens)
            answers[server.name][one.name] = answer
        progress(f"prompt {number}/{len(asked)}", begun)
    return answers


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """All prompts in turns: what came of it by kind and temperature, and of all kinds but editing together."""
    asked = asked_of(args, args.limit * len(args.temperatures))
    with servers(args, 1) as running:
        answers = in_turns(running, asked, args)
    kinds: dict[str, dict[str, Any]] = {}
    for kind in [TOGETHER, *dict.fromkeys(one.kind for one in asked)]:
        for temperature in args.temperatures:
            names = {
                one.name
                for one in asked
                if one.temperature == temperature and (one.kind == kind or (kind == TOGETHER and one.kind != EDITING))
            }
            mine = {way: {name: one for name, one in given.items() if name in names} for way, given in answers.items()}
            if names:
                kinds.setdefault(kind, {})[f"{temperature:g}"] = summary(mine)
    return {"distinct_prompts": len(asked), "kinds": kinds}


def show(result: dict[str, Any]) -> None:
    """Tables for people."""
    for kind, temperatures in result["kinds"].items():
        for temperature, found in temperatures.items():
            title = f"{kind}, T = {temperature}, {found['prompts']} prompts"
            record.table(title, COLUMNS, rows(found))
            print(*sentences(found, str), sep="\n", end="\n\n")


def at_once(args: argparse.Namespace) -> dict[str, Any]:
    """By how many are asked at once: tokens per second of all together. Everybody is asked each prompt once."""
    rounds, needed = args.rounds, args.rounds * sum(args.at_once)
    left = asked_of(args, -(-needed // (len(args.prompts) + bool(args.edits))))
    if len(left) < needed:
        raise prompts.BadPrompts(f"--at-once asks for {needed} prompts in {rounds} rounds; --prompts give {len(left)}")
    order, result = random.Random(args.seed), dict[str, Any]()
    for count in args.at_once:
        groups = [[left.pop() for _ in range(count)] for _ in range(rounds)]
        with servers(args, count) as running, ThreadPoolExecutor(count) as pool:
            speeds: dict[str, list[float]] = {server.name: [] for server in running}
            for number, group in enumerate(groups, 1):
                for server in order.sample(running, len(running)):
                    speeds[server.name].append(together(server, group, pool, args))
                print(f"{count} at once, round {number}/{rounds}", flush=True)
        result[str(count)] = {name: spread(found) for name, found in speeds.items()}
    return {"rounds": rounds, "at_once": result}


def together(server: Server, group: Sequence[Asked], pool: ThreadPoolExecutor, args: argparse.Namespace) -> float:
    """Tokens per second from the first request to the end of the last answer."""
    begun = time.perf_counter()
    waits = [pool.submit(server.ask, one.ids, one.temperature, args.seed, args.max_tokens, True) for one in group]
    tokens = sum(wait.result().tokens for wait in waits)
    return tokens / (time.perf_counter() - begun)


def arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m bench.peers", description="Foresay beside llama.cpp, over HTTP.")
    parser.add_argument("--target", default="bundled", help="what we serve: a GGUF file, a directory or a hub id")
    ways = "values of our --draft, other flags behind: none suffix 'eagle3:DIR --draft-tokens 4'"
    parser.add_argument("--ways", nargs="+", default=("none", "ngram", "suffix", "auto"), help=ways)
    parser.add_argument("--gguf", nargs="*", type=Path, default=(), help="what the peers serve, all formats of it")
    parser.add_argument("--llama-server", type=Path, help="llama.cpp's llama-server")
    parser.add_argument("--xllamacpp", type=Path, metavar="PYTHON", help="the Python of an environment with xllamacpp")
    parser.add_argument("--llama-ways", nargs="+", default=(llama.PLAIN, "ngram-simple", "ngram-mod"))
    parser.add_argument("--draft-gguf", type=Path, help="a draft model, for the way draft-simple")
    own = [("own", prompts.OWN)]
    parser.add_argument("--prompts", nargs="+", type=kind_and_file, default=own, metavar="KIND=FILE")
    parser.add_argument("--edits", nargs="+", type=Path, default=(), help="texts, passages of which are to be edited")
    parser.add_argument("--limit", type=int, default=6, help="prompts of each kind and temperature")
    parser.add_argument("--temperatures", nargs="+", type=float, default=(0.0, 1.0))
    parser.add_argument("--max-tokens", type=int, default=200)
    parser.add_argument("--at-once", nargs="+", type=int, metavar="N", help="measure so many requests at once instead")
    parser.add_argument("--rounds", type=int, default=3, help="of --at-once")
    parser.add_argument("--threads", type=int, help="of each server (one per physical core)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--no-save", action="store_true", help="do not write to bench/results/")
    args = parser.parse_args()
    if bool(args.gguf) != bool(args.llama_server or args.xllamacpp):
        parser.error("--gguf goes together with --llama-server or --xllamacpp")
    return args


def main() -> None:
    args = arguments()
    shape: dict[str, Any] = {"target": Path(args.target).name, "draft": None, "max_tokens": args.max_tokens}
    shape["server_threads"] = args.threads or threads.wanted()
    if args.llama_server:
        shape["llama.cpp"] = llama.version(args.llama_server)
    if args.xllamacpp:
        shape["xllamacpp"] = llama.prebuilt_version(args.xllamacpp)
    if args.at_once:
        result = at_once(args)
        columns = [f"{count} at once" for count in result["at_once"]]
        names = next(iter(result["at_once"].values()))
        shown = [[name, *(found[name] for found in result["at_once"].values())] for name in names]
        record.table("tokens per second of all together", ["server", *columns], shown)
    else:
        result = measure(args)
        show(result)
    record.finish("at_once" if args.at_once else "peers", {**shape, **result}, not args.no_save)


if __name__ == "__main__":
    main()
