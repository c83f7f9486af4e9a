"""DFlash heads from every published layout guess, over pages, what the plain implementation does without."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from foresay.drafters.parallel import DFlashDrafter, DSparkDrafter
from foresay.kvpaging import PagePool, PageTable
from foresay.spec.sampling import SamplingParams
from foresay.spec.tree import TreeShape
from foresay.verifier.graphs.state import BatchSlot, StepState
from foresay.verifier.heads.config import HeadConfig
from foresay.verifier.heads.layouts import kind_of
from foresay.verifier.heads.paged import DFlashHead
from foresay.verifier.model.decoder import Decoder
from foresay.verifier.model.errors import ModelError
from tests.combinations import alternating
from tests.heads.plain_dflash import BLOCK, DFLASH, DSPARK, MASK, make_dflash
from tests.heads.writing import change_config, output_matrix
from tests.same_tokens.heads import Whisper, load_dflash
from tests.same_tokens.models import engine_of
from tests.same_tokens.runs import jobs_of, plain, whole
from tests.same_tokens.witness import stepped
from tests.verifier.families import make
from tests.verifier.reading import Reader, load_decoder, random_tokens

#: Changes to a target.
SIZES: list[dict[str, int]] = [{}, {"hidden_size": 144, "num_attention_heads": 6, "num_key_value_heads": 3}]


@pytest.fixture(scope="module", params=SIZES)
def target(request, tmp_path_factory) -> Decoder:
    """Random targets of two sizes."""
    directory = tmp_path_factory.mktemp("target")
    make("llama3", directory, num_hidden_layers=6, **request.param)
    return load_decoder(directory)


def features_of(target: Decoder, head: DFlashHead, tokens: list[int]) -> Tensor:
    """[R, F]: what the head is fed of a text that is read at once."""
    reader = Reader(target)
    found = reader.model.run([reader.rows(PageTable(reader.pool), tokens)], head.config.needs).features
    return torch.cat([found[name] for name in head.config.names], dim=-1)


def guessed(drafter: DFlashDrafter, sequences, levels: int) -> Tensor:
    """fp32[S, levels, V']: what the drafter's pages say of the sequences now; nothing of it stays."""
    pages = max(len(sequence.table.pages) for sequence in sequences)
    state = StepState(len(sequences), pages, sequences[0].table.pool.page_size, 1, "cpu")
    state.join([BatchSlot(s.table.pages, s.table.length, s.tokens[-1:], s.sampling, 0) for s in sequences])
    logits = drafter.head.logits(drafter.states(state, levels))
    return logits.view(levels, len(sequences), -1).transpose(0, 1)


class Watched:
    """An engine whose drafter is asked for a whole block of every sequence after every step."""

    def __init__(self, target, head: DFlashHead, oracle: Callable[[Tensor, int], Tensor], texts, **options) -> None:
        made: list[DFlashDrafter] = []

        def drafter(pool: PagePool) -> Whisper:
            made.append(DFlashDrafter(head, pool))
            return Whisper(made[0], texts)

        self.engine = engine_of(target, drafter, TreeShape.parse("3,2,1"), **options)
        self.target, self.head, self.oracle, self.drafter = target, head, oracle, made[0]
        self.batches, self.accepted, self.rejected = set[int](), 0, 0

    def run(self, jobs) -> int:
        compared = 0
        for deltas in stepped(self.engine, jobs):
            self.accepted += sum(delta.accepted for delta in deltas)
            self.rejected += sum(delta.drafted - delta.accepted for delta in deltas)
            compared += self._compare()
        return compared

    def _compare(self) -> int:
        levels = self.head.config.guesses
        ready = [s for s in self.engine.scheduler.running if not s.pending and self.drafter.able(s)]
        for sequence in ready:
            sequence.table.reserve(levels + 1)
        if not ready:
            return 0
        self.batches.add(len(ready))
        found = guessed(self.drafter, ready, levels)
        for sequence, logits in zip(ready, found, strict=True):
            features = features_of(self.target, self.head, sequence.tokens[:-1])
            expected = self.oracle(features, sequence.tokens[-1])
            assert torch.allclose(logits, expected, rtol=0, atol=1e-4), sequence.table.length
        return len(ready)


@pytest.mark.parametrize(("target", "layout"), alternating(SIZES, DFLASH), ids=str, indirect=["target"])
def test_every_position_of_a_block_is_the_published_one(target, tmp_path, layout) -> None:
    """From the start, behind accepted and rejected runs, prompts in chunks, in batches of three."""
    oracle = make_dflash(tmp_path, target, layout)
    assert kind_of(tmp_path) == "dflash"
    head = load_dflash(tmp_path, target)
    assert head.config.guesses == BLOCK - (layout != "sliding")
    jobs = jobs_of(target.config.vocab_size, (30, 1, 20), 24)
    texts = whole(jobs, plain(target, jobs))
    watched = Watched(target, head, oracle, texts, chunk=24)
    assert watched.run([replace(job, arrives=2 * index) for index, job in enumerate(jobs)]) > 20
    assert watched.accepted and watched.rejected and 3 in watched.batches


def test_a_prefix_hit_brings_what_was_injected(target, tmp_path) -> None:
    oracle = make_dflash(tmp_path, target)
    (job,) = jobs_of(target.config.vocab_size, (49,), 24)
    texts = whole([job], plain(target, [job]))
    watched = Watched(target, load_dflash(tmp_path, target), oracle, texts | {"again": texts[job.id]}, prefix=True)
    watched.run([job])
    assert watched.run([replace(job, id="again")]) > 1
    assert watched.engine.prefix is not None and watched.engine.prefix.hits


def test_transformers_computes_the_same(target, tmp_path) -> None:
    """Its own model of that layout, on the whole text at once."""
    from transformers import MuseGlimmerAssistantConfig, MuseGlimmerAssistantModel

    oracle = make_dflash(tmp_path, target, "transformers")
    head = load_dflash(tmp_path, target)
    own = {key: value for key, value in oracle.config.items() if key not in ("model_type", "vocab_size", "rope_theta")}
    rope = {"rope_type": "default", "rope_theta": 10_000.0}
    config = MuseGlimmerAssistantConfig(
        **own, rope_parameters=rope, block_size=BLOCK, mask_token_id=MASK, target_layer_ids=[0, 4]
    )
    model = MuseGlimmerAssistantModel(config).eval()
    names = {"fc.weight": "encoder.fc.weight", "hidden_norm.weight": "encoder.output_norm_enc.weight"}
    model.load_state_dict({names.get(name, name): tensor for name, tensor in oracle.weights.items()})
    tokens = random_tokens(random.Random(4), 40, target.config.vocab_size)
    features = features_of(target, head, tokens[:-1])
    embedded = target.embedding[torch.tensor([tokens[-1], *[MASK] * (BLOCK - 1)])]
    with torch.no_grad():
        states = model(noise_embeds=embedded[None], context_hidden_states=features[None]).last_hidden_state[0, 1:]
    expected = states @ output_matrix(target).T
    assert torch.allclose(oracle(features, tokens[-1]), expected, rtol=0, atol=1e-4)


def follow_paths(target, head: DFlashHead, below: Callable[[Tensor, list[int]], Tensor]) -> None:
    """DSpark along random paths, below two nodes of each level, each with the state of the node it hangs on.

    below: the logits below each token of a path, given the text's features, [R, F].
    """
    pool, rng = PagePool(20, 16), random.Random(6)
    drafter = DSparkDrafter(head, pool)
    tokens = random_tokens(rng, 30, target.config.vocab_size)
    table = PageTable(pool)
    table.reserve(30 + BLOCK)
    found = Reader(target)
    features = found.model.run([found.rows(PageTable(found.pool), tokens[:-1])], head.config.needs).features
    drafter.keep(features, torch.arange(29), table.slots(0, 29))
    state = StepState(1, len(table.pages), 16, 1, "cpu")
    state.join([BatchSlot(table.pages, 29, tokens[-1:], SamplingParams(), 0)])
    flat = torch.cat([features[name] for name in head.config.names], dim=-1)
    paths = [[tokens[-1], *random_tokens(rng, BLOCK - 1, target.config.vocab_size)] for _ in range(2)]
    expected = [below(flat, path) for path in paths]
    logits, states = drafter.begin(state, BLOCK)
    for depth in range(BLOCK):
        for row, wanted in zip(logits, expected, strict=False):
            assert torch.allclose(row, wanted[depth], rtol=0, atol=1e-4), depth
        if depth + 1 < BLOCK:
            front = torch.tensor([[path[depth + 1] for path in paths]])
            if states is not None and len(states) < 2:
                states = states.expand(2, -1)
            logits, states = drafter._moved(front, depth + 1, states)


@pytest.mark.parametrize("layout", list(DSPARK))
def test_logits_below_a_token_are_dsparks(target, tmp_path, layout) -> None:
    oracle = make_dflash(tmp_path, target, layout)
    head = load_dflash(tmp_path, target)
    assert head.config.guesses == BLOCK
    follow_paths(target, head, lambda features, path: oracle.below(features, path, DSPARK[layout]))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"architectures": ["DFlash2DraftModel"]}, "DFlash2"),
        ({"architectures": ["Gemma4DSparkModel"]}, "DSpark head with Gemma 4.s layers"),
        ({"dflash_config": {"mask_token_id": 7, "target_layer_ids": [0, 9]}}, "target_layer_ids is \\[0, 9\\]"),
        ({"dflash_config": {"mask_token_id": 7, "projector_type": "domino"}}, "type domino"),
        ({"dflash_config": {"mask_token_id": 999, "target_layer_ids": [0, 4]}}, "mask_token_id is 999"),
        ({"num_target_layers": 9}, "a target of 9 layers"),
        ({"block_size": 1}, "block_size"),
        ({"vocab_size": 5}, "a vocabulary of 5"),
        ({"is_causal": None, "dflash_config": {"mask_token_id": 7, "target_layer_ids": [0]}}, "reads other layers"),
    ],
)
def test_what_it_cannot_compute_is_refused_by_name(target, tmp_path, changes, message) -> None:
    make_dflash(tmp_path, target)
    change_config(tmp_path, **changes)
    with pytest.raises(ModelError, match=message):
        load_dflash(tmp_path, target)


def test_layers_that_nobody_names_are_the_authors_choice(target, tmp_path) -> None:
    make_dflash(tmp_path, target)
    change_config(tmp_path, dflash_config={"mask_token_id": MASK})
    assert HeadConfig.read(tmp_path, target.config).names == ("layer.2", "layer.4")
