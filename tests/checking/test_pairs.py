"""What check says of real directories, and that an engine built from the same settings agrees."""

from __future__ import annotations

import pytest

from foresay.server.cli.pair import CheckReport, check
from foresay.server.engine.build import build_engine
from foresay.spec.errors import ForesayError
from foresay.verifier.model import kept_weights
from tests.checking.pairs import DOUBTFUL, FAULTY, SOUND


def told(report: CheckReport, status: str) -> str:
    return "\n".join(f"{finding.subject}: {finding.text}" for finding in report.findings if finding.status == status)


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
    assert not told(report, "fail")
    assert report.works
    assert not told(report, "warn")
    assert builds(config)


@pytest.mark.parametrize("name", DOUBTFUL)
def test_doubts_are_warnings_and_the_pair_works(name, models, tmp_path) -> None:
    case = DOUBTFUL[name]
    config = case.config(models, tmp_path)
    report = check(config)
    assert report.works, told(report, "fail")
    for words in case.said:
        assert words in told(report, "warn")
    assert builds(config)


@pytest.mark.parametrize("name", FAULTY)
def test_faults_are_errors_and_nothing_is_built(name, models, tmp_path) -> None:
    case = FAULTY[name]
    config = case.config(models, tmp_path)
    report = check(config)
    assert not report.works
    for words in case.said:
        assert words in told(report, "fail")
    assert not builds(config)


@pytest.mark.parametrize(("most", "words"), [(1 << 30, "weights: later starts map them"), (999, "each start reads")])
def test_the_folder_of_packed_weights_is_named(most, words, models, tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(kept_weights, "LEAST_BYTES", 0)
    monkeypatch.setattr(kept_weights, "MOST_BYTES", most)
    assert words in told(check(SOUND[next(iter(SOUND))].config(models, tmp_path)), "ok")


@pytest.mark.parametrize("cases", [DOUBTFUL, FAULTY], ids=["doubtful", "faulty"])
def test_every_fault_and_doubt_has_one_sentence_that_mends_it(cases, models, tmp_path) -> None:
    for name, case in cases.items():
        for finding in check(case.config(models, tmp_path / name)).findings:
            assert bool(finding.fix) == (finding.status != "ok"), (name, finding)
            assert finding.fix == "" or (finding.fix.endswith(".") and "\n" not in finding.fix), (name, finding)
            assert "\n" not in finding.text
