"""A text that passes what a head was trained on is mentioned once in the log, and goes on as before."""

from __future__ import annotations

import logging

import pytest

from foresay.drafters.eagle import EagleDrafter
from foresay.kvpaging import PagePool
from foresay.spec.tree import TreeShape
from tests.heads.published import make_eagle
from tests.heads.writing import change_config
from tests.same_tokens.heads import load_eagle as load
from tests.same_tokens.models import engine_of
from tests.same_tokens.runs import assert_same, jobs_of, plain
from tests.same_tokens.witness import run


@pytest.mark.parametrize(("longest", "lines"), [(40, 1), (512, 0)])
def test_it_is_logged_once(target, tmp_path, caplog, longest, lines) -> None:
    make_eagle(tmp_path, target("llama2"), "safeailab")
    change_config(tmp_path, max_position_embeddings=longest)
    head = load(tmp_path, target("llama2"))

    def made(pool: PagePool) -> EagleDrafter:
        return EagleDrafter(head, pool)

    jobs = jobs_of(300, (30, 33), 20)
    with caplog.at_level(logging.WARNING, logger="foresay.drafters"):
        texts = run(engine_of(target("llama2"), made, TreeShape.parse("2,2")), jobs)
    assert_same(plain(target("llama2"), jobs), texts)
    assert (
        caplog.messages
        == ["a text has passed 40 tokens, the longest the eagle3 head was trained on: it may guess worse from here on"]
        * lines
    )
