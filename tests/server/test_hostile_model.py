"""No command runs the code of a model's repository, or asks whether it may.

A tiny model claims by ``auto_map`` that its classes are in files of its own, which leave a witness when they are run.
"""

from __future__ import annotations

import ast
import json
import shutil
import sys
from collections.abc import Callable, Iterator
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
import torch

from foresay.server.cli.main import COMMANDS, main
from tests.heads.writing import change_config
from tests.same_tokens.test_directories import write_tokenizer
from tests.server.live import LiveServer
from tests.verifier.families import make

ROOT = Path(__file__).resolve().parents[2]
BUNDLED = ROOT / "server" / "bundled"
AUTO_MAP = {
    "AutoConfig": "hostile.Config",
    "AutoModel": "hostile.Model",
    "AutoModelForCausalLM": "hostile.Model",
    "AutoTokenizer": [None, "hostile.Tokenizer"],
}
CODE = """
import pathlib
pathlib.Path(__file__).with_name("witness").touch()
pathlib.Path({witness!r}).touch()
from transformers import LlamaConfig as Config, LlamaForCausalLM as Model, PreTrainedTokenizerFast as Tokenizer
def generate(*args, **kwargs): ...
"""
REFUSED = "tokenizer_config.json asks by its auto_map for code that comes with the model, which is never run"
SMALL = "--draft ngram --draft-tokens 2 --dtype float32 --max-model-len 256 --threads 1"
TRAINING = "--samples 4 --length 20 --steps 1 --batch 2"

#: Every command that takes a model, as it is called with {model} in each place where one can be named.
CALLS = {
    "generate": f"generate {{model}} --prompt fox --max-tokens 2 {SMALL}",
    "run": f"run {{model}} hello --max-tokens 4 {SMALL}",
    "generate in chat": f"generate {{model}} --prompt fox --chat --max-tokens 2 {SMALL}",
    "chat": f"chat {{model}} --max-tokens 2 {SMALL}",
    "check": "check {model} --draft {model} --dtype float32",
    "prove": f"prove {{model}} --max-tokens 2 {SMALL}",
    "bench": f"bench {{model}} --max-tokens 2 --rounds 1 --prompt fox {SMALL}",
    "quantize": "quantize {model} --out {out}",
    "train draft": f"train draft --target {{model}} --prompts {{prompts}} --out {{out}} --width 16 {TRAINING}",
    "train eagle3": f"train eagle3 --target {{model}} --prompts {{prompts}} --out {{out}} --depth 2 {TRAINING}",
    "train medusa": f"train medusa --target {{model}} --prompts {{prompts}} --out {{out}} --depth 2 {TRAINING}",
}
#: Those that read a model other than the target.
BESIDE = {
    kind: f"generate --draft {name} --prompt fox --max-tokens 2 --dtype float32 --max-model-len 256"
    for kind, name in {"draft": "{model}", "medusa": "medusa:{model}", "eagle3": "eagle3:{model}"}.items()
}


def make_hostile(directory: Path) -> None:
    """Give a model's directory code of its own, wherever transformers might look for some."""
    code = CODE.format(witness=str(directory / "witness"))
    for name in ("hostile.py", "custom_generate/generate.py", "additional_chat_templates/hostile.py"):
        (directory / name).parent.mkdir(exist_ok=True)
        (directory / name).write_text(code)
    (directory / "additional_chat_templates" / "tool_use.jinja").write_text("{{ messages }}")
    change_config(directory, auto_map=AUTO_MAP, custom_pipelines={"text-generation": {"impl": "hostile.Model"}})
    if (directory / "tokenizer.json").exists():
        (directory / "chat_template.jinja").write_text("{% for m in messages %}{{ m.content }}{% endfor %}")
        (directory / "tokenizer_config.json").write_text(json.dumps({"auto_map": AUTO_MAP}))


def code_that_ran(directory: Path) -> list[Path]:
    """Witnesses, wherever the code was copied before it was run."""
    loaded = [name for name in sys.modules if "hostile" in name and "test_hostile" not in name]
    assert not loaded
    return list(directory.rglob("witness"))


class Asked(Exception):
    """Something read standard input."""


class Silent:
    """A standard input that must not be read."""

    def __getattr__(self, name: str) -> Any:
        raise Asked(name)


@pytest.fixture(autouse=True)
def as_before(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    with torch.enable_grad():
        yield


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Callable[[bool], Path]:
    """A hostile target. ordinary: its tokenizer can be read by transformers' own class all the same."""
    root = tmp_path_factory.mktemp("hostile")

    def found(ordinary: bool) -> Path:
        directory = root / ("ordinary" if ordinary else "foreign")
        if not directory.exists():
            make("llama2", directory, num_hidden_layers=4, vocab_size=290)
            write_tokenizer(directory, 290)
            make_hostile(directory)
            if ordinary:
                path = directory / "tokenizer_config.json"
                given = json.loads(path.read_text())
                path.write_text(json.dumps({**given, "tokenizer_class": "PreTrainedTokenizerFast"}))
        return directory

    return found


def run(words: str, capsys: pytest.CaptureFixture[str], **places: object) -> tuple[int, str]:
    """The status of a command and what it says on stderr."""
    capsys.readouterr()
    status = main(words.format(**places).split())
    return status, capsys.readouterr().err


def test_every_command_is_tried() -> None:
    others = {"serve", "config", "deploy", "keys", "models", "pull", "reload", "version"}
    others |= {"list", "ps", "rm", "launch"}
    assert {call.split()[0] for call in CALLS.values()} | others == set(COMMANDS)


@pytest.mark.parametrize("ordinary", [True, False], ids=["ordinary tokenizer", "its own tokenizer"])
@pytest.mark.parametrize("call", CALLS)
def test_a_hostile_target(call, ordinary, model, tmp_path, monkeypatch, capsys) -> None:
    directory = model(ordinary)
    monkeypatch.setattr("sys.stdin", StringIO("y\n") if call == "chat" else Silent())
    (tmp_path / "prompts.txt").write_text("the quick\nbrown fox\nthe lazy dog\njumps over\n")
    status, result = run(CALLS[call], capsys, model=directory, prompts=tmp_path / "prompts.txt", out=tmp_path / "out")
    if not ordinary and call not in ("check", "quantize"):  # which read no text
        *before, last = result.splitlines()
        assert status == 1 and REFUSED in last and len(before) <= (3 if call.startswith("train") else 0)
    elif call != "check":  # which may find other fault with a model of random weights
        assert status == 0, result
    assert not code_that_ran(directory)


@pytest.mark.parametrize("call", BESIDE)
def test_a_hostile_model_next_to_the_target(call, tmp_path, monkeypatch, capsys) -> None:
    directory = tmp_path / "model"
    shutil.copytree(BUNDLED / call, directory)
    make_hostile(directory)
    monkeypatch.setattr("sys.stdin", Silent())
    status, result = run(BESIDE[call], capsys, model=directory)
    assert status == 0, result
    assert not code_that_ran(directory)


@pytest.mark.slow
@pytest.mark.parametrize("ordinary", [True, False], ids=["ordinary tokenizer", "its own tokenizer"])
def test_a_hostile_target_is_served_or_refused(ordinary, model, tmp_path) -> None:
    directory = model(ordinary)
    with LiveServer(tmp_path / "log", str(directory), *SMALL.split()) as server:
        if ordinary:
            server.wait_for_url()
        else:
            assert server.process.wait(180) == 1
            assert REFUSED in server.output.splitlines()[-1]
    assert not code_that_ran(directory)


def test_the_teacher_takes_no_kernel_from_the_hub(model, tmp_path, monkeypatch, capsys) -> None:
    """transformers would download a repository that config.json names and run its code as attention."""
    directory = tmp_path / "model"
    shutil.copytree(model(True), directory)
    change_config(directory, attn_implementation="evil/kernel", _attn_implementation="evil/kernel")
    (tmp_path / "prompts.txt").write_text("the quick\nbrown fox\nthe lazy dog\njumps over\n")
    status, result = run(
        CALLS["train medusa"], capsys, model=directory, prompts=tmp_path / "prompts.txt", out=tmp_path / "out"
    )
    assert status == 0, result


def calls_of_auto_classes(path: Path) -> list[ast.Call]:
    tree = ast.parse(path.read_text())
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)]
    return [
        call
        for call in calls
        if isinstance(call.func, ast.Attribute)
        and call.func.attr in ("from_pretrained", "from_config")
        and isinstance(call.func.value, ast.Name)
        and call.func.value.id.startswith("Auto")
    ]


def test_nothing_of_ours_leaves_it_to_transformers_to_ask() -> None:
    """``trust_remote_code`` is False wherever a class is chosen by what a repository says."""
    files = [
        path for room in ("server", "drafters", "verifier", "spec", "bench") for path in (ROOT / room).rglob("*.py")
    ]
    calls = [(path.name, call) for path in files for call in calls_of_auto_classes(path)]
    assert len(calls) >= 5
    for name, call in calls:
        result = {keyword.arg: ast.unparse(keyword.value) for keyword in call.keywords}
        assert result.get("trust_remote_code") == "False" or (None, "own") in result.items(), (
            f"{name}: {ast.unparse(call)}"
        )
