"""Compiled kernels are kept on disk, and only run from there if no other user can have put them there."""

from __future__ import annotations

import errno
import fcntl
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import torch

from foresay.server.engine.costs import digest
from foresay.server.settings.config import EngineConfig
from foresay.verifier.ops.kernels.cpu import kernel_cache
from foresay.verifier.ops.kernels.cpu.asm import Kernel
from foresay.verifier.ops.kernels.cpu.jit import Processor
from foresay.verifier.ops.kernels.cpu.launch import Compiled, Launcher
from foresay.verifier.ops.kernels.cpu.walk import walker
from tests.verifier.gguf_files import read_only


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    walker()  # what every kernel needs is there already
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "foresay" / "kernels"


@pytest.fixture
def compilations(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The texts that were compiled."""
    compiled = Processor.compiled
    texts: list[str] = []

    def compile(processor: Processor, text: str) -> bytes:
        texts.append(text)
        return compiled(processor, text)

    monkeypatch.setattr(Processor, "compiled", compile)
    return texts


def doubled(factor: int = 2) -> int:
    """A kernel, compiled or found, and run."""
    k = Kernel("double")
    with k.when(k.thread.equals(0)):
        k.store(k.counted(0) * factor, k.pointer(1))
    numbers = torch.tensor([21, 0])
    Launcher(k.name, k.code())(numbers[:1], numbers[1:])
    return int(numbers[1])


def test_a_kernel_is_compiled_once(folder, compilations) -> None:
    assert doubled() == doubled() == 42
    assert len(compilations) == 1 and len(list(folder.iterdir())) == 1
    assert doubled(3) == 63, "another text is another kernel"
    assert len(compilations) == 2
    assert folder.stat().st_mode & 0o777 == 0o700


WRITTEN: list[int] = []


def times(factor: int) -> Kernel:
    """Writes a kernel, and notes that it did."""
    WRITTEN.append(factor)
    k = Kernel("times")
    with k.when(k.thread.equals(0)):
        k.store(k.counted(0) * factor, k.pointer(1))
    return k


def multiplied(factor: int) -> int:
    """By that kernel, as a process does that begins now."""
    numbers = torch.tensor([21, 0])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kernel_cache, "unpatched", True)
        Compiled(times)(factor)(numbers[:1], numbers[1:])
    return int(numbers[1])


def test_of_the_same_sources_a_kernel_is_not_even_written_again(folder, compilations, monkeypatch) -> None:
    WRITTEN.clear()
    assert multiplied(2) == multiplied(2) == 42 and multiplied(3) == 63
    assert WRITTEN == [2, 3] and len(compilations) == 2
    monkeypatch.setattr(kernel_cache, "sources", lambda: "edited since")
    assert multiplied(2) == 42
    assert WRITTEN == [2, 3, 2] and len(compilations) == 2, (
        "of another state it is; of the same text, it is not compiled"
    )


def test_a_kernel_that_is_known_but_gone_is_made_anew(folder, compilations) -> None:
    WRITTEN.clear()
    multiplied(2)
    for file in folder.iterdir():
        if b"ELF" in file.read_bytes():
            file.unlink()
    assert multiplied(2) == 42 and WRITTEN == [2, 2] and len(compilations) == 2


def test_another_processor_finds_none_of_it(folder, compilations, monkeypatch) -> None:
    doubled()
    here = Processor.here()
    lesser = Processor(here.name, here.features + ",-avx2")
    monkeypatch.setattr(Processor, "here", classmethod(lambda cls: lesser))
    assert doubled() == 42 and len(compilations) == 2


@pytest.mark.parametrize(
    "damage",
    [lambda code: code[:-100], lambda code: code[:200] + bytes([code[200] ^ 1]) + code[201:], lambda code: b""],
    ids=["cut short", "changed", "emptied"],
)
def test_a_damaged_file_is_made_anew(folder, compilations, damage: Callable[[bytes], bytes]) -> None:
    doubled()
    (file,) = folder.iterdir()
    file.write_bytes(damage(file.read_bytes()))
    assert doubled() == 42 and len(compilations) == 2
    assert doubled() == 42 and len(compilations) == 2


@pytest.mark.parametrize("mode", [0o770, 0o707])
def test_where_others_can_write_nothing_is_found_or_kept(folder, compilations, mode) -> None:
    doubled()
    folder.chmod(mode)
    assert doubled() == 42 and doubled(3) == 63
    assert len(compilations) == 3 and len(list(folder.iterdir())) == 1


def test_without_a_folder_kernels_are_compiled_each_time(tmp_path, compilations, monkeypatch) -> None:
    file = tmp_path / "file"
    file.write_text("no directory")
    monkeypatch.setenv("XDG_CACHE_HOME", str(file))
    assert doubled() == doubled() == 42
    assert len(compilations) == 2


def test_a_read_only_folder_is_used(folder, compilations, monkeypatch) -> None:
    assert doubled() == 42
    monkeypatch.setattr(os, "utime", read_only)
    assert doubled() == 42 and len(compilations) == 1


def test_without_xdg_it_is_below_home(tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    for nothing in ("", "not/absolute"):
        monkeypatch.setenv("XDG_CACHE_HOME", nothing)
        assert kernel_cache.directory() == tmp_path / "home" / ".cache" / "foresay" / "kernels"


def test_what_was_not_used_for_longest_makes_room(folder, monkeypatch) -> None:
    """Names that begin so make room, one in 256."""
    monkeypatch.setattr(kernel_cache, "_MOST", 3 * 4096)
    for number in range(3):
        kernel_cache.save(f"00{number}", b"code")
        os.utime(folder / f"00{number}", (number, number))
    assert kernel_cache.load("000") == b"code", "used just now"
    kernel_cache.save("003", b"code")
    assert sorted(path.name for path in folder.iterdir()) == ["000", "002", "003"]


@pytest.mark.parametrize("number", [errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP])
def test_what_cannot_be_locked_is_kept_under_a_name_of_its_own(folder, monkeypatch, number: int) -> None:
    monkeypatch.setattr(fcntl, "flock", Mock(side_effect=OSError(number, os.strerror(number))))
    monkeypatch.setattr(os, "replace", replace := Mock(side_effect=os.replace))
    for _ in range(2):
        kernel_cache.save("key", b"code")
    assert kernel_cache.load("key") == b"code" and [path.name for path in folder.iterdir()] == ["key"]
    parts = {call.args[0].name for call in replace.call_args_list}
    assert len(parts) == 2 and all(part.startswith(f"key.{os.getpid()}.") for part in parts)


def test_sources_are_the_same_in_a_container_that_starts_again(monkeypatch) -> None:
    found, changed = Path.stat, dict[str, int]()
    names = ("st_mode", "st_size", "st_mtime_ns", "st_ctime_ns", "st_ino", "st_dev")
    monkeypatch.setattr(Path, "stat", lambda path, **how: SimpleNamespace(
        **{name: getattr(found(path, **how), name) for name in names} | changed
    ))  # fmt: skip
    before = [kernel_cache.sources.__wrapped__(), digest(EngineConfig(), [Path(__file__).parent])]
    changed.update(st_dev=1, st_ctime_ns=1)
    assert [kernel_cache.sources.__wrapped__(), digest(EngineConfig(), [Path(__file__).parent])] == before
    changed.update(st_mtime_ns=1)
    assert kernel_cache.sources.__wrapped__() != before[0]


@pytest.mark.parametrize("most", [100, 1000])
def test_a_kernel_that_is_kept_looks_at_no_other(folder, monkeypatch, most) -> None:
    """But seldom, and only where there are too many."""
    monkeypatch.setattr(kernel_cache, "_MOST", most * 4096)
    folder.mkdir(mode=0o700, parents=True)
    for number in range(200):
        (folder / kernel_cache.key_of("old", str(number))).write_bytes(b"code")
    looks, found = [0], os.stat

    def counted(*path: Any, **how: Any) -> os.stat_result:
        looks[0] += 1
        return found(*path, **how)

    monkeypatch.setattr(os, "stat", counted)
    names = [*(kernel_cache.key_of("new", str(number)) for number in range(300)), "000"]
    for name in names:
        kernel_cache.save(name, b"code")
    monkeypatch.setattr(os, "stat", found)
    assert looks[0] <= 4 * len(names)
    assert kernel_cache.load(names[-1]) == b"code"
    assert len(list(folder.iterdir())) == min(most, 501)


@pytest.mark.parametrize(
    "begin",
    [
        "from foresay.server.engine_process import process; process._import()",
        "from foresay.server.cli.__main__ import main; sys.argv[1:] = ['list']; main()",
    ],
    ids=["engine process", "command"],
)
def test_our_processes_note_the_sources_before_they_import_them(begin: str, folder: Path) -> None:
    """Noted later, after an upgrade in place, they would be those of code that they do not run."""
    code = f"""
import sys
from foresay.verifier.ops.kernels.cpu import kernel_cache
known = []
kernel_cache.sources = lambda: known.append({{name for name in sys.modules if name.startswith("foresay.verifier")}})
{begin}
ours = {{"foresay.verifier.ops.kernels.cpu.launch", "foresay.verifier.ops.kernels.cpu.product"}}
print(known[0] & ours, kernel_cache.unpatched)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "set() True"
