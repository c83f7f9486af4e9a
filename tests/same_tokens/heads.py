"""Everybody who drafts with a state of its own, by name. Random heads are hardly ever right, so somebody whispers the
truth into their trees."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from safetensors.torch import load_file

from foresay.drafters.assistant import AssistantDrafter
from foresay.drafters.eagle import EagleDrafter, MtpDrafter, PEagleDrafter
from foresay.drafters.parallel import DFlashDrafter, DSparkDrafter, MedusaDrafter
from foresay.kvpaging import KVStore, PagePool
from foresay.spec.protocols import Drafter, Features
from foresay.spec.sequence import SequenceState
from foresay.spec.tree import DraftTree, TreeShape
from foresay.verifier.heads.assistant import AssistantHead
from foresay.verifier.heads.config import HeadConfig
from foresay.verifier.heads.medusa import MedusaHeads
from foresay.verifier.heads.paged import DFlashHead, EagleHead
from foresay.verifier.heads.reader import read_mtp, read_weights
from foresay.verifier.model.decoder import Decoder
from tests.heads.assistants import CLUSTERED, make_assistant
from tests.heads.mtp import Mtp
from tests.heads.plain_dflash import make_dflash
from tests.heads.published import make_eagle, make_medusa
from tests.same_tokens.models import MakeDrafter, Pair

KINDS = ["medusa", "eagle3", "eagle1", "peagle", "dflash", "dspark", "assistant"]
#: Heads, the layer beside a target's, draft models, the target's copy, and with others of these before it.
NAMES = [*KINDS, "mtp", "draft_model", "self", "self after draft_model", "self after eagle3", "self after medusa"]
#: A drafter and a target of recurrent layers.
HYBRID = ["mtp", "recurrent draft_model", "recurrent self"]
SHAPES = {"chain": TreeShape.chain(3), "tree": TreeShape((3, 4, 2)), "bush": TreeShape((6, 14, 18, 14))}


def target_of(pair: Callable[..., Pair], kind: str, family: str = "llama2", *how: Any, **more: Any) -> Pair:
    """The models that a drafter of this name is for: of ``family``, if it has no family of its own."""
    if kind in HYBRID:
        return pair("qwen3_5", *how, **more)
    return pair("gemma4", *how, **more | {"layers": 4}) if kind == "assistant" else pair(family, *how, **more)


def load_eagle(directory: Path, target: Decoder) -> EagleHead:
    config = HeadConfig.read(directory, target.config)
    return EagleHead(config, read_weights(directory, config, target), target.config.max_positions + 64)


def load_dflash(directory: Path, target: Decoder) -> DFlashHead:
    config = HeadConfig.read(directory, target.config)
    return DFlashHead(config, read_weights(directory, config, target), target.config.max_positions + 64)


def head_drafter(kind: str, directory: Path, target: Decoder, shape: str) -> MakeDrafter:
    """Makes a drafter with a random head for this target, written to ``directory`` first."""
    if not (directory / "config.json").exists():
        if kind == "medusa":
            make_medusa(directory, target, "authors", heads=4)
        elif kind == "assistant":
            make_assistant(directory, target.config, **({} if shape == "chain" else CLUSTERED))
        elif kind in ("dflash", "dspark"):
            make_dflash(directory, target, "authors" if kind == "dflash" else "rnn")
        else:
            layers = None if kind == "eagle1" else [0, 2, target.config.num_layers]
            make_eagle(directory, target, {"eagle3": "safeailab"}.get(kind, kind), layers)
    if kind == "medusa":
        heads = MedusaHeads.load(directory, target)
        return lambda pool: MedusaDrafter(heads, pool)
    if kind == "assistant":
        assistant = AssistantHead.load(directory, target)
        return lambda pool: AssistantDrafter(assistant, store_of(pool))
    if kind in ("dflash", "dspark"):
        block, made = load_dflash(directory, target), DFlashDrafter if kind == "dflash" else DSparkDrafter
        return lambda pool: made(block, pool)
    head, eagle = load_eagle(directory, target), PEagleDrafter if kind == "peagle" else EagleDrafter
    return lambda pool: eagle(head, pool)


def drafter_of(pair: Pair, name: str, shape: str) -> MakeDrafter:
    """One of :data:`NAMES` or :data:`HYBRID`. shape: of ``SHAPES``, by which heads are made."""
    kind, _, before = name.partition(" after ")
    if kind.endswith("draft_model"):
        return pair.draft_model
    if kind.endswith("self"):
        first = drafter_of(pair, before, shape) if before else lambda pool: None
        return lambda pool: pair.copy(pool, before=first(pool))
    if kind == "mtp":
        if not any(name.startswith("mtp.") for name in load_file(pair.directory / "model.safetensors")):
            Mtp().put_beside(pair.directory)
        head = EagleHead(*read_mtp(pair.directory, pair.target), 576)
        return lambda pool: MtpDrafter(head, pool, "mtp")
    return head_of(pair, kind, shape)


def store_of(pool: PagePool) -> KVStore:
    """The target's, which is the first on a pool."""
    target = pool.find_store(KVStore)
    assert target is not None
    return target


def whispered(make: MakeDrafter, known: Mapping[str, list[int]]) -> MakeDrafter:
    def made(pool: PagePool) -> Drafter:
        inner = make(pool)
        assert inner is not None
        return Whisper(inner, known)

    return made


class Passing:
    """A drafter that passes everything on to another one."""

    def __init__(self, inner: Any) -> None:
        self.inner, self.name, self.needs = inner, inner.name, inner.needs

    def extend(self, sequence: SequenceState) -> None:
        self.inner.extend(sequence)

    def committed(self, sequence: SequenceState, path: list[int]) -> None:
        self.inner.committed(sequence, path)

    def finished(self, sequence: SequenceState) -> None:
        self.inner.finished(sequence)


class Whisper(Passing):
    """Puts the true continuation on a random path of each tree that another drafter grew.

    known: prompt and output of each sequence, by id.
    """

    def __init__(self, inner: Drafter, known: Mapping[str, list[int]]) -> None:
        super().__init__(inner)
        self.known = known
        self._rng = random.Random(5)
        self.drafted = 0

    def propose(self, sequences: Sequence[SequenceState], shapes: Sequence[TreeShape]) -> list[DraftTree]:
        trees = self.inner.propose(sequences, shapes)
        for tree, shape in zip(trees, shapes, strict=True):
            assert len(tree) <= shape.nodes
            assert max(tree.depths) <= shape.levels
        self.drafted += sum(len(tree) - 1 for tree in trees)
        return [self._told(sequence, tree) for sequence, tree in zip(sequences, trees, strict=True)]

    def _told(self, sequence: SequenceState, tree: DraftTree) -> DraftTree:
        tokens, parents = tree.tokens, tree.parents
        node = self._rng.randrange(len(tokens))
        path = [node]
        while path[-1]:
            path.append(parents[path[-1]])
        coming = self.known[sequence.id][len(sequence.tokens) :]
        for row, token in zip(path[-2::-1], coming, strict=False):
            tokens[row] = token
        return DraftTree.build(tokens, parents, tree.drafter)

    def observe(self, sequence: SequenceState, features: Features) -> None:
        self.inner.observe(sequence, features)


def head_of(pair: Pair, kind: str, shape: str) -> MakeDrafter:
    return head_drafter(kind, pair.directory.parent / f"{kind} {shape == 'chain'}", pair.target, shape)
