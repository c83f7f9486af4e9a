"""What targets of the catalog take, and which fit a machine: by the very plan that the server makes."""

from __future__ import annotations

from contextlib import suppress

import pytest

from foresay.server.catalog.catalog import KnownShape, KnownTarget, known_targets
from foresay.server.cli.main import COMMANDS, build_parser, main
from foresay.server.cli.models import TOKENS, WEIGHTS, fitting, flags, needed
from foresay.server.engine import parameters
from foresay.server.engine.build import plan
from foresay.server.engine.parameters import Device, quantized
from foresay.server.settings.config import EngineConfig, ServeConfig
from foresay.server.settings.load import load
from foresay.server.settings.resolved import BUNDLED, CannotRun, max_model_len
from foresay.verifier.model.config import ModelConfig

GIB = 1 << 30
FREE = 20 * GIB
LAPTOP = Device("cpu", 24 * GIB, FREE)
CARD = Device("cuda:0", 80 * GIB, 79 * GIB, "NVIDIA H100", (9, 0))


@pytest.fixture(autouse=True)
def bf16(monkeypatch) -> None:
    """Processors have it, whatever this one has."""
    monkeypatch.setattr(parameters, "multiplies_bf16", lambda: True)


@pytest.mark.parametrize("weights", WEIGHTS)
def test_memory_is_what_the_server_plans_for_the_files(weights) -> None:
    """Nothing but the shape is known, and the figure is that of the directory."""
    model = ModelConfig.from_directory(BUNDLED / "target")
    shape = KnownShape(**{name: getattr(model, name) for name in KnownShape.__struct_fields__})
    config = EngineConfig(max_model_len=shape.max_positions, kv_tokens=TOKENS)
    files = quantized(model, WEIGHTS[weights], "--quantize")
    planned = plan(config, shape.max_positions, "bfloat16", files, [], Device("cpu", 24 * GIB))
    assert needed(KnownTarget(id="x", shape=shape), weights, None, LAPTOP) == planned.total


def test_memory_of_a_known_size() -> None:
    """Qwen3-8B: 8.19e9 weights, 147,456 bytes of KV for a token; int8 halves its matrices, int4 quarters them."""
    target = known_targets()["Qwen/Qwen3-8B"]
    bf16, int8, int4 = (needed(target, weights, None, LAPTOP) / GIB for weights in WEIGHTS)
    cache = TOKENS * 147_456 / GIB
    assert 2 * 8.19e9 / GIB + cache < bf16 < 2 * 8.19e9 / GIB + cache + 0.6
    assert int8 == pytest.approx(bf16 - 7.06, abs=0.1)
    assert int4 == pytest.approx(int8 - 3.1, abs=0.2)
    with_draft = needed(target, "bf16", target.drafts[0], LAPTOP) / GIB
    assert with_draft - bf16 > 2 * 0.596e9 / GIB + TOKENS * 2 * 28 * 8 * 128 * 2 / GIB


@pytest.mark.parametrize(
    ("id", "fits"),
    [
        ("Qwen/Qwen3-8B", "bf16"),
        ("Qwen/Qwen3-14B", "int8"),
        ("Qwen/Qwen3-32B", "int4"),
        ("Qwen/Qwen2.5-72B-Instruct", None),
    ],
)
def test_which_weights_fit(id, fits) -> None:
    assert fitting(known_targets()[id], None, LAPTOP) == fits


def test_a_processor_without_bf16_keeps_its_embedding_and_cache_in_fp32(monkeypatch) -> None:
    """While weights take less than half of the memory, as the server decides."""
    old, target = Device("cpu", 64 * GIB, 60 * GIB), known_targets()["Qwen/Qwen3-8B"]
    usual = needed(target, "bf16", None, LAPTOP)
    monkeypatch.setattr(parameters, "multiplies_bf16", lambda: False)
    more = needed(target, "bf16", None, old) - usual
    assert more / GIB == pytest.approx((2 * 151_936 * 4096 + TOKENS * 147_456) / GIB, rel=0.1)
    assert needed(target, "bf16", None, LAPTOP) == usual


def test_memory_that_is_not_free_does_not_count() -> None:
    target = known_targets()["Qwen/Qwen3-8B"]
    assert fitting(target, None, Device("cpu", 24 * GIB, 7 * GIB)) == "int4"
    assert fitting(target, None, Device("cpu", 24 * GIB, 2 * GIB)) is None


@pytest.mark.parametrize("id", ["Qwen/Qwen3-8B", "Qwen/Qwen3-14B", "Qwen/Qwen3-32B", "Qwen/Qwen3-1.7B"])
def test_the_command_starts_with_the_longest_context_that_fits(id) -> None:
    target = known_targets()[id]
    weights = fitting(target, None, LAPTOP)
    assert weights is not None
    words = flags(target, weights, None, LAPTOP)
    given = vars(build_parser(COMMANDS["serve"]).parse_args(["bundled", *(words or ())]))
    config = load(ServeConfig, {k: v for k, v in given.items() if k in ServeConfig.__struct_fields__}, {}).config
    model = target.shape.model(config.quantize)
    length, device = max_model_len(config, model), Device("cpu", LAPTOP.total)
    assert plan(config, length, "bfloat16", model, [], device).total <= FREE
    if length < model.max_positions:
        longer = EngineConfig(kv_tokens=2 * length)
        with suppress(CannotRun):
            assert plan(longer, 2 * length, "bfloat16", model, [], device).total > FREE


def test_a_gpu_is_planned_as_the_server_plans_it() -> None:
    card, target = CARD, known_targets()["Qwen/Qwen2.5-72B-Instruct"]
    assert fitting(target, None, card) == "int4", "int8 would leave no room for a workspace"
    assert fitting(known_targets()["Qwen/Qwen3-32B"], None, card) == "bf16"
    tied = known_targets()["Qwen/Qwen3-1.7B"]
    assert needed(tied, "bf16", None, card) < needed(tied, "bf16", None, LAPTOP), "a tied head is stored once"


# -- what is printed -------------------------------------------------------------------------------------------------


@pytest.fixture
def laptop(monkeypatch, cache, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "of-wheels"))
    monkeypatch.setattr("foresay.server.cli.models.here", lambda: LAPTOP)


def test_the_table_shows_what_fits_and_fits_a_narrow_terminal(laptop, capsys) -> None:
    assert main(["models"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= 80, [line for line in lines if len(line) > 80]
    [row] = [line for line in lines if line.startswith("  Qwen/Qwen3-32B ")]
    assert row.split()[1:] == ["62.4", "32.7", "18.6", "fits", "in", "int4"]


def test_one_target_with_its_drafts_and_the_command(laptop, capsys) -> None:
    assert main(["models", "qwen3-14b"]) == 0
    lines = capsys.readouterr().out.splitlines()
    *rows, fetch, serve = lines
    assert max(map(len, rows)) <= 80
    [alone] = [row.split() for row in rows if row.startswith("alone ")]
    assert alone == ["alone", "28.5", "15.4", "9.5", "fits", "in", "int8"]
    assert any(row.startswith("with Qwen/Qwen3-0.6B ") and row.endswith("fits in int8") for row in rows)
    assert fetch == "  foresay pull Qwen/Qwen3-14B --draft"
    assert serve.startswith("  foresay serve Qwen/Qwen3-14B --draft Qwen/Qwen3-0.6B --quantize int8")


def test_a_target_without_drafts_to_fetch_names_the_head_that_ships_with_it(laptop, capsys) -> None:
    assert main(["models", "smollm2"]) == 0
    assert "Drafts that need no download: eagle3, suffix." in capsys.readouterr().out.splitlines()
    assert main(["models", "qwen3-14b"]) == 0
    assert "no download" not in capsys.readouterr().out


def test_one_that_does_not_fit_has_no_command(laptop, capsys) -> None:
    assert main(["models", "Qwen/Qwen2.5-72B-Instruct"]) == 0
    assert "not even in int4" in capsys.readouterr().out.splitlines()[-1]


def test_a_part_of_several_names_shows_these(laptop, capsys) -> None:
    assert main(["models", "CODER"]) == 0
    shown = capsys.readouterr().out
    assert "Qwen2.5-Coder-7B" in shown and "Qwen3" not in shown


def test_a_target_that_is_not_known(laptop, capsys) -> None:
    assert main(["models", "./mine"]) == 2
    assert "foresay check ./mine looks at any other model" in capsys.readouterr().err
