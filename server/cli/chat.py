"""``foresay chat``: a conversation in the terminal. Each turn reuses the KV of the turns before it."""

from __future__ import annotations

import sys
from argparse import ArgumentParser, Namespace
from typing import TYPE_CHECKING

from server.cli.command import Command
from server.cli.generate import sampling_params, write_out
from server.settings.config import SamplingConfig
from spec.errors import InvalidRequest

if TYPE_CHECKING:
    from server.host.local import Completion, Engine
    from spec.trace import ShadowReport

GREETING = (
    "/reset begins anew, /stats tells about the last answer, /quit (or Ctrl-D) ends; Ctrl-C cuts an answer short."
)


def _add_arguments(parser: ArgumentParser) -> None:
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
        from server.cli.progress import shadow_summary, summary

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


def run(config: SamplingConfig, arguments: Namespace) -> int:
    """Read lines until the end of input and answer each."""
    from server.cli.progress import dim, loaded

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


COMMAND = Command(
    "chat",
    "talk to a model in the terminal",
    ("foresay chat", "foresay chat Qwen/Qwen3-8B --draft Qwen/Qwen3-0.6B --temperature 0.7"),
    SamplingConfig,
    run,
    _add_arguments,
)
