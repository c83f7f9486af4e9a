"""What ops on trees, texts and their rows compute, for every executor: references, kernels of a CPU, those of a GPU."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor

from foresay.spec.price import worth
from foresay.spec.sample import BROKEN
from foresay.spec.tree import MAX_NODES, DraftTree
from foresay.verifier.forward_batch import signed
from foresay.verifier.ops.eager import references
from foresay.verifier.ops.records import NO_NODE, Above, AcceptedPaths, Kept, Pieces
from foresay.verifier.ops.rows import join_columns, put_rows
from foresay.verifier.ops.sample import keep_children, worth_another
from foresay.verifier.ops.trees import (
    ChosenTree,
    accept_paths,
    advance,
    choose_tree,
    lay_out,
    move_paths,
    report,
    rows_of_paths,
    text_ends,
)
from tests.spec.trees import random_tree, walk

VOCAB = 4
GARBAGE = 3
MIXED = torch.randperm(64, generator=torch.Generator().manual_seed(3)).tolist()
NAMES = ("lengths", "paths", "emitted", "sources")
#: An op as an executor has it.
At = Callable[[Any], Callable[..., Any]]


def padded(trees: list[DraftTree], width: int) -> dict[str, Tensor]:
    """The trees' columns, [B, width]; what is behind a tree is garbage that would match."""
    columns = {name: torch.full((len(trees), width), GARBAGE) for name in ("tokens", "parents", "ancestors")}
    for row, tree in enumerate(trees):
        written = {"tokens": tree.tokens, "parents": tree.parents, "ancestors": signed(tree.ancestors)}
        for name, column in columns.items():
            column[row, : len(tree)] = torch.tensor(written[name])
    return columns | {"nodes": torch.tensor([len(tree) for tree in trees])}


def samples(rng: random.Random, trees: list[DraftTree], width: int) -> Tensor:
    """Draws that step into a child at two nodes of three, so that paths are long; some are broken."""
    sampled = torch.full((len(trees), width), GARBAGE)
    for row, tree in enumerate(trees):
        tokens, parents = tree.tokens, tree.parents
        for node in range(len(tree)):
            children = [tokens[n] for n in range(len(tree)) if parents[n] == node]
            lucky = children and rng.random() < 2 / 3
            sampled[row, node] = rng.choice(children) if lucky else rng.choice([BROKEN, *range(VOCAB)])
    return sampled


def some_trees(seed: int, width: int) -> tuple[list[DraftTree], dict[str, Tensor]]:
    """Six, one of them as wide as may be, and what an op is given of them; one sequence is padding."""
    rng = random.Random(seed)
    trees = [random_tree(rng, rng.randint(1, width), VOCAB) for _ in range(5)] + [random_tree(rng, width, VOCAB)]
    inputs = padded(trees, width) | {"sampled": samples(rng, trees, width)}
    slots = torch.randperm(1 << 20, generator=torch.Generator().manual_seed(width))[: 6 * width]
    inputs["nodes"][seed % 5] = 0
    return trees, inputs | {"slots": slots.view(6, -1)}


def assert_same(found: AcceptedPaths, inputs: dict[str, Tensor]) -> None:
    """As the reference has it."""
    with references():
        wanted = accept_paths(**inputs)
    for name in NAMES:
        assert torch.equal(getattr(found, name).cpu(), getattr(wanted, name)), name


def integers(*rows: Any) -> Tensor:
    return torch.tensor(rows, dtype=torch.int32)


def candidates(seed: int, count: int, nodes: int) -> tuple[tuple[Tensor, ...], list[Tensor]]:
    """Of three trees, level by level, with ties and gaps; and as many levels, prices and nodes as each has."""
    rng = random.Random(seed)
    parents, depths = sorted(rng.randrange(number) for number in range(1, count + 1)), [0]
    for parent in parents:
        depths.append(depths[parent] + 1)
    scores = torch.zeros(3, count + 1)
    for tree, (number, parent) in itertools.product(range(3), enumerate(parents, start=1)):
        chance = rng.choice((0.0, -0.5, -2.0 * rng.random(), -3.0 * rng.random(), -math.inf))
        scores[tree, number] = scores[tree, parent] + chance
    steps = torch.rand(3, nodes - 1) * rng.choice((0.0, 0.2)) if seed % 3 else torch.full((3, nodes - 1), -1.0)
    levels, limits = ([rng.randint(2, most) for _ in range(3)] for most in (max(2, *depths), nodes))
    of_each = torch.tensor(depths[1:]), torch.tensor([rng.choice((-1, number)) for number in range(count)])
    columns = torch.randint(-1, 90, (3, count)), torch.tensor([parents] * 3), scores[:, 1:].contiguous()
    prices = torch.cat((torch.zeros(3, 1), steps.cumsum(dim=1)), dim=1)
    return (torch.arange(3) + 7, *columns, *of_each), [torch.tensor(levels), prices, torch.tensor(limits)]


KNOTS = torch.cat((torch.linspace(-20, -0.1, 27), torch.full((5,), math.inf)))


def a_level(seed: int, sequences: int, front: int, looked: int, alike: bool) -> tuple[Tensor, Tensor, Above]:
    """Children with ties and gaps below nodes of which some are dead."""
    of = torch.Generator().manual_seed(seed)
    rows = 1 if alike else front
    children = torch.randint(0, 1000, (sequences, rows, looked), generator=of)
    chances = (-4 * torch.rand(sequences, rows, looked, generator=of)).round(decimals=1)
    chances = chances.sort(dim=2, descending=True).values
    chances[torch.rand(chances.shape, generator=of) < 0.1] = -math.inf
    scores = (-3 * torch.rand(sequences, front, generator=of)).round(decimals=1)
    scores[:, front // 2] = -math.inf if front > 1 else 0.0
    words = torch.randint(1, 1 << 40, (sequences, front), generator=of)
    return children, chances, Above(scores, words, torch.randperm(90, generator=of)[:front])


def curves(seed: int, sequences: int) -> Pieces:
    of = torch.Generator().manual_seed(seed)
    slopes, shifts = torch.rand(2, sequences, 4 * 28, generator=of)
    return Pieces(KNOTS, slopes.contiguous(), (-shifts).contiguous(), 28, -1000.0)


class TreeCases:
    """To be run with fixtures ``at`` and ``device``."""

    def as_reference(
        self, at: At, device: torch.device, op: Any, changed: Sequence[Tensor], *given: Any
    ) -> list[Tensor]:
        """What an op returns, or writes into ``changed``; the reference has the same bits."""
        found = []
        ways = ((at, device, nullcontext), (lambda op: op, torch.device("cpu"), references))
        for by, where, computed in ways:
            own = [each.to(where, copy=True) for each in changed]
            those = [each.to(where) if isinstance(each, Tensor) else each for each in given]
            with computed():
                made = by(op)(*own, *those) if op is not move_paths else by(op)(tuple(own), *those)
            found.append([*own] if changed else [*made])
        assert all(torch.equal(a.cpu().float(), b.float()) and a.dtype == b.dtype for a, b in zip(*found, strict=True))
        return [each.cpu() for each in found[0]]

    @pytest.mark.parametrize("width", [1, 2, 7, 33, MAX_NODES])
    def test_accepted_paths_are_those_of_the_rule(self, width: int, at: At, device: torch.device) -> None:
        lengths = []
        for seed in range(4 if width == MAX_NODES else 6):  # the reference is slow
            trees, inputs = some_trees(seed, width)
            found = at(accept_paths)(**{name: column.to(device) for name, column in inputs.items()})
            assert_same(found, inputs)
            for row, tree in enumerate(trees):
                if inputs["nodes"][row]:
                    path, emitted = walk(tree.tokens, tree.parents, inputs["sampled"][row].tolist())
                    assert found.paths[row, : len(path)].tolist() == path
                    assert found.emitted[row, : len(path)].tolist() == emitted
            lengths += found.lengths.tolist()
        assert width < 7 or max(lengths) > 3, "paths that go somewhere"

    def test_a_whole_chain_of_64_and_a_sequence_that_is_padding(self, at: At, device: torch.device) -> None:
        inputs = padded([DraftTree.chain(list(range(64))), DraftTree.chain([5])], 64)
        inputs["nodes"][1] = 0
        inputs |= {"sampled": torch.arange(1, 65).repeat(2, 1), "slots": torch.arange(128).view(2, 64)}
        found = at(accept_paths)(**{name: column.to(device) for name, column in inputs.items()})
        assert found.lengths.tolist() == [64, 0]
        assert found.paths[0].tolist() == list(range(64)) and found.emitted[0].tolist() == list(range(1, 65))
        assert found.sources[0].tolist() == list(range(64))
        assert (found.paths[1] == NO_NODE).all() and (found.emitted[1] == NO_NODE).all()

    @pytest.mark.parametrize(("count", "nodes"), [(5, 9), (40, 12), (90, 64)])
    def test_the_likeliest_candidates_become_nodes(self, count: int, nodes: int, at: At, device: torch.device) -> None:
        for seed in range(4):
            own, limits = candidates(seed, count, nodes)
            there = tuple(each.to(device) for each in own)
            made = at(choose_tree)(there, *(each.to(device) for each in limits))
            for tree in range(3):
                columns: list[Any] = [
                    each[tree].tolist() if len(each) == 3 else each.tolist() for each in (*own, *limits)
                ]
                root, tokens, parents, scores, depths, rows, levels, prices, limit = columns
                alive = [each for each in range(count) if depths[each] <= levels and scores[each] > -math.inf]
                ranked = sorted(alive, key=lambda each: -scores[each])[: nodes - 1]
                most = min(max(1, worth([math.exp(scores[each]) for each in ranked], prices)), limit - 1)
                kept = [0, *(1 + each for each in sorted(ranked[:most]))]
                wanted = DraftTree.build(
                    [root, *(max(tokens[each - 1], 0) for each in kept[1:])],
                    [-1, *(kept.index(parents[each - 1]) for each in kept[1:])],
                )
                size = int(made.counts[tree])
                ours = [each.cpu()[tree].tolist() for each in made]
                found: Any = ChosenTree._make(each if isinstance(each, int) else each[:size] for each in ours)
                assert (found.tokens, found.parents, found.depths) == (wanted.tokens, wanted.parents, wanted.depths)
                assert found.ancestors == signed(wanted.ancestors).tolist() and found.numbers == kept
                expanded = [rows[each - 1] if depths[each - 1] < levels else -1 for each in kept[1:]]
                assert found.rows == [0, *expanded] and found.scores == [0.0, *(scores[each - 1] for each in kept[1:])]
                assert not made.parents[tree, size:].any() and not made.tokens[tree, size:].any(), "below the root"

    @pytest.mark.parametrize("sizes", [(1, 1, 4, 4), (2, 5, 8, 12), (3, 31, 31, 31), (1, 2, 63, 63)])
    def test_the_best_children_are_kept(self, sizes: tuple[int, int, int, int], at: At, device: torch.device) -> None:
        for seed in range(8):
            children, chances, above = a_level(seed, *sizes[:3], seed % 2 > 0)
            marks, by = torch.arange(sizes[3]) << 41, curves(seed, sizes[0])
            knots, slopes, shifts, *own = (each.to(device) for each in (*by[:3], children, chances))
            there = Above(*(each.to(device) for each in above)), marks.to(device)
            found = at(keep_children)(*own, *there, Pieces(knots, slopes, shifts, by.pieces, by.least))
            with references():
                wanted = keep_children(children, chances, above, marks, by)
            for name, ours, theirs in zip(Kept._fields, found, wanted, strict=True):
                assert ours.is_contiguous() and torch.equal(ours.cpu(), theirs), name
            assert bool((wanted.scores.diff(dim=1).nan_to_num(-1.0) <= 0).all())

    def test_a_level_goes_on_where_it_is_worth_it(self, at: At, device: torch.device) -> None:
        scores, bars = -3 * torch.rand(6, 9), torch.rand(6, 5) * torch.tensor([0.9, 0.4, 0.2, 0.3, 1.8])
        scores[:, 7:] = -math.inf
        found = at(worth_another)(scores.to(device), bars.to(device)).cpu()
        with references():
            assert torch.equal(found, worth_another(scores, bars))

    @pytest.mark.parametrize("width", [1, 6, MAX_NODES])
    def test_what_the_host_reads_and_who_is_padding(self, width: int, at: At, device: torch.device) -> None:
        rng = random.Random(width)
        trees = [random_tree(rng, rng.randint(1, width), VOCAB) for _ in range(4)]
        inputs = padded(trees, width) | {"sampled": samples(rng, trees, width)}
        inputs |= {"slots": torch.randperm(4 * width).view(4, width), "live": integers(1, 0, 1, 1)}

        def reported(by: At, where: torch.device) -> Tensor:
            given = {name: column.to(where) for name, column in inputs.items()}
            found, out = by(accept_paths)(**given), torch.zeros(4, 1 + 4 * width, dtype=torch.int64, device=where)
            assert found.lengths.tolist()[1] == 0 and (found.paths[1] == NO_NODE).all()
            by(report)(found, *(given[name] for name in ("tokens", "parents", "nodes", "sampled")), out, -2)
            return out.cpu()

        with references():
            wanted = reported(lambda op: op, torch.device("cpu"))
        assert torch.equal(reported(at, device), wanted) and wanted.any()
        assert (wanted == -2).any() == any(len(tree) < width for tree in trees)

    @pytest.mark.parametrize("page_size", [1, 16, 48])
    def test_where_nodes_are(self, page_size: int, at: At, device: torch.device) -> None:
        lengths, depths, nodes = integers(0, 5, 47, 48, 130), integers(0, 1, 1, 2), (0, 1, 2, 5)
        pages = 64 // page_size + 1
        tables = torch.randperm(1000, dtype=torch.int32)[: 5 * pages].view(5, pages)
        tables[4] = 0
        given = (torch.tensor([nodes] * 5), integers(1, 1, 1, 1, 0))
        for each in (depths, depths.repeat(5, 1)):
            found = self.as_reference(at, device, lay_out, (), tables, page_size, lengths, each, *given)
            wanted = []
            for sequence, length in enumerate(lengths.tolist()):
                for depth, node in zip(depths.tolist(), nodes, strict=True):
                    page, offset = divmod(length + node, page_size)
                    slot = int(tables[sequence, page]) * page_size + offset if sequence < 4 else 0
                    wanted.append((length + depth if sequence < 4 else 0, slot))
            assert list(zip(*(part.flatten().tolist() for part in found), strict=True)) == wanted

    @pytest.mark.parametrize(("sequences", "width", "page_size"), [(1, 1, 16), (7, 40, 48), (3, 64, 256)])
    def test_lay_out(self, sequences: int, width: int, page_size: int, at: At, device: torch.device) -> None:
        of = torch.Generator().manual_seed(width)

        def drawn(most: int, *shape: int, dtype: torch.dtype = torch.int32) -> Tensor:
            return torch.randint(0, most, shape, generator=of, dtype=dtype)

        live, lengths = torch.ones(sequences, dtype=torch.int32), drawn(1000 - 2 * width, sequences)
        live[2:3], lengths[2:3] = 0, 1 << 20
        tables, nodes = 1 + drawn(1 << 22, sequences, 1000 // page_size + 1), drawn(2 * width, sequences, width)
        found = self.as_reference(
            at, device, lay_out, (), tables, page_size, lengths, drawn(9, width), nodes.long(), live
        )
        assert found[1].max() > 0

    @pytest.mark.parametrize(("width", "emitted"), [(1, 1), (4, 7), (100, 6), (64, 64)])
    def test_texts_move_on(self, width: int, emitted: int, at: At, device: torch.device) -> None:
        recent, tokens = torch.arange(3 * width).view(3, width), torch.arange(1000, 1000 + 3 * emitted).view(3, emitted)
        tokens[1, 0] = BROKEN
        lengths, ends, taken = integers(70, 7, 9), integers([71], [8], [10]).long(), (0, emitted, (emitted + 1) // 2)
        given = (recent, lengths, ends)
        found = self.as_reference(at, device, advance, given, tokens, torch.tensor(taken))
        assert found[1].tolist() == (lengths + torch.tensor(taken)).tolist() and found[0].min() >= 0

    def test_recent_tokens(self, at: At, device: torch.device) -> None:
        recent, emitted = torch.arange(12).view(3, 4), torch.arange(100, 115).view(3, 5)
        changed = (recent, integers(9, 8, 7), integers([10], [9], [8]).long())
        found = self.as_reference(at, device, advance, changed, emitted, torch.tensor([0, 2, 5]))
        assert found[0].tolist() == [[0, 1, 2, 3], [6, 7, 105, 106], [111, 112, 113, 114]]
        assert found[1].tolist() == [9, 10, 12] and found[2].tolist() == [[10], [11], [13]]

    def test_the_ends_of_texts(self, at: At, device: torch.device) -> None:
        """Of a text that is shorter than what a pass runs the root comes earlier, and again behind itself."""
        recent = torch.tensor([[1, 2, 3, 4, 5], [0, 0, 0, 8, 9], [0, 0, 0, 0, 7], [1, 2, 3, 4, 6]])
        for first, tokens, lengths, roots in (
            (0, [[2, 3, 4, 5], [8, 9, 9, 9], [7, 7, 7, 7], [2, 3, 4, 6]], [17, 0, 0, 0], [3, 5, 8, 15]),
            (1, [[2, 3, 4, 5], [9, 9, 9, 9], [7, 7, 7, 7], [3, 4, 6, 6]], [17, 1, 1, 1], [3, 4, 8, 14]),
        ):
            found = self.as_reference(at, device, text_ends, (), recent, integers(20, 1, 0, 3), 4, first)
            assert [each.tolist() for each in found] == [tokens, lengths, roots]
        for count, first in ((1, 0), (4, 0), (6, 1)):
            known = torch.arange(100, 145).view(5, 9)
            self.as_reference(at, device, text_ends, (), known, integers(20, 3, 1, 0, count - 1), count, first)

    def test_the_rows_of_paths(self, at: At, device: torch.device) -> None:
        """Of two texts of 9 and 30 tokens, the first of whose paths is over after two nodes."""
        paths, slots = torch.tensor([[0, 2, -1, -1], [0, 1, 2, 3]]), torch.arange(100, 108).view(2, 4)
        found = self.as_reference(at, device, rows_of_paths, (), paths, slots, integers(9, 30), 3)
        wanted = [[0, 2, 0, 4, 5, 6], [9, 10, 11, 30, 31, 32], [100, 101, 102, 104, 105, 106]]
        assert [each.tolist() for each in found] == wanted

    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64])
    def test_rows_side_by_side_and_put_where_they_belong(
        self, dtype: torch.dtype, at: At, device: torch.device
    ) -> None:
        wide = torch.arange(60).view(3, 20).to(device, dtype)
        parts = [wide[:, begin : begin + width].contiguous() for begin, width in ((0, 1), (1, 16), (17, 3))]
        joined, table = at(join_columns)(*parts), torch.zeros(5, 20, dtype=dtype, device=device)
        assert torch.equal(joined, wide)
        at(put_rows)(table, torch.tensor([4, 0, 2], device=device), joined)
        assert torch.equal(table[[4, 0, 2]], wide) and not table[[1, 3]].any()

    @pytest.mark.parametrize(
        ("sources", "destinations"),
        [
            ([[9, 11, 14]], [[9, 10, 11]]),
            ([[5, 6, 7, 4]], [[4, 5, 6, 7]]),
            ([[20, 21]], [[21, 20]]),
            ([[8, 40, 13, 14], [], [17]], [[8, 9, 39, 40], [], [16]]),
            ([[16 + n for n in MIXED]], [[*range(16, 80)]]),
        ],
        ids=["a path moves down", "a cycle", "a swap", "three sequences over page borders", "64 rows"],
    )
    @pytest.mark.parametrize(
        ("key", "value", "dtype"),
        [
            ((1, 3), (1, 3), torch.float32), ((2, 64), (2, 0), torch.float16), ((3, 50), (3, 3), torch.float32),
            ((2, 24), (2, 24), torch.float8_e4m3fn),
        ],
        ids=str,
    )  # fmt: skip
    def test_rows_are_read_before_any_is_written(
        self, key: Any, value: Any, dtype: torch.dtype, sources: Any, destinations: Any, at: At, device: torch.device
    ) -> None:
        """Keys and values of any width or none; scales move with their rows."""
        of, width = torch.Generator().manual_seed(key[1]), min(MAX_NODES, max(map(len, sources)) + 2)
        parts = [torch.randn(2, 96, *shape, generator=of).to(dtype) for shape in (key, value)]
        parts += [torch.randn(2, 96, 2, 2, generator=of)] if dtype.itemsize == 1 else []
        both = ((sources, 2), (destinations, 95))
        index = [torch.tensor([row + [rest] * (width - len(row)) for row in rows]) for rows, rest in both]
        lengths = torch.tensor([len(row) for row in sources])
        moved = self.as_reference(at, device, move_paths, parts, *index, lengths)
        for source, destination in zip(sources, destinations, strict=True):
            for before, after in zip(parts, moved, strict=True):
                assert torch.equal(after[:, destination].float(), before[:, source].float())
        assert torch.equal(moved[0][:, 95].float(), parts[0][:, 95].float()), "what is behind a row is left alone"
