"""The speculators package itself makes random heads; ours draft what its own modelling code computes.

The package pins an older transformers than Foresay is tested with, so it stands in an environment of its own
(``pip install --no-deps speculators==0.9.0``, then what it asks for); elsewhere these are skipped.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from foresay.spec.protocols import Features
from foresay.verifier.heads.layouts import kind_of
from tests.heads.test_dflash_heads import Watched, follow_paths
from tests.heads.test_eagle_heads import follow_masks
from tests.same_tokens.heads import load_dflash, load_eagle
from tests.same_tokens.runs import jobs_of, plain, whole
from tests.verifier.families import make
from tests.verifier.reading import load_decoder

pytest.importorskip("speculators", reason="the speculators package is not installed")

from speculators import SpeculatorsConfig, VerifierConfig
from speculators.models.dflash import DFlashSpeculatorConfig
from speculators.models.dflash.core import DFlashDraftModel
from speculators.models.dspark import DSparkSpeculatorConfig
from speculators.models.dspark.core import DSparkDraftModel
from speculators.models.peagle import PEagleSpeculatorConfig
from speculators.models.peagle.core import PEagleDraftModel
from speculators.proposals.greedy import GreedyTokenProposalConfig
from transformers import LlamaConfig, Qwen3Config

CLASSES: dict[str, Any] = {
    "dflash": (DFlashSpeculatorConfig, DFlashDraftModel),
    "dspark": (DSparkSpeculatorConfig, DSparkDraftModel),
    "peagle": (PEagleSpeculatorConfig, PEagleDraftModel),
}
BLOCK, MASK, INPUTS = 6, 7, (1, 5)
WINDOW = {"sliding_window": 400, "use_sliding_window": True}
#: What each head declares besides the defaults.
DFLASH: dict[str, dict[str, Any]] = {
    "whole vocabulary": {},
    "part of it": {"part": True},
    "sliding": {"layer_types": ["sliding_attention"] * 2, **WINDOW},
    "sliding, not causal": {
        "layer_types": ["sliding_attention", "full_attention"], **WINDOW, "sliding_window_non_causal": True,
    },
    "from the anchor": {"sample_from_anchor": True},
}  # fmt: skip
SIZES: list[dict[str, int]] = [{}, {"hidden_size": 144, "num_attention_heads": 6, "num_key_value_heads": 3}]


@pytest.fixture(scope="module", params=SIZES, ids=["small", "larger"])
def target(request, tmp_path_factory) -> tuple[Any, Path]:
    directory = tmp_path_factory.mktemp("target")
    make("llama3", directory, num_hidden_layers=6, **request.param)
    return load_decoder(directory), directory


def made(
    kind: str, target: tuple[Any, Path], out: Path, part: bool = False, layer: Any = Qwen3Config, **own: Any
) -> Any:
    """A random head's model; ``out`` holds what the package saves of it. part: it guesses half of the vocabulary."""
    decoder, directory = target
    torch.manual_seed(3)
    vocab, width = decoder.config.vocab_size, decoder.config.hidden_size
    inner = {key: own.pop(key) for key in ("layer_types", *WINDOW) if key in own}
    config = layer(
        vocab_size=vocab, hidden_size=width, intermediate_size=2 * width, num_attention_heads=4, num_key_value_heads=2,
        head_dim=width // 4, max_position_embeddings=512, rms_norm_eps=1e-5, num_hidden_layers=2, **inner,
    )  # fmt: skip
    config._attn_implementation = "eager"
    pairing = SpeculatorsConfig(
        algorithm=kind,
        proposal_methods=[GreedyTokenProposalConfig(speculative_tokens=BLOCK)],
        default_proposal_method="greedy",
        verifier=VerifierConfig.from_pretrained(str(directory)),
    )
    shape, model_class = CLASSES[kind]
    common = {"draft_vocab_size": vocab // 2 if part else vocab, "mask_token_id": MASK, "speculators_config": pairing}
    model = model_class(shape(transformer_layer_config=config, **common, **own))
    if part:
        ids = torch.randperm(vocab)[: vocab // 2].sort().values
        known = torch.zeros(vocab, dtype=torch.bool).index_fill(0, ids, True)
        model.load_vocab_mappings(known, ids - torch.arange(len(ids)))
    model.load_verifier_weights()
    for name, parameter in model.named_parameters():
        if not any(word in name for word in ("verifier", "embed", "lm_head")):
            stirred(parameter)
    model.save_pretrained(out)
    return model.float().eval()


def stirred(parameter: Tensor) -> None:
    """Norms stay near one; matrices are of a size that lets every part of the head matter."""
    if parameter.ndim == 1:
        parameter.data.add_(0.2 * torch.randn_like(parameter))
    else:
        parameter.data.copy_(1.5 * torch.randn_like(parameter) / parameter.shape[-1] ** 0.5)


class Package:
    """The package's own block behind a text: a block of which the text's next position is the only anchor."""

    def __init__(self, model: Any) -> None:
        self.model = model

    @torch.no_grad()
    def __call__(self, features: Tensor, root: int, below: list[int] | None = None) -> Tensor:
        """Logits of the rows that guess. features: [R, F]. below: DSpark's, the tokens behind the root."""
        count, block = len(features), self.model.block_size
        tokens = torch.tensor([[*[0] * count, root, *(below or []), *[0] * 2 * block]])[:, : count + 2 * block]
        counts = torch.zeros_like(tokens).index_fill(1, torch.tensor([count]), 1)
        hidden = torch.cat((features, torch.zeros(2 * block, features.shape[-1])))[None]
        last = torch.zeros(1, tokens.shape[1], self.model.hidden_size)
        states: Tensor
        logits: Tensor
        states, logits, *_ = self.model._backbone_forward(
            hidden, tokens, counts, last, torch.zeros_like(tokens), max_anchors=1
        )
        if below is not None:
            path = tokens[:, count : count + block]
            bias: Tensor = self.model.markov_head.block_bias(prev_token_ids=path, hidden_states=states)
            return (logits + bias)[0]
        return logits[0, 0 if self.model.config.sample_from_anchor else 1 :]


@pytest.mark.parametrize("layout", list(DFLASH))
def test_dflash_blocks_are_the_packages(target, tmp_path, layout) -> None:
    """At the start, behind accepted and rejected runs, in batches of three, and behind a prefix hit."""
    decoder, _ = target
    own: dict[str, Any] = {"block_size": BLOCK, "aux_hidden_state_layer_ids": list(INPUTS), **DFLASH[layout]}
    oracle = Package(made("dflash", target, tmp_path, **own))
    assert kind_of(tmp_path) == "dflash"
    jobs = jobs_of(decoder.config.vocab_size, (30, 1, 20, 49), 16)
    texts = whole(jobs, plain(decoder, jobs))
    again = texts | {"again": texts[jobs[-1].id]}
    watched = Watched(decoder, load_dflash(tmp_path, decoder), oracle, again, chunk=24, prefix=True)
    assert watched.run([replace(job, arrives=index) for index, job in enumerate(jobs)]) > 15
    assert watched.accepted and watched.rejected and 3 in watched.batches
    assert watched.run([replace(jobs[-1], id="again")]) > 1
    assert watched.engine.prefix is not None and watched.engine.prefix.hits


@pytest.mark.parametrize("kind", ["vanilla", "gated", "rnn"])
@pytest.mark.parametrize("part", [False, True])
def test_logits_below_a_token_are_the_packages(target, tmp_path, kind, part) -> None:
    """DSpark, along two random paths."""
    decoder, _ = target
    own: dict[str, Any] = {
        "block_size": BLOCK,
        "aux_hidden_state_layer_ids": list(INPUTS),
        "markov_rank": 8,
        "markov_head_type": kind,
    }
    oracle = Package(made("dspark", target, tmp_path, part, **own))
    assert kind_of(tmp_path) == "dflash"
    follow_paths(decoder, load_dflash(tmp_path, decoder), lambda features, path: oracle(features, path[0], path[1:]))


@pytest.mark.parametrize("layer", [LlamaConfig, Qwen3Config])
def test_rows_of_masks_are_the_packages(target, tmp_path, monkeypatch, layer) -> None:
    """P-EAGLE: the package's training pass, of which the text's last position is the only rollout."""
    decoder, _ = target
    own: dict[str, Any] = {"eagle_aux_hidden_state_layer_ids": [2, 3, 5]}
    # Its loss has kernels that need a GPU; the logits are taken before it.
    monkeypatch.setattr("speculators.models.peagle.core.compute_metrics", lambda **_: (None, {}))
    model, made_of = made("peagle", target, tmp_path, layer=layer, **own), list[Tensor]()
    model.lm_head.register_forward_hook(lambda module, inputs, output: made_of.append(output[0]))
    head = load_eagle(tmp_path, decoder)
    assert kind_of(tmp_path) == "eagle" and head.config.guesses == BLOCK

    def guesses(features: Features, tokens: list[int], levels: int) -> Tensor:
        count = len(tokens) - 1
        positions = torch.cat((torch.arange(count), torch.full((levels - 1,), count - 1)))
        depths = torch.cat((torch.zeros(count, dtype=torch.int64), torch.arange(1, levels)))
        monkeypatch.setattr(
            "speculators.models.peagle.core.generate_cod_sample_indices", lambda **_: (positions, depths)
        )
        behind = torch.zeros(levels, 3 * model.hidden_size)
        hidden = torch.cat((torch.cat([features[name] for name in head.config.names], dim=-1), behind))[None]
        ids = torch.tensor([[*tokens[1:], *[0] * levels]])
        last = torch.zeros(*ids.shape, model.hidden_size)
        with torch.no_grad(), torch.compiler.set_stance("force_eager"):
            model(hidden, ids, torch.zeros_like(ids), verifier_last_hidden_states=last, num_depths=levels)
        return made_of.pop()[-levels:]

    follow_masks(decoder, head, guesses)
