"""How trees grow on the device: what :mod:`drafters.growth` does, with shapes that are known beforehand.

A chain takes the likeliest child, noise included; a template the ranks it names; plain widths the likeliest of a level,
whatever they hang on. (What a *dynamic* tree keeps is decided by numbers, so it is left to the host.) Chances are the
draft's own, uncalibrated: within a level the calibration seldom changes their order.

Legend: S sequences, F expanded nodes of a level, V' the drafter's vocabulary, W nodes of the next level, k children
looked at below each.
"""

from __future__ import annotations

import torch
from torch import Tensor

from spec.tree import TreeShape
from verifier.graphs.proposer import DeviceTree, chain_columns
from verifier.graphs.rows import Nodes
from verifier.graphs.state import StepState
from verifier.ops.children import best_children


class Plan:
    """What is known of every tree of a shape before it grows; constants on the device.

    inner: for each level, int64[F], which nodes of the level above are expanded for it. columns: their numbers,
    int64[S, F], and depths, int32[S, F]. chain: int64[S, 1], the word of each node, if the shape is one.
    """

    def __init__(self, shape: TreeShape, sequences: int, device: torch.device) -> None:
        self.shape, self.sequences, self.device = shape, sequences, device
        starts = [0, 1]
        for width in shape.widths:
            starts.append(starts[-1] + width)
        self.starts = starts
        self.inner = [torch.tensor(self._inner(level)).to(device) for level in range(shape.levels)]
        self._picks = [self._picked(level) for level in range(shape.levels)]
        depths = [depth for depth, width in enumerate((1, *shape.widths)) for _ in range(width)]
        self.depths = torch.tensor(depths, dtype=torch.int32).expand(sequences, -1).contiguous().to(device)
        self.columns = [self._columns(level) for level in range(shape.levels)]
        self.bits = torch.tensor([-(1 << 63) if node == 63 else 1 << node for node in range(shape.nodes)]).to(device)
        self.counts = torch.full((sequences,), shape.nodes).to(device)
        parents, words, _ = chain_columns(sequences, shape.nodes, device)
        self.whole_chain = parents, words
        self.chain = [column.contiguous() for column in words.split(1, dim=1)] if shape.is_chain else None
        self.none = torch.zeros(sequences, 1, dtype=torch.int64).to(device)
        self.roots = torch.full((sequences, 1), -1).to(device), torch.ones(sequences, 1, dtype=torch.int64).to(device)

    def _inner(self, level: int) -> list[int]:
        nodes = range(self.starts[level], self.starts[level + 1])
        template = self.shape.template
        return [node for node in nodes if template is None or node in template.inner]

    def _columns(self, level: int) -> tuple[Tensor, Tensor]:
        numbers = self.inner[level].expand(self.sequences, -1).contiguous()
        return numbers, torch.full_like(numbers, level, dtype=torch.int32)

    def _picked(self, level: int) -> tuple[Tensor, Tensor] | None:
        """For each node of the next level of a template: its parent's place among the expanded, and its rank."""
        template, inner = self.shape.template, self._inner(level)
        if template is None:
            return None
        nodes = range(self.starts[level + 1], self.starts[level + 2])
        places = torch.tensor([inner.index(template.parents[node]) for node in nodes])
        ranks = torch.tensor([template.ranks[node] for node in nodes])
        return places.to(self.device), ranks.to(self.device)

    def looked(self, level: int) -> int:
        """k: how many children are looked at below a node."""
        template = self.shape.template
        return self.shape.widths[level] if template is None else template.reach(level)

    def ranked(self, level: int) -> tuple[Tensor, Tensor] | None:
        """A template's picks, see above; None where the likeliest are taken."""
        return self._picks[level]


class DeviceGrowth:
    """Trees below the roots of a bucket while they grow; made anew in each step, inside the captured function."""

    def __init__(self, plan: Plan, state: StepState, token_ids: Tensor | None = None) -> None:
        """token_ids: int64[V'], the target's id of each of the drafter's columns; None where they are the same."""
        self._plan, self._state, self._token_ids = plan, state, token_ids
        parents, words = plan.roots
        self._tokens, self._parents, self._words = [state.roots[:, None]], [parents], [words]
        self._scores: Tensor | None = None
        self._level = 0

    def expanded(self) -> Nodes:
        """The nodes that the next level hangs below: the rows of the drafter's next pass."""
        plan, level = self._plan, self._level
        inner, first = plan.inner[level], plan.starts[level]
        tokens, words = self._tokens[level], self._words[level]
        if len(inner) < tokens.shape[1]:
            tokens, words = tokens.index_select(1, inner - first), words.index_select(1, inner - first)
        numbers, depths = plan.columns[level]
        return Nodes(tokens, numbers, words, depths)

    def grow(self, logits: Tensor) -> Tensor:
        """Hang the next level below the expanded nodes.

        logits: fp32[S * F, V'], a row for each expanded node, or [S, V'], one for all of a sequence's. Returns
        int64[S, W]: for each new node, which of the expanded ones it hangs on (its place among them).
        """
        plan, level = self._plan, self._level
        sampling = self._state.sampling(plan.depths[0, plan.starts[level]].expand(len(logits) // plan.sequences))
        children, chances = best_children(logits, sampling, plan.looked(level), self._token_ids)
        self._level += 1
        if plan.chain is not None:
            self._tokens.append(children)
            self._words.append(plan.chain[level + 1])
            return plan.none
        shape = (plan.sequences, -1, plan.looked(level))
        tokens, places = self._kept(level, children.view(shape), chances.view(shape))
        first = plan.starts[level + 1]
        parents = plan.inner[level][places]
        above = torch.cat(self._words, dim=1).gather(1, parents)
        self._tokens.append(tokens)
        self._parents.append(parents)
        self._words.append(above | plan.bits[first : first + tokens.shape[1]])
        return places

    def _kept(self, level: int, children: Tensor, chances: Tensor) -> tuple[Tensor, Tensor]:
        """Tokens and places, int64[S, W], of the candidates [S, F, k] (or [S, 1, k], alike below all) that are kept."""
        plan = self._plan
        count = len(plan.inner[level])
        children = children.expand(-1, count, -1)
        picks = plan.ranked(level)
        if picks is not None:
            places, ranks = picks
            return children[:, places, ranks], places.expand(plan.sequences, -1)
        scores = chances.expand(-1, count, -1)
        if self._scores is not None:
            scores = scores + self._scores[:, :, None]
        best = scores.flatten(1).topk(plan.shape.widths[level], dim=1)
        self._scores = best.values
        return children.flatten(1).gather(1, best.indices), best.indices // plan.looked(level)

    def tree(self) -> DeviceTree:
        """The finished trees."""
        plan, tokens = self._plan, torch.cat(self._tokens, dim=1)
        if plan.chain is not None:
            return DeviceTree(tokens, *plan.whole_chain, plan.depths, plan.counts, True)
        parents, words = torch.cat(self._parents, dim=1), torch.cat(self._words, dim=1)
        return DeviceTree(tokens, parents, words, plan.depths, plan.counts, False)
