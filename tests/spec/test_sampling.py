"""SamplingParams: what is refused, by which name, what the switches mean, and that docs/options.md names them."""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import Any

import msgspec
import pytest

from foresay.spec.errors import InvalidRequest
from foresay.spec.sampling import SamplingParams

OUT_OF_RANGE: dict[str, list[Any]] = {
    "temperature": [-0.1, 2.5, math.nan, math.inf],
    "top_k": [-2],
    "top_p": [0.0, -0.5, 1.01, math.nan],
    "min_p": [-0.01, 1.01, math.nan],
    "max_tokens": [0, -5],
    "min_tokens": [-1],
    "presence_penalty": [-2.01, 2.01, math.nan],
    "frequency_penalty": [-2.01, math.inf],
    "repetition_penalty": [0.0, -1.0, 100.5, math.nan],
    "logprobs": [-1, 21],
    "prompt_logprobs": [-1, 21],
    "stop_token_ids": [(3, -1), (3, 50)],
    "allowed_token_ids": [(3, -1), (3, 50)],
}


@pytest.mark.parametrize(("field", "value"), [(name, each) for name, bad in OUT_OF_RANGE.items() for each in bad])
def test_values_out_of_range_are_refused_by_name(field: str, value: Any) -> None:
    with pytest.raises(InvalidRequest) as caught:
        SamplingParams(**{field: value}).validate(vocab_size=50)
    assert caught.value.param == field
    assert field in caught.value.message
    assert str(value[1] if isinstance(value, tuple) else value) in str(caught.value)


@pytest.mark.parametrize(
    ("field", "value", "says"),
    [
        ("logit_bias", {3: 100.5}, "numbers between -100 and 100"),
        ("logit_bias", {3: -100.5}, "numbers between -100 and 100"),
        ("logit_bias", {3: math.nan}, "numbers between -100 and 100"),
        ("logit_bias", {50: 1.0}, "holds 50, which is not a token"),
        ("logit_bias", {-1: 1.0}, "holds -1, which is not a token"),
        ("allowed_token_ids", (), "at least one token"),
        ("bad_words", ((3,), ()), "sequences of at least one token"),
        ("bad_words", ((3,), (4, 50)), "holds 50, which is not a token"),
    ],
)
def test_token_lists_are_refused_by_name(field: str, value: Any, says: str) -> None:
    with pytest.raises(InvalidRequest, match=f"^{field} .*{says}") as caught:
        SamplingParams(**{field: value}).validate(vocab_size=50)
    assert caught.value.param == field


def test_min_tokens_may_not_exceed_max_tokens() -> None:
    with pytest.raises(InvalidRequest) as caught:
        SamplingParams(min_tokens=9, max_tokens=8).validate()
    assert caught.value.param == "min_tokens"
    SamplingParams(min_tokens=8, max_tokens=8).validate()
    SamplingParams(min_tokens=8).validate()


@pytest.mark.parametrize(
    "sampling",
    [
        SamplingParams(),
        SamplingParams(temperature=0.0),
        SamplingParams(temperature=2.0, top_k=-1, top_p=1.0, min_p=1.0),
        SamplingParams(top_k=10**9, top_p=1e-9, max_tokens=1, min_tokens=1),
        SamplingParams(seed=-3, stop_token_ids=(0, 49), ignore_eos=True),
        SamplingParams(seed=2**70),
        SamplingParams(presence_penalty=-2.0, frequency_penalty=2.0, repetition_penalty=0.01),
        SamplingParams(logit_bias={0: -100.0, 49: 100.0}, allowed_token_ids=(0, 49), bad_words=((0,), (49, 0))),
        SamplingParams(logprobs=0, prompt_logprobs=20, repetition_penalty=100.0),
    ],
)
def test_values_in_range_are_taken(sampling: SamplingParams) -> None:
    sampling.validate(vocab_size=50)


def test_parameters_cross_the_wire_unchanged() -> None:
    sampling = SamplingParams(
        temperature=0.3, seed=2**63, stop_token_ids=(1, 2), max_tokens=5, logit_bias={3: 0.1}, bad_words=((1, 2), (3,))
    )
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(sampling), type=SamplingParams) == sampling


ROOT = Path(__file__).parents[2]
TABLE = [line for line in (ROOT / "docs" / "options.md").read_text().splitlines() if line.startswith("|")][2:]


@pytest.mark.parametrize("field", SamplingParams.__struct_fields__)
def test_every_field_is_in_the_table(field: str) -> None:
    assert [line for line in TABLE if f"`{field}`" in line.split("|")[1]], f"docs/options.md says nothing of {field}"


@pytest.mark.parametrize("line", TABLE)
def test_every_proof_exists(line: str) -> None:
    proofs = line.split("|")[3]
    files = re.findall(r"`(tests/[\w/]+\.py)`", proofs)
    assert files
    sources = "".join((ROOT / file).read_text() for file in files)
    for name in re.findall(r"`(test_\w+)`", proofs):
        assert f"def {name}(" in sources, name
