"""Replicas on a real Ray: killed, scaled and updated under streams. ``python -m bench.replicas`` is the long form."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="needs Ray: pip install 'foresay[ray]'"),
]


def test_nothing_is_lost_where_replicas_are_killed_scaled_and_updated():
    arguments = ["-m", "bench.replicas", "--kills", "2", "--streams", "2", "--no-save"]
    done = subprocess.run([sys.executable, *arguments], cwd=ROOT, capture_output=True, text=True, timeout=800)
    assert done.returncode == 0, done.stderr[-4000:]
    told = json.loads(done.stdout.splitlines()[-1])
    assert told["wrong"] == [] and told["answers"] > 10
    assert told["update"]["status"] == "replaced"


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # Ray's own
def test_the_file_that_deploy_writes_is_one_of_serves():
    import yaml  # type: ignore[import-untyped]
    from ray.serve.schema import ServeDeploySchema

    from server.cli.serve import serve_file
    from server.settings.config import ServeConfig

    written = yaml.safe_load(serve_file(ServeConfig(replicas="1-2", draft="ngram", threads=1)))
    schema = ServeDeploySchema.model_validate(written)
    assert schema.applications[0].args == {"draft": "ngram", "threads": 1, "replicas": "1-2"}
