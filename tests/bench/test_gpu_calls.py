"""The three calls of ``bench.gpu``: a rehearsal of each, and everything that would cost a run on a machine lent for a
quarter of an hour."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from bench.gpu import __main__ as gpu
from bench.gpu import commands, plan, report, settings, steps
from bench.gpu.device import Device
from bench.gpu.plan import Step
from bench.gpu.worker import ENDED, FAILED, LEFT_OUT, Lines, Task
from foresay.verifier.ops.kernels import pdl

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "bench" / "gpu" / "quarter_hour.sh"


def command(*arguments: str) -> list[str]:
    return ["bash", str(SCRIPT), *arguments]


def environment(out: Path, *paths: Path) -> dict[str, str]:
    there = os.pathsep.join([*map(str, paths), *filter(None, [os.environ.get("PYTHONPATH")])])
    return os.environ | {"OUT": str(out), "PYTHON": sys.executable, "PYTHONPATH": there, "OMP_NUM_THREADS": "1"}


def lines_of(out: Path) -> list[dict[str, Any]]:
    """Every line, whole."""
    return [json.loads(line) for line in (out / "lines.jsonl").read_text().splitlines()]


# -- the calls ---------------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize(
    ("call", "without"),
    [
        # The same functions over other sizes, which are no others in a rehearsal.
        (
            "A",
            {f"compile {step}" for step in ("8B steps", "1B passes", "1B steps", "ablation 1", "ablation 2")}
            | {"1B passes", "1B steps"},
        ),
        *(pytest.param(call, set(), marks=pytest.mark.soak) for call in "ABC"),
    ],
)
def test_a_call_rehearsed(call: str, without: set[str], tmp_path: Path) -> None:
    """By the script that a GPU will see: every step is run and holds."""
    names = [step.name for step in plan.STEPS[call] if step.name not in without]
    requested = command(call, "--rehearse", *(["--only", *names] if without else []))
    run = subprocess.run(requested, env=environment(tmp_path), capture_output=True, text=True)
    assert run.returncode == 0, run.stdout[-3000:] + run.stderr[-3000:]
    lines = lines_of(tmp_path)
    assert run.stdout.splitlines()[-1] == "done"
    assert [line for line in lines if line["unit"] in (FAILED, LEFT_OUT)] == []
    ended = {line["step"]: line["value"] for line in lines if line["unit"] == ENDED}
    assert ended == dict.fromkeys(names, "held")
    assert {line["card"] for line in lines} == {"CPU, a rehearsal"} and len({line["run"] for line in lines}) == 1
    written = {"A": set(), "B": {"serve.txt", "kernel-tests.txt"}, "C": {"sanitizer.txt"}}[call]
    assert {path.name for path in tmp_path.iterdir() if path.is_file()} == written | {f"{call}.log", "lines.jsonl"}
    made = {line["what"] for line in lines}
    of_call = {
        "A": {"pass", "first token", "steady", "whole step", "switched", "kernels in place", "GPU idle for a step"},
        "B": {"kernel tests", "answered over HTTP", "text by none", "GPU idle for a step"},
        "C": {"kernel tests", "pass", "whole step", "product", "attention"},
    }
    of_call["B"] |= set() if without else {"foresay bench", "text by auto"}
    assert {"missing", "device", "overlap", "bandwidth"} | of_call[call] <= made
    assert all(line["over_floor"] > 0 for line in lines if "over_floor" in line), "floors are numbers"
    if call == "A":
        longest = max(line["prompt"] for line in lines if line["what"] == "same tokens")
        assert longest == settings.tiny().long > 2 * 64, "of several tiles"
    assert all(line["busy_us"] > 0 for line in lines if line["what"] == "GPU idle for a step"), "kernels were seen"


def test_the_plan_fits_and_is_printed_without_importing_much() -> None:
    requested = [sys.executable, "-X", "importtime", "-m", "bench.gpu", "B", "--plan"]
    run = subprocess.run(requested, cwd=ROOT, capture_output=True, text=True, check=True)
    assert "torch" not in {line.split("|")[-1].strip() for line in run.stderr.splitlines()}
    assert sum(plan.CALLS.values()) <= 700
    assert all(plan.total(call) <= most for call, most in plan.CALLS.items())
    total = sum(map(plan.total, plan.CALLS))
    assert (
        run.stdout.splitlines()[-1]
        == f"sum: {', '.join(f'{call} {plan.total(call):.0f} s' for call in 'ABC')}, together {total:.0f} s"
    )
    assert all(f"  {step.name}" in run.stdout for step in plan.STEPS["B"])


# -- what a machine lacks ----------------------------------------------------------------------------------------------


def test_what_is_missing_is_named_before_anything_is_begun(tmp_path: Path) -> None:
    """As on a machine without our two wheels: not done, and the exit code says why."""
    (tmp_path / "sitecustomize.py").write_text(
        "import sys\nfor name in ('msgspec', 'llguidance'):\n    sys.modules[name] = None\n"
    )
    run = subprocess.run(
        command("A", "--rehearse"), env=environment(tmp_path / "out", tmp_path), capture_output=True, text=True
    )
    assert run.returncode == gpu.MISSING, run.stdout + run.stderr
    (line,) = lines_of(tmp_path / "out")
    assert (line["what"], line["value"]) == ("missing", ["msgspec", "llguidance"])
    assert "msgspec, llguidance cannot be imported" in run.stdout and "done" not in run.stdout


# -- steps that go wrong -----------------------------------------------------------------------------------------------


@pytest.fixture
def lines(tmp_path: Path) -> Lines:
    return Lines(tmp_path / "lines.jsonl", "A", "a card")


@pytest.fixture(autouse=True)
def as_before(monkeypatch: pytest.MonkeyPatch) -> None:
    """A call changes how the processes to come launch kernels."""
    monkeypatch.setattr(pdl, "PDL", pdl.PDL)
    monkeypatch.setenv("TRITON_PDL", "1")
    monkeypatch.setattr(gpu, "GRACE", 0.1)


def run(lines: Lines, wanted: Sequence[Step]) -> dict[str, str]:
    """How each step ended."""
    gpu.Call(lines, Device("cpu"), settings.tiny(), 600.0).run(wanted)
    return {line["step"]: line["value"] for line in lines.read() if line["unit"] == ENDED}


def step(name: str, seconds: float = 100.0, **how: bool) -> Step:
    return Step(name, f"tests.bench.faults:{name.split()[0]}", seconds, **how)


def processes(lines: Lines) -> list[int]:
    return [line["value"] for line in lines.read() if line["what"] == "process"]


#: A step that goes wrong between two that do not: how it ends, and whether a new process goes on. Triton's errors are
#: not worded as torch's, and giving memory back raises what launching raised.
FAULTS = {"raises": ("failed", False), "broken_context": ("broken", True), "broken_driver": ("broken", True),
          "hangs": ("stopped", True), "dies": ("died", True)}  # fmt: skip


@pytest.mark.parametrize("fault", FAULTS)
def test_a_step_that_goes_wrong_takes_no_other_along_and_is_not_repeated(fault: str, lines: Lines, capsys) -> None:
    end, replaced = FAULTS[fault]
    ended = run(lines, [step("sound"), step(fault, 0.3 if fault == "hangs" else 100.0), step("sound again")])
    assert ended == {"sound": "held", fault: end, "sound again": "held"}
    assert (len(set(processes(lines))) == 2) == replaced
    assert lines.last("never") is None and sum(line["what"] == "begun" for line in lines.read()) <= 1
    assert lines.last("good") == (1.0 if fault == "raises" else None)
    if fault == "hangs":
        pid = lines.last("begun")
        assert not Path(f"/proc/{pid}").exists() or "zombie" in Path(f"/proc/{pid}/status").read_text()
    assert report.finish(lines) == 1 and "NOT done" in capsys.readouterr().out


def test_what_only_lacked_time_is_no_failure(lines: Lines, monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    """A command that had to be ended."""
    monkeypatch.setattr(commands, "pytest_of", lambda *_, **__: (["sleep", "60"], dict(os.environ)))
    wanted = [Step("kernel tests", "commands:kernel_tests", 4.5), step("sound")]
    assert run(lines, wanted) == {"kernel tests": "unfinished", "sound": "held"}
    assert report.finish(lines) == 4
    assert capsys.readouterr().out.splitlines()[-1] == "NOT done: 0 did not hold, 1 left out"


def test_a_compiler_that_fails_throws_no_other_result_away(lines: Lines) -> None:
    wanted = [
        step("fails_to_compile", background=True), step("tests_pass", background=True),
        step("hangs", 0.3, background=True), step("sound", quiet=True),
    ]  # fmt: skip
    ended = run(lines, wanted)
    assert ended == {"fails_to_compile": "failed", "tests_pass": "held", "hangs": "stopped", "sound": "held"}
    assert lines.last("kernel tests") == 27


def test_what_there_is_no_time_for_is_left_out_by_name(lines: Lines, capsys) -> None:
    gpu.Call(lines, Device("cpu"), settings.tiny(), 1.0).run([step("sound")])
    assert report.finish(lines) == 4
    assert (
        "LEFT OUT" in (output := capsys.readouterr().out)
        and output.splitlines()[-1] == "NOT done: 0 did not hold, 1 left out"
    )


def test_a_step_leaves_out_what_comes_after_its_end(lines: Lines) -> None:
    task = Task("late", lines, until=0.0, device=Device("cpu"), settings=None)
    assert task.take("pass", "s", lambda: 1.0, rows=64) is None
    assert [(line["unit"], line["rows"]) for line in lines.read()] == [(LEFT_OUT, 64)]


# -- lines -------------------------------------------------------------------------------------------------------------


def test_lines_of_another_card_are_not_taken_for_this_ones(tmp_path: Path) -> None:
    """Two calls may share a file and see different cards."""
    other = Lines(tmp_path / "lines.jsonl", "A", "NVIDIA H200")
    other.run = "A of another day"
    other.write("bandwidth", "bandwidth", 4.4e12, "B/s")
    other.write("smoke", "overlap", True)
    mine = Lines(tmp_path / "lines.jsonl", "B", "NVIDIA H100 80GB HBM3")
    mine.write("bandwidth", "bandwidth", 3.0e12, "B/s")
    assert mine.last("bandwidth") == 3.0e12 and mine.last("overlap") is None
    assert {line["card"] for line in mine.read()} == {"NVIDIA H100 80GB HBM3"}
    assert steps.read(Task("", mine, 0.0, None, None)) == 3.0e12


def test_bars_and_what_was_found_before_are_those_of_the_card(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def table(card: str, over_floor: float = 1.12) -> dict[str, list[str]]:
        lines = Lines(tmp_path / f"{card}{over_floor}.jsonl", "A", f"NVIDIA {card} 80GB")
        made_with = {"model": "8B", "rows": 1, "context": 1024}
        lines.write("8B passes", "pass", 4e-3, "s", over_floor=over_floor, **made_with)
        rows = report.shown(lines.read()).splitlines()
        return {row[:44].strip(): row[44:].split() for row in rows}

    row = "8B, plain step at 1k over its floor"
    kept = tmp_path / "bars.json"
    kept.write_text(json.dumps([each | {"before": {}} for each in json.loads(report.TABLE.read_text())]))
    monkeypatch.setattr(report, "TABLE", kept)
    h100, h200, other = (table(card)[row] for card in ("H100", "H200", "L40S"))
    assert h200[0] == h100[0] == other[0] == "1.12" and len(other) == 1
    assert float(h100[1]) < 1.12 < float(h200[1]) and h100[2:] == ["MORE"] and h200[2:] == []
    report.main(["--keep", str(tmp_path / "H1001.12.jsonl"), str(tmp_path / "L40S1.12.jsonl")])
    assert table("H100", 1.05)[row][:2] == ["1.05", "1.12"], "what was found before"
    assert table("H200", 1.05)[row][1:] == h200[1:], "on another card"


# -- kernels and tests -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("held", [True, False])
def test_the_smoke_decides_how_all_that_comes_is_launched(held: bool, lines: Lines) -> None:
    """In processes of ours, and in the commands that are run. Where it said nothing kernels do not overlap."""
    lines.write("preflight", "missing", [])
    gpu.learn(lines)
    assert pdl.PDL is False and os.environ["TRITON_PDL"] == "0"
    lines.write("smoke", "overlap", held)
    gpu.learn(lines)
    assert pdl.PDL is held and os.environ["TRITON_PDL"] == str(int(held))


def test_what_pytest_says_counts_even_where_it_did_not_end() -> None:
    alone = "x/a.py::test_x[1] PASSED   [ 33%]\nx/a.py::test_x[2-b c] FAILED  [ 66%]\nx/a.py::te"
    assert commands.tested(alone) == ({"PASSED": 1, "FAILED": 1}, ["x/a.py::test_x[2-b c]"])
    spread = "[gw3] [  5%] PASSED x/a.py::test_x[1] \n[gw11] [ 10%] ERROR x/a.py::test_y\nscheduling tests"
    assert commands.tested(spread) == ({"PASSED": 1, "ERROR": 1}, ["x/a.py::test_y"])
    ends = "x/a.py::test_x PASSED [100%]\n== short test summary info ==\nFAILED x/a.py::test_z - x\n"
    assert commands.tested(ends) == ({"PASSED": 1}, [])


def test_what_is_compiled_before_is_what_steps_launch(lines: Lines, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its figures are thrown away. Switches are shared out among three processes; each is in one of them."""
    tried: list[object] = []
    monkeypatch.setattr(steps, "SWITCHES", (("kernels.pdl", "PDL", tuple(range(2, 9)), 1),))

    def fails(task: Task, *_: Any) -> None:
        tried.append(task.name)
        raise ValueError("no model here")

    monkeypatch.setattr(steps, "steps_of", fails)
    monkeypatch.setattr(steps, "bench_of", lambda task, name: None)
    chosen = replace(settings.tiny(), compiled=())
    for part in range(3):
        name = f"compile ablation {part}"
        assert name in {each.name for each in plan.STEPS["A"]}
        Task(name, lines, math.inf, Device("cpu"), chosen).run("steps:compile_ahead")
    assert len(tried) == 7, "as served is captured first, which fails here"
    assert sum(line["what"] == "switched" for line in lines.read()) == 7, "what fails is written down"
    assert [line["value"] for line in lines.read() if line["what"] == "compiled"] == [False] * 3
