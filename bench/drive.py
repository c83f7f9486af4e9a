"""Engines in this process, one per way of decoding, and one request at a time through them.

A way of decoding is written as ``none``, ``ngram``, ``ngram:8`` (levels), ``draft_model:4`` (a chain of four) or
``draft_model:3,2,1`` (a tree: nodes kept per level). ``suffix`` is written like ``ngram``; the heads ``medusa``,
``eagle3`` and ``dflash`` take chains and trees like ``draft_model`` (``draft`` in old records), and so does the target
itself (``self``, ``self:int8``, ``draft_model>self``). ``auto`` chooses at every step among suffix and all that have a
directory.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Generator, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from itertools import count
from pathlib import Path
from typing import Any, Self, TypeVar

import msgspec
import torch

from bench import BadOption
from foresay.server.engine.build import build_engine
from foresay.server.engine.drafters.registry import ENTRIES
from foresay.server.engine.drafting import DEFAULT_TOKENS
from foresay.server.settings.config import EngineConfig
from foresay.server.settings.resolved import AUTO, BUNDLED, stages, target_directory
from foresay.spec.engine import EngineCore
from foresay.spec.names import DFLASH, DRAFT_MODEL, EAGLE3, MEDUSA, NONE, SELF, canonical
from foresay.spec.request import Delta, Request
from foresay.spec.sampling import SamplingParams
from foresay.spec.trace import Statistics
from foresay.verifier.model_runner import ModelRunner

Result = TypeVar("Result")

_numbers = count()

#: Drafters that need a directory, and the flag that gives it.
#: Drafters that need no model, by name.
LOOKUPS = {name: entry.made for entry in ENTRIES if entry.looks for name in entry.names}
FROM_DIRECTORY = {DRAFT_MODEL: "draft", MEDUSA: "medusa", EAGLE3: "eagle3", DFLASH: "dflash"}


class BadMode(BadOption):
    """A way of decoding that is misspelt, or lacks its draft model or head."""


class RequestFailed(RuntimeError):
    """The engine ended a request with an error."""


@dataclass(frozen=True, slots=True)
class Options:
    """What all engines of one benchmark share. threads: None leaves the choice to the engine.

    draft, medusa, eagle3, dflash: directories. prefix_cache: whether common prefixes of prompts are computed once;
    rounds mostly repeat them. quantize, activations, kv_dtype: of the target.
    """

    target: str
    draft: str | None = None
    dtype: str = "auto"
    threads: int | None = None
    kv_tokens: int = 4096
    medusa: str | None = None
    eagle3: str | None = None
    dflash: str | None = None
    prefix_cache: bool = False
    quantize: str | None = None
    activations: str = "auto"
    kv_dtype: str = "auto"

    @classmethod
    def of(cls, args: argparse.Namespace) -> Self:
        """From the flags that ``add_arguments`` adds."""
        return cls(**{name: getattr(args, name) for name in ("target", "dtype", "threads", *FROM_DIRECTORY.values())})

    def with_bundled(self) -> Self:
        """The bundled draft model and heads if the target is the bundled one and no others are given."""
        if self.target != "bundled":
            return self
        flags = [flag for flag in FROM_DIRECTORY.values() if (BUNDLED / flag).is_dir()]
        found: dict[str, Any] = {flag: getattr(self, flag) or str(BUNDLED / flag) for flag in flags}
        return replace(self, **found)

    def has(self, mode: str) -> bool:
        """Whether the directory that a way of decoding needs is given."""
        names = [stage.partition(":")[0] for stage in stages(mode)]
        return all(name not in FROM_DIRECTORY or self.directory(name) is not None for name in names)

    def directory(self, name: str) -> str | None:
        """The directory a drafter is loaded from; None if not given."""
        found: str | None = getattr(self, FROM_DIRECTORY[name])
        return found

    def drafter(self, name: str) -> str:
        """The engine's name of the drafter of a way of decoding."""
        if name == "auto":
            named = [self.drafter(one) for one in FROM_DIRECTORY if self.directory(one)]
            return ",".join([*named, *AUTO]) if named else "auto"
        if len(chain := stages(name)) > 1:
            return " > ".join(self.drafter(stage) for stage in chain)
        return f"{name}:{self.directory(name)}" if name in FROM_DIRECTORY else name

    @property
    def directories(self) -> dict[str, str | None]:
        """The directories of the target and the drafters, for the record."""
        return {"target": self.target, **{flag: getattr(self, flag) for flag in FROM_DIRECTORY.values()}}

    @property
    def tokenizer(self) -> Path:
        """The local directory that holds the target's tokenizer."""
        return target_directory(engine_config(NONE, self))


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags that all benchmarks share."""
    parser.add_argument("--target", default="bundled", help="checkpoint directory or hub id (the bundled target)")
    for name, flag in FROM_DIRECTORY.items():
        parser.add_argument(f"--{flag}", metavar="DIR", help=f"draft model or head, for the {name} modes")
    parser.add_argument("--dtype", default="auto", choices=("auto", "bfloat16", "float32", "float16"))
    parser.add_argument("--threads", type=int, help="CPU threads (the engine's choice)")
    parser.add_argument("--seed", type=int, default=0)


@dataclass(slots=True)
class Run:
    """One request. seconds: wall time of its steps. decoded, decoding: tokens emitted after the first step that emitted
    any, and the seconds of those steps."""

    tokens: list[int] = field(default_factory=list)
    seconds: float = 0.0
    decoded: int = 0
    decoding: float = 0.0
    statistics: Statistics = field(default_factory=Statistics)

    def take(self, delta: Delta) -> None:
        """Count what a step did for it. Raises RequestFailed if it ends with an error."""
        self.tokens += delta.tokens
        self.statistics.take(delta, len(delta.tokens))
        if delta.error is not None:
            raise RequestFailed(delta.error)

    @property
    def tokens_per_step(self) -> float:
        """Mean acceptance length, including the bonus token."""
        return self.statistics.completion_tokens / max(1, self.statistics.steps)


def mode_of(text: str) -> str:
    """A way of decoding from a flag, by the drafter's canonical name."""
    name, size = sized(text)
    return ":".join(filter(None, (canonical(name), size)))


def sized(mode: str) -> tuple[str, str]:
    """The drafter of a way of decoding, and its size; "" without one."""
    name, _, size = mode.rpartition(":")
    return (name, size) if name and size.replace(",", "").isdigit() else (mode, "")


def engine_config(mode: str, options: Options) -> EngineConfig:
    """The configuration of an engine that decodes in the way ``mode``."""
    name, size = sized(mode)
    known = name in (NONE, *LOOKUPS, "auto", *FROM_DIRECTORY) or stages(name)[-1].partition(":")[0] == SELF
    if not known or (name == "auto" and size):
        raise BadMode(
            f"{mode!r} is none of: none, auto, ngram, ngram:8, suffix:8, draft_model:4, draft_model:3,2,1, "
            "medusa:6,8,6, eagle3:4,6,6, self:4, self:int8:4"
        )
    if not options.has(mode):
        raise BadMode(f"{mode!r} needs --{FROM_DIRECTORY[stages(name)[0].partition(':')[0]]} DIR")
    config = EngineConfig(
        target=options.target,
        draft=options.drafter(name),
        dtype=options.dtype,  # type: ignore[arg-type]
        threads=options.threads,
        kv_tokens=options.kv_tokens,
        max_seqs=1,
        prefix_cache=options.prefix_cache,
        quantize=options.quantize,  # type: ignore[arg-type]
        activations=options.activations,  # type: ignore[arg-type]
        kv_dtype=options.kv_dtype,  # type: ignore[arg-type]
    )
    if "," in size:
        return msgspec.structs.replace(config, draft_tree=size)
    if name == "auto":
        return config
    return msgspec.structs.replace(config, draft_tokens=int(size or DEFAULT_TOKENS))


def build(mode: str, options: Options) -> EngineCore:
    """An engine that decodes in the way ``mode``."""
    return build_engine(engine_config(mode, options), None)


def build_all(modes: Iterable[str], options: Options) -> dict[str, EngineCore]:
    """An engine per way of decoding, all on one copy of the target's weights.

    Two copies may be placed differently in memory, and one would be faster. Modes without their directory are left out.
    """
    engines: dict[str, EngineCore] = {}
    for mode in modes:
        if options.has(mode):
            engines[mode] = engine = build(mode, options)
            target_of(engine).decoder = target_of(next(iter(engines.values()))).decoder
    if not engines:
        raise BadMode("no way of decoding is left: those asked for need --draft, --medusa or --eagle3 DIR")
    return engines


def target_of(engine: EngineCore) -> ModelRunner:
    """The engine's target."""
    target: Any = engine.runner.verifier
    assert isinstance(target, ModelRunner)
    return target


def request(
    prompt: Sequence[int],
    tokens: int,
    temperature: float = 0.0,
    seed: int = 0,
    forced: Sequence[int] | None = None,
    salt: str = "",
) -> Request:
    """A request with a fresh id, for an answer of so many tokens. forced: the recorded ones."""
    params = SamplingParams(temperature=temperature, seed=seed, max_tokens=tokens, ignore_eos=True)
    recorded = None if forced is None else list(forced)
    return Request(id=f"bench-{next(_numbers)}", prompt=list(prompt), params=params, salt=salt, forced=recorded)


def stepped(engine: EngineCore, *requests: Request) -> Generator[int, None, list[Run]]:
    """Requests, each alone in the engine, from arrival to last token; yields after each step the number of tokens so
    far. Raises RequestFailed if one ends with an error, or not as recorded."""
    runs, written = list[Run](), 0
    for wanted in requests:
        engine.add(wanted)
        run, last = Run(), None
        while last is None:
            begun, decodes = time.perf_counter(), bool(run.tokens)
            deltas = engine.step()
            engine.notify()
            spent = time.perf_counter() - begun
            run.seconds += spent
            run.decoding += spent * decodes
            for delta in deltas:
                run.take(delta)
                run.decoded += len(delta.tokens) * decodes
                last = delta if delta.finish_reason is not None else None
            yield written + len(run.tokens)
        if wanted.forced is not None and run.tokens != wanted.forced[: wanted.params.max_tokens]:
            raise RequestFailed("what was written is not what was recorded")
        written += len(run.tokens)
        runs.append(run)
    return runs


def ended(steps: Generator[float, None, Result]) -> Result:
    """Take all steps at once; returns their result."""
    while True:
        try:
            next(steps)
        except StopIteration as end:
            result: Result = end.value
            return result


def run(engine: EngineCore, wanted: Request) -> Run:
    """Run one request to its end."""
    return ended(stepped(engine, wanted))[0]


def together(engine: EngineCore, requests: Sequence[Request], apart: int = 0) -> list[Run]:
    """Run all of them at once to their ends, untimed; or each ``apart`` steps after the one before, sooner if nothing
    else runs. Raises RequestFailed if one ends with an error."""
    runs, left, waiting, steps = {one.id: Run() for one in requests}, len(requests), list(requests), 0
    while left:
        while waiting and (steps >= apart * (len(runs) - len(waiting)) or not engine.has_work):
            engine.add(waiting.pop(0))
        steps += 1
        for delta in engine.step():
            runs[delta.id].take(delta)
            left -= delta.finish_reason is not None
    return list(runs.values())


@contextmanager
def torchs_threads(count: int) -> Iterator[None]:
    """Give torch so many threads: an engine of ours, whose kernels have their own threads, leaves it one."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def warm_up(engines: Iterable[EngineCore], prompt: Sequence[int]) -> None:
    """A few tokens through every engine, and what it prepares while nobody asks: first calls allocate and compile."""
    for engine in engines:
        while engine.prepare_one():
            pass
        run(engine, request(prompt, 8, temperature=1.0))
