"""LiteLLM, which needs versions of its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.clients.answering import AnsweringEngine, call
from tests.routes.running import running

PYTHON = Path(sys.prefix) / "litellm" / "bin" / "python"
SCRIPT = Path(__file__).parent / "litellm_chat.py"

pytestmark = [
    pytest.mark.outside,
    pytest.mark.skipif(not PYTHON.exists() and not os.environ.get("CI"), reason="make outside installs LiteLLM"),
]


def test_litellm_calls_tools_through_three_apis(agent):
    engine = AnsweringEngine(agent, lambda prompt: f"Let me look.{call('weather', city='Ulm')}")
    with running(engine, agent) as url:
        variables = {"FORESAY_URL": url, "LITELLM_LOCAL_MODEL_COST_MAP": "True", "PYTHONPATH": ""}
        done = subprocess.run(
            [str(PYTHON), str(SCRIPT)], env=os.environ | variables, capture_output=True, text=True, timeout=240
        )
    assert done.returncode == 0, done.stdout + done.stderr
    output = json.loads(done.stdout.splitlines()[-1])
    expected = {"content": "Let me look.", "name": "weather", "arguments": {"city": "Ulm"}}
    assert output == {provider: [expected, expected] for provider in ("openai", "anthropic", "ollama_chat")}
