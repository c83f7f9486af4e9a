"""``foresay train``: make a head for any target, in a layout that other servers read too."""

from __future__ import annotations

import sys
from argparse import ArgumentParser, ArgumentTypeError, Namespace
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from server.commands.command import Command

if TYPE_CHECKING:
    from drafters.heads.lesson import Depth

#: Heads of a Medusa set, and passes of the training-time test.
_DEPTHS = {"medusa": 4, "eagle3": 6}


def _count(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise ArgumentTypeError(f"must be a whole number of at least 1, got {text!r}")
    return int(text)


def _rate(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < 1:
        raise ArgumentTypeError(f"must be a number between 0 and 1, got {text!r}")
    return value


def _temperatures(text: str) -> tuple[float, ...]:
    try:
        values = tuple(float(part) for part in text.split(","))
    except ValueError:
        values = ()
    if not values or not all(0 <= value <= 100 for value in values):
        raise ArgumentTypeError(f'must be temperatures from 0 to 100 such as "1,0", got {text!r}')
    return values


def _add_arguments(parser: ArgumentParser) -> None:
    parser.usage = "foresay train {medusa,eagle3} --prompts PATH --out DIR [flags]"
    add = parser.add_argument
    add("kind", choices=sorted(_DEPTHS), help="medusa: independent heads; eagle3: one layer, run again for each token")
    add("--target", default="bundled", help="bundled, a directory, or a Hugging Face hub id (default: bundled)")
    add(
        "--prompts", type=Path, required=True, metavar="PATH", help="what the target goes on from: .txt, .jsonl, folder"
    )
    add("--out", type=Path, required=True, metavar="DIR", help="the head's folder; DIR.work holds an unfinished run")
    add("--samples", type=_count, default=2000, metavar="N", help="texts the target writes (default: 2000)")
    add("--length", type=_count, default=256, metavar="TOKENS", help="tokens in each, prompt included (default: 256)")
    add(
        "--temperatures",
        type=_temperatures,
        default=(1.0, 0.0),
        metavar="T,T",
        help="what the target writes at, batch by batch in turn (default: 1,0)",
    )
    add("--steps", type=_count, default=1500, metavar="N", help="training steps (default: 1500)")
    add("--batch", type=_count, default=8, metavar="N", help="texts in a step (default: 8)")
    add("--rate", type=_rate, metavar="R", help="learning rate (default: 1 / width of the target, at most 0.004)")
    add("--depth", type=_count, metavar="N", help="Medusa heads, or tokens that EAGLE-3 is trained ahead (4; 6)")
    add("--seed", type=int, default=0, metavar="S", help="of texts, order and first weights (default: 0)")
    add("--device", choices=("auto", "cpu", "cuda"), default="auto", help="where to train (default: auto)")


def run(config: None, arguments: Namespace) -> int:
    """Train; the table of held-out acceptance goes to stdout."""
    import torch

    from server.build import BUNDLED
    from server.training.run import Run, Settings
    from server.training.teacher import Teacher
    from spec.errors import ConfigurationError
    from verifier.model.config import ModelConfig
    from verifier.model.hub import resolve

    directory = BUNDLED / "target" if arguments.target == "bundled" else resolve(arguments.target)
    model = ModelConfig.from_directory(directory)
    depth = arguments.depth or _DEPTHS[arguments.kind]
    if not depth + 8 < arguments.length <= model.max_positions:
        raise ConfigurationError(
            f"--length must be above {depth + 8} and at most {model.max_positions}, the model's own"
        )
    if arguments.device == "cuda" and not torch.cuda.is_available():
        raise ConfigurationError("--device cuda: this machine has no CUDA device that PyTorch can use")
    device = arguments.device if arguments.device != "auto" else "cuda" if torch.cuda.is_available() else "cpu"
    settings = Settings(
        kind=arguments.kind,
        target=arguments.target,
        prompts=str(arguments.prompts),
        samples=arguments.samples,
        length=arguments.length,
        steps=arguments.steps,
        batch=arguments.batch,
        rate=arguments.rate or min(4e-3, 1.0 / model.hidden_size),
        depth=depth,
        seed=arguments.seed,
        temperatures=arguments.temperatures,
    )
    out = arguments.out.absolute()
    depths = Run(settings, Teacher(directory, device, torch.float32), out, progress=sys.stderr.isatty())()
    print(table(depths))
    print(f"saved in {out}; use it with --draft {arguments.kind}:{out}", file=sys.stderr)
    return 0


def table(depths: Sequence[Depth]) -> str:
    """Held-out acceptance by depth, given that everything before was right."""
    lines = ["depth   accepted at T=0   at T=1   cross-entropy"]
    for number, depth in enumerate(depths, start=1):
        lines.append(f"{number:>5}   {depth.greedy:>15.1%}   {depth.sampled:>6.1%}   {depth.loss:>13.3f}")
    return "\n".join(lines)


COMMAND = Command(
    name="train",
    summary="train a Medusa set or an EAGLE-3 head for a target",
    examples=(
        "foresay train eagle3 --prompts prompts.txt --out my-head",
        "foresay train medusa --target HuggingFaceTB/SmolLM2-135M-Instruct --prompts chats.jsonl --out heads",
    ),
    config=None,
    run=run,
    add_arguments=_add_arguments,
)
