"""Plain decoding samples from transformers' logits, so that all runs do not agree on the same mistake."""

from __future__ import annotations

import random
from itertools import cycle

import pytest
import torch

from foresay.spec.sample import gumbel_row
from foresay.spec.sampling import SamplingParams
from tests.same_tokens.runs import plain
from tests.same_tokens.witness import Job
from tests.verifier.families import FAMILIES
from tests.verifier.reading import random_tokens

SEED = 11


@pytest.mark.parametrize(("family", "temperature"), [*zip(FAMILIES, cycle((0.0, 0.7, 1.0)), strict=False)])
def test_each_token_is_the_draw_from_the_oracles_logits(pair, family, temperature) -> None:
    models = pair(family)
    prompt = random_tokens(random.Random(family), 40, models.vocab_size)
    params = SamplingParams(temperature=temperature, seed=SEED, max_tokens=40, ignore_eos=True)
    tokens = prompt + plain(models.target, [Job("one", prompt, params)])["one"].tokens
    oracle = FAMILIES[family][1].from_pretrained(models.directory, dtype=torch.float32)
    oracle.config.output_hidden_states = True  # else Gemma 4's expects embeddings of layers where some share keys
    with torch.inference_mode():
        logits = oracle(torch.tensor([tokens])).logits[0]
    for position in range(len(prompt), len(tokens)):
        scores = logits[position - 1]
        if temperature:
            scores = scores / temperature + gumbel_row(SEED, position, models.vocab_size)
        assert scores.max() - scores[tokens[position]] < 3e-4, f"token {position - len(prompt)}"
