"""A run that is killed, stopped, or out of space goes on with the same command, and ends with the same weights."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from foresay.drafters.training.settings import Settings
from tests.server.forked import Ended, exit_status, foresay
from tests.training.forking import attempt

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parents[2]
SECONDS = 300.0
GO_ON = "once that is fixed, run the same command to continue"


def contents(directory: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in directory.iterdir()}


@pytest.mark.parametrize(
    "kind", ["medusa", *(pytest.param(kind, marks=pytest.mark.soak) for kind in ("eagle3", "draft_model"))]
)
def test_killed_again_and_again_it_ends_with_the_same_weights(target, prompts, tmp_path, kind) -> None:
    """While texts are written, between steps, and at every file of the finished model."""
    settings = Settings(kind, str(target), str(prompts), 40, 24, 5, 4, 5e-3, 2, 0, layers=1, width=32, together=16)
    assert exit_status(attempt, settings, tmp_path / "whole", 0) == 0
    kills = 0
    while (status := exit_status(attempt, settings, tmp_path / "killed", kills + 1)) == -signal.SIGKILL:
        kills += 1
    assert status == 0
    assert kills >= 4
    whole = contents(tmp_path / "whole")
    assert "config.json" in whole
    assert contents(tmp_path / "killed") == whole
    assert sorted(path.name for path in tmp_path.iterdir()) == ["killed", "whole"]


def command(target: Path, prompts: Path, out: Path) -> list[str]:
    """It trains a small draft model."""
    words = f"train draft_model --target {target} --prompts {prompts} --out {out} --layers 2 --width 64"
    return f"{words} --samples 40 --length 24 --steps 4 --batch 4".split()


@pytest.fixture
def words(target, prompts, tmp_path) -> list[str]:
    return command(target, prompts, tmp_path / "draft")


@pytest.fixture(scope="module")
def undisturbed(target, prompts, tmp_path_factory) -> bytes:
    """The weights that the command ends with."""
    out = tmp_path_factory.mktemp("undisturbed") / "draft"
    assert foresay(command(target, prompts, out)).status == 0
    weights: bytes = (out / "model.safetensors").read_bytes()
    return weights


def error_line(ended: Ended) -> str:
    """The line on stderr of a command that failed, after its plan."""
    assert ended.status == 1, ended.err
    assert ended.out == ""
    (line,) = ended.err.splitlines()
    return line


@pytest.mark.parametrize(
    ("largest", "file"),
    [
        (500, "text-0000.pt"),
        pytest.param(100_000, "states-0000.pt", marks=pytest.mark.soak),  # one writer, as of the last
        (200_000, "state.pt"),
    ],
)
def test_no_room_for_the_work(words, undisturbed, tmp_path, largest, file) -> None:
    """Nothing is left half-written, and with room again the run goes on to the same weights."""
    full_path = tmp_path / "draft.work" / file
    line = error_line(foresay(words, largest))
    assert line == f"foresay train: {full_path}: cannot be written (File too large); {GO_ON}"
    assert not (tmp_path / "draft").exists()
    assert not list(tmp_path.rglob("*.partial"))
    assert (tmp_path / "draft.work").exists() == (file != "text-0000.pt"), "the texts are kept, if there are any"
    assert foresay(words).status == 0
    assert not (tmp_path / "draft.work").exists()
    assert (tmp_path / "draft" / "model.safetensors").read_bytes() == undisturbed


@pytest.fixture
def full(tmp_path) -> Iterator[Path]:
    """A disk of 64 KiB where the model is to lie."""
    full_path = tmp_path / "draft"
    full_path.mkdir()
    words = ["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", str(full_path)]
    if subprocess.run(words, capture_output=True, check=False).returncode:
        pytest.skip("only root can mount a small disk")
    yield full_path
    subprocess.run(["umount", str(full_path)], check=True)


def test_no_room_for_the_model(words, full) -> None:
    line = error_line(foresay(words))
    where = f"{full}/model.safetensors: cannot be written (No space left on device)"
    assert line == f"foresay train: {where}; {GO_ON}"
    assert list(full.iterdir()) == []
    subprocess.run(["mount", "-o", "remount,size=8m", str(full)], check=True)
    assert foresay(words).status == 0
    assert {"config.json", "model.safetensors", "tokenizer.json"} <= set(contents(full))


def test_an_interrupt_says_how_to_go_on(words, tmp_path) -> None:
    longer = [*words, "--steps", "100000"]
    going = subprocess.Popen(
        [sys.executable, "-m", "foresay.server.cli", *longer],
        cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True, text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # a job in the background ignores it
    )  # fmt: skip
    end = time.monotonic() + SECONDS
    while not (tmp_path / "draft.work" / "text-0000.pt").exists():
        assert going.poll() is None and time.monotonic() < end
        time.sleep(0.05)
    other = foresay(longer)
    going.send_signal(signal.SIGINT)
    out, err = going.communicate(timeout=SECONDS)
    assert going.returncode == 130
    assert out == ""
    kept = f"{tmp_path}/draft.work keeps the work so far; run the same command to continue"
    assert err.splitlines()[-1] == f"foresay train: stopped; {kept}"
    assert other.status == 2, "two processes in one folder would spoil each other's work"
    assert "another process is training it" in other.err
    assert (tmp_path / "draft.work" / "text-0000.pt").exists()
