"""Who drafts where some requests bring a prediction: by a configured drafter that records its calls."""

from __future__ import annotations

import pytest

from foresay.drafters.combined import RoutedDrafter, configured
from foresay.drafters.ngram import NgramDrafter
from foresay.drafters.prediction import PredictionDrafter
from foresay.spec.errors import InvalidRequest
from foresay.spec.protocols import FeatureRequest
from foresay.spec.sampling import SamplingParams
from foresay.spec.sequence import SequenceState
from foresay.spec.tree import TreeShape
from tests.drafters.texts import letters, sequence
from tests.spec.harness import Harness
from tests.spec.tables import TableModel

SHAPE = TreeShape.chain(3)
DEEP = SHAPE.deepened(12)


class Noting(NgramDrafter):
    """An n-gram drafter that keeps its requests and notifications."""

    def __init__(self) -> None:
        super().__init__()
        self.needs = FeatureRequest(final=True)
        self.requested: list[tuple[str, int]] = []
        self.notified: list[tuple[str, list[int]]] = []
        self.seen: list[str] = []

    def propose(self, sequences, shapes):
        self.requested += [(s.id, shape.levels) for s, shape in zip(sequences, shapes, strict=True)]
        return super().propose(sequences, shapes)

    def committed(self, sequence, path):
        self.notified.append((sequence.id, path))

    def observe(self, sequence, features):
        self.seen.append(sequence.id)

    def finished(self, sequence):
        self.notified.append((sequence.id, []))
        super().finished(sequence)


def routed() -> tuple[RoutedDrafter, Noting]:
    noting = Noting()
    return RoutedDrafter(PredictionDrafter(), noting, SHAPE), noting


def running(text: str, prediction: str | None, name: str) -> SequenceState:
    made = sequence(text, name)
    made.prediction = None if prediction is None else letters(prediction)
    return made


def test_a_prediction_goes_first_and_the_others_draft_their_own_shape() -> None:
    drafter, noting = routed()
    sequences = [
        running("#abcdef", "abcdefghijklmnopqrst", "sure"),
        running("#abXabX", None, "without"),
        running("#abXabXabX", "qwertyuiop", "elsewhere"),
    ]
    trees = drafter.propose(sequences, [DEEP, SHAPE, DEEP])
    assert [tree.drafter for tree in trees] == ["prediction", "ngram", "ngram"]
    assert [len(tree) for tree in trees] == [13, 4, 4]
    assert noting.requested == [("without", 3), ("elsewhere", 3)]


def test_who_proposed_hears_the_path_and_the_other_that_it_rested() -> None:
    drafter, noting = routed()
    sure, without = running("#abcdef", "abcdefghij", "sure"), running("#abXabX", None, "without")
    drafter.propose([sure, without], [DEEP, SHAPE])
    drafter.committed(sure, [0, 1, 2])
    drafter.committed(without, [0, 1])
    drafter.committed(sure, [0, -1])  # a step in which nobody drafted
    assert noting.notified == [("sure", [0, -1, -1]), ("without", [0, 1]), ("sure", [0, -1])]


def test_a_guess_is_better_than_nothing() -> None:
    """Unsure, it gives way to one that drafts something, and only to such."""
    drafter, noting = routed()
    lost = running("#abcd_", "abcdefghij", "lost")
    (tree,) = drafter.propose([lost], [DEEP])
    assert noting.requested == [("lost", 3)]
    assert tree.drafter == "prediction"
    assert tree.chances[1] < 0.5
    again = running("#ab_ab_", "abcdefghij", "again")
    (tree,) = drafter.propose([again], [DEEP])
    assert tree.drafter == "ngram"


def test_features_and_ends_reach_the_configured_drafter() -> None:
    drafter, noting = routed()
    one = running("#ab", "abc", "one")
    assert drafter.needs == FeatureRequest(final=True)
    drafter.observe(one, {})
    drafter.finished(one)
    assert (noting.seen, noting.notified) == (["one"], [("one", [])])
    assert [configured(one) for one in (drafter, noting, None)] == [noting, noting, None]


def test_nobody_need_be_configured() -> None:
    drafter = RoutedDrafter(PredictionDrafter(), None, TreeShape())
    assert drafter.needs is None
    sequences = [running("#ab", "abcdef", "one"), running("#ab", None, "two")]
    trees = drafter.propose(sequences, [DEEP, DEEP])
    assert [tree.tokens[:5] for tree in trees] == [letters("bcdef"), letters("b")]
    for each in sequences:
        drafter.extend(each)
        drafter.committed(each, [0])
        drafter.finished(each)


@pytest.mark.parametrize("shape", [(), (1, 1), (3, 2, 1), (14, 14, 14), (6, 14, 18, 14, 8, 3)])
def test_only_what_has_a_prediction_is_drafted_for_beyond_the_shape(shape) -> None:
    """Through an engine, with the pages that its scheduler reserves."""
    model, params = TableModel(1, vocab_size=16), SamplingParams(max_tokens=100, seed=1, temperature=1.0)
    emitted = Harness(model).answer([1, 2, 3], params).tokens
    drafter = RoutedDrafter(PredictionDrafter(), NgramDrafter() if shape else None, TreeShape(shape))
    harness = Harness(model, drafter, shape, pages=60)
    harness.add("with", [1, 2, 3], params, prediction=emitted)
    harness.add("without", [1, 2, 3], params)
    answers = harness.run()
    assert answers["with"].tokens == answers["without"].tokens == emitted
    statistics = answers["with"].statistics
    assert len(statistics.accepted_per_depth) == statistics.num_spec_tokens == 32
    assert len(answers["without"].statistics.drafted_per_depth) <= len(shape)
    runs = [delta for delta in answers["with"].deltas if len(delta.tokens) > len(shape) + 1]
    assert {delta.origin.drafter for delta in runs if delta.origin} == {"prediction"}


def test_a_prediction_of_what_is_no_token_is_refused() -> None:
    harness = Harness(TableModel(1, vocab_size=16))
    for wrong in (16, -1):
        with pytest.raises(InvalidRequest, match=f"prediction holds {wrong}, which is not a token"):
            harness.add("wrong", [1, 2], SamplingParams(max_tokens=5), prediction=[3, wrong])
