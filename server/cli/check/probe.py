"""Load a pair and measure it: every text is decoded twice, drafted and plain, in turns, with the same weights. Both
texts must be equal."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from itertools import count

import msgspec

from foresay.server.cli.measure import Twice, Written, in_turns
from foresay.server.cli.progress import Stages
from foresay.server.engine.build import build_engine
from foresay.server.engine.drafting import DEFAULT_TOKENS
from foresay.server.engine.parameters import pinned
from foresay.server.settings.config import EngineConfig
from foresay.server.settings.resolved import target_directory
from foresay.server.text.tokenizer import Tokenizer
from foresay.spec.engine import Engine
from foresay.spec.errors import ForesayError
from foresay.spec.request import EngineInfo, Request
from foresay.spec.sampling import SamplingParams
from foresay.spec.scheduler import Scheduler
from foresay.spec.tree import ROOT_ONLY

PROMPTS = (
    "Once upon a time there was a little girl who",
    "The old king called his three sons together and said,",
    "To make bread you need flour, water, salt and yeast. First,",
    "def fibonacci(n):\n    ",
    "In the middle of the forest stood a house, and in that house",
    "Dear Sir or Madam,\n\nI am writing to you because",
)
TEMPERATURES = (0.0, 1.0)
#: Tokens of a text: few enough that each prompt gets its turn in time, enough to measure speeds.
_LEAST_TOKENS, _MOST_TOKENS = 16, 96
_WARM_UP_TOKENS = 8


class ProbeFailed(ForesayError):
    """The engine ended a text with an error."""


@dataclass(frozen=True, slots=True)
class Probed:
    """All decoded texts by temperature, and the engine's info."""

    info: EngineInfo
    texts: dict[float, list[Twice]]


def probe(config: EngineConfig, seconds: float) -> Probed:
    """Load the pair, then decode texts for ``seconds``, at least one at each temperature.

    Raises what loading raises, and ProbeFailed.
    """
    config = msgspec.structs.replace(config, prefix_cache=False)
    if "," not in config.draft and config.draft != "auto" and pinned(config) is None:
        # One drafter with a fixed shape, so that its acceptance by depth can be measured.
        config = msgspec.structs.replace(config, draft_tokens=DEFAULT_TOKENS)
    texts: dict[float, list[Twice]] = {temperature: [] for temperature in TEMPERATURES}
    with Stages() as stages:
        drafted = build_engine(config, stages)
        plain = _plain(drafted)
        prompts = _prompts(config, drafted.info)
        length = _tokens(plain, drafted, prompts, seconds)
        begun = time.perf_counter()
        for number in count():
            spent = time.perf_counter() - begun
            stages("probing", min(1.0, spent / seconds))
            if spent >= seconds and number >= len(TEMPERATURES):
                break
            temperature, turn = TEMPERATURES[number % len(TEMPERATURES)], number // len(TEMPERATURES)
            params = SamplingParams(temperature=temperature, seed=turn, max_tokens=length)
            write = partial(_write, prompts[turn % len(prompts)], params)
            texts[temperature].append(Twice(*in_turns((drafted, plain), turn, write)))
    return Probed(drafted.info, texts)


def _plain(drafted: Engine) -> Engine:
    """An engine with the same target and pages, without a drafter; the two are never used at the same time."""
    scheduler = Scheduler(drafted.pool, None, ROOT_ONLY, drafted.scheduler.cost, drafted.info.max_seqs)
    verifier = drafted.runner.verifier
    return Engine(
        info=drafted.info, pool=drafted.pool, prefix=None, verifier=verifier, drafter=None, scheduler=scheduler
    )


def _prompts(config: EngineConfig, info: EngineInfo) -> list[list[int]]:
    """The prompts as tokens, cut so that half of the context is left for output."""
    tokenizer = Tokenizer.load(target_directory(config))
    encoded = [tokenizer.encode(prompt)[: max(1, info.max_model_len // 2)] for prompt in PROMPTS]
    return [[token for token in ids if token < info.vocab_size] or [0] for ids in encoded]


def _tokens(plain: Engine, drafted: Engine, prompts: list[list[int]], seconds: float) -> int:
    """How long texts may be, so that each prompt is decoded both ways at both temperatures in about ``seconds``."""
    warm_up = SamplingParams(temperature=1.0, seed=0, max_tokens=_WARM_UP_TOKENS, ignore_eos=True)
    _write(prompts[0], warm_up, drafted)
    speed = _write(prompts[0], warm_up, plain).statistics.decode_tokens_per_second
    fits = int(speed * seconds / (2 * len(TEMPERATURES) * len(prompts)))
    room = plain.info.max_model_len - max(map(len, prompts)) - 1
    return max(1, min(max(fits, _LEAST_TOKENS), _MOST_TOKENS, room))


def _write(prompt: Sequence[int], params: SamplingParams, engine: Engine) -> Written:
    """Decode one text, alone in the engine."""
    engine.add(Request(id="probe", prompt=list(prompt), params=params))
    tokens: list[int] = []
    while True:
        for delta in engine.step():
            tokens += delta.tokens
            if delta.finish_reason is not None:
                if delta.statistics is None or delta.error is not None:
                    raise ProbeFailed(f"a text ended with an error: {delta.error or delta.finish_reason}")
                return Written(tokens, delta.statistics, engine.trace.crowded if engine.trace else 0.0)
