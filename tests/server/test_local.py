"""The facade: text in, text out, in this process, with the bundled target."""

from __future__ import annotations

import re
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import msgspec
import pytest

import foresay
from foresay import Completion, ConfigurationError, Engine, ForesayError, InvalidRequest, SamplingParams
from foresay.server.engine_process.text_stream import colours
from foresay.server.text.parts import drafters_of
from foresay.spec import errors
from foresay.spec.names import DRAFTERS
from foresay.spec.request import Delta, Origin

START = "Once upon a time"
GREEDY = SamplingParams(temperature=0.0, max_tokens=16, ignore_eos=True)


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    with Engine("bundled", "ngram", draft_tokens=2, max_model_len=256, dtype="float32") as engine:
        yield engine


def test_text_and_token_ids_agree(engine: Engine) -> None:
    completion = engine.generate(START, GREEDY)
    assert completion.prompt_token_ids == engine.tokenizer.encode(START)
    assert len(completion.token_ids) == 16
    assert completion.finish_reason == "length"
    whole = engine.tokenizer.decode(completion.prompt_token_ids + completion.token_ids)
    assert whole == START + completion.text
    assert completion.statistics is not None
    assert completion.statistics.completion_tokens == 16


def test_token_ids_are_a_prompt_too(engine: Engine) -> None:
    from_text = engine.generate(START, GREEDY)
    assert engine.generate(engine.tokenizer.encode(START), GREEDY).token_ids == from_text.token_ids


def test_a_seed_that_was_drawn_gives_the_same_text_again(engine: Engine) -> None:
    first = engine.generate(START, max_tokens=12)
    assert engine.generate(START, max_tokens=12, seed=first.seed).token_ids == first.token_ids


def test_logprobs_come_with_the_completion(engine: Engine) -> None:
    completion = engine.generate(START, GREEDY, logprobs=2, prompt_logprobs=1)
    assert completion.logprobs is not None
    assert [one.token for one in completion.logprobs] == completion.token_ids
    assert all(one.top[0] == (one.token, one.logprob) for one in completion.logprobs)
    assert completion.prompt_logprobs is not None
    assert completion.prompt_logprobs[0] is None
    assert [one.token for one in completion.prompt_logprobs if one] == completion.prompt_token_ids[1:]
    plain = engine.generate(START, GREEDY)
    assert plain.token_ids == completion.token_ids
    assert (plain.logprobs, plain.prompt_logprobs) == (None, None)


def test_keywords_go_on_top_of_the_parameters(engine: Engine) -> None:
    assert len(engine.generate(START, GREEDY, max_tokens=3).token_ids) == 3
    with pytest.raises(InvalidRequest, match="max_token is not a sampling field"):
        engine.generate(START, max_token=3)


def test_a_stream_is_the_text_in_pieces(engine: Engine) -> None:
    whole = engine.generate(START, GREEDY)
    stream = engine.stream(START, GREEDY)
    pieces = list(stream)
    assert len(pieces) > 1
    assert "".join(pieces) == whole.text
    assert stream.completion is not None
    assert stream.completion.token_ids == whole.token_ids


def test_streams_may_be_read_in_turns(engine: Engine) -> None:
    alone = engine.generate("The king said", GREEDY).text
    first, second = engine.stream(START, GREEDY), engine.stream("The king said", GREEDY)
    pieces = [next(second), next(first), next(second)]
    first.close()
    assert pieces[0] + pieces[2] + "".join(second) == alone
    assert first.completion is not None
    assert first.completion.finish_reason == "cancelled"


WRONG: list[tuple[str, object, dict[str, object]]] = [
    *(
        ("prompt", prompt, {})
        for prompt in ([-1], [10**30], [1 << 63], [True], [1.5], [None], [1, "a"], [[]], "", b"a", [])
    ),
    *(("prompt", prompt, {}) for prompt in (None, {"a": 1}, 5)),
    ("max_tokens", START, {"max_tokens": True}),
    ("max_tokens", START, {"max_tokens": "3"}),
    ("max_tokens", START, {"max_tokens": 10**30}),
    ("seed", START, {"seed": 1.5}),
    ("temperature", START, {"temperature": "hot"}),
    ("top_p", START, {"top_p": 2.0}),
    ("temperature", START, {"temperature": 10**400}),
    ("stop_token_ids", START, {"stop_token_ids": [10**9]}),
    ("stop_token_ids", START, {"stop_token_ids": ["x"]}),
    ("stop", START, {"stop": [1]}),
    ("stop", START, {"stop": "\ud800"}),
    ("prompt", "not UTF-8: \udcff", {}),
    ("bad_words", START, {"bad_words": [[-1]]}),
    ("bad_words", START, {"bad_words": "the"}),
    ("logit_bias", START, {"logit_bias": {10**30: 1.0}}),
    ("logit_bias", START, {"logit_bias": {"5": 1.0}}),
    ("params", START, {"params": {"max_tokens": 3}}),
    ("structured_outputs", START, {"structured_outputs": 5}),
]


@pytest.mark.parametrize(("field", "prompt", "given"), WRONG)
def test_whatever_python_lets_one_write_is_refused_naming_the_field(
    engine: Engine, field: str, prompt: object, given: dict[str, object]
) -> None:
    with pytest.raises(InvalidRequest) as caught:
        engine.generate(prompt, **given)  # type: ignore[arg-type]
    assert caught.value.param == field
    assert field in caught.value.message
    assert not engine._engine.has_work


def test_a_conversation_may_hold_calls(engine: Engine) -> None:
    """A template may show them, as in the server."""
    call = {"type": "function", "function": {"name": "f", "arguments": {}}}
    asked = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": None, "tool_calls": [call]}]
    assert engine.chat(asked, GREEDY).token_ids  # type: ignore[arg-type]


def test_messages_of_another_form_are_refused(engine: Engine) -> None:
    for messages in (5, [1], None, [{"role": "user", "content": [{"type": "text", "text": "Hi"}]}]):
        with pytest.raises(InvalidRequest, match="messages"):
            engine.chat(messages)  # type: ignore[arg-type]


def test_the_chat_template_is_used(engine: Engine) -> None:
    messages = [{"role": "user", "content": "How many is 2 + 2?"}]
    completion = engine.chat(messages, GREEDY)
    rendered = engine.tokenizer.render(messages).text
    assert completion.prompt_token_ids == engine.tokenizer.encode(rendered, add_special_tokens=False)
    assert "".join(engine.stream_chat(messages, GREEDY)) == completion.text
    assert engine.chat("How many is 2 + 2?", GREEDY).text == completion.text, "a text is the user's only message"


def test_closing_gives_every_page_back(engine: Engine) -> None:
    streams = [engine.stream(START, GREEDY) for _ in range(3)]
    next(streams[1])
    for stream in streams:
        stream.close()
    engine._engine.check()
    assert engine.generate(START, GREEDY).finish_reason == "length"


def test_a_context_without_room_for_an_answer_is_refused_at_the_start() -> None:
    with pytest.raises(ConfigurationError, match=r"a context of 1 tokens.*at least 2"):
        Engine("bundled", "ngram", max_model_len=1)
    with Engine("bundled", "ngram", max_model_len=2, dtype="float32") as engine:
        assert len(engine.generate([5], temperature=0.0).token_ids) == 1


def test_a_stream_shows_where_its_tokens_come_from_and_may_be_decoded_plainly(engine: Engine) -> None:
    requested = [{"role": "user", "content": "the fox and the fox and the fox and"}]
    drafted = engine.stream_chat(requested, GREEDY, provenance=True)
    plain = engine.stream_chat(requested, GREEDY, speculate=False, provenance=True)
    assert drafted.result().token_ids == plain.result().token_ids == [token.id for token in plain.tokens]
    assert "".join(token.text for token in drafted.tokens) == drafted.result().text
    assert len(plain.steps) == 16 and not any(step.drafted for step in plain.steps)
    assert any(step.drafted for step in drafted.steps)


def test_a_stream_that_shall_close_does_so_after_the_step(engine: Engine) -> None:
    stream = engine.stream(START, GREEDY)
    next(stream)
    stream.close_soon()
    assert stream.completion is None
    assert list(stream) == [] and stream.result().finish_reason == "cancelled"
    assert engine.generate(START, GREEDY).finish_reason == "length"


def test_an_interrupt_waits_for_the_step_and_ends_the_request(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    step, before, steps = engine._engine.step, signal.signal(signal.SIGINT, signal.default_int_handler), []

    def interrupted() -> list[Delta]:
        signal.raise_signal(signal.SIGINT)
        steps.append(step())
        return steps[-1]

    monkeypatch.setattr(engine._engine, "step", interrupted)
    for use in (engine.generate, engine.chat):
        with pytest.raises(KeyboardInterrupt):
            use(START, GREEDY)
    signal.signal(signal.SIGINT, before)
    step()
    assert len(steps) == 2 and not engine._engine.has_work


def test_threads_may_share_an_engine(engine: Engine) -> None:
    def written(seed: int) -> list[int]:
        return engine.generate(START, max_tokens=32, seed=seed).token_ids

    with ThreadPoolExecutor(4) as threads:
        assert list(threads.map(written, range(8))) == [written(seed) for seed in range(8)]


def test_every_error_is_exported() -> None:
    mine = {name for name, error in vars(errors).items() if isinstance(error, type) and issubclass(error, ForesayError)}
    assert mine <= set(foresay.__all__)
    assert all(getattr(foresay, name) is getattr(errors, name) for name in mine)
    assert foresay.__all__ == sorted(foresay.__all__)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ("temprature", "temprature is not a sampling field"),
        ("n", "n is not a sampling field"),
    ],
)
def test_an_unknown_field_is_named_with_the_one_that_was_meant(engine: Engine, given: str, said: str) -> None:
    fields: dict[str, Any] = {given: 1}
    with pytest.raises(InvalidRequest) as caught:
        engine.stream(START, **fields)
    assert (caught.value.param, caught.value.message) == (given, said)


def test_a_closed_engine_says_so() -> None:
    with Engine("bundled", "none", max_model_len=64, dtype="float32") as engine:
        stream = engine.stream(START, GREEDY)
        assert repr(engine) == f"<Engine bundled, drafted by none, float32 on {engine.info.device}>"
        assert repr(stream) == "<TextStream: 0 tokens so far>"
    assert stream.result().finish_reason == "cancelled"
    assert repr(engine).endswith(", closed>")
    for use in (lambda: engine.generate(START), lambda: engine.chat("Hi"), lambda: engine.stream(START), engine.step):
        with pytest.raises(ForesayError, match="this engine is closed"):
            use()
    engine.close()


def test_a_completion_is_short_to_read_and_coloured_in_a_notebook(engine: Engine) -> None:
    said = engine.generate(START, max_tokens=16, structured_outputs={"choice": [" there was a king"]})
    assert len(said.drafters) == len(said.offsets) == len(said.token_ids)
    assert "".join(text for text, _ in said._spans()) == said.text
    assert said.statistics is not None
    drafted = [drafter for drafter in said.drafters if drafter]
    assert len(drafted) == said.statistics.accepted > 0
    assert set(drafted) == {"grammar"}
    html = said._repr_html_()
    assert html.count('title="drafted by grammar"') == 1 + len([t for t, d in said._spans() if d and t])
    assert re.search(rf">{len(said.token_ids)} tokens in {said.statistics.steps} passes, \d+\.\d\d s ", html)
    assert str(said) == f"{said}" == said.text == " there was a king"
    assert repr(said) == f"Completion(' there was a king', {len(said.token_ids)} tokens, stop, seed={said.seed})"
    assert len(repr(msgspec.structs.replace(said, text="long " * 100))) < 120


def test_what_was_written_is_text_in_a_notebook_and_not_html() -> None:
    texts: dict[str, Any] = {
        "text": "<b>&",
        "token_ids": [1, 2],
        "prompt_token_ids": [],
        "drafters": ["", "x<y"],
        "offsets": [0, 1],
    }
    said = Completion(**texts, finish_reason="stop", seed=0, exact=True, statistics=None)
    html = said._repr_html_()
    assert "&lt;" in html and "<b>" not in html and "x<y" not in html and colours()["other"] in html


def test_tokens_are_of_the_drafter_that_proposed_them() -> None:
    origin = Origin(1, "suffix+ngram", [-1, 0, 1, 2], 1, [1, 2, 3], {}, ["grammar", "ngram", "suffix"])
    assert drafters_of(origin, 4) == ["grammar", "ngram", "suffix", ""]
    assert drafters_of(origin, 2) == ["grammar", "ngram"]
    assert drafters_of(None, 2) == ["", ""]


def test_every_drafter_has_a_colour() -> None:
    assert colours().keys() >= {*DRAFTERS, "other"}
