"""``foresay check``: whether this target and drafter work together, and how to fix it if not."""

from __future__ import annotations

import sys
from argparse import ArgumentParser, Namespace

from foresay.server.cli.command import command
from foresay.server.settings.config import EngineConfig

#: How long --probe measures, without loading.
PROBE_SECONDS = 25.0


def _add_arguments(parser: ArgumentParser) -> None:
    parser.add_argument("--probe", action="store_true", help="load both, then measure for 25 seconds")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of the report")


@command(EngineConfig, _add_arguments, name="check")
def run(config: EngineConfig, arguments: Namespace) -> int:
    """Say whether a target and a drafter fit, and if not, what to change.

    foresay check Qwen/Qwen3-8B --draft Qwen/Qwen3-0.6B
    foresay check ./my-model --draft eagle3:./my-head --draft-tree 4,6,6,4,3 --probe
    """
    import msgspec

    from foresay.server.cli.check.pair import check
    from foresay.server.cli.check.summary import show

    report = check(config, PROBE_SECONDS if arguments.probe else None)
    if arguments.json:
        print(msgspec.json.encode(report).decode())
    else:
        show(report, sys.stdout)
    return 0 if report.works else 1
