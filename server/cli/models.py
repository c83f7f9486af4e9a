"""``foresay models``: targets and what is known to draft well for them, what they take, and which are on disk."""

from __future__ import annotations

import sys
from argparse import ArgumentParser, Namespace
from collections.abc import Iterator
from typing import Any

from server.cli.command import Command

#: Tokens of the KV cache that the column of memory counts.
CONTEXT = 8192
HEADER = ("", "", "weights", "in bf16", "on disk")


def _add_arguments(parser: ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="print one JSON array instead of the table")


def run(config: None, arguments: Namespace) -> int:
    """Print the catalog."""
    import msgspec

    found = list(targets())
    if arguments.json:
        print(msgspec.json.encode(found).decode())
        return 0
    _show([row for target in found for row in _rows(target)])
    print(
        f"\nIn bf16: the weights and the KV cache of {CONTEXT:,} tokens, of a draft those of its target with it.\n"
        "Fetch a pair and serve it:\n"
        "  foresay pull Qwen/Qwen3-8B --draft\n"
        "  foresay serve Qwen/Qwen3-8B --draft Qwen/Qwen3-0.6B"
    )
    return 0


def targets() -> Iterator[dict[str, Any]]:
    """Each target with its drafts. bytes: with the KV cache of ``CONTEXT`` tokens; of a draft, its target's with it."""
    from server.cli.catalog.catalog import known_targets
    from verifier.model.hub import cached

    here: dict[str, bool] = {}

    def is_here(id: str) -> bool:
        if id not in here:
            here[id] = cached(id) is not None
        return here[id]

    for target in known_targets().values():
        drafts = [
            {
                "id": draft.id,
                "setting": draft.setting,
                "kind": draft.kind,
                "weights": draft.parameters,
                "bytes": target.bytes(draft, CONTEXT),
                "on_disk": is_here(draft.id),
            }
            for draft in target.drafts
        ]
        bytes_alone = target.bytes(None, CONTEXT)
        yield {
            "id": target.id,
            "weights": target.parameters,
            "bytes": bytes_alone,
            "on_disk": is_here(target.id),
            "drafts": drafts,
        }


def _rows(target: dict[str, Any]) -> Iterator[tuple[str, ...]]:
    from server.settings.units import bytes_in_words, count_in_words

    for one in (target, *target["drafts"]):
        name = one["id"] if one is target else f"  {one['id']}"
        here = "yes" if one["on_disk"] else ""
        yield name, one.get("kind", "target"), count_in_words(one["weights"]), bytes_in_words(one["bytes"]), here


def _show(rows: list[tuple[str, ...]]) -> None:
    """As a table on a terminal, else as plain columns."""
    from rich.console import Console
    from rich.table import Table

    table = Table(box=None, header_style="dim", padding=(0, 2, 0, 0))
    for name in HEADER:
        table.add_column(name, justify="right" if name in ("weights", "in bf16") else "left", no_wrap=True)
    for row in rows:
        table.add_row(*row)
    Console(file=sys.stdout, highlight=False, width=None if sys.stdout.isatty() else 120).print(table)


COMMAND = Command(
    "models",
    "list targets and drafts known to fit, what they take, and which are on disk",
    ("foresay models", "foresay models --json"),
    None,
    run,
    _add_arguments,
)
