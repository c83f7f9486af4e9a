"""The command as people and scripts use it: what it prints, and its exit status."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from foresay.server.cli.main import main
from tests.checking.pairs import FAULTY, SOUND, Case


def arguments(case: Case, models: Path, space: Path) -> list[str]:
    config = case.config(models, space)
    flags = ["check", config.target, "--draft", config.draft, "--dtype", config.dtype, "--kv-tokens"]
    flags += [str(config.kv_tokens), "--max-model-len", str(config.max_model_len), "--threads", "1"]
    return flags + (["--draft-tree", config.draft_tree] if config.draft_tree else [])


@pytest.mark.parametrize("name", ["draft", "safeailab", "twin"])
def test_a_pair_that_works_is_status_0(name, models, tmp_path, capsys) -> None:
    assert main(arguments(SOUND[name], models, tmp_path)) == 0
    out, err = capsys.readouterr()
    assert out.splitlines()[-1].startswith("This pair can work")
    assert err == ""


@pytest.mark.parametrize("name", ["wide_medusa", "cut_pickle", "cut_config", "cut_draft_tokenizer"])
def test_a_pair_that_does_not_is_status_1_and_no_traceback(name, models, tmp_path, capsys) -> None:
    assert main(arguments(FAULTY[name], models, tmp_path)) == 1
    out, err = capsys.readouterr()
    assert err == ""
    assert out.splitlines()[-1].startswith("This pair cannot work: ")


def test_a_tokenizer_that_only_the_server_needs_is_a_fault(models, tmp_path, capsys) -> None:
    from tests.checking.pairs import cut

    case = Case("ngram", target_broken=cut("tokenizer.json"))
    assert main(arguments(case, models, tmp_path)) == 1
    assert "tokenizer" in capsys.readouterr().out


def test_json_says_the_same(models, tmp_path, capsys) -> None:
    sound = arguments(SOUND["specforge"], models, tmp_path)
    assert main([*sound, "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    main(sound)
    shown = capsys.readouterr().out
    assert report["works"] is True
    assert all(text in shown for name, text in report["rows"].items() if name != "memory")  # what is free changes
    memory = report["memory"]
    assert memory["kv_tokens"] == 640
    assert memory["total"] == sum(memory["weights"].values()) + memory["recordings"] + memory["kv_cache"]


def test_wrong_usage_is_status_2(capsys) -> None:
    assert main(["check", "--kv-tokens", "10", "--max-model-len", "20"]) == 2
    assert "kv_tokens (10) must be at least max_model_len (20)" in capsys.readouterr().err


def test_the_bundled_pair_works(capsys) -> None:
    assert main(["check"]) == 0
    assert "bundled/draft" in capsys.readouterr().out
