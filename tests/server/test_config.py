"""Settings: where they come from, the errors of wrong ones, those of several models, and durations."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from foresay.server.cli.main import main
from foresay.server.settings.config import SECTIONS, BenchConfig, EngineConfig, SamplingConfig, ServeConfig
from foresay.server.settings.fields import all_settings, settings_of
from foresay.server.settings.load import load
from foresay.server.settings.units import seconds_of, span_in_words
from foresay.spec.errors import ConfigurationError
from foresay.spec.sampling import SamplingParams
from tests.gateway.guarded import ALICE, BOB

#: Of two models, each with settings of its own.
FILE = """
[engine]
draft = "none"
max_seqs = 2
[server]
port = 0
idle_unload = "5m"
[models.big]
target = "owner/big"
draft = "owner/small"
[models."owner/own-1.5:q4"]
target = "./somewhere"
"""


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


def test_an_unknown_argument_of_the_facade_is_named() -> None:
    message = refused(EngineConfig, {"draft_token": 3}, {}, given_as="argument")
    assert message == 'unknown argument "draft_token"'
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


# -- several models ----------------------------------------------------------------------------------------------------


def test_each_has_its_own_settings_and_those_of_the_engine(toml):
    config = load(ServeConfig, {}, {}, toml(FILE)).config
    big, own = config.models["big"], config.models["owner/own-1.5:q4"]
    assert list(config.models) == ["big", "owner/own-1.5:q4"]
    assert (big.target, big.draft, big.max_seqs) == ("owner/big", "owner/small", 2)
    assert (own.target, own.draft, own.max_seqs) == ("./somewhere", "none", 2)
    assert big.idle_seconds == 300 and big.models == load(ServeConfig, {}, {}).config.models == {}
    assert load(SamplingConfig, {}, {}, toml(FILE)).config.draft == "none", "other commands read past them"


def test_a_flag_beats_a_variable_beats_a_models_section_beats_the_engines(toml):
    file = toml("[engine]\nmax_seqs = 2\npage_size = 8\n[models.a]\nmax_seqs = 3\npage_size = 16\n[models.b]\n")
    models = load(ServeConfig, {}, {}, file).config.models
    assert (models["a"].max_seqs, models["b"].max_seqs) == (3, 2)
    environ = {"FORESAY_PAGE_SIZE": "32", "FORESAY_MAX_SEQS": "6"}
    models = load(ServeConfig, {"max_seqs": "5"}, environ, file).config.models
    assert (models["a"].max_seqs, models["a"].page_size) == (5, 32)


def test_config_show_prints_what_would_reproduce_them(toml, tmp_path, capsys, monkeypatch):
    for name in [name for name in os.environ if name.startswith("FORESAY_")]:
        monkeypatch.delenv(name)
    file = toml(FILE)
    assert main(["config", "show", "--config", file]) == 0
    again = tmp_path / "again.toml"
    again.write_text(capsys.readouterr().out)
    assert load(ServeConfig, {}, {}, str(again)).config == load(ServeConfig, {}, {}, file).config


# -- what is refused ---------------------------------------------------------------------------------------------------


class Wrong(NamedTuple):
    """Settings, and what the error says of them. file: the text of the settings file, which ``FILE`` stands for."""

    says: str
    given: Mapping[str, Any] = {}
    environ: Mapping[str, str] = {}
    file: str | None = None
    of: type[EngineConfig] = ServeConfig


def flag(says: str, **given: Any) -> Wrong:
    return Wrong(says, given)


def file(text: str, says: str, **given: Any) -> Wrong:
    return Wrong(f"FILE{says}", given, file=text)


PORT = "must be a whole number from 0 to 65535, got"
ORIGIN, SIZE = "--cors-origin must be a list, each item an origin such as", "off or a size such as 8GiB or 500MB"
NAME, SECTIONS_OF = "cannot be a model's name", ": models holds sections such as [models.NAME]"
SEVERAL = "[models.a]\n[models.b]\n"
WRONG = [
    flag(f"--port {PORT} 'http'", port="http"),
    flag(f"--port {PORT} 70000", port=70000),
    Wrong(f"FORESAY_PORT {PORT} 'tcp://10.0.0.1:80'", environ={"FORESAY_PORT": "tcp://10.0.0.1:80"}),
    flag("--dtype must be one of auto, bfloat16, float16, float32, got 'fp32'", dtype="fp32"),
    flag("--draft-tree must be node counts such as \"3,2,1\", got '3,,1'", draft_tree="3,,1"),
    flag("--draft-tokens must be a whole number from 1 to 63 (--draft none decodes without drafts), got -1",
         draft_tokens=-1),
    flag("--prefix-cache must be true or false, got 'maybe'", prefix_cache="maybe"),
    flag("--kv-tokens must be a whole number of at least 1, got 0", kv_tokens=0),
    flag("--drain-seconds must be a number of at least 0, got 'long'", drain_seconds="long"),
    Wrong("--top-p must be a number above 0 and at most 1, got '0'", {"top_p": "0"}, of=SamplingConfig),
    Wrong("--stop must be a list, each item text that is not empty, got ['']", {"stop": [""]}, of=SamplingConfig),
    flag("kv_tokens (64) must be at least max_model_len (128)", kv_tokens=64, max_model_len=128),
    *(flag("--idle-unload must be a time such as", idle_unload=wrong) for wrong in ("10", "soon", "-10m")),
    flag("idle_unload must be above 0; leave it out to keep the model", idle_unload="0s"),
    *(flag(SIZE, kv_disk=wrong) for wrong in ("8", "GiB", "-1GiB", "8 GiB", "on")),
    # of the gateway
    flag("ssl_keyfile is not set", ssl_certfile="a.pem"),
    flag("ssl_certfile is not set", ssl_keyfile="a.pem"),
    flag("the same api_key is given twice", api_key=[ALICE, BOB, ALICE]),
    flag("max_output_tokens (512) must be below max_model_len (512)", max_output_tokens=512, max_model_len=512),
    *(flag(ORIGIN, cors_origin=[wrong]) for wrong in ("https://a.b/c", "example.com")),
    flag("--max-body-bytes must be a whole number of at least 1024", max_body_bytes=10),
    flag("--request-timeout must be a number above 0", request_timeout=0),
    flag("--body-timeout must be a number above 0", body_timeout=0),
    flag("--max-requests-per-minute must be a whole number of at least 1", max_requests_per_minute=0),
    # of replicas
    flag("replicas must be a number such as 2, or \"1-4\", got '0'", replicas="0"),
    flag("replicas (4-1) must name the least first, then the most", replicas="4-1"),
    flag("ray_address is where replicas run, but there are none: set --replicas", ray_address="auto"),
    flag("idle_unload ends an engine", replicas="2", idle_unload="5m"),
    Wrong("--replicas cannot be combined with [models.NAME]", {"replicas": "2"}, file='[models.a]\ntarget = "x"'),
    # in a file
    file('[engine]\nmax_seqs = 2.5\n', " [engine]: max_seqs must be a whole number from 1 to 256, got 2.5"),
    file("[engine]\n\ndraft_token = 3\n", ': unknown key "draft_token" in [engine]'),
    file("[engine]\nport = 3\n", ': unknown key "port" in [engine]'),
    file("port = 3\n", ': unknown section "port"; the sections are [engine], [server], '),
    file("[enigne]\nmax_seqs = 3\n", ': unknown section "enigne"; the sections are [engine], ['),
    file("[engine]\nxyzzy = 3\n", ': unknown key "xyzzy" in [engine]'),
    file("[engine\n", " is not valid TOML"),
    Wrong("unknown environment variable FORESAY_DRAFT_TOKEN", environ={"FORESAY_DRAFT_TOKEN": "3"}),
    # of several models
    file("[models.a]\ndraft_token = 3\n", ': unknown key "draft_token" in [models.a]'),
    file("[models.a]\nport = 3\n", ': unknown key "port" in [models.a]'),
    *(file(f'[models."{name}"]\n', f": {name!r} {NAME}") for name in ("a b", "", "-x", "ä")),
    file('[models."a\\u0000"]\n', f": 'a\\x00' {NAME}"),
    file(f"[models.{'a' * 200}]\n", f": '{'a' * 80}' {NAME}"),
    file('[models.a]\n[models."a:latest"]\n', ": a:latest and a are one name to Ollama"),
    file('[models]\na = "x"\n', ": [models.a] must be a section"),
    *(file(text, SECTIONS_OF) for text in ("models = 3\n", "[[models]]\n")),
    file("[models.a]\nmax_seqs = 0\n", " [models.a]: max_seqs must be a whole number from 1 to 256"),
    file("[models.a]\ntarget = 5\n", " [models.a]: target must be text"),
    Wrong("kv_tokens (8) must be at least max_model_len (9)", file="[models.a]\nmax_model_len = 9\nkv_tokens = 8\n"),
    Wrong("the target x is given, and ", {"target": "x"}, file=SEVERAL),
    Wrong("several in [models.NAME]", environ={"FORESAY_TARGET": "x"}, file=SEVERAL),
    Wrong("served_model_name is for one model", {"served_model_name": "x"}, file=SEVERAL),
    Wrong("max_loaded_models is for several", {"max_loaded_models": "2"}, file="[engine]\n"),
]  # fmt: skip


@pytest.mark.parametrize("wrong", WRONG, ids=[f"{number} {wrong.says[:40]}" for number, wrong in enumerate(WRONG)])
def test_what_is_wrong_is_named_with_what_would_be_right(toml, wrong: Wrong) -> None:
    path = None if wrong.file is None else toml(wrong.file)
    message = refused(wrong.of, wrong.given, wrong.environ, path)
    assert wrong.says.replace("FILE", str(path)) in message and ALICE not in message
