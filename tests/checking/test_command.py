"""The command as people and scripts use it: what it prints, and its exit status."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from foresay.server.cli.check.pair import check
from foresay.server.cli.check.probe import show
from foresay.server.cli.main import main
from foresay.server.engine.checks import CheckReport, Finding, Measured
from foresay.spec.accept import ByDepth
from tests.checking.pairs import DOUBTFUL, FAULTY, SOUND, Case
from tests.server.terminal import Terminal


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


def test_on_a_terminal_it_fits_and_reads_without_colour(models, tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setenv("NO_COLOR", "1")
    report = check(FAULTY["several"].config(models, tmp_path))
    out = Terminal()
    show(report, out)
    assert "\x1b[1;3" not in out.getvalue()  # bold, but no colour
    lines = re.sub(r"\x1b\[[0-9;]*m", "", out.getvalue()).splitlines()
    assert max(map(len, lines[1:])) <= 80
    marks = [line.split()[0] for line in lines[1:-1] if line[:4].strip()]
    assert marks.count("fail") == sum(finding.status == "fail" for finding in report.findings)
    assert lines[-1].strip().endswith("faults.")


def test_a_probe_fits_a_terminal_however_deep_drafts_were_accepted(monkeypatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setenv("NO_COLOR", "1")
    depths = ByDepth.of([90 - 9 * depth for depth in range(10)], 100)
    one = Measured(
        temperature=0.0,
        runs=3,
        tokens=90,
        speedup=2.5,
        spread=(1.2, 14.86),
        drafted_speed=347.5,
        plain_speed=143.2,
        tokens_per_step=3.78,
        propose_share=0.1,
        accepted_by_depth=depths,
        same_tokens=True,
    )
    finding = Finding(subject="target", status="ok", text="fits")
    report = CheckReport(target="x", draft="y", works=True, verdict="works", findings=[finding], probe=[one])
    show(report, out := Terminal())
    lines = re.sub(r"\x1b\[[0-9;]*m", "", out.getvalue()).splitlines()
    assert [line.rstrip() for line in lines[-4:]] == [
        "T  speed-up               tokens/s  alone  tokens per step",
        "0  2.50x (1.20 to 14.86)  347.5     143.2  3.78",
        "accepted at depth 1, 2, ...: 90% 81% 72% 63% 54% 45% 36% 27% 18% at T 0",
        "works",
    ]


def test_wrong_usage_is_status_2(capsys) -> None:
    assert main(["check", "--kv-tokens", "10", "--max-model-len", "20"]) == 2
    assert "kv_tokens (10) must be at least max_model_len (20)" in capsys.readouterr().err


def test_the_bundled_pair_works(capsys) -> None:
    assert main(["check"]) == 0
    assert "all 4,096 tokens agree" in capsys.readouterr().out
