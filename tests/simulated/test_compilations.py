"""Whatever a server launches was captured and compiled before it was ready: all streams would wait for that.

Launches of a server on the simulated device go through Triton's own binder too, which says for what a kernel is
compiled.
"""

from __future__ import annotations

import pytest

from foresay.server.engine.build import build_engine
from foresay.server.settings.config import EngineConfig
from foresay.spec.engine import Engine
from foresay.spec.request import Request
from foresay.spec.sampling import SamplingParams
from foresay.verifier.graphs.capture import CapturedGraphs, Work
from tests.kernels.binder import bound
from tests.simulated import test_engine
from tests.simulated.device import CURRENT, simulated
from tests.simulated.graph import captured
from tests.simulated.test_engine import build_there

KINDS = (
    SamplingParams(max_tokens=12, temperature=0.0, ignore_eos=True),
    SamplingParams(max_tokens=9, temperature=1.0, top_p=0.95, top_k=20, seed=3, frequency_penalty=0.5, ignore_eos=True),
    SamplingParams(max_tokens=12, temperature=0.7, min_p=0.05, seed=4, logprobs=2, ignore_eos=True),
)


def serve(engine: Engine, most: int) -> None:
    """One request alone, then more and more of them together, until all slots are taken, of short and long prompts."""
    for together in sorted({1, 2, min(3, most), most}):
        for number in range(together):
            prompt = list(range(7, 10 + (90 if number % 2 else 3) + number))
            params = KINDS[(together + number) % len(KINDS)]
            engine.add(Request(id=f"{together}.{number}", prompt=prompt, params=params))
        while engine.has_work:
            for delta in engine.step():
                assert delta.error is None, delta.error


@pytest.mark.slow
@pytest.mark.parametrize(
    ("draft", "tree", "graphs", "sequences"),
    [
        pytest.param("draft_model", "3,2,1", True, 6, marks=pytest.mark.soak),
        pytest.param("draft_model", "3,2,1", False, 6, marks=pytest.mark.soak),
        ("eagle3", "3,2,1", True, 6),
        pytest.param("ngram", "1,1,1", True, 6, marks=pytest.mark.soak),
        ("auto", None, True, 2),
        pytest.param("auto", None, True, 6, marks=pytest.mark.soak),
    ],
)
def test_nothing_is_captured_or_compiled_while_a_server_answers(draft, tree, graphs, sequences, monkeypatch) -> None:
    config = EngineConfig(
        draft=draft, draft_tree=tree, dtype="float32", device="cpu", graphs=graphs,
        max_seqs=sequences, max_model_len=160, kv_tokens=1200,
    )  # fmt: skip
    build_there(monkeypatch)
    monkeypatch.setattr(CURRENT, "binding", set())
    captures = list[Work]()

    def counted(work: Work) -> CapturedGraphs:
        captures.append(work)
        return captured(work)

    monkeypatch.setattr(test_engine, "captured", counted)
    with simulated(), bound(counting=False) as launches:
        engine = build_engine(config)
        ready = {name: set(keys) for name, keys in launches.compiled.items()}
        assert ready["linear_tiles"], "launches are seen"
        before = len(captures)
        serve(engine, sequences)
    assert len(captures) == before > 0 or not graphs
    late = {name: len(keys - ready.get(name, set())) for name, keys in launches.compiled.items()}
    assert not {name: count for name, count in late.items() if count}
