"""``foresay models``: known targets, their memory in bf16, int8 and int4, and which of these fit this machine.
``foresay models NAME``: one of them, with its drafts and how to serve it.
"""

from __future__ import annotations

import os
import shlex
import sys
from argparse import ArgumentParser, Namespace
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from foresay.server.cli.command import command
from foresay.server.settings.fields import nearest
from foresay.server.settings.units import bytes_in_words, count_in_words
from foresay.spec.errors import ConfigurationError

if TYPE_CHECKING:
    from rich.console import Console

    from foresay.server.catalog.catalog import KnownDraft, KnownTarget
    from foresay.server.cli.fits import Machine

#: Headings and styles of targets by the first format that fits.
GROUPS = {
    "bf16": ("fits", "green"),
    "int8": ("fits in int8: serve it with --quantize int8", "yellow"),
    "int4": ("fits in int4: serve it with --quantize int4", "yellow"),
    None: ("does not fit", "dim"),
}


def _add_models_arguments(parser: ArgumentParser) -> None:
    parser.add_argument(
        "name",
        nargs="?",
        metavar="NAME",
        help="one of them, for what drafts for it and how to serve it; or what several have in their names",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON array instead of the table")


@command(None, _add_models_arguments, name="models")
def show(config: None, arguments: Namespace) -> int:
    """List known models, the memory they take, and what fits this machine.

    foresay models
    foresay models Qwen/Qwen3-8B
    foresay models --json
    """
    import msgspec

    from foresay.server.catalog.catalog import known_targets
    from foresay.server.cli.fits import Machine

    machine, name = Machine.here(), arguments.name
    targets = _named(name) if name else list(known_targets().values())
    if arguments.json:
        print(msgspec.json.encode([_record(target, machine) for target in targets]).decode())
    elif len(targets) == 1:
        _show_one(targets[0], machine)
    else:
        _show_all(targets, machine)
    return 0


def _named(name: str) -> list[KnownTarget]:
    """The target with this name, else all whose name contains it."""
    from foresay.server.catalog.catalog import find_target, known_targets, last_part

    if (found := find_target(name)) is not None:
        return [found]
    if partly := [one for id, one in known_targets().items() if name.lower() in id.lower()]:
        return partly
    known = [word for one in known_targets().values() for word in (one.id, last_part(one.id), one.short) if word]
    hint = nearest(name, known) or f"; foresay check {shlex.quote(name)} looks at any other model"
    raise ConfigurationError(f"NAME {name}: not in the catalog, which foresay models lists{hint}")


def _record(target: KnownTarget, machine: Machine) -> dict[str, Any]:
    """A target for programs. memory: bytes by format of weights, with a KV cache of ``fits.TOKENS`` tokens; a draft's
    includes its target. fits: the first format that fits here. disk_bytes: size of its files, 0 if some are missing."""
    from foresay.server.catalog.catalog import on_disk
    from foresay.server.cli.fits import fitting
    from foresay.verifier.model.hub import cached

    size = _size(on_disk(target))
    drafts = [
        {
            "id": draft.id,
            "setting": draft.setting,
            "kind": draft.kind,
            "weights": draft.parameters,
            "memory": _memory(target, draft, machine),
            "fits": fitting(target, draft, machine),
            "on_disk": (drafts_size := _size(cached(draft.id))) > 0,
            "disk_bytes": drafts_size,
        }
        for draft in target.drafts
    ]
    return {
        "id": target.id,
        "short_name": target.short,
        "weights": target.parameters,
        "memory": _memory(target, None, machine),
        "fits": fitting(target, None, machine),
        "on_disk": size > 0,
        "disk_bytes": size,
        "drafts": drafts,
    }


def _memory(target: KnownTarget, draft: KnownDraft | None, machine: Machine) -> dict[str, int]:
    from foresay.server.cli.fits import WEIGHTS, needed

    return {weights: needed(target, weights, draft, machine) for weights in WEIGHTS}


def _size(directory: Path | None) -> int:
    """Bytes of a file, or of all files of a directory."""
    if directory is None:
        return 0
    files = [directory] if directory.is_file() else [file for file in directory.rglob("*") if file.is_file()]
    return sum(file.stat().st_size for file in files)


# -- for people --------------------------------------------------------------------------------------------------------


def _show_all(targets: Sequence[KnownTarget], machine: Machine) -> None:
    """Print all targets by what fits, the smallest first, in 60 columns."""
    from foresay.server.catalog.catalog import on_disk
    from foresay.server.cli.fits import TOKENS, WEIGHTS, fitting

    out = console()
    width = max(len(_name(target)) for target in targets)
    out.print(f"This machine: {machine}.\n")
    out.print(f"  {'GiB of memory in':<{width}}{_cells(WEIGHTS)}", style="dim")
    found = [(fitting(target, None, machine), _memory(target, None, machine), target) for target in targets]
    for first, (words, style) in GROUPS.items():
        group = sorted((one for one in found if one[0] == first), key=lambda one: one[1]["bf16"])
        if group:
            out.print(words, style=f"bold {style}")
        for _, memory, target in group:
            mark = "* " if on_disk(target) else "  "
            out.print(f"{mark}{_name(target):<{width}}{_cells(_gib(memory))}", style="dim" if first is None else "")
    out.print(f"\n*: on disk. Memory: weights, working space, and a KV cache\nof {TOKENS:,} tokens.")
    out.print("foresay models NAME: what drafts for it, how to serve it.")


def _name(target: KnownTarget) -> str:
    """The name for people, short name first if there is one."""
    return f"{target.short} ({target.id.rpartition('/')[2]})" if target.short else target.id


def _gib(memory: dict[str, int]) -> Iterator[str]:
    for count in memory.values():
        gib = count / (1 << 30)
        yield f"{gib:.1f}" if gib < 100 else f"{gib:.0f}"


def _cells(words: Iterable[str]) -> str:
    return "".join(f"{word:>7}" for word in words)


def _show_one(target: KnownTarget, machine: Machine) -> None:
    """Print its memory alone and with each draft, and commands to copy."""
    from foresay.server.catalog.catalog import on_disk
    from foresay.server.cli.fits import TOKENS, WEIGHTS, fitting

    out, shape = console(), target.shape
    out.print(f"{_name(target)}", style="bold")
    out.print(f"  {count_in_words(target.parameters)} weights, context of {shape.max_positions:,} tokens")
    directory = on_disk(target)
    out.print(f"  on disk: {bytes_in_words(_size(directory))}" if directory else "  not on disk yet")
    out.print(f"This machine: {machine}.\n")
    rows = [("alone", None), *((f"with {draft.id}", draft) for draft in target.drafts)]
    title = "GiB of memory in"
    out.print(f"{title}{_cells(WEIGHTS)}", style="dim")
    for name, draft in rows:
        if len(name) > len(title):
            out.print(name)
            name = ""
        words, style = GROUPS[fitting(target, draft, machine)]
        out.print(f"{name:<{len(title)}}{_cells(_gib(_memory(target, draft, machine)))}  ", end="")
        out.print(words.partition(":")[0], style=style)
    if not target.drafts:
        out.print("No draft model or head is known for it; suffix drafts.")
    out.print(f"\nMemory: weights, working space, and a KV cache\nof {TOKENS:,} tokens.\n")
    _show_commands(out, target, machine)


def _show_commands(out: Console, target: KnownTarget, machine: Machine) -> None:
    """Print commands with the first draft if both fit, else without, else that it does not fit."""
    from foresay.server.catalog.catalog import on_disk
    from foresay.server.cli.fits import fitting, flags

    here = on_disk(target) is not None
    for draft in (*target.drafts[:1], None):
        if (weights := fitting(target, draft, machine)) is not None:
            name, wanted = target.short or target.id, flags(target, weights, draft, machine)
            out.print("Serve it:" if here and not draft else "Fetch it and serve it:")
            if not here or draft:
                out.print(f"  foresay pull {name}{' --draft' if draft else ''}")
            out.print(f"  {shlex.join(['foresay', 'serve', name, *(wanted or ())])}")
            return
    out.print("It does not fit this machine, not even in int4; foresay models lists those that do.")


def console() -> Console:
    """A console on stdout, with colours if the terminal supports them; lines are printed unchanged."""
    from rich.console import Console

    no_color = bool(os.environ.get("NO_COLOR"))
    return Console(file=sys.stdout, highlight=False, markup=False, soft_wrap=True, no_color=no_color)


def show_table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
    """Print a table on a terminal, else plain columns."""
    from rich.console import Console
    from rich.table import Table

    table = Table(box=None, header_style="dim", padding=(0, 2, 0, 0))
    for name in header:
        table.add_column(name, justify="right" if name == "size" else "left", no_wrap=True)
    for row in rows:
        table.add_row(*row)
    Console(file=sys.stdout, highlight=False, width=None if sys.stdout.isatty() else 120).print(table)
