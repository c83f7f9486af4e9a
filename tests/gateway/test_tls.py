"""HTTPS, with a certificate made for these tests by

openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -keyout key.pem -out certificate.pem
    -days 36500 -subj "/CN=Foresay tests" -addext "subjectAltName=IP:127.0.0.1,DNS:localhost"
"""

from __future__ import annotations

import ssl
from pathlib import Path

import aiohttp
import pytest
from aiohttp import web

from foresay.server.gateway.keys import KeyStore
from foresay.server.http.app import create_app
from foresay.server.http.auth import AuthMiddleware
from foresay.server.http.life import _listen, context
from foresay.server.models.service import Text
from foresay.server.settings.config import ServeConfig
from foresay.server.text.tokenizer import SamplingDefaults
from foresay.spec.errors import ConfigurationError
from tests.gateway.guarded import ALICE, ASK, bearer
from tests.server.scripted import END, ScriptedEngine
from tests.server.staying import alone, service_of

HERE = Path(__file__).parent / "tls"
CERTIFICATE, KEY = str(HERE / "certificate.pem"), str(HERE / "key.pem")


async def test_keys_and_streams_go_over_https_and_not_over_http(tokenizer):
    config = ServeConfig(port=0, ssl_certfile=CERTIFICATE, ssl_keyfile=KEY)
    engine = ScriptedEngine([*tokenizer.encode("abc"), END])
    service = service_of(engine, Text(tokenizer, SamplingDefaults()))
    runner = web.AppRunner(create_app(alone(service), AuthMiddleware(KeyStore([ALICE]))))
    await runner.setup()
    try:
        port = await _listen(runner, config, context(config))
        trusting = ssl.create_default_context(cafile=CERTIFICATE)
        connector = aiohttp.TCPConnector(ssl=trusting)
        async with aiohttp.ClientSession(f"https://127.0.0.1:{port}", connector=connector) as client:
            body = ASK | {"stream": True}
            async with client.post("/v1/completions", json=body, headers=bearer(ALICE)) as response:
                assert (await response.text()).endswith("data: [DONE]\n\n")
            async with client.ws_connect("/v1/responses", headers=bearer(ALICE)):
                pass
        async with aiohttp.ClientSession(f"http://127.0.0.1:{port}") as plain:
            with pytest.raises(aiohttp.ClientError):
                await plain.get("/health")
    finally:
        await runner.cleanup()


def test_without_a_certificate_it_is_http():
    assert context(ServeConfig()) is None


def test_old_protocols_are_not_spoken():
    made = context(ServeConfig(ssl_certfile=CERTIFICATE, ssl_keyfile=KEY))
    assert made is not None and made.minimum_version >= ssl.TLSVersion.TLSv1_2


@pytest.mark.parametrize(
    ("certificate", "key", "message"),
    [
        (CERTIFICATE, CERTIFICATE, "cannot be used"),
        (KEY, KEY, "cannot be used"),
        ("/no/such.pem", KEY, "cannot be read: No such file or directory"),
    ],
)
def test_a_certificate_that_cannot_be_used_is_named(certificate, key, message):
    with pytest.raises(ConfigurationError) as caught:
        context(ServeConfig(ssl_certfile=certificate, ssl_keyfile=key))
    assert certificate in str(caught.value) and message in str(caught.value)
