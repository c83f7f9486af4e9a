"""Heads while they learn compute what they will compute when they draft."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from transformers import LlamaConfig

from foresay.drafters.heads.dflash_model import DFlashModel
from foresay.drafters.heads.eagle_model import EagleModel
from foresay.drafters.heads.lesson import Lesson, judge
from foresay.drafters.heads.loss import soft_cross_entropy
from foresay.drafters.heads.medusa_model import MedusaModel
from foresay.drafters.heads.peagle_model import PEagleModel
from foresay.drafters.training.run import packed
from foresay.drafters.training.shapes import dflash_shape, eagle_shape
from foresay.drafters.training.teacher import Teacher
from foresay.kvpaging import PageTable
from foresay.spec.protocols import FeatureRequest
from foresay.verifier.heads.kind import kind_of
from foresay.verifier.heads.medusa import MedusaHeads
from foresay.verifier.model.decoder import Decoder
from tests.heads.plain import PlainEagle
from tests.heads.plain_dflash import PlainDFlash
from tests.same_tokens.heads import load_dflash, load_eagle
from tests.verifier.reading import Reader, load_decoder, random_tokens


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
    assert head.config.aux == (2, 3, 6)
    assert (head.token_ids is None) == (draft == 290)
    tokens = random_tokens(random.Random(2), 20, 290)
    lesson = teacher.lesson(torch.tensor([tokens]), model.needs)
    weights = {name.removeprefix("midlayer."): tensor for name, tensor in model.published().items()}
    plain = PlainEagle({**model.config("t")}, weights, teacher.embedding, weights["lm_head.weight"])
    fused = plain.fuse([lesson.features[name][0] for name in model.needs])
    with torch.no_grad():
        found = [model.lm_head(hidden)[0] for hidden, _ in model._passes(lesson)]
    for row in (0, 7, 14):
        states = fused[: row + 1]
        for number, logits in enumerate(found):
            expected, out = plain(torch.tensor(tokens[1 : row + 2 + number]), states)
            assert torch.allclose(logits[row], expected[-1], rtol=1e-3, atol=1e-3), (row, number)
            states = torch.cat((states, out[-1:]))


@pytest.mark.parametrize("draft", [290, 150])
def test_a_peagle_head_drafts_as_it_learned(decoder, teacher, tmp_path, draft) -> None:
    """The masks behind each row guess what the published head's do behind the text up to there."""
    ids = torch.randperm(290, generator=torch.Generator().manual_seed(1))[:draft].sort().values
    model = PEagleModel(eagle_shape(teacher.config, draft), teacher.embedding, ids, teacher.lm_head, passes=4)
    stirred(model)
    publish(model, tmp_path, "model.safetensors")
    assert kind_of(tmp_path) == "eagle"
    head = load_eagle(tmp_path, decoder)
    assert (head.config.mask, head.config.guesses, head.config.aux) == (289, 4, (2, 3, 6))
    tokens = random_tokens(random.Random(2), 20, 290)
    lesson = teacher.lesson(torch.tensor([tokens]), model.needs)
    weights = {name.removeprefix("layers.0."): tensor for name, tensor in model.published().items()}
    layer: Any = model.config("t")["transformer_layer_config"]
    plain = PlainEagle({**layer, "draft_vocab_size": draft}, weights, teacher.embedding, weights["lm_head.weight"])
    fused, mask = (
        plain.fuse(features)
        for features in (
            [lesson.features[name][0] for name in model.needs],
            list(weights["mask_hidden"].flatten().chunk(3)),
        )
    )
    with torch.no_grad():
        found = [model.lm_head(hidden)[0] for hidden, _ in model._passes(lesson)]
    for row in (0, 7, 14):
        hidden = torch.cat((fused[: row + 1], mask.expand(3, -1)))
        expected, _ = plain(torch.tensor([*tokens[1 : row + 2], *[289] * 3]), hidden)
        for number, logits in enumerate(found):
            assert torch.allclose(logits[row], expected[row + number], rtol=1e-3, atol=1e-3), (row, number)


def test_a_dflash_head_drafts_as_it_learned(decoder, teacher, tmp_path) -> None:
    """Each block, wherever it begins, is what the published head computes behind the text before it."""
    shape = dflash_shape(teacher.config, layers=2, guesses=4)
    model = DFlashModel(shape, teacher.embedding, teacher.lm_head)
    stirred(model)
    publish(model, tmp_path, "model.safetensors")
    head = load_dflash(tmp_path, decoder)
    assert head.config.guesses == 4 and head.config.needs.layers == shape.layers
    tokens = random_tokens(random.Random(2), 24, 290)
    lesson = teacher.lesson(torch.tensor([tokens]), model.needs)
    features = torch.cat([lesson.features[name][0] for name in model.needs], dim=-1)
    weights = model.published()
    config = {**model.config("t"), "rope_theta": shape.rope_theta}
    plain = PlainDFlash(config, weights, teacher.embedding, teacher.lm_head, mask=shape.mask_token_id)
    for first in (1, 3):
        with torch.no_grad():
            found = [states @ teacher.lm_head.T for states, _ in model._guesses(lesson, first)]
        for block, anchor in enumerate(range(first, len(tokens) - 5, 5)):
            expected = plain(features[:anchor], tokens[anchor], 5)
            for depth, logits in enumerate(found):
                assert torch.allclose(logits[0, block], expected[depth], rtol=1e-3, atol=1e-3), (anchor, depth)


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
        for loss in model.losses(Lesson(tokens, {"final": hidden}, logits)):
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
    for number, (hidden, about) in enumerate(model._passes(lesson)):
        logits = model.lm_head(hidden)
        wanted = lesson.logits[0, about]
        rows = [r for r in range(len(wanted)) if int(wanted[r].argmax()) % 2 == 0]
        assert 0 < len(rows) < len(wanted)
        chances = wanted[rows][:, ids].softmax(-1)
        total += 0.8**number * float(-(chances * logits[0, rows].log_softmax(-1)).sum(-1).mean().detach())
    assert float(loss.detach()) == pytest.approx(total, rel=1e-4)


def test_a_perfect_head_is_judged_perfect() -> None:
    rows = 3 * torch.randn(400, 30, generator=torch.Generator().manual_seed(0))
    same = judge(rows, rows, torch.Generator().manual_seed(1))
    assert (same.greedy, same.sampled) == (1.0, 1.0)
    other = judge(rows.roll(1, dims=0), rows, torch.Generator().manual_seed(1))
    assert other.greedy < 0.3
    assert other.greedy < other.sampled < 0.7, "the noise alone brings some draws together"
    assert other.loss > same.loss


@pytest.mark.parametrize("counted", [False, True])
def test_the_fused_loss_is_the_plain_one(counted) -> None:
    """Value and gradients, over several pieces of rows."""
    torch.manual_seed(0)
    hidden, weight = torch.randn(3, 200, 16, requires_grad=True), torch.randn(50, 16, requires_grad=True)
    chances = torch.randn(3, 200, 50).softmax(dim=-1)
    counts = torch.rand(3, 200) < 0.3 if counted else torch.ones(3, 200, dtype=torch.bool)
    rows = -(chances * (hidden @ weight.T).log_softmax(dim=-1)).sum(dim=-1)
    plain = rows[counts].mean()
    ours = soft_cross_entropy(hidden, weight, chances, counts if counted else None)
    assert torch.allclose(ours, plain, rtol=1e-5)
    expected = torch.autograd.grad(2.0 * plain, (hidden, weight))
    found = torch.autograd.grad(2.0 * ours, (hidden, weight))
    for mine, theirs in zip(found, expected, strict=True):
        assert torch.allclose(mine, theirs, rtol=1e-4, atol=1e-7)


def test_a_loss_over_no_rows_is_zero() -> None:
    hidden = torch.randn(4, 8, requires_grad=True)
    loss = soft_cross_entropy(hidden, torch.randn(9, 8), torch.rand(4, 9), torch.zeros(4, dtype=torch.bool))
    loss.backward()
    assert float(loss.detach()) == 0.0
    assert hidden.grad is not None
    assert not hidden.grad.any()


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_text_ends_where_the_target_ends_it(teacher, temperature) -> None:
    """But an end token in the prompt (a chat has some) ends nothing."""
    (end,) = teacher._end_tokens
    prompts = [[end, 5 + number, end] for number in range(64)]
    texts = teacher.write(prompts, 200, temperature, torch.Generator().manual_seed(0))
    assert [text[:3].tolist() for text in texts] == prompts
    for text in texts:
        written = text[3:].tolist()
        assert written
        assert end not in written[:-1]
        assert len(text) == 200 or written[-1] == end
    if temperature:
        assert sum(len(text) < 200 for text in texts) > 5
    else:
        lesson = teacher.lesson(texts[0][None], ())
        assert lesson.logits[0, 2:-1].argmax(dim=-1).tolist() == texts[0][3:].tolist()


def test_texts_are_packed_into_whole_rows() -> None:
    texts = [torch.arange(5), torch.arange(10, 14), torch.arange(20, 25)]
    assert packed(texts, 6).tolist() == [[0, 1, 2, 3, 4, 10], [11, 12, 13, 20, 21, 22]]
    assert packed(texts[:1], 6).tolist() == [[0, 1, 2, 3, 4, 0]], "too little text comes again"


@pytest.mark.parametrize("layers", range(1, 20))
def test_the_layers_of_a_shallow_target_are_read_as_they_were_meant(layers) -> None:
    """A published list that begins with 1 names outputs, and ours names inputs."""
    chosen = eagle_shape(LlamaConfig(num_hidden_layers=layers), 100).layers
    assert chosen[0] != 1
    assert 0 <= min(chosen) <= max(chosen) < layers or layers < 3
