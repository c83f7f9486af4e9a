"""A run that is killed, stopped, or out of space goes on with the same command, and ends with the same weights."""

from __future__ import annotations

import os
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parents[2]
GO_ON = "once that is put right, the same command goes on"
ALONE = {**os.environ, "OMP_NUM_THREADS": "1"}


def contents(directory: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in directory.iterdir()}


@pytest.mark.parametrize("kind", ["draft", "eagle3", "medusa"])
def test_killed_again_and_again_it_ends_with_the_same_weights(target, prompts, tmp_path, kind) -> None:
    """While texts are written, between steps, and at every file of the finished model."""
    words = [sys.executable, "-m", "tests.training.dying", kind, str(target), str(prompts), str(tmp_path)]
    ended = subprocess.run(words, cwd=ROOT, env=ALONE, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stderr
    assert int(ended.stdout) >= 4
    whole = contents(tmp_path / "whole")
    assert "config.json" in whole
    assert contents(tmp_path / "killed") == whole
    assert sorted(path.name for path in tmp_path.iterdir()) == ["killed", "whole"]


@pytest.fixture
def words(target, prompts, tmp_path) -> list[str]:
    """A command that trains a small draft model into ``tmp_path/draft``."""
    command = f"train draft --target {target} --prompts {prompts} --out {tmp_path}/draft --layers 2 --width 64"
    command += " --samples 40 --length 24 --steps 4 --batch 4"
    return [sys.executable, "-m", "server.cli", *command.split()]


def trained(words: list[str], largest_file: int = resource.RLIM_INFINITY) -> subprocess.CompletedProcess[str]:
    """The command's end, in a process that can make no file larger than so many bytes."""
    limited = ["prlimit", f"--fsize={largest_file}"] if largest_file >= 0 else []
    return subprocess.run([*limited, *words], cwd=ROOT, env=ALONE, capture_output=True, text=True, check=False)


def said(ended: subprocess.CompletedProcess[str]) -> str:
    """The one line on stderr of a command that failed."""
    assert ended.returncode == 1, ended.stderr
    assert ended.stdout == ""
    (line,) = ended.stderr.splitlines()
    return line


@pytest.mark.parametrize(("largest", "file"), [(500, "text-0000.pt"), (100_000, "state.pt")])
def test_no_room_for_the_work(words, tmp_path, largest, file) -> None:
    """Nothing is left half-written, and with room again the run goes on to the same weights."""
    place = tmp_path / "draft.work" / file
    line = said(trained(words, largest))
    assert line == f"foresay train: {place}: cannot be written (File too large); {GO_ON}"
    assert not (tmp_path / "draft").exists()
    assert not list(tmp_path.rglob("*.partial"))
    assert (tmp_path / "draft.work").exists() == (file == "state.pt"), "the texts are kept, if there are any"
    assert trained(words).returncode == 0
    assert not (tmp_path / "draft.work").exists()
    weights = (tmp_path / "draft" / "model.safetensors").read_bytes()
    other = [word.replace(str(tmp_path / "draft"), str(tmp_path / "other")) for word in words]
    assert trained(other).returncode == 0
    assert (tmp_path / "other" / "model.safetensors").read_bytes() == weights


@pytest.fixture
def full(tmp_path) -> Iterator[Path]:
    """A disk of 64 KiB where the model is to lie."""
    place = tmp_path / "draft"
    place.mkdir()
    words = ["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", str(place)]
    if subprocess.run(words, capture_output=True, check=False).returncode:
        pytest.skip("only root can mount a small disk")
    yield place
    subprocess.run(["umount", str(place)], check=True)


def test_no_room_for_the_model(words, full) -> None:
    line = said(trained(words))
    where = f"{full}/model.safetensors: cannot be written (No space left on device)"
    assert line == f"foresay train: {where}; {GO_ON}"
    assert list(full.iterdir()) == []
    subprocess.run(["mount", "-o", "remount,size=8m", str(full)], check=True)
    assert trained(words).returncode == 0
    assert {"config.json", "model.safetensors", "tokenizer.json"} <= set(contents(full))


def test_an_interrupt_says_how_to_go_on(words, tmp_path) -> None:
    longer = [*words, "--steps", "100000"]
    going = subprocess.Popen(
        longer, cwd=ROOT, env=ALONE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True, text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # a job in the background ignores it
    )  # fmt: skip
    deadline = time.monotonic() + 120
    while not (tmp_path / "draft.work" / "text-0000.pt").exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    other = trained(longer)
    going.send_signal(signal.SIGINT)
    out, err = going.communicate(timeout=60)
    assert going.returncode == 130
    assert out == ""
    kept = f"{tmp_path}/draft.work keeps what is done, and the same command goes on with it"
    assert err == f"foresay train: stopped; {kept}\n"
    assert other.returncode == 2, "two processes in one folder would spoil each other's work"
    assert "another process is training it" in other.stderr
    assert (tmp_path / "draft.work" / "text-0000.pt").exists()
