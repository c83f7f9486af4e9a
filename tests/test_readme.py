"""What README and the documents name exists: commands, flags, make targets, files."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from server.cli import COMMANDS, build_parser

ROOT = Path(__file__).resolve().parent.parent
README = (ROOT / "README.md").read_text("utf-8")
DOCUMENTS = sorted([ROOT / "README.md", ROOT / "CHANGELOG.md", *(ROOT / "docs").glob("*.md")])


def test_every_command_is_in_the_readme() -> None:
    assert set(re.findall(r"^\| `foresay ([a-z]+)", README, re.MULTILINE)) == set(COMMANDS)


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_flags_that_are_written_about_exist(document: Path) -> None:
    flags = {flag for command in COMMANDS.values() for flag in build_parser(command)._option_string_actions}
    written = set(re.findall(r"(?<![\w-])--[a-z][a-z-]+", document.read_text("utf-8")))
    assert written <= flags


def test_make_targets_that_are_written_about_exist() -> None:
    targets = set(re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text("utf-8"), re.MULTILINE))
    assert set(re.findall(r"(?:\$ |`)make ([a-z]+)", README)) <= targets
    assert {"serve", "test", "check", "bench"} <= targets


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_links_and_file_names_lead_somewhere(document: Path) -> None:
    text = document.read_text("utf-8")
    links = [link for link in re.findall(r"\]\(([^)#]+)", text) if not link.startswith("http")]
    named = re.findall(r"`((?:bench|docs|drafters|kvpaging|server|spec|tests|verifier)/[\w/.-]+)`", text)
    missing = [name for name in links if not (document.parent / name).exists()]
    assert missing + [name for name in named if not (ROOT / name).exists()] == []


def test_examples_in_help_are_commands_that_parse() -> None:
    import shlex

    for command in COMMANDS.values():
        for example in command.examples:
            program, name, *arguments = shlex.split(example)
            assert (program, name) == ("foresay", command.name)
            build_parser(command).parse_strictly(arguments)
