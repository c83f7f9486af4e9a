"""The texts that ``bench.budget`` has written, round after round: recorded ones, and prompts to continue.

::

    fresh     no token comes twice
    edits     a given text with one token in ten replaced, three times as long as other answers
    dialogue  turns of tool-calling dialogues (DIR/*.json)
    repeated  answers to one question again (DIR/*.jsonl), in the ids of another vocabulary
    drawn     prompts of the bench, continued as the target likes
    again     the same, and each once more with the same seed, as clients do that try again or compare
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from itertools import cycle, islice
from pathlib import Path

from bench import prompts
from bench.forced import FIRST_TEXT_ID, Recorded, copy_heavy, fresh
from bench.lookups import requests

#: Of a repeated answer: the end of its prompt that is kept. Of dialogues: the most that stands before the first turn
#: that is written, the shortest turn that counts, how many of one are written, and the longest text.
PROMPT, BEFORE, SHORTEST, TURNS, LONGEST = 256, 1024, 24, 3, 3500
#: Answers that a round of the repeated ones writes, and where in them they begin: past what is always the same.
REPEATED, BEGIN = 3, 512
#: Of an edited text, answers of the usual length: a round writes as much of it as of the other copied texts.
EDITED = 3

#: A prompt, and the answer that is to be written; none where the target says what comes.
Asked = tuple[list[int], list[int]]
#: For each round the requests of each mode, one after the other.
Workload = Iterator[list[Asked]]


def workloads(
    traces: Path | None, tokenizer: Path, length: int, seed: int, vocab: int, room: int
) -> dict[str, Workload]:
    """Those whose texts are there and long enough, without end.

    traces: directory of the recorded ones; tokenizer: the target's directory; length: tokens of each answer, but of
    edits (``EDITED``); room: tokens that the target holds.
    """
    rng, most = random.Random(seed), min(vocab, 4096)
    made: dict[str, Workload] = {
        "fresh": _made(fresh, most, rng, length),
        "edits": _made(copy_heavy, most, rng, min(EDITED * length, room // 2)),
        "drawn": _drawn(tokenizer),
        "again": ([*asked, *asked] for asked in _drawn(tokenizer)),
    }
    for file in sorted(traces.glob("*.json*")) if traces else ():
        if file.suffix == ".json":
            if turns := dialogues(list(requests(file, 100, length)), min(LONGEST, room - length)):
                made["dialogue"] = cycle(turns)
        else:
            answers = renamed(list(requests(file, 8, BEGIN + length)), vocab)
            if long := [answer for answer in answers if len(answer[1]) > BEGIN + 1]:
                made["repeated"] = _repeated(long, rng, length)
    return made


def dialogues(asked: Sequence[Asked], longest: int = LONGEST) -> list[list[Asked]]:
    """Some turns in a row of each dialogue, from its middle, of those that fit."""
    whole: list[list[Asked]] = []
    for prompt, output in asked:
        if not whole or len(prompt) < len(whole[-1][-1][0]):
            whole.append([])
        whole[-1].append((prompt, output))
    found = []
    for turns in whole:
        kept = [turn for turn in turns if len(turn[1]) >= SHORTEST]
        window = kept[max(0, (len(kept) - TURNS) // 2) :][:TURNS]
        begin = max(0, len(window[0][0]) - min(BEFORE, longest * 2 // 3)) if window else 0
        if len(window) == TURNS and len(window[-1][0]) - begin < longest:
            found.append([(prompt[begin:], output) for prompt, output in window])
    return found


def _drawn(tokenizer: Path) -> Workload:
    """An opening of a story and a question in each round."""
    encode = prompts.Encoder(tokenizer)
    texts = cycle([encode(prompt) for prompt in prompts.load()])
    while True:
        yield [(prompt, []) for prompt in islice(texts, 2)]


def _made(
    make: Callable[[str, int, random.Random, int], Recorded], vocab: int, rng: random.Random, length: int
) -> Workload:
    while True:
        text = make("", vocab, rng, length)
        yield [(text.prompt, text.output)]


def _repeated(asked: list[Asked], rng: random.Random, length: int) -> Workload:
    """Some of the answers in random order, from the same place on."""
    while True:
        chosen = rng.sample(asked, min(REPEATED, len(asked)))
        yield [([*prompt, *output[:BEGIN]][-PROMPT:], output[BEGIN : BEGIN + length]) for prompt, output in chosen]


def renamed(asked: list[Asked], vocab: int) -> list[Asked]:
    """The same texts in ids of this vocabulary, alike everywhere; by first appearance, so that no two are one."""
    names: dict[int, int] = {}
    for prompt, output in asked:
        for token in (*prompt, *output):
            names.setdefault(token, FIRST_TEXT_ID + len(names))
    if len(names) + FIRST_TEXT_ID > vocab:
        raise SystemExit(f"the texts hold {len(names)} different tokens, the target has {vocab}: take shorter ones")
    return [([names[token] for token in prompt], [names[token] for token in output]) for prompt, output in asked]
