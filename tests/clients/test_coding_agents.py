"""Codex CLI and Claude Code, unmodified, finish a small edit: the model is a script, all else is real.

The prompts are theirs, tens of thousands of tokens; the programs run their tools in a temporary directory, and what
counts is the file they leave behind.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from foresay.spec.request import Request
from tests.clients.answering import AnsweringEngine, call
from tests.clients.launching import launched
from tests.clients.npm import CLAUDE, CODEX, needs_npm, node
from tests.routes.running import running

pytestmark = [pytest.mark.outside, needs_npm]

WRONG, RIGHT = "print('helo')\n", "print('hello')\n"
TASK = "Mend the word in hello.py"
#: Less than a prompt of Claude Code and the 32,000 tokens it asks for besides.
CONTEXT = 72_000


@pytest.fixture
def work(tmp_path: Path) -> Path:
    """A directory to work in."""
    work = tmp_path / "work"
    work.mkdir()
    (work / "hello.py").write_text(WRONG)
    return work


def in_turn(*answers: str) -> Callable[[str], str]:
    """The answers one after the other: as many were given as there are results of tools in the prompt."""

    def answer(prompt: str) -> str:
        return answers[min(prompt.count("<tool_call>{"), len(answers) - 1)]

    return answer


CONFIG = """
model = "toy"
model_provider = "foresay"
[model_providers.foresay]
name = "Foresay"
base_url = "{url}/v1"
wire_api = "responses"
"""


def codex(url: str, work: Path, *flags: str, task: str = TASK) -> str:
    """What Codex prints in the end."""
    home = work.parent / "codex"
    home.mkdir(exist_ok=True)
    (home / "config.toml").write_text(CONFIG.format(url=url))
    line = ["exec", "--skip-git-repo-check", "--sandbox", "danger-full-access", *flags, task]
    done = node(str(CODEX), *line, home=home, cwd=work, CODEX_HOME=str(home))
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def claude(url: str, work: Path, *flags: str, task: str = TASK) -> str:
    """What Claude Code prints in the end."""
    variables = {
        "ANTHROPIC_BASE_URL": url,
        "ANTHROPIC_API_KEY": "none",
        "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
    }
    line = ["--print", "--permission-mode", "acceptEdits", *flags, task]
    done = node(str(CLAUDE), *line, home=work.parent, cwd=work, **variables)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def known_already(earlier: Request, later: Request) -> float:
    """The share of a prompt that another one begins with."""
    pairs = enumerate(zip(earlier.prompt, later.prompt, strict=False))
    return next((at for at, (one, other) in pairs if one != other), len(earlier.prompt)) / len(later.prompt)


@pytest.mark.parametrize(
    ("name", "words", "tool"),
    [
        ("claude", ["--print", "--permission-mode", "acceptEdits"], "Write"),
        ("codex", ["exec", "--skip-git-repo-check", "--sandbox", "danger-full-access"], "exec_command"),
    ],
)
def test_launched_agents_edit_a_file_and_nothing_else(agent, work, name, words, tool):
    path = str(work / "new.py")
    arguments = {"file_path": path, "content": RIGHT} if name == "claude" else {"cmd": f"echo -n > {path}"}
    engine = AnsweringEngine(agent, in_turn(call(tool, **arguments), "Written."), CONTEXT)
    with running(engine, agent) as url:
        done = launched(name, url, work, *words, "Write new.py")
    assert done.returncode == 0 and "Written." in done.stdout, done.stdout + done.stderr
    assert (work / "new.py").exists()
    assert {file.name for file in work.iterdir()} == {"hello.py", "new.py"}
    config = work.parent / "home" / ".codex" / "config.toml"
    assert not config.exists() or "foresay" not in config.read_text()


@pytest.mark.parametrize("start", [codex, claude])
def test_most_of_a_prompt_is_that_of_the_session_before(agent, work, start):
    """Tools and rules do not change with the task, the rest not within a session; Claude Code calls the model what it
    likes."""
    tool = call("Read", file_path=str(work / "hello.py")) if start is claude else call("exec_command", cmd="ls")
    engine = AnsweringEngine(agent, in_turn(tool, "Nothing to do."), CONTEXT)
    with running(engine, agent, any_model=start is claude) as url:
        for task in ("Is there a fox?", "Read hello.py and tell me what it says"):
            assert "Nothing to do." in start(url, work, task=task)
    first, turn, second, _ = engine.requests
    assert known_already(first, turn) >= 0.98 and known_already(first, second) >= 0.8
    assert "billing" not in engine.prompts[0]


def test_codex_edits_a_file(agent, work, caplog):
    engine = AnsweringEngine(
        agent,
        in_turn(
            call("multi_agent_v1.close_agent", target="nobody"),
            call("exec_command", cmd="sed -i s/helo/hello/ hello.py && cat hello.py"),
            "Mended.",
        ),
        CONTEXT,
    )
    with running(engine, agent) as url:
        assert "Mended." in codex(url, work)
    assert (work / "hello.py").read_text() == RIGHT
    first, second, third = engine.prompts
    assert TASK in first and '"exec_command"' in first and '"multi_agent_v1.spawn_agent"' in first
    assert "web_search" not in first and "tools of type 'web_search'" in caplog.text
    result = second.rpartition("<|user|>")[2]
    assert "nobody" in result and "unsupported" not in result, "Codex knows the function by its namespace"
    assert "hello" in third.rpartition("<|user|>")[2]


def test_codex_of_another_model_edits_a_file_with_code(agent, work):
    """For models it knows Codex brings its tools in the conversation, the main one of them as plain text."""
    engine = AnsweringEngine(
        agent,
        in_turn(
            call("functions.exec", input='text(await tools.exec_command({cmd: "sed -i s/helo/hello/ hello.py"}));\n'),
            "Mended.",
        ),
        CONTEXT,
    )
    with running(engine, agent, any_model=True) as url:
        assert "Mended." in codex(url, work, "--model", "gpt-6.1-sol")
    assert (work / "hello.py").read_text() == RIGHT
    assert '"functions.exec"' in engine.prompts[0]


def test_claude_code_edits_a_file(agent, work):
    path = str(work / "hello.py")
    engine = AnsweringEngine(
        agent,
        in_turn(
            call("ToolSearch", query="select:WebFetch", max_results=2),
            call("Read", file_path=path),
            call("Edit", file_path=path, old_string="helo", new_string="hello"),
            "Mended.",
        ),
        CONTEXT,
    )
    with running(engine, agent) as url:
        assert "Mended." in claude(url, work, "--model", "toy")
    assert (work / "hello.py").read_text() == RIGHT
    first, second, third, _ = engine.prompts
    assert TASK in first and "<|system|># Environment" in first, "its system message in the middle is rendered"
    assert '"Edit"' in first and "DeferredToolPlaceholder" not in first
    assert '"name": "WebFetch"' not in first and '"name": "WebFetch"' in second, "found, and told of from then on"
    assert "print('helo')" in third
    most = engine.requests[0].params.max_tokens
    assert most is not None and most == CONTEXT - len(engine.requests[0].prompt) < 32_000
