"""How well a trace foretells what smaller trees have accepted: ``python -m bench.foretold``.

Each recorded way of decoding writes every prompt once, traced; what :mod:`foresay.server.observe.replay` says of a
smaller tree stands beside what that tree really accepts on the same prompts and seeds. Counts only, nothing is timed.
"""

from __future__ import annotations

import argparse
import tempfile
from dataclasses import dataclass
from pathlib import Path

from bench import prompts
from bench.drafters import with_bundled
from bench.drive import Options, add_arguments, engine_config, request, run
from foresay.server.engine.build import build_engine
from foresay.server.engine.observers import Lines, TraceWriter
from foresay.server.engine.trace import drafting, read
from foresay.server.observe.replay.ways import RECORDED, judge_lookups, judge_recorded, parse
from foresay.spec.sampling import SamplingParams

#: Recorded as, evaluated as, and the way of decoding that this foretells.
PAIRS = (
    ("draft_model:6", "recorded:1", "draft_model:1"),
    ("draft_model:6", "recorded:2", "draft_model:2"),
    ("draft_model:6", "recorded:4", "draft_model:4"),
    ("draft_model:6", "ngram:4", "ngram:4"),
    ("eagle3:6", "recorded:2", "eagle3:2"),
    ("eagle3:6", "recorded:4", "eagle3:4"),
    ("eagle3:6,6,6,5,4,4", "recorded@8", "eagle3:2,2,2,1,1"),
    ("eagle3:6,6,6,5,4,4", "recorded@16", "eagle3:4,4,4,2,2"),
)


@dataclass(frozen=True, slots=True)
class Texts:
    """What every way of decoding writes on."""

    options: Options
    prompts: list[list[int]]
    params: SamplingParams


def accepted_per_step(mode: str, texts: Texts) -> float:
    """Accepted tokens of a step behind the one that computed the prompt."""
    engine = build_engine(engine_config(mode, texts.options))
    runs = [run(engine, request(prompt, texts.params)) for prompt in texts.prompts]
    return sum(r.statistics.accepted for r in runs) / sum(r.statistics.steps - 1 for r in runs)


def record(mode: str, texts: Texts, file: Path) -> None:
    """Trace a way of decoding, with its text."""
    writer = TraceWriter(Lines(str(file)), text=True)
    engine = build_engine(engine_config(mode, texts.options), observers=[writer])
    writer.started(engine.info, engine.scheduler.cost)
    for prompt in texts.prompts:
        run(engine, request(prompt, texts.params))
    engine.tell()
    writer.close()


def foretold(way: str, file: Path) -> float:
    """What replay says of a way."""
    judge = judge_recorded if parse(way).source == RECORDED else judge_lookups
    requests = [told for session in read(file).sessions for told in drafting(session)]
    return judge(parse(way), requests).tokens_per_step - 1


def main() -> None:
    """Print a table."""
    parser = argparse.ArgumentParser(prog="python -m bench.foretold", description=__doc__)
    add_arguments(parser)
    parser.add_argument("--limit", type=int, default=12, help="prompts (12)")
    parser.add_argument("--max-tokens", type=int, default=128)
    parser.add_argument("--temperature", type=float, default=1.0)
    args = parser.parse_args()
    options = with_bundled(Options.of(args))
    params = SamplingParams(temperature=args.temperature, max_tokens=args.max_tokens, seed=args.seed, ignore_eos=True)
    texts = Texts(options, list(map(prompts.Encoder(options.tokenizer), prompts.load(limit=args.limit))), params)
    print(f"{'recorded':<20} {'evaluated':<14} {'run':<18} tokens per step: foretold, run, off by")
    with tempfile.TemporaryDirectory() as folder:
        for mode, way, real in PAIRS:
            file = Path(folder) / mode.replace(":", "-")
            if not file.exists():
                record(mode, texts, file)
            said, happened = 1 + foretold(way, file), 1 + accepted_per_step(real, texts)
            off = said / happened - 1
            print(f"{mode:<20} {way:<14} {real:<18} {said:>26.3f} {happened:>5.3f} {off:>+7.1%}", flush=True)


if __name__ == "__main__":
    main()
