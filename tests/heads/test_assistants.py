"""Gemma 4's assistants against transformers': the logits of every level, whose keys they read, what files are refused.

A mutation of how they are wired, which only acceptance would tell otherwise, is seen in the logits.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from foresay.drafters.assistant import AssistantDrafter
from foresay.kvpaging import PageTable
from foresay.server.engine.drafters.heads import Assistant as Entry
from foresay.server.engine.drafters.registry import find
from foresay.spec.protocols import FeatureRequest
from foresay.spec.sampling import SamplingParams
from foresay.verifier.graphs.state import BatchSlot, StepState
from foresay.verifier.heads.assistant import AssistantConfig, AssistantHead
from foresay.verifier.model.config import ModelConfig
from foresay.verifier.model.errors import ConfigError, WeightsError
from foresay.verifier.model.fields import Fields
from tests.heads.assistants import CLUSTERED, KINDS, LAYERS, drafted, make_assistant, read_by_transformers
from tests.poison import poison_store
from tests.verifier.families import make
from tests.verifier.reading import Reader, load_decoder, random_tokens

#: Drafted tokens, one below the other.
BELOW = (5, 17, 250)
#: The kinds of an assistant's last two layers.
KIND = LAYERS[-2:]
#: The families of targets, some layers of which share keys, or none; with the kind of assistant that goes with each.
TARGETS = {"gemma4": "gemma4", "gemma4_unified": "unified"}


@dataclass
class Case:
    """A target and an assistant, as transformers has them and as directories."""

    target: Any
    assistant: Any
    directory: Path
    reader: Callable[[], Reader]

    @property
    def head(self) -> AssistantHead:
        return AssistantHead.load(self.directory / "assistant", self.reader().model.decoder)


@pytest.fixture(scope="module")
def case(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Case]:
    @cache
    def made(family: str, clustered: bool = False, windows: int = 0) -> Case:
        directory = tmp_path_factory.mktemp(family)
        target = make(family, directory / "target")
        decoder = load_decoder(directory / "target")
        more = CLUSTERED if clustered else {}
        assistant = make_assistant(directory / "assistant", decoder.config, TARGETS[family], **more)
        return Case(target, assistant, directory, lambda: Reader(decoder, page_size=8, windows=windows))

    return made


def ours(
    case: Case, tokens: Sequence[int], below: Sequence[int], states: Tensor, kept: Mapping[str, tuple[Tensor, Tensor]]
) -> list[Tensor]:
    """fp32[V] below the root and each further token, as they are drafted after a text that the target has read. states,
    kept: what transformers has of it, which is read instead of the same of ours: rounding adds up in it."""
    reader = case.reader()
    drafter = AssistantDrafter(case.head, reader.model.store)
    state, table = after(reader, drafter, tokens, states)
    own = [one for one in enumerate(reader.model.decoder.config.stack.attentions) if one[1].source is None]
    for kind, (number, node) in {KIND[node.window is None]: (number, node) for number, node in own}.items():
        first = 0 if node.window is None else max(0, table.length - node.window + 1)
        slots = reader.model.store.pages(number).slots(table.slots(first, table.length))
        for mine, its in zip(reader.model.store.layer(number), kept[kind], strict=False):
            assert mine is not None
            theirs = its[0].transpose(0, 1)[first : table.length]
            assert (mine[slots] - theirs).abs().max() < 1e-3
            mine[slots] = theirs
    logits, states = drafter.begin(state, len(below) + 1)
    found = [logits[0]]
    for token in below:
        logits, states = drafter.assistant.paged(
            drafter._rows(state, torch.tensor([[token]])), states, reader.model.store
        )
        found.append(logits[0])
    return found


def after(
    reader: Reader, drafter: AssistantDrafter, tokens: Sequence[int], states: Tensor
) -> tuple[StepState, PageTable]:
    """The state of a step below a text's last token, the others read by the target. states: [R, H], of those."""
    table = reader.open()
    for first in range(0, len(tokens) - 1, 20):
        rows = reader.rows(table, tokens[first : min(first + 20, len(tokens) - 1)])
        final = reader.model.run([rows], FeatureRequest(final=True)).features["final"]
        assert (final[: len(rows.tokens)] - states[first : first + len(rows.tokens)]).abs().max() < 1e-3
        table.commit(len(rows.tokens))
        reader.model.committed(table)
    drafter.last.put(table.pages[-1], table.length - 1, states[table.length - 1])
    table.reserve(8)
    poison_store(reader.model.store)
    state = drafter.state(1, 16, drafter.reach(1))
    state.join([BatchSlot(table.pages, table.length, tokens[-2:], SamplingParams(temperature=0.0), 0)])
    return state, table


def farthest(case: Case, tokens: Sequence[int]) -> float:
    """How far any of our logits is from transformers'; those that get none there get none here."""
    states, kept = read_by_transformers(case.target, tokens[:-1])
    wanted = drafted(case.assistant, case.target, states, kept, tokens, BELOW)
    errors = []
    for mine, its in zip(ours(case, tokens, BELOW, states, kept), wanted, strict=True):
        there = its > its.min() if case.assistant.masked_embedding is not None else torch.ones_like(its).bool()
        assert torch.equal(mine > -torch.inf, there)
        errors.append(float((mine[there] - its[there]).abs().max()))
    return max(errors)


@pytest.mark.parametrize("length", [2, 9, 25, 60])
@pytest.mark.parametrize("clustered", [False, True])
@pytest.mark.parametrize("family", TARGETS)
def test_logits_of_every_level_are_those_of_transformers(case, family, clustered, length) -> None:
    """Of texts shorter and longer than the window of 24."""
    assert farthest(case(family, clustered), random_tokens(random.Random(length), length, 300)) < 1e-4


@pytest.mark.parametrize("family", TARGETS)
def test_where_layers_with_a_window_have_pages_of_their_own(case, family) -> None:
    assert farthest(case(family, windows=8), random_tokens(random.Random(1), 90, 300)) < 1e-4


# -- what files say ---------------------------------------------------------------------------------------------------


def test_it_reads_the_last_layers_that_have_keys_of_their_own(case) -> None:
    for family, sources in (("gemma4", [0, 0, 0, 1]), ("gemma4_unified", [1, 1, 1, 2])):
        found = case(family)
        target = ModelConfig.from_directory(found.directory / "target")
        config = AssistantConfig.read(found.directory / "assistant", target)
        assert [one.source for one in config.model.stack.attentions] == sources
        assert [one.window for one in config.model.stack.attentions] == [23, 23, 23, None]
        assert config.model.stack.logit_cap is None


def copied(case: Case, directory: Path, changes: dict[str, Any], inside: dict[str, Any]) -> tuple[Path, ModelConfig]:
    """The assistant with other keys in its configuration."""
    whole = dict(Fields.read(case.directory / "assistant" / "config.json").values)
    whole = {**whole, **changes, "text_config": {**whole["text_config"], **inside}}
    write_config(directory, {key: value for key, value in whole.items() if value is not None})
    return directory, ModelConfig.from_directory(case.directory / "target")


def write_config(directory: Path, values: dict[str, Any]) -> None:
    import json

    (directory / "config.json").write_text(json.dumps(values))


@pytest.mark.parametrize(
    ("changes", "inside", "message"),
    [
        ({"backbone_hidden_size": 80}, {}, "made for a hidden size of 80, but the target's is 64"),
        ({}, {"vocab_size": 304}, "made for a vocabulary of 304, but the target's is 300"),
        ({}, {"sliding_window": 12}, "sliding attention have 12 positions in a window, but the target's have 24"),
        ({}, {"head_dim": 8}, "sliding attention have 8 numbers in a head, but the target's have"),
        ({}, {"num_key_value_heads": 4}, "sliding attention have 4 heads of keys, but the target's have 2"),
        ({}, {"enable_moe_block": True}, "enable_moe_block True is not supported for an assistant"),
        ({}, {"hidden_size_per_layer_input": 8}, "hidden_size_per_layer_input 8 is not supported for an assistant"),
        ({"use_ordered_embeddings": True, "num_centroids": 7}, {}, "num_centroids 7 does not divide the vocabulary"),
        ({"use_ordered_embeddings": True, "num_centroids": 30, "centroid_intermediate_top_k": 31}, {},
         "centroid_intermediate_top_k"),
    ],
)  # fmt: skip
def test_configurations_that_do_not_fit_are_refused(case, tmp_path, changes, inside, message) -> None:
    directory, target = copied(case("gemma4"), tmp_path, changes, inside)
    with pytest.raises(ConfigError, match=message):
        AssistantConfig.read(directory, target)


def test_a_target_without_a_layer_of_a_kind_is_refused(case, tmp_path) -> None:
    make("gemma3", tmp_path / "whole", layer_types=["full_attention"] * 3)
    target = ModelConfig.from_directory(tmp_path / "whole")
    with pytest.raises(ConfigError, match="has a layer of sliding attention, but the target has none"):
        AssistantConfig.read(case("gemma4").directory / "assistant", target)


def test_tensors_that_are_missing_or_unknown_are_named(case, tmp_path) -> None:
    found = case("gemma4", clustered=True)
    decoder, whole = found.reader().model.decoder, load_file(found.directory / "assistant" / "model.safetensors")
    write_config(tmp_path, dict(Fields.read(found.directory / "assistant" / "config.json").values))

    def loaded(changed: Mapping[str, Tensor | None]) -> AssistantHead:
        tensors = {name: one for name, one in {**whole, **changed}.items() if one is not None}
        save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
        return AssistantHead.load(tmp_path, decoder)

    loaded({})
    ordering = "masked_embedding.token_ordering"
    for changed, message in (
        ({"pre_projection.weight": None}, "pre_projection.weight is missing"),
        ({"post_projection.weight": torch.zeros(3, 3)}, "post_projection.weight has shape"),
        ({"model.embed_tokens.weight": None, "lm_head.weight": None}, "embed_tokens.weight is missing"),
        ({ordering: None}, "token_ordering is missing"),
        ({ordering: whole[ordering] + 1}, "names tokens that the target does not have"),
        ({"model.layers.0.self_attn.k_proj.weight": torch.zeros(32, 32)}, "not known in this layout"),
    ):
        with pytest.raises(WeightsError, match=message):
            loaded(changed)


def test_it_is_found_by_its_configuration(case) -> None:
    directory = case("gemma4").directory / "assistant"
    assert set(KINDS) == {"gemma4", "unified"}
    for part in (str(directory), f"mtp:{directory}"):
        entry = find(part)
        assert isinstance(entry, Entry) and entry.directory == directory
