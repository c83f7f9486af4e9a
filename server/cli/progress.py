"""Progress of loading an engine, and lines about its texts: on stderr, so that stdout holds only the answer."""

from __future__ import annotations

import gc
import os
import shutil
import signal
import sys
import termios
import textwrap
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Self, TextIO

from foresay.server.engine_process.child import PASSIVE, import_tokenizers, uncollected
from foresay.server.settings.config import EngineConfig, SamplingConfig
from foresay.server.settings.resolved import check_config, max_model_len
from foresay.spec.errors import ConfigurationError
from foresay.spec.trace import Statistics

if TYPE_CHECKING:
    from foresay.server.engine_process.local import Engine
    from foresay.server.engine_process.text_stream import AnswerStream

_ERASE = "\r\x1b[K"


class Stages:
    """Called with each stage, and the share done (0 to 1, None if unknown), and with warnings, which stay; closed at
    the end.

    out: stderr by default. lines: whether to write a line for each stage if ``out`` is not a terminal. warned: the
    warnings written.
    """

    def __init__(self, out: TextIO | None = None, lines: bool = False) -> None:
        self.warned: set[str] = set()
        self._out = out or sys.stderr
        self._live = self._out.isatty() and os.environ.get("TERM") != "dumb"
        self._lines = lines and not self._live
        self._began, self._stage, self._over = time.monotonic(), "", False

    def __call__(self, phase: str, share: float | None = None) -> None:
        """Show the current stage."""
        if self._over:
            return
        seconds = f"{time.monotonic() - self._began:6.1f} s"
        if phase.startswith("warning: "):
            self.warned.add(phase)
            self._write(f"{_ERASE if self._live else ''}{phase}\n")
            return
        if self._live:
            line = f"{seconds}  {phase}{'' if share is None else f', {share:.0%}'} ..."
            line = line[: shutil.get_terminal_size().columns - 1]  # a wrapped line could not be erased
            self._write(_ERASE + (line if os.environ.get("NO_COLOR") else f"\x1b[2m{line}\x1b[0m"))
        elif self._lines and phase != self._stage:
            self._write(f"{seconds}  {phase}\n")
        self._stage = phase

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *raised: object) -> None:
        self.close()

    def close(self) -> None:
        """Loading ended or failed: erase the line, and write nothing more."""
        if self._live and not self._over:
            self._write(_ERASE)
        self._over = True

    def _write(self, text: str) -> None:
        self._out.write(text)
        self._out.flush()


def loaded(config: EngineConfig, unlimited: bool = False) -> Engine:
    """Load an engine, showing progress on a terminal, and print its warnings. unlimited: without max_tokens, answers
    may fill the context, instead of having the usual limit.

    For our own processes, which run none of transformers' models: its tokenizers are imported without torch.
    """
    _refuse_early(config)
    os.environ.update(PASSIVE | os.environ)
    with Stages() as stages:
        stages("importing")
        with uncollected():
            import_tokenizers()
            from foresay.server.engine_process.local import Engine
        gc.freeze()
        engine = Engine.from_config(config, stages)
    if unlimited:
        engine.usual_tokens = None
    for warning in sorted({f"warning: {one}" for one in engine.warnings} - stages.warned):
        print(warning, file=sys.stderr)
    return engine


def _refuse_early(config: EngineConfig) -> None:
    """Raise an error for a model that cannot be loaded, or a max_tokens that does not fit, before the slow imports."""
    model = check_config(config)
    if model is None or not isinstance(config, SamplingConfig) or config.max_tokens is None:
        return
    length = min(max_model_len(config, model), config.kv_tokens or model.max_positions)
    if config.max_tokens >= length:
        raise ConfigurationError(
            f"--max-tokens {config.max_tokens}: prompt and answer together have at most {length} tokens, so "
            f"--max-tokens {length - 1} is the most"
        )


@contextmanager
def stopping(stream: AnswerStream) -> Iterator[None]:
    """In this context Ctrl-C ends the text after the current step: an exception within a step would leave half of
    it."""
    before = signal.signal(signal.SIGINT, lambda *_: stream.close_soon())
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


@contextmanager
def unechoed() -> Iterator[None]:
    """Disable echo in the context, so that input does not appear within output; it is read afterwards."""
    try:
        before = termios.tcgetattr(sys.stdin)
        quiet = [*before[:3], before[3] & ~termios.ECHO, *before[4:]]
        termios.tcsetattr(sys.stdin, termios.TCSANOW, quiet)
    except (termios.error, OSError, ValueError):  # no terminal
        yield
        return
    try:
        yield
    finally:
        termios.tcsetattr(sys.stdin, termios.TCSANOW, before)


def note(text: str, indent: int = 0) -> None:
    """Print lines on stderr: on a terminal dimmed and wrapped between words, otherwise unchanged. indent: of
    continuation lines."""
    if not sys.stderr.isatty():
        print(text, file=sys.stderr)
        return
    width = shutil.get_terminal_size().columns - 1
    kept: dict[str, Any] = {"break_long_words": False, "break_on_hyphens": False}
    for line in text.split("\n"):
        shown = textwrap.fill(line, max(width, indent + 20), subsequent_indent=" " * indent, **kept)
        print(shown if os.environ.get("NO_COLOR") else f"\x1b[2m{shown}\x1b[0m", file=sys.stderr)


def summary(statistics: Statistics, finish_reason: str, seed: int, exact: bool) -> str:
    """One line about a finished text: tokens, speed, how much was drafted."""
    parts = [
        f"{statistics.completion_tokens} tokens ({finish_reason})",
        f"{statistics.decode_tokens_per_second:.1f} tokens/s",
        f"{statistics.tokens_per_step or 0.0:.2f} tokens per step",
    ]
    if statistics.drafted:
        parts.append(f"{statistics.accepted / statistics.drafted:.0%} of {statistics.drafted} drafted accepted")
    parts.append(f"first token {1000 * statistics.time_to_first_token:.0f} ms")
    parts.append(f"seed {seed}")
    parts.append("exact" if exact else "not exact")
    return " | ".join(parts)
