"""The catalog states what its models' own cards state, and nothing that does not fit."""

from __future__ import annotations

from dataclasses import replace

import pytest

from foresay.server.catalog.catalog import KnownShape, find_target, known_targets, parameters_of
from foresay.server.cli.pair import check, described, recommended
from foresay.server.engine.drafters.registry import ENTRIES
from foresay.server.settings.config import EngineConfig
from foresay.server.settings.resolved import BUNDLED, choose_draft
from foresay.server.settings.units import count_in_words
from foresay.verifier.model.config import ModelConfig, parameters, stored_parameters

#: Weights as the publishers count them, in millions (Qwen counts what is stored; Meta says 1.23B, 3.21B, 8.03B).
PUBLISHED = {
    "meta-llama/Llama-3.2-3B-Instruct": 3213,
    "meta-llama/Llama-3.1-8B-Instruct": 8030,
    "meta-llama/Llama-3.3-70B-Instruct": 70554,
    "mistralai/Mistral-7B-Instruct-v0.2": 7242,
    "Qwen/Qwen2.5-1.5B-Instruct": 1544,
    "Qwen/Qwen2.5-3B-Instruct": 3086,
    "Qwen/Qwen2.5-7B-Instruct": 7616,
    "Qwen/Qwen2.5-14B-Instruct": 14770,
    "Qwen/Qwen2.5-32B-Instruct": 32764,
    "Qwen/Qwen2.5-72B-Instruct": 72706,
    "Qwen/Qwen3-1.7B": 1721,
    "Qwen/Qwen3-4B": 4022,
    "Qwen/Qwen3-8B": 8191,
    "Qwen/Qwen3-14B": 14768,
    "Qwen/Qwen3-32B": 32762,
    "HuggingFaceTB/SmolLM2-360M-Instruct": 362,
    "HuggingFaceTB/SmolLM2-1.7B-Instruct": 1711,
}
#: The same of drafts: for heads, half of the bytes of their files.
PUBLISHED_DRAFTS = {
    "meta-llama/Llama-3.2-1B-Instruct": 1236,
    "Qwen/Qwen2.5-0.5B-Instruct": 494,
    "Qwen/Qwen3-0.6B": 596,
    "HuggingFaceTB/SmolLM2-135M-Instruct": 134.5,
    "yuhuili/EAGLE3-LLaMA3.1-Instruct-8B": 425,
    "RedHatAI/Qwen3-8B-speculator.eagle3": 1022,
    "RedHatAI/Qwen3-14B-speculator.eagle3": 1388,
    "RedHatAI/Qwen3-32B-speculator.eagle3": 1561,
    "text-generation-inference/Mistral-7B-Instruct-v0.2-medusa": 443.5,
}


def test_an_output_head_that_is_the_embedding_counts_once_where_files_store_it_again():
    """As the GGUF files of Qwen2.5-Coder 1.5B do, and of the 0.5B that drafts for it."""
    target = known_targets()["Qwen/Qwen2.5-Coder-1.5B-Instruct"]
    for shape, count in [(target.shape, target.parameters), *((one.shape, one.parameters) for one in target.drafts)]:
        assert shape is not None
        tied = shape.model()
        again = replace(tied, tie_word_embeddings=False)
        assert parameters_of(again) == parameters_of(tied) == count < stored_parameters(again)
        assert f" {count_in_words(count)} weights" in described(again, "bfloat16", "model")
    untied = known_targets()["Qwen/Qwen2.5-7B-Instruct"]
    assert parameters_of(untied.shape.model()) == untied.parameters


@pytest.mark.parametrize("id", PUBLISHED)
def test_weights_are_those_of_the_model_cards(id):
    assert known_targets()[id].parameters / 1e6 == pytest.approx(PUBLISHED[id], rel=0.001)


@pytest.mark.parametrize("id", PUBLISHED_DRAFTS)
def test_weights_of_drafts_are_those_of_their_files(id):
    found = [draft for target in known_targets().values() for draft in target.drafts if draft.id == id]
    assert found
    for draft in found:
        assert draft.parameters / 1e6 == pytest.approx(PUBLISHED_DRAFTS[id], rel=0.002)


def test_every_draft_is_smaller_and_of_a_kind_that_is_loaded():
    for target in known_targets().values():
        assert target.drafts or target.short, target.id
        for draft in target.drafts:
            assert 0 < draft.parameters < 0.6 * target.parameters, draft.id
            assert draft.kind in {name for entry in ENTRIES for name in entry.names}


def test_what_is_counted_is_what_a_checkpoint_holds():
    model = ModelConfig.from_directory(BUNDLED / "target")
    shape = KnownShape(**{name: getattr(model, name) for name in KnownShape.__struct_fields__})
    made = shape.model()
    assert (parameters(made), stored_parameters(made)) == (parameters(model), stored_parameters(model))


@pytest.mark.parametrize(
    "name",
    ["Qwen/Qwen3-8B", "qwen/qwen3-8b", "Qwen3-8B", "./models/Qwen3-8B/", "/data/models/Qwen3-8B", "mine/Qwen3-8B"],
)
def test_a_target_is_known_by_its_id_or_its_last_part(name):
    found = find_target(name)
    assert found is not None and found.id == "Qwen/Qwen3-8B"


@pytest.mark.parametrize("name", ["", "/", "bundled", "Qwen3", "Qwen/Qwen3-8B-AWQ", "qwen\x00", "Q" * 10000])
def test_other_names_are_not(name):
    assert find_target(name) is None


@pytest.mark.parametrize(
    "name",
    [
        "Qwen/Qwen2.5-Coder-1.5B-Instruct-GGUF",
        "qwen/qwen2.5-coder-1.5b-instruct-gguf:Q8_0",
        "mine/Qwen2.5-Coder-1.5B-Instruct-GGUF",
    ],
)
def test_gguf_files_of_a_target_are_drafted_for_by_such_files(name):
    found, known = find_target(name), known_targets()["Qwen/Qwen2.5-Coder-1.5B-Instruct"]
    assert found is not None and found.id == "Qwen/Qwen2.5-Coder-1.5B-Instruct-GGUF" and found.shape == known.shape
    assert [draft.setting for draft in found.drafts] == ["Qwen/Qwen2.5-Coder-0.5B-Instruct-GGUF"]
    assert find_target("Qwen/Qwen2.5-Coder-1.5B-Instruct") is known
    assert choose_draft(EngineConfig(target=name)).reason.endswith("gain more, --draft " + found.drafts[0].setting)


def test_gguf_files_are_known_of_owners_that_publish_them():
    (found,) = filter(None, [find_target("Qwen/Qwen3-8B-GGUF")])
    assert [draft.id for draft in found.drafts][:2] == ["Qwen/Qwen3-0.6B-GGUF", "AngelSlim/Qwen3-8B_eagle3"]
    assert find_target("meta-llama/Llama-3.1-8B-Instruct-GGUF") is None


# -- foresay check ---------------------------------------------------------------------------------------------------


def test_check_recommends_where_nobody_good_drafts():
    advice = recommended("Qwen/Qwen3-8B")
    assert "--draft Qwen/Qwen3-0.6B (596.0M weights)" in advice
    assert "--draft eagle3:AngelSlim/Qwen3-8B_eagle3" in advice
    assert recommended("nobody/nothing") == ""
    assert "comes with it" in check(EngineConfig(draft="suffix")).recommended
    assert check(EngineConfig(draft="bundled")).recommended == ""
    assert check(EngineConfig(draft="eagle3")).recommended == ""


def test_check_knows_a_directory_by_its_name(models, tmp_path):
    directory = tmp_path / "SmolLM2-1.7B-Instruct"
    directory.symlink_to(models / "target")
    report = check(EngineConfig(target=str(directory), draft="none"))
    assert "HuggingFaceTB/SmolLM2-135M-Instruct" in report.recommended


def test_check_recommends_for_a_target_that_is_not_here(cache):
    report = check(EngineConfig(target="Qwen/Qwen3-4B"))
    assert not report.works
    assert "Known to draft for Qwen/Qwen3-4B: --draft Qwen/Qwen3-0.6B" in report.recommended


def test_a_draft_that_does_not_fit_is_answered_with_one_that_does(models, tmp_path):
    directory = tmp_path / "Qwen3-8B"
    directory.symlink_to(models / "target")
    config = EngineConfig(target=str(directory), draft=str(models / "wide_medusa"))
    assert "Qwen/Qwen3-0.6B" in check(config).recommended
    sound = EngineConfig(target=str(models / "target"), draft=str(models / "draft"))
    assert check(sound).recommended == ""
