"""Layers with a window keep the end of a text alone: rows have the same bits, what is out of sight is not read."""

from __future__ import annotations

import random

import pytest
import torch

from tests.verifier.reading import Reader, paths, random_tokens, random_tree

#: A window of 24 in all layers, in the last, in all but one of three.
WINDOWED = ("mistral", "qwen2_window", "gemma3")


def few(decoder, page_size: int, rows: int) -> Reader:
    """A reader with as many window pages as a text needs that goes on by so many rows at once."""
    return Reader(decoder, page_size, pages=400 // page_size, windows=(24 + rows) // page_size + 2)


@pytest.mark.parametrize("page_size", [4, 16])
@pytest.mark.parametrize("name", WINDOWED)
def test_texts_go_past_the_window_with_the_same_bits(family, name, page_size) -> None:
    """In chunks, and then through trees whose accepted paths move down."""
    rng, decoder = random.Random(page_size), family(name).decoder(torch.float32)
    reader, whole = few(decoder, page_size, 40), Reader(decoder, page_size, pages=400 // page_size)
    text, table = random_tokens(rng, 130, reader.vocab_size), reader.open()
    logits = [reader.read_in_pieces(table, text, lambda: rng.choice((1, 5, 17, 40)))]
    for nodes in (7, 40, 12, 33):
        tree = random_tree(rng, rng.randrange(reader.vocab_size), nodes, reader.vocab_size)
        path = rng.choice(paths(tree))
        logits.append(reader.run(reader.tree_rows(table, tree))[0][path])
        reader.keep(table, path)
        text += [tree.tokens[node] for node in path]
    after = random_tokens(rng, 30, reader.vocab_size)
    logits.append(reader.read_in_pieces(table, after, lambda: 1))
    assert torch.equal(torch.cat(logits), whole.alone(text + after))


@pytest.mark.parametrize("name", WINDOWED)
def test_texts_in_one_pass(family, name) -> None:
    """Trees and chunks mixed, of texts far past the window."""
    decoder, found = family(name).decoder(torch.float32), []
    for each in (Reader(decoder, 8, windows=30), Reader(decoder, 8)):
        draw = random.Random(5)
        tables = [each.open() for _ in range(3)]
        for table, length in zip(tables, (100, 64, 31), strict=True):
            each.read_in_pieces(table, random_tokens(draw, length, each.vocab_size), lambda: 16)
        trees = [random_tree(draw, 1, nodes, each.vocab_size) for nodes in (9, 30)]
        rows = [each.tree_rows(table, tree) for table, tree in zip(tables, trees, strict=False)]
        found.append(each.run(*rows, each.rows(tables[2], random_tokens(draw, 20, each.vocab_size))))
    for ours, theirs in zip(*found, strict=True):
        assert torch.equal(ours, theirs)


def test_only_layers_with_a_window_have_fewer_pages(family) -> None:
    reader = Reader(family("qwen2_window").decoder(torch.float32), 8, pages=64, windows=9)
    full, windowed = reader.model.store.arrays
    assert full.keys.shape[:2] == (1, 65 * 8)
    assert windowed.keys.shape[:2] == (2, 10 * 8)
    assert [reader.model.store.pages(layer) is reader.model.store.windows for layer in range(3)] == [False, True, True]
