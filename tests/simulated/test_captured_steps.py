"""Captured steps on the simulated device: nothing passes between host and device inside them, no shape changes, and
the tokens are those of plain decoding on a CPU."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from typing import cast

import pytest
import torch
from torch import Tensor

from foresay.spec.engine import EngineCore
from foresay.spec.request import Request
from foresay.spec.step import StepRunner
from foresay.spec.tree import ROOT_ONLY, TreeShape
from foresay.verifier.forward_batch import Sizes
from foresay.verifier.graphs import buckets
from foresay.verifier.graphs.buckets import passes
from foresay.verifier.graphs.capture import without_stops
from foresay.verifier.model_runner import ModelRunner
from foresay.verifier.ops import attention, rows
from foresay.verifier.ops.records import Norm
from tests.same_tokens.captured import MakeDrafter, captured_engine, copy, draft_model, run_freely
from tests.same_tokens.models import Pair
from tests.same_tokens.runs import assert_same, jobs_of
from tests.same_tokens.witness import Job, Text
from tests.simulated.device import CURRENT, DEVICE, NotOnTheDevice, simulated
from tests.simulated.graph import assert_launched, captured
from tests.simulated.test_engine import count_passes
from tests.spec.grammars import Automaton
from tests.verifier.reading import load_decoder

LENGTHS = (9, 2, 17, 33)
MAX_TOKENS = 12


def plainly(pair: Pair) -> EngineCore:
    """It drafts nothing and captures nothing, and has one text at a time."""
    return captured_engine(pair, lambda pool: None, ROOT_ONLY, graphs=False, max_seqs=1)


TREE = TreeShape.parse("3,2,1")


@cache
def expected(pair: Pair) -> dict[str, Text]:
    return run_freely(plainly(pair), jobs_of(pair.vocab_size, LENGTHS, MAX_TOKENS))


@pytest.mark.parametrize("kv", [torch.int8, torch.float8_e4m3fn], ids=str)
def test_the_same_tokens_over_quantized_kv(elsewhere, kv) -> None:
    """Against plain decoding there: where products differ in a last bit a number may be rounded to its neighbour."""
    moved = replace(elsewhere[1], kv=kv)
    jobs = jobs_of(moved.vocab_size, LENGTHS, MAX_TOKENS)
    with simulated():
        wanted = run_freely(plainly(moved), jobs)
        engine = captured_engine(moved, draft_model(moved), TREE, max_seqs=3, capture=captured)
        texts = run_freely(engine, jobs)
    assert_same(wanted, texts)
    assert_launched(engine)


@pytest.mark.parametrize("switch", ["ROTATED_WITHIN", "SLOTS_ONCE"])
def test_the_same_tokens_with_a_switch(elsewhere, switch, monkeypatch) -> None:
    """Of trees, whose rotation is then a launch of the draft model's levels alone."""
    monkeypatch.setattr(attention, switch, True)
    made, moved = elsewhere
    with simulated():
        engine = captured_engine(moved, draft_model(moved), TREE, max_seqs=3, capture=captured)
        assert_same(expected(made), run_freely(engine, jobs_of(made.vocab_size, LENGTHS, MAX_TOKENS)))
    assert_launched(engine)
    graphs = next(iter(engine.runner.buckets.values()))[-1].launch.graphs  # type: ignore[attr-defined]
    names = [name for each in graphs for name, _ in each.launches]
    rotated, attended, found = (names.count(n) for n in ("rotate_and_store", "tree_attention", "tail_slots"))
    assert (attended - rotated, bool(found)) == ((2, False) if switch == "ROTATED_WITHIN" else (0, True))


def there(made: Pair, quantize: str | None = None) -> Pair:
    """The pair on the simulated device."""
    directories = made.directory, made.draft_directory
    with simulated():
        target, draft = (load_decoder(each, torch.float32, DEVICE, quantize=quantize) for each in directories)
    return Pair(*directories, target, draft)


@pytest.fixture(scope="module")
def elsewhere(pair):
    """A pair, and the same on the simulated device."""
    made = pair("llama3", layers=2)
    expected(made)
    return made, there(made)


@pytest.mark.parametrize(("shape", "max_seqs"), [("none", 3), ("chain1", 1), ("chain4", 3), ("3,2,1", 3), ("self", 3)])
def test_the_same_tokens(elsewhere, shape, max_seqs) -> None:
    made, moved = elsewhere
    shapes = {"none": ROOT_ONLY, "chain1": TreeShape.chain(1), "chain4": TreeShape.chain(4)}
    make = copy(moved) if shape == "self" else None
    assert_same_tokens(made, moved, shapes.get(shape, TREE), make, max_seqs=max_seqs)


@pytest.mark.parametrize("how", ["int4", *(pytest.param(how, marks=pytest.mark.soak) for how in ("int8", "fp8"))])
def test_weights_of_few_bits(pair, how) -> None:
    """Target and draft model are quantised there; plain decoding is of the same numbers on a CPU."""
    made = pair("llama3", layers=2)
    here, moved = made.quantized(how, torch.float32), there(made, how)
    sizes = [[linear.nbytes for linear in each.target.linears] for each in (moved, here)]
    assert sizes[0] == sizes[1] < [linear.nbytes for linear in made.target.linears]
    assert_same_tokens(here, moved, TREE)


def assert_same_tokens(
    here: Pair,
    moved: Pair,
    tree: TreeShape,
    drafter: MakeDrafter | None = None,
    jobs: list[Job] | None = None,
    max_seqs: int = 3,
    windows: int = 0,
) -> None:
    """In captured steps, and by plain decoding on a CPU. drafter: None is the draft model, if the tree has levels."""
    wanted = expected(here) if jobs is None else run_freely(plainly(here), jobs)
    drafter = drafter or (draft_model(moved) if tree.levels else lambda pool: None)
    with simulated():
        engine = captured_engine(moved, drafter, tree, max_seqs=max_seqs, capture=captured, windows=windows)
        texts = run_freely(engine, jobs or jobs_of(here.vocab_size, LENGTHS, MAX_TOKENS))
    assert_same(wanted, texts)
    assert_launched(engine)


@pytest.mark.parametrize("max_seqs", [1, 3])
def test_prompts_in_captured_chunks(elsewhere, monkeypatch, max_seqs) -> None:
    """Stretches of up to 128 and to 256 rows, padded, full, with more to come and at the end, alongside texts and not:
    none runs op by op."""
    made, moved = elsewhere
    monkeypatch.setattr(buckets, "CHUNKS", (128, 256))
    jobs = jobs_of(made.vocab_size, (70, 128, 256 + 30, 256 + 225), 3 if max_seqs == 1 else 8)
    jobs = [replace(job, arrives=5 * index) for index, job in enumerate(jobs)]
    wanted = run_freely(plainly(made), jobs)
    with simulated():
        engine = captured_engine(moved, lambda pool: None, ROOT_ONLY, graphs=False, max_seqs=max_seqs)
        assert isinstance(engine.runner, StepRunner)
        verifier = engine.runner.verifier
        assert isinstance(verifier, ModelRunner)
        for _ in verifier.capture(
            None, [*passes(max_seqs, 600, 16), *buckets.chunks(max_seqs, 256, 600, 16)], captured
        ):
            pass
        by_op = count_passes(monkeypatch)
        texts = run_freely(engine, jobs)
    assert_same(wanted, texts)
    assert by_op == [0]


def test_a_step_that_reads_a_number_is_refused() -> None:
    with simulated():
        lengths = torch.zeros(3, dtype=torch.int64, device=DEVICE)
        with pytest.raises(NotOnTheDevice, match="brings values to the host"):
            captured_once(lambda: int(lengths.max()))
        with pytest.raises(NotOnTheDevice, match="brings values to the host"):
            captured_once(lambda: lengths[lengths > 0])
        with pytest.raises(NotOnTheDevice, match="brings values to the host"):
            captured_once(lambda: lengths.repeat_interleave(lengths))
        with pytest.raises(NotOnTheDevice, match="copies values to"):
            captured_once(lambda: lengths.copy_(torch.tensor(1)))
        with pytest.raises(NotOnTheDevice, match="copies values from"):
            captured_once(lambda: lengths.cpu())
        with pytest.raises(NotOnTheDevice, match="copies values to"):
            captured_once(lambda: lengths.copy_(torch.ones(3, dtype=torch.int64)))


def captured_once(step: Callable[[], object]) -> None:
    with CURRENT.capture():
        step()


def test_other_numbers_are_noticed() -> None:
    """A graph has the numbers of its capture for ever, those in tensors of the CPU too."""
    with simulated():
        x, numbers = torch.zeros(3, device=DEVICE), [1.0]
        for step in (lambda: x.add_(numbers[-1]), lambda: x.mul_(torch.tensor(numbers[-1]))):
            graph = captured(without_stops(step))
            graph()
            numbers.append(numbers[-1] + 1)
            with pytest.raises(NotOnTheDevice, match="was captured as"):
                graph()
        kept = captured(without_stops(lambda: rows.norm(x, Norm(x, numbers[-1]))))
        numbers.append(0.5)
        with pytest.raises(NotOnTheDevice, match="was captured as"):
            kept()


def test_memory_is_the_pool_s_where_nobody_named_it() -> None:
    with simulated():
        x, late = torch.ones(3, device=DEVICE), list[Tensor]()
        runs = []

        def step() -> Tensor:
            made = x + 1
            runs.append(None)
            if len(runs) > 2:  # in a replay
                late.append(made)
            return made * 2

        graph = captured(without_stops(step))
        x.add_(1)
        graph()
        assert cast(Tensor, graph.results[0]).tolist() == [6.0] * 3, "what it returned has the replay's values"
        assert late[0].isnan().all().tolist(), "what is named only in a replay is unknown to a graph"


def test_a_graph_without_its_step_is_refused() -> None:
    with simulated():
        x = torch.zeros(3, device=DEVICE)
        alone = captured(without_stops(lambda: x.add_(1))).graphs[0]
        with pytest.raises(NotOnTheDevice, match="the captured work is gone"):
            alone.replay()


def test_other_shapes_and_other_inputs_are_noticed() -> None:
    with simulated():
        inputs = {"x": torch.zeros(3, device=DEVICE)}
        graph = captured(without_stops(lambda: inputs["x"].add_(1.0)))
        graph()
        assert inputs["x"].tolist() == [3.0] * 3
        kept, inputs["x"] = inputs["x"], torch.zeros(3, device=DEVICE)
        with pytest.raises(NotOnTheDevice, match="was captured as"):
            graph()
        inputs["x"] = kept[:2]
        with pytest.raises(NotOnTheDevice, match="was captured as"):
            graph()


def test_devices_do_not_mix() -> None:
    with simulated():
        x = torch.zeros(3, device=DEVICE)
        with pytest.raises(NotOnTheDevice, match="mixes"):
            x + torch.zeros(3)
        with pytest.raises(NotOnTheDevice, match="NumPy"):
            x.numpy()
        assert (x + torch.tensor(1.0)).tolist() == [1.0] * 3


@pytest.mark.parametrize("shape", ["none", "3,2,1"])
def test_a_grammar_between_two_launches(elsewhere, shape) -> None:
    made, moved = elsewhere
    tree = ROOT_ONLY if shape == "none" else TreeShape.parse(shape)
    jobs = [
        replace(job, grammar=Automaton(3, made.vocab_size, forcing=0.1))
        for job in jobs_of(made.vocab_size, LENGTHS, MAX_TOKENS)
    ]
    assert_same_tokens(made, moved, tree, jobs=jobs, max_seqs=1)


def test_what_is_still_being_copied_is_not_written_again() -> None:
    with simulated():
        pinned, there = torch.zeros(3, pin_memory=True), torch.zeros(3, device=DEVICE)
        sent = torch.Event(DEVICE)
        for wait in (lambda: there.tolist(), lambda: sent.synchronize()):
            there.copy_(pinned, non_blocking=True)
            sent.record()
            wait()
            pinned.numpy()[0] += 1
        there.copy_(pinned, non_blocking=True)
        pinned.numpy()[0] += 1
        with pytest.raises(NotOnTheDevice, match="pinned memory was written"):
            sent.synchronize()


def test_chunks_that_sample_nothing_follow_each_other(elsewhere) -> None:
    """Two captured passes with no wait in between: the host writes the rows of the second into the same memory."""
    made, moved = elsewhere
    jobs = [replace(job, aside=True) for job in jobs_of(made.vocab_size, (100,), 4)]
    with simulated():
        engine = plainly(moved)
        verifier = cast(ModelRunner, engine.runner.verifier)
        for _ in verifier.capture(None, [Sizes(64, 1, 64, 64)], captured):
            pass
        texts = run_freely(engine, jobs)
    assert_same(run_freely(plainly(made), jobs), texts)


@pytest.mark.parametrize("most", [1, 4])
def test_a_request_s_deepest_draft(elsewhere, most) -> None:
    made, moved = elsewhere
    jobs = [Limited(**vars(job), most=most) for job in jobs_of(made.vocab_size, LENGTHS, MAX_TOKENS)[:2]]
    with simulated():
        engine = captured_engine(moved, draft_model(moved), TreeShape.chain(4), max_seqs=2, capture=captured)
        for job in jobs:
            engine.add(job.request())
        deltas = [delta for _ in iter(lambda: engine.has_work, False) for delta in engine.step()]
    assert max(delta.drafted for delta in deltas) == most
    for job in jobs:
        written = [token for delta in deltas if delta.id == job.id for token in delta.tokens]
        assert written == expected(made)[job.id].tokens
    assert_launched(engine, least=3)  # a captured step drafts less where that is required


@dataclass(frozen=True)
class Limited(Job):
    """A request that says how deep a draft may be."""

    most: int = 0

    def request(self) -> Request:
        request = super().request()
        request.most_drafted = self.most
        return request
