"""Heads on targets that scale embeddings, scale or cap logits, or norm after their branches."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from foresay.kvpaging import PageTable
from foresay.spec.protocols import FeatureRequest, Features
from foresay.verifier.heads.medusa import MedusaHeads
from foresay.verifier.model.decoder import Decoder
from foresay.verifier.model.errors import ModelError
from tests.heads.plain import medusa_logits
from tests.heads.plain_dflash import make_dflash
from tests.heads.published import BLOCKS, make_eagle, make_medusa
from tests.heads.test_dflash_heads import Watched
from tests.heads.test_eagle_heads import Rig
from tests.heads.writing import change_config
from tests.same_tokens.heads import load_dflash, load_eagle
from tests.same_tokens.runs import jobs_of, plain, whole
from tests.verifier.families import make
from tests.verifier.reading import Reader, load_decoder, random_tokens

#: By what each multiplies its embeddings and its logits, and at what it caps these (tests/verifier/families.py).
TARGETS: dict[str, tuple[float, float, float | None]] = {
    "gemma2": (math.sqrt(64), 1.0, 3.0),
    "granite": (3.0, 1 / 0.7, None),
    "olmo2": (1.0, 1.0, None),
    "cohere2": (1.0, 0.6, None),
    "muse_glimmer": (1.0, 0.19611613513818404, 20.0),
    "gemma4_embedded": (math.sqrt(64), 1.0, 3.0),
}
LAYERS = ["sliding_attention", "full_attention"] * 3


@dataclass
class Made:
    """A target of six layers, as transformers has it too."""

    family: str
    theirs: Any
    decoder: Decoder

    @property
    def embedding(self) -> Tensor:
        weight: Tensor = self.theirs.get_input_embeddings().weight.detach()
        return weight * TARGETS[self.family][0]

    def finished(self, products: Tensor) -> Tensor:
        _, scale, cap = TARGETS[self.family]
        return products * scale if cap is None else cap * (products * scale / cap).tanh()

    @torch.no_grad()
    def features(self, tokens: list[int], names: tuple[str, ...]) -> Features:
        """What transformers' hidden states are before each layer; the last ones are normed."""
        states = self.theirs(torch.tensor([tokens]), output_hidden_states=True).hidden_states
        return {name: states[-1 if name == "final" else int(name.partition(".")[2])][0] for name in names}


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Made]:
    @cache
    def target(family: str) -> Made:
        directory: Path = tmp_path_factory.mktemp(family)
        layers: dict[str, Any] = (
            {"layer_types": LAYERS} if family in ("cohere2", "gemma2", "muse_glimmer", "gemma4_embedded") else {}
        )
        layers |= {"layer_rope_theta": [10_000.0, 0] * 3} if family == "muse_glimmer" else {}
        theirs = make(family, directory, num_hidden_layers=6, **layers)
        return Made(family, theirs, load_decoder(directory))

    return target


@pytest.mark.parametrize("family", TARGETS)
@pytest.mark.parametrize("layout", ["target_output", "safeailab", "eagle1"])
def test_an_eagle_head_computes_on_any_target(made, tmp_path, family, layout) -> None:
    """Its embedding is scaled as the target's; its logits are finished where the output matrix is the target's."""
    target = made(family)
    oracle = make_eagle(tmp_path, target.decoder, layout, None if layout == "eagle1" else [2, 3, 5])
    oracle.embed = target.embedding
    head = load_eagle(tmp_path, target.decoder)
    tokens = random_tokens(random.Random(3), 45, 300)
    features = target.features(tokens, head.config.names)
    products, states = oracle(torch.tensor(tokens[1:]), oracle.fuse([features[n] for n in head.config.names])[:-1])
    expected = products if layout == "safeailab" else target.finished(products)
    logits, found = Rig(head, tokens, features).text(1, 45)
    assert torch.allclose(logits, expected, rtol=0, atol=2e-4)
    assert torch.allclose(found, states, rtol=0, atol=2e-4)


@pytest.mark.parametrize("family", TARGETS)
def test_a_dflash_head_drafts_for_any_target(made, tmp_path, family) -> None:
    """Over a whole run, with features from the target's own passes: logits as the plain ones, and tokens as without."""
    target = made(family)
    oracle = make_dflash(tmp_path, target.decoder)
    oracle.embed = target.embedding
    jobs = jobs_of(300, (30, 1, 20), 24)
    texts = whole(jobs, plain(target.decoder, jobs))

    def below(features: Tensor, root: int) -> Tensor:
        logits: Tensor = target.finished(oracle(features, root))
        return logits

    watched = Watched(target.decoder, load_dflash(tmp_path, target.decoder), below, texts, chunk=24)
    assert watched.run([replace(job, arrives=2 * number) for number, job in enumerate(jobs)]) > 20
    assert watched.accepted and watched.rejected


@pytest.mark.parametrize("family", TARGETS)
def test_the_features_are_the_streams_before_layers(made, family) -> None:
    """After the last layer's final sum, where norms come after branches."""
    target = made(family)

    tokens, reader = random_tokens(random.Random(4), 30, 300), Reader(target.decoder)
    found = reader.model.run([reader.rows(PageTable(reader.pool), tokens)], FeatureRequest(True, (0, 2, 5))).features
    for name, rows in target.features(tokens, ("layer.0", "layer.2", "layer.5", "final")).items():
        assert torch.allclose(found[name], rows, rtol=1e-4, atol=1e-4), name


@pytest.mark.parametrize("family", ["gemma2", "granite"])
def test_medusa_heads_that_share_the_output_matrix_finish_their_logits(made, tmp_path, family) -> None:
    target = made(family)
    oracle, _ = make_medusa(tmp_path, target.decoder, "tied_output")
    hidden = torch.randn(5, 64, generator=torch.Generator().manual_seed(0))
    found = MedusaHeads.load(tmp_path, target.decoder)(hidden, 1)
    assert torch.allclose(found, target.finished(medusa_logits(oracle, 1, BLOCKS, hidden)), rtol=0, atol=1e-4)


@pytest.mark.parametrize(
    ("family", "own", "wrong"),
    [
        ("gemma2", {"input_embedding_scale": 8.0, "final_logit_softcapping": 3.0}, {"final_logit_softcapping": 30.0}),
        ("granite", {"input_embedding_scale": 3.0, "output_multiplier": 1 / 0.7}, {"input_embedding_scale": 8.0}),
    ],
)
def test_scales_that_a_head_was_made_for_must_be_the_targets(made, tmp_path, family, own, wrong) -> None:
    target = made(family).decoder
    make_dflash(tmp_path, target)
    change_config(tmp_path, dflash_config={"mask_token_id": 7, "target_layer_ids": [0, 4], **own})
    load_dflash(tmp_path, target)
    change_config(tmp_path, **wrong, dflash_config={"mask_token_id": 7, "target_layer_ids": [0, 4]})
    with pytest.raises(ModelError, match=f"{next(iter(wrong))} is .*, but the target's is"):
        load_dflash(tmp_path, target)


def test_matrices_of_its_own_are_scaled_by_the_heads_factors(made, tmp_path) -> None:
    target, scales = made("granite"), {"input_embedding_scale": 3.0, "output_multiplier": 1 / 0.7}
    oracle = make_eagle(tmp_path, target.decoder, "tied", [2, 3, 5])
    change_config(tmp_path, **scales)
    head = load_eagle(tmp_path, target.decoder)
    tokens = random_tokens(random.Random(3), 20, 300)
    features = target.features(tokens, head.config.names)
    oracle.embed = oracle.embed * 3.0
    products, _ = oracle(torch.tensor(tokens[1:]), oracle.fuse([features[name] for name in head.config.names])[:-1])
    logits, _ = Rig(head, tokens, features).text(1, 20)
    assert torch.allclose(logits, products / 0.7, rtol=0, atol=2e-4)
