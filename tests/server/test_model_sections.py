"""``[models.NAME]``: several targets of one server, each with the settings of ``[engine]`` but for its own."""

from __future__ import annotations

import os

import pytest

from foresay.server.cli.main import main
from foresay.server.settings.config import EngineConfig, SamplingConfig, ServeConfig
from foresay.server.settings.load import load
from foresay.spec.errors import ConfigurationError

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
def toml(tmp_path):
    def write(text: str) -> str:
        path = tmp_path / "foresay.toml"
        path.write_text(text)
        return str(path)

    return write


def refused(file: str, given=None, environ=None) -> str:
    with pytest.raises(ConfigurationError) as caught:
        load(ServeConfig, given or {}, environ or {}, file)
    return str(caught.value).removeprefix(file)


def test_each_has_its_own_settings_and_those_of_the_engine(toml):
    config = load(ServeConfig, {}, {}, toml(FILE)).config
    big, own = config.models["big"], config.models["owner/own-1.5:q4"]
    assert list(config.models) == ["big", "owner/own-1.5:q4"]
    assert (big.target, big.draft, big.max_seqs) == ("owner/big", "owner/small", 2)
    assert (own.target, own.draft, own.max_seqs) == ("./somewhere", "none", 2)
    assert big.idle_seconds == 300 and big.models == {}


def test_a_flag_beats_a_variable_beats_a_models_section_beats_the_engines(toml):
    file = toml("[engine]\nmax_seqs = 2\npage_size = 8\n[models.a]\nmax_seqs = 3\npage_size = 16\n[models.b]\n")
    loaded = load(ServeConfig, {}, {}, file).config.models
    assert (loaded["a"].max_seqs, loaded["b"].max_seqs) == (3, 2)
    loaded = load(
        ServeConfig, {"max_seqs": "5"}, {"FORESAY_PAGE_SIZE": "32", "FORESAY_MAX_SEQS": "6"}, file
    ).config.models
    assert (loaded["a"].max_seqs, loaded["a"].page_size) == (5, 32)


def test_without_sections_there_is_none(toml):
    assert load(ServeConfig, {}, {}, toml("[engine]\nmax_seqs = 2\n")).config.models == {}
    assert load(ServeConfig, {}, {}).config.models == {}


def test_other_commands_read_past_them(toml):
    assert load(SamplingConfig, {}, {}, toml(FILE)).config.draft == "none"
    assert load(EngineConfig, {"target": "owner/big"}, {}, toml(FILE)).config.target == "owner/big"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[models.a]\ndraft_token = 3\n", ': unknown key "draft_token" in [models.a]; did you mean "draft_tokens"?'),
        ("[models.a]\nport = 3\n", ': "port" belongs in the section [server], not in [models.a]'),
        ('[models."a b"]\n', ": 'a b' cannot be a model's name"),
        ('[models.""]\n', ": '' cannot be a model's name"),
        ('[models."-x"]\n', ": '-x' cannot be a model's name"),
        ('[models."a\\u0000"]\n', ": 'a\\x00' cannot be a model's name"),
        ('[models."ä"]\n', ": 'ä' cannot be a model's name"),
        (f"[models.{'a' * 200}]\n", f": '{'a' * 80}' cannot be a model's name"),
        ('[models.a]\n[models."a:latest"]\n', ": a:latest and a are one name to Ollama"),
        ('[models]\na = "x"\n', ": [models.a] must be a section"),
        ("models = 3\n", ": models holds sections such as [models.NAME]"),
        ("[[models]]\n", ": models holds sections such as [models.NAME]"),
        ("[models.a]\nmax_seqs = 0\n", " [models.a]: max_seqs must be a whole number from 1 to 256"),
        ("[models.a]\ntarget = 5\n", " [models.a]: target must be text"),
        ("[modles.a]\n", ': unknown section "modles"; did you mean "models"?'),
        ("[models.a]\nmax_model_len = 9\nkv_tokens = 8\n", "kv_tokens (8) must be at least max_model_len (9)"),
    ],
)
def test_what_is_wrong_is_located(toml, text, message):
    assert refused(toml(text)).startswith(message)


def test_what_does_not_go_with_several_models_is_refused(toml):
    several = "[models.a]\n[models.b]\n"
    assert refused(toml(several), {"target": "x"}).startswith("the target x is given, and ")
    assert "several in [models.NAME]" in refused(toml(several), environ={"FORESAY_TARGET": "x"})
    assert refused(toml(several), {"served_model_name": "x"}).startswith("served_model_name is for one model")
    assert refused(toml("[engine]\n"), {"max_loaded_models": "2"}).startswith("max_loaded_models is for several")


def test_config_show_prints_what_would_reproduce_them(toml, tmp_path, capsys, monkeypatch):
    for name in [name for name in os.environ if name.startswith("FORESAY_")]:
        monkeypatch.delenv(name)
    file = toml(FILE)
    assert main(["config", "show", "--config", file]) == 0
    again = tmp_path / "again.toml"
    again.write_text(capsys.readouterr().out)
    assert load(ServeConfig, {}, {}, str(again)).config == load(ServeConfig, {}, {}, file).config
