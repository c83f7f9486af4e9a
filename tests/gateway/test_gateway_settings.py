"""The gateway's settings: checked together, never shown where they are secret, and what the banner makes of them."""

from __future__ import annotations

import pytest

from foresay.server.cli import serving
from foresay.server.cli.main import main
from foresay.server.http.auth import AuthMiddleware
from foresay.server.settings.config import ServeConfig
from foresay.server.settings.load import load
from foresay.spec.errors import ConfigurationError
from tests.gateway.guarded import ALICE, BOB

SECRET = "hunter2"


@pytest.mark.parametrize("weak", [SECRET, SECRET + " with spaces in it", ""])
def test_a_weak_key_is_refused_and_not_repeated(weak, tmp_path):
    file = tmp_path / "foresay.toml"
    file.write_text(f'[server]\napi_key = ["{weak}"]\n')
    sources = [({"api_key": [weak]}, {}, None), ({}, {}, str(file))]
    sources += [({}, {"FORESAY_API_KEY": weak}, None)] if weak else []
    for given, environ, path in sources:
        with pytest.raises(ConfigurationError, match="16 to 512 printable characters without a space") as caught:
            load(ServeConfig, given, environ, path)
        assert SECRET not in str(caught.value)


def test_config_show_names_where_a_key_is_from_and_not_what_it_is(monkeypatch, tmp_path, capsys):
    file = tmp_path / "foresay.toml"
    file.write_text(f'[server]\napi_key = ["{ALICE}", "{BOB}"]\nmax_queue = 9\n')
    assert main(["config", "show", "--origin", "--config", str(file)]) == 0
    shown = capsys.readouterr().out
    assert f"# api_key is set; its value is not shown  # {file} [server]" in shown
    monkeypatch.setenv("FORESAY_API_KEY", ALICE)
    assert main(["config", "show", "--origin"]) == 0
    shown += capsys.readouterr().out
    assert "its value is not shown  # FORESAY_API_KEY" in shown
    assert ALICE not in shown and BOB not in shown
    file.write_text(shown.partition("[server]")[0])
    assert main(["config", "show", "--config", str(file)]) == 0, "what is shown is still a settings file"


async def test_the_gate_is_made_of_the_settings():
    config = ServeConfig(
        api_key=(ALICE,), cors_origin=("https://a.example",), max_body_bytes=4096, max_requests_per_minute=3
    )
    auth = AuthMiddleware.of(config)
    assert auth.largest_body == 4096
    assert auth.origins.allows("https://a.example") and not auth.origins.allows("https://b.example")
    caller = auth.key_store.caller(ALICE)
    assert caller is not None and caller.rate_limiter.per_minute == 3


def test_serving_with_a_key_file_that_is_not_there_is_one_line(capsys, tmp_path):
    assert main(["serve", "--port", "0", "--api-key-file", str(tmp_path / "none.toml")]) == 2
    error = capsys.readouterr().err
    assert error.startswith("foresay serve: cannot read the key file") and error.count("\n") == 1


# -- the banner --------------------------------------------------------------------------------------------------------

NETWORK = {"host": "0.0.0.0"}


@pytest.mark.parametrize(
    ("given", "warning"),
    [
        ({}, None),
        ({"host": "127.0.0.2"}, None),
        ({"api_key": (ALICE,)}, None),
        (NETWORK, "WITHOUT AN API KEY"),
        (NETWORK | {"ssl_certfile": "a", "ssl_keyfile": "b"}, "WITHOUT AN API KEY"),
        ({"host": "gpu.example.org"}, "WITHOUT AN API KEY"),
        (NETWORK | {"api_key": (ALICE,)}, "without HTTPS"),
        (NETWORK | {"api_key_file": "keys.toml", "ssl_certfile": "a", "ssl_keyfile": "b"}, None),
    ],
)
def test_a_server_that_others_can_reach_gets_a_warning_with_advice(given, warning):
    notes = serving.warnings(ServeConfig(**given))
    assert len(notes) == (warning is not None)
    if warning is not None:
        assert warning in notes[0]
        assert "foresay keys new" in notes[0] or "--ssl-certfile" in notes[0]


def test_the_banner_says_who_may_ask_and_shows_no_key():
    assert "no API key is needed" in serving.access(ServeConfig(host="0.0.0.0"))
    reported = serving.access(ServeConfig(api_key=(ALICE, BOB), api_key_file="keys.toml"))
    assert reported == "only with an API key"
    line = serving.try_line("https://127.0.0.1:1", "m", keyed=True)
    assert '-H "Authorization: Bearer $FORESAY_API_KEY"' in line and "/v1/completions " in line
    assert "/v1/chat/completions " in serving.try_line("https://127.0.0.1:1", "m", chats=True)
    assert ServeConfig(host="0.0.0.0", ssl_certfile="c", ssl_keyfile="k").base_url(8000) == "https://127.0.0.1:8000"
