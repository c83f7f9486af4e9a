"""``python -m bench NAME [options]``."""

from __future__ import annotations

import sys
from argparse import ArgumentParser, RawDescriptionHelpFormatter
from importlib import import_module

from bench import BadOption

#: The purpose of each, in the order in which they are listed. The module of its name, or ``run`` of the package of its
#: name, has ``options``, which adds its flags, and ``main``, which returns its results for the record, if it has any;
#: ``holds`` among them is False if they are not as they should be.
NAMES = {
    "decode": "speculation on and off",
    "budget": "whether the budget ever loses",
    "peers": "Foresay and llama.cpp over HTTP",
    "race": "races in the playground, in a real browser; a film of one",
    "agents": "coding agents' sessions: first tokens, and prompts found again",
    "replay": "what lookup drafters would have had accepted in recorded texts",
    "floor": "the least that a step costs here; what quantised weights and KV gain",
    "quality": "what quantising costs in quality",
    "perplexity": "how likely a model finds a text",
    "soak": "random requests, kills and freezes, every answer compared",
    "fetch": "real models for the others and for tests, from the hub or a package index",
    "inflate": "a small checkpoint, or heads of one, in a large shape",
    "carve": "a mixture of experts out of a dense model",
    "mutants": "whether the tests find faults",
    "readme": "the README's figures, from the newest records of peers",
}


def main(arguments: list[str]) -> int:
    """Run one of them and record its results; the exit status."""
    name = arguments[0] if arguments else ""
    if name not in NAMES:
        known = "\n".join(f"  {one:12} {text}" for one, text in NAMES.items())
        print(f"usage: python -m bench NAME [options]; NAME --help says more\n\n{known}", file=sys.stderr)
        return 0 if name in ("-h", "--help") else 2
    module = import_module(f"bench.{name}")
    module = module if hasattr(module, "main") else import_module(f"bench.{name}.run")
    parser = ArgumentParser(
        prog=f"python -m bench {name}", description=module.__doc__, formatter_class=RawDescriptionHelpFormatter
    )
    module.options(parser)
    parser.add_argument("--no-save", action="store_true", help="do not write to bench/results/")
    args = parser.parse_args(arguments[1:])
    try:
        results = module.main(args)
    except BadOption as error:
        parser.error(str(error))
    if results is None:
        return 0
    from bench import record  # imports torch, which the list of names does not need

    record.finish(name, results, not args.no_save)
    return int(results.get("holds") is False)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
