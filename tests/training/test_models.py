"""Heads while they learn compute what they will compute when they draft."""

from __future__ import annotations

import json
import random
from dataclasses import replace

import pytest
import torch
from safetensors.torch import save_file

from drafters.heads.eagle_model import EagleModel
from drafters.heads.lesson import Lesson, judge
from drafters.heads.medusa_model import MedusaModel
from kvpaging import PageTable
from server.training.run import eagle_shape
from server.training.teacher import Teacher
from spec.protocols import FeatureRequest
from tests.heads.plain import PlainEagle
from tests.same_tokens.heads import load_eagle
from tests.verifier.reading import Reader, load_decoder, random_tokens
from verifier.heads.medusa import MedusaHeads
from verifier.model.decoder import Decoder


@pytest.fixture(scope="module")
def decoder(target) -> Decoder:
    return load_decoder(target)


@pytest.fixture(scope="module")
def teacher(target) -> Teacher:
    return Teacher(target, "cpu", torch.float32)


def stirred(model: torch.nn.Module) -> None:
    """Move every weight, so that nothing is zero or one by construction."""
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn(parameter.shape, generator=generator))


def test_the_teachers_features_are_those_the_engine_hands_out(decoder, teacher) -> None:
    tokens = random_tokens(random.Random(1), 40, 290)
    reader = Reader(decoder)
    forward = reader.model.run([reader.rows(PageTable(reader.pool), tokens)], FeatureRequest(True, (0, 3, 6)))
    lesson = teacher.lesson(torch.tensor([tokens]), ["final", "layer.0", "layer.3", "layer.6"])
    assert torch.allclose(lesson.logits[0], forward.logits, atol=1e-3)
    for name, rows in forward.features.items():
        assert torch.allclose(lesson.features[name][0], rows, rtol=1e-3, atol=1e-3), name


def publish(model, directory, file: str) -> None:
    directory.mkdir(exist_ok=True)
    save_file({name: tensor.contiguous() for name, tensor in model.published().items()}, directory / file)
    (directory / "config.json").write_text(json.dumps(model.config("t")))


@pytest.mark.parametrize("draft", [290, 150])
def test_an_eagle_head_drafts_as_it_learned(decoder, teacher, tmp_path, draft) -> None:
    """Each pass of the training-time test is what the head, run on its own states over the true text, computes."""
    ids = torch.randperm(290, generator=torch.Generator().manual_seed(1))[:draft].sort().values
    model = EagleModel(eagle_shape(teacher.config, draft), teacher.embedding, ids, teacher.lm_head, passes=4)
    stirred(model)
    publish(model, tmp_path, "model.safetensors")
    head = load_eagle(tmp_path, decoder)
    assert head.config.aux == (2, 3, 4)
    assert (head.token_ids is None) == (draft == 290)
    tokens = random_tokens(random.Random(2), 20, 290)
    lesson = teacher.lesson(torch.tensor([tokens]), model.needs)
    weights = {name.removeprefix("midlayer."): tensor for name, tensor in model.published().items()}
    plain = PlainEagle({**model.config("t")}, weights, teacher.embedding, weights["lm_head.weight"])
    fused = plain.fuse([lesson.features[name][0] for name in model.needs])
    with torch.no_grad():
        found = [logits[0] for logits, _ in model._passes(lesson)]
    for row in (0, 7, 14):
        states = fused[: row + 1]
        for number, logits in enumerate(found):
            expected, out = plain(torch.tensor(tokens[1 : row + 2 + number]), states)
            assert torch.allclose(logits[row], expected[-1], rtol=1e-3, atol=1e-3), (row, number)
            states = torch.cat((states, out[-1:]))


def test_medusa_heads_draft_as_they_learned(decoder, teacher, tmp_path) -> None:
    model = MedusaModel(teacher.lm_head, 3)
    tokens = torch.tensor([random_tokens(random.Random(2), 20, 290)])
    lesson = teacher.lesson(tokens, model.needs)
    assert torch.allclose(model(lesson.features["final"], 2), lesson.logits, atol=1e-3), "a fresh head is the target's"
    stirred(model)
    publish(model, tmp_path, "medusa_lm_head.safetensors")
    heads = MedusaHeads.load(tmp_path, decoder)
    assert len(heads) == 3
    for depth in range(3):
        ours = model(lesson.features["final"][0], depth)
        assert torch.allclose(ours, heads(lesson.features["final"][0], depth), atol=1e-3)


def test_each_medusa_head_learns_about_its_own_token() -> None:
    """Text that counts: the target is sure of the next token, and so can each head be of its own."""
    torch.manual_seed(0)
    vocab, width = 12, 12
    tokens = (torch.arange(40) % vocab).expand(4, -1)
    hidden, logits = torch.eye(vocab)[tokens], 20.0 * torch.eye(vocab)[(tokens + 1) % vocab]
    model = MedusaModel(torch.randn(vocab, width), 3)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    for _ in range(60):
        for loss in model.losses(Lesson(tokens, {"final": hidden}, logits, torch.ones(4, 40))):
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    for head in range(3):
        guesses = model(torch.eye(vocab), head).argmax(-1)
        assert guesses.tolist() == [(token + 2 + head) % vocab for token in range(vocab)]


def test_rows_that_no_draft_token_could_guess_do_not_count(teacher) -> None:
    ids = torch.arange(0, 290, 2)
    model = EagleModel(eagle_shape(teacher.config, 145), teacher.embedding, ids, teacher.lm_head, passes=2)
    lesson = teacher.lesson(torch.tensor([random_tokens(random.Random(2), 30, 290)]), model.needs)
    (loss,) = model.losses(lesson)
    total = 0.0
    for number, (logits, about) in enumerate(model._passes(lesson)):
        wanted = lesson.logits[0, about]
        rows = [r for r in range(len(wanted)) if int(wanted[r].argmax()) % 2 == 0]
        assert 0 < len(rows) < len(wanted)
        chances = wanted[rows][:, ids].softmax(-1)
        total += 0.8**number * float(-(chances * logits[0, rows].log_softmax(-1)).sum(-1).mean().detach())
    assert float(loss.detach()) == pytest.approx(total, rel=1e-4)


def test_a_perfect_head_is_judged_perfect() -> None:
    rows = 3 * torch.randn(400, 30, generator=torch.Generator().manual_seed(0))
    every = torch.ones(400)
    same = judge(rows, rows, every, torch.Generator().manual_seed(1))
    assert (same.greedy, same.sampled) == (1.0, 1.0)
    other = judge(rows.roll(1, dims=0), rows, every, torch.Generator().manual_seed(1))
    assert other.greedy < 0.3
    assert other.greedy < other.sampled < 0.7, "the noise alone brings some draws together"
    assert other.loss > same.loss
    half = judge(torch.cat((rows[:200], -rows[200:])), rows, (torch.arange(400) < 200).float(), torch.Generator())
    assert half.greedy == 1.0, "rows that do not count are not judged"


@pytest.mark.parametrize("kind", ["medusa", "eagle3"])
def test_what_stands_behind_the_end_of_a_text_teaches_nothing(teacher, kind) -> None:
    model = (
        MedusaModel(teacher.lm_head, 2)
        if kind == "medusa"
        else EagleModel(eagle_shape(teacher.config, 290), teacher.embedding, torch.arange(290), teacher.lm_head, 2)
    )
    tokens = torch.tensor([random_tokens(random.Random(2), 30, 290)])
    losses = []
    for behind in (5, 77):
        ended = tokens.clone()
        ended[:, 20:] = -1
        lesson = teacher.lesson(ended, model.needs)
        noisy = lesson.logits.clone()
        noisy[:, 20:] = behind
        losses.append([float(loss.detach()) for loss in model.losses(replace(lesson, logits=noisy))])
    assert losses[0] == losses[1]


def test_a_text_ends_where_the_target_ends_it(teacher) -> None:
    """But an end token in the prompt (a chat has some) ends nothing."""
    (end,) = teacher._end_tokens
    text = teacher.write([[end, 5, end]] * 64, 200, torch.Generator().manual_seed(0))
    assert (text[:, 3] >= 0).all()
    ended = 0
    for row in text.tolist():
        first = row.index(end, 3) if end in row[3:] else 199
        assert min(row[: first + 1]) >= 0
        assert set(row[first + 1 :]) <= {-1}
        ended += first < 199
    assert ended > 5
