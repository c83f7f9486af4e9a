"""What a draft model is worth with a part of the target's vocabulary: ``python -m bench.vocabularies [--other DIR]``.

The draft model is taken with all of its tokens, and then with the earliest of its vocabulary (which are the usual ones)
or with any of them, its ids renumbered: to the engine those are draft models of another vocabulary. ``--other`` adds
some that really are. All draft for the same prompts and seeds and must write the same tokens. Nothing is timed.
"""

from __future__ import annotations

import argparse
import json
import random
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer

from bench import prompts, record
from bench.decode import progress
from bench.drafters import tokens_per_step, with_bundled
from bench.drive import Options, add_arguments, build, mode_of, request, run, target_of
from bench.summary import Sample, check_same
from foresay.drafters.routed import configured
from foresay.server.text.detokenize import Spelling
from foresay.spec.engine import Engine
from foresay.spec.sampling import SamplingParams


def renumbered(source: Path, destination: Path, order: Sequence[int]) -> Path:
    """A copy of a checkpoint with a byte-level BPE whose token i is the former token ``order[i]``; others are gone."""
    shutil.copytree(source, destination)
    known = {old: new for new, old in enumerate(order)}
    _change(destination / "tokenizer.json", lambda content: _tokenizer(content, known))
    for name in ("config.json", "generation_config.json"):
        _change(destination / name, lambda content: _ends(content, known))
    _change(destination / "config.json", lambda content: content | {"vocab_size": len(order)})
    weights = load_file(destination / "model.safetensors")
    for name in {"model.embed_tokens.weight", "lm_head.weight"}.intersection(weights):
        weights[name] = weights[name][torch.tensor(order)].contiguous()
    save_file(weights, destination / "model.safetensors", metadata={"format": "pt"})
    return destination


def _change(path: Path, change: Callable[[dict[str, Any]], dict[str, Any]]) -> None:
    path.write_text(json.dumps(change(json.loads(path.read_text("utf-8")))), "utf-8")


def _tokenizer(content: dict[str, Any], known: dict[int, int]) -> dict[str, Any]:
    model = content["model"]
    model["vocab"] = {token: known[id] for token, id in model["vocab"].items() if id in known}
    merges = [merge if isinstance(merge, list) else merge.split(" ") for merge in model["merges"]]
    model["merges"] = [merge for merge in merges if {*merge, "".join(merge)} <= model["vocab"].keys()]
    content["added_tokens"] = [t | {"id": known[t["id"]]} for t in content["added_tokens"] if t["id"] in known]
    model["vocab"] |= {token["content"]: token["id"] for token in content["added_tokens"]}
    return content


def _ends(content: dict[str, Any], known: dict[int, int]) -> dict[str, Any]:
    ends = content.get("eos_token_id")
    if ends is not None:
        content["eos_token_id"] = [known[end] for end in ([ends] if isinstance(ends, int) else ends)]
    return content


def part(draft: Path, destination: Path, way: str, share: float) -> Path:
    """The draft model with a share of its vocabulary, the ``first`` or ``any`` of it; single bytes always stay."""
    backend = Tokenizer.from_file(str(draft / "tokenizer.json"))
    spelling, special, size = Spelling(backend), backend.get_added_tokens_decoder(), backend.get_vocab_size()
    others = [id for id in range(size) if id not in special and len(spelling.raw(id)) > 1]
    rng = random.Random(0)
    ranked = others if way == "first" else rng.sample(others, len(others))
    gone = set(ranked[max(0, round(share * size) - (size - len(others))) :])
    kept = [id for id in range(size) if id not in gone]
    return renumbered(draft, destination, rng.sample(kept, len(kept)))


def engines_of(options: Options, args: argparse.Namespace, folder: Path) -> Iterator[tuple[str, Engine]]:
    """One engine per draft model, by what it is called in the table."""
    draft = Path(str(options.draft))
    yield "none", build("none", options)
    yield draft.name, build(args.mode, options)
    for way, share in [(way, share) for way in ("first", "any") for share in args.shares]:
        directory = part(draft, folder / f"{way}-{share}", way, share)
        yield f"{way} {share:.0%}", build(args.mode, replace(options, draft=str(directory)))
    for directory in args.other:
        yield directory.name, build(args.mode, replace(options, draft=str(directory)))


def known(engine: Engine) -> set[int]:
    """The target's tokens that the draft model can propose."""
    ids = getattr(configured(engine.drafter), "token_ids", None)
    return set(range(engine.info.vocab_size)) if ids is None else set(ids.tolist())


def figures(samples: Sequence[Sample], name: str, engine: Engine, temperature: float) -> dict[str, Any]:
    """known: how many tokens of the vocabulary. spoken: of what the target wrote, the share that is among them."""
    own, ids = [s for s in samples if s.mode == name and s.temperature == temperature], known(engine)
    written = [token for sample in own for token in sample.run.tokens]
    spoken = sum(token in ids for token in written) / len(written)
    return {"known": len(ids), "spoken": spoken, "tokens_per_step": tokens_per_step(own)}


def arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m bench.vocabularies", description="Draft models of other tokens.")
    add_arguments(parser)
    parser.add_argument(
        "--mode", type=mode_of, default="draft_model:4", help="chain or tree, as draft_model:3,2,1 (draft_model:4)"
    )
    parser.add_argument("--shares", nargs="+", type=float, default=(0.7, 0.5, 0.25, 0.1), help="of the vocabulary")
    parser.add_argument("--other", nargs="+", type=Path, default=(), help="draft models of another vocabulary")
    parser.add_argument("--temperatures", nargs="+", type=float, default=(0.0, 1.0))
    parser.add_argument("--limit", type=int, help="only the first prompts")
    parser.add_argument("--max-tokens", type=int, default=128)
    return parser.parse_args()


def main() -> None:
    args = arguments()
    options, begun = with_bundled(Options.of(args)), time.perf_counter()
    encode = prompts.Encoder(options.tokenizer)
    asked = {prompt.name: encode(prompt) for prompt in prompts.load(limit=args.limit)}
    samples: list[Sample] = []
    engines: dict[str, Engine] = {}
    with tempfile.TemporaryDirectory() as folder:
        engines.update(engines_of(options, args, Path(folder)))
    for name, engine in engines.items():
        target_of(engine).decoder = target_of(engines["none"]).decoder
        for temperature in args.temperatures:
            params = SamplingParams(
                temperature=temperature, seed=args.seed, max_tokens=args.max_tokens, ignore_eos=True
            )
            for prompt, ids in asked.items():
                samples.append(Sample(name, temperature, prompt, args.seed, run(engine, request(ids, params))))
        progress(f"{name}, {len(asked)} prompts", begun)
    check_same(samples)
    found = {
        f"{temperature:g}": {name: figures(samples, name, engine, temperature) for name, engine in engines.items()}
        for temperature in args.temperatures
    }
    rows = [
        [name, temperature, f"{f['known']:,}", f"{f['spoken']:.1%}", f["tokens_per_step"]]
        for temperature, by_name in found.items()
        for name, f in by_name.items()
    ]
    record.table("draft models", ["draft model", "T", "tokens it knows", "of those written", "tokens/step"], rows)
    model = record.models(engines["none"], args.target, options.draft)
    shape = {
        "mode": args.mode,
        "prompts": len(asked),
        "max_tokens": args.max_tokens,
        "others": [path.name for path in args.other],
    }
    record.finish("vocabularies", {**model, **shape, "identical": True, "temperature": found}, not args.no_save)


if __name__ == "__main__":
    main()
