"""``python -m bench NAME [options]``."""

from __future__ import annotations

import sys
from argparse import ArgumentParser, RawDescriptionHelpFormatter
from importlib import import_module

from bench import BadOption

#: The purpose of each, in the order in which they are listed; the module of its name has ``options`` and ``main``, or
#: the module ``run`` of the package of its name.
NAMES = {
    "decode": "speculation on and off",
    "drafters": "what each drafter guesses right",
    "budget": "whether the budget ever loses",
    "peers": "Foresay and llama.cpp over HTTP",
    "agents": "coding agents' sessions: first tokens, and prompts found again",
    "restart": "what a restart, a kill and a swap of models cost with KV on disk, and what streams wait beside",
    "floor": "the least that a step costs here; what quantised weights and KV gain",
    "mixture": "a pass of a mixture of experts beside reading what it must",
    "quality": "what quantising costs in quality",
    "perplexity": "how likely a model finds a text",
    "replicas": "whether anything is lost on a real Ray",
    "soak": "random requests, kills and freezes, every answer compared",
    "inflate": "a small checkpoint, or heads of one, in a large shape",
    "counted": "what the budget chooses on a mixture, on a clock that counts",
    "cut": "a Llama checkpoint's MLPs cut into experts",
    "readme": "the README's figures, from the newest records of peers",
    "toy.train": "train the bundled target",
    "toy.distil": "train the bundled draft model",
    "toy.prompts": "prompts to train the bundled heads with",
}


def main(arguments: list[str]) -> int:
    """Run one of them; the exit status."""
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
        return int(module.main(args) or 0)
    except BadOption as error:
        parser.error(str(error))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
