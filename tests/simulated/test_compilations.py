"""Whatever a server launches was captured and compiled before it was ready: all streams would wait for that. And its
tokens are those of the CPU.

Launches of a server on the simulated device go through Triton's own binder too, which says for what a kernel is
compiled.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from foresay.server.engine.build import build_engine
from foresay.server.settings.config import EngineConfig
from foresay.spec.engine import EngineCore
from foresay.spec.request import Request
from foresay.spec.sampling import SamplingParams
from foresay.verifier.graphs.capture import CapturedGraphs, Work
from foresay.verifier.graphs.runner import GraphStepRunner
from tests.kernels.binder import bound
from tests.same_tokens.test_directories import config
from tests.simulated import test_engine
from tests.simulated.device import CURRENT, simulated
from tests.simulated.graph import captured
from tests.simulated.test_engine import build_there, count_passes, texts
from tests.verifier.families import make

KINDS = (
    SamplingParams(max_tokens=12, temperature=0.0, ignore_eos=True),
    SamplingParams(max_tokens=9, temperature=1.0, top_p=0.95, top_k=20, seed=3, frequency_penalty=0.5, ignore_eos=True),
    SamplingParams(max_tokens=12, temperature=0.7, min_p=0.05, seed=4, logprobs=2, ignore_eos=True),
)


def serve(engine: EngineCore, most: int) -> None:
    """One request alone, with a prompt of each size, then more and more of them together, until all slots are taken, of
    short and long prompts."""
    mixed = [(93 if number % 2 else 6) + number for number in range(most)]
    lengths = [[3], [7], [20], [50], *(mixed[:together] for together in sorted({2, min(3, most), most}))]
    for turn, together in enumerate(lengths):
        for number, length in enumerate(together):
            prompt, params = list(range(107, 107 + length)), KINDS[(turn + number) % len(KINDS)]
            engine.add(Request(id=f"{turn}.{number}", prompt=prompt, params=params))
        while engine.has_work:
            for delta in engine.step():
                assert delta.error is None, delta.error


@contextmanager
def ready(
    settings: EngineConfig, monkeypatch: pytest.MonkeyPatch, *kernels: str
) -> Iterator[tuple[EngineCore, Callable[[], Any]]]:
    """An engine on the simulated device, and what was compiled since it was built. kernels: some that were before."""
    monkeypatch.setattr(CURRENT, "binding", set())
    with simulated(), bound(counting=False) as launches:
        engine = build_engine(settings)
        compiled = {name: set(keys) for name, keys in launches.compiled.items()}
        assert all(compiled.get(kernel) for kernel in kernels), "launches are seen"
        yield (
            engine,
            lambda: {
                name: late for name, keys in launches.compiled.items() if (late := keys - compiled.get(name, set()))
            },
        )


@pytest.mark.slow
@pytest.mark.parametrize(
    ("draft", "tree", "graphs", "sequences"),
    [
        pytest.param("draft_model", "3,2,1", True, 6, marks=pytest.mark.soak),
        pytest.param("draft_model", "3,2,1", False, 6, marks=pytest.mark.soak),
        ("eagle3", "3,2,1", True, 3),
        pytest.param("ngram", "1,1,1", True, 6, marks=pytest.mark.soak),
        pytest.param("auto", None, True, 6, marks=pytest.mark.soak),
    ],
)
def test_nothing_is_captured_or_compiled_while_a_server_answers(draft, tree, graphs, sequences, monkeypatch) -> None:
    config = EngineConfig(
        draft=draft, draft_tree=tree, dtype="float32", device="cpu", graphs=graphs,
        max_seqs=sequences, max_model_len=160, kv_tokens=1200,
    )  # fmt: skip
    wanted = texts(build_engine(config))
    build_there(monkeypatch)
    captures = list[Work]()

    def counted(work: Work) -> CapturedGraphs:
        captures.append(work)
        return captured(work)

    monkeypatch.setattr(test_engine, "captured", counted)
    with ready(config, monkeypatch, "linear_tiles") as (engine, late):
        before = len(captures)
        serve(engine, sequences)
        assert len(captures) == before > 0 or not graphs
        assert not late()
        by_op = count_passes(monkeypatch)
        assert texts(engine) == wanted
    assert by_op[0] < 12 or not graphs  # of prompts, and of what a draft model missed; all others were replayed
    assert isinstance(engine.runner, GraphStepRunner) == graphs


@pytest.mark.slow
def test_a_vocabulary_whose_rows_do_not_begin_on_16_bytes(tmp_path: Path, monkeypatch) -> None:
    """Granite 3 has 49,155 tokens. The logits after a prompt are behind those of the trees of a step."""
    make("granite", tmp_path, vocab_size=303, num_hidden_layers=1)
    build_there(monkeypatch)
    settings = config(tmp_path, "none", max_seqs=2, max_model_len=160, kv_tokens=1200)
    with ready(settings, monkeypatch, "scan", "decide") as (engine, late):
        serve(engine, 2)
        assert not late()
