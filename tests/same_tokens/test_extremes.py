"""Requests with extreme values in every field: a typed error each, or an answer; the engine goes on."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, processors

from foresay import Engine
from foresay.spec.engine import EngineCore
from foresay.spec.errors import InvalidRequest
from foresay.spec.request import Delta, Grammar, Request
from foresay.spec.sampling import SamplingParams
from foresay.spec.tree import TreeShape
from tests.heads.published import make_medusa
from tests.same_tokens.models import Pair, engine_of
from tests.same_tokens.proposers import RandomTrees
from tests.same_tokens.runs import assert_same, jobs_of, plain
from tests.same_tokens.test_directories import write_tokenizer
from tests.same_tokens.witness import run
from tests.verifier.families import make
from tests.verifier.reading import load_decoder

VOCAB = 300
NUMBERS = [0, -1, 1, 2, 7, VOCAB - 1, VOCAB, 511, 512, 1 << 31, 1 << 63, -(1 << 63) - 1, 1 << 64, 10**30]
REALS = [0.0, 1.0, 0.5, -1.0, 2.0, 1e-40, 100.0, 1e30, -1e300, float("inf"), float("-inf"), float("nan")]
TOKENS = [[0], [5, 6, 7], [VOCAB - 1] * 9, [VOCAB], [-1], [5, 1 << 31], [1 << 63], [-(10**30)], [], [3] * 600]
SAMPLING: dict[str, list[Any]] = {
    **dict.fromkeys(("temperature", "top_p", "min_p"), REALS),
    **dict.fromkeys(("presence_penalty", "frequency_penalty", "repetition_penalty"), REALS),
    **dict.fromkeys(("top_k", "seed", "max_tokens", "min_tokens", "logprobs", "prompt_logprobs"), NUMBERS),
    "stop_token_ids": [tuple(tokens) for tokens in TOKENS],
    "allowed_token_ids": [tuple(tokens) for tokens in TOKENS],
    "bad_words": [(tuple(tokens), (5,)) for tokens in TOKENS],
    "logit_bias": [{token: bias} for token in NUMBERS for bias in (*REALS, -100.0)],
    "ignore_eos": [True],
}
OTHER: dict[str, list[Any]] = {
    **dict.fromkeys(("prompt", "forced", "prediction"), TOKENS),
    "most_drafted": NUMBERS,
    "grammar": [Grammar(text="x", after=token) for token in NUMBERS],
    "fork_of": ["nobody", "0", "1"],
    "draft_method": ["nobody"],
    "speculate": [False],
    "aside": [True],
}


def _request(rng: random.Random, number: int) -> Request:
    """One to three fields with any value at all, the others usual."""
    sampling: dict[str, Any] = {"seed": number, "max_tokens": rng.randint(1, 6), "min_tokens": rng.randint(0, 1)}
    fields: dict[str, Any] = {"prompt": [rng.randrange(VOCAB) for _ in range(rng.randint(1, 20))]}
    for name in rng.sample([*SAMPLING, *OTHER], rng.randint(1, 3)):
        (sampling if name in SAMPLING else fields)[name] = rng.choice((SAMPLING | OTHER)[name])
    return Request(id=str(number), params=SamplingParams(**sampling), **fields)


def _step(engine: EngineCore) -> list[Delta]:
    deltas = engine.step()
    engine.check()
    return deltas


@pytest.mark.parametrize("drafter", ["model", "random trees"])
def test_only_typed_errors_come_and_the_engine_goes_on(pair, drafter: str) -> None:
    models: Pair = pair("llama2", layers=2)
    maker = models.draft_model if drafter == "model" else lambda pool: RandomTrees(VOCAB + 5)
    engine = engine_of(models.target, maker, TreeShape.parse("3,2,2"), prefix=True)
    rng = random.Random(1)
    refused, fields, ended = 0, set[str](), dict[str, Delta]()
    for number in range(300):
        request = _request(rng, number)
        try:
            engine.add(request)
        except InvalidRequest as error:
            fields.add(error.param)
            refused += 1
        for delta in _step(engine):
            if delta.finish_reason is not None:
                ended[delta.id] = delta
    while engine.has_work:
        ended |= {delta.id: delta for delta in _step(engine) if delta.finish_reason is not None}
    assert refused + len(ended) == 300
    assert fields > {"prompt", "forced", "prediction", "stop_token_ids", "logit_bias", "max_tokens", "top_p"}
    assert "" not in fields
    assert min(refused, len(ended)) > 60
    assert all("finite" not in (delta.error or "") for delta in ended.values())
    jobs = jobs_of(VOCAB, (9, 17), 8)
    assert_same(plain(models.target, jobs), run(engine, jobs))


def test_ids_beyond_the_model_in_its_files_do_no_harm(tmp_path) -> None:
    """Ends of text, added tokens and what the tokenizer puts first, all past the rows of the embedding."""
    target = make("llama2", tmp_path / "target", bos_token_id=310, pad_token_id=None)
    target.generation_config.eos_token_id = [2, 4000]
    target.generation_config.save_pretrained(tmp_path / "target")
    make_medusa(tmp_path / "medusa", load_decoder(tmp_path / "target", torch.float32), "authors")
    write_tokenizer(tmp_path / "target", 290)
    backend = Tokenizer.from_file(str(tmp_path / "target" / "tokenizer.json"))
    backend.add_special_tokens([f"<|{number}|>" for number in range(40)])
    begun = backend.token_to_id("<|30|>")
    assert begun == 320
    backend.post_processor = processors.TemplateProcessing(single="<|30|> $A", special_tokens=[("<|30|>", begun)])
    backend.save(str(tmp_path / "target" / "tokenizer.json"))
    given: dict[str, Any] = {"kv_tokens": 640, "max_model_len": 256, "threads": 1, "draft_tokens": 4}
    with Engine(str(tmp_path / "target"), f"medusa:{tmp_path / 'medusa'}", **given) as engine:
        assert engine.info.eos_token_ids == (2,)
        assert len(engine.generate([5, 6], max_tokens=8, min_tokens=8, seed=0).token_ids) == 8
        with pytest.raises(InvalidRequest, match="prompt holds 320, which is not a token of the model"):
            engine.generate("the fox", max_tokens=4)
