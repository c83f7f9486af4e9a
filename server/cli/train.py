"""``foresay train``: make a drafter for any target, in a layout that other servers can read, too."""

from __future__ import annotations

import os
import shlex
import sys
from argparse import ArgumentParser, ArgumentTypeError, Namespace
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from foresay.drafters.training.prompts import Prompt, read_prompts
from foresay.drafters.training.settings import Settings
from foresay.server.cli import INTERRUPTED
from foresay.server.cli.command import COUNT, arguments, command, whole_number
from foresay.server.cli.progress import Stages
from foresay.server.engine_process.child import PASSIVE
from foresay.server.settings.config import EngineConfig
from foresay.server.settings.resolved import target_directory
from foresay.server.settings.units import counted
from foresay.spec.errors import ConfigurationError, ForesayError
from foresay.spec.names import DFLASH, DRAFT_MODEL, EAGLE3, MEDUSA, PEAGLE, canonical
from foresay.verifier.model.config import ModelConfig
from foresay.verifier.model.gguf.file import LINK

if TYPE_CHECKING:
    import torch

    from foresay.drafters.heads.training_batch import Evaluation
    from foresay.drafters.training.run_folder import RunFolder

#: Default depths: Medusa heads, passes of EAGLE-3's training-time test, tokens predicted by a block or by masks; a
#: draft model sees the true text at every depth.
_DEPTHS = {MEDUSA: 4, EAGLE3: 6, DFLASH: 7, PEAGLE: 7, DRAFT_MODEL: 1}
#: Most layers of a DFlash head by default.
_MOST_LAYERS = 5
#: Texts generated in parallel: enough to fill a GPU; few on a CPU, since an interrupted run loses those in progress.
_TOGETHER = {"cuda": 128, "cpu": 32}


_samples = whole_number("a whole number of at least 2, one of them to be held out", lambda number: number >= 2)
_seed = whole_number("a whole number from 0 to 999999999", lambda number: number < 10**9)
_width = whole_number("a multiple of 8", lambda number: number >= 1 and number % 8 == 0)


def _temperatures(text: str) -> tuple[float, ...]:
    try:
        values = tuple(float(part) for part in text.split(","))
    except ValueError:
        values = ()
    if not values or not all(0 <= value <= 2 for value in values):
        raise ArgumentTypeError(f'must be temperatures from 0 to 2 such as "1,0", got {text!r}')
    return values


def _add_arguments(parser: ArgumentParser) -> None:
    parser.usage = "foresay train KIND --prompts PATH --out DIR [flags]"
    parser.add_argument(
        "kind",
        metavar="KIND",
        type=canonical,
        choices=sorted(_DEPTHS),
        help="dflash: a few layers that guess a block of tokens at once; draft_model: a small model; eagle3: one layer "
        "on the target, run per token; medusa: independent heads; peagle: an EAGLE-3 head that guesses several at once",
    )
    _add_needed(parser)
    _add_texts(parser)
    _add_learning(parser)


def _add_needed(parser: ArgumentParser) -> None:
    add = parser.add_argument_group("what to make, from what").add_argument
    add(
        "--target",
        default="bundled",
        help="a short name such as smollm2, a hub id, a directory, a GGUF file, or bundled (default: bundled)",
    )
    add(
        "--prompts",
        type=Path,
        required=True,
        metavar="PATH",
        help="prompts for the target: .jsonl of chats, .txt of texts to continue, or a folder",
    )
    add("--out", type=Path, required=True, metavar="DIR", help="a new folder; DIR.work beside it holds unfinished work")
    add(
        "--layers",
        type=COUNT,
        metavar="N",
        help="draft_model, dflash: its layers (default: a quarter of the target's; dflash: up to 5)",
    )
    add("--width", type=_width, metavar="H", help="draft_model: its width (default: half of the target's)")
    add(
        "--depth",
        type=COUNT,
        metavar="N",
        help="medusa: heads (4); eagle3: tokens it is trained ahead (6); dflash, peagle: tokens guessed at once (7)",
    )
    add(
        "--vocabulary",
        type=COUNT,
        metavar="N",
        help="dflash, eagle3, peagle: guess among the N tokens that the target writes most (default: 32000)",
    )


def _add_texts(parser: ArgumentParser) -> None:
    add = parser.add_argument_group("the texts the target writes").add_argument
    add("--samples", type=_samples, default=2000, metavar="N", help="how many (default: 2000)")
    add("--length", type=COUNT, default=256, metavar="TOKENS", help="tokens in each, prompt included (default: 256)")
    add(
        "--temperatures",
        type=_temperatures,
        default=(1.0, 0.0),
        metavar="T,T",
        help="temperatures the target samples at, batch by batch in turn (default: 1,0)",
    )
    add("--seed", type=_seed, default=0, metavar="S", help="of texts, order and first weights (default: 0)")


def _add_learning(parser: ArgumentParser) -> None:
    add = parser.add_argument_group("learning").add_argument
    add("--steps", type=COUNT, default=1500, metavar="N", help="training steps (default: 1500)")
    add("--batch", type=COUNT, default=8, metavar="N", help="texts in a step (default: 8)")
    add("--device", choices=("auto", "cpu", "cuda"), default="auto", help="where to train (default: auto)")


@command(None, name="train")
@arguments(_add_arguments)
def run(config: None, arguments: Namespace) -> int:
    """Train a draft model or a head (EAGLE-3, DFlash, Medusa) for a model.

    foresay train eagle3 --prompts prompts.txt --out my-head
    foresay train draft_model --target HuggingFaceTB/SmolLM2-1.7B-Instruct --prompts chats.jsonl --out my-draft
    foresay train medusa --target HuggingFaceTB/SmolLM2-135M-Instruct --prompts chats.jsonl --out my-heads
    """
    if not arguments.prompts.exists():
        raise ConfigurationError(f"--prompts {arguments.prompts}: no such file or directory")
    os.environ.update(PASSIVE | os.environ)
    prompts = read_prompts(arguments.prompts)
    with Stages() as stages:
        stages("finding the target")
        directory, model = _target(arguments.target)
        stages("importing PyTorch")
        device = _device(arguments.device)
        settings = _settings(arguments, model, device)
        from foresay.drafters.training.run_folder import RunFolder

        work = RunFolder(arguments.out, settings)
    try:
        judged = _trained(settings, prompts, directory, device, model, work)
    except KeyboardInterrupt:
        print(f"foresay train: stopped{_kept(work, settings)}", file=sys.stderr)
        return INTERRUPTED
    finally:
        work.close()
    print(table(judged, settings.kind), flush=True)
    print(farewell(settings, work.out), file=sys.stderr, flush=True)
    return 0


def _kept(work: RunFolder, settings: Settings) -> str:
    """What an interrupted run keeps."""
    if work.has_progress:
        return f"; {work.path} keeps the work so far; run the same command to continue"
    first = min(settings.together, settings.samples)
    return f" before the first {first} texts were complete, so there is nothing to keep"


def _target(name: str) -> tuple[Path, ModelConfig]:
    """The target's directory and configuration. Raises ConfigurationError if it cannot be trained from."""
    directory = target_directory(EngineConfig(target=name), flag="--target")
    model = ModelConfig.from_directory(directory)
    # A GGUF file's weights are dequantised for training.
    if model.quantization is not None and not (directory / LINK).exists():
        raise ConfigurationError(
            f"--target {name}: its weights are quantised ({model.quantization}); train with the model it was made "
            "from; the result drafts for both"
        )
    return directory, model


def _settings(arguments: Namespace, model: ModelConfig, device: str) -> Settings:
    """The settings as requested, or derived from the target. Raises ConfigurationError for combinations that do not
    fit."""
    from foresay.drafters.training.shapes import default_layers, default_width

    kind = arguments.kind
    own = {
        "depth": (DFLASH, EAGLE3, MEDUSA, PEAGLE),
        "layers": (DFLASH, DRAFT_MODEL),
        "width": (DRAFT_MODEL,),
        "vocabulary": (DFLASH, EAGLE3, PEAGLE),
    }
    for name, kinds in own.items():
        if getattr(arguments, name) is not None and kind not in kinds:
            raise ConfigurationError(f"--{name} is for {', '.join(kinds)} only, not for {kind}")
    depth = arguments.depth or _DEPTHS[kind]
    if not depth + 8 < arguments.length <= model.max_positions:
        raise ConfigurationError(
            f"--length must be above {depth + 8} and at most {model.max_positions}, the model's own"
        )
    most = {DRAFT_MODEL: model.num_layers, DFLASH: _MOST_LAYERS}.get(kind)
    width = arguments.width or default_width(model.hidden_size)
    learning = width if kind == DRAFT_MODEL else model.hidden_size
    return Settings(
        kind=kind,
        target=arguments.target,
        prompts=str(arguments.prompts),
        samples=arguments.samples,
        length=arguments.length,
        steps=arguments.steps,
        batch=arguments.batch,
        rate=min(4e-3, 1.0 / learning),
        depth=depth,
        seed=arguments.seed,
        temperatures=arguments.temperatures,
        layers=arguments.layers or (most and default_layers(model.num_layers, most)),
        width=width if kind == DRAFT_MODEL else None,
        vocabulary=arguments.vocabulary or 32_000,
        together=_TOGETHER[device],
    )


def _device(device: str) -> str:
    import torch

    if device == "cuda" and not torch.cuda.is_available():
        raise ConfigurationError("--device cuda: this machine has no CUDA device that PyTorch can use")
    if device != "auto":
        return device
    return "cuda" if torch.cuda.is_available() else "cpu"


def _trained(
    settings: Settings, prompts: Sequence[Prompt], directory: Path, device: str, model: ModelConfig, work: RunFolder
) -> Evaluation:
    import torch
    from transformers.utils import logging

    from foresay.drafters.training.run import Run
    from foresay.drafters.training.teacher import Teacher

    logging.set_verbosity_error()  # type: ignore[no-untyped-call]
    logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    # A CPU without bf16 instructions is several times faster in fp32; a GPU has them, and less memory.
    dtype: torch.dtype = getattr(torch, model.dtype) if device == "cuda" else torch.float32
    try:
        with Stages() as stages:
            stages("loading the target")
            teacher = Teacher(directory, device, dtype)
        return Run(settings, teacher, work)()
    except (MemoryError, RuntimeError) as error:
        if isinstance(error, RuntimeError) and "memory" not in str(error):
            raise
        raise ForesayError(
            f"not enough memory for steps of {settings.batch} texts of {settings.length} tokens: "
            f"remove {work.path}, and lower --batch or --length"
        ) from error


def table(judged: Evaluation, kind: str) -> str:
    """Held-out acceptance by depth, given that all earlier tokens were right."""
    lines = [
        f"judged on {counted(judged.texts, 'text')} ({judged.tokens:,} tokens) that it did not learn from",
        "depth   accepted at T=0   at T=1   cross-entropy",
    ]
    for number, depth in enumerate(judged.depths, start=1):
        name = "any" if kind == DRAFT_MODEL else str(number)
        lines.append(f"{name:>5}   {depth.greedy:>15.1%}   {depth.sampled:>6.1%}   {depth.loss:>13.3f}")
    return "\n".join(lines)


def farewell(settings: Settings, out: Path) -> str:
    """How to use and check the result."""
    target = "" if settings.target == "bundled" else f"{shlex.quote(settings.target)} "
    draft = shlex.quote(str(out) if settings.kind == DRAFT_MODEL else f"{settings.kind}:{out}")
    return "\n".join(
        [
            f"saved in {out}",
            f"use it:      foresay serve {target}--draft {draft}",
            f"measure it:  foresay bench {target}--draft {draft}",
        ]
    )
