"""Recurrent layers on a GPU: the kernels against the references, and every row against its path by itself."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from foresay.kvpaging.states import LANES, NODES, LayerStates
from foresay.verifier.ops import recurrence as ops
from foresay.verifier.ops.eager import references
from foresay.verifier.ops.kernels import recurrence as kernels
from foresay.verifier.ops.records import AttentionMetadata, DeltaWeights, Scan, StateRows
from tests.kernels.on_device.conftest import INTERPRETED

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("ignore:overflow encountered in exp:RuntimeWarning")]
HEADS, GROUPS, DIM, WIDTH, TAPS, PAGES = 4, 2, 16, 32, 3 if INTERPRETED else 4, 8
FP32 = torch.float32
#: Gated delta rules, Mamba-2, and short convolutions.
of_each_kind = pytest.mark.parametrize("kind", ["delta", "scan", "short"])


@pytest.fixture(autouse=True)
def _many_values_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """In the interpreter, which runs one program after the other."""
    if INTERPRETED:
        monkeypatch.setattr(ops, "VALUES", LANES)


class Case:
    """Texts and trees of one pass behind texts."""

    def __init__(self, device: torch.device, kind: str, heads: int = HEADS, groups: int = GROUPS) -> None:
        self.short, self.device, self.random = kind == "short", device, random.Random(3)
        self.generator, self.width = torch.Generator().manual_seed(3), heads * WIDTH
        self.channels = channels = 2 * groups * DIM + self.width
        record = 0 if self.short else groups * DIM + self.width + heads
        states = (PAGES, 0 if self.short else heads, WIDTH // LANES, DIM, LANES)
        sizes = states, (PAGES, TAPS - 1, channels), (2 * NODES, record), (2 * NODES, channels)
        self.layer = LayerStates(*(self.noise(*size) for size in sizes))
        decay = -self.noise(heads).abs()
        given = self.noise(TAPS, channels), decay, self.noise(heads), self.noise(WIDTH), 1e-6
        self.weights, self.rates = DeltaWeights(*given, tiled=True), 2 * heads
        if kind == "scan":
            scan, self.rates = Scan(self.noise(channels), self.noise(heads), 2), heads
            self.weights = replace(self.weights, norm=self.noise(self.width), tiled=False, scan=scan)

    def noise(self, *size: int) -> Tensor:
        return torch.randn(size, generator=self.generator).to(self.device)

    def inputs(self, rows: int) -> tuple[Tensor, Tensor]:
        return self.noise(rows, 3 * self.channels if self.short else self.channels + self.width), self.noise(
            rows, self.rates
        )

    def rows(self, parts: list[list[int] | int], lengths: list[int], nodes: int = 0) -> StateRows:
        """parts: parents of a tree, or how many rows of a text, of which the last ``nodes`` leave records."""
        counts = [part if isinstance(part, int) else len(part) for part in parts]
        words = list[int]()
        for part in parts:
            own = list[int]()
            for node, parent in enumerate([-1] * part if isinstance(part, int) else part):
                own.append((own[parent] if parent >= 0 else 0) | 1 << node % (NODES - 1))
            words += own
        ints: Any = {"dtype": torch.int32, "device": self.device}
        offsets = torch.tensor([0, *torch.tensor(counts).cumsum(0).tolist()], **ints)
        texts = torch.tensor([isinstance(part, int) for part in parts], **ints)
        paged = AttentionMetadata(
            torch.zeros(len(parts), 1, **ints), 16, torch.tensor(lengths, **ints), offsets,
            torch.tensor(words, device=self.device), None, texts,
        )  # fmt: skip
        pages = torch.tensor([[1 + 3 * n, 2 + 3 * n, 3 + 3 * n] for n in range(len(parts))], **ints)
        stops = [[part // 2, part] if isinstance(part, int) else [0, 0] for part in parts]
        firsts = [count - nodes if isinstance(part, int) else 0 for count, part in zip(counts, parts, strict=True)]
        return StateRows(paged, pages, torch.tensor(stops, **ints), torch.tensor(firsts, **ints))

    def copy(self) -> LayerStates:
        return LayerStates(*(part.clone() for part in self.layer))

    def jobs(self, targets: list[list[int]], lengths: list[int], paths: list[list[int]]) -> tuple[Any, Any, Any, Any]:
        """What a commit reads of each sequence."""
        deepest = max(map(len, paths))
        padded = [[*path, *[-1] * (deepest - len(path))] for path in paths]
        ints: Any = {"dtype": torch.int32, "device": self.device}
        taken = torch.tensor([len(path) for path in paths], device=self.device)
        nodes = torch.tensor(padded, device=self.device)
        return torch.tensor(targets, **ints), torch.tensor(lengths, **ints), taken, nodes

    def run(self, given: tuple[Tensor, ...], rows: StateRows, layer: LayerStates, reference: bool = False) -> Tensor:
        op: Any = ops.short_conv if self.short else ops.gated_delta
        inputs = (given[0], self.weights.taps) if self.short else (*given, self.weights)
        with references():
            found: Tensor = (op if reference else op.launch)(*inputs, layer, rows, FP32)
        return found


def tree(rng: random.Random, nodes: int) -> list[int]:
    return [-1, *(rng.randrange(max(0, node - 4), node) for node in range(1, nodes))]


def path(parents: list[int], node: int) -> list[int]:
    found = [node]
    while parents[found[0]] >= 0:
        found.insert(0, parents[found[0]])
    return found


@of_each_kind
@pytest.mark.parametrize(("parts", "lengths"), [([5, 6], [0, 20]), ([3, 2], [5, 0])], ids=str)
def test_close_to_the_reference(device, kind, parts, lengths) -> None:
    """A tree and a text, each at its beginning or further on; the text leaves states, tails and records of its last."""
    case = Case(device, kind)
    rows = case.rows([tree(case.random, parts[0]), parts[1]], lengths, nodes=2)
    given, ours, theirs = case.inputs(sum(parts)), case.copy(), case.copy()
    found, wanted = case.run(given, rows, ours), case.run(given, rows, theirs, reference=True)
    for mine, its in zip((found, *ours), (wanted, *theirs), strict=True):
        assert torch.allclose(mine, its, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(("kind", "nodes"), [("delta", 1), ("delta", 9), ("scan", 6), ("short", 32)])
def test_a_tree_has_the_bits_of_its_paths_and_a_commit_those_of_plain_decoding(device, kind, nodes) -> None:
    """Of two texts at once: the paths of most nodes go past the end of a page."""
    case = Case(device, kind)
    trees = [tree(case.random, nodes), tree(case.random, min(nodes, 6))]
    layer, given = case.copy(), case.inputs(sum(map(len, trees)))
    found = case.run(given, case.rows(list(trees), [3, 3]), layer)
    one = LayerStates(*(part[None].contiguous() for part in layer))
    paths = [path(each, len(each) - 1) for each in trees]
    kernels.replay_paths(one, *case.jobs([[1, 2, 3], [4, 5, 6]], [3, 3], paths), 4)
    for number, own in enumerate(paths):
        for count, page in ((len(own), 2), (max((len(own) + 2) // 4 * 4 - 3, 0), 3)):
            rows, plain = [number * nodes + node for node in own[:count]], case.copy()
            plain.states[1], plain.tails[1] = layer.states[1 + 3 * number], layer.tails[1 + 3 * number]
            if count:
                picked = tuple(part[rows].contiguous() for part in given)
                assert torch.equal(case.run(picked, case.rows([count], [3]), plain), found[rows])
                for part in (0, 1):
                    assert torch.equal(one[part][0, page + 3 * number], plain[part][3]), f"text {number}"


def test_a_text_beside_a_tree_may_have_more_rows_than_a_tree_has_nodes(device) -> None:
    case = Case(device, "delta", heads=1, groups=1)
    given, alone, beside = case.inputs(69), case.copy(), case.copy()
    found = case.run(given, case.rows([[-1, 0, 0], 66], [5, 0]), beside)
    plain = case.rows([66], [0])
    plain = replace(plain, pages=plain.pages + 3, metadata=replace(plain.metadata, words=None, is_prefill=None))
    assert torch.equal(case.run(tuple(part[3:].clone() for part in given), plain, alone), found[3:])
    assert all(torch.equal(mine[4:7], its[4:7]) for mine, its in zip(alone[:2], beside[:2], strict=True))


@pytest.mark.skipif(not INTERPRETED, reason="each number of values is another compilation")
def test_a_row_has_the_same_bits_however_many_values_a_program_has(device, monkeypatch) -> None:
    case = Case(device, "delta")
    given, rows, found = case.inputs(5), case.rows([tree(case.random, 3), 2], [3, 9]), list[Tensor]()
    for values in (4, LANES):
        monkeypatch.setattr(ops, "VALUES", values)
        found.append(case.run(given, rows, case.copy()))
    assert torch.equal(*found)


@of_each_kind
def test_any_cut_of_a_text_has_the_same_bits(device, kind) -> None:
    case = Case(device, kind)
    given, whole = case.inputs(12), case.copy()
    wanted, done, state = case.run(given, case.rows([12], [0]), whole), [], case.copy()
    begin = 0
    for count in (1, 2, 5, 1, 3):
        rows = case.rows([count], [begin])
        rows = replace(rows, metadata=replace(rows.metadata, words=None, is_prefill=None))
        done.append(case.run(tuple(part[begin : begin + count] for part in given), rows, state))
        for part in state[:2]:
            part[1] = part[3]
        begin += count
    assert torch.equal(torch.cat(done), wanted)
    assert all(torch.equal(mine[3], its[3]) for mine, its in zip(state[:2], whole[:2], strict=True))


@of_each_kind
def test_a_commit_is_close_to_the_reference(device, kind) -> None:
    """At the beginning of a text, next to one that is only padding; and for the second sequence of a pass alone."""
    case = Case(device, kind)
    ours, theirs = (LayerStates(*(part[None].contiguous() for part in case.copy())) for _ in range(2))
    for first, given in enumerate(
        (case.jobs([[4, 6, 7], [0, 0, 0]], [0, 0], [[0, 2, 3, 7], []]), case.jobs([[1, 2, 3]], [5], [[1, 4]]))
    ):
        kernels.replay_paths(ours, *given, 3, first)
        with references():
            ops.replay_paths(theirs, *given, 3, first)
    for mine, its in zip(ours, theirs, strict=True):
        assert torch.allclose(mine, its, rtol=1e-5, atol=1e-6)
