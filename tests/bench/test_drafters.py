"""The comparison of drafters: what its figures mean, and a whole run with real engines."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch

from bench import __main__, record
from bench.decode import summary
from bench.drafters import APART, check_nodes, with_gains
from bench.drive import BadMode, Options, Run
from bench.experiment import Case, Sample, Taken
from foresay.drafters.training.teacher import Teacher
from foresay.spec.trace import Statistics
from tests.bench import head_files
from tests.same_tokens.test_directories import write_tokenizer
from tests.verifier.families import make

VOCAB = 290


def finished(tokens: int, drafted: list[int], accepted: list[int]) -> Run:
    """A run whose steps drafted and accepted so many tokens."""
    reached = [sum(number > depth for number in accepted) for depth in range(max(accepted))]
    empty: dict[str, Any] = {"cached_tokens": 0, "discarded": 0, "preemptions": 0, "num_spec_tokens": 4}
    statistics = Statistics(
        prompt_tokens=1, completion_tokens=tokens, steps=len(drafted), drafted=sum(drafted), accepted=sum(accepted),
        drafted_per_depth=[2, 1], accepted_per_depth=reached, acceptance_histogram=[1], seconds={},
        time_to_first_token=0.1, decode_seconds=1.0, decode_tokens_per_second=1.0, per_step_drafted=drafted,
        per_step_accepted=accepted, **empty,
    )  # fmt: skip
    run = Run(list(range(tokens)), 1.0)
    run.statistics = statistics
    return run


def test_figures() -> None:
    runs = {
        ("m", "a"): finished(9, [0, 4, 4, 4], [0, 3, 2, 0]),
        ("m", "b"): finished(3, [0, 4], [0, 1]),
        ("m" + APART, "a"): finished(9, [0] + [4] * 8, [0] * 9),
        ("m" + APART, "b"): finished(3, [0, 4, 4], [0] * 3),
    }
    taken = [
        Taken(variant, Case("", name), 0, Sample({"tokens_per_step": run.tokens_per_step}, detail=run))
        for (variant, name), run in runs.items()
    ]
    got, apart = summary(taken[:2]), summary(taken[2:])
    assert got["tokens_per_step"].ratio == pytest.approx(12 / 6)
    assert got["nodes_per_step"] == pytest.approx(16 / 4)
    assert got["accepted_given_parent"] == pytest.approx([3 / 4, 2 / 3, 1 / 2])
    assert apart["tokens_per_step"].ratio == pytest.approx(1.0)
    groups = with_gains(taken, {"": {"m": {}, "m" + APART: {}}})
    assert groups[""]["m"]["gain"].ratio == pytest.approx(math.sqrt((9 / 4) * (3 / 2)))
    assert with_gains(taken[:2], {"": {"m": {}}}) == {"": {"m": {}}}


def test_too_many_nodes() -> None:
    options = Options("T", "D")
    check_nodes(["none", "draft_model:16,15"], options, 32)
    with pytest.raises(BadMode, match="33 nodes"):
        check_nodes(["none", "draft_model:16,16"], options, 32)


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random target with a tokenizer."""
    directory = tmp_path_factory.mktemp("target")
    make("llama2", directory, num_hidden_layers=3, vocab_size=VOCAB)
    write_tokenizer(directory, VOCAB)
    (directory / "tokenizer_config.json").write_text('{"tokenizer_class": "PreTrainedTokenizerFast"}')
    return directory


def test_a_whole_run(target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    teacher = Teacher(target, "cpu", torch.float32)
    matrices = teacher.embedding, teacher.lm_head
    with torch.enable_grad():
        for kind in ("medusa", "eagle3", "dflash"):
            head = head_files.random_head(kind, matrices, torch.arange(0, VOCAB, 2), (1, 2))
            head_files.write(tmp_path / kind, head, torch.float32)
    (tmp_path / "prompts.jsonl").write_text('{"text": "the quick brown fox"}\n{"text": "says the lazy dog"}\n')
    flags = ["--target", str(target), "--draft", str(target), "--medusa", str(tmp_path / "medusa")]
    flags += ["--eagle3", str(tmp_path / "eagle3"), "--dflash", str(tmp_path / "dflash")]
    flags += ["--prompts", str(tmp_path / "prompts.jsonl")]
    flags += ["--modes", "none", "ngram:3", "draft_model:2", "medusa:3,2", "eagle3:3,2,2", "dflash:3"]
    flags += ["--dtype", "float32", "--max-tokens", "12", "--seeds", "1"]
    monkeypatch.setattr(record, "RESULTS", tmp_path / "results")
    assert __main__.main(["drafters", *flags]) == 0
    entry = json.loads(next((tmp_path / "results").glob("*-drafters.json")).read_text())
    for temperature in ("0", "1"):
        found = entry["groups"][f"temperature {temperature}"]
        assert list(found)[:6] == ["none", "ngram:3", "draft_model:2", "medusa:3,2", "eagle3:3,2,2", "dflash:3"]
        assert found["none"]["tokens_per_step"]["ratio"] == 1.0
        # The draft model is the target itself, so all it drafts is right: 12 tokens in a prompt's and four more steps.
        assert found["draft_model:2"]["tokens_per_step"]["ratio"] == pytest.approx(12 / 5)
        assert found["draft_model:2"]["accepted_given_parent"] == [1.0, pytest.approx(1.0, abs=0.3)]
        assert found["eagle3:3,2,2"]["nodes_per_step"] > 0
    at_1 = entry["groups"]["temperature 1"]
    shared, apart = at_1["draft_model:2"], at_1["draft_model:2" + APART]
    assert apart["tokens_per_step"]["ratio"] < shared["tokens_per_step"]["ratio"] and shared["gain"]["ratio"] > 1
    assert not any(APART in name for name in entry["groups"]["temperature 0"]), "where no noise is"
