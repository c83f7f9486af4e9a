"""Recurrent layers: Qwen3.5 as transformers writes it, layers against fp64, and states after commits, bit by bit."""

from __future__ import annotations

import random
import re
from dataclasses import replace
from hashlib import sha256
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional
from transformers import Qwen3_5Config, Qwen3_5ForCausalLM, Qwen3_5ForConditionalGeneration, Qwen3_5TextConfig

from foresay.kvpaging import LayerStates, PagePool, PageTable, StatePages
from foresay.kvpaging.states import recurrent_state
from foresay.server.engine.parameters import packed_bytes, state_bytes, token_bytes
from foresay.spec.protocols import Rows
from foresay.verifier.model.checkpoint import final_norm_digest
from foresay.verifier.model.config import ModelConfig, stored_parameters
from foresay.verifier.model.errors import ConfigError
from foresay.verifier.model.fields import Fields
from foresay.verifier.ops.eager import references
from foresay.verifier.ops.recurrence import gated_delta, replay
from tests.poison import parts_of
from tests.verifier.families import FAMILIES, QWEN3_5, SHAPE, config_of, make, randomise
from tests.verifier.published import PUBLISHED
from tests.verifier.reading import Reader, load_decoder, paths, random_tokens, random_tree

RECURRENT = ("qwen3_5", "lfm2", "lfm2_moe", "qwen3_next", "granite_hybrid", "nemotron_h", "nemotron_h_moe", "falcon_h1")
TEXT: dict[str, Any] = {**SHAPE, **QWEN3_5, "num_hidden_layers": 4, "layer_types": None}
IMAGES = {
    "depth": 1, "hidden_size": 32, "intermediate_size": 64, "num_heads": 2, "out_hidden_size": 64, "patch_size": 4,
    "num_position_embeddings": 16,
}  # fmt: skip


def _logits(model: Any, tokens: list[int]) -> Tensor:
    with torch.inference_mode():
        return model(input_ids=torch.tensor([tokens])).logits[0]  # type: ignore[no-any-return]


@pytest.fixture
def wrapped(tmp_path: Path) -> tuple[Path, Any]:
    """A model of texts and images."""
    config = Qwen3_5Config(text_config=TEXT, vision_config=IMAGES, tie_word_embeddings=True)
    oracle = Qwen3_5ForConditionalGeneration(config).eval()
    randomise(oracle.model.language_model, 0)
    oracle.save_pretrained(tmp_path / "wrapped")
    return tmp_path / "wrapped", oracle


def test_of_a_model_of_texts_and_images_the_texts_part_is_loaded(wrapped) -> None:
    """And it is the same as transformers' model of texts of the same files; what predicts tokens is left out."""
    directory, oracle = wrapped
    tokens = random_tokens(random.Random(1), 150, 300)
    found, alone = Reader(load_decoder(directory)).alone(tokens), Qwen3_5ForCausalLM.from_pretrained(directory)
    for other in (oracle, alone.eval()):
        assert (found - _logits(other, tokens)).abs().max() < 5e-4


def test_the_layer_that_attends_is_every_fourth_by_default(tmp_path) -> None:
    values = Qwen3_5TextConfig(**TEXT).to_dict() | {"architectures": ["Qwen3_5ForCausalLM"], "layer_types": None}
    kinds = [layer.mixer for layer in ModelConfig.read(Fields(values, "")).stack.layers]
    assert [hasattr(kind, "taps") for kind in kinds] == [True, True, True, False]
    for wrong in (
        {"layer_types": ["sliding_attention"] * 4},
        {"linear_key_head_dim": 24},
        {"output_gate_type": "none"},
    ):
        with pytest.raises(ConfigError, match=next(iter(wrong))):
            ModelConfig.read(Fields(values | wrong, ""))


@pytest.mark.parametrize(
    ("name", "changes", "words"),
    [
        ("nemotron_h", {"layers_block_type": None, "hybrid_override_pattern": "MX*-"}, "layer type 'X'"),
        ("nemotron_h", {"mamba_hidden_act": "gelu"}, "mamba_hidden_act 'gelu'"),
        ("nemotron_h", {"mlp_hidden_act": "silu"}, "mlp_hidden_act 'silu'"),
        ("nemotron_h", {"sliding_window": 64}, "sliding_window"),
        ("nemotron_h", {"n_groups": 3}, "whole groups"),
        ("granite_hybrid", {"time_step_limit": [0.001, 0.1]}, "time_step_limit"),
        ("granite_hybrid", {"mamba_proj_bias": True}, "mamba_proj_bias"),
        ("granite_hybrid", {"layer_types": ["mamba"] * 3}, "layer of attention"),
        ("nemotron_h_moe", {"moe_latent_size": 32}, "moe_latent_size"),
        ("falcon_h1", {"mamba_rms_norm": True, "mamba_norm_before_gate": True}, "mamba_norm_before_gate"),
        ("falcon_h1", {"ssm_multipliers": [1.0] * 4}, "ssm_multipliers must list 5 numbers"),
        ("falcon_h1", {"mlp_multipliers": [1.0, 0.0]}, "mlp_multipliers must be a positive number"),
        ("falcon_h1", {"projectors_bias": True}, "projectors_bias"),
    ],
)
def test_what_mamba_hybrids_would_compute_otherwise_is_refused(name, changes, words) -> None:
    values = config_of(name).to_dict() | {"architectures": [FAMILIES[name][1].__name__]}
    assert ModelConfig.read(Fields(values, "")).stack.recurrence is not None
    with pytest.raises(ConfigError, match=words):
        ModelConfig.read(Fields(values | changes, ""))


def test_granite_4_without_a_recurrence(tmp_path) -> None:
    """As granite-4.0-micro, whose unused heads are of a width that no kernel has."""
    oracle = make(
        "granite_hybrid", tmp_path, layer_types=["full_attention"] * 3, position_embedding_type="rope", mamba_n_heads=16
    )
    tokens = random_tokens(random.Random(1), 50, 300)
    assert (Reader(load_decoder(tmp_path)).alone(tokens) - _logits(oracle, tokens)).abs().max() < 5e-4


def _fp64(mixed: Tensor, rates: Tensor, weights: Any, heads: int, dim: int) -> Tensor:
    """[R, V]: the layer over a text from its beginning."""
    scan, taps = weights.scan, weights.taps.double()
    channels = taps.shape[1]
    values, gates = mixed.shape[1] - channels, functional.silu(mixed[:, channels:].double())
    padded = functional.pad(mixed[:, :channels].double(), (0, 0, len(taps) - 1, 0))
    made = sum(tap * padded[at : at + len(mixed)] for at, tap in enumerate(taps))
    made = functional.silu(made if scan is None else made + scan.bias.double())
    queries, keys, value = made.split(((channels - values) // 2, (channels - values) // 2, values), dim=1)
    queries, keys = (
        each.unflatten(1, (-1, dim)).repeat_interleave(heads * dim // each.shape[1], 1) for each in (queries, keys)
    )
    if scan is None:
        queries, keys = (each / (each.square().sum(-1, keepdim=True) + 1e-6).sqrt() for each in (queries, keys))
        queries = queries * dim**-0.5
    step = functional.softplus(rates.double()[:, -heads:] + weights.shift.double())
    decay, share = (weights.decay.double() * step).exp(), step if scan else rates.double()[:, :heads].sigmoid()
    state, out = torch.zeros(heads, dim, values // heads, dtype=torch.float64), []
    for row, new in enumerate(value.unflatten(1, (heads, -1))):
        state = state * decay[row, :, None, None]
        known = 0 if scan else torch.einsum("hd,hde->he", keys[row], state)
        learned = share[row][:, None] * (new - known)
        state = state + keys[row, :, :, None] * learned[:, None]
        own = scan.skip.double()[:, None] * new if scan else 0
        out.append(torch.einsum("hd,hde->he", queries[row], state) + own)
    normed = torch.stack(out)
    if scan:
        normed = (normed.flatten(1) * gates).unflatten(1, (scan.parts, -1))
    normed = normed * (normed.square().mean(-1, keepdim=True) + weights.eps).rsqrt()
    gated: Tensor = normed.flatten(1) * (weights.norm.double() if scan else weights.norm.double().repeat(heads) * gates)
    return gated


@pytest.mark.parametrize("shift", [0.0, 6.0], ids=["slow", "e^-20"])
@pytest.mark.parametrize("name", ["qwen3_5", "granite_hybrid", "falcon_h1"])
def test_a_layer_is_as_exact_as_fp32_is(family, name, shift) -> None:
    """Against fp64, in the size of what it puts out: the kernel and the reference."""
    reader = Reader(family(name).decoder(torch.float32))
    first = reader.model.decoder.layers[0]
    store, before, rows = reader.model.store.states, (first.scan or first).delta, 100
    assert store is not None and before is not None
    weights, layer = replace(before, shift=before.shift + shift), next(iter(store))
    generator = torch.Generator().manual_seed(3)
    table = reader.open()
    reader.run(reader.rows(table, random_tokens(random.Random(1), rows, 300)))
    assert reader.model._last is not None
    written = reader.model._last._batch.static_rows().states
    assert written is not None
    channels, heads = layer.rows.shape[1], layer.states.shape[1]
    mixed = torch.randn(rows, channels + layer.states[0].numel() // layer.states.shape[3], generator=generator)
    rates = torch.randn(rows, heads * (1 if weights.scan else 2), generator=generator)
    wanted = _fp64(mixed, rates, weights, heads, layer.states.shape[3])
    ours = gated_delta(mixed, rates, weights, layer, written, torch.float32)
    with references():
        plain = gated_delta(mixed, rates, weights, layer, written, torch.float32)
    for found in (ours, plain):
        assert (found - wanted).norm() / wanted.norm() < 1e-6


def drafted_beside_plain(reader: Reader, rng: random.Random, base: int, sizes: tuple[int, ...]) -> int:
    """Trees of these sizes behind a text, a path of each committed, next to a text that is read token by token: after
    each commit all bytes of both states are equal, and a pass changes none. Until there are 50 tokens more; returns
    how many steps that took."""
    text, steps = random_tokens(rng, base, 300), 0
    drafted, plain = reader.open(text), reader.open(text)
    while len(text) < base + 50:
        tree = random_tree(rng, rng.randrange(300), rng.choice(sizes), 300)
        before = _parts(reader, drafted)
        reader.run(reader.tree_rows(drafted, tree))
        assert _equal(before, _parts(reader, drafted)), "a verify pass changes no committed state"
        path = rng.choice(paths(tree))
        path = path[: rng.randint(1, len(path))]
        reader.keep(drafted, path)
        chosen = [tree.tokens[node] for node in path]
        reader.read_in_pieces(plain, chosen, lambda: 1)
        text, steps = text + chosen, steps + 1
        assert _equal(_parts(reader, drafted), _parts(reader, plain)), f"after {len(text)} tokens"
    for each, store in zip(reader.model.store.rows(drafted), reader.model.store.rows(plain), strict=True):
        assert torch.equal(each, store)
    for table in (drafted, plain):
        table.trim()
    reader.pool.check([drafted, plain])
    for table in (drafted, plain):
        table.release()
    return steps


@pytest.mark.parametrize("nodes", [1, 8, 16, 32])
@pytest.mark.parametrize("base", [0, 1, 2, 3, 15, 16, 64])
@pytest.mark.parametrize("name", RECURRENT)
def test_after_a_commit_all_of_a_state_is_that_of_plain_decoding(family, name, nodes, base) -> None:
    reader = Reader(family(name).decoder(torch.float32), pages=40)
    drafted_beside_plain(reader, random.Random(nodes + 100 * base), base, (nodes,))


@pytest.mark.parametrize("name", RECURRENT)
def test_the_kernel_that_commits_is_close_to_its_reference(family, name) -> None:
    """Within a page and from one to another, of a text at its beginning and further on."""
    reader = Reader(family(name).decoder(torch.float32))
    table = reader.open(random_tokens(random.Random(1), 20, 300))
    reader.run(reader.tree_rows(table, random_tree(random.Random(2), 5, 16, 300)))
    state = recurrent_state(table)
    assert reader.model.store.states is not None and state is not None
    layers, page = reader.model.store.states.layers, state.page
    for source, goal, fresh in ((page, page, False), (page, 9, False), (0, 10, True)):
        ours, theirs = (LayerStates(*(part.clone() for part in layers)) for _ in range(2))
        given = source, goal, fresh, 0, torch.tensor([0, 2, 3, 7])
        replay(ours, *given)
        with references():
            replay(theirs, *given)
        for mine, its in zip(ours, theirs, strict=True):
            assert torch.allclose(mine.nan_to_num(), its.nan_to_num(), rtol=1e-5, atol=1e-6)
        assert ours.states[:, goal].isfinite().all()


@pytest.mark.soak
@pytest.mark.parametrize("name", RECURRENT)
def test_ten_thousand_steps_against_plain_decoding(family, name) -> None:
    rng, steps, reader = random.Random(0), 0, Reader(family(name).decoder(torch.float32), pages=60)
    while steps < 10_000:
        steps += drafted_beside_plain(reader, rng, rng.choice((0, 5, 40, 300)), (1, 2, 8, 32))


@pytest.mark.parametrize("name", RECURRENT)
def test_what_a_model_takes_is_planned(family, name) -> None:
    decoder = family(name).decoder(torch.float32)
    store, config = Reader(decoder).model.store, decoder.config
    assert store.states is not None
    pages, slots = store.states.pages, store.pool.num_pages * store.pool.page_size
    assert token_bytes(config, "float32", "auto") * slots == sum(part.nbytes for part in store.tensors)
    states = sum(part.nbytes for part in store.states.layers)
    assert state_bytes(config, pages.sequences, pages.num_pages) == states
    weights = decoder.embedding.nbytes + sum(one.nbytes for one in decoder.linears)
    assert packed_bytes(config, "float32") == pytest.approx(weights, rel=0.05)


@pytest.mark.parametrize("name", RECURRENT)
def test_a_checkpoint_is_known_by_its_last_norm(tmp_path, name) -> None:
    """Whatever files call it, in one file or several."""
    for size in ("1GB", "100KB"):
        oracle = make(name, tmp_path / size, max_shard_size=size)
        (norm,) = (one for of, one in oracle.named_parameters() if re.fullmatch(r"model\.\w*norm\w*\.weight", of))
        assert final_norm_digest(tmp_path / size) == sha256(norm.detach().numpy().tobytes()).hexdigest()


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_configurations(name) -> None:
    millions, values = PUBLISHED[name]
    assert stored_parameters(ModelConfig.read(Fields(values, name))) / 1e6 == pytest.approx(millions, rel=0.002)


def _parts(reader: Reader, table: PageTable) -> list[Tensor]:
    state = recurrent_state(table)
    assert state is not None and reader.model.store.states is not None
    return [part.clone() for part in parts_of(reader.model.store.states, state)]


def _equal(some: list[Tensor], others: list[Tensor]) -> bool:
    return all(torch.equal(mine, its) for mine, its in zip(some, others, strict=True))


def test_a_text_that_stops_inside_a_page_leaves_its_last_boundary(family) -> None:
    """As its mark, which has the bits of a text that ends there."""
    rng, reader = random.Random(1), Reader(family("qwen3_5").decoder(torch.float32))
    tokens = random_tokens(rng, 45, 300)
    for cuts in ((45,), (7, 30, 8), (32, 13), (1,) * 45):
        table, short = reader.open(), reader.open(tokens[:32])
        for begin, end in pairwise([0, *torch.tensor(cuts).cumsum(0).tolist()]):
            reader.read(table, tokens[begin:end])
        table.truncate(40)
        assert table.length == 32 and _equal(_parts(reader, table), _parts(reader, short))
        table.release()
        short.release()


def test_rows_of_a_recycled_state_page_begin_with_nothing(family) -> None:
    """Whatever was there before: pages of other texts, not cleared, and NaN."""
    rng, reader = random.Random(2), Reader(family("qwen3_5").decoder(torch.float32))
    tokens = random_tokens(rng, 20, 300)
    wanted = reader.alone(tokens)
    for _ in range(3):
        table = reader.open(random_tokens(rng, 21, 300))
        table.release()
        assert torch.equal(reader.model.run([reader.rows(table, tokens)]).logits, wanted)
        table.release()


def test_without_room_for_another_state_nothing_is_reserved() -> None:
    pool = PagePool(9, 4)
    pool.attach(StatePages(1, 1 + 2, pool.page_size))
    first, second = PageTable(pool), PageTable(pool)
    first.reserve(3)
    with pytest.raises(RuntimeError, match="state pages"):
        second.reserve(3)
    assert not second.pages
    first.release()
    pool.check([first, second])
    second.reserve(3)


def test_nodes_out_of_order_are_refused(family) -> None:
    """A level of a tree by itself, as a draft model grows it, goes on from states that are nowhere."""
    reader = Reader(family("qwen3_5").decoder(torch.float32))
    table = reader.open([1, 2, 3])
    table.reserve(3)
    with pytest.raises(AssertionError, match="whole tree"):
        reader.run(Rows(table, [5, 6], table.length, [1, 2], [0b11, 0b101]))
