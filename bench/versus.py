"""What the answers of several servers come to: figures of each, ours beside theirs, and ``auto`` beside our other ways.

A server is called by its program and its way: ``foresay suffix``, ``llama.cpp Q4_0 ngram-simple``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from bench.http import Timed
from bench.stats import Ratio, paired_ratio, spread

OURS, PLAIN, AUTO = "foresay ", " plain", "foresay auto"
NONE = "foresay none"
#: The kind that all kinds but editing make.
TOGETHER = "together"
#: Tokens that an answer must have for its decode rate to count.
SHORT = 16

#: By server and prompt.
Answers = Mapping[str, Mapping[str, Timed]]
#: Something of an answer, of which more is better; None if it does not say.
Measure = Callable[[Timed], float | None]


def decoding(answer: Timed) -> float | None:
    """Tokens per second after the first."""
    return answer.speed if answer.tokens >= SHORT else None


def whole(answer: Timed) -> float | None:
    """Tokens per second of the whole request."""
    return answer.tokens / answer.whole


def start(answer: Timed) -> float | None:
    """First tokens per second."""
    return 1.0 / answer.first


def summary(answers: Answers) -> dict[str, Any]:
    """Everybody's figures, and how they stand to each other."""
    ways = {way: figures(list(given.values())) for way, given in answers.items()}
    return {"prompts": len(next(iter(answers.values()))), "ways": ways} | versus(answers)


def figures(answers: Sequence[Timed]) -> dict[str, Any]:
    """Medians and quartiles. tokens: of all answers."""
    speeds = [speed for one in answers if (speed := decoding(one)) is not None]
    return {
        "tokens_per_second": spread(speeds or [0.0]),
        "first_token_ms": spread([1e3 * one.first for one in answers]),
        "whole_tokens_per_second": spread([one.tokens / one.whole for one in answers]),
        "tokens": sum(one.tokens for one in answers),
    }


def versus(answers: Answers) -> dict[str, Any]:
    """Ours over theirs, the fastest of each (whose medians are highest), and ``auto`` over each of our other ways."""
    mine, theirs = [[way for way in answers if way.startswith(OURS) is own] for own in (True, False)]
    found: dict[str, Any] = {}
    if mine and theirs:
        found = {name: best(answers, mine, theirs, of) for name, of in MEASURES.items()}
        plain = [way for way in theirs if way.endswith(PLAIN)]
        if NONE in mine and plain:
            found["plain"] = best(answers, [NONE], plain, decoding)
    others = [way for way in mine if way != AUTO] if AUTO in mine else []
    return {"versus": found, "auto_over": {way: ratio(answers, AUTO, way, decoding) for way in others}}


MEASURES: dict[str, Measure] = {"decoding": decoding, "first token": start, "whole answer": whole}


def best(answers: Answers, mine: Sequence[str], theirs: Sequence[str], of: Measure) -> dict[str, Any]:
    """The fastest of either side, and how many times as fast ours is."""

    def median(way: str) -> float:
        return spread([value for one in answers[way].values() if (value := of(one)) is not None] or [0.0]).median

    ours, other = max(mine, key=median), max(theirs, key=median)
    return {"ours": ours, "theirs": other, "times": ratio(answers, ours, other, of)}


def ratio(answers: Answers, way: str, base: str, of: Measure) -> Ratio | None:
    """Over the prompts that both have a figure for; None if there are none."""
    pairs = {prompt: (of(one), of(answers[base][prompt])) for prompt, one in answers[way].items()}
    known = {prompt: [(a, b)] for prompt, (a, b) in pairs.items() if a is not None and b is not None}
    return paired_ratio(known) if known else None


def rows(of: Mapping[str, Any]) -> list[list[Any]]:
    """A table's: each way, its decode rate, its first token in ms, its rate over whole answers."""
    keys = ("tokens_per_second", "first_token_ms", "whole_tokens_per_second")
    return [[way, *(found[key] for key in keys)] for way, found in of["ways"].items()]


COLUMNS = ["server", "tok/s", "first token, ms", "whole answer, tok/s"]


def sentences(of: Mapping[str, Any], shown: Callable[[Any], str]) -> list[str]:
    """The ratios in words. shown: of a ratio."""
    said = [
        f"{name}: {pair['ours']} {shown(pair['times'])} times as fast as {pair['theirs']}"
        for name, pair in of["versus"].items()
        if pair["times"]
    ]
    over = ", ".join(f"{way.removeprefix(OURS)} {shown(times)}" for way, times in of["auto_over"].items() if times)
    return [*said, *([f"auto over {over}"] if over else [])]
