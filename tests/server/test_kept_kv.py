"""How much KV is kept on disk, and what of an engine another one's pages depend on."""

from __future__ import annotations

import shutil
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from foresay.kvpaging import PagePool, WindowPages
from foresay.server.engine import handover
from foresay.server.engine.device import LoadContext
from foresay.server.engine.parameters import Device
from foresay.server.settings.config import EngineConfig
from foresay.server.settings.load import load
from foresay.server.settings.resolved import BUNDLED
from foresay.verifier.model.config import ModelConfig

CPU, GPU = Device("cpu", 1 << 34), Device("cuda:0", 1 << 36, capability=(9, 0))


@pytest.mark.parametrize(
    ("settings", "device", "free", "size", "told"),
    [
        ({}, CPU, 1 << 40, 8 << 30, "up to 8.0 GiB, by the free disk,"),
        ({}, CPU, 10 << 30, 1 << 30, "up to 1.0 GiB, by the free disk,"),
        ({}, CPU, 0, 0, "off (the disk is full)"),
        ({}, GPU, 1 << 40, 0, "off (on a GPU only if a size is given)"),
        ({"kv_disk": "off"}, CPU, 1 << 40, 0, "off"),
        ({"prefix_cache": False}, CPU, 1 << 40, 0, "off"),
        ({"kv_disk": "1.5GiB"}, GPU, 0, 3 << 29, "up to 1.5 GiB"),
        ({"kv_disk": "500MB"}, CPU, 0, 500_000_000, "up to 477 MiB"),
    ],
)
def test_how_much(
    settings: dict[str, Any], device: Device, free: int, size: int, told: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=free))
    told += f" in {handover.folder()}, readable by you alone (--kv-disk off: none)" if size else ""
    assert handover.room(load(EngineConfig, settings, {}).config, device) == (size, told)


def test_pages_are_of_all_that_their_bits_follow_from() -> None:
    directory = BUNDLED / "target"
    model, config = ModelConfig.from_directory(directory), EngineConfig()
    ours = LoadContext(config, directory, model, "bfloat16", 512, CPU, PagePool(9), False, lambda *given: None)
    windowed = PagePool(9)
    windowed.attach(WindowPages(5, 32, windowed.num_pages, windowed.page_size))
    others = [
        replace(ours, pool=windowed),
        replace(ours, target=BUNDLED / "draft"),
        replace(ours, model=replace(model, max_positions=model.max_positions + 1)),
        replace(ours, dtype="float32"),
        replace(ours, length=511),
        replace(ours, device=GPU),
        replace(ours, rounds=True),
        replace(ours, config=EngineConfig(kv_dtype="int8")),
        replace(ours, config=EngineConfig(page_size=32)),
    ]
    few = EngineConfig(draft="none", max_seqs=9, kv_tokens=4096)
    alike = replace(ours, config=few, pool=PagePool(10), device=replace(CPU, free=1 << 30))
    assert handover._key(alike) == handover._key(ours)
    assert len({handover._key(each) for each in [ours, *others]}) == 1 + len(others)
