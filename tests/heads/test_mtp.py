"""The layer that Qwen3.5's checkpoints have next to the target's, against transformers' parts; how it is found."""

from __future__ import annotations

import random
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from foresay.kvpaging import KVStore
from foresay.server.catalog.hub import resolve
from foresay.server.engine.drafters.registry import find
from foresay.server.settings.config import EngineConfig
from foresay.server.settings.resolved import CannotRun, choose_draft
from foresay.spec.protocols import FeatureRequest, Rows
from foresay.verifier.heads.paged import EagleHead
from foresay.verifier.heads.reader import read_mtp
from foresay.verifier.model.checkpoint import header_names
from foresay.verifier.model.config import ModelConfig, kv_shapes
from foresay.verifier.model.forward import experts
from tests.heads.mtp import Mtp
from tests.verifier.families import make
from tests.verifier.gguf_files import all_of, cache_of_its_own, convert
from tests.verifier.reading import Reader, load_decoder, random_tokens


@pytest.fixture(scope="module", params=["qwen3_5", "qwen3_5_moe"])
def family(request) -> str:
    found: str = request.param
    return found


@pytest.fixture(scope="module")
def directory(family, tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp(family)
    make(family, made)
    Mtp(family=family).put_beside(made)
    return made


def test_its_states_are_those_of_transformers_parts_and_are_fed_back(directory, family) -> None:
    """Of the state behind the target's last norm, the embedding first; and once more of its own states."""
    target, tokens = load_decoder(directory), random_tokens(random.Random(1), 40, 300)
    reader, head = Reader(target), EagleHead(*read_mtp(directory, target), 512)
    table = reader.open()
    passed = reader.model.run([reader.rows(table, tokens)], FeatureRequest(final=True))
    hidden, embedded, oracle = passed.features["final"].clone(), target.embedding[tokens[1:]], Mtp(family=family).eval()
    for seen in (hidden[:-1], oracle.states(embedded, hidden[:-1])):
        store = KVStore(reader.pool, kv_shapes(head.layer), torch.float32)
        store.clear(table.slots(0, 1))
        logits, states = head.run([Rows(table, torch.tensor(tokens[1:]), 1)], seen, store)
        wanted = oracle.states(embedded, seen)
        assert (states - wanted).abs().max() < 1e-4
        assert torch.equal(logits.argmax(-1), (wanted @ target.embedding.T).argmax(-1))


@pytest.mark.parametrize("wanted", ["all", "last"])
def test_experts_know_which_rows_are_padding(tmp_path, monkeypatch, wanted) -> None:
    """By the slots of those rows that reach them."""
    make("qwen3_5_moe", tmp_path)
    Mtp(family="qwen3_5_moe").put_beside(tmp_path)
    reader, given = Reader(target := load_decoder(tmp_path)), list[Tensor]()
    head, table = EagleHead(*read_mtp(tmp_path, target), 512), reader.open()
    reader.rows(table, tokens := random_tokens(random.Random(1), 40, 300))

    def routed(*own: Any) -> Tensor:
        given.append(own[4])
        return experts(*own)

    monkeypatch.setattr("foresay.verifier.model.forward.experts", routed)
    store = KVStore(reader.pool, kv_shapes(head.layer), torch.float32)
    head.run([Rows(table, torch.tensor(tokens), 0, logits=wanted)], target.embedding[tokens], store)
    assert given[0].tolist() == table.slots(0, 40).tolist()[0 if wanted == "all" else -1 :]


@pytest.mark.parametrize("heads", [2, 4])
def test_in_a_gguf_file(tmp_path, monkeypatch, family, heads) -> None:
    """As llama.cpp keeps it, a layer behind the others: the same numbers, bit by bit where no heads change places."""
    cache_of_its_own(tmp_path / "cache", monkeypatch)
    make(family, tmp_path / "plain", linear_num_value_heads=heads)
    Mtp(family=family).put_beside(tmp_path / "plain")
    convert(tmp_path / "plain", tmp_path / "x.gguf", all_of("F32"))
    made, tokens = resolve(tmp_path / "x.gguf"), random_tokens(random.Random(1), 40, 300)
    assert header_names(made) and choose_draft(EngineConfig(target=str(tmp_path / "x.gguf"))).value == "mtp,suffix"
    found = []
    for folder in (tmp_path / "plain", made):
        reader, target = Reader(load_decoder(folder)), load_decoder(folder)
        table, head = reader.open(), EagleHead(*read_mtp(folder, target), 512)
        hidden = reader.model.run([reader.rows(table, tokens)], FeatureRequest(final=True)).features["final"].clone()
        store = KVStore(reader.pool, kv_shapes(head.layer), torch.float32)
        store.clear(table.slots(0, 1))
        found.append((hidden, head.run([Rows(table, torch.tensor(tokens[1:]), 1)], hidden[:-1], store)[0]))
    for mine, its in zip(*found, strict=True):
        assert torch.equal(mine, its) if heads == 2 else (mine - its).abs().max() < 1e-4


def test_it_is_drafted_with_where_it_is(directory, tmp_path) -> None:
    """By ``auto`` too; a checkpoint without one, and another family's, are refused by name."""
    model = ModelConfig.from_directory(directory)
    assert choose_draft(EngineConfig(target=str(directory))).value == "mtp,suffix"
    assert find("mtp").checked(directory, model).directory == directory  # type: ignore[attr-defined]
    shutil.copytree(directory, tmp_path / "without")
    make("qwen3_5", tmp_path / "without")
    assert choose_draft(EngineConfig(target=str(tmp_path / "without"))).value == "suffix"
    make("qwen3", tmp_path / "qwen3")
    for name in ("without", "qwen3"):
        with pytest.raises(CannotRun, match=f"{name} has no layer that predicts"):
            find("mtp").checked(tmp_path / name, ModelConfig.from_directory(tmp_path / name))
    with pytest.raises(CannotRun, match="cannot draft for another"):
        find(f"{directory} > self").checked(tmp_path / "qwen3", ModelConfig.from_directory(tmp_path / "qwen3"))
