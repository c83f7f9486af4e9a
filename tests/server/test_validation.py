"""How requests are read (tests/routes/test_refusals.py has most of what is refused)."""

from __future__ import annotations

import msgspec
import pytest

from foresay.server.api.common import validation
from foresay.server.schemas.chat import ChatRequest, CompletionRequest
from foresay.server.text import conversation
from foresay.server.text.tokenizer import SamplingDefaults
from foresay.spec.errors import ContextLengthExceeded, InvalidRequest, inside, path_of, spelled
from foresay.spec.sampling import SamplingParams

NO_DEFAULTS = SamplingDefaults()


def completion(**fields) -> CompletionRequest:
    return validation.decoded(msgspec.json.encode({"prompt": "a", **fields}), CompletionRequest)


def chat(**fields) -> ChatRequest:
    return validation.decoded(
        msgspec.json.encode({"messages": [{"role": "user", "content": "a"}], **fields}), ChatRequest
    )


def params(request, defaults=NO_DEFAULTS) -> SamplingParams:
    return validation.sampling_params(request, defaults, vocab_size=100)


def refused(action) -> InvalidRequest:
    with pytest.raises(InvalidRequest) as caught:
        action()
    return caught.value


def test_what_is_refused_says_what_to_write_instead():
    wrong = {
        field: refused(lambda field=field: chat(**{field: "a"})).message for field in ("n_predict", "guided_regex")
    }
    assert wrong == {
        "n_predict": "n_predict is not supported by this server; write max_tokens",
        "guided_regex": "guided_regex is not supported by this server; write structured_outputs.regex",
    }


@pytest.mark.parametrize("kind", [completion, chat])
def test_null_is_accepted_for_every_optional_field(kind):
    model = CompletionRequest if kind is completion else ChatRequest
    optional = [field.name for field in msgspec.structs.fields(model) if field.default is None]
    assert len(optional) > 30
    request = kind(**dict.fromkeys(optional))
    assert params(request) == params(kind())


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"max_tokens": 1.5}, "max_tokens"),
        ({"prompt": {"a": 1}}, "prompt"),
        ({"stream": "yes"}, "stream"),
        ({"stream": True, "stream_options": {"include_usage": 3}}, "stream_options.include_usage"),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
        ({"spec_decode_metrics": "all"}, "spec_decode_metrics"),
        ({"use_beam_search": 0}, "use_beam_search"),  # of another type it is not harmless
        ({"length_penalty": True}, "length_penalty"),
    ],
)
def test_a_value_of_the_wrong_type_names_its_field(fields, param):
    assert refused(lambda: completion(**fields)).param == param


def test_max_completion_tokens_wins_and_is_named_in_complaints():
    assert params(chat(max_tokens=5, max_completion_tokens=7)).max_tokens == 7
    assert refused(lambda: params(chat(max_completion_tokens=0))).param == "max_completion_tokens"


def test_defaults_are_the_models_then_openais():
    recommended = SamplingDefaults(temperature=0.6, top_k=20, top_p=0.95, min_p=0.1, max_new_tokens=99)
    assert params(chat()) == SamplingParams()
    assert params(completion()) == SamplingParams(max_tokens=16)
    assert params(chat(), recommended) == SamplingParams(
        temperature=0.6, top_k=20, top_p=0.95, min_p=0.1, max_tokens=99
    )
    assert params(chat(temperature=0, top_k=0, top_p=1, min_p=0), recommended) == SamplingParams(
        temperature=0, max_tokens=99
    )


def test_stop_strings():
    assert validation.stop_strings(completion()) == ()
    assert validation.stop_strings(completion(stop="x")) == ("x",)
    assert validation.stop_strings(completion(stop=["x", "y"])) == ("x", "y")
    assert refused(lambda: validation.stop_strings(completion(stop=[""]))).param == "stop"
    assert refused(lambda: validation.stop_strings(completion(stop=["x"] * 17))).param == "stop"


@pytest.mark.parametrize(
    ("prompt", "expected"),
    [("a", ["a"]), (["a", "b"], ["a", "b"]), ([1, 2], [[1, 2]]), ([[1], [2, 3]], [[1], [2, 3]])],
)
def test_prompts_in_all_four_shapes_and_in_none(prompt, expected):
    assert validation.prompts(completion(prompt=prompt)) == expected
    for none in ([], ["a", 1], [[1], 2], ["a"] * 129):
        assert refused(lambda none=none: validation.prompts(completion(prompt=none))).param == "prompt"


def test_messages_become_what_templates_take():
    given = [
        {"role": "developer", "content": "Be brief."},
        {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}], "name": "Ann"},
    ]
    assert conversation.messages(chat(messages=given)) == [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "a\nb", "name": "Ann"},
    ]


def test_prompts_are_checked_against_the_model():
    def check(tokens, **fields):
        validation.check_prompt(tokens, "prompt", SamplingParams(**fields), vocab_size=100, longest=10)

    check([1] * 9)
    check([1] * 4, max_tokens=6)
    for tokens in ([], [100], [-1]):
        assert refused(lambda tokens=tokens: check(tokens)).param == "prompt"
    for tokens, fields in (([1] * 10, {}), ([1] * 4, {"max_tokens": 7})):
        error = refused(lambda tokens=tokens, fields=fields: check(tokens, **fields))
        assert isinstance(error, ContextLengthExceeded)
        assert "maximum context length is 10" in error.message


@pytest.mark.parametrize("field", ["", "stop", "messages[3].content[0]", "logit_bias[...]", "a.b.c[1][2]"])
def test_a_path_is_spelled_as_clients_read_it(field):
    assert spelled(path_of(field)) == field


def test_an_error_has_its_message_from_its_path():
    def raises() -> None:
        with inside("messages", 1), inside("content"):
            raise InvalidRequest((), " is required")

    error = refused(raises)
    assert (error.path, error.message) == (("messages", 1, "content"), "messages[1].content is required")
    assert InvalidRequest("a", "whole").message == str(InvalidRequest("a", "whole")) == "whole"
    assert InvalidRequest("a", ": no", "this: ").message == "this: a: no"
    assert InvalidRequest(*error.fault).message == error.message


def test_errors_name_a_clients_own_fields():
    names = validation.FieldNames({"messages.*": "input", "max_tokens": "options.most", "tools": "offered"})
    names["tools", 0, "function"] = ("input", 2)
    found = {
        "messages[1].role": "input",
        "messages": "input",
        "max_tokens": "options.most",
        "max_tokens_too": "max_tokens_too",
        "tools[0].function.name": "input[2].name",
        "tools[1].function": "offered[1].function",
    }
    assert {field: spelled(names.of(path_of(field))) for field in found} == found

    def raises() -> None:
        with names:
            raise InvalidRequest("max_tokens", " must be less than what max_tokens says")

    error = refused(raises)
    assert (error.param, error.message) == ("options.most", "options.most must be less than what max_tokens says")
    with names.also({"stop": "ends"}) as more:
        assert more.of(("stop",)) == ("ends",) and names.of(("stop",)) == ("stop",)
