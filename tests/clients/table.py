"""The table of clients in docs/compatibility.md: ``python -m tests.clients.table`` writes it anew."""

from __future__ import annotations

import re
from pathlib import Path
from typing import NamedTuple

from tests.clients.npm import PINS as NPM

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "compatibility.md"
HEADING, NEXT = "\n## Clients\n", "\n## "
TURNS = "two turns, streamed, the first found again in the second"


class Client(NamedTuple):
    """source: where the package comes from. does: what the suite has it do. tests: the files that do so."""

    name: str
    source: str
    packages: tuple[str, ...]
    does: str
    tests: str


CLIENTS = (
    Client(
        "OpenAI, Python",
        "PyPI",
        ("openai",),
        "completions, chats, tools, responses, their streams, the WebSocket",
        "tests/server/test_live.py, tests/responses",
    ),
    Client(
        "OpenAI, Node",
        "npm",
        ("openai",),
        "chats, tools, responses, their streams",
        "tests/clients/test_npm_clients.py",
    ),
    Client(
        "Anthropic, Python",
        "PyPI",
        ("anthropic",),
        "messages, tools, thinking, schemas, streams, counting",
        "tests/routes/test_messages.py, tests/routes/test_agents.py, tests/routes/test_clients.py",
    ),
    Client(
        "Ollama, Python",
        "PyPI",
        ("ollama",),
        "chats, prompts, tools, thinking, schemas, streams, lists of models",
        "tests/routes/test_ollama.py, tests/routes/test_agents.py, tests/routes/test_clients.py",
    ),
    Client(
        "LangChain",
        "PyPI",
        ("langchain-openai",),
        "chats, tools, structured answers",
        "tests/parsers/test_chat_tools.py, tests/clients/test_examples.py",
    ),
    Client(
        "LiteLLM",
        "Makefile",
        ("litellm",),
        "tools through OpenAI's, Anthropic's and Ollama's API, whole and streamed",
        "tests/clients/test_litellm.py",
    ),
    Client(
        "Vercel's AI SDK",
        "npm",
        ("ai", "@ai-sdk/openai-compatible", "@ai-sdk/openai"),
        "several steps with tools, chats and responses, whole and streamed",
        "tests/clients/test_npm_clients.py",
    ),
    Client(
        "Codex CLI",
        "npm",
        ("@openai/codex",),
        "finishes an edit, with shell commands and with its code mode; two turns",
        "tests/clients/test_coding_agents.py, tests/clients/test_agents.py",
    ),
    Client(
        "Claude Code",
        "npm",
        ("@anthropic-ai/claude-code",),
        "finishes an edit, with tools it loads on the way; two turns",
        "tests/clients/test_coding_agents.py, tests/clients/test_agents.py",
    ),
    Client("OpenCode", "npm", ("opencode-linux-x64",), TURNS, "tests/clients/test_agents.py"),
    Client("Copilot CLI", "npm", ("@github/copilot",), TURNS, "tests/clients/test_agents.py"),
    Client("Continue CLI", "npm", ("@continuedev/cli",), TURNS, "tests/clients/test_agents.py"),
    Client("Aider", "Makefile", ("aider-chat",), TURNS, "tests/clients/test_agents.py"),
    Client("llm", "Makefile", ("llm",), TURNS, "tests/clients/test_agents.py"),
)


def pinned(source: str, package: str) -> str:
    """The version that the suite runs with."""
    if source == "npm":
        return NPM[package]
    text = (ROOT / ("Makefile" if source == "Makefile" else "constraints.txt")).read_text("utf-8")
    found = re.search(rf"^(?:\w+ := )?{re.escape(package)}(?:\[\w+\])?==(\S+)$", text, re.MULTILINE)
    assert found is not None, package
    return found[1]


def rendered() -> str:
    """The section, its heading included."""
    rows = ["| client | packages | what the suite has it do | where |", "|---|---|---|---|"]
    for client in CLIENTS:
        packages = ", ".join(f"`{package}` {pinned(client.source, package)}" for package in client.packages)
        where = ", ".join(f"`{test}`" for test in client.tests.split(", "))
        rows.append(f"| {client.name} | {packages} | {client.does} | {where} |")
    table = "\n".join(rows)
    about = "Unmodified, from PyPI and npm, in these versions; `tests/clients/test_table.py` compares."
    return f"{HEADING}\n{about}\n\n{table}\n"


def renewed(page: str) -> str:
    """The page with the section as it should be."""
    before, _, after = page.partition(HEADING)
    return before + rendered() + NEXT + after.partition(NEXT)[2]


if __name__ == "__main__":
    PAGE.write_text(renewed(PAGE.read_text("utf-8")), "utf-8")
