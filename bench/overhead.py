"""What the engine adds to its models' passes: ``python -m bench.overhead --target DIR [--modes none draft_model:4]``.

Every ``run`` of a model inside a step is timed on the spot; what is left of the step is the engine's own: planning,
pages, noise, the draw, accepting, committing, the delta. Same batch, same moment, no second run to compare with.
Measure at a real vocabulary (``bench.inflate --vocab 49152``): noise and draw grow with it. Prompt passes are left out.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from bench import prompts, record
from bench.drive import Options, add_arguments, build_all, mode_of, request, warm_up
from bench.stats import percentile
from foresay.spec.engine import Engine
from foresay.spec.request import Request
from foresay.spec.sampling import SamplingParams
from foresay.verifier.paged_model import PagedModel

WAYS = {"T=0": SamplingParams(temperature=0.0), "T=1 top-p 0.9": SamplingParams(temperature=1.0, top_p=0.9)}


class Meter:
    """Seconds spent inside the models since it was last read."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def read(self) -> float:
        """The seconds so far; starts again at nothing."""
        seconds, self.seconds = self.seconds, 0.0
        return seconds


@contextmanager
def metered_models() -> Iterator[Meter]:
    """Times every ``PagedModel.run``, of the target and of a draft model, while it is open."""
    meter, plain = Meter(), PagedModel.run

    def run(self: PagedModel, *args: Any, **kwargs: Any) -> Any:
        begun = time.perf_counter()
        try:
            return plain(self, *args, **kwargs)
        finally:
            meter.seconds += time.perf_counter() - begun

    PagedModel.run = run  # type: ignore[method-assign]
    try:
        yield meter
    finally:
        PagedModel.run = plain  # type: ignore[method-assign]


def added(engine: Engine, asked: Request, meter: Meter) -> list[tuple[float, float]]:
    """(what the engine added, what its models took) in seconds, for each decode step of one request."""
    engine.add(asked)
    steps, drawn = [], False
    while engine.has_work:
        meter.read()
        begun = time.perf_counter()
        deltas = engine.step()
        whole, models = time.perf_counter() - begun, meter.read()
        if drawn:
            steps.append((whole - models, models))
        drawn = drawn or bool(deltas)
    return steps


def summarise(steps: list[tuple[float, float]]) -> dict[str, float]:
    """Milliseconds."""
    own, models = ([1e3 * seconds for seconds in column] for column in zip(*steps, strict=True))
    return {
        "steps": len(steps),
        "added_ms_p50": percentile(own, 50),
        "added_ms_p99": percentile(own, 99),
        "models_ms_p50": percentile(models, 50),
        "models_ms_p99": percentile(models, 99),
    }


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.overhead", description="What the engine adds to a forward.")
    add_arguments(parser)
    parser.add_argument("--modes", nargs="+", type=mode_of, default=("none", "draft_model:4"))
    parser.add_argument("--prompts", type=Path)
    parser.add_argument("--limit", type=int, default=8)
    parser.add_argument("--max-tokens", type=int, default=64)
    args = parser.parse_args()
    options = Options.of(args)
    engines = build_all(args.modes, options)
    encode = prompts.Encoder(options.tokenizer)
    asked = [encode(prompt) for prompt in prompts.load(args.prompts, args.limit)]
    warm_up(engines.values(), asked[0])
    steps: dict[tuple[str, str], list[tuple[float, float]]] = {(m, way): [] for m in engines for way in WAYS}
    with metered_models() as meter:
        for prompt in asked:
            for mode, way in steps:
                sampling = {"seed": args.seed, "max_tokens": args.max_tokens, "ignore_eos": True}
                params = SamplingParams(temperature=WAYS[way].temperature, top_p=WAYS[way].top_p, **sampling)
                steps[mode, way] += added(engines[mode], request(prompt, params), meter)
    results = {f"{mode}, {way}": summarise(taken) for (mode, way), taken in steps.items()}
    first = next(iter(engines.values()))
    columns = list(next(iter(results.values())))
    title = f"what a step adds to its models' passes, vocabulary {first.info.vocab_size:,}"
    record.table(title, ["decoding", *columns], [[name, *row.values()] for name, row in results.items()])
    record.finish("overhead", {**record.models(first, args.target, args.draft), "ways": results}, not args.no_save)


if __name__ == "__main__":
    main()
