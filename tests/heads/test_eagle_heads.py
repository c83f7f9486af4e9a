"""EAGLE heads from every published layout compute, over pages, what the plain implementation does without."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from foresay.drafters.eagle import PEagleDrafter
from foresay.kvpaging import KVStore, PagePool, PageTable
from foresay.spec.protocols import FeatureRequest, Features, Rows
from foresay.spec.sample import Noise
from foresay.spec.sampling import SamplingParams
from foresay.spec.sequence import SequenceState
from foresay.verifier.graphs.state import BatchSlot, StepState
from foresay.verifier.heads.config import HeadConfig
from foresay.verifier.heads.layouts import kind_of
from foresay.verifier.heads.paged import EagleHead
from foresay.verifier.model.config import kv_shapes
from foresay.verifier.model.errors import ModelError
from tests.heads.published import EAGLE, draft_ids, make_eagle
from tests.heads.writing import change_config
from tests.same_tokens.heads import load_eagle as load
from tests.verifier.reading import Reader, random_tokens


def features_of(target, tokens: list[int], needs: FeatureRequest) -> Features:
    """The target's features of a whole text."""
    reader = Reader(target)
    return reader.model.run([reader.rows(PageTable(reader.pool), tokens)], needs).features


class Rig:
    """A head with a store of its own, fed with one text."""

    def __init__(self, head: EagleHead, tokens: list[int], features: Features, page_size: int = 16) -> None:
        self.head, self.tokens = head, tokens
        self.pool = PagePool(17, page_size)
        self.table = PageTable(self.pool)
        self.table.reserve(len(tokens) + 20)
        layer = head.layer
        self.store = KVStore(self.pool, kv_shapes(layer), head.dtype)
        self.hidden = head.fuse(features)

    def text(self, start: int, stop: int):
        """Rows start .. stop - 1, each with the feature before it."""
        rows = Rows(self.table, torch.tensor(self.tokens[start:stop]), start)
        return self.run(rows, self.hidden[start - 1 : stop - 1])

    def run(self, rows: Rows, hidden):
        logits, states = self.head.run([rows], hidden.clone(), self.store)
        return logits, states


@pytest.mark.parametrize("layout", EAGLE)
def test_every_layout_gives_the_same_logits(target, tmp_path, layout) -> None:
    """Over the whole text at once and in pieces, across page borders."""
    model = target("llama2")
    plain = make_eagle(tmp_path, model, layout)
    assert kind_of(tmp_path) == "eagle"
    head, ids = load(tmp_path, model), draft_ids(tmp_path)
    assert (head.token_ids is None) == (ids is None)
    assert head.token_ids is None or ids is None or head.token_ids.equal(ids)
    tokens = random_tokens(random.Random(3), 45, 300)
    features = features_of(model, tokens, head.config.needs)
    assert set(features) == set(head.config.names)
    fused = plain.fuse([features[name] for name in head.config.names])
    expected, states = plain(torch.tensor(tokens[1:]), fused[:-1])
    for borders in ((1, 45), (1, 2, 3, 16, 17, 40, 45)):
        rig = Rig(head, tokens, features)
        found = [rig.text(start, stop) for start, stop in itertools.pairwise(borders)]
        assert torch.allclose(torch.cat([logits for logits, _ in found]), expected, rtol=0, atol=2e-4)
        assert torch.allclose(torch.cat([state for _, state in found]), states, rtol=0, atol=2e-4)


def test_slot_0_is_not_seen(target, tmp_path) -> None:
    make_eagle(tmp_path, target("llama2"), "safeailab")
    head = load(tmp_path, target("llama2"))
    tokens = random_tokens(random.Random(3), 20, 300)
    rig = Rig(head, tokens, features_of(target("llama2"), tokens, head.config.needs))
    before, _ = rig.text(1, 20)
    for part, number in zip(rig.store.tensors, (3.0, 5.0), strict=True):
        part[:, rig.table.slots(0, 1)] = number
    after, _ = rig.text(1, 20)
    assert torch.equal(before, after)


@pytest.mark.parametrize(
    ("ids", "layers"),
    [
        (None, (2, 3, 3)),
        ([2, 3, 5], (2, 3, 5)),
        ([1, 3, 5], (2, 4, 6)),  # the first id is 1: outputs of layers, as SGLang counts
        ([0, 2, 6], (0, 2, 6)),
    ],
)
def test_layers_are_counted_as_the_checkpoint_does(target, tmp_path, ids, layers) -> None:
    make_eagle(tmp_path, target("llama2"), "safeailab", ids)
    assert HeadConfig.read(tmp_path, target("llama2").config).layers == layers


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"target_hidden_size": 32}, r"config\.json: made for a hidden size of 32, but the target's is 64"),
        ({"kv_lora_rank": 16}, r"config\.json: multi-head latent attention \(kv_lora_rank\) is not supported"),
        ({"speculators_model_type": "mtp"}, r"a head of type mtp is not supported; supported: eagle, eagle3"),
        ({"parallel_drafting": True}, r"a head that drafts in parallel \(parallel_drafting\) is not supported"),
        ({"vocab_size": 320}, r"config\.json: made for a vocabulary of 320, but the target's is 300"),
        ({"draft_vocab_size": 77}, r"d2t has shape \[150\], expected \[77\]"),
        ({"eagle_aux_hidden_state_layer_ids": [2, 9, 11]}, r"is \[2, 9, 11\], but the target has 6 layers"),
        ({"eagle_aux_hidden_state_layer_ids": "2"}, r"must be a list of layer numbers, got '2'"),
        (
            {"eagle_aux_hidden_state_layer_ids": [2, 4]},
            r"fc\.weight reads 192 numbers, but the target gives 2 features",
        ),
        ({"norm_before_fc": True}, r"input_norm\.weight is missing"),
        ({"hidden_size": 32}, r"embed_tokens\.weight is missing, and the target's is 64 wide where the head is 32"),
    ],
)
def test_what_does_not_fit_is_named(target, tmp_path, changes, message) -> None:
    make_eagle(tmp_path, target("llama2"), "safeailab")
    change_config(tmp_path, **changes)
    with pytest.raises(ModelError, match=message):
        load(tmp_path, target("llama2"))


def test_a_shallow_target_needs_the_layers_named(target, tmp_path) -> None:
    make_eagle(tmp_path, target("llama2"), "safeailab")
    config = target("llama2").config
    shallow = replace(config, stack=replace(config.stack, layers=config.stack.layers[:3]))
    with pytest.raises(ModelError, match="a target of 3 layers has no default layers"):
        HeadConfig.read(tmp_path, shallow)


def without_a_norm(stored) -> None:
    del stored["pre_lm_head_layernorm.weight"]


def without_the_bias(stored) -> None:
    del stored["fusion_fc.bias"]


def mapped_to(change):
    def changed(stored) -> None:
        stored["d2t"] = change(stored["d2t"].clone())

    return changed


def with_another_mask(stored) -> None:
    stored["t2d"] = stored["t2d"].roll(1)


@pytest.mark.parametrize(
    ("layout", "change", "message"),
    [
        ("speculators_eagle1_norms", without_a_norm, r"model\.norm\.weight is missing"),
        ("speculators_eagle1", without_the_bias, r"fc\.bias is missing"),
        ("safeailab", mapped_to(lambda d2t: d2t + 300), r"d2t names tokens that the target does not have"),
        ("safeailab", mapped_to(lambda d2t: -(torch.arange(150) == 7).long()), r"names a token .* twice"),
        ("safeailab", mapped_to(lambda d2t: d2t.fill_(0)), r"d2t and t2d name different tokens of the target"),
        ("safeailab", with_another_mask, r"d2t and t2d name different tokens of the target"),
        ("safeailab", lambda stored: stored.pop("d2t"), r"d2t is missing, but the draft vocabulary has 150 tokens"),
        ("safeailab", lambda stored: stored.pop("lm_head.weight"), r"lm_head\.weight is missing"),
        ("eagle1", lambda stored: stored.update(extra=torch.zeros(1)), r"extra: not known in this layout"),
    ],
)
def test_tensors_that_do_not_fit_are_named(target, tmp_path, layout, change, message) -> None:
    make_eagle(tmp_path, target("llama2"), layout)
    stored = load_file(tmp_path / "model.safetensors")
    change(stored)
    save_file(stored, tmp_path / "model.safetensors")
    with pytest.raises(ModelError, match=rf"model\.safetensors: .*{message}"):
        load(tmp_path, target("llama2"))


def follow_masks(model, head: EagleHead, guesses: Callable[[Features, list[int], int], Tensor]) -> None:
    """P-EAGLE behind texts of every length, alone and three at a time; a row of true features, then masks.

    guesses: the logits of so many levels, given the features of a text's tokens but the last, and its tokens.
    """
    pool, levels = PagePool(40, 16), 5
    drafter, rng, sequences, expected = PEagleDrafter(head, pool), random.Random(8), [], []
    for length in (2, 4, 37):
        tokens, table = random_tokens(rng, length, 300), PageTable(pool)
        features = features_of(model, tokens[:-1], head.config.needs)
        table.reserve(length + levels)
        drafter.keep(features, torch.arange(length - 1), table.slots(0, length - 1))
        drafter._start(SequenceState("", tokens, 1, SamplingParams(), table, Noise(1, 300), 9, frozenset()))
        if length > levels + 1:
            rows = Rows(table, torch.tensor(tokens[1 : length - levels]), 1, logits="none")
            head.run([rows], drafter.rows[table.slots(0, length - levels - 1)], drafter.store)
        sequences.append(BatchSlot(table.pages, length - 1, tokens, SamplingParams(), 0))
        expected.append(guesses(features, tokens, levels))
    for together in ([0], [1], [2], [0, 1, 2]):
        state = StepState(len(together), 4, 16, drafter.reach(levels), "cpu")
        state.join([sequences[number] for number in together])
        logits = head.logits(drafter.guesses(state, levels)).view(levels, len(together), -1)
        for position, number in enumerate(together):
            assert torch.allclose(logits[:, position], expected[number], rtol=0, atol=1e-4), together


def test_rows_of_masks_guess_as_published(target, tmp_path) -> None:
    model = target("llama2")
    plain = make_eagle(tmp_path, model, "peagle")
    head = load(tmp_path, model)
    assert head.config.guesses == 8
    mask = plain.fuse(list(plain.weights["mask_hidden"].flatten().chunk(3)))

    def guesses(features: Features, tokens: list[int], levels: int) -> Tensor:
        fused = plain.fuse([features[name] for name in head.config.names])
        hidden = torch.cat((fused, mask.expand(levels - 1, -1)))
        return plain(torch.tensor([*tokens[1:], *[7] * (levels - 1)]), hidden)[0][-levels:]

    follow_masks(model, head, guesses)
