"""Real directories to check: sound ones, and what people have instead."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from safetensors.torch import load_file, save_file

from foresay.server.settings.config import EngineConfig
from tests.heads.published import EAGLE, MEDUSA, make_eagle, make_medusa
from tests.heads.writing import change_config
from tests.same_tokens.test_directories import write_tokenizer
from tests.verifier.families import make
from tests.verifier.reading import load_decoder

VOCABULARY = 290
Break = Callable[[Path], object]


def make_model(directory: Path, tokens: int = VOCABULARY, **shape: Any) -> Path:
    """A random model with a tokenizer."""
    make("llama2", directory, **shape)
    write_tokenizer(directory, tokens)
    (directory / "tokenizer_config.json").write_text('{"tokenizer_class": "PreTrainedTokenizerFast"}')
    return directory


def make_models(root: Path) -> Path:
    """All of them in ``root``. Small models have two layers, since one layer without weights may be a head."""
    make_model(root / "target", num_hidden_layers=6)
    make_model(root / "draft", num_hidden_layers=2)
    make_model(root / "other_vocabulary", tokens=280, num_hidden_layers=2)
    make_model(root / "short", num_hidden_layers=2, max_position_embeddings=128)
    make_model(root / "twin", num_hidden_layers=6)
    make("llama2", root / "speechless", num_hidden_layers=2)
    target = load_decoder(root / "target")
    for layout in MEDUSA:
        make_medusa(root / layout, target, layout)
    for layout in EAGLE:
        make_eagle(root / layout, target, layout)
    make_eagle(root / "low_and_high", target, "safeailab", layers=[1, 20, 29])
    wide = load_decoder(make_model(root / "wide", num_hidden_layers=6, hidden_size=96, intermediate_size=96))
    make_medusa(root / "wide_medusa", wide, "authors")
    make_eagle(root / "wide_eagle", wide, "safeailab")
    return root


@dataclass(frozen=True)
class Case:
    """Settings and what is to be said of them.

    draft: a keyword, or a directory of ``models``, perhaps behind ``medusa:`` and before ``> self``. broken: what is
    done to a copy of it; target_broken: to a copy of the target. said: words of the faults or warnings; none for a pair
    that is sound.
    """

    draft: str
    said: tuple[str, ...] = ()
    changes: dict[str, Any] = field(default_factory=dict)
    broken: Break | None = None
    target_broken: Break | None = None

    def config(self, models: Path, space: Path) -> EngineConfig:
        """Settings with real directories in them; broken copies lie in ``space``."""
        first, *behind = self.draft.split(" > ")
        prefix, _, name = first.rpartition(":")
        directory = _copy(models / name, space / "draft", self.broken) if (models / name).exists() else None
        target = _copy(models / "target", space / "target", self.target_broken)
        draft = first if directory is None else f"{prefix}:{directory}".lstrip(":")
        base: dict[str, Any] = {"dtype": "float32", "kv_tokens": 640, "max_model_len": 256, "threads": 1}
        return EngineConfig(**{**base, "target": str(target), "draft": " > ".join((draft, *behind)), **self.changes})


def _copy(source: Path, destination: Path, broken: Break | None) -> Path:
    if broken is None:
        return source
    shutil.copytree(source, destination)
    broken(destination)
    return destination


def cut(name: str) -> Break:
    """Half of a file."""

    def broken(directory: Path) -> None:
        file = directory / name
        file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])

    return broken


def without(*names: str) -> Break:
    """Files that are not there."""

    def broken(directory: Path) -> None:
        for name in names:
            (directory / name).unlink()

    return broken


def says(**values: Any) -> Break:
    """Other values in config.json."""
    return lambda directory: change_config(directory, **values)


def without_tensor(file: str, name: str) -> Break:
    """A tensor that is not there."""

    def broken(directory: Path) -> None:
        tensors = load_file(directory / file)
        del tensors[name]
        save_file(tensors, directory / file, metadata={"format": "pt"})

    return broken


def swapped_tokens(directory: Path) -> None:
    """A tokenizer of the same size, in which two tokens have each other's ids."""
    file = directory / "tokenizer.json"
    content = json.loads(file.read_text())
    vocabulary = content["model"]["vocab"]
    first, second = list(vocabulary)[100:102]
    vocabulary[first], vocabulary[second] = vocabulary[second], vocabulary[first]
    file.write_text(json.dumps(content))


def knows(tokens: int) -> Break:
    """A tokenizer that knows only the first so many."""

    def broken(directory: Path) -> None:
        file = directory / "tokenizer.json"
        content = json.loads(file.read_text())
        vocabulary = content["model"]["vocab"]
        content["model"] |= {"vocab": {t: id for t, id in vocabulary.items() if id < tokens}, "merges": []}
        file.write_text(json.dumps(content))

    return broken


def tie(directory: Path) -> None:
    """An output head that config.json ties to the embedding, stored separately, and equal."""
    tensors = load_file(directory / "model.safetensors")
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    change_config(directory, tie_word_embeddings=True)


SOUND = {
    "none": Case("none"),
    "ngram": Case("ngram"),
    "suffix": Case("suffix"),
    "self": Case("self"),
    "self_int8": Case("self:int8", changes={"draft_tokens": 3}),
    "self_behind_a_lookup": Case("suffix > self:int8"),
    "self_behind_a_head": Case("safeailab > self"),
    "draft": Case("draft"),
    "draft_tree": Case("draft", changes={"draft_tree": "3,2,1"}),
    "half": Case("draft", changes={"dtype": "bfloat16"}),
    "other_vocabulary": Case("other_vocabulary"),
    "swapped_tokens": Case("draft", broken=swapped_tokens),
    "medusa_named": Case("medusa:authors", changes={"draft_tokens": 3}),
    "eagle3_named": Case("eagle3:speculators"),
    "eagle_named": Case("eagle:eagle1"),
    **{layout: Case(layout, changes={"draft_tokens": 3}) for layout in ("authors", "specforge", "safeailab")},
    "twin": Case("twin"),
    "speechless": Case("speechless"),
    "small_vocabulary": Case("draft", broken=knows(144)),
    "short_draft": Case("short"),
    "short_head": Case("safeailab", broken=says(max_position_embeddings=100)),
    "few_heads": Case("authors", changes={"draft_tree": "4,3,2,1,1"}),
    "float16": Case("none", changes={"dtype": "float16"}),
    "tied": Case("none", target_broken=tie),
}

_FILE = "model.safetensors"
FP8 = {"quant_method": "fp8", "weight_block_size": [32, 32]}
FAULTY = {
    "no_target": Case("ngram", ("/nowhere: no such file or directory",), {"target": "/nowhere"}),
    "cut_target": Case("none", (f"{_FILE}: not a complete safetensors file",), target_broken=cut(_FILE)),
    "no_weights": Case("draft", ("neither model.safetensors nor",), target_broken=without(_FILE)),
    "other_weights": Case("none", ("the weights do not fit config.json",), target_broken=says(intermediate_size=96)),
    "missing_tensor": Case(
        "none", ("model.norm.weight is missing",), target_broken=without_tensor(_FILE, "model.norm.weight")
    ),
    "quantised": Case(
        "none",
        ("quantised weights (gptq)",),
        target_broken=says(quantization_config={"quant_method": "gptq", "bits": 3}),
    ),
    "unsupported": Case(
        "draft", ("architecture GPT2LMHeadModel",), target_broken=says(architectures=["GPT2LMHeadModel"])
    ),
    "cut_config": Case("draft", ("config.json: not valid JSON",), target_broken=cut("config.json")),
    "no_draft": Case("/nowhere", ("/nowhere: no such file or directory",)),
    "self_in_no_fewer_bits": Case("self:int8", ("no larger than its copy's",), {"quantize": "int8"}),
    "self_quantised": Case("self", ("files are quantised",), target_broken=says(quantization_config=FP8)),
    "chain_of_itself": Case("self > self", ("expected a draft model, a head, ngram or suffix before >, not self",)),
    "chain_of_ones_own": Case("mine:Drafter > self", ("expected a draft model, a head, ngram or suffix before >",)),
    "chain_without_a_first": Case("> self", ("expected a drafter on each side of >",)),
    "chain_before_another": Case("self > suffix", ("expected a drafter, >, and self",)),
    "self_in_what": Case("self:int2", ("expected self, or self:int4",)),
    "no_medusa": Case("medusa:draft", ("holds no head",)),
    "wrong_kind": Case("medusa:safeailab", ("holds eagle heads",)),
    "draft_of_another_kind": Case(
        "draft", ("architecture GPT2LMHeadModel",), broken=says(architectures=["GPT2LMHeadModel"])
    ),
    "cut_draft": Case("draft", ("not a complete safetensors file",), broken=cut(_FILE)),
    "no_draft_weights": Case("draft", ("neither model.safetensors nor",), broken=without(_FILE)),
    "cut_draft_tokenizer": Case("draft", ("tokenizer.json: not a complete tokenizer",), broken=cut("tokenizer.json")),
    "foreign_vocabulary": Case("draft", ("it knows only 10 of the target's 290 tokens",), broken=knows(10)),
    "wide_medusa": Case("wide_medusa", ("0.0.linear.weight has shape [96, 96], expected [64, 64]",)),
    "wide_eagle": Case("wide_eagle", ("the target's is 64 wide where the head is 96",)),
    "missing_layers": Case("low_and_high", ("is [1, 20, 29], but the target has 6 layers",)),
    "cut_head": Case("safeailab", ("not a complete safetensors file",), broken=cut(_FILE)),
    "cut_pickle": Case("pickle", ("not a complete file of tensors only",), broken=cut("medusa_lm_head.pt")),
    "no_head_weights": Case("eagle3:safeailab", ("there are no weights of a head",), broken=without(_FILE)),
    "head_without_norm": Case("speculators", ("norm.weight is missing",), broken=without_tensor(_FILE, "norm.weight")),
    "head_without_map": Case("safeailab", ("d2t is missing",), broken=without_tensor(_FILE, "d2t")),
    "head_of_other_tokens": Case("safeailab", ("made for a vocabulary of 512",), broken=says(vocab_size=512)),
    "large_tree": Case("draft", ("at most 63 drafted nodes, got 80",), {"draft_tree": "40,40"}),
    "long": Case("draft", ("--max-model-len 4096: the model holds at most 512 tokens",), {"max_model_len": 4096}),
    "small_cache": Case(
        "draft", ("the KV cache holds 100 tokens, fewer than max_model_len (256)",), {"kv_tokens": 100}
    ),
    "large_cache": Case("draft", ("but this machine has",), {"kv_tokens": 10**12}),
    "large_cache_of_a_head": Case("safeailab", ("but this machine has",), {"kv_tokens": 10**12}),
}
