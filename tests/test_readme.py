"""What README and the documents name exists: commands, flags, make targets, files; its figures are those measured."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from bench import readme
from bench.inflate import Shape
from bench.shapes import LLAMA_1B, LLAMA_8B, QWEN_8B, ModelShape
from foresay.server.cli.main import COMMANDS, build_parser
from foresay.server.engine.memory import Demand
from foresay.server.settings.config import EngineConfig
from foresay.server.settings.resolved import BUNDLED
from foresay.verifier.model.config import ModelConfig
from tests.checking.planned import draft_of
from tests.server.test_gpu_memory import RTX_4090, planned, refused

ROOT = Path(__file__).resolve().parent.parent
README = (ROOT / "README.md").read_text("utf-8")
PACKAGING = ROOT / "packaging" / "README.md"
DOCUMENTS = sorted([*ROOT.glob("*.md"), PACKAGING, *(ROOT / "docs").glob("*.md")])


def test_every_command_is_in_the_readme() -> None:
    assert set(re.findall(r"^\| `foresay ([a-z]+)", README, re.MULTILINE)) == set(COMMANDS)


@pytest.mark.parametrize("document", [one for one in DOCUMENTS if one != PACKAGING], ids=lambda path: path.name)
def test_flags_that_are_written_about_exist(document: Path) -> None:
    flags = {flag for command in COMMANDS.values() for flag in build_parser(command)._option_string_actions}
    there = re.sub(r"^### Removed$.*?(?=^##|\Z)", "", document.read_text("utf-8"), flags=re.MULTILINE | re.DOTALL)
    ours = re.sub(r"^\$ claude .*$", "", there, flags=re.MULTILINE)
    written = set(re.findall(r"(?<![\w-])--[a-z][a-z-]+", ours))
    assert written <= flags


def test_make_targets_that_are_written_about_exist() -> None:
    targets = set(re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text("utf-8"), re.MULTILINE))
    names = (".pre-commit-config.yaml", ".devcontainer/devcontainer.json", "CONTRIBUTING.md")
    written = README + "".join((ROOT / name).read_text("utf-8") for name in names)
    assert set(re.findall(r"(?:\$ |`|entry: |\")make ([a-z]+)", written)) <= targets
    assert {"serve", "test", "check", "bench"} <= targets


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_links_and_file_names_lead_somewhere(document: Path) -> None:
    text = document.read_text("utf-8")
    links = [link for link in re.findall(r"\]\(([^)#]+)", text) if not link.startswith("http")]
    named = re.findall(r"`((?:bench|docs|drafters|kvpaging|server|spec|tests|verifier)/[\w/.-]+)`", text)
    missing = [name for name in links if not (document.parent / name).exists()]
    assert missing + [name for name in named if not (ROOT / name).exists()] == []


def anchors(document: Path) -> set[str]:
    """Of its headings, as GitHub makes them."""
    heads = re.findall(r"^#+ (.+)$", document.read_text("utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", head.lower()).replace(" ", "-") for head in heads}


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_anchors_of_links_are_headings(document: Path) -> None:
    links = re.findall(r"\]\(([^)#:]*)#([\w-]+)\)", document.read_text("utf-8"))
    assert [
        (name, anchor) for name, anchor in links if anchor not in anchors(document.parent / name if name else document)
    ] == []


def commands(document: Path) -> list[list[str]]:
    """The words of the lines that show a command of ours, without comments and what a shell does with the output."""
    text = document.read_text("utf-8").replace("\\\n", " ")
    lines = re.findall(r"^(?:\$ |    )(?:\w+=\S+ )*foresay ((?:[a-z]+)(?= |$)[^#|>\n]*)", text, re.MULTILINE)
    return [shlex.split(line) for line in lines]


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_commands_that_are_shown_parse(document: Path) -> None:
    for name, *arguments in commands(document):
        build_parser(COMMANDS[name]).parse_strictly(arguments)


def test_commands_are_found() -> None:
    assert sum(len(commands(document)) for document in DOCUMENTS) > 60


def test_examples_in_help_are_commands_that_parse() -> None:
    for command in COMMANDS.values():
        for example in command.examples:
            program, name, *arguments = shlex.split(example)
            assert (program, name) == ("foresay", command.name)
            build_parser(command).parse_strictly(arguments)


def test_the_figures_are_those_of_the_newest_record() -> None:
    assert readme.rewritten(README, readme.newest(), readme.on_gpu()) == README, "run python -m bench readme"


QWEN_06B = ModelShape("Qwen3-0.6B", Shape(28, 1024, 16, 8, 3072), 128, 151_936, untied=False, qk_norm=True)


def memory(*shapes: ModelShape) -> tuple[str, str]:
    """GiB of the weights, and with a KV cache of 8,192 tokens, as a server would plan them."""
    models = [shape.config(ModelConfig.from_directory(BUNDLED / "target")) for shape in shapes]
    drafts = [draft_of(model) for model in models[1:]]
    demand = Demand.of(EngineConfig(), "bfloat16", models[0], drafts)
    weights = sum(demand.weights.values())
    return f"{weights / 2**30:.1f} GiB", f"{(weights + demand.kv_bytes(8192)) / 2**30:.1f} GiB"


@pytest.mark.parametrize("shapes", [(QWEN_8B, QWEN_06B), (LLAMA_8B, LLAMA_1B), (QWEN_06B,), (LLAMA_1B,)])
def test_the_memory_of_real_models_is_as_computed(shapes: tuple[ModelShape, ...]) -> None:
    assert f"| {' and '.join(shape.name for shape in shapes)} | {' | '.join(memory(*shapes))} |" in README


def test_the_plans_of_the_recipes_are_as_computed() -> None:
    recipes = (ROOT / "docs" / "recipes.md").read_text("utf-8")
    target, draft = (
        shape.config(ModelConfig.from_directory(BUNDLED / "target"), 40_960) for shape in (QWEN_8B, QWEN_06B)
    )
    lengths = [refused(RTX_4090, *models).hint for models in ((target, draft), (target,))]
    shorter = [int(found[1]) for found in map(re.compile(r"--max-model-len (\d+)").search, lengths) if found]
    held = planned(RTX_4090, target, kv_dtype="int8").tokens
    assert f"| bf16, drafted by Qwen3-0.6B | {shorter[0]:,} tokens" in recipes
    assert f"| bf16, `--draft suffix` | {shorter[1]:,} |" in recipes
    assert f"| 40,960, all it has; the KV cache then holds {held:,} |" in recipes
