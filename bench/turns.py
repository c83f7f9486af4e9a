"""Several engines write the same texts in turns, step by step.

A machine that others use too is slower or faster for seconds at a time, which is as long as a text takes; whole texts
in turns then differ by more than what is looked for. Here the engine that has come least far takes the next step, so
that all of them are at the same place of the text at the same time, whatever the machine does.
"""

from __future__ import annotations

import random
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from bench.drive import RequestFailed, finished
from foresay.spec.engine import Engine
from foresay.spec.request import Request


@dataclass(slots=True, eq=False)
class Lane:
    """One engine's way through its requests. written: tokens of each request begun; tokens, seconds: of all, behind
    the first token of each."""

    engine: Engine
    waiting: list[Request]
    written: list[list[int]] = field(default_factory=list)
    tokens: int = 0
    seconds: float = 0.0

    @property
    def over(self) -> bool:
        """Whether nothing is left to do."""
        return not self.waiting and not self.engine.has_work

    @property
    def progress(self) -> int:
        """Tokens written, of all requests."""
        return sum(map(len, self.written))

    def step(self) -> None:
        """The next step, and what is told after it. Raises RequestFailed if the request ended with an error."""
        if not self.engine.has_work:
            self.engine.add(self.waiting.pop(0))
            self.written.append([])
        begun = time.perf_counter()
        deltas = self.engine.step()
        self.engine.tell()
        spent = time.perf_counter() - begun
        text = self.written[-1]
        if text:
            self.seconds += spent
            self.tokens += sum(len(delta.tokens) for delta in deltas)
        for delta in deltas:
            text.extend(delta.tokens)
            if delta.finish_reason is not None:
                finished(delta)


def in_turns(engines: Mapping[str, Engine], asked: Mapping[str, Sequence[Request]], seed: int) -> dict[str, Lane]:
    """Everything asked of each, written. Who is equally far goes in random order. Raises RequestFailed if one of them
    wrote another text than the others, or than what was to be followed, or ended with an error."""
    lanes = {mode: Lane(engine, list(asked[mode])) for mode, engine in engines.items()}
    order = random.Random(seed)
    while running := [lane for lane in lanes.values() if not lane.over]:
        min(running, key=lambda lane: (lane.progress, order.random())).step()
    texts = [lane.written for lane in lanes.values()]
    if any(text != texts[0] for text in texts):
        raise RequestFailed(f"{', '.join(lanes)} did not write the same text")
    for mode in lanes:
        for request, written in zip(asked[mode], lanes[mode].written, strict=True):
            if request.forced is not None and written != request.forced[: request.params.max_tokens]:
                raise RequestFailed(f"{mode} did not follow what was recorded")
    return lanes
