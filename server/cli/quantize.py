"""``foresay quantize TARGET --out DIR``: write a model in few bits, so that it need not be made at each start."""

from __future__ import annotations

import shlex
from argparse import ArgumentParser, Namespace
from pathlib import Path

from server.cli.command import Command
from server.settings.units import bytes_in_words
from spec.errors import ConfigurationError


def _add_arguments(parser: ArgumentParser) -> None:
    parser.add_argument("target", metavar="TARGET", help="bundled, a directory, or a Hugging Face hub id")
    parser.add_argument("--out", metavar="DIR", required=True, help="where to write it: an empty or a new directory")
    parser.add_argument("--quantize", choices=("int8", "int4", "fp8"), default="int8", help="what to make (int8)")


def run(config: None, arguments: Namespace) -> int:
    """Write it, and say how to serve it. The same ids come from it as from ``--quantize`` at load time."""
    from server.cli.progress import Stages
    from server.engine.parameters import quantized
    from server.settings.config import EngineConfig
    from server.settings.resolved import target_directory
    from verifier.model.config import ModelConfig
    from verifier.model.written import write

    out = Path(arguments.out)
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise ConfigurationError(f"--out {out}: is there already, and not empty; name a new directory")
    directory = target_directory(EngineConfig(target=arguments.target))
    model = quantized(ModelConfig.from_directory(directory), arguments.quantize, "--quantize")
    with Stages() as stages:
        write(directory, model, out, lambda share: stages("quantising", share))
    size = sum(file.stat().st_size for file in out.glob("*.safetensors"))
    print(f"{out}: {model.quantization}, {bytes_in_words(size)}")
    print(f"serve it: {shlex.join(['foresay', 'serve', str(out)])}")
    return 0


COMMAND = Command(
    "quantize",
    "write a model in int8, int4 or fp8",
    ("foresay quantize bundled --out small", "foresay quantize Qwen/Qwen3-8B --quantize int4 --out qwen3-8b-int4"),
    None,
    run,
    _add_arguments,
)
