"""The memory plan of windows and of quantized keys and values: how much more text fits."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from foresay.kvpaging import KVStore, WindowPages
from foresay.server.cli.main import main
from foresay.server.cli.serving import rows
from foresay.server.engine.build import build_engine, plan
from foresay.server.engine.parameters import Device, token_bytes
from foresay.server.settings.config import EngineConfig, KVDtype
from foresay.spec.engine import EngineCore
from foresay.spec.request import Request
from foresay.spec.sampling import SamplingParams
from foresay.verifier.heads.config import with_layers
from foresay.verifier.model.config import ModelConfig
from tests.server.test_gpu_memory import LLAMA_1B, LLAMA_8B, PER_TOKEN, RTX_4090, llama
from tests.verifier.families import make

CPU = Device("cpu", 32 << 30, None, "a machine", None)
LENGTH = 16384


def gemma_like(every: int = 6, window: int | None = 1024) -> ModelConfig:
    """An 8B model of which every sixth layer sees all."""
    model = replace(llama(LLAMA_8B, num_hidden_layers=30), max_positions=1 << 20)
    seen = [replace(model.attention, window=window if n % every != every - 1 else None) for n in range(30)]
    return with_layers(model, [replace(model.first, mixer=one) for one in seen])


@pytest.mark.parametrize("device", [CPU, RTX_4090], ids=str)
def test_five_times_the_text_fits_where_five_of_six_layers_see_a_window(device) -> None:
    """And it would be six times, but for the windows of two texts, which take what they take."""
    model, config = gemma_like(), EngineConfig(max_seqs=1, quantize="int8", kv_tokens=LENGTH)
    plain = plan(config, LENGTH, "bfloat16", gemma_like(window=None), [], device)
    config = EngineConfig(max_seqs=1, quantize="int8", kv_tokens=5 * LENGTH)
    found = plan(config, 5 * LENGTH, "bfloat16", model, [], device)
    assert found.kv_bytes < plain.kv_bytes
    assert found.token_bytes == plain.token_bytes / 6 == PER_TOKEN * 30 / 32 / 6


def test_on_a_gpu_all_that_is_left_is_texts() -> None:
    config = EngineConfig(max_seqs=1)
    model = gemma_like()
    plain = plan(config, 8192, "bfloat16", gemma_like(window=None), [], RTX_4090)
    found = plan(config, 8192, "bfloat16", model, [], RTX_4090)
    windows = (found.window_pages * 16) * PER_TOKEN * 25 // 32
    assert found.kv_bytes == found.pages * 16 * found.token_bytes + windows
    assert found.tokens / plain.tokens == pytest.approx(6 * (plain.kv_bytes - windows) / plain.kv_bytes, rel=0.01)
    assert abs(found.total - plain.total) < 16 * PER_TOKEN


@pytest.mark.parametrize("window", [1 << 18, None])
def test_without_a_use_there_are_no_window_pages(window) -> None:
    """A window that is longer than the texts hides nothing."""
    model = gemma_like(31, window)
    found = plan(EngineConfig(max_seqs=1, kv_tokens=8192), 8192, "bfloat16", model, [], CPU)
    assert (found.window_pages, found.token_bytes) == (0, PER_TOKEN * 30 // 32)
    assert found.kv_bytes == found.pages * 16 * found.token_bytes


@pytest.mark.parametrize("device", [CPU, RTX_4090], ids=str)
def test_where_all_layers_see_a_window_longer_texts_take_no_more(device) -> None:
    model = gemma_like(31)
    shorter, longer = (
        plan(EngineConfig(max_seqs=1, quantize="int8", kv_tokens=length), length, "bfloat16", model, [], device)
        for length in (LENGTH, 1 << 20)
    )
    assert shorter.kv_bytes == longer.kv_bytes == shorter.window_pages * 16 * PER_TOKEN * 30 // 32
    assert plan(EngineConfig(max_seqs=1, quantize="int8"), 1 << 20, "bfloat16", model, [], device).tokens >= 1 << 20


@pytest.mark.parametrize("family", ["gemma3", "mistral"])
def test_an_engine_holds_what_was_planned_and_writes_the_same(tmp_path, family) -> None:
    """Far past the window of 24: with pages for windows, and with a KV cache too small for that to pay."""
    make(family, tmp_path, max_position_embeddings=2048)
    settings: dict[str, Any] = {
        "target": str(tmp_path),
        "draft": "ngram",
        "draft_tokens": 3,
        "dtype": "float32",
        "max_seqs": 1,
    }
    written = []
    for tokens in (8192, 700):
        config = EngineConfig(**settings, max_model_len=700, kv_tokens=tokens, threads=1)
        engine = build_engine(config)
        windows = engine.pool.find_store(WindowPages)
        assert (windows is not None) == (tokens == 8192)
        found = plan(config, 700, "float32", ModelConfig.from_directory(tmp_path), [], Device.cpu())
        stores = [store for store in engine.pool.stores if isinstance(store, KVStore)]
        assert sum(part.nbytes for store in stores for part in store.tensors) == found.kv_bytes
        assert found.window_pages == (windows.num_pages if windows is not None else 0)
        written.append([text(engine, list(range(7, 200)) * 2), text(engine, list(range(7, 200)) * 2)])
    assert written[0] == written[1]


def text(engine: EngineCore, prompt: list[int]) -> list[int]:
    """What follows a prompt."""
    engine.add(Request(id="one", prompt=prompt, params=SamplingParams(max_tokens=200, seed=3, ignore_eos=True)))
    tokens: list[int] = []
    while engine.has_work:
        for delta in engine.step():
            tokens += delta.tokens
    engine.check()
    return tokens


EIGHT_BITS: list[KVDtype] = ["int8", "fp8"]


@pytest.mark.parametrize("kv_dtype", EIGHT_BITS)
@pytest.mark.parametrize(
    ("shape", "memory", "more"), [(LLAMA_8B, 24, 256 / 132), (LLAMA_1B, 8, 128 / 68)], ids=["128 wide", "64 wide"]
)
def test_about_twice_as_many_tokens_fit(shape, memory, more, kv_dtype) -> None:
    """Of a head of D numbers 2 D bytes become D and a scale of 4: in a GPU's memory, and in a share of a machine's."""
    model, length = llama(shape), 16384
    for device in (RTX_4090, Device("cpu", memory << 30, None, "a machine", None)):
        plain, found = (
            plan(EngineConfig(kv_dtype=each, max_seqs=8), length, "bfloat16", model, [], device)
            for each in ("auto", kv_dtype)
        )
        assert found.kv_bytes <= plain.kv_bytes * 1.01 and found.tokens / plain.tokens == pytest.approx(more, rel=0.03)
        assert found.kv_bytes == found.pages * 16 * token_bytes(model, "bfloat16", kv_dtype)


def test_of_fp32_four_times_as_many() -> None:
    model = llama(LLAMA_8B)
    assert token_bytes(model, "float32", "auto") / token_bytes(model, "float32", "int8") == pytest.approx(512 / 132)


@pytest.mark.parametrize("drafts", ["auto", *EIGHT_BITS])
@pytest.mark.parametrize(("draft", "kv_dtype"), [("draft_model", "int8"), ("eagle3", "auto"), ("medusa", "fp8")])
def test_plan_and_banner_say_what_the_stores_hold(draft, kv_dtype, drafts) -> None:
    engine = build_engine(
        EngineConfig(draft=draft, kv_dtype=kv_dtype, draft_kv_dtype=drafts, kv_tokens=640, max_model_len=160)
    )
    info, slots = engine.info, engine.pool.num_pages * engine.pool.page_size
    stores = [store for store in engine.pool.stores if isinstance(store, KVStore)]
    assert sum(part.nbytes for store in stores for part in store.tensors) == slots * info.kv_token_bytes
    named = info.dtype if kv_dtype == "auto" else kv_dtype
    assert f"of {info.kv_token_bytes:,} bytes ({named})" in dict(rows(info))["KV cache"]


def test_other_types_are_refused(capsys) -> None:
    assert main(["generate", "--kv-dtype", "int4", "--prompt", "hello"]) == 2
    assert "--kv-dtype" in capsys.readouterr().err
