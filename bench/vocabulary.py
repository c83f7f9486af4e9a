"""The gain of a head that drafts few of many tokens: ``python -m bench vocabulary --target DIR [--texts MODEL FILE]``.

Steps of a chain from the checkpoint's layer that predicts further tokens (``--draft mtp``), with the output matrix of
all tokens and with that of recently emitted ones, in turns with plain steps. Random weights suffice: none of their
drafts is accepted, so steps are counted, not tokens.

``--texts`` reads files in order, as one user's chats, with another model's tokenizer: how many of their tokens were
among the drafted ones when they were emitted, if those are always the first ids, and if emitted ones replace others.
The drafted share of that vocabulary is as large as that of ``--share``.
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
from foresay.drafters.eagle import MtpDrafter
from foresay.server.engine.build import build_engine
from foresay.server.settings.config import EngineConfig
from foresay.server.settings.resolved import target_directory
from foresay.spec.sampling import SamplingParams
from foresay.verifier.heads.paged import EagleHead
from foresay.verifier.heads.reader import read_beside
from foresay.verifier.heads.vocabulary import DRAFTED, DraftVocabulary


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
    """Milliseconds of a step of each kind, in one engine with either drafter."""
    sizes: dict[str, Any] = {"max_seqs": 1, "max_model_len": 1024, "kv_tokens": 2048, "prefix_cache": False}
    config = EngineConfig(target=args.target, draft="mtp", draft_tokens=args.levels, **sizes)
    engine = build_engine(config)
    routed: Any = engine.drafter
    directory, decoder = target_directory(config), target_of(engine).decoder
    whole = MtpDrafter(EagleHead(*read_beside(directory, decoder), decoder.max_positions), engine.pool)
    kinds = {"plain": None, "all tokens": whole, "some": routed.configured}
    prompt = torch.randint(5, engine.info.vocab_size, (100,), generator=torch.Generator().manual_seed(0)).tolist()

    def measured(name: str) -> Sample:
        routed.configured = kinds[name]
        routed.needs = None if kinds[name] is None else whole.needs
        # No prefix cache: a drafter does not draft if it finds another one's prefix without its own states.
        done = run(engine, request(prompt, SamplingParams(max_tokens=args.tokens, ignore_eos=True)))
        assert done.statistics.drafted or kinds[name] is None
        return Sample({"ms": 1e3 * done.decoding / (done.statistics.steps - 1)})

    experiment = Experiment(
        variants=[Variant(name, lambda case, turn, name=name: measured(name)) for name in kinds],  # type: ignore[misc]
        cases=[Case(f"chains of {args.levels}", "")],
        figure="ms",
        bases=("plain", "all tokens"),
        rounds=args.repeats,
        warm=1,
    )
    return experiment.run()[1].groups


def covered(model: str, files: list[Path], share: float) -> dict[str, float]:
    """The share of the files' tokens that could have been drafted."""
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
