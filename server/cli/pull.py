"""``foresay pull NAME``: fetch a model from the hub before it is served, with the draft known to fit it if asked."""

from __future__ import annotations

import shlex
from argparse import ArgumentParser, Namespace
from pathlib import Path

from server.cli.command import Command
from spec.errors import ConfigurationError, ForesayError


def _add_arguments(parser: ArgumentParser) -> None:
    parser.add_argument("name", metavar="NAME", help="a hub id (OWNER/NAME) of a target, a draft model or a head")
    parser.add_argument(
        "--draft", action="store_true", help="fetch the draft too that is known to fit it (see foresay models)"
    )


def run(config: None, arguments: Namespace) -> int:
    """Fetch, and say where it lies and what to do with it. What was fetched in part before is gone on with."""
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
    """Where a model or a head lies, downloaded first if it is not all there. ModelNotFound says what went wrong."""
    from verifier.heads.kind import PATTERNS, kind_of
    from verifier.model.hub import LINK, resolve

    directory = resolve(name, flag="NAME")
    if kind_of(directory) is not None:  # only a model's files were fetched so far; heads may be stored as others
        return resolve(name, extra=PATTERNS, flag="NAME")
    if not any(directory.glob("*.safetensors")) and not (directory / LINK).exists():
        raise ForesayError(f"{name} holds no safetensors and no GGUF file, the only weights of a model that are read")
    return directory


def _draft_of(name: str) -> tuple[str, str]:
    """The hub id of the draft, and what ``--draft`` of other commands is to say."""
    from server.cli.catalog.catalog import find_target

    target = find_target(name)
    if target is None:
        raise ConfigurationError(f"no draft is known for {name}; foresay models lists the targets that have one")
    return target.drafts[0].id, target.drafts[0].setting


COMMAND = Command(
    "pull",
    "fetch a model from the hub, and the draft that fits it",
    ("foresay pull Qwen/Qwen3-8B --draft", "foresay pull HuggingFaceTB/SmolLM2-1.7B-Instruct"),
    None,
    run,
    _add_arguments,
)
