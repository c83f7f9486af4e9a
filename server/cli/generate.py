"""``foresay generate``: continue one prompt, as streamed text or as one JSON line."""

from __future__ import annotations

import sys
from argparse import Namespace
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import msgspec

from foresay.server.cli.command import argument, command
from foresay.server.cli.progress import loaded, note, stopping, summary
from foresay.server.settings.config import SamplingConfig
from foresay.server.settings.resolved import target_directory
from foresay.spec.errors import ConfigurationError
from foresay.spec.sampling import SamplingParams

if TYPE_CHECKING:
    from foresay.server.engine_process.local import Engine, TextStream
    from foresay.server.engine_process.text_stream import AnswerStream, Completion
    from foresay.server.text.tokenizer import SamplingDefaults


def sampling_params(config: SamplingConfig) -> SamplingParams:
    """The sampling part of the settings; unset ones keep the model's own distribution, and an unset seed is drawn at
    random."""
    shared = set(SamplingParams.__struct_fields__) & set(config.__struct_fields__)
    given = {name: getattr(config, name) for name in shared}
    return SamplingParams(**{name: value for name, value in given.items() if value is not None})


def for_people(config: SamplingConfig, usual: SamplingDefaults | None = None) -> SamplingConfig:
    """The config with unset sampling settings from ``usual``: by default the model's ``generation_config.json``, else
    usual values."""
    from foresay.server.text.tokenizer import SamplingDefaults

    usual = usual or SamplingDefaults.read(target_directory(config)).for_people()
    unset = [name for name in ("temperature", "top_k", "top_p") if getattr(config, name) is None]
    return msgspec.structs.replace(config, **{name: getattr(usual, name) for name in unset})


def drawn(config: SamplingConfig) -> str:
    """How tokens are sampled, for people."""
    shown = ("temperature", config.temperature), ("top-k", config.top_k or None), ("top-p", config.top_p)
    return ", ".join(f"{name} {value:g}" for name, value in shown if value is not None)


def hint_of_models(command: str, config: SamplingConfig, arguments: Namespace) -> None:
    """If no model was named, say that this is the toy, and how to name another."""
    if config.target == "bundled" and "target" not in arguments:
        note(f"no model is named, so this is the toy; smollm2 is a small real model: foresay {command} smollm2")


@command(SamplingConfig)
@argument("--prompt", required=True, metavar="TEXT", help="the text to continue; - reads standard input")
@argument("--chat", action="store_true", help="put the prompt into the model's chat template")
@argument("--json", action="store_true", help="print one JSON object, last, instead of the text")
def generate(config: SamplingConfig, arguments: Namespace) -> int:
    """Continue one prompt.

    foresay generate --prompt "Once upon a time" --max-tokens 100
    foresay generate --prompt "How many is 3 times 12?" --chat --temperature 0 --json
    foresay generate Qwen/Qwen3-8B --draft Qwen/Qwen3-0.6B --draft-tree 3,2,1 --prompt "Dear diary,"
    """
    prompt = _prompt(arguments.prompt)
    with loaded(config, unlimited="unlimited" in arguments) as engine:  # foresay run
        hint_of_models("generate", config, arguments)
        config = for_people(config)
        stream = _stream(engine, config, prompt, arguments.chat)
        if arguments.json:
            print(_json_line(engine, stream.result()), flush=True)
            return 0
        completion = _writer(arguments.chat)(stream, False)
        if completion.statistics is not None:
            line = summary(completion.statistics, completion.finish_reason, completion.seed, completion.exact)
            note(f"{line} | {drawn(config)}")
    return 0


def _writer(chat: bool) -> Callable[[AnswerStream, bool], Completion]:
    """The function that prints an answer: on a terminal as in a conversation, with lines wrapped between words. The
    continuation of a prompt is printed unchanged."""
    if not (chat and sys.stdout.isatty()):
        return write_out
    from foresay.server.cli.terminal import AnswerWriter

    return AnswerWriter()


def write_out(stream: AnswerStream, coloured: bool = False) -> Completion:
    """Print a stream's text as it is generated, without colours; Ctrl-C ends the text, not the program."""
    with stopping(stream):
        for piece in stream:
            print(piece, end="", flush=True)
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


#: What the JSON line says of a text's counts.
_NUMBERS = (
    *("prompt_tokens", "cached_tokens", "completion_tokens", "steps", "drafted", "accepted", "forced", "discarded"),
    *("drafted_per_depth", "accepted_per_depth", "per_step_drafted", "per_step_accepted", "num_spec_tokens", "seconds"),
    *("time_to_first_token", "decode_seconds", "decode_tokens_per_second"),
)


def _json_line(engine: Engine, completion: Completion) -> str:
    info = engine.info
    shown: dict[str, Any] = {name: getattr(info, name) for name in ("target", "drafter", "dtype", "exact_reason")}
    if (counts := completion.statistics) is not None:
        numbers = {name: getattr(counts, name) for name in _NUMBERS}
        shown["statistics"] = numbers | msgspec.structs.asdict(counts.ending)
    return msgspec.json.encode(msgspec.to_builtins(completion) | shown).decode()
