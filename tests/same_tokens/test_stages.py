"""The same tokens where the target's copy drafts with another before it; and the chains are the copy's own."""

from __future__ import annotations

from dataclasses import replace

import pytest

from foresay.drafters.ngram import NgramDrafter
from foresay.drafters.self_draft import SelfDrafter
from foresay.drafters.suffix.drafter import SuffixDrafter
from foresay.kvpaging import PagePool
from foresay.spec.engine import EngineCore
from foresay.spec.protocols import Drafter
from foresay.spec.sequence import SequenceState
from foresay.spec.tree import DraftTree, TreeShape
from tests.combinations import alternating
from tests.same_tokens.heads import KINDS, head_of, target_of
from tests.same_tokens.models import Pair, engine_of
from tests.same_tokens.runs import assert_same, expected, jobs_of, whole
from tests.same_tokens.witness import run

LENGTHS = (9, 60, 17, 1, 33, 3)


class Told(NgramDrafter):
    """Finds what comes next in the texts of a pair, with one token in seven wrong: random texts do not repeat."""

    def __init__(self, pair: Pair) -> None:
        super().__init__()
        self._texts = whole(jobs_of(pair.vocab_size, LENGTHS, 40), expected(pair, LENGTHS, 40))

    def _tree(self, sequence: SequenceState, shape: TreeShape) -> DraftTree | None:
        first = len(sequence.tokens)
        coming = enumerate(self._texts[sequence.id][first : first + shape.levels], start=first)
        found = [token if number % 7 else token ^ 1 for number, token in coming]
        return DraftTree.chain([sequence.tokens[-1], *found], self.name) if found else None


#: Who drafts for the copy.
FIRST = ["told", "suffix", "draft_model", *KINDS]
#: All kinds before the copy of a dense model; a lookup and a head before those of windows, mixtures and hybrids.
CASES = [("llama2", first) for first in FIRST]
CASES += [(family, first) for family in ("gemma3", "olmoe", "qwen3_5", "lfm2") for first in ("told", "eagle3")]
OPTIONS: dict[str, dict[str, int | bool]] = {
    "alone": {"max_seqs": 1},
    "in too few pages": {"page_size": 8, "chunk": 16, "prefix": True, "tokens": 200},
}


def engine_with(models: Pair, first: str, **options: int | bool) -> EngineCore:
    """Chains of seven. first: who drafts for the copy."""

    def copy(pool: PagePool) -> SelfDrafter:
        if first in KINDS:
            return models.copy(pool, before=head_of(models, first, "chain")(pool))
        looking: dict[str, Drafter] = {"told": Told(models), "suffix": SuffixDrafter(slice_seconds=1.0)}
        return models.copy(pool, before=models.draft_model(pool) if first == "draft_model" else looking.get(first))

    return engine_of(models.target, copy, TreeShape.chain(7), **options)  # type: ignore[arg-type]


@pytest.mark.parametrize(("case", "where"), alternating(CASES, list(OPTIONS)), ids=str)
def test_a_chain_in_stages_is_the_copys_own(pair, case, where) -> None:
    """Step for step, twice, the second time with prefixes; a third of the texts is given up on their way."""
    (family, first), options = case, OPTIONS[where]
    models, accepted = target_of(pair, first, family), []
    jobs, wanted = jobs_of(models.vocab_size, LENGTHS, 40), expected(models, LENGTHS, 40)
    jobs = [replace(job, cancelled=20 if index % 3 == 2 else None) for index, job in enumerate(jobs)]
    for each in ("nobody", first):
        engine = engine_with(models, each, **options)
        for _ in range(2):
            texts = run(engine, jobs)
            assert_same(wanted, texts)
            accepted.append([text.statistics and text.statistics.accepted_per_depth for text in texts.values()])
    assert accepted[:2] == accepted[2:]
    assert any(depths for depths in accepted[0] if depths)


@pytest.mark.parametrize("family", ["llama2", "qwen3_5", "lfm2"])
@pytest.mark.parametrize("first", ["told", "eagle3"])
def test_the_target_before_itself_is_never_wrong(pair, family, first) -> None:
    """Or a row, a state, or a draw of what was verified before is another."""
    models = pair(family)
    models = replace(models, draft=models.target)
    jobs = jobs_of(models.vocab_size, LENGTHS, 40)
    texts = run(engine_with(models, first, page_size=8, chunk=16, prefix=True, tokens=200), jobs)
    whole = [text.statistics for text in texts.values() if text.finish_reason != "stop"]
    assert whole and all(each.accepted == each.drafted for each in whole if each)


@pytest.mark.parametrize(("first", "named"), [("told", {"ngram", "self"}), ("draft_model", {"draft_model", "self"})])
def test_the_proposer_of_a_token_is_reported(pair, first, named) -> None:
    models = pair("llama2")
    engine, job = engine_with(models, first, max_seqs=1), jobs_of(models.vocab_size, LENGTHS, 40)[0]
    engine.add(job.request())
    deltas = [delta for _ in range(12) for delta in engine.step()]
    assert named <= {name for delta in deltas if delta.origin for name in delta.origin.sources}
