"""Every family against transformers, and every row against itself in other company, bit by bit."""

from __future__ import annotations

import random
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import (
    Gemma3Config,
    Gemma3ForConditionalGeneration,
    Gemma4AudioConfig,
    Gemma4Config,
    Gemma4ForConditionalGeneration,
    Gemma4UnifiedAudioConfig,
    Gemma4UnifiedConfig,
    Gemma4UnifiedForConditionalGeneration,
    Gemma4UnifiedVisionConfig,
    Gemma4VisionConfig,
    Mistral3Config,
    Mistral3ForConditionalGeneration,
    PixtralVisionConfig,
    SiglipVisionConfig,
)

from foresay.server.engine.parameters import quantized
from foresay.spec.protocols import Rows
from foresay.spec.tree import DraftTree
from foresay.verifier.model.config import ModelConfig
from foresay.verifier.model.save_quantized import write
from tests.poison import poison_store
from tests.verifier.families import FAMILIES, config_of, randomise
from tests.verifier.reading import Reader, load_decoder, paths, random_parents, random_tokens, random_tree

FP32, BF16 = torch.float32, torch.bfloat16
#: One of each kind of attention: no grouping, groups of two and three, a window in all layers and in some.
KINDS = ("llama2", "qwen3", "smollm", "mistral", "qwen2_window")
#: Positions of the root around the borders of pages of 16 and 32, short of and past the window of 24.
BASES = (0, 1, 15, 16, 20, 31, 33, 62)
EVERY_KIND = [(kind, FP32) for kind in KINDS] + [
    ("llama2", BF16),
    ("smollm", BF16),
    ("mistral", BF16),
    ("gemma3", FP32),
    *((name, BF16) for name in ("gemma3", "gemma2", "granite_swa", "ministral3", "olmo3", "nemotron", "muse_glimmer")),
    *(
        (name, dtype)
        for name in ("gemma4", "gemma4_embedded", "gemma4_moe", "gemma4_unified")
        for dtype in (FP32, BF16)
    ),
    ("cohere2", FP32),
    ("hunyuan", FP32),
    ("qwen3_5", FP32),
    ("qwen3_5", BF16),
    ("qwen3_next", FP32),
    ("lfm2", FP32),
    ("lfm2", BF16),
    ("nemotron_h_moe", FP32),
    ("falcon_h1", FP32),
    ("falcon_h1", BF16),
    *(
        (name, dtype)
        for name in ("qwen2_moe", "qwen3_moe", "glm4_moe", "gpt_oss", "qwen3_5_moe")
        for dtype in (FP32, BF16)
    ),
    ("deepseek_v3", FP32),
    ("glm4_moe_lite", BF16),
]
#: Whose trees are run in one pass: nodes of a recurrent layer go on from others of the same pass.
AT_ONCE = (
    *KINDS,
    "gemma4",
    "gemma4_embedded",
    "gemma4_moe",
    "qwen3_5",
    "lfm2",
    "qwen3_moe",
    "qwen3_5_moe",
    "falcon_h1",
    "deepseek_v3",
)


def assert_same_bits(actual: Tensor, expected: Tensor, message: str = "") -> None:
    assert actual.isfinite().all(), f"{message}: not finite"
    wrong = (actual != expected).any(dim=-1).nonzero().flatten().tolist()
    assert not wrong, f"{message}: rows {wrong} of {len(actual)} differ by {float((actual - expected).abs().max())}"


def assert_tree_has_the_bits_of_its_paths(reader: Reader, committed: list[int], tree: DraftTree) -> None:
    table = reader.open(committed)
    (logits,) = reader.run(reader.tree_rows(table, tree))
    table.release()
    tokens = tree.tokens
    for path in paths(tree):
        alone = reader.alone([*committed, *(tokens[node] for node in path)])
        assert_same_bits(logits[path], alone[len(committed) :], f"base {len(committed)}, path {path}")


@pytest.mark.parametrize("name", FAMILIES)
def test_logits_are_those_of_transformers(family, name) -> None:
    rng = random.Random(1)
    reader = Reader(family(name).decoder(FP32))
    tokens = random_tokens(rng, 70, reader.vocab_size)
    with torch.inference_mode():
        expected = family(name).oracle(torch.tensor([tokens])).logits[0]
    at_once = reader.alone(tokens)
    assert at_once.dtype == torch.float32
    assert (at_once - expected).abs().max() < 1e-4
    in_chunks = reader.read_in_pieces(reader.open(), tokens, lambda: rng.choice((2, 3, 5, 8, 13, 21)))
    assert_same_bits(in_chunks, at_once, "in chunks")
    assert_same_bits(reader.read_in_pieces(reader.open(), tokens, lambda: 1), at_once, "row by row")


IMAGES = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "image_size": 28,
    "patch_size": 14,
}


@pytest.mark.parametrize("unified", [False, True])
def test_of_gemma_4_the_texts_part_is_loaded(tmp_path, unified) -> None:
    """Without what there is for images and sounds, however files call it."""
    small: dict[str, Any] = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    kinds: tuple[Any, Any]
    images: Any
    if unified:
        inside, kinds = config_of("gemma4_unified"), (Gemma4UnifiedConfig, Gemma4UnifiedForConditionalGeneration)
        images = Gemma4UnifiedVisionConfig(patch_size=4, pooling_kernel_size=1, mm_embed_dim=32, mm_posemb_size=4)
        more: dict[str, Any] = {"vision_config": images, "audio_config": Gemma4UnifiedAudioConfig(audio_embed_dim=16)}
    else:
        inside, kinds = config_of("gemma4_embedded"), (Gemma4Config, Gemma4ForConditionalGeneration)
        images = Gemma4VisionConfig(**small, intermediate_size=64, num_key_value_heads=2, head_dim=16)
        sounds = Gemma4AudioConfig(**small, output_proj_dims=32, subsampling_conv_channels=[8, 4])
        more = {"vision_config": images, "audio_config": sounds}
    configuration, kind = kinds
    made: Any = configuration(text_config=inside, **more)
    oracle = kind(made).eval()
    randomise(oracle.model.language_model, 0)
    oracle.save_pretrained(tmp_path)
    tokens = random_tokens(random.Random(2), 40, 300)
    with torch.inference_mode():
        expected = oracle(input_ids=torch.tensor([tokens])).logits[0]
    assert (Reader(load_decoder(tmp_path, FP32)).alone(tokens) - expected).abs().max() < 1e-4


@pytest.mark.parametrize(
    ("family", "kind", "config", "images"),
    [
        ("gemma3", Gemma3ForConditionalGeneration, Gemma3Config, SiglipVisionConfig),
        ("mistral", Mistral3ForConditionalGeneration, Mistral3Config, PixtralVisionConfig),
        ("ministral3", Mistral3ForConditionalGeneration, Mistral3Config, PixtralVisionConfig),
    ],
)
def test_of_a_model_of_texts_and_images_the_texts_part_is_loaded(tmp_path, family, kind, config, images) -> None:
    inside = config_of(family, sliding_window=24 if family == "gemma3" else None)
    oracle = kind(config(text_config=inside, vision_config=images(**IMAGES), tie_word_embeddings=family == "gemma3"))
    oracle.eval()
    randomise(oracle.model.language_model, 0)
    oracle.save_pretrained(tmp_path / "whole")
    tokens = random_tokens(random.Random(2), 40, 300)
    with torch.inference_mode():
        expected = oracle(input_ids=torch.tensor([tokens])).logits[0]
    assert (Reader(load_decoder(tmp_path / "whole", FP32)).alone(tokens) - expected).abs().max() < 1e-4
    config = quantized(ModelConfig.from_directory(tmp_path / "whole"), "int8", "--quantize")
    write(tmp_path / "whole", config, tmp_path / "int8", lambda done: None)
    narrow = Reader(load_decoder(tmp_path / "int8", FP32)).alone(tokens)
    assert torch.equal(narrow, Reader(load_decoder(tmp_path / "whole", FP32, quantize="int8")).alone(tokens))


@pytest.mark.parametrize(("page_size", "scatter"), [(16, True), (32, False)], ids=["scattered", "in_a_row"])
@pytest.mark.parametrize(("name", "dtype"), EVERY_KIND)
def test_a_trees_rows_have_the_bits_of_their_paths_run_alone(family, name, dtype, page_size, scatter) -> None:
    rng = random.Random(page_size + scatter)
    reader = Reader(family(name).decoder(dtype), page_size, pages=32, scatter=scatter)
    for base in BASES:
        committed = random_tokens(rng, base, reader.vocab_size)
        tree = random_tree(rng, rng.randrange(reader.vocab_size), rng.choice((2, 5, 9, 18)), reader.vocab_size)
        assert_tree_has_the_bits_of_its_paths(reader, committed, tree)


@pytest.mark.parametrize("reach", [1, 2, 64], ids=["chain", "deep", "bush"])
@pytest.mark.parametrize("name", AT_ONCE)
def test_a_tree_of_64_nodes_has_the_bits_of_its_paths(family, name, reach) -> None:
    rng = random.Random(reach)
    reader = Reader(family(name).decoder(FP32), pages=32)
    tokens = random_tokens(rng, 64, reader.vocab_size)
    tree = DraftTree.build(tokens, random_parents(rng, 64, reach))
    assert_tree_has_the_bits_of_its_paths(reader, random_tokens(rng, 43, reader.vocab_size), tree)


@pytest.mark.parametrize("nodes", [2, 17, 64])
@pytest.mark.parametrize("name", AT_ONCE)
def test_a_chain_given_as_a_tree_is_a_chain(family, name, nodes) -> None:
    rng = random.Random(nodes)
    reader = Reader(family(name).decoder(FP32))
    chain = torch.tensor(random_tokens(rng, nodes, reader.vocab_size))
    words = [(2 << node) - 1 for node in range(nodes)]
    for base in (1, 30, 48):
        table = reader.open(random_tokens(rng, base, reader.vocab_size))
        table.reserve(nodes)
        (as_tree,) = reader.run(Rows(table, chain, base, range(nodes), words))
        (as_chain,) = reader.run(Rows(table, chain, base))
        assert_same_bits(as_tree, as_chain)


@pytest.mark.parametrize("name", KINDS)
def test_a_tree_run_level_by_level_has_the_bits_of_one_pass(family, name) -> None:
    """As a draft model grows it: each level a pass of its own over scratch rows of the levels above."""
    rng = random.Random(2)
    reader = Reader(family(name).decoder(FP32))
    widths = (1, 3, 5, 9, 2, 1)
    parents, levels = [-1], [range(1)]
    for _, width in pairwise(widths):
        levels.append(range(len(parents), len(parents) + width))
        parents += sorted(rng.choices(levels[-2], k=width))
    tree = DraftTree.build(random_tokens(rng, len(parents), reader.vocab_size), parents)
    table = reader.open(random_tokens(rng, 29, reader.vocab_size))
    (at_once,) = reader.run(reader.tree_rows(table, tree))
    poison_store(reader.model.store)
    words = tree.ancestors
    for level in levels:
        rows = Rows(table, [tree.tokens[node] for node in level], table.length, level, [words[node] for node in level])
        assert_same_bits(reader.model.run([rows]).logits, at_once[list(level)], f"level {level}")


@pytest.mark.parametrize("page_size", [16, 32])
@pytest.mark.parametrize(("name", "dtype"), EVERY_KIND)
def test_text_goes_on_with_the_same_bits_after_accepted_paths_were_compacted(family, name, dtype, page_size) -> None:
    """A few speculative steps, then single rows, against the whole text in one pass."""
    rng = random.Random(page_size)
    reader = Reader(family(name).decoder(dtype), page_size, scatter=page_size == 16)
    text = random_tokens(rng, 9, reader.vocab_size)
    table = reader.open()
    logits = [reader.read(table, text)]
    for nodes in (7, 40, 12, 64, 3):
        tree = random_tree(rng, rng.randrange(reader.vocab_size), nodes, reader.vocab_size)
        path = rng.choice(paths(tree))
        path = path[: rng.randint(1, len(path))]
        logits.append(reader.run(reader.tree_rows(table, tree))[0][path])
        reader.keep(table, path)
        text += [tree.tokens[node] for node in path]
    after = random_tokens(rng, 6, reader.vocab_size)
    logits.append(reader.read_in_pieces(table, after, lambda: 1))
    assert_same_bits(torch.cat(logits), reader.alone(text + after))


@pytest.mark.parametrize(("name", "dtype"), EVERY_KIND)
def test_sequences_in_one_pass_have_the_bits_they_have_alone(family, name, dtype) -> None:
    """Prefill chunks, trees, a chain and a single row mixed, in every order, scattered pages among them."""
    rng = random.Random(3)
    decoder = family(name).decoder(dtype)
    for scatter in (False, True):
        reader = Reader(decoder, scatter=scatter)

        def parts(reader=reader) -> list[Rows]:
            vocab = reader.vocab_size
            texts = [reader.open(random_tokens(rng, length, vocab)) for length in (0, 37, 16, 5, 50)]
            return [
                reader.rows(texts[0], random_tokens(rng, 33, vocab)),
                reader.tree_rows(texts[1], random_tree(rng, 1, 12, vocab)),
                reader.tree_rows(texts[2], DraftTree.chain(random_tokens(rng, 5, vocab))),
                reader.rows(texts[3], random_tokens(rng, 1, vocab), logits="last"),
                reader.rows(texts[4], random_tokens(rng, 20, vocab), logits="last"),
            ]

        rows = parts()
        alone = [reader.run(part)[0] for part in rows]
        for _ in range(3):
            order = rng.sample(range(len(rows)), len(rows))
            for index, logits in zip(order, reader.run(*(rows[index] for index in order)), strict=True):
                assert_same_bits(logits, alone[index], f"part {index} in order {order}")


@pytest.mark.parametrize("name", AT_ONCE)
def test_wanted_rows_have_the_bits_of_all_rows(family, name) -> None:
    rng = random.Random(4)
    reader = Reader(family(name).decoder(FP32))
    table, tokens = reader.open(random_tokens(rng, 20, reader.vocab_size)), random_tokens(rng, 9, reader.vocab_size)
    (all_rows,) = reader.run(reader.rows(table, tokens))
    (last,) = reader.run(reader.rows(table, tokens, logits="last"))
    (none,) = reader.run(reader.rows(table, tokens, logits="none"))
    assert_same_bits(last, all_rows[-1:])
    assert none.shape == (0, reader.vocab_size)


def test_a_window_hides_what_lies_behind_it(family) -> None:
    """Three layers reach 3 * 23 positions back: a change nearer than that is seen, one further back is not."""
    rng = random.Random(5)
    reader = Reader(family("mistral").decoder(FP32))
    tokens = random_tokens(rng, 100, reader.vocab_size)
    other = [(tokens[0] + 1) % reader.vocab_size, *tokens[1:]]
    ours, theirs = reader.alone(tokens), reader.alone(other)
    assert_same_bits(ours[70:], theirs[70:], "out of reach")
    assert (ours[:70] != theirs[:70]).any(dim=-1).all()
