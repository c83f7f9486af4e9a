"""``foresay generate``: write on from one prompt, as text while it comes or as one JSON line."""

from __future__ import annotations

import sys
from argparse import ArgumentParser, Namespace
from typing import TYPE_CHECKING

import msgspec

from server.cli.command import Command
from server.settings.config import SamplingConfig
from spec.errors import ConfigurationError

if TYPE_CHECKING:
    from server.host.local import Completion, Engine, TextStream
    from spec.sampling import SamplingParams


def _add_arguments(parser: ArgumentParser) -> None:
    parser.add_argument("--prompt", required=True, metavar="TEXT", help="what to write on from; - reads standard input")
    parser.add_argument("--chat", action="store_true", help="put the prompt into the model's chat template")
    parser.add_argument("--json", action="store_true", help="print one JSON object, last, instead of the text")


def sampling_params(config: SamplingConfig) -> SamplingParams:
    """The sampling part of the settings. The seed is drawn here if none was given."""
    from spec.sampling import SamplingParams

    shared = set(SamplingParams.__struct_fields__) & set(config.__struct_fields__)
    return SamplingParams(**{name: getattr(config, name) for name in shared})


def run(config: SamplingConfig, arguments: Namespace) -> int:
    """Generate, and print the text or the JSON line."""
    prompt = _prompt(arguments.prompt)

    from server.cli.progress import dim, loaded, shadow_summary, summary

    with loaded(config) as engine:
        stream = _stream(engine, config, prompt, arguments.chat)
        if arguments.json:
            print(_json_line(engine, stream.result()), flush=True)
            return 0
        completion = write_out(stream)
        if completion.statistics is not None:
            line = summary(completion.statistics, completion.finish_reason, completion.seed, completion.exact)
            print(dim(line), file=sys.stderr)
        for report in engine.shadowed():
            print(dim(shadow_summary(report)), file=sys.stderr)
    return 0


def write_out(stream: TextStream) -> Completion:
    """Print a stream's text as it comes; Ctrl-C ends the text, not the program."""
    try:
        for piece in stream:
            print(piece, end="", flush=True)
    except KeyboardInterrupt:
        stream.close()
    print(flush=True)
    return stream.result()


def _prompt(given: str) -> str:
    prompt = sys.stdin.read() if given == "-" else given
    if not prompt:
        raise ConfigurationError("--prompt must be text that is not empty")
    return prompt


def _stream(engine: Engine, config: SamplingConfig, prompt: str, chat: bool) -> TextStream:
    params = sampling_params(config)
    if chat:
        return engine.stream_chat([{"role": "user", "content": prompt}], params, stop=config.stop)
    return engine.stream(prompt, params, stop=config.stop)


def _json_line(engine: Engine, completion: Completion) -> str:
    info = engine.info
    models = {"target": info.target, "drafter": info.drafter, "dtype": info.dtype, "exact_reason": info.exact_reason}
    return msgspec.json.encode(msgspec.to_builtins(completion) | models).decode()


COMMAND = Command(
    "generate",
    "write on from one prompt",
    (
        'foresay generate --prompt "Once upon a time" --max-tokens 100',
        'foresay generate --prompt "How many is 3 times 12?" --chat --temperature 0 --json',
        'foresay generate Qwen/Qwen3-8B --draft Qwen/Qwen3-0.6B --draft-tree 3,2,1 --prompt "Dear diary,"',
    ),
    SamplingConfig,
    run,
    _add_arguments,
)
