"""One speculative step as a function of static tensors: what a graph captures.

::

    propose     the proposer's trees below the roots                        its own passes, if it is a model
    forward     one pass of the target over all nodes of all sequences, and perhaps a stretch of another one's prompt
    sample      at every node; accept; rows of accepted nodes move down, and their records advance recurrent states
    committed   the proposer's caches are updated; the state becomes that of the next step
    out         the outcome for the host, in one tensor

Nothing here reads a number on the host, so the next step can be launched before this one has finished.

Legend: S sequences, N nodes of a tree, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from foresay.spec.protocols import Features, Verified, mean_woken
from foresay.spec.sample import BROKEN
from foresay.spec.trace import Stopwatch
from foresay.spec.tree import DraftTree
from foresay.verifier.forward_batch import ForwardBatch, StaticRows
from foresay.verifier.graphs.capture import Arrival, Capture, fetched, packed, unpacked, without_stops
from foresay.verifier.graphs.proposer import AcceptedTree, DeviceTree, Proposer
from foresay.verifier.graphs.rows import Nodes, followed_by, rows_of
from foresay.verifier.graphs.state import StepState
from foresay.verifier.model.forward import forward
from foresay.verifier.model_runner import ModelRunner, accept_and_move, active_experts
from foresay.verifier.ops.recurrence import replay_paths
from foresay.verifier.ops.sample import sample_rows
from foresay.verifier.ops.trees import real_parents, report


@dataclass(frozen=True, slots=True)
class Outcome:
    """A step's outcome for the host. table: [S, 1 + 4 N], for each sequence path length, path, tokens, parents,
    samples. more: see :class:`~foresay.verifier.graphs.proposer.DeviceTree`. woken: see
    :class:`~foresay.spec.protocols.Forward`. first: the sample after a prompt that ended in this step."""

    table: list[list[int]]
    more: Sequence[Tensor] = ()
    woken: float = 0.0
    first: int = BROKEN

    @property
    def rows(self) -> list[int]:
        """How many rows of each sequence became text."""
        return [row[0] for row in self.table]

    def of(self, index: int, drafter: str) -> tuple[DraftTree, Verified]:
        """One sequence's tree, with its samples and accepted path, which are undefined at a stop."""
        length, *rest = self.table[index]
        count = len(rest) // 4
        path, tokens, parents, sampled = (rest[first : first + count] for first in range(0, 4 * count, count))
        nodes = count - parents.count(_NO_NODE)
        return DraftTree.build(tokens[:nodes], parents[:nodes], drafter), (sampled[:nodes], path[:length])


#: The parent of entries that are not nodes.
_NO_NODE = -2
#: The rows of a prompt in a step that only decodes.
NO_PROMPT = range(1)


class SpeculativeStep:
    """The step of one bucket. Calling it launches the step on the current stream; the outcome is then in ``out``.

    Where a request changes or reads its logits, it is launched in two parts: at the stop ``out`` has the trees, and
    tokens are sampled from what is then in the first rows of ``logits``, which many steps may share. logits: fp32[M,
    V]; None where it is always launched whole. commits: whether accepted paths advance recurrent states. drafting:
    drafting's expected share of its time, since its end is not visible; 0 where it is not needed. prompt: the rows of a
    prompt that are computed in the same pass, written by the host before each launch, which many steps may share; None:
    there are none. prompt_rows: for how many of them it is meant. timed: whether it runs while the host waits, part by
    part, as on a CPU. reach: rows past the committed length that it and the one after it may write.
    """

    drafting: float = 0.0

    def __init__(
        self,
        model: ModelRunner,
        proposer: Proposer,
        state: StepState,
        logits: Tensor | None = None,
        commits: bool = True,
        prompt: ForwardBatch | None = None,
        prompt_rows: range = NO_PROMPT,
        timed: bool = False,
    ) -> None:
        self.model, self.proposer, self.state, self.timed = model, proposer, state, timed
        self.prompt, self.prompt_rows = prompt, prompt_rows
        self.logits, self._commits = logits, commits
        nodes, device = proposer.shape.nodes, state.device
        self.reach = proposer.shape.levels + 1 + nodes
        self._numbers = torch.arange(nodes).to(device).expand(state.size, nodes).contiguous()
        self._whole = self.out = torch.zeros(state.size, 1 + 4 * nodes, dtype=torch.int64, device=device)
        self._more: tuple[Tensor, ...] = ()
        self._woken: Tensor | None = None
        self._mixed = device.type != "cpu" and model.decoder.config.stack.experts is not None

    def capture(self, capture: Capture) -> None:
        """Capture it: whole as ``launch``, and as ``stopping`` with a stop, unless that is None."""
        self.stopping = None if self.logits is None else capture(self.parts)
        self.launch = capture(partial(self.parts, stops=False) if self.timed else without_stops(self))

    def __call__(self) -> None:
        """Launch it whole."""
        for _ in self.parts(stops=False):
            pass

    def parts(self, stops: bool = True) -> Iterator[None]:
        """Launch it, with a stop after the pass or without."""
        with torch.inference_mode():
            tree = self.proposer.propose(self.state)
        if self.timed:
            yield
        with torch.inference_mode():
            nodes = Nodes(tree.tokens, self._numbers, tree.ancestors, tree.depths)
            live, store = self.state.states is not None, self.model.store
            rows = rows_of(self.state, nodes, live=live, store=store, whole=True)
            if self._mixed:  # rows behind a tree's last node wake no experts
                rows = replace(rows, slots=rows.slots * (self._numbers < tree.counts.unsqueeze(1)).flatten())
            spans = list[Tensor]()
            every = rows if self.prompt is None else followed_by(rows, self.prompt.static_rows())
            logits, features = forward(self.model.decoder, every, self.model.store, self.proposer.needs, spans)
            self._woken = active_experts(spans)
            if stops:
                logits = self._show(tree, logits)
        if stops or self.timed:
            yield
        with torch.inference_mode():
            self._verify(tree, rows, logits, features)
        yield

    def run(self, watch: Stopwatch) -> None:
        """Launch it whole; a timed one has then run."""
        if not self.timed:
            self.launch()
            return
        for number, phase in enumerate(("propose", "forward", "draw")):
            self.launch.run(number)
            watch.lap(phase)

    def _show(self, tree: DeviceTree, logits: Tensor) -> Tensor:
        """Copy to where the host looks at the stop; returns the logits there."""
        assert self.logits is not None, "they have a buffer of their own"
        parents, nodes = real_parents(tree.parents, tree.counts, _NO_NODE), tree.tokens.shape[1]
        self.out[:, 1 + nodes : 1 + 3 * nodes].copy_(torch.cat((tree.tokens, parents), dim=1))
        return self.logits[: len(logits)].copy_(logits)

    def _verify(self, tree: DeviceTree, rows: StaticRows, logits: Tensor, features: Features) -> None:
        state, store, slots = self.state, self.model.store, rows.slots.view_as(tree.tokens)
        windowed = None if rows.windowed is None else rows.windowed.slots.view_as(tree.tokens)
        sampled = sample_rows(logits[: len(rows.tokens)], state.sampling(tree.depths)).view_as(tree.tokens)
        paths = accept_and_move(store, tree, sampled, slots, state.live, windowed)
        if store.states is not None and state.states is not None and self._commits:
            of = state.states.targets, state.lengths, paths.lengths, paths.paths
            replay_paths(store.states.layers, *of, state.page_size)
        self.proposer.committed(state, AcceptedTree(tree, paths, slots, features))
        report(paths, tree.tokens, tree.parents, tree.counts, sampled, self.out, _NO_NODE)
        more = tree.more if self._woken is None else (*tree.more, self._woken)
        if self.prompt is not None:
            more = (*more, self._read(self.prompt, len(rows.tokens), logits, features))
        if more:
            self._pack(more)
        state.advance(paths)

    def _read(self, prompt: ForwardBatch, first: int, logits: Tensor, features: Features) -> Tensor:
        """Keep the features of a prompt's rows, from row ``first`` on. Returns int64[1], the sample after them."""
        rows = prompt.static_rows()
        for reader in self.proposer.readers:
            assert reader.needs is not None, "it reads features"
            own = {name: features[name][first:] for name in reader.needs.names}
            reader.keep(own, rows.positions, rows.slots)
        return sample_rows(logits[first:], prompt.sampling)

    def _pack(self, more: tuple[Tensor, ...]) -> None:
        """Write everything that the host needs of the step into one tensor."""
        whole, self._more = packed((self.out, *more)), more
        if self._whole is self.out:  # in the very first run
            self._whole = torch.zeros_like(whole)
        self._whole.copy_(whole)

    def fetched(self) -> Arrival:
        """Start to copy the outcome to the host, after the step itself."""
        return Arrival(self._whole, None) if self.timed else fetched(self._whole)

    def outcome(self, whole: Tensor) -> Outcome:
        """The outcome that arrived."""
        table, *more = unpacked(whole, (self.out, *self._more)) if self._more else (whole,)
        first = BROKEN if self.prompt is None else int(more.pop())
        return Outcome(table.tolist(), more, 0.0 if self._woken is None else mean_woken(more.pop()), first)
