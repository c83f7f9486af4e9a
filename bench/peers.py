"""Foresay and llama.cpp on a real file: ``python -m bench peers --target FILE --llama-server PROGRAM --gguf FILE``.

All serve over HTTP and answer the same client, which sends the same ids and streams. Each mode of ours and each of
theirs has a server of its own, which gets each prompt once: no drafter that remembers has seen an answer, nor has a
prompt cache (there is none). Every second prompt is for each temperature. Answers end where the model ends them; those
of fewer than 16 tokens have no decode rate.

``--at-once 1 2 4`` measures so many requests at once instead: tokens per second of all together, of answers that do not
end before ``--max-tokens``, also on prompts that no server got before.
"""

from __future__ import annotations

import random
import shlex
from argparse import ArgumentParser, ArgumentTypeError, Namespace
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from time import perf_counter
from typing import Any

from bench import BadOption, llama, prompts
from bench.drive import Options
from bench.experiment import Case, Experiment, Groups, Sample, Taken, Variant, ratio, show, values
from bench.serving import FORESAY, Answer, Server
from bench.stats import spread
from bench.texts import edited
from foresay.verifier.ops.kernels.cpu import threads

EDITING = "editing"
#: The instruction for a text that is not a user's message.
PROMPT_TEMPLATES = {
    EDITING: "Correct the mistakes in this text. Answer with the whole text, and change nothing else.\n\n{}",
    "code": "Complete this Python function. Answer with the whole function.\n\n```python\n{}\n```",
}
#: Of the text that is to be edited: characters, and the share of its words that are wrong.
EDITED_CHARACTERS, WRONG = 1600, 0.02
#: A server is named by its program and its mode: ``foresay suffix``, ``llama.cpp Q4_0 ngram-simple``.
OURS, PLAIN, AUTO, NONE = "foresay ", " plain", "foresay auto", "foresay none"
#: The group of all kinds except editing.
TOGETHER = "together"
#: Tokens that an answer must have for its decode rate to count.
SHORT = 16
#: The figures by which ours and theirs are compared; of the second less is better.
DECODING, FIRST, WHOLE = "tokens_per_second", "first_token_ms", "whole_tokens_per_second"
MEASURES = {"decoding": DECODING, "first token": FIRST, "whole answer": WHOLE}


def options(parser: ArgumentParser) -> None:
    parser.add_argument("--target", default="bundled", help="what we serve: a GGUF file, a directory or a hub id")
    ways = "values of our --draft, each with other flags after it: none suffix 'eagle3:DIR --draft-tokens 4'"
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


def kind_and_file(text: str) -> tuple[str, Path]:
    """``maths=FILE``."""
    kind, equals, file = text.partition("=")
    if not (kind and equals and file):
        raise ArgumentTypeError(f"{text!r} is not KIND=FILE, such as maths=gsm8k.jsonl")
    return kind, Path(file)


def main(args: Namespace) -> dict[str, Any]:
    if bool(args.gguf) != bool(args.llama_server or args.xllamacpp):
        raise BadOption("--gguf goes together with --llama-server or --xllamacpp")
    shape: dict[str, Any] = {"target": Path(args.target).name, "draft": None, "max_tokens": args.max_tokens}
    shape["server_threads"] = args.threads or threads.num_threads()
    if args.llama_server:
        shape["llama.cpp"] = llama.version(args.llama_server)
    if args.xllamacpp:
        shape["xllamacpp"] = llama.prebuilt_version(args.xllamacpp)
    return {**shape, **(at_once if args.at_once else by_kind)(args)}


# -- the prompts -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class PeerPrompt:
    """A prompt as every server gets it."""

    kind: str
    name: str
    ids: tuple[int, ...]
    temperature: float = 0.0


def prompts_of(args: Namespace, wanted: int) -> list[PeerPrompt]:
    """So many prompts of each kind, the kinds in turns, each prompt once. Raises BadPrompts if one comes twice."""
    encode = prompts.Encoder(Options(args.target).tokenizer)
    kinds = {kind: prompts.load(file) for kind, file in args.prompts}
    if args.edits:
        kinds[EDITING] = passages(args.edits, random.Random(args.seed))
    drawn = []
    for number in range(wanted):
        for kind, found in kinds.items():
            if number < len(chosen := evenly(found, wanted)):
                prompt = instructed(kind, chosen[number])
                temperature = args.temperatures[number % len(args.temperatures)]
                drawn.append(PeerPrompt(kind, f"{kind} {prompt.name}", tuple(encode(prompt)), temperature))
    if len({one.ids for one in drawn}) < len(drawn):
        raise prompts.BadPrompts("a prompt comes twice: a server that remembers answers would know its answer")
    return drawn


def passages(paths: Sequence[Path], rng: random.Random) -> list[prompts.Prompt]:
    """Passages of these files with mistakes in them."""
    found = []
    for path in paths:
        text = path.read_text("utf-8")
        for begin in range(0, len(text) - EDITED_CHARACTERS + 1, EDITED_CHARACTERS):
            passage = edited(text[begin : begin + EDITED_CHARACTERS], rng, WRONG)
            found.append(prompts.Prompt(f"{path.name}:{begin}", passage, chat=False))
    return found


def evenly(items: Sequence[Any], count: int) -> list[Any]:
    """So many of them (all, if there are fewer) at equal distances in the list."""
    return [items[at * len(items) // count] for at in range(count)] if count < len(items) else list(items)


def instructed(kind: str, prompt: prompts.Prompt) -> prompts.Prompt:
    """Code and texts to edit become a user's message; other texts are continued as they are."""
    if prompt.chat or kind not in PROMPT_TEMPLATES:
        return prompt
    return replace(prompt, text=PROMPT_TEMPLATES[kind].format(prompt.text), chat=True)


# -- the servers -----------------------------------------------------------------------------------------------------


def servers_of(args: Namespace, slots: int) -> Iterator[Server]:
    """All servers. slots: requests at once."""
    count = args.threads or threads.num_threads()
    for way in args.ways:
        draft, *flags = shlex.split(way)
        shown = " ".join(Path(word).name for word in draft.replace(":", " ").split())
        own = ["--draft", draft, *flags, "--max-seqs", str(slots), "--no-prefix-cache", "--threads", str(count)]
        yield Server(OURS + " ".join([shown, *flags]), [*FORESAY, args.target, *own], "/ready", {"model": None})
    for file in args.gguf:
        for way in args.llama_ways:
            if args.llama_server:
                command = llama.compiled(args.llama_server, file, way, count, slots, args.draft_gguf)
                yield Server(f"llama.cpp {file.stem} {way}", command, "/health", llama.BODY)
            if args.xllamacpp and way != llama.DRAFT:
                command = llama.prebuilt(args.xllamacpp, file, way, count, slots)
                yield Server(f"xllamacpp {file.stem} {way}", command, "/health", llama.BODY)


@contextmanager
def servers(args: Namespace, slots: int) -> Iterator[list[Server]]:
    """All of them while they run. slots: requests at once."""
    with ExitStack() as stack:
        yield [stack.enter_context(one) for one in servers_of(args, slots)]


def sent(server: Server, one: PeerPrompt, args: Namespace, endless: bool = False) -> Answer:
    """One answer. endless: of ``--max-tokens``, even where the model would end it."""
    sampling = {"temperature": one.temperature, "top_k": 0, "top_p": 1.0, "seed": args.seed}
    return server.send(one.ids, args.max_tokens, ignore_eos=endless, **sampling)


# -- one request at a time -------------------------------------------------------------------------------------------


def by_kind(args: Namespace) -> dict[str, Any]:
    """All prompts in turns: the figures by kind and temperature, and of all kinds except editing together."""
    drawn = prompts_of(args, args.limit * len(args.temperatures))
    with servers(args, 1) as running:
        experiment = Experiment(
            variants=[alone(one, args) for one in running],
            cases=[Case("", one.name, one) for one in drawn],
            figure=DECODING,
            seed=args.seed,
        )
        taken = experiment.measure()
    kinds = kinds_of(taken)
    for kind, temperatures in kinds.items():
        for temperature, found in temperatures.items():
            show({f"{kind}, T = {temperature}, {found['prompts']} prompts": found["ways"]})
            print(*sentences(found), sep="\n", end="\n\n")
    return {"distinct_prompts": len(drawn), "kinds": kinds}


def alone(server: Server, args: Namespace) -> Variant:
    """One answer at a time."""
    return Variant(server.name, lambda case, turn: sample(sent(server, case.input, args)))


def sample(answer: Answer) -> Sample:
    """An answer's figures."""
    figures = {FIRST: 1e3 * answer.first, WHOLE: answer.tokens / answer.whole}
    paced = answer.tokens >= SHORT and answer.first < answer.whole  # one event may bring all of it
    return Sample(figures | ({DECODING: answer.speed} if paced else {}), detail=answer.tokens)


def kinds_of(taken: Sequence[Taken]) -> dict[str, dict[str, Any]]:
    """By kind and temperature, all kinds except editing together first."""
    groups: dict[str, dict[str, list[Taken]]] = {TOGETHER: {}}
    for one in taken:
        drawn: PeerPrompt = one.case.input
        for kind in (drawn.kind, *([TOGETHER] if drawn.kind != EDITING else [])):
            groups.setdefault(kind, {}).setdefault(f"{drawn.temperature:g}", []).append(one)
    return {kind: {t: summary(of[t]) for t in sorted(of, key=float)} for kind, of in groups.items() if of}


def summary(taken: Sequence[Taken]) -> dict[str, Any]:
    """Every server's figures; ours over theirs, the fastest of each (with the best medians); and ``auto``, or several
    drafters that a budget chooses from, over each of our other modes."""
    by: dict[str, list[Taken]] = defaultdict(list)
    for one in taken:
        by[one.variant].append(one)
    names = dict.fromkeys((DECODING, FIRST, WHOLE))
    ways = {
        way: {name: spread(values(of, name) or [0.0]) for name in names}
        | {"tokens": sum(one.sample.detail for one in of)}
        for way, of in by.items()
    }
    mine, theirs = [[way for way in by if way.startswith(OURS) is own] for own in (True, False)]
    versus: dict[str, Any] = {}
    if mine and theirs:
        versus = {name: best(by, ways, mine, theirs, figure) for name, figure in MEASURES.items()}
        plain = [way for way in theirs if way.endswith(PLAIN)]
        if NONE in mine and plain:
            versus["plain"] = best(by, ways, [NONE], plain, DECODING)
    auto = next((way for way in reversed(mine) if way == AUTO or ("," in way and " --" not in way)), "")
    over = {way: ratio(by[auto], by[way], DECODING) for way in mine if auto and way != auto}
    return {"prompts": len({one.case.name for one in taken}), "ways": ways, "versus": versus, "auto_over": over}


def best(
    by: Mapping[str, list[Taken]], ways: Mapping[str, Any], mine: Sequence[str], theirs: Sequence[str], figure: str
) -> dict[str, Any]:
    """The fastest of either side, and the ratio of ours to theirs."""
    fastest = min if figure == FIRST else max
    ours, other = (fastest(side, key=lambda way: ways[way][figure].median) for side in (mine, theirs))
    over, under = (other, ours) if figure == FIRST else (ours, other)
    return {"ours": ours, "theirs": other, "times": ratio(by[over], by[under], figure)}


def sentences(found: Mapping[str, Any]) -> list[str]:
    """The ratios in words."""
    notes = [
        f"{name}: {pair['ours']} {pair['times']} times as fast as {pair['theirs']}"
        for name, pair in found["versus"].items()
        if pair["times"]
    ]
    over = ", ".join(f"{way.removeprefix(OURS)} {times}" for way, times in found["auto_over"].items() if times)
    return [*notes, *([f"auto over {over}"] if over else [])]


# -- several at once -------------------------------------------------------------------------------------------------


def at_once(args: Namespace) -> dict[str, Any]:
    """By the number of requests at once: tokens per second of all together. Every server gets each prompt once."""
    rounds, needed = args.rounds, args.rounds * sum(args.at_once)
    left = prompts_of(args, -(-needed // (len(args.prompts) + bool(args.edits))))
    if len(left) < needed:
        raise prompts.BadPrompts(f"--at-once asks for {needed} prompts in {rounds} rounds; --prompts give {len(left)}")
    groups: Groups = {}
    for count in args.at_once:
        of_round = [[left.pop() for _ in range(count)] for _ in range(rounds)]
        with servers(args, count) as running, ThreadPoolExecutor(count) as pool:
            experiment = Experiment(
                variants=[together(one, pool, args) for one in running],
                cases=lambda turn, c=count, of=of_round: [Case(f"{c} at once", "", of[turn])],  # type: ignore[misc]
                figure=DECODING,
                rounds=rounds,
                seed=args.seed,
            )
            groups |= experiment.run()[1]
    found = {group.split()[0]: {way: row[DECODING] for way, row in of.items()} for group, of in groups.items()}
    return {"bench": "at_once", "rounds": rounds, "at_once": found}


def together(server: Server, pool: ThreadPoolExecutor, args: Namespace) -> Variant:
    """Tokens per second from the first request to the end of the last answer."""

    def measure(case: Case, turn: int) -> Sample:
        begun = perf_counter()
        waits = [pool.submit(sent, server, one, args, True) for one in case.input]
        tokens = sum(wait.result().tokens for wait in waits)
        return Sample({DECODING: tokens / (perf_counter() - begun)})

    return Variant(server.name, measure)
