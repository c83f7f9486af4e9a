from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from foresay import Engine
from foresay.drafters.training.prompts import Prompt
from foresay.server.cli.bench import measure
from foresay.server.cli.main import COMMANDS, build_parser, main
from foresay.server.settings.config import BenchConfig, ServeConfig
from foresay.server.settings.fields import settings_of

ROOT = Path(__file__).resolve().parents[2]
HEAVY = {"torch", "transformers", "aiohttp", "rich", "triton", "numpy", "prompt_toolkit", "markdown_it"}

#: One small engine is enough to see a command work; it needs no draft model.
QUICK = [
    "--draft", "ngram", "--draft-tokens", "2", "--max-tokens", "12", "--dtype", "float32", "--max-model-len", "256",
]  # fmt: skip


@pytest.fixture(autouse=True)
def no_settings_from_outside(monkeypatch: pytest.MonkeyPatch) -> None:
    for variable in [name for name in os.environ if name.startswith("FORESAY_")]:
        monkeypatch.delenv(variable)


def run_python(code: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)


def status_of(arguments: list[str]) -> object:
    """The exit status, whether the command returns it or the argument parser leaves with it."""
    try:
        return main(arguments)
    except SystemExit as left:
        return left.code


@pytest.mark.parametrize("arguments", [["--help"], ["serve", "--help"], ["generate", "--help"], ["version"]])
def test_help_imports_nothing_heavy(arguments: list[str]) -> None:
    code = f"import sys\nfrom foresay.server.cli.main import main\ntry: main({arguments!r})\nexcept SystemExit: pass\n"
    done = run_python(code + "print(*sys.modules, file=sys.stderr)")
    assert "foresay" in done.stdout
    assert not HEAVY & set(done.stderr.split())


@pytest.mark.parametrize("name", COMMANDS)
def test_help_shows_every_setting_and_its_default(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    command = COMMANDS[name]
    with pytest.raises(SystemExit) as left:
        main([name, "--help-all"])
    assert left.value.code == 0
    shown = " ".join(capsys.readouterr().out.split())
    for setting in settings_of(command.config).values() if command.config else ():
        assert setting.flag in shown or setting.name == "target"
        assert setting.description in shown
    for example in command.examples:
        assert " ".join(example.split()) in shown


def test_the_short_help_has_eight_flags_and_names_the_way_to_the_others(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["serve", "--help"])
    shown = capsys.readouterr().out
    settings = [setting for setting in settings_of(ServeConfig).values() if setting.name != "target"]
    common = [setting.flag for setting in settings if f"  {setting.flag} " in shown]
    assert len(common) == 8 and {"--draft", "--port", "--api-key"} <= set(common)
    assert f"--help-all            the other {len(settings) - 8} flags too" in shown


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["srve"], "foresay: unknown command srve (see foresay --help)"),
        (["serve", "--prot", "3"], "foresay serve: unrecognized arguments: --prot (see foresay serve --help)"),
        (["serve", "--draft_tokens=3"], "foresay serve: unrecognized arguments: --draft_tokens (see"),
        (["serve", "a", "b"], "foresay serve: unrecognized arguments: b (see"),
        (["serve", "--port", "http"], "foresay serve: --port must be a whole number from 0 to 65535, got 'http'"),
        (["serve", "--draft-tokens", "0"], "from 1 to 63 (--draft none decodes without drafts), got '0'"),
        (["keys", "list", "alice"], "foresay keys: list takes no name"),
        (["keys", "list"], "foresay keys: list needs a file of keys: --api-key-file FILE"),
        (["keys", "new"], "foresay keys: new needs a name: foresay keys new NAME"),
        (["quantize", "bundled", "--out", "/"], "--out /: already exists and is not empty"),
        (["train", "medusa", "--prompts", "no", "--out", "x"], "--prompts no: no such file or directory"),
        (["generate", "--prompt", "x", "--max-tokens", "1024"], "so --max-tokens 1023 is the most"),
        (["serve", "--max-model-len", "9999999"], "--max-model-len 9999999: the model holds at most 1024 tokens"),
        (["generate"], "foresay generate: the following arguments are required: --prompt (see"),
        (["generate", "--prompt", ""], "--prompt must be text that is not empty"),
        (["config", "shwo"], "foresay config: argument ACTION: invalid choice: 'shwo' (choose from"),
        (["train"], "foresay train: the following arguments are required: KIND, --prompts, --out (see"),
        (
            ["train", "eagle3", "--steps", "x"],
            "foresay train: argument --steps: must be a whole number of at least 1, got 'x'",
        ),
    ],
)
def test_wrong_usage_is_one_line_and_status_2(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    status = status_of(arguments)
    captured = capsys.readouterr()
    assert status == 2
    assert message in captured.err
    assert captured.err.count("\n") == 1
    assert captured.out == ""


@pytest.mark.parametrize(
    ("command", "files", "said"),
    [
        (["serve"], {"model.safetensors": b""}, "has no config.json"),
        (["generate", "--prompt", "x"], {"config.json": b"{"}, "not valid JSON"),
        (
            ["chat"],
            {"config.json": b'{"architectures": ["GPT2LMHeadModel"]}'},
            "architecture GPT2LMHeadModel is not supported",
        ),
        (["serve"], {"half.gguf": b"GGUF" + bytes(20)}, "half.gguf"),
    ],
)
def test_what_cannot_be_loaded_is_refused_before_torch_is_imported(
    command: list[str], files: dict[str, bytes], said: str, tmp_path: Path
) -> None:
    for name, content in files.items():
        (tmp_path / name).write_bytes(content)
    refused_early([command[0], str(tmp_path), *command[1:]], said)


@pytest.mark.parametrize("command", [["serve"], ["chat"]])
def test_so_is_a_context_that_the_model_does_not_hold(command: list[str]) -> None:
    refused_early([*command, "--max-model-len", "1025"], "--max-model-len 1025: the model holds at most 1024 tokens")


def refused_early(words: list[str], said: str) -> None:
    """The command is refused with this, and torch not imported."""
    code = f"import sys\nfrom foresay.server.cli.main import main\nprint(main({words!r}), 'torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout in ("1 False\n", "2 False\n")
    assert said in done.stderr and "starting the engine" not in done.stderr


@pytest.mark.parametrize(
    ("url", "said"),
    [
        ("127.0.0.1:9", "--url http://127.0.0.1:9: no Foresay server answers there (Connection refused)"),
        ("a b", "no Foresay server answers there (URL can't contain"),
    ],
)
def test_a_server_that_is_not_there_is_named_in_words(url: str, said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["ps", "--url", url]) == 1
    assert said in capsys.readouterr().err


def test_no_command_shows_the_overview(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 2
    shown = capsys.readouterr().out
    assert all(f"\n  {command.name} " in shown and command.summary in shown for command in COMMANDS.values())
    assert max(map(len, shown.splitlines())) <= 80
    assert "\nas in Ollama:\n  run " in shown


@pytest.mark.parametrize("words", [["help", "models"], ["--help", "models"], ["models", "-h"]])
def test_help_of_a_command_is_found_from_either_side(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert status_of(words) == 0
    assert capsys.readouterr().out.startswith("usage: foresay models [NAME] [flags]\n")


def test_config_shows_by_default(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["config"]) == 0
    assert "\nport = 8000\n" in capsys.readouterr().out


def test_flags_are_not_abbreviated() -> None:
    with pytest.raises(SystemExit):
        build_parser(COMMANDS["serve"]).parse_strictly(["--draft-tok", "3"])


def test_version_names_the_installed_packages(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--version"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("foresay ")
    assert any(line.startswith("torch ") for line in lines)


def test_config_show_names_origins_and_its_output_is_a_config_file(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "foresay.toml"
    file.write_text('[engine]\ndraft = "ngram"\n')
    monkeypatch.setenv("FORESAY_MAX_SEQS", "2")
    assert main(["config", "show", "--origin", "--config", str(file)]) == 0
    shown = capsys.readouterr().out
    assert f'draft = "ngram"  # {file} [engine]' in shown
    assert "max_seqs = 2  # FORESAY_MAX_SEQS" in shown
    assert "port = 8000  # default" in shown
    monkeypatch.delenv("FORESAY_MAX_SEQS")
    file.write_text(shown)
    assert main(["config", "show", "--config", str(file)]) == 0
    assert "max_seqs = 2" in capsys.readouterr().out


def test_generate_ends_in_one_json_line(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["generate", "--prompt", "Once upon a time", "--json", "--seed", "5", "--temperature", "0.7", *QUICK]
    assert main(arguments) == 0
    answer = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert len(answer["token_ids"]) == 12
    assert answer["finish_reason"] == "length"
    assert answer["seed"] == 5
    assert isinstance(answer["exact"], bool)
    assert answer["text"]
    statistics = answer["statistics"]
    assert statistics["completion_tokens"] == 12
    assert statistics["prompt_tokens"] == len(answer["prompt_token_ids"])
    assert statistics["steps"] == len(statistics["per_step_accepted"])
    assert statistics["decode_tokens_per_second"] > 0
    assert {"prefill", "forward", "draw"} <= set(statistics["seconds"])
    assert len(statistics["drafted_per_depth"]) == len(statistics["accepted_per_depth"])


def test_generate_streams_the_text_alone_on_stdout(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["generate", "--prompt", "Once upon a time", "--seed", "5", *QUICK]
    assert main([*arguments, "--json"]) == 0
    answer = json.loads(capsys.readouterr().out.splitlines()[-1])
    text, per_step = answer["text"], 12 / answer["statistics"]["steps"]
    assert main(arguments) == 0
    captured = capsys.readouterr()
    assert captured.out == text + "\n"
    assert "12 tokens (length)" in captured.err
    assert f"{per_step:.2f} tokens per step" in captured.err
    assert "seed 5" in captured.err


def test_chat_remembers_resets_and_ends_with_its_input(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    import io

    monkeypatch.setattr(
        sys, "stdin", io.StringIO("/stats\nHow many is 2 + 2?\n/stats\nAnd 3?\n/stats\n/reset\n/what\n")
    )
    assert main(["chat", "--seed", "1", *QUICK]) == 0
    captured = capsys.readouterr()
    assert len(captured.out) > 0
    lines = [line for line in captured.err.splitlines() if "prompt tokens were in the KV cache" in line]
    assert "nothing to tell yet" in captured.err
    for line in lines:
        assert re.search(r"\| accepted by depth: .*$", line)
    assert lines[0].startswith("0 of ")
    assert not lines[1].startswith("0 of ")
    assert captured.err.splitlines()[-1] == "unknown command /what (/help lists them, /bye leaves)"


def test_bench_shows_its_progress() -> None:
    progress: list[int] = []
    config = BenchConfig(rounds=1, max_tokens=4, temperature=0.0)
    with Engine("bundled", "none", max_model_len=64, dtype="float32") as engine:
        measure({"ngram": engine, "none": engine}, config, [Prompt("Once", "here")], progress.append)
    assert progress == [1, 2, 3, 4], "of two rounds, the first of which is not counted"
