"""The same tokens from engines built as the server builds them, with heads from directories and flags."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from foresay.server.engine.build import build_engine
from foresay.server.engine.drafters.models import DraftModel
from foresay.server.engine.drafters.registry import find
from foresay.server.settings.resolved import choose_draft
from foresay.spec.errors import ConfigurationError
from foresay.verifier.model.errors import NoSuchModel
from tests.heads.assistants import CLUSTERED, make_assistant
from tests.heads.published import make_eagle, make_medusa
from tests.same_tokens.models import Pair
from tests.same_tokens.runs import assert_same, jobs_of, plain
from tests.same_tokens.test_directories import config, witnessed, write_tokenizer
from tests.same_tokens.witness import Text, run

LENGTHS = (9, 70, 33, 1, 20, 40)


@pytest.fixture(scope="module")
def directory(pair) -> Path:
    """A target with a tokenizer, and heads of every kind for it."""
    models: Pair = pair("smollm")
    write_tokenizer(models.directory, 290)
    root = models.directory.parent
    make_medusa(root / "medusa", models.target, "authors")
    make_eagle(root / "eagle3", models.target, "specforge", [0, 1, 3])
    make_eagle(root / "speculators", models.target, "speculators", [0, 1, 3])
    make_eagle(root / "eagle1", models.target, "eagle1")
    return root


@pytest.fixture(scope="module")
def expected(pair, directory) -> dict[str, Text]:
    return plain(pair("smollm").target, jobs_of(300, LENGTHS, 20))


@pytest.mark.parametrize(
    ("draft", "name", "changes"),
    [
        ("medusa:{}/medusa", "medusa", {"draft_tree": "4,4,2"}),
        ("{}/medusa", "medusa", {"draft_tokens": 7}),
        ("eagle3:{}/eagle3", "eagle3", {"draft_tree": "4,4,2,2,1"}),
        ("{}/speculators", "eagle3", {"draft_tokens": 3, "max_seqs": 1}),
        ("eagle:{}/eagle1", "eagle", {"draft_tree": "3,2,1", "prefix_cache": False}),
        ("{}/eagle1", "eagle", {"draft_tokens": 4}),
        ("{}/eagle1,ngram", "combined", {}),
    ],
)
def test_every_way_to_name_a_head(directory, expected, draft, name, changes) -> None:
    engine = witnessed(build_engine(config(directory / "target", draft.format(directory), **changes)))
    assert engine.info.exact, engine.info.exact_reason
    assert engine.drafter is not None
    assert engine.drafter.name == name
    jobs = [replace(job, arrives=2 * index) for index, job in enumerate(jobs_of(300, LENGTHS, 20))]
    assert_same(expected, run(engine, jobs))
    again = [replace(job, id=f"{job.id}-again") for job in jobs]
    assert_same({job.id: expected[job.id.removesuffix("-again")] for job in again}, run(engine, again))
    engine.check()


def test_what_is_no_head_is_refused(directory) -> None:
    with pytest.raises(ConfigurationError, match=r"--draft medusa:.*target holds no head"):
        find(f"medusa:{directory}/target")
    with pytest.raises(ConfigurationError, match=r"--draft medusa:.*eagle3 holds eagle heads"):
        find(f"medusa:{directory}/eagle3")
    with pytest.raises(NoSuchModel, match="no such file or directory"):
        find("eagle3:/nowhere/at/all")
    assert isinstance(find(str(directory / "target")), DraftModel)


@pytest.fixture(scope="module")
def assisted(pair) -> Path:
    """A Gemma 4 with a tokenizer, and an assistant beside it."""
    models: Pair = pair("gemma4", layers=4)
    write_tokenizer(models.directory, 290)
    make_assistant(models.directory.parent / "target-assistant", models.target.config, **CLUSTERED)
    return models.directory.parent


@pytest.mark.parametrize(
    ("draft", "name", "changes"),
    [
        ("{}/target-assistant", "mtp", {"draft_tokens": 4}),
        ("mtp:{}/target-assistant", "mtp", {"draft_tree": "4,4,2,2,1"}),
        ("{}/target-assistant", "mtp", {"draft_tree": "3,2,1", "kv_dtype": "int8"}),
        ("{}/target-assistant,ngram", "combined", {"max_seqs": 1}),
        ("auto", "combined", {}),
        ("{}/target-assistant > self:int8", "self", {"draft_tokens": 6}),
    ],
)
def test_every_way_to_name_an_assistant(pair, assisted, draft, name, changes) -> None:
    """``auto`` takes the one whose directory is called after the target's."""
    jobs = [replace(job, arrives=2 * index) for index, job in enumerate(jobs_of(300, LENGTHS, 20))]
    engine = witnessed(build_engine(config(assisted / "target", draft.format(assisted), **changes)))
    assert engine.info.exact, engine.info.exact_reason
    assert engine.drafter is not None and engine.drafter.name == name
    wanted = plain(pair("gemma4", layers=4).target, jobs, kv=torch.int8 if "kv_dtype" in changes else None)
    for turn in ("", "-again"):
        texts = run(engine, [replace(job, id=f"{job.id}{turn}") for job in jobs])
        assert_same({f"{name}{turn}": text for name, text in wanted.items()}, texts)
    if name != "combined":  # a budget soon finds that a random one is not worth it
        assert sum(text.statistics.drafted for text in texts.values() if text.statistics) > 40
    engine.check()


def test_auto_leaves_out_an_assistant_that_was_made_for_another_target(assisted, tmp_path) -> None:
    shutil.copytree(assisted, tmp_path / "both")
    file = tmp_path / "both" / "target-assistant" / "config.json"
    found = config(tmp_path / "both" / "target", "auto")
    assert choose_draft(found).value.startswith("mtp:")
    file.write_text(json.dumps(json.loads(file.read_text()) | {"backbone_hidden_size": 1024}))
    assert not choose_draft(found).value.startswith("mtp")
