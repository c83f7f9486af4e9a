"""Part e: tokens per second through the real engine, without drafts and with each bundled drafter, and along a replayed
acceptance with a published head's shape, whose figures are synthetic."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

from bench import record
from bench.gpu.engines import Answer, Bench, answers, ask
from bench.gpu.replay import Replayed, trace
from bench.gpu.session import Clock
from bench.prompts import Encoder, load
from foresay.spec.engine import Engine
from foresay.spec.sampling import SamplingParams
from foresay.spec.tree import TreeShape

#: Ways of decoding: who drafts, the tree, and whether steps are captured.
MODES = (
    ("none", "", True),
    ("none", "", False),
    ("ngram", "1,1,1,1", True),
    ("draft_model", "1,1,1,1", True),
    ("draft_model", "1,1,1,1", False),
    ("draft_model", "3,2,1", True),
    ("medusa", "1,1,1,1", True),
    ("eagle3", "1,1,1,1,1", True),
)
#: Tokens per step of published EAGLE-3 heads, and the chains that can give them.
REPLAYED = ((4.65, 5), (6.13, 7))


@dataclass(frozen=True, slots=True)
class Speed:
    """One way of decoding one prompt after the other, medians over them."""

    mode: str
    temperature: float
    tokens_per_second: float
    tokens_per_step: float
    step_ms: float


def shape_of(tree: str) -> TreeShape:
    """The tree that a mode names; none is the root alone."""
    return TreeShape.parse(tree) if tree else TreeShape()


def prompts(directory: Path, count: int) -> list[list[int]]:
    """Token ids of our own prompts: the bundled tokenizer is that of the model the target was made of."""
    encode = Encoder(directory)
    return [encode(prompt) for prompt in load(limit=count)]


def pages_for(bench: Bench, texts: Sequence[list[int]], tokens: int) -> int:
    """Pages of the longest table that a run needs, the scratch of two steps included."""
    return bench.pool.pages_for(max(map(len, texts)) + tokens + 2 * 64)


def decode(bench: Bench, texts: Sequence[list[int]], tokens: int, clock: Clock, needs: float) -> Iterator[Speed]:
    """Every way of decoding, at temperature 0 and 1."""
    pages = pages_for(bench, texts, tokens)
    for name, tree, graphs in MODES:
        mode = f"{name}{':' + tree if tree else ''}{'' if graphs else ', eager'}"
        if clock.fits(f"tokens/s of {mode}", needs):
            engine = bench.engine(name, shape_of(tree), graphs, pages)
            count = tokens if graphs else max(8, tokens // 4)
            for temperature in (0.0, 1.0):
                yield _speed(mode, engine, texts, count, temperature)


def replayed(bench: Bench, texts: Sequence[list[int]], tokens: int, clock: Clock, needs: float) -> Iterator[Speed]:
    """The random head of a published shape in the real engine, its acceptance replayed. Captured steps alone replay."""
    pages = pages_for(bench, texts, tokens)
    for tau, levels in REPLAYED:
        mode = f"SYNTHETIC tau {tau}, eagle3-shaped, chain of {levels}"
        if clock.fits(f"tokens/s of {mode}", needs):
            sample = Replayed(trace(tau, levels, 100), bench.device.torch)
            engine = bench.engine("random", TreeShape.chain(levels), True, pages, sample=sample)
            yield _speed(mode, engine, texts, tokens, 0.0)


def _speed(mode: str, engine: Engine, texts: Sequence[list[int]], tokens: int, temperature: float) -> Speed:
    brief, sampling = (
        SamplingParams(temperature=temperature, seed=1, max_tokens=count, ignore_eos=True) for count in (4, tokens)
    )
    answers(engine, [ask(texts[0], brief)])
    found = [answers(engine, [ask(text, sampling)])[0] for text in texts]
    return Speed(
        mode,
        temperature,
        median(answer.tokens_per_second for answer in found),
        median(len(answer.tokens) / max(1, answer.statistics.steps) for answer in found),
        1e3 * median(gap for answer in found for gap in _gaps(answer)),
    )


def _gaps(answer: Answer) -> list[float]:
    return answer.gaps or [answer.statistics.decode_seconds]


def show(found: Sequence[Speed]) -> None:
    """The table."""
    rows = [[s.mode, s.temperature, s.tokens_per_second, s.tokens_per_step, s.step_ms] for s in found]
    record.table("through the engine", ["decoding", "T", "tokens/s", "tokens/step", "ms/step"], rows)


def as_json(found: Sequence[Speed]) -> list[dict[str, Any]]:
    """For the record."""
    return [asdict(speed) for speed in found]
