"""An engine that has served prompts of some lengths does not grow with those of others."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.verifier.families import make

ROOT = Path(__file__).resolve().parents[2]
#: MiB; what oneDNN kept of 140 other lengths, 700 other products, once took 170.
MOST = 20.0


@pytest.mark.slow
def test_prompts_of_new_lengths_leave_no_memory_behind(tmp_path):
    make("llama2", tmp_path, hidden_size=192, intermediate_size=384, vocab_size=512, num_hidden_layers=1)
    command = [sys.executable, "-m", "tests.server.growth", str(tmp_path)]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert float(done.stdout) < MOST
