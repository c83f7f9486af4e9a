"""Heads while they learn compute what they will compute when they draft."""

from __future__ import annotations

import json
import random
from dataclasses import replace
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers import LlamaConfig

from foresay.drafters.heads.dflash_model import DFlashModel
from foresay.drafters.heads.eagle_model import EagleModel, PEagleModel
from foresay.drafters.heads.medusa_model import MedusaModel
from foresay.drafters.heads.training_batch import TrainingBatch, evaluate, soft_cross_entropy
from foresay.drafters.training.shapes import dflash_shape, eagle_shape
from foresay.drafters.training.teacher import Example, Teacher, TrainingBatches
from foresay.kvpaging import KVStore, PagePool, PageTable
from foresay.spec.protocols import FeatureRequest, Features
from foresay.spec.sampling import SamplingParams
from foresay.verifier.graphs.state import BatchSlot, StepState
from foresay.verifier.heads.layouts import kind_of
from foresay.verifier.heads.medusa import MedusaHeads
from foresay.verifier.heads.paged import DFlashHead, MaskBlock
from foresay.verifier.model.config import kv_shapes
from foresay.verifier.model.decoder import Decoder
from tests.heads.plain import PlainEagle
from tests.heads.plain_dflash import PlainDFlash
from tests.heads.test_eagle_heads import Rig
from tests.same_tokens.heads import load_dflash, load_eagle
from tests.same_tokens.test_directories import write_tokenizer
from tests.verifier.families import make
from tests.verifier.reading import Reader, load_decoder, random_tokens


@pytest.mark.parametrize("family", ["gemma2", "granite"])
def test_targets_that_scale_and_cap_teach_their_own_logits(tmp_path, family) -> None:
    """And heads draft for them as they learned: one with an output matrix of its own, and one that shares theirs."""
    theirs = make(family, tmp_path / "target", num_hidden_layers=6, vocab_size=290)
    write_tokenizer(tmp_path / "target", 290)
    (tmp_path / "target" / "tokenizer_config.json").write_text('{"tokenizer_class": "PreTrainedTokenizerFast"}')
    teacher, decoder = Teacher(tmp_path / "target", "cpu", torch.float32), load_decoder(tmp_path / "target")
    tokens, ids = random_tokens(random.Random(2), 24, 290), torch.arange(290)
    eagle = EagleModel(eagle_shape(teacher.config, 290), teacher.embedding, ids, teacher.lm_head, passes=1)
    block = DFlashModel(dflash_shape(teacher.config, 2, 4, 290), teacher.embedding, ids, teacher.lm_head)
    batch = teacher.make_batch([Example(torch.tensor(tokens), 0)], (*eagle.needs, *block.needs))
    with torch.no_grad():
        assert torch.allclose(logits_of(batch), theirs(batch.tokens).logits, atol=1e-4)
    for model, name in ((eagle, "eagle"), (block, "block")):
        stirred(model)
        publish(model, tmp_path / name, "model.safetensors")
    with torch.no_grad():
        ((hidden, _),) = eagle._passes(batch, 1)
        guesses = [batch.cap_logits(block.lm_head(states))[0, 1] for states, _ in block._guesses(batch, 1)]
    features = {key: rows[0] for key, rows in batch.features.items()}
    found, _ = Rig(load_eagle(tmp_path / "eagle", decoder), tokens, features).text(1, 23)
    assert torch.allclose(found, eagle.lm_head(hidden)[0].detach(), rtol=0, atol=1e-3)
    assert torch.allclose(
        block_at(load_dflash(tmp_path / "block", decoder), features, tokens, 6), torch.stack(guesses), atol=1e-3
    )


def block_at(head: DFlashHead, features: Features, tokens: list[int], anchor: int) -> Tensor:
    """The logits of a block's guesses about what comes behind a token of a text."""
    pool = PagePool(4, 16)
    table, store = PageTable(pool), KVStore(pool, kv_shapes(head.layer), head.dtype)
    table.reserve(len(tokens))
    head.inject(features, torch.arange(len(tokens)), table.slots(0, len(tokens)), store)
    state = StepState(1, len(table.pages), 16, 1, "cpu")
    state.join([BatchSlot(table.pages, anchor, [tokens[anchor]], SamplingParams(temperature=0.0), 0)])
    rows = MaskBlock(1, head.config.block, head.config, head.device)
    return head.logits(head.draft_states(rows, state, state.roots.contiguous(), store))


@pytest.fixture(scope="module")
def decoder(target) -> Decoder:
    return load_decoder(target)


@pytest.fixture(scope="module")
def teacher(target) -> Teacher:
    return Teacher(target, "cpu", torch.float32)


def logits_of(batch: TrainingBatch) -> Tensor:
    """fp32[B, T, V]: the target's, of all rows."""
    return batch.cap_logits(batch.features["final"].float() @ batch.output.T)


def stirred(model: torch.nn.Module) -> None:
    """Move every weight, so that nothing is zero or one by construction."""
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for parameter in filter(lambda each: each.requires_grad, model.parameters()):
            parameter.add_(0.1 * torch.randn(parameter.shape, generator=generator))


def test_the_teachers_features_are_those_the_engine_hands_out(decoder, teacher) -> None:
    tokens = random_tokens(random.Random(1), 40, 290)
    reader = Reader(decoder)
    forward = reader.model.run([reader.rows(PageTable(reader.pool), tokens)], FeatureRequest(True, (0, 3, 6)))
    batch = teacher.make_batch([Example(torch.tensor(tokens), 0)], ["final", "layer.0", "layer.3", "layer.6"])
    assert torch.allclose(logits_of(batch)[0], forward.logits, atol=1e-3)
    for name, rows in forward.features.items():
        assert torch.allclose(batch.features[name][0], rows, rtol=1e-3, atol=1e-3), name


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
    assert head.config.layers == (2, 3, 6)
    assert (head.token_ids is None) == (draft == 290)
    tokens = random_tokens(random.Random(2), 20, 290)
    batch = teacher.make_batch([Example(torch.tensor(tokens), 0)], model.needs)
    weights = {name.removeprefix("midlayer."): tensor for name, tensor in model.published().items()}
    plain = PlainEagle({**model.config("t")}, weights, teacher.embedding, weights["lm_head.weight"])
    fused = plain.fuse([batch.features[name][0] for name in model.needs])
    with torch.no_grad():
        found = [model.lm_head(hidden)[0] for hidden, _ in model._passes(batch, model.passes)]
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
    assert (head.config.mask, head.config.guesses, head.config.layers) == (289, 4, (2, 3, 6))
    tokens = random_tokens(random.Random(2), 20, 290)
    batch = teacher.make_batch([Example(torch.tensor(tokens), 0)], model.needs)
    weights = {name.removeprefix("layers.0."): tensor for name, tensor in model.published().items()}
    layer: Any = model.config("t")["transformer_layer_config"]
    plain = PlainEagle({**layer, "draft_vocab_size": draft}, weights, teacher.embedding, weights["lm_head.weight"])
    fused, mask = (
        plain.fuse(features)
        for features in (
            [batch.features[name][0] for name in model.needs],
            list(weights["mask_hidden"].flatten().chunk(3)),
        )
    )
    with torch.no_grad():
        found = [model.lm_head(hidden)[0] for hidden, _ in model._passes(batch, model.passes)]
    for row in (0, 7, 14):
        hidden = torch.cat((fused[: row + 1], mask.expand(3, -1)))
        expected, _ = plain(torch.tensor([*tokens[1 : row + 2], *[289] * 3]), hidden)
        for number, logits in enumerate(found):
            assert torch.allclose(logits[row], expected[row + number], rtol=1e-3, atol=1e-3), (row, number)


@pytest.mark.parametrize("draft", [290, 150])
def test_a_dflash_head_drafts_as_it_learned(decoder, teacher, tmp_path, draft) -> None:
    """Each block, wherever it begins, is what the published head computes behind the text before it."""
    ids = torch.randperm(290, generator=torch.Generator().manual_seed(1))[:draft].sort().values
    shape = dflash_shape(teacher.config, 2, 4, draft)
    model = DFlashModel(shape, teacher.embedding, ids, teacher.lm_head)
    stirred(model)
    publish(model, tmp_path, "model.safetensors")
    head = load_dflash(tmp_path, decoder)
    assert head.config.guesses == 4 and head.config.needs.layers == shape.layers
    assert (head.token_ids is None) == (draft == 290)
    tokens = random_tokens(random.Random(2), 24, 290)
    batch = teacher.make_batch([Example(torch.tensor(tokens), 0)], model.needs)
    features = torch.cat([batch.features[name][0] for name in model.needs], dim=-1)
    weights = model.published()
    config = {**model.config("t"), "rope_theta": shape.rope_theta}
    output = teacher.lm_head if draft == 290 else weights["lm_head.weight"]
    plain = PlainDFlash(config, weights, teacher.embedding, output, mask=shape.mask_token_id)
    for first in (1, 3):
        with torch.no_grad():
            found = [model.lm_head(states) for states, _ in model._guesses(batch, first)]
        for block, anchor in enumerate(range(first, len(tokens) - 5, 5)):
            expected = plain(features[:anchor], tokens[anchor], 5)
            for depth, logits in enumerate(found):
                assert torch.allclose(logits[0, block], expected[depth], rtol=1e-3, atol=1e-3), (anchor, depth)


def test_medusa_heads_draft_as_they_learned(decoder, teacher, tmp_path) -> None:
    model = MedusaModel(teacher.lm_head, 3)
    batch = teacher.make_batch([Example(torch.tensor(random_tokens(random.Random(2), 20, 290)), 0)], model.needs)
    guessed = model(batch.features["final"], 2)
    assert torch.allclose(guessed, logits_of(batch), atol=1e-3), "a fresh head is the target's"
    stirred(model)
    publish(model, tmp_path, "medusa_lm_head.safetensors")
    heads = MedusaHeads.load(tmp_path, decoder)
    assert len(heads) == 3
    for depth in range(3):
        ours = model(batch.features["final"][0], depth)
        assert torch.allclose(ours, heads(batch.features["final"][0], depth), atol=1e-3)


def test_each_medusa_head_learns_about_its_own_token() -> None:
    """Text that counts: the target is sure of the next token, and so can each head be of its own."""
    torch.manual_seed(0)
    vocab, width = 12, 12
    tokens = (torch.arange(40) % vocab).expand(4, -1)
    hidden = torch.eye(vocab)[tokens]
    model = MedusaModel(torch.randn(vocab, width), 3)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    # A target whose features are its tokens, and whose output matrix names the next one.
    output = 20.0 * torch.eye(vocab).roll(1, dims=0)
    for _ in range(60):
        for loss in model.losses(TrainingBatch(tokens, {"final": hidden}, output)):
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    for head in range(3):
        guesses = model(torch.eye(vocab), head).argmax(-1)
        assert guesses.tolist() == [(token + 2 + head) % vocab for token in range(vocab)]


@pytest.mark.parametrize("known", [False, True])
def test_rows_that_no_draft_token_could_guess_do_not_count(teacher, known) -> None:
    ids = torch.arange(0, 290, 2)
    model = EagleModel(eagle_shape(teacher.config, 145), teacher.embedding, ids, teacher.lm_head, passes=2)
    batch = teacher.make_batch([Example(torch.tensor(random_tokens(random.Random(2), 30, 290)), 0)], model.needs)
    if known:
        batch = replace(batch, top_tokens=batch.compute_top_tokens())
    (loss,) = model.losses(batch)
    total = 0.0
    for number, (hidden, about) in enumerate(model._passes(batch, 2)):
        logits = model.lm_head(hidden)
        wanted = logits_of(batch)[0, about]
        rows = [r for r in range(len(wanted)) if int(wanted[r].argmax()) % 2 == 0]
        assert 0 < len(rows) < len(wanted)
        chances = wanted[rows][:, ids].softmax(-1)
        total += 0.8**number * float(-(chances * logits[0, rows].log_softmax(-1)).sum(-1).mean().detach())
    assert float(loss.detach()) == pytest.approx(total, rel=1e-4)


def test_an_eagle_head_learns_its_first_pass_first(teacher) -> None:
    ids = torch.arange(290)
    model = EagleModel(eagle_shape(teacher.config, 290), teacher.embedding, ids, teacher.lm_head, passes=5)
    assert [model.passes_at(done) for done in (0.0, 0.6, 0.61, 0.69, 0.8, 1.0)] == [1, 1, 2, 3, 5, 5]
    batch = teacher.make_batch([Example(torch.tensor(random_tokens(random.Random(2), 30, 290)), 0)], model.needs)
    (first,), (both,) = model.losses(batch, 0.0), model.losses(batch, 0.61)
    assert float(both.detach()) > 1.5 * float(first.detach()), "two losses, the second at 0.8"


def test_a_perfect_head_is_judged_perfect() -> None:
    rows = 3 * torch.randn(400, 30, generator=torch.Generator().manual_seed(0))
    same = evaluate(rows, rows, torch.Generator().manual_seed(1))
    assert (same.greedy, same.sampled) == (1.0, 1.0)
    other = evaluate(rows.roll(1, dims=0), rows, torch.Generator().manual_seed(1))
    assert other.greedy < 0.3
    assert other.greedy < other.sampled < 0.7, "the noise alone brings some draws together"
    assert other.loss > same.loss


@pytest.mark.parametrize("counted", [False, True])
def test_the_fused_loss_is_the_plain_one(counted) -> None:
    """Value and gradients, over several pieces of rows."""
    torch.manual_seed(0)
    hidden, weight = torch.randn(600, 16, requires_grad=True), torch.randn(50, 16, requires_grad=True)
    chances = torch.randn(600, 50).softmax(dim=-1)
    counts = torch.rand(600) < 0.3 if counted else torch.ones(600, dtype=torch.bool)
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
    prompts = [[end, 5 + number, end] for number in range(32)]
    texts = teacher.write(prompts, 120, temperature, torch.Generator().manual_seed(0))
    assert [text.tokens[: text.start].tolist() for text in texts] == prompts
    for text in texts:
        written = text.tokens[text.start :].tolist()
        assert written
        assert end not in written[:-1]
        assert len(text.tokens) == 120 or written[-1] == end
    if temperature:
        assert sum(len(text.tokens) < 120 for text in texts) > 1
    else:
        batch = teacher.make_batch(texts[:1], ())
        assert logits_of(batch)[0, 2:-1].argmax(dim=-1).tolist() == texts[0].tokens[3:].tolist()


def test_what_is_written_does_not_depend_on_the_batch(teacher) -> None:
    prompts = [random_tokens(random.Random(number), 3 + 5 * number, 290) for number in range(4)]
    together = teacher.write(prompts, 40, 0.0, torch.Generator())
    for prompt, text in zip(prompts, together, strict=True):
        (alone,) = teacher.write([prompt], 40, 0.0, torch.Generator())
        shared = min(len(alone.tokens), len(text.tokens))
        assert shared > len(prompt) and text.start == len(prompt)
        assert text.tokens[:shared].tolist() == alone.tokens[:shared].tolist()


def test_rows_about_a_prompt_or_about_nothing_do_not_count(teacher) -> None:
    texts = [Example(torch.tensor(random_tokens(random.Random(n), n, 290)), start) for n, start in ((9, 4), (6, 1))]
    batch = teacher.make_batch(texts, ["layer.3"], room=2)
    assert batch.loss_mask is not None and batch.loss_mask.shape == (2, 11)
    assert [row.nonzero().flatten().tolist() for row in batch.loss_mask] == [[3, 4, 5, 6, 7], [0, 1, 2, 3, 4]]
    assert batch.select(batch.tokens[..., None], slice(0, 11)).shape == (10, 1)
    alone = teacher.make_batch(texts[1:], ["layer.3"])
    assert torch.allclose(batch.features["layer.3"][1, :6], alone.features["layer.3"][0], atol=1e-4)
    assert torch.allclose(batch.target_probs(slice(2, 11))[0][-3:], logits_of(alone)[0, 2:5].softmax(-1), atol=1e-4)


@pytest.mark.parametrize("device", ["cpu", "cpu:0"], ids=["in files", "in memory"])
def test_every_text_comes_once_in_a_round_and_is_read_once(teacher, device, tmp_path, monkeypatch) -> None:
    """A device that is not the CPU, as torch names it, keeps states in its own memory."""
    monkeypatch.setattr(teacher, "device", device)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (1 << 20, 1 << 30))
    in_files = device == "cpu"
    texts = [Example(torch.tensor(random_tokens(random.Random(n), 3 + n % 7, 290)), 1) for n in range(11)]
    batches = TrainingBatches(teacher, texts, ["layer.3"], size=3, room=4)

    def tokens(first: int) -> list[list[int]]:
        found = (batch.tokens.tolist() for batch in (batches.batch_at(step, 5) for step in range(first, first + 4)))
        return sorted(
            row[: -row[::-1].index(next(t for t in row[::-1] if t)) or None] for rows in found for row in rows
        )

    whole = sorted(text.tokens.tolist() for text in texts)
    assert [len(rows) for rows in (tokens(0), tokens(4))] == [11, 11]
    plain = batches.batch_at(3, 5)
    assert batches.keeps_states
    shown: list[int] = []
    for _ in range(1 + in_files):
        batches = TrainingBatches(teacher, texts, ["layer.3"], size=3, room=4)
        batches.read(lambda number: tmp_path / f"{number}.pt", shown.append)
        monkeypatch.setattr(teacher, "states", None)  # nothing is read again
    kept = batches.batch_at(3, 5)
    # text by text, then all of a file at once; or a step's texts at once
    assert shown == ([*range(1, 12), 11, 11] if in_files else [3, 6, 9, 11]) and len(whole) == 11
    assert any(tmp_path.iterdir()) == in_files
    assert torch.equal(kept.tokens, plain.tokens) and torch.equal(kept.loss_mask, plain.loss_mask)  # type: ignore[arg-type]
    counted = plain.loss_mask
    assert counted is not None
    assert torch.allclose(kept.features["layer.3"][counted], plain.features["layer.3"][counted], rtol=0.02, atol=0.02)


@pytest.mark.parametrize("layers", range(1, 20))
def test_the_layers_of_a_shallow_target_are_read_as_they_were_meant(layers) -> None:
    """A published list that begins with 1 names outputs, and ours names inputs."""
    chosen = eagle_shape(LlamaConfig(num_hidden_layers=layers), 100).layers
    assert chosen[0] != 1
    assert 0 <= min(chosen) <= max(chosen) < layers or layers < 3
