"""The command as people and scripts use it: what it prints, and its exit status."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from foresay.server.cli.main import main
from tests.checking.pairs import DOUBTFUL, FAULTY, SOUND, Case


def arguments(case: Case, models: Path, space: Path) -> list[str]:
    config = case.config(models, space)
    flags = ["check", config.target, "--draft", config.draft, "--dtype", config.dtype, "--kv-tokens"]
    flags += [str(config.kv_tokens), "--max-model-len", str(config.max_model_len), "--threads", "1"]
    return flags + (["--draft-tree", config.draft_tree] if config.draft_tree else [])


@pytest.mark.parametrize("case", [SOUND["draft"], SOUND["safeailab"], DOUBTFUL["twin"]])
def test_a_pair_that_works_is_status_0(case, models, tmp_path, capsys) -> None:
    assert main(arguments(case, models, tmp_path)) == 0
    out, err = capsys.readouterr()
    assert out.splitlines()[-1].startswith("This pair can work")
    assert err == ""


@pytest.mark.parametrize("name", ["several", "wide_medusa", "cut_pickle", "cut_config", "cut_draft_tokenizer"])
def test_a_pair_that_does_not_is_status_1_and_no_traceback(name, models, tmp_path, capsys) -> None:
    assert main(arguments(FAULTY[name], models, tmp_path)) == 1
    out, err = capsys.readouterr()
    assert err == ""
    lines = out.splitlines()
    faults = [line for line in lines if line.startswith("fail ")]
    assert len([line for line in lines if line.strip().startswith("fix: ")]) == len(faults) >= 1
    assert lines[-1] == f"This pair cannot work: {len(faults)} fault{'s' * (len(faults) > 1)}."


def test_a_tokenizer_that_only_the_server_needs_is_a_fault(models, tmp_path, capsys) -> None:
    from tests.checking.pairs import cut

    case = Case("ngram", target_broken=cut("tokenizer.json"))
    assert main(arguments(case, models, tmp_path)) == 1
    assert "fail  tokenizer" in capsys.readouterr().out


def test_json_says_the_same(models, tmp_path, capsys) -> None:
    flags = arguments(FAULTY["several"], models, tmp_path)
    assert main([*flags, "--json"]) == 1
    report = json.loads(capsys.readouterr().out)
    main(flags)
    shown = capsys.readouterr().out
    assert report["works"] is False
    for finding in report["findings"]:
        if finding["subject"] != "memory":  # what is free changes from one moment to the next
            assert finding["text"] in shown
        assert finding["fix"] in shown
    assert shown.splitlines()[-1] == report["verdict"]
    sound = arguments(SOUND["specforge"], models, tmp_path)
    assert main([*sound, "--json"]) == 0
    facts = {finding["subject"]: finding["facts"] for finding in json.loads(capsys.readouterr().out)["findings"]}
    assert facts["layers"]["layers"] == [2, 3, 3]
    assert facts["vocabulary"] == {"target": 300, "draft": 150}
    assert facts["context"] == {"tokens": 256, "target": 512, "draft": 512}
    assert facts["memory"]["kv_tokens"] == 640
    held = facts["memory"]["recordings"] + facts["memory"]["kv_cache"]
    assert facts["memory"]["total"] == sum(facts["memory"]["weights"].values()) + held


def test_wrong_usage_is_status_2(capsys) -> None:
    assert main(["check", "--kv-tokens", "10", "--max-model-len", "20"]) == 2
    assert "kv_tokens (10) must be at least max_model_len (20)" in capsys.readouterr().err


def test_the_bundled_pair_works(capsys) -> None:
    assert main(["check"]) == 0
    assert "all 4,096 tokens agree" in capsys.readouterr().out
