"""The exactness probe: what it says of a model, and what it leaves behind."""

from __future__ import annotations

import itertools
import random

import pytest
import torch

import verifier.model.linear as linear_module
from kvpaging import KVStore, OutOfPages, PagePool
from server.memory import Demand
from spec.tree import MAX_NODES
from tests.same_tokens import mutations
from tests.verifier.families import make
from tests.verifier.reading import Reader, load_decoder, random_tokens
from verifier.model import decoder
from verifier.model.linear import Linear
from verifier.ops import attention
from verifier.paged_model import PagedModel
from verifier.probe import probe


@pytest.fixture(scope="module")
def wide_directory(tmp_path_factory):
    directory = tmp_path_factory.mktemp("wide")
    make("llama3", directory, hidden_size=256, intermediate_size=1536, num_hidden_layers=2)
    return directory


@pytest.fixture
def wide(wide_directory):
    """A model of inner width 1536: there the library multiplies a single row differently."""
    return load_decoder(wide_directory)


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


def test_products_that_differ_by_row_count_have_only_numbers_that_agree(wide, monkeypatch) -> None:
    """A library whose last bits depend on the number of rows."""
    product = Linear._product
    monkeypatch.setattr(Linear, "_product", lambda self, x: product(self, x) * (1 + 2**-20 * (len(x) % 5)))
    reader = Reader(wide)
    found = probe(reader.model, reader.pool)
    assert found.exact
    assert "products of at most 128 rows" in found.reason
    counts = wide.linears[0].counts
    assert [counts.fitting(rows) for rows in (1, 3, 4, 9, 14, 130)] == [3, 3, 8, 11, 16, 131]
    assert all(product % 5 == 3 for rows in range(1, 300) for product in counts._divided(rows))
    assert whole(reader.pool)


@pytest.mark.parametrize("page_size", [1, 16, 48, 64, 70, 75, 128, 1024])
def test_it_fits_the_smallest_pool_that_is_ever_planned(family, page_size) -> None:
    demand = Demand({}, 1, MAX_NODES + page_size, page_size, "float32")
    reader = Reader(family("llama2").decoder(torch.float32), page_size, demand.pages(1) - 1)
    assert probe(reader.model, reader.pool).exact
    assert whole(reader.pool)


def test_torchs_own_products_are_exact_too_or_said_not_to_be(wide_directory, monkeypatch) -> None:
    """Where weights cannot be packed; the probe's word is then held against other row counts than its own."""
    monkeypatch.setattr(linear_module, "packable", lambda dtype: False)
    reader = Reader(load_decoder(wide_directory, probed=False))
    found = probe(reader.model, reader.pool)
    assert whole(reader.pool)
    assert found.exact or "differ" in found.reason
    if found.exact:
        tokens = random_tokens(random.Random(0), 90, reader.vocab_size)
        at_once = reader.alone(tokens)
        for size in (1, 4, 7, 29):
            sizes = itertools.repeat(size)
            assert torch.equal(reader.read_in_pieces(reader.open(), tokens, sizes.__next__), at_once)


def rows_matter(monkeypatch: pytest.MonkeyPatch) -> None:
    def attend(query, *arguments):
        return attention.attend(query, *arguments) * (1 + 2**-20 * len(query))

    monkeypatch.setattr(decoder, "attend", attend)


def compaction_forgets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(KVStore, "move", lambda self, source, destination: None)


@pytest.mark.parametrize(
    ("damage", "where"),
    [
        (mutations.trees_by_page, "inside a tree"),
        (rows_matter, "between chunk sizes"),
        (compaction_forgets, "after compaction"),
    ],
)
def test_it_says_where_rows_differ_when_blocks_do_not_help(family, monkeypatch, damage, where) -> None:
    reader = Reader(family("llama2").decoder(torch.float32))
    if damage is mutations.trees_by_page and mutations.single_pages():
        pytest.skip("on this processor every product is over one page anyway")
    before = [linear.counts for linear in reader.model.decoder.linears]
    damage(monkeypatch)
    found = probe(reader.model, reader.pool)
    assert not found.exact
    assert where in found.reason
    assert [linear.counts for linear in reader.model.decoder.linears] == before
    assert whole(reader.pool)


@pytest.mark.parametrize("passes", [0, 1, 4, 8, 11])
def test_no_page_is_lost_when_a_pass_fails(family, monkeypatch, passes) -> None:
    reader = Reader(family("llama2").decoder(torch.float32))
    run, left = PagedModel.run, [passes]

    def failing(self, rows, features=None):
        if not left[0]:
            raise RuntimeError("out of memory")
        left[0] -= 1
        return run(self, rows, features)

    monkeypatch.setattr(PagedModel, "run", failing)
    with pytest.raises(RuntimeError, match="out of memory"):
        probe(reader.model, reader.pool)
    assert whole(reader.pool)


def test_no_page_is_lost_when_the_pool_is_too_small(family) -> None:
    reader = Reader(family("llama2").decoder(torch.float32), pages=4)
    with pytest.raises(OutOfPages):
        probe(reader.model, reader.pool)
    assert whole(reader.pool)
