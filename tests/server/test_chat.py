"""``foresay chat``: what is typed, what is written, and what the conversation keeps."""

from __future__ import annotations

import io
import os
import re
import shutil
import signal
import stat
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from prompt_toolkit.application import create_app_session
from prompt_toolkit.input import PipeInput, create_pipe_input
from prompt_toolkit.output import DummyOutput
from rich.console import Console

from foresay import Engine
from foresay.server.cli import terminal
from foresay.server.cli.chat import ChatSession
from foresay.server.cli.generate import drawn, for_people, sampling_params
from foresay.server.cli.main import main
from foresay.server.cli.serve import answer
from foresay.server.cli.served import ServedModel
from foresay.server.cli.terminal import AnswerWriter, LineReader, history_file
from foresay.server.schemas.chat import TokenProvenance
from foresay.server.settings.config import SamplingConfig
from foresay.server.settings.resolved import BUNDLED
from foresay.spec.errors import NumericalError
from tests.server.live import LiveServer

UP, PASTE, ALT_ENTER, CTRL_C, CTRL_D = "\x1b[A", "\x1b[200~{}\x1b[201~", "\x1b\r", "\x03", "\x04"
QUESTION = "How many is 2 + 2?"


@pytest.fixture(autouse=True)
def state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    return tmp_path / "state"


# -- what is typed -----------------------------------------------------------------------------------------------------


@pytest.fixture
def keyboard() -> Iterator[PipeInput]:
    with create_pipe_input() as keyboard, create_app_session(input=keyboard, output=DummyOutput()):
        yield keyboard


def typed(keyboard: PipeInput, keys: str) -> str | None:
    keyboard.send_text(keys)
    return LineReader()()


def test_ctrl_c_before_the_prompt_listens_ends_nothing(keyboard: PipeInput, monkeypatch: pytest.MonkeyPatch) -> None:
    reader, before = LineReader(), signal.signal(signal.SIGINT, signal.default_int_handler)
    prompt = reader._session.prompt

    def pressed() -> str:
        signal.raise_signal(signal.SIGINT)
        return prompt()

    monkeypatch.setattr(reader._session, "prompt", pressed)
    keyboard.send_text("hi\r")
    assert reader() == "hi"
    assert signal.signal(signal.SIGINT, before) is signal.default_int_handler


@pytest.mark.parametrize(
    ("keys", "text"),
    [
        ("one\r", "one"),
        ("one\\\rtwo\r", "one\ntwo"),
        (f"one{ALT_ENTER}two\r", "one\ntwo"),
        (PASTE.format("one\r\ntwo\n") + "three\r", "one\ntwo\nthree"),
        (f"wrong{CTRL_C}{CTRL_C}right\r", "right"),
        (CTRL_D, None),
    ],
)
def test_keys_make_a_text(keyboard: PipeInput, keys: str, text: str | None) -> None:
    assert typed(keyboard, keys) == text


def test_what_was_typed_is_there_again_in_the_next_run(keyboard: PipeInput, state: Path) -> None:
    assert typed(keyboard, "one\\\rtwo\r") == "one\ntwo"
    assert typed(keyboard, f"{UP}\r") == "one\ntwo"
    assert history_file() == state / "foresay" / "chat_history"
    assert stat.S_IMODE(history_file().stat().st_mode) == 0o600


# -- what is written ---------------------------------------------------------------------------------------------------


class Scripted:
    """A stream of these pieces; each token is a piece."""

    def __init__(self, pieces: Sequence[str], drafters: Sequence[str] = ()) -> None:
        self.tokens: list[TokenProvenance] = []
        self._pieces, self._drafters = pieces, drafters or [""] * len(pieces)

    def __iter__(self) -> Iterator[str]:
        for piece, drafter in zip(self._pieces, self._drafters, strict=True):
            token = TokenProvenance(id=0, text=piece, step=0, origin="draft" if drafter else "target", depth=0)
            token.drafter = drafter
            self.tokens.append(token)
            yield piece

    def close_soon(self) -> None: ...

    def result(self) -> None: ...


def written(stream: object, coloured: bool = False, width: int = 40, colours: bool = False) -> str:
    """What stays on a screen that is 12 lines high."""
    out = io.StringIO()
    console = Console(
        file=out, force_terminal=True, width=width, height=12, color_system="standard" if colours else None
    )
    AnswerWriter(console)(stream, coloured)  # type: ignore[arg-type]
    return re.sub(r"\x1b\[\d*[A-KM-Zl]|\x1b\[\?25[hl]|\r", "", out.getvalue()) if colours else screen(out.getvalue())


def screen(output: str) -> str:
    """The lines that a terminal shows in the end, with those that went out at the top."""
    lines, at = [""], 0
    for part in re.split(r"(\n|\r|\x1b\[1A|\x1b\[2K|\x1b\[[\d;?]*[a-zA-Z])", output):
        match part:
            case "\n":
                at += 1
                lines += [""] * (at == len(lines))
            case "\x1b[1A":
                at -= 1
            case "\x1b[2K":
                lines[at] = ""
            case _ if not part.startswith(("\x1b", "\r")):
                lines[at] += part
    return "\n".join(line.rstrip() for line in lines).strip("\n")


@pytest.fixture(autouse=True)
def every_frame(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(terminal, "FRAME_SECONDS", 0.0)


def test_markdown_is_written_block_by_block_and_each_once() -> None:
    text = "One **bold** word.\nNext line.\n\n- first\n- second\n\n```\ncode = 1\n```\n\nThe end"
    shown = written(Scripted(re.findall(r"\S+|\s+", text)))
    assert "One bold word.\nNext line." in shown
    assert shown.index(" • first") < shown.index(" • second") < shown.index("code = 1") < shown.index("The end")
    assert all(shown.count(word) == 1 for word in ("bold", "first", "second", "code", "end"))
    assert shown.index("Next line.\n\n • first") > 0


def test_what_is_longer_than_the_screen_is_there_in_the_end_once() -> None:
    lines = [f"line {number}.\n" for number in range(40)]
    assert written(Scripted(lines)).split("\n") == [line.strip() for line in lines]


def test_text_is_as_the_model_wrote_it_and_obeyed_by_no_terminal() -> None:
    shown = written(Scripted(["<think>2*3 and 4*5", "</think>", " \x1b[2Jred"]))
    assert shown == "<think>2*3 and 4*5</think> [2Jred"
    assert written(Scripted(["`2*3` *word* (2)*(3)"])) == "2*3 word (2)*(3)"


def test_tokens_have_the_colour_of_their_drafter_and_a_legend_counts_them() -> None:
    stream = Scripted(["So", " it", " was **not**", " so"], ["", "suffix", "suffix", "ngram"])
    shown = written(stream, coloured=True, colours=True)
    assert "So\x1b[32m it\x1b[0m\x1b[32m was **not**\x1b[0m\x1b[36m so\x1b[0m" in shown
    assert shown.strip().endswith("\x1b[32msuffix 2\x1b[0m  \x1b[36mngram 1\x1b[0m  the model's own 1")


# -- the conversation --------------------------------------------------------------------------------------------------


AnyEngine = Engine | ServedModel
SETTINGS: dict[str, Any] = {"draft": "ngram", "draft_tokens": 2, "max_model_len": 512, "dtype": "float32"}
FLAGS = [word for name, value in SETTINGS.items() for word in (f"--{name.replace('_', '-')}", str(value))]


@pytest.fixture(scope="module", params=["own", "served"])
def engine(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[AnyEngine]:
    """One in this process, and the same one behind a real server."""
    if request.param == "own":
        with Engine("bundled", **SETTINGS) as engine:
            yield engine
        return
    with LiveServer(tmp_path_factory.mktemp("chat") / "log", "bundled", *FLAGS) as server:
        url = server.wait_for_url()
        yield ServedModel(url, None, answer(url, "/v1/models", None)["data"][0])


class Talk(ChatSession):
    """One of the bundled toy's, whose prompts and sampling are noted."""

    def __init__(self, engine: AnyEngine, interrupted: bool = False) -> None:
        self.asked: list[list[dict[str, str]]] = []
        self.params: list[object] = []
        self.interrupted = interrupted
        super().__init__(engine, SamplingConfig(seed=1, max_tokens=12, temperature=0.0), None, self.write, True)

    def _stream(self, asked, params, speculate=True):
        self.asked.append(asked)
        self.params.append(params)
        return super()._stream(asked, params, speculate)

    def write(self, stream, coloured):
        if self.interrupted:
            next(stream)
            terminal_frames = terminal._frames

            def interrupted(pieces):
                os.kill(os.getpid(), signal.SIGINT)
                yield from terminal_frames(pieces)

            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(terminal, "_frames", interrupted)
                return AnswerWriter(Console(file=io.StringIO()))(stream, coloured)
        return AnswerWriter(Console(file=io.StringIO()))(stream, coloured)


Said = Callable[[], list[str]]


@pytest.fixture
def said(capsys: pytest.CaptureFixture[str]) -> Said:
    return lambda: capsys.readouterr().err.splitlines()


def test_the_line_after_an_answer_counts_tokens_and_passes(engine: AnyEngine, said: Said) -> None:
    assert Talk(engine).obey(QUESTION)
    pattern = r"12 tokens in \d+ passes, [\d.]+ tokens/s, cut for length \(/set max_tokens N\)"
    assert re.fullmatch(pattern, said()[-1])


def test_ctrl_c_ends_the_answer_and_keeps_what_was_written(engine: AnyEngine, said: Said) -> None:
    before, talk = signal.getsignal(signal.SIGINT), Talk(engine, interrupted=True)
    talk.obey(QUESTION)
    assert re.search(r"tokens? in \d+ pass(es)?, stopped$", said()[-1]), "a server may have gone on for a few"
    assert signal.getsignal(signal.SIGINT) is before, "as it was, ignored too where a shell's job has it so"
    talk.obey("And 3?")
    question, answer, _ = talk.asked[-1]
    assert question["content"] == QUESTION and answer["role"] == "assistant" and answer["content"]
    talk.obey("/compare")
    assert said()[-1] == "that answer was stopped: /compare TEXT asks again"


def test_compare_writes_the_last_answer_or_the_next_without_drafts(engine: AnyEngine, said: Said) -> None:
    talk = Talk(engine)
    talk.obey("/compare")
    assert said() == ["the next question is answered with drafts and without"]
    for line in (QUESTION, "/compare", "/compare And 3?"):
        talk.obey(line)
        with_drafts, without, verdict = said()[-3:]
        assert re.match(r"with drafts:    [\d.]+ s after the first pass, 12 tokens in \d+ passes", with_drafts)
        assert re.match(r"without drafts: [\d.]+ s after the first pass, 12 tokens in 12 passes", without)
        assert verdict == "the same text"
    assert talk.asked[1] == talk.asked[0] and talk.asked[-1] == talk.asked[-2]
    talk.obey("And 4?")
    assert said()[-1] != "the same text"


def test_system_and_new_change_what_is_sent(engine: AnyEngine, said: Said) -> None:
    talk = Talk(engine)
    for line in ("/system Be brief.", QUESTION, "/system", "And 3?", "/new", "And 4?"):
        assert talk.obey(line)
    assert [[message["role"] for message in asked] for asked in talk.asked] == [
        ["system", "user"],
        ["user", "assistant", "user"],
        ["user"],
    ]
    reported = [line for line in said() if "tokens in" not in line]
    assert reported == ["the system message is set", "there is no system message", "a new conversation"]


@pytest.mark.parametrize(
    ("line", "answer"),
    [
        ("/set temperature hot", "temperature must be a number from 0 to 2, got 'hot'"),
        ("/set temprature 1", 'unknown setting "temprature"'),
        ("/set top_p", "/set top_p VALUE: top_p is a number above 0 and at most 1, or unset"),
        ("/set max_tokens", "/set max_tokens VALUE: max_tokens is a whole number of at least 1, or unset"),
        ("/set temperature 0", "temperature 0"),
        ("/set temperature unset", "temperature 0.7"),
        ("/set max_tokens unset", "max_tokens unset, as many as the context leaves"),
        ("/set max_tokens 0", "max_tokens must be a whole number of at least 1, got '0'"),
        ("/compair", "unknown command /compair (/help lists them, /bye leaves)"),
        ("/stats", "nothing to tell yet"),
    ],
)
def test_what_is_wrong_is_named_with_what_is_right(engine: AnyEngine, said: Said, line: str, answer: str) -> None:
    assert Talk(engine).obey(line)
    assert said() == [answer]


def test_set_changes_the_next_answers(engine: AnyEngine, said: Said) -> None:
    talk = Talk(engine)
    for line in ("/set temperature 0.5", "/set top_p 0.9", "/set max_tokens 3", "/set seed 7", QUESTION):
        talk.obey(line)
    assert [getattr(talk.params[0], name) for name in ("temperature", "top_p", "max_tokens", "seed")] == [
        0.5,
        0.9,
        3,
        7,
    ]
    reported = said()
    assert reported[:2] == ["temperature 0.5", "top_p 0.9"] and reported[-1].startswith("3 tokens in ")
    talk.obey("/set")
    assert {" ".join(line.split()) for line in said()} >= {"temperature 0.5", "seed 7", "max_tokens 3"}


def test_an_answer_may_fill_the_context_unless_a_length_is_set(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO(f"/set ignore_eos true\n{QUESTION}\n/bye\n"))
    words = [
        "--draft", "ngram", "--draft-tokens", "2", "--max-model-len", "300", "--dtype", "float32", "--temperature", "0",
    ]  # fmt: skip
    assert main(["chat", *words]) == 0
    chatted = capsys.readouterr().out
    assert main(["run", *words, "--ignore-eos", "bundled", *QUESTION.split()]) == 0
    ran = capsys.readouterr()
    assert re.match(r"2[6-9]\d tokens \(length\)", ran.err), "the usual 256 are for what is measured"
    assert ran.out == chatted


def test_where_nothing_drafts_nothing_is_claimed_to(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO("/compare\n/bye\n"))
    assert main(["chat", "bundled", "--draft", "none", "--max-model-len", "256", "--dtype", "float32"]) == 0
    first, _, compared = capsys.readouterr().err.splitlines()
    assert first == "bundled, temperature 0.7, top-p 0.95"
    assert compared.startswith("nothing drafts here, so there is nothing to compare")


def test_a_path_is_a_question_and_bye_leaves(engine: AnyEngine) -> None:
    talk = Talk(engine)
    assert talk.obey("/etc/hosts is what?") and talk.asked
    assert not any(talk.obey(line) for line in ("/bye", "/quit", "/exit"))


def test_an_error_ends_an_answer_and_not_the_conversation(said: Said, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(self: object) -> None:
        raise NumericalError("the logits hold NaN")

    engine = Engine("bundled", **SETTINGS)
    talk = Talk(engine)
    talk.obey(QUESTION)
    with monkeypatch.context() as patch:
        patch.setattr(Engine, "step", fail)
        assert talk.obey("And 3?")
    assert said()[-1] == "the logits hold NaN (/new begins a new conversation)"
    engine.close()  # of the answer that was left
    talk.obey("And 4?")
    assert [message["content"] for message in talk.asked[-1]][::2] == [QUESTION, "And 4?"]


def test_a_person_gets_what_the_model_recommends_or_what_is_usual(tmp_path: Path) -> None:
    usual = for_people(SamplingConfig(top_k=5))
    assert (usual.temperature, usual.top_k, usual.top_p) == (0.7, 5, 0.95)
    assert drawn(usual) == "temperature 0.7, top-k 5, top-p 0.95"
    target = shutil.copytree(BUNDLED / "target", tmp_path / "target")
    (target / "generation_config.json").write_text('{"temperature": 0.6, "top_k": 20}')
    own = for_people(SamplingConfig(target=str(target), temperature=0.0))
    assert (own.temperature, own.top_k, own.top_p) == (0.0, 20, 0.95), "what is given goes before what is recommended"
    neutral = sampling_params(SamplingConfig())
    assert (neutral.temperature, neutral.top_k, neutral.top_p) == (1.0, 0, 1.0), "what is measured is the model itself"
