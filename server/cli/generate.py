"""``foresay generate``: write on from one prompt, as text while it comes or as one JSON line. ``foresay chat``: a
conversation in the terminal; each turn reuses the KV of the turns before it.
"""

from __future__ import annotations

import sys
from argparse import ArgumentParser, Namespace
from typing import TYPE_CHECKING

import msgspec

from foresay.server.cli.command import Command
from foresay.server.settings.config import SamplingConfig
from foresay.spec.errors import ConfigurationError, InvalidRequest

if TYPE_CHECKING:
    from foresay.server.host.local import Completion, Engine, TextStream
    from foresay.spec.sampling import SamplingParams

if TYPE_CHECKING:
    from foresay.server.host.local import Completion, Engine
    from foresay.spec.trace import ShadowReport


def _add_generate_arguments(parser: ArgumentParser) -> None:
    parser.add_argument("--prompt", required=True, metavar="TEXT", help="what to write on from; - reads standard input")
    parser.add_argument("--chat", action="store_true", help="put the prompt into the model's chat template")
    parser.add_argument("--json", action="store_true", help="print one JSON object, last, instead of the text")


def sampling_params(config: SamplingConfig) -> SamplingParams:
    """The sampling part of the settings. The seed is drawn here if none was given."""
    from foresay.spec.sampling import SamplingParams

    shared = set(SamplingParams.__struct_fields__) & set(config.__struct_fields__)
    return SamplingParams(**{name: getattr(config, name) for name in shared})


def generate(config: SamplingConfig, arguments: Namespace) -> int:
    """Generate, and print the text or the JSON line."""
    prompt = _prompt(arguments.prompt)

    from foresay.server.cli.progress import dim, loaded, shadow_summary, summary

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


GENERATE = Command(
    "generate",
    "write on from one prompt",
    (
        'foresay generate --prompt "Once upon a time" --max-tokens 100',
        'foresay generate --prompt "How many is 3 times 12?" --chat --temperature 0 --json',
        'foresay generate Qwen/Qwen3-8B --draft Qwen/Qwen3-0.6B --draft-tree 3,2,1 --prompt "Dear diary,"',
    ),
    SamplingConfig,
    generate,
    _add_generate_arguments,
)


# -- a conversation ----------------------------------------------------------------------------------------------------


GREETING = (
    "/reset begins anew, /stats tells about the last answer, /quit (or Ctrl-D) ends; Ctrl-C cuts an answer short."
)


def _add_chat_arguments(parser: ArgumentParser) -> None:
    parser.add_argument("--system", metavar="TEXT", help="a system message to begin with")


class Conversation:
    """The messages so far, and the engine that answers them."""

    def __init__(self, engine: Engine, config: SamplingConfig, system: str | None) -> None:
        self._engine = engine
        self._config = config
        self._opening = [{"role": "system", "content": system}] if system else []
        self._messages = list(self._opening)
        self._last: Completion | None = None
        self._shadowed: list[ShadowReport] = []

    def obey(self, line: str) -> bool:
        """Answer a line or follow a command; False when the conversation is over."""
        match line.strip():
            case "":
                pass
            case "/quit" | "/exit":
                return False
            case "/reset":
                self._messages = list(self._opening)
            case "/stats":
                self._show_statistics()
            case command if command.startswith("/"):
                print(GREETING, file=sys.stderr)
            case text:
                self._answer(text)
        return True

    def _answer(self, text: str) -> None:
        asked = [*self._messages, {"role": "user", "content": text}]
        try:
            stream = self._engine.stream_chat(asked, sampling_params(self._config), stop=self._config.stop)
        except InvalidRequest as error:
            print(f"{error} (/reset begins anew)", file=sys.stderr)
            return
        self._last = write_out(stream)
        self._shadowed = self._engine.shadowed()
        self._messages = [*asked, {"role": "assistant", "content": self._last.text}]

    def _show_statistics(self) -> None:
        from foresay.server.cli.progress import shadow_summary, summary

        if self._last is None or self._last.statistics is None:
            print("nothing to tell yet", file=sys.stderr)
            return
        statistics = self._last.statistics
        print(summary(statistics, self._last.finish_reason, self._last.seed, self._last.exact), file=sys.stderr)
        cached = f"{statistics.cached_tokens} of {statistics.prompt_tokens} prompt tokens were in the KV cache"
        accepted = statistics.by_depth if statistics.drafts else "nothing was drafted"
        print(f"{cached} | accepted by depth: {accepted}", file=sys.stderr)
        for report in self._shadowed:
            print(shadow_summary(report), file=sys.stderr)


def chat(config: SamplingConfig, arguments: Namespace) -> int:
    """Read lines until the end of input and answer each."""
    from foresay.server.cli.progress import dim, loaded

    with loaded(config) as engine:
        conversation = Conversation(engine, config, arguments.system)
        print(dim(f"{engine.info.target}, drafted by {engine.info.drafter}. {GREETING}"), file=sys.stderr)
        while True:
            line = _read_line()
            if line is None or not conversation.obey(line):
                return 0


def _read_line() -> str | None:
    """The next line; None at the end of input. Ctrl-C at the prompt ends the program."""
    try:
        if sys.stdin.isatty():
            import readline  # noqa: F401  (importing it gives input() history and editing)

            return input("> ")
        return sys.stdin.readline() or None
    except EOFError:
        print()
        return None


CHAT = Command(
    "chat",
    "talk to a model in the terminal",
    ("foresay chat", "foresay chat Qwen/Qwen3-8B --draft Qwen/Qwen3-0.6B --temperature 0.7"),
    SamplingConfig,
    chat,
    _add_chat_arguments,
)
