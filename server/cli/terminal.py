"""The terminal of a chat: line editing with history; answers as Markdown or in the colours of drafters.

::

    answer   closed block | closed block | open block ...
             printed once   printed once   redrawn while it grows; only its last lines if it is taller than the screen
"""

from __future__ import annotations

import os
import re
import signal
import sys
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from markdown_it import MarkdownIt
from prompt_toolkit import PromptSession
from prompt_toolkit.application import run_in_terminal
from prompt_toolkit.enums import DEFAULT_BUFFER
from prompt_toolkit.filters import has_focus
from prompt_toolkit.history import FileHistory, History, InMemoryHistory
from prompt_toolkit.key_binding import KeyBindings, KeyPressEvent
from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
from rich.live import Live
from rich.markdown import Markdown
from rich.segment import Segment
from rich.text import Text

from foresay.server.cli.progress import stopping, unechoed

if TYPE_CHECKING:
    from foresay.server.engine_process.text_stream import AnswerStream, Completion
    from foresay.server.schemas.chat import TokenProvenance

#: Seconds between redraws of the growing block.
FRAME_SECONDS = 0.08
#: Colours of drafters, in the order in which they appear in the conversation.
COLOURS = ("green", "cyan", "magenta", "yellow", "blue", "red")
#: Characters that a terminal would interpret instead of showing.
_CONTROLS = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")
#: A star that multiplies is not emphasis; meanwhile it is replaced by a character that occurs in no text.
_TIMES, _STAR = re.compile(r"(?<=[\w)])\*(?=[\w$(])"), "\ue000"
#: A model's tags, such as <think>, are shown unchanged.
_PARSER = MarkdownIt("commonmark", {"html": False}).enable(["strikethrough", "table"])


# -- input -----------------------------------------------------------------------------------------------------


class LineReader:
    """Reads input; several lines if they end in a backslash or were pasted."""

    def __init__(self) -> None:
        self._session: PromptSession[str] = PromptSession(
            "> ", multiline=True, prompt_continuation="  ", key_bindings=_keys(), history=_history()
        )

    def __call__(self) -> str | None:
        """The next text; None if the user leaves."""
        before = signal.signal(signal.SIGINT, lambda *_: None)  # just before the prompt listens, Ctrl-C is too late
        try:
            return self._session.prompt()
        except EOFError:
            return None
        finally:
            signal.signal(signal.SIGINT, before)


def _keys() -> KeyBindings:
    keys, typing = KeyBindings(), has_focus(DEFAULT_BUFFER)

    @keys.add("enter", filter=typing)
    def send(event: KeyPressEvent) -> None:
        buffer = event.current_buffer
        if buffer.document.current_line_before_cursor.endswith("\\"):
            buffer.delete_before_cursor()
            buffer.insert_text("\n")
        else:
            buffer.validate_and_handle()

    @keys.add("escape", "enter", filter=typing)
    def begin_line(event: KeyPressEvent) -> None:
        event.current_buffer.insert_text("\n")

    @keys.add("c-c", filter=typing)
    @keys.add("<sigint>")
    def clear(event: KeyPressEvent) -> None:
        if not event.current_buffer.text:
            run_in_terminal(lambda: print("Ctrl-D or /bye leaves.", file=sys.stderr))
        event.current_buffer.reset()

    return keys


def history_file() -> Path:
    """The file with the input history: ``foresay/chat_history`` in the user's state folder (XDG)."""
    folder = Path(os.environ.get("XDG_STATE_HOME", ""))
    return (folder if folder.is_absolute() else Path.home() / ".local" / "state") / "foresay" / "chat_history"


def _history() -> History:
    """The input history, readable only by the user; in memory if it cannot be stored."""
    try:
        path = history_file()
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        os.close(os.open(path, os.O_RDWR | os.O_CREAT, 0o600))
    except (OSError, RuntimeError):  # RuntimeError: no home directory
        return InMemoryHistory()
    return _Kept(path)


class _Kept(FileHistory):
    """A history file that ignores write errors, such as a full disk."""

    def store_string(self, string: str) -> None:
        with suppress(OSError):
            super().store_string(string)


# -- output ---------------------------------------------------------------------------------------------------


class AnswerWriter:
    """Writes answers on the terminal."""

    def __init__(self, console: Console | None = None) -> None:
        self._console = console or Console(highlight=False)
        self._colours: dict[str, str] = {}

    def __call__(self, stream: AnswerStream, coloured: bool) -> Completion:
        """Write an answer while it is generated; Ctrl-C ends it. coloured: by drafter, else as Markdown."""
        text = ""
        with stopping(stream), unechoed(), Live(console=self._console, auto_refresh=False, transient=True) as live:

            def growing(at_end: bool) -> _Lines:
                return _Lines(self._coloured(stream.tokens) if coloured else _markdown(text), at_end)

            try:
                for piece in _frames(stream):
                    over, text = ("", "") if coloured else _divided(text + _CONTROLS.sub("", piece))
                    if over:
                        self._console.print(_Lines(_markdown(over)), "")
                    live.update(growing(at_end=True), refresh=True)
            finally:
                live.update("", refresh=True)
                self._console.print(growing(at_end=False))  # in any case
        if coloured:
            self._console.print(self._legend(stream.tokens))
        return stream.result()

    def _coloured(self, tokens: Sequence[TokenProvenance]) -> Text:
        """Tokens in the colour of their drafter; the target's own without colour."""
        return Text.assemble(*((_CONTROLS.sub("", one.text), self._colour(_drafter(one))) for one in tokens))

    def _colour(self, drafter: str) -> str:
        return self._colours.setdefault(drafter, COLOURS[len(self._colours) % len(COLOURS)]) if drafter else ""

    def _legend(self, tokens: Sequence[TokenProvenance]) -> Text:
        """How many tokens each drafter proposed, in its colour."""
        counts = Counter(map(_drafter, tokens))
        own = counts.pop("", 0)
        drafted = [Text(f"{name} {count}", self._colour(name)) for name, count in counts.items()]
        return Text("  ").join([*drafted, Text(f"the model's own {own}")])


def _frames(stream: Iterable[str]) -> Iterator[str]:
    """The pieces of a stream, joined if they arrive faster than the redraw rate."""
    waiting, drawn = "", 0.0
    for piece in stream:
        waiting += piece
        if time.monotonic() - drawn >= FRAME_SECONDS:
            yield waiting
            waiting, drawn = "", time.monotonic()
    yield waiting


def _divided(markdown: str) -> tuple[str, str]:
    """The complete blocks, which later text cannot change, and the last one."""
    begins = [token.map[0] for token in _PARSER.parse(markdown) if token.level == 0 and token.map]
    lines, last = markdown.split("\n"), begins[-1] if begins else 0
    return "\n".join(lines[:last]).strip("\n"), "\n".join(lines[last:])


def _markdown(text: str) -> Markdown:
    """Parsed Markdown that keeps the model's line breaks and multiplication stars."""
    markdown = Markdown("")
    markdown.parsed = _PARSER.parse(_TIMES.sub(_STAR, text))
    for token in markdown.parsed:
        for one in (token, *(token.children or ())):
            one.type = one.type.replace("softbreak", "hardbreak")
            one.content = one.content.replace(_STAR, "*")
    return markdown


def _drafter(token: TokenProvenance) -> str:
    """The drafter of a token; "" for the target's own."""
    return {"draft": str(token.drafter), "grammar": "grammar", "target": ""}[token.origin]


class _Lines:
    """The lines of a block without blank lines around them. at_end: only the last ones that fit the screen."""

    def __init__(self, block: RenderableType, at_end: bool = False) -> None:
        self._block, self._at_end = block, at_end

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        lines = console.render_lines(self._block, options.update(height=None), pad=False)
        written = [at for at, line in enumerate(lines) if any(segment.text.strip() for segment in line)]
        lines = lines[written[0] : written[-1] + 1] if written else []
        for line in lines[-max(1, console.height - 2) :] if self._at_end else lines:
            yield from line
            yield Segment.line()
