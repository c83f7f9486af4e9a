"""What a head gains that drafts few of many tokens: ``python -m bench vocabulary --target DIR [--texts MODEL FILE]``.

A step of a chain from the layer that the target's checkpoint has to predict tokens (``--draft mtp``), with the output
matrix of all tokens and with that of those said lately, in turns with plain steps. Random weights will do: nothing of
what they draft is accepted, so steps are counted, not tokens.

``--texts`` reads files in order, as one user's chats, with another model's tokenizer: how many of their tokens were
among the drafted ones when they came, if those were always the first ids, and if what is said takes others' places. As
large a share of that vocabulary is drafted as of ``--share``.
"""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from pathlib import Path
from typing import Any

import torch

from bench import record
from bench.drive import Options, build, request, run, target_of
from bench.experiment import Case, Experiment, Sample, Variant
from bench.perplexity import tokens_of
from foresay.server.engine.build import build_engine
from foresay.server.settings.config import EngineConfig
from foresay.spec.engine import Engine
from foresay.spec.sampling import SamplingParams
from foresay.verifier.heads import vocabulary
from foresay.verifier.heads.vocabulary import DRAFTED, DraftVocabulary

_ALL = 1 << 40


def options(parser: ArgumentParser) -> None:
    parser.add_argument("--target", required=True)
    parser.add_argument("--levels", type=int, default=3, help="of the chains (3)")
    parser.add_argument("--tokens", type=int, default=24, help="of an answer (24)")
    parser.add_argument("--repeats", type=int, default=8)
    parser.add_argument("--texts", nargs="+", metavar="MODEL FILE", default=())
    parser.add_argument(
        "--share", type=int, default=248_320, help="the vocabulary of which 32,768 are drafted (248320)"
    )
    parser.add_argument("--no-save", action="store_true")


def main(args: Namespace) -> None:
    results = {"steps": steps(args)}
    if args.texts:
        results["texts"] = covered(args.texts[0], list(map(Path, args.texts[1:])), DRAFTED / args.share)
        print(results["texts"])
    record.finish("vocabulary", results, not args.no_save)


def steps(args: Namespace) -> Any:
    """Milliseconds of a step of each kind."""
    engines = {
        "plain": engine_of(args, "none"),
        "all tokens": engine_of(args, "mtp", _ALL),
        "some": engine_of(args, "mtp"),
    }
    generator = torch.Generator().manual_seed(0)

    def measured(engine: Engine, case: Case) -> Sample:
        done = run(engine, request(case.input, SamplingParams(max_tokens=args.tokens, ignore_eos=True)))
        return Sample({"ms": 1e3 * done.decoding / (done.statistics.steps - 1)})

    prompt = torch.randint(5, engines["plain"].info.vocab_size, (100,), generator=generator).tolist()
    experiment = Experiment(
        variants=[Variant(name, lambda case, turn, one=one: measured(one, case)) for name, one in engines.items()],  # type: ignore[misc]
        cases=[Case(f"chains of {args.levels}", "", prompt)],
        figure="ms",
        bases=("plain", "all tokens"),
        rounds=args.repeats,
        warm=1,
    )
    return experiment.run()[1].groups


def engine_of(args: Namespace, draft: str, most: int = DRAFTED) -> Engine:
    """most: tokens that are drafted at once."""
    vocabulary.DRAFTED = most
    made = build_engine(
        EngineConfig(
            target=args.target, draft=draft, draft_tokens=None if draft == "none" else args.levels, max_seqs=1,
            max_model_len=1024, kv_tokens=2048,
        )
    )  # fmt: skip
    vocabulary.DRAFTED = DRAFTED
    return made


def covered(model: str, files: list[Path], share: float) -> dict[str, float]:
    """Of the files' tokens those that could have been drafted."""
    settings = Options(model)
    decoder = target_of(build("none", settings)).decoder
    count = int(share * decoder.config.vocab_size)
    drafted, first = DraftVocabulary(decoder, count), set(DraftVocabulary(decoder, count).token_ids.tolist())
    hits, of_first, total = 0, 0, 0
    for file in files:
        for token in tokens_of(settings.tokenizer, file.read_text("utf-8"))[0]:
            hits, of_first, total = hits + (token in drafted), of_first + (token in first), total + 1
            drafted.said([token])
    return {"vocabulary": decoder.config.vocab_size, "drafted": count, "tokens": total, "first ids": of_first / total,
            "said lately": hits / total}  # fmt: skip
