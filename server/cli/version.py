"""``foresay version``: what is installed, for a bug report."""

from __future__ import annotations

import platform
from argparse import Namespace
from importlib import metadata

import foresay
from server.cli.command import Command

PACKAGES = ("torch", "triton", "transformers", "tokenizers", "safetensors", "aiohttp", "msgspec")


def _installed(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "not installed"


def run(config: None, arguments: Namespace) -> int:
    """Print one line per package, Foresay first."""
    print(f"foresay {foresay.__version__}")
    for package in PACKAGES:
        print(f"{package} {_installed(package)}")
    print(f"python {platform.python_version()} on {platform.system()} {platform.machine()}")
    return 0


COMMAND = Command("version", "what is installed", ("foresay version",), None, run)
