"""The same tokens where an engine before has left KV on disk: of windows, recurrent states and draft models too."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from foresay.kvpaging import DiskPages, KVStore
from foresay.spec.budget import CostModel
from foresay.spec.engine import EngineCore
from tests.same_tokens.runs import assert_same, drafting, returning, whole
from tests.same_tokens.witness import run


def kept(engine: EngineCore, folder: Path) -> EngineCore:
    """Keeps its pages there, and always rather reads than computes."""
    assert engine.prefix is not None
    target, *others = [store for store in engine.pool.stores if isinstance(store, KVStore)]
    features, drafts = ([store for store in others if store.drafts is needed] for needed in (True, False))
    stores = {"target": [target], "features": features, "drafts": drafts}
    groups = {key: group for key, group in stores.items() if group}
    engine.prefix.disk = DiskPages(folder, groups, engine.pool, 1 << 30)
    reading = engine.scheduler._reading
    assert reading is not None
    reading._cost = CostModel([1, 2], [100.0, 200.0])
    return engine


@pytest.mark.parametrize(
    ("family", "drafter", "kv", "windows"),
    [
        ("qwen3", "chain4", None, 0),
        ("qwen3", "4,4,2,2,1", torch.int8, 0),
        ("gemma3", "3,2,1", None, 30),
        ("gemma4", "3,2,1", torch.int8, 30),
        ("qwen2_window", "3,2,1", torch.int8, 30),
        ("qwen3_5", "chain4", None, 0),
        ("lfm2", "chain4", None, 0),
    ],
)
def test_what_another_engine_left(pair, tmp_path, family, drafter, kv, windows) -> None:
    models = replace(pair(family), kv=kv)
    first, later, texts = returning(models)
    options = {"page_size": 8, "prefix": True, "windows": windows}
    before, after = (
        kept(drafting(models, drafter, whole([*first, *later], texts), **options), tmp_path) for _ in range(2)
    )
    run(before, first)
    while before.keep_one():
        pass
    found = run(after, later)
    assert_same({job.id: texts[job.id] for job in later}, found)
    assert sum(found[job.id].cached_tokens > 0 for job in later) == len(later)
    assert {path.suffix for path in (tmp_path / "drafts").iterdir()} == {".rows"}, "states of drafts have other pages"
