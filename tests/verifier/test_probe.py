"""The exactness probe: what it says of a model, and what it leaves behind."""

from __future__ import annotations

import random
from itertools import product

import pytest
import torch

from foresay.kvpaging import KVStore, OutOfPages, PagePool
from foresay.server.engine.memory import Demand
from foresay.spec.tree import MAX_NODES
from foresay.verifier.model_runner import ModelRunner
from foresay.verifier.ops.kernels import linear
from foresay.verifier.probe import _CHUNKS as CHUNKS
from foresay.verifier.probe import probe
from tests.same_tokens import mutations
from tests.verifier.families import make
from tests.verifier.reading import Reader, load_decoder, random_tokens


def whole(pool: PagePool) -> bool:
    pool.check([], at_rest=True)
    return pool.available == pool.num_pages - 1


@pytest.mark.parametrize("page_size", [16, 32, 48])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", ["llama2", "smollm", "mistral", "qwen3"])
def test_a_model_is_exact(family, name, dtype, page_size) -> None:
    reader = Reader(family(name).decoder(dtype), page_size)
    found = probe(reader.model, reader.pool)
    assert found.exact, found.reason
    assert "bit-equal" in found.reason
    assert whole(reader.pool)


@pytest.mark.parametrize("page_size", [1, 16, 48, 64, 70, 75, 128, 1024])
def test_it_fits_the_smallest_pool_that_is_ever_planned(family, page_size) -> None:
    demand = Demand({}, 1, MAX_NODES + page_size, page_size, "float32")
    reader = Reader(family("llama2").decoder(torch.float32), page_size, demand.pages(1) - 1)
    assert probe(reader.model, reader.pool).exact
    assert not reader.model._replayed, "what it recorded is of no use to steps"
    assert whole(reader.pool)


def test_products_of_every_tile_of_a_gpu_are_tried() -> None:
    """Their instructions have other numbers of rows, and only a GPU says whether the bits are the same."""
    passes = [sum(CHUNKS) + len(CHUNKS), *(size if size == 1 else 2 * size for size in CHUNKS)]
    assert {linear.tile_of(rows, large=True) for rows in passes} == {*linear.SMALL, linear.LARGE}


def compaction_forgets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(KVStore, "move", lambda self, source, destination: None)


@pytest.mark.parametrize(
    ("damage", "where"),
    [
        (mutations.values_by_slot, "inside a tree"),
        (mutations.weights_by_slot, "inside a tree"),
        (mutations.sums_by_rows, "between chunk sizes"),
        (compaction_forgets, "after compaction"),
    ],
)
def test_it_says_where_rows_differ(family, monkeypatch, damage, where) -> None:
    reader = Reader(family("llama2").decoder(torch.float32))
    damage(monkeypatch)
    found = probe(reader.model, reader.pool)
    assert not found.exact
    assert where in found.reason
    assert whole(reader.pool)


#: Shapes as of published models, their layers cut down: hidden, inner, layers, heads. Of the widest one family is
#: enough.
SHAPES = [(64, 160, 3, 4), (288, 768, 6, 6), (320, 1280, 3, 5), (576, 1536, 1, 9)]
WIDE, WIDEST = (2048, 4096, 1, 16), (4096, 2048, 1, 32)
NAMES, MADE = ("llama2", "mistral", "qwen2", "qwen3"), [torch.float32, torch.bfloat16]
#: Numbers of rows that are held against the probe's word: of small steps, of trees, of chunks and beyond.
NUMBERS = [1, 2, 5, 6, 7, 13, 33, 64, 100, 257]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "shape", "dtype"),
    [
        *zip(NAMES, SHAPES, MADE * 2, strict=True),
        *(pytest.param(*each, marks=pytest.mark.soak) for each in product(NAMES, SHAPES, MADE)),
        ("llama2", WIDE, torch.bfloat16),
        pytest.param("llama2", WIDE, torch.float32, marks=pytest.mark.soak),
        *(pytest.param("llama2", WIDEST, dtype, marks=pytest.mark.soak) for dtype in MADE),
    ],
    ids=str,
)
def test_no_model_is_called_exact_whose_rows_differ(name, shape, dtype, tmp_path) -> None:
    hidden, inner, layers, heads = shape
    sizes = {"hidden_size": hidden, "intermediate_size": inner, "num_hidden_layers": layers}
    make(name, tmp_path, num_attention_heads=heads, num_key_value_heads=heads, head_dim=hidden // heads, **sizes)
    reader = Reader(load_decoder(tmp_path, dtype, probed=False), pages=80)
    assert probe(reader.model, reader.pool).exact
    tokens = random_tokens(random.Random(0), 257, reader.vocab_size)
    at_once = reader.alone(tokens).clone()
    for number in NUMBERS[: 5 if hidden > 1000 else None]:
        table = reader.open(tokens[: 257 - number])
        assert torch.equal(reader.read(table, tokens[257 - number :]), at_once[257 - number :]), number
        table.release()


@pytest.mark.parametrize("passes", [0, 1, 4, 8, 11])
def test_no_page_is_lost_when_a_pass_fails(family, monkeypatch, passes) -> None:
    reader = Reader(family("llama2").decoder(torch.float32))
    run, left = ModelRunner.run, [passes]

    def failing(self, rows, features=None):
        if not left[0]:
            raise RuntimeError("out of memory")
        left[0] -= 1
        return run(self, rows, features)

    monkeypatch.setattr(ModelRunner, "run", failing)
    with pytest.raises(RuntimeError, match="out of memory"):
        probe(reader.model, reader.pool)
    assert whole(reader.pool)


def test_no_page_is_lost_when_the_pool_is_too_small(family) -> None:
    reader = Reader(family("llama2").decoder(torch.float32), pages=4)
    with pytest.raises(OutOfPages):
        probe(reader.model, reader.pool)
    assert whole(reader.pool)
