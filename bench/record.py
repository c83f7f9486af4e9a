"""The output of every benchmark: a table for people, one JSON line last, the same in ``bench/results/``."""

from __future__ import annotations

import json
import os
import platform
import sys
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from bench import plain
from foresay.spec.engine import EngineCore
from foresay.verifier.ops.kernels.cpu import threads

RESULTS = Path(__file__).parent / "results"


def cpu_model() -> str:
    """The processor's name as the kernel gives it."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    names = (line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.machine())


def machine() -> dict[str, Any]:
    """The machine and the library versions that a figure is valid for."""
    import transformers  # only for its version, and it takes a second

    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else None
    return {
        "cpu": cpu_model(),
        "cores": os.cpu_count(),
        "threads": threads.num_threads(),
        "load_1m": round(os.getloadavg()[0], 2),
        "gpu": gpu,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
    }


def models(engine: EngineCore, **directories: str | None) -> dict[str, Any]:
    """What ran: names without folders, and the engine's own description."""
    info = engine.info
    names = {name: Path(path).name if path else None for name, path in directories.items()}
    of_engine = {name: getattr(info, name) for name in ("vocab_size", "dtype", "exact", "exact_reason")}
    return names | of_engine


def command() -> str:
    """The command line that made this run, without the folders of the machine it ran on."""
    return " ".join(["python -m bench", *(Path(a).name if os.sep in a else a for a in sys.argv[1:])])


def table(title: str, columns: Sequence[str], rows: Sequence[Sequence[object]]) -> None:
    """Print one table; the first column is text, the others are figures."""
    grid = Table(title=title, title_justify="left")
    for index, column in enumerate(columns):
        grid.add_column(column, justify="right" if index else "left")
    for row in rows:
        grid.add_row(*(f"{cell:.4g}" if isinstance(cell, float) else str(cell) for cell in row))
    Console(width=None if sys.stdout.isatty() else 200).print(grid)


def finish(bench: str, results: dict[str, Any], save: bool) -> None:
    """Write ``bench/results/<date>-<bench>.json``, if it is to be saved, and print the same as one JSON line. bench:
    the name, unless the results have another one."""
    now = datetime.now(UTC)
    entry = {"bench": bench, "date": now.isoformat(timespec="seconds"), "command": command(), "machine": machine()}
    entry |= plain(results)
    if save:
        RESULTS.mkdir(parents=True, exist_ok=True)
        path = RESULTS / f"{now:%Y%m%d-%H%M%S}-{entry['bench']}.json"
        path.write_text(json.dumps(entry, indent=1) + "\n", encoding="utf-8")
    print(json.dumps(entry, separators=(",", ":")))
