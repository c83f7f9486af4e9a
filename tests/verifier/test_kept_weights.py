"""Packed weights that were kept: the very bits, or nothing; never those of another model, and never an error."""

from __future__ import annotations

import fcntl
import mmap
import os
import shutil
import threading
from collections.abc import Iterator
from dataclasses import fields, replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from torch import Tensor

from foresay.kvpaging import file_cache
from foresay.server.catalog.hub import resolve
from foresay.server.engine.build import build_engine
from foresay.server.engine.parameters import quantized
from foresay.server.engine_process.local import Engine
from foresay.server.settings.config import EngineConfig
from foresay.server.settings.resolved import BUNDLED
from foresay.spec.request import Request
from foresay.spec.sampling import SamplingParams
from foresay.verifier.model import weight_cache
from foresay.verifier.model.config import ModelConfig
from foresay.verifier.model.decoder import Packed
from foresay.verifier.model.linear import Linear
from foresay.verifier.model.weights import load, table_of
from foresay.verifier.ops.kernels.cpu.linear import PackedFloats
from tests.combinations import alternating
from tests.verifier.families import make
from tests.verifier.gguf_files import all_of, cache_of_its_own, convert, q4_k_m, read_only

SMALL: dict[str, Any] = {"draft": "none", "max_model_len": 64, "kv_tokens": 512, "threads": 1}


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    cache_of_its_own(tmp_path / "cache", monkeypatch)
    monkeypatch.setattr(weight_cache, "LEAST_BYTES", 0)
    return tmp_path / "cache" / "foresay" / "weights"


def packed_of(directory: Path, dtype: torch.dtype = torch.float32, how: str | None = None, rounds: bool = False) -> Any:
    config = quantized(ModelConfig.from_directory(directory), how, "--quantize")
    return Packed.pack(config, load(directory, config, dtype), rounds)


def parts(found: object) -> Iterator[object]:
    """Everything in it, tensors as their bytes, types, shapes and strides."""
    if isinstance(found, Tensor):
        yield found.dtype, found.shape, found.stride(), bytes(found.flatten().view(torch.uint8).numpy())
    elif isinstance(found, dict):
        yield from parts(list(found.items()))
    elif isinstance(found, list | tuple):
        for each in found:
            yield from parts(each)
    elif isinstance(found, Linear):
        yield from (found.dtype, found.device, found.in_features, found.out_features)
        yield from parts(found.packed)
    elif hasattr(found, "__dataclass_fields__"):
        yield type(found)
        for field in fields(found):  # type: ignore[arg-type]
            yield from parts(getattr(found, field.name))
    else:
        yield found


def assert_kept(packed: Packed) -> None:
    weight_cache.save("this", packed)
    found = weight_cache.load("this")
    assert found is not None and list(parts(found)) == list(parts(replace(packed, table=None)))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("how", [None, "int8", "int4", "fp8"])
def test_every_bit_of_floats_and_of_what_is_made_of_them(dtype, how) -> None:
    assert_kept(packed_of(BUNDLED / "draft", dtype, how, rounds=how == "int4"))


@pytest.mark.parametrize(
    ("family", "kind"), alternating(["qwen2", "qwen3", "smollm"], [q4_k_m, *map(all_of, ("Q4_1", "Q8_0", "MXFP4"))])
)
def test_every_bit_of_a_gguf_file(tmp_path, family, kind) -> None:
    wide: dict[str, Any] = {"hidden_size": 256, "intermediate_size": 512, "head_dim": 64, "num_attention_heads": 4}
    make(family, tmp_path / "plain", **wide, num_key_value_heads=2)
    convert(tmp_path / "plain", tmp_path / "x.gguf", kind)
    assert_kept(packed_of(resolve(tmp_path / "x.gguf"), rounds=True))


@pytest.mark.parametrize(
    "family",
    [
        "gemma3", "phi3", "granite_swa", "cohere2", "muse_glimmer", "qwen3_5", "lfm2", "granite_hybrid",
        "qwen3_moe", "glm4_moe", "gpt_oss", "qwen3_5_moe", "granite_hybrid_moe", "nemotron_h_moe", "falcon_h1",
        "gemma4_embedded", "gemma4_moe",
    ],
)  # fmt: skip
def test_every_bit_of_families_whose_layers_differ(tmp_path, family) -> None:
    make(family, tmp_path)
    assert_kept(packed_of(tmp_path, torch.bfloat16))


def started(phases: list[str] | None = None, **settings: Any) -> Any:
    """An engine that is ready, and whatever it keeps is kept."""
    engine = build_engine(
        EngineConfig(**{**SMALL, **settings}),
        lambda phase, share=None: None if phases is None else phases.append(phase),
    )
    settle()
    return engine


def settle() -> None:
    for thread in threading.enumerate():
        if thread.name == "packed weights":
            thread.join()


def reads(**settings: Any) -> bool:
    """Whether a start reads the model's files."""
    phases: list[str] = []
    started(phases, **settings)
    return "packing the target's weights" in phases


def test_the_second_start_reads_nothing_and_answers_the_same(folder, tmp_path) -> None:
    texts = []
    for _ in range(2):
        with Engine(str(BUNDLED / "target"), **SMALL) as engine:
            texts.append(engine.generate("Once upon a time", max_tokens=12, seed=3).text)
        settle()
    assert texts[0] == texts[1] and len(list(folder.iterdir())) == 1
    assert not reads(target=str(BUNDLED / "target"))


def text_of(engine: Any) -> list[int]:
    params = SamplingParams(temperature=0.8, seed=3, max_tokens=12, ignore_eos=True)
    engine.add(Request(id="one", prompt=list(range(7, 27)), params=params))
    deltas = [delta for _ in iter(lambda: engine.has_work, False) for delta in engine.step()]
    return [token for delta in deltas for token in delta.tokens]


def test_a_table_stays_in_the_models_own_files(folder, tmp_path) -> None:
    """It is mapped, also where the rest was kept; and what is kept does not grow with it."""
    directory, sizes = tmp_path / "model", list[int]()
    for tokens in (4000, 320):
        make("gemma4_embedded", directory, vocab_size_per_layer_input=tokens)
        packed = packed_of(directory, torch.bfloat16)
        table = table_of(directory, ModelConfig.from_directory(directory), torch.bfloat16)
        assert packed.table is not None and table is not None and torch.equal(table, packed.table)
        assert table.dtype is torch.float32 and len(table) == tokens, "as it is stored"
        weight_cache.save(str(tokens), packed)
        sizes.append((folder / str(tokens)).stat().st_size)
    assert sizes[0] == sizes[1]
    settings: dict[str, Any] = {"target": str(directory), "dtype": "bfloat16"}
    first = started(**settings)
    assert "a table of embeddings per layer, 160 KiB, is read in its file" in first.info.memory
    assert not reads(**settings)
    assert text_of(first) == text_of(started(**settings))


def test_other_settings_and_other_files_are_packed_anew(tmp_path) -> None:
    copy = shutil.copytree(BUNDLED / "draft", tmp_path / "copy")
    target = str(copy)
    assert reads(target=target) and not reads(target=target) and not reads(target=target, max_model_len=32)
    assert reads(target=target, quantize="int4") and reads(target=target, quantize="int4", activations="model")
    assert reads(target=target, weight_cache=False)
    weights = next(copy.glob("*.safetensors"))
    before = weights.stat()
    content = bytearray(weights.read_bytes())
    content[-1] ^= 1
    weights.write_bytes(content)
    os.utime(weights, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert reads(target=target), "of the same size and time, in the same place"


def test_the_tokens_that_a_draft_model_shares_are_part_of_the_name() -> None:
    model = ModelConfig.from_directory(BUNDLED / "draft")
    names = {weight_cache.key_of(BUNDLED / "draft", model, "bfloat16", False, ids) for ids in (None, b"1", b"2")}
    names.add(weight_cache.key_of(BUNDLED / "draft", replace(model, max_positions=1), "bfloat16", False, None))
    assert len(names) == 4


# -- what is amiss -----------------------------------------------------------------------------------------------------


@pytest.fixture
def file(folder: Path) -> Path:
    """A whole one."""
    weight_cache.save("this", packed_of(BUNDLED / "draft"))
    return folder / "this"


def flipped(at: int) -> Any:
    def flip(path: Path) -> None:
        content = bytearray(path.read_bytes())
        content[at] ^= 16
        path.write_bytes(content)

    return flip


AMISS = {
    "empty": lambda path: path.write_bytes(b""),
    "cut": lambda path: path.write_bytes(path.read_bytes()[:-4096]),
    "cut in the header": lambda path: path.write_bytes(path.read_bytes()[:100]),
    "longer": lambda path: path.write_bytes(path.read_bytes() + bytes(4096)),
    "another kind of file": lambda path: path.write_bytes(b"\x7fELF" + path.read_bytes()[4:]),
    "a bit of the digest": flipped(20),
    "a bit of the header": flipped(200),
    "a bit of the tensors": flipped(-70_000),
    "a bit at the end": flipped(-4_000),
    "two parts changed round": lambda path: path.write_bytes(
        path.read_bytes()[: -(2 << 16)] + path.read_bytes()[-(1 << 16) :] + path.read_bytes()[-(2 << 16) : -(1 << 16)]
    ),
    "writable": lambda path: path.chmod(0o622),
    "a link": lambda path: path.symlink_to(path.rename(path.with_name("that"))),
    "a folder": lambda path: (path.unlink(), path.mkdir()),
}


@pytest.mark.parametrize("amiss", AMISS)
def test_what_is_amiss_is_not_used_and_logged_once(amiss, file, caplog) -> None:
    assert weight_cache.load("this") is not None
    AMISS[amiss](file)
    assert weight_cache.load("this") is None
    (record,) = caplog.records
    assert str(file) in record.message and "the model's own files are read" in record.message
    if amiss != "a folder":
        assert not os.path.lexists(file)
        weight_cache.save("this", packed_of(BUNDLED / "draft"))
        assert weight_cache.load("this") is not None


def test_a_folder_that_others_may_write_to_is_not_used(file, caplog) -> None:
    file.parent.chmod(0o777)
    assert weight_cache.load("this") is None and "other users may write there" in caplog.text
    weight_cache.save("that", packed_of(BUNDLED / "draft"))
    assert [each.name for each in file.parent.iterdir()] == ["this"]


def test_a_read_only_folder_is_used(file, monkeypatch) -> None:
    monkeypatch.setattr(os, "utime", read_only)
    assert weight_cache.load("this") is not None and file.exists()


def test_what_is_written_to_mapped_weights_changes_no_file(file) -> None:
    before, found = file.read_bytes(), weight_cache.load("this")
    assert found is not None
    found.embed.zero_()
    assert file.read_bytes() == before


@pytest.mark.skipif(
    not hasattr(mmap, "MADV_HUGEPAGE") or not Path("/sys/kernel/mm/transparent_hugepage").exists(),
    reason="no huge pages",
)
def test_weights_are_advised_for_huge_pages_packed_or_mapped(folder) -> None:
    packed = PackedFloats.pack(torch.ones(2048, 2048), None, "")
    assert "hg" in flags_at(packed.data.data_ptr() + (4 << 20))
    weight_cache.save("this", packed_of(BUNDLED / "draft"))
    found = weight_cache.load("this")
    assert found is not None and "hg" in flags_at(found.embed.data_ptr())


def flags_at(address: int) -> list[str]:
    """What the system knows of the memory there."""
    inside = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        name, *rest = line.split()
        if "-" in name:
            begin, end = (int(each, 16) for each in name.split("-"))
            inside = begin <= address < end
        elif inside and name == "VmFlags:":
            return rest
    raise AssertionError("nothing is there")


def test_those_that_were_not_used_for_longest_go(file, monkeypatch) -> None:
    packed, size = packed_of(BUNDLED / "draft"), file.stat().st_size
    weight_cache.save("that", packed)
    for name, when in (("this", 1), ("that", 2)):
        os.utime(file.with_name(name), (when, when))
    assert weight_cache.load("this") is not None
    monkeypatch.setattr(weight_cache, "MOST_BYTES", 2 * size)
    weight_cache.save("third", packed)
    assert sorted(each.name for each in file.parent.iterdir()) == ["third", "this"]
    monkeypatch.setattr(weight_cache, "MOST_BYTES", size - 1)
    weight_cache.save("fourth", packed)
    assert not file.with_name("fourth").exists(), "larger than all of them may be"


def test_where_nothing_can_be_kept_nothing_is(file, monkeypatch, caplog) -> None:
    packed = packed_of(BUNDLED / "draft")
    with monkeypatch.context() as patch:
        patch.setattr(file_cache, "free_bytes", lambda folder: 1000)
        weight_cache.save("that", packed)
    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", Mock(side_effect=OSError(28, "No space left on device")))
        weight_cache.save("that", packed)
    monkeypatch.setattr(weight_cache, "LEAST_BYTES", weight_cache.MOST_BYTES)
    weight_cache.save("that", packed)
    monkeypatch.setenv("XDG_CACHE_HOME", "/proc/nowhere")
    weight_cache.save("that", packed)
    assert weight_cache.load("that") is None
    assert [each.name for each in file.parent.iterdir()] == ["this"] and not caplog.records


def test_what_another_process_is_writing_is_left_to_it(file) -> None:
    packed, part = packed_of(BUNDLED / "draft"), file.with_name("that.part")
    with part.open("wb") as other:
        fcntl.flock(other.fileno(), fcntl.LOCK_EX)
        weight_cache.save("that", packed)
        assert part.read_bytes() == b"" and not file.with_name("that").exists()
    weight_cache.save("that", packed)
    assert weight_cache.load("that") is not None and not part.exists(), "one that died is written over"


def test_a_process_that_ends_leaves_off(file, monkeypatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(weight_cache, "_ending", threading.Event())
        weight_cache.cancel_saves()
        weight_cache.save_later([("that", packed_of(BUNDLED / "draft"))])
        settle()
        assert [each.name for each in file.parent.iterdir()] == ["this"]
    weight_cache.save_later([("that", packed_of(BUNDLED / "draft"))])
    settle()
    assert weight_cache.load("that") is not None
