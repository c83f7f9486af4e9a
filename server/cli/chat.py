"""``foresay chat``: a conversation in the terminal, with an engine in this process or with a server's; each turn reuses
the KV of earlier turns."""

from __future__ import annotations

import re
import sys
from argparse import Namespace
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import msgspec

from foresay.server.cli.command import argument, command
from foresay.server.cli.generate import drawn, for_people, generate, hint_of_models, sampling_params, write_out
from foresay.server.cli.progress import Stages, loaded, note, stopping, summary, unechoed
from foresay.server.cli.serve import URL, ServerGone
from foresay.server.settings.config import SamplingConfig
from foresay.server.settings.fields import Setting, settings_of
from foresay.server.settings.load import changed
from foresay.spec.errors import ConfigurationError, ForesayError, InvalidRequest
from foresay.spec.names import NONE
from foresay.spec.sampling import SamplingParams
from foresay.spec.trace import Statistics

if TYPE_CHECKING:
    from foresay.server.cli.served import ServedModel
    from foresay.server.engine_process.local import Engine
    from foresay.server.engine_process.text_stream import AnswerStream, Completion
    from foresay.server.text.tokenizer import SamplingDefaults

    Model = Engine | ServedModel

#: Writes an answer while it is generated, optionally with its tokens coloured by drafter.
Write = Callable[["AnswerStream", bool], "Completion"]
Messages = list[dict[str, str]]

COMMANDS = {
    "/help": "show this list",
    "/system": "/system TEXT sets the system message; without TEXT it is removed",
    "/set": "/set NAME VALUE changes a setting, such as /set temperature 0; /set alone shows them all",
    "/new": "begin a new conversation",
    "/compare": "write the last answer again without drafts, and show both times; /compare TEXT asks something new",
    "/provenance": "colour each token by the drafter that proposed it; again to stop",
    "/stats": "show more about the last answer",
    "/bye": "leave, as Ctrl-D does",
}
ALIASES = {"/reset": "/new", "/clear": "/new", "/quit": "/bye", "/exit": "/bye", "/?": "/help"}
#: What settings without a value mean.
_UNSET = {"max_tokens": "unset, as many as the context leaves", "seed": "unset, another for each answer"}
KEYS = "Enter sends; Alt+Enter or a backslash begins another line. Ctrl-C clears the line, or stops an answer."


@dataclass(frozen=True, slots=True)
class _Answer:
    """The last answer: its request and results."""

    sent: Messages
    params: SamplingParams
    completion: Completion
    passes: int


class ChatSession:
    """The messages so far, and the engine that answers them.

    write: prints an answer. terminal: whether a person is using it: then engine errors end an answer, not the
    conversation, and a line about the speed follows each answer.
    """

    def __init__(
        self, engine: Model, config: SamplingConfig, system: str | None, write: Write, terminal: bool = False
    ) -> None:
        self._engine, self._write, self._terminal = engine, write, terminal
        self._usual: SamplingDefaults | None = getattr(engine, "usual", None)  # a server's
        self._config = for_people(config, self._usual)
        self._system: Messages = []
        self._messages: Messages = []
        self._last: _Answer | None = None
        self._coloured = self._comparing = False
        if system:
            self._set_system(system)

    @property
    def sampling(self) -> str:
        """How tokens are sampled, in words."""
        return drawn(self._config)

    def obey(self, line: str) -> bool:
        """Answer a text or run a command; False to end the conversation."""
        name, _, rest = line.strip().partition(" ")
        if not re.fullmatch(r"/[a-z?]+", name):
            if line.strip():
                self._answer(line.strip())
            return True
        match ALIASES.get(name, name):
            case "/bye":
                return False
            case "/help":
                note("\n".join(f"{name:<12} {help}" for name, help in COMMANDS.items()), indent=13)
                note(KEYS)
            case "/system":
                self._set_system(rest.strip())
                note("the system message is set" if self._system else "there is no system message")
            case "/set":
                self._set(rest.split())
            case "/new":
                self._messages, self._last = [], None
                note("a new conversation")
            case "/compare":
                self._compare(rest.strip())
            case "/provenance":
                self._toggle_colours()
            case "/stats":
                self._show_statistics()
            case _:
                note(f"unknown command {name} (/help lists them, /bye leaves)")
        return True

    # -- answers -----------------------------------------------------------------------------------------------------

    def _answer(self, text: str) -> None:
        sent = [*self._system, *self._messages, {"role": "user", "content": text}]
        params = sampling_params(self._config)
        try:
            stream = self._stream(sent, params)
            completion = self._write(stream, self._coloured)
        except ForesayError as error:
            if not self._terminal and not isinstance(error, InvalidRequest):
                raise
            note(f"{error}{'' if isinstance(error, ServerGone) else ' (/new begins a new conversation)'}")
            return
        self._last = _Answer(sent, params, completion, len(stream.steps))
        if completion.text or completion.finish_reason != "cancelled":
            self._messages = [*sent[len(self._system) :], {"role": "assistant", "content": completion.text}]
        if self._terminal:
            note(_in_words(self._last))
        if self._comparing:
            self._decode_again(self._last)

    def _stream(self, sent: Messages, params: SamplingParams, speculate: bool = True) -> AnswerStream:
        return self._engine.stream_chat(
            sent, params, stop=self._config.stop, speculate=speculate, provenance=self._terminal
        )

    def _compare(self, text: str) -> None:
        """Compare with plain decoding. The drafted side is the answer already given: generated again, it could be
        drafted from itself."""
        if self._engine.info.drafter == NONE:
            note("nothing drafts here, so there is nothing to compare; leave out --draft none to try it")
            return
        if self._last is not None and not text:
            self._decode_again(self._last)
            return
        self._comparing = True
        if text:
            self._answer(text)
        else:
            note("the next question is answered with drafts and without")

    def _decode_again(self, last: _Answer) -> None:
        self._comparing = False
        if (drafted := last.completion.statistics) is None:
            note("that answer was stopped: /compare TEXT asks again")
            return
        stream = self._stream(last.sent, msgspec.structs.replace(last.params, seed=last.completion.seed), False)
        with stopping(stream), unechoed(), Stages() as stages:
            stages("the same answer without drafts")
            again = stream.result()
        if again.statistics is None:
            note("stopped")
            return
        same = again.token_ids == last.completion.token_ids
        reason = "" if same else f" ({self._engine.info.exact_reason})"
        note(f"with drafts:    {_timed(drafted)}\nwithout drafts: {_timed(again.statistics)}", indent=16)
        note(f"{'the same text' if same else 'NOT the same text'}{reason}")

    # -- commands ----------------------------------------------------------------------------------------------------

    def _set_system(self, text: str) -> None:
        self._system = [{"role": "system", "content": text}] if text else []

    def _set(self, words: list[str]) -> None:
        known = _settable()
        match words:
            case []:
                note("\n".join(f"{name:<18} {_shown(name, getattr(self._config, name))}" for name in known))
            case [name, "unset"] if name in known:
                unset = msgspec.structs.replace(self._config, **{name: known[name].default})
                self._config = for_people(unset, self._usual)
                note(f"{name} {_shown(name, getattr(self._config, name))}")
            case [name, value]:
                try:
                    self._config = changed(self._config, {name: value}, known)
                    note(f"{name} {_shown(name, getattr(self._config, name))}")
                except ConfigurationError as error:
                    note(str(error))
            case [name, *_] if name in known:
                note(f"/set {name} VALUE: {name} is {known[name].expected}, or unset")
            case _:
                note(f"/set NAME VALUE, such as /set temperature 0.7: the names are {', '.join(known)}")

    def _toggle_colours(self) -> None:
        if not self._terminal:
            note("/provenance colours text on a terminal; this output goes elsewhere")
            return
        self._coloured = not self._coloured
        note("tokens have the colour of their drafter" if self._coloured else "answers are shown as Markdown")

    def _show_statistics(self) -> None:
        if self._last is None or self._last.completion.statistics is None:
            note("nothing to tell yet")
            return
        completion, statistics = self._last.completion, self._last.completion.statistics
        note(summary(statistics, completion.finish_reason, completion.seed, completion.exact))
        cached = f"{statistics.cached_tokens} of {statistics.prompt_tokens} prompt tokens were in the KV cache"
        note(f"{cached} | accepted by depth: {statistics.by_depth}")


def _settable() -> dict[str, Setting]:
    """The settings that ``/set`` changes: sampling and stopping."""
    settings = settings_of(SamplingConfig)
    return {name: one for name, one in settings.items() if one.group in ("sampling", "stopping") and not one.is_list}


def _shown(name: str, value: object) -> str:
    if value is None:
        return _UNSET.get(name, "unset")
    return f"{value:g}" if isinstance(value, float) else str(value)


def _in_words(answer: _Answer) -> str:
    """Tokens, passes, speed, and what ended it unless the model did."""
    statistics, completion = answer.completion.statistics, answer.completion
    parts = [_counted(len(completion.token_ids), answer.passes)]
    if statistics is not None and statistics.decode_tokens_per_second:
        parts.append(f"{statistics.decode_tokens_per_second:.1f} tokens/s")
    full = "cut: the context is full (/new begins a new conversation)"
    cut = full if answer.params.max_tokens is None else "cut for length (/set max_tokens N)"
    ended = {"length": cut, "cancelled": "stopped"}
    return ", ".join([*parts, *filter(None, [ended.get(completion.finish_reason)])])


def _counted(tokens: int, passes: int) -> str:
    return f"{tokens} token{'' if tokens == 1 else 's'} in {passes} pass{'' if passes == 1 else 'es'}"


def _timed(statistics: Statistics) -> str:
    """The time after the first token, since the second of two answers finds its prompt cached by the first."""
    count = _counted(statistics.completion_tokens, statistics.steps)
    rate = f", {statistics.decode_tokens_per_second:.1f} tokens/s" if statistics.decode_tokens_per_second else ""
    return f"{statistics.decode_seconds:.2f} s after the first pass, {count}{rate}"


@command(SamplingConfig)
@argument("--system", metavar="TEXT", help="a system message to begin with")
@argument("--url", metavar="URL", help="talk to a model of this server, instead of loading one")
@argument("--api-key", metavar="KEY", help="a key of it, if it asks for one (default: FORESAY_API_KEY)")
@argument("--no-server", action="store_true", help=f"load the model, even where the server at {URL} has it")
def chat(config: SamplingConfig, arguments: Namespace) -> int:
    """Talk to a model in the terminal.

    foresay chat
    foresay chat Qwen/Qwen3-8B --draft Qwen/Qwen3-0.6B --temperature 0.7
    foresay chat --url http://127.0.0.1:8001
    """
    terminal = sys.stdin.isatty() and sys.stdout.isatty()
    write: Write = write_out
    read: Callable[[], str | None] = _line
    with unechoed() if terminal else nullcontext():  # input typed while loading becomes the first question
        from foresay.server.cli.served import served_model

        if terminal:
            from foresay.server.cli.terminal import AnswerWriter, LineReader  # takes a while
        served = served_model(config, arguments)
        model = loaded(config, unlimited=True) if served is None else nullcontext(served)
    if terminal:
        write, read = AnswerWriter(), LineReader()
    with model as engine:
        if arguments.url is None:
            hint_of_models("chat", config, arguments)
        conversation = ChatSession(engine, config, arguments.system, write, terminal)
        return _converse(conversation, engine.info, read)


def _line() -> str | None:
    """A line of the standard input; None at its end."""
    return sys.stdin.readline() or None


def _converse(conversation: ChatSession, info: Any, read: Callable[[], str | None]) -> int:
    drafted = [f"drafted by {info.drafter}"] if info.drafter not in ("", NONE) else []
    note(f"{', '.join([info.target, *drafted, conversation.sampling])}\n/help shows the commands, /bye leaves.")
    while (line := read()) is not None and conversation.obey(line):
        pass
    return 0


# -- foresay run -------------------------------------------------------------------------------------------------------


@command(SamplingConfig)
@argument(
    "prompt", nargs="*", metavar="PROMPT", help="answer this and end; without it, a conversation", after_target=True
)
def run(config: SamplingConfig, arguments: Namespace) -> int:
    """Talk to a model, or have it answer one prompt.

    foresay run smollm2
    foresay run smollm2 "Why is the sky blue?" --max-tokens 100
    """
    if arguments.prompt:
        prompt = " ".join(arguments.prompt)
        return generate(config, _with(arguments, prompt=prompt, chat=True, json=False, unlimited=True))
    return chat(config, _with(arguments, system=None, url=None, api_key=None, no_server=True))


def _with(arguments: Namespace, **more: object) -> Namespace:
    return Namespace(**vars(arguments) | more)
