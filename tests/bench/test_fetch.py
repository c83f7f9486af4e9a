"""``bench fetch`` with small parts of its own: real pip, an index in a folder, processes that are really killed."""

from __future__ import annotations

import hashlib
import os
import signal
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from bench import BadOption, __main__, fetch
from tests.verifier.faked_hub import Hub
from tests.verifier.faked_hub import cache as cache
from tests.verifier.faked_hub import hub as hub

ROOT = Path(__file__).parents[2]
PARTS = [bytes([number]) * 3_000_000 for number in range(3)]
WHOLE = b"".join(PARTS)
#: Runs the command with another list of models, and dies in the middle of the given copy of a file: those from wheels
#: come first, then those into the joined file.
RUN = """
import os, shutil, signal, sys
from pathlib import Path
from bench import __main__, fetch

fetch.FILE, copies, copied = Path(sys.argv[1]), int(sys.argv[2]), shutil.copyfileobj

def copy(source, target, length):
    global copies
    copies -= 1
    if not copies:
        target.write(source.read(1_500_000))
        target.flush()
        os.kill(os.getpid(), signal.SIGKILL)
    copied(source, target, length)

shutil.copyfileobj = copy
sys.exit(__main__.main(["fetch"]))
"""


@pytest.fixture(autouse=True)
def _alone(cache, tmp_path, monkeypatch):
    """Neither the user's cache nor the indexes of pip's configuration; the hub is out of reach."""
    for name in [name for name in os.environ if name.startswith("PIP_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_INDEX_URL", (tmp_path / "index").as_uri())
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.setattr(fetch, "FILE", tmp_path / "fetch.toml")


@pytest.fixture
def folder(tmp_path) -> Path:
    made: Path = tmp_path / "xdg" / "foresay"
    return made


@pytest.fixture
def index(tmp_path) -> Path:
    """The parts' wheels on an index, and the list of models that has them."""
    made: Path = tmp_path / "index"
    digests = [offered(made, number, data) for number, data in enumerate(PARTS, 1)]
    (tmp_path / "fetch.toml").write_text(
        f'[tiny]\nfile = "tiny.gguf"\nsize = {len(WHOLE)}\nsha256 = "{hashlib.sha256(WHOLE).hexdigest()}"\n'
        'repository = "owner/model"\n[tiny.packages]\nproject = "tiny-part{number}"\nversion = "0.1"\n'
        f'path = "tiny_part{{number}}/part{{index:02}}.bin"\nparts = {[[digest, 3000] for digest in digests]}\n'
    )
    return made


def offered(index: Path, number: int, data: bytes) -> str:
    """Put the wheel of a part on the index; its sha256."""
    name, package = f"tiny_part{number}-0.1-py3-none-any.whl", f"tiny_part{number}"
    folder = index / f"tiny-part{number}"
    folder.mkdir(parents=True)
    with zipfile.ZipFile(folder / name, "w") as made:
        made.writestr(f"{package}/part{number - 1:02}.bin", data)
        made.writestr(f"{package}/__init__.py", "raise SystemExit('imported')")
        made.writestr(f"{package}-0.1.dist-info/METADATA", f"Metadata-Version: 2.1\nName: {package}\nVersion: 0.1\n")
        made.writestr(f"{package}-0.1.dist-info/WHEEL", "Wheel-Version: 1.0\nTag: py3-none-any\n")
    (folder / "index.html").write_text(f'<a href="{name}">{name}</a>')
    return hashlib.sha256((folder / name).read_bytes()).hexdigest()


def run(file: Path, killed_at: int = 0) -> tuple[int, str]:
    """The command in a process of its own: its status, and what it said."""
    words = [sys.executable, "-c", RUN, str(file), str(killed_at)]
    done = subprocess.run(words, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False)
    return done.returncode, done.stdout


def kept(folder: Path) -> list[str]:
    """The parts and files that are there, whole or not."""
    found = [path for name in ("models", "bench") for path in (folder / name).rglob("*") if path.is_file()]
    return sorted(path.name for path in found if not any(one.startswith("fetching-") for one in path.parts))


@pytest.mark.soak
def test_it_goes_on_where_it_was_killed_and_a_damaged_part_is_fetched_again(index, folder, tmp_path, monkeypatch):
    status, said = run(tmp_path / "fetch.toml", killed_at=2)
    assert status == -signal.SIGKILL and "part 2 of 3" in said and kept(folder) == ["part00.bin"]
    status, said = run(tmp_path / "fetch.toml", killed_at=4)
    assert status == -signal.SIGKILL and "part 1 of 3" not in said and "part 2 of 3" in said
    assert kept(folder) == ["part00.bin", "part01.bin", "part02.bin", "tiny.gguf.joining"]
    damaged = folder / "models" / "tiny-part2-0.1" / "part01.bin"
    damaged.write_bytes(b"?" + damaged.read_bytes()[1:])
    status, said = run(tmp_path / "fetch.toml")
    wrong = hashlib.sha256(WHOLE.replace(b"\0\1", b"\0?", 1)).hexdigest()
    right = hashlib.sha256(WHOLE).hexdigest()
    assert status == 1 and "part 2 of 3" not in said, "it had all parts"
    assert f"tiny: tiny.gguf was deleted: its sha256 is {wrong}, expected {right}; the next call" in said
    assert kept(folder) == []
    status, said = run(tmp_path / "fetch.toml")
    assert status == 0 and said.endswith(f"tiny: {folder / 'bench' / 'tiny.gguf'}\n") and "part 3 of 3" in said
    assert kept(folder) == ["tiny.gguf"] and (folder / "bench" / "tiny.gguf").read_bytes() == WHOLE


def test_what_is_there_is_checked_and_not_fetched(index, folder, capsys):
    place = folder / "bench" / "tiny.gguf"
    place.parent.mkdir(parents=True)
    place.write_bytes(WHOLE)
    assert __main__.main(["fetch"]) == 0 and capsys.readouterr().err == ""
    place.write_bytes(WHOLE[:-1])
    with pytest.raises(SystemExit, match=r"^tiny: tiny.gguf was deleted: its sha256 is"):
        __main__.main(["fetch"])
    assert not place.exists()


def test_the_hub_comes_first_where_it_answers(hub, index, folder, monkeypatch, capsys):
    monkeypatch.setattr(Hub, "FILES", {"tiny.gguf": WHOLE})
    assert __main__.main(["fetch"]) == 0
    assert (folder / "bench" / "tiny.gguf").read_bytes() == WHOLE and "package index" not in capsys.readouterr().err
    (folder / "bench" / "tiny.gguf").unlink()
    monkeypatch.setattr(Hub, "FILES", {"tiny.gguf": b"another"})
    with pytest.raises(SystemExit, match=r"tiny.gguf was deleted: its sha256 is"):
        __main__.main(["fetch"])
    assert not list(folder.rglob("*.gguf"))


def test_names_that_are_not_known_or_not_here(index, capsys):
    with pytest.raises(SystemExit):
        __main__.main(["fetch", "huge"])
    assert "NAME huge: expected one of tiny" in capsys.readouterr().err
    with pytest.raises(BadOption, match=r"^tiny: not here; python -m bench fetch tiny fetches it$"):
        fetch.cached("tiny")


def test_what_is_known_of_real_models(monkeypatch):
    monkeypatch.undo()
    known = fetch.models()
    assert {name: len(model.packages.parts) for name, model in known.items()} == {
        "qwen2.5-coder-1.5b": 22,
        "qwen2.5-coder-0.5b": 6,
        "gemma-3-270m": 4,
    }
    for model in known.values():
        digests = [model.sha256, *(wheel.sha256 for wheel in model.packages.wheels())]
        assert all(len(bytes.fromhex(digest)) == 32 for digest in digests) and len(set(digests)) == len(digests)
    assert known["gemma-3-270m"].packages.wheels()[3].path.endswith("part4/data/gemma-3-270m-q4_k_m.gguf.part03")
