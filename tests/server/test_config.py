"""Settings: where they come from, the errors of wrong ones, and durations."""

from __future__ import annotations

from pathlib import Path

import pytest

from foresay.server.settings.config import SECTIONS, BenchConfig, EngineConfig, SamplingConfig, ServeConfig
from foresay.server.settings.fields import all_settings, settings_of
from foresay.server.settings.load import load
from foresay.server.settings.units import seconds_of, span_in_words
from foresay.spec.errors import ConfigurationError
from foresay.spec.sampling import SamplingParams


@pytest.fixture
def toml(tmp_path: Path):
    def write(text: str) -> str:
        path = tmp_path / "foresay.toml"
        path.write_text(text, "utf-8")
        return str(path)

    return write


def refused(*arguments, **keywords) -> str:
    with pytest.raises(ConfigurationError) as caught:
        load(*arguments, **keywords)
    return str(caught.value)


def test_defaults_need_nothing() -> None:
    loaded = load(ServeConfig, {}, {})
    assert loaded.config == ServeConfig()
    assert loaded.origins == {}
    assert (loaded.config.target, loaded.config.draft, loaded.config.host) == ("bundled", "auto", "127.0.0.1")


def test_flag_beats_variable_beats_file_beats_default(toml) -> None:
    file = toml('[engine]\ndraft = "ngram"\ndraft_tokens = 2\nmax_seqs = 3\n\n[server]\nport = 1\n')
    environ = {"FORESAY_DRAFT_TOKENS": "5", "FORESAY_PORT": "2"}
    loaded = load(ServeConfig, {"port": "3"}, environ, file)
    assert (loaded.config.draft, loaded.config.max_seqs) == ("ngram", 3)
    assert (loaded.config.draft_tokens, loaded.config.port, loaded.config.page_size) == (5, 3, 16)
    assert loaded.origins == {
        "draft": f"{file} [engine]",
        "max_seqs": f"{file} [engine]",
        "draft_tokens": "FORESAY_DRAFT_TOKENS",
        "port": "--port",
    }


def test_the_file_can_be_named_by_a_variable_and_a_flag_wins(toml, tmp_path: Path) -> None:
    other = tmp_path / "other.toml"
    other.write_text("[engine]\nmax_seqs = 9\n")
    environ = {"FORESAY_CONFIG": toml("[engine]\nmax_seqs = 2\n")}
    assert load(EngineConfig, {}, environ).config.max_seqs == 2
    assert load(EngineConfig, {}, environ, str(other)).config.max_seqs == 9


def test_sections_of_other_commands_are_checked_but_not_used(toml) -> None:
    file = toml("[server]\nport = 9000\n[sampling]\ntemperature = 0.5\n")
    assert load(SamplingConfig, {}, {}, file).config.temperature == 0.5
    assert load(EngineConfig, {}, {"FORESAY_TEMPERATURE": "0.1"}, file).config == EngineConfig()
    assert '"prot"' in refused(SamplingConfig, {}, {}, toml("[server]\nprot = 9000\n"))


def test_text_becomes_the_type_of_its_field() -> None:
    environ = {
        "FORESAY_PREFIX_CACHE": "false",
        "FORESAY_KV_TOKENS": "4096",
        "FORESAY_SEED": "-7",
        "FORESAY_TEMPERATURE": "0",
        "FORESAY_STOP": "END",
        "FORESAY_THREADS": "",
    }
    config = load(SamplingConfig, {}, environ).config
    assert (config.prefix_cache, config.kv_tokens, config.seed, config.threads) == (False, 4096, -7, None)
    assert (config.temperature, config.stop) == (0.0, ("END",))


def test_a_list_can_be_a_repeated_flag_or_a_toml_array(toml) -> None:
    assert load(SamplingConfig, {"stop": ["a", "b"]}, {}).config.stop == ("a", "b")
    assert load(SamplingConfig, {}, {}, toml('[sampling]\nstop = ["c", "d"]\n')).config.stop == ("c", "d")


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"port": "http"}, "--port must be a whole number from 0 to 65535, got 'http'"),
        ({"port": 70000}, "--port must be a whole number from 0 to 65535, got 70000"),
        ({"dtype": "fp32"}, "--dtype must be one of auto, bfloat16, float16, float32, got 'fp32'"),
        (
            {"draft_tree": "3,,1"},
            "--draft-tree must be node counts such as \"3,2,1\", got '3,,1'",
        ),
        (
            {"draft_tokens": -1},
            "--draft-tokens must be a whole number from 1 to 63 (--draft none decodes without drafts), got -1",
        ),
        ({"prefix_cache": "maybe"}, "--prefix-cache must be true or false, got 'maybe'"),
        ({"kv_tokens": 0}, "--kv-tokens must be a whole number of at least 1, got 0"),
        ({"drain_seconds": "long"}, "--drain-seconds must be a number of at least 0, got 'long'"),
    ],
)
def test_a_wrong_value_names_the_field_and_what_would_be_right(given, message: str) -> None:
    assert refused(ServeConfig, given, {}) == message


def test_a_wrong_variable_is_named_as_such() -> None:
    assert refused(ServeConfig, {}, {"FORESAY_PORT": "tcp://10.0.0.1:80"}) == (
        "FORESAY_PORT must be a whole number from 0 to 65535, got 'tcp://10.0.0.1:80'"
    )


def test_numbers_with_an_open_end_say_so() -> None:
    assert refused(SamplingConfig, {"top_p": "0"}, {}) == ("--top-p must be a number above 0 and at most 1, got '0'")
    assert refused(SamplingConfig, {"stop": [""]}, {}) == (
        "--stop must be a list, each item text that is not empty, got ['']"
    )


def test_a_wrong_type_in_the_file_is_not_converted(toml) -> None:
    file = toml('[engine]\ndraft = "none"\nmax_seqs = 2.5\n')
    assert refused(EngineConfig, {}, {}, file) == (
        f"{file} [engine]: max_seqs must be a whole number from 1 to 256, got 2.5"
    )


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[engine]\n\ndraft_token = 3\n", ': unknown key "draft_token" in [engine]; did you mean "draft_tokens"?'),
        ("[engine]\nport = 3\n", ': "port" belongs in the section [server], not in [engine]'),
        ("port = 3\n", ': "port" belongs in the section [server]'),
        ("[enigne]\nmax_seqs = 3\n", ': unknown section "enigne"; did you mean "engine"?'),
        ("[engine]\nxyzzy = 3\n", ': unknown key "xyzzy" in [engine]'),
        ("[engine\n", " is not valid TOML"),
    ],
)
def test_an_unknown_key_is_located_and_gets_the_nearest_name(toml, text: str, message: str) -> None:
    file = toml(text)
    assert refused(EngineConfig, {}, {}, file).startswith(file + message)


def test_an_unknown_variable_gets_the_nearest_name() -> None:
    assert refused(EngineConfig, {}, {"FORESAY_DRAFT_TOKEN": "3"}) == (
        'unknown environment variable FORESAY_DRAFT_TOKEN; did you mean "FORESAY_DRAFT_TOKENS"?'
    )
    assert load(EngineConfig, {}, {"PATH": "/bin", "OTHER": "x"}).config == EngineConfig()


def test_an_unknown_argument_of_the_facade_gets_the_nearest_name() -> None:
    message = refused(EngineConfig, {"draft_token": 3}, {}, given_as="argument")
    assert message == 'unknown argument "draft_token"; did you mean "draft_tokens"?'
    message = refused(EngineConfig, {"draft_tokens": "many"}, {}, given_as="argument")
    assert (
        message == "draft_tokens must be a whole number from 1 to 63 (--draft none decodes without drafts), got 'many'"
    )


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    missing = str(tmp_path / "none.toml")
    assert refused(EngineConfig, {}, {}, missing) == (
        f"cannot read the config file {missing}: No such file or directory"
    )
    (tmp_path / "latin.toml").write_bytes(b"\xff\xfe")
    assert "it is not UTF-8 text" in refused(EngineConfig, {}, {}, str(tmp_path / "latin.toml"))


def test_settings_that_contradict_each_other_are_refused() -> None:
    assert "kv_tokens (64) must be at least max_model_len (128)" in refused(
        EngineConfig, {"kv_tokens": 64, "max_model_len": 128}, {}
    )


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"replicas": "0"}, "replicas must be a number such as 2, or \"1-4\", got '0'"),
        ({"replicas": "4-1"}, "replicas (4-1) must name the least first, then the most"),
        ({"ray_address": "auto"}, "ray_address is where replicas run, but there are none: set --replicas"),
        ({"replicas": "2", "idle_unload": "5m"}, "idle_unload ends an engine"),
    ],
)
def test_replicas_that_cannot_be_are_refused(given, message: str) -> None:
    assert message in refused(ServeConfig, given, {})


def test_replicas_are_of_one_model(toml) -> None:
    assert "--replicas cannot be combined with [models.NAME]" in refused(
        ServeConfig, {"replicas": "2"}, {}, toml('[models.one]\ntarget = "bundled"')
    )


def test_every_field_is_described_and_belongs_to_one_section() -> None:
    for config in SECTIONS.values():
        for setting in settings_of(config).values():
            assert setting.description
            assert setting.name in SECTIONS[setting.section].__struct_fields__
    assert all_settings()["draft_tokens"].section == "engine"
    assert all_settings()["port"].section == "server"
    assert all_settings()["rounds"].section == "bench"


def test_defaults_satisfy_their_own_constraints() -> None:
    for config in SECTIONS.values():
        defaults = {name: setting.default for name, setting in settings_of(config).items()}
        assert load(config, defaults, {}).config == config()


def test_the_sampling_settings_are_the_engines_own() -> None:
    shared = set(SamplingParams.__struct_fields__) & set(BenchConfig.__struct_fields__)
    of_programs = {"stop_token_ids", "logit_bias", "bad_words", "allowed_token_ids", "logprobs", "prompt_logprobs"}
    of_programs |= {"min_tokens", "presence_penalty", "frequency_penalty"}
    assert set(SamplingParams.__struct_fields__) - shared == of_programs
    defaults = SamplingParams()
    for name in shared - {"max_tokens", "temperature", "top_k", "top_p"}:  # None: what a model recommends
        assert getattr(SamplingConfig(), name) == getattr(defaults, name), name


SPANS = {"30s": 30, "10m": 600, "2h": 7200, "1h30m": 5400, "1.5h": 5400, "250ms": 0.25, "5us": 5e-6, "0s": 0}
SPANS |= {"-1m": -60, "+1m": 60, ".5s": 0.5, "1.s": 1, "1h0m30s": 3630}


@pytest.mark.parametrize("span", SPANS)
def test_spans(span):
    assert seconds_of(span) == pytest.approx(SPANS[span])


@pytest.mark.parametrize("span", ["", "5", "m", "5 m", "1d", "--1m", "1m-1s", "5m5", "1e3s", "٣s", "5M", "5m\n", "s5"])
def test_what_is_none(span):
    with pytest.raises(ValueError, match="is not a time such as 30s"):
        seconds_of(span)


def test_a_long_one_is_refused_at_once():
    with pytest.raises(ValueError, match="is not a time"):
        seconds_of("1h" * 100_000 + "!")


@pytest.mark.parametrize(("seconds", "words"), [(1, "1 s"), (0.25, "0.25 s"), (90, "90 s"), (600, "10 min")])
def test_in_words(seconds, words):
    assert span_in_words(seconds) == words


def test_hours_in_words():
    assert [span_in_words(seconds) for seconds in (3600, 5400, 7260)] == ["1 h", "1 h 30 min", "2 h 1 min"]


def test_as_a_setting():
    assert load(ServeConfig, {"idle_unload": "10m"}, {}).config.idle_seconds == 600
    assert ServeConfig().idle_seconds is None
    for wrong in ("10", "soon", "-10m", "0s"):
        with pytest.raises(ConfigurationError, match=r"idle.unload must be"):
            load(ServeConfig, {"idle_unload": wrong}, {})
