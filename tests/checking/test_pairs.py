"""What check says of real directories, and that an engine built from the same settings agrees."""

from __future__ import annotations

import pytest

from foresay.server.cli.pair import check
from foresay.server.engine.build import build_engine
from foresay.spec.errors import ForesayError
from foresay.verifier.model import weight_cache
from tests.checking.pairs import FAULTY, SOUND


def builds(config) -> bool:
    try:
        build_engine(config)
    except ForesayError:
        return False
    return True


@pytest.mark.parametrize("name", SOUND)
def test_sound_pairs_can_work_and_do(name, models, tmp_path) -> None:
    config = SOUND[name].config(models, tmp_path)
    report = check(config)
    assert report.works and not report.fault, report.fault
    assert len(report.warnings) == (name == "small_vocabulary")
    assert builds(config)


@pytest.mark.parametrize("name", FAULTY)
def test_faults_are_errors_and_nothing_is_built(name, models, tmp_path) -> None:
    case = FAULTY[name]
    config = case.config(models, tmp_path)
    report = check(config)
    assert not report.works and "\n" not in report.fault
    for words in case.said:
        assert words in report.fault
    assert not builds(config)


@pytest.mark.parametrize(("most", "words"), [(1 << 30, "later starts map them"), (999, "each start reads")])
def test_the_folder_of_packed_weights_is_named(most, words, models, tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(weight_cache, "LEAST_BYTES", 0)
    monkeypatch.setattr(weight_cache, "MOST_BYTES", most)
    case = SOUND[next(iter(SOUND))]
    assert words in check(case.config(models, tmp_path)).rows["packed"]
