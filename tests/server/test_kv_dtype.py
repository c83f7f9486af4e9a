"""``--kv-dtype``: what the memory plan, the banner and ``/metrics`` say of it, and how much more fits."""

from __future__ import annotations

import pytest

from foresay.kvpaging import KVStore
from foresay.server.cli.main import main
from foresay.server.cli.serving import rows
from foresay.server.engine.build import build_engine, plan
from foresay.server.engine.device import Device
from foresay.server.engine.parameters import token_bytes
from foresay.server.settings.config import EngineConfig, KVDtype
from tests.server.test_gpu_memory import LLAMA_1B, LLAMA_8B, RTX_4090, llama

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
