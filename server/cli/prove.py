"""``foresay prove``: answers decoded in every way that must not change a token, and a receipt that others can check.

::

    cases     prompts at three temperatures, with penalties, with a schema, with tools
    ways      plainly and alone; with each drafter; with all of them, one text at a time, three and eight
    receipt   each case's token ids and their sha256, and what texts depend on (server/engine/handover.py)
"""

from __future__ import annotations

import os
import sys
from argparse import Namespace
from collections.abc import Callable, Iterator, Sequence
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec

import foresay
from foresay.drafters.training.prompts import Prompt
from foresay.server.cli import bench
from foresay.server.cli.command import COUNT, argument, command
from foresay.server.cli.progress import loaded
from foresay.server.cli.receipt import (
    KNOWN,
    PLAIN,
    Proved,
    Receipt,
    compared,
    difference,
    known,
    of_all,
    read,
    sha256,
    table,
    write,
)
from foresay.server.settings.config import EngineConfig
from foresay.server.settings.units import counted
from foresay.spec.errors import ConfigurationError, InvalidRequest
from foresay.spec.request import Grammar, Request
from foresay.spec.sampling import SamplingParams

if TYPE_CHECKING:
    from foresay.server.engine_process.local import Engine
    from foresay.server.engine_process.text_stream import Completion

PROMPTS = (
    *bench.PROMPTS,
    '{"name": "Ada", "born": 1815}\n{"name": "Alan", "born": 1912}\n{"name":',
    "1, 2, 4, 8, 16,",
    "Die Katze lag in der Sonne und",
)
TEMPERATURES, USUAL = (0.0, 0.7, 1.0), 32
#: How many of the prompts the other cases have, and the temperature of these.
_FEW, _WARM = 3, 0.7
_SIZES = (1, 3, 8)
_SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "age": {"type": "integer"}},
    "required": ["name", "age"],
    "additionalProperties": False,
}
_PENALTIES = {"presence_penalty": 0.5, "frequency_penalty": 0.5, "repetition_penalty": 1.1}
_QUESTIONS = ("What is the weather in Paris?", "Is it raining in Oslo?", "Should I take a coat to Rome?")
_TOOL = {
    "type": "function",
    "function": {"name": "weather", "description": "The weather in a city.", "parameters": _SCHEMA},
}


class Case(NamedTuple):
    """prompts: token ids, and where each is from. params: without a seed, which is the prompt's number."""

    name: str
    prompts: Sequence[tuple[str, list[int]]]
    params: SamplingParams
    grammar: Grammar | None = None


class DecodingWay(NamedTuple):
    """How a case is decoded. size: answers at once. drafter: the only one, "" for all. plain: without drafts, and
    without keys and values of earlier texts."""

    name: str
    size: int = 1
    drafter: str = ""
    plain: bool = False


@command(EngineConfig)
@argument(
    "--prompts", metavar="PATH", help="prove on these instead: .txt (one per line), .jsonl, a folder, - for stdin"
)
@argument("--max-tokens", metavar="N", type=COUNT, help=f"tokens of an answer (default: {USUAL}, or the receipt's)")
@argument("--out", metavar="FILE", type=Path, help="write the receipt, for others to check")
@argument(
    "--check", metavar="FILE", help=f"compare with this receipt; {KNOWN!r} is the one that ships for a model, if any"
)
@argument("--json", action="store_true", help="print the receipt instead of the table")
def prove(config: EngineConfig, arguments: Namespace) -> int:
    """Decode prompts in every way that must not change a token; compare.

    foresay prove smollm2 --bits portable --check known
    foresay prove Qwen/Qwen3-8B --draft Qwen/Qwen3-0.6B --out receipt.json
    foresay prove --prompts prompts.txt --max-tokens 200
    """
    from foresay.drafters.training.progress import ProgressBar

    given = None if arguments.check in (None, KNOWN) else read(Path(arguments.check))
    own = [] if arguments.prompts is None else bench.prompts_of(arguments.prompts)
    if "max_seqs" not in arguments and not os.environ.get("FORESAY_MAX_SEQS"):
        config = msgspec.structs.replace(config, max_seqs=max(config.max_seqs, *_SIZES))
    with loaded(config) as engine:
        if arguments.check == KNOWN:
            given = known(engine.info.target, engine.info.identity.get("weights", ""))
        most = arguments.max_tokens or (USUAL if given is None else given.max_tokens)
        if given is not None and given.max_tokens != most:
            raise ConfigurationError(
                f"--check {arguments.check}: its answers have up to {given.max_tokens} tokens, not {most}"
            )
        cases, ways = cases_of(engine, own, most), ways_of(engine)
        total = len(ways) * sum(len(case.prompts) for case in cases)
        with ProgressBar("proved", total, "answers") as progress:
            receipt = receipt_of(engine, cases, ways, most, progress.to)
        lines = [*table(receipt, engine.tokenizer.decode)]
        unlike = [] if given is None else list(compared(receipt, given, engine.tokenizer.decode))
    print(msgspec.json.encode(receipt).decode() if arguments.json else "\n".join(lines + unlike), flush=True)
    if arguments.json and unlike:
        print("\n".join(unlike), file=sys.stderr)
    if arguments.out is not None:
        write(arguments.out, receipt)
    same = given is None or given.sha256 == receipt.sha256
    return 0 if same and not any(case.differs for case in receipt.cases) else 1


# -- what is decoded, and how ------------------------------------------------------------------------------------------


def cases_of(engine: Engine, own: Sequence[Prompt], most: int) -> list[Case]:
    """own: prompts instead of ours, at each temperature. most: tokens of an answer. Raises ConfigurationError for a
    prompt that has no room; of ours those are left out."""
    from foresay.server.text.grammars.fields import json_grammar

    texts = own or [Prompt(text, f"prompt {number}") for number, text in enumerate(PROMPTS, start=1)]
    prompts = _asked(engine, texts, most, [], not own)
    cases = [Case(f"T={at:g}", prompts, SamplingParams(temperature=at, max_tokens=most)) for at in TEMPERATURES]
    if own:
        return cases
    warm, few = SamplingParams(temperature=_WARM, max_tokens=most), prompts[:_FEW]
    cases.append(Case("penalties", few, msgspec.structs.replace(warm, **_PENALTIES)))
    if engine.has_grammars:
        cases.append(Case("a schema", few, warm, json_grammar(_SCHEMA, "schema")))
    if engine.tokenizer.has_template:
        asked = [Prompt([{"role": "user", "content": text}], f"question {n}") for n, text in enumerate(_QUESTIONS, 1)]
        cases.append(Case("tools", _asked(engine, asked, most, [_TOOL], True), warm))
    return [case for case in cases if case.prompts]


def _asked(
    engine: Engine, prompts: Sequence[Prompt], most: int, tools: Sequence[dict[str, Any]], ours: bool
) -> list[tuple[str, list[int]]]:
    """Where each prompt is from, and its token ids. ours: without those that have no room, or that the template
    refuses."""
    found = []
    for prompt in prompts:
        try:
            found.append((prompt.where, _ids(engine, prompt, most, tools)))
        except ConfigurationError:
            if not ours:
                raise
    if not found and not tools:
        length = engine.info.max_model_len
        raise ConfigurationError(f"--max-tokens {most}: leaves no room for a prompt in --max-model-len {length}")
    return found


def _ids(engine: Engine, prompt: Prompt, most: int, tools: Sequence[dict[str, Any]]) -> list[int]:
    tokenizer, room = engine.tokenizer, engine.info.max_model_len - most
    try:
        if isinstance(prompt.content, str):
            ids = tokenizer.encode(prompt.content)
        else:
            rendered = tokenizer.render([dict(message) for message in prompt.content], tools=tools)
            ids = tokenizer.encode_after((), rendered, add_special_tokens=False)
    except InvalidRequest as error:
        raise ConfigurationError(f"{prompt.where}: {error}") from None
    if not 0 < len(ids) <= room:
        held = f"--max-model-len {engine.info.max_model_len} and --max-tokens {most} leave room for {max(0, room)}"
        raise ConfigurationError(f"{prompt.where} has {counted(len(ids), 'token')}; {held}")
    return ids


def ways_of(engine: Engine) -> list[DecodingWay]:
    """Plainly first: all others are compared with it."""
    names, sizes = engine.info.drafters, [size for size in _SIZES if size <= engine.info.max_seqs]
    alone = [DecodingWay(name, drafter=name) for name in names if len(names) > 1]
    return [DecodingWay(PLAIN, plain=True), *alone, *(DecodingWay(f"{size} at once", size) for size in sizes)]


def receipt_of(
    engine: Engine,
    cases: Sequence[Case],
    ways: Sequence[DecodingWay],
    most: int,
    done: Callable[[int], None] = lambda answers: None,
) -> Receipt:
    """Decode each case in each way. most: tokens of an answer. done: called with the number of answers so far."""
    numbers, proved = count(1), list[Proved]()
    for case in cases:
        texts: dict[str, list[list[int]]] = {way.name: [] for way in ways}
        drafts = dict.fromkeys(texts, (0, 0))
        for way in ways:
            for number, completion in _answers(engine, case, way, numbers):
                texts[way.name].append(completion.token_ids)
                drafts[way.name] = _sum(drafts[way.name], completion)
                done(number)
        plain = texts.pop(PLAIN)
        differs = {name: found for name, tokens in texts.items() if (found := difference(plain, tokens)) is not None}
        proved.append(
            Proved(
                name=case.name,
                where=[where for where, _ in case.prompts],
                prompts=[ids for _, ids in case.prompts],
                tokens=plain,
                sha256=sha256(plain),
                ways=drafts,
                differs=differs,
            )
        )
    info = engine.info
    return Receipt(
        foresay=foresay.__version__,
        target=info.target,
        fingerprint=info.fingerprint,
        identity=info.identity,
        exact=info.exact,
        exact_reason=info.exact_reason,
        max_tokens=most,
        cases=proved,
        sha256=of_all(proved),
    )


def _sum(drafts: tuple[int, int], completion: Completion) -> tuple[int, int]:
    """Numbers of drafted and accepted tokens, with an answer's."""
    statistics = completion.statistics
    assert statistics is not None, "a completion that ran to its end has statistics"
    return drafts[0] + statistics.drafted, drafts[1] + statistics.accepted


def _answers(engine: Engine, case: Case, way: DecodingWay, numbers: Iterator[int]) -> Iterator[tuple[int, Completion]]:
    """Each answer's number, of all, and the answer; some of them are decoded at once. What lookups remember of one way
    is kept from the others, or these would only repeat it."""
    requests = [
        Request(
            id=str(next(numbers)),
            prompt=ids,
            params=msgspec.structs.replace(case.params, seed=seed),
            grammar=case.grammar,
            speculate=not way.plain,
            aside=way.plain,
            draft_method=way.drafter,
            salt=way.name,
        )
        for seed, (_, ids) in enumerate(case.prompts)
    ]
    for begin in range(0, len(requests), way.size):
        streams = [engine.run(request) for request in requests[begin : begin + way.size]]
        for request, stream in zip(requests[begin:], streams, strict=False):
            yield int(request.id), stream.result()
