"""A server at its limits: no more memory than it needs, and no more files than it may open."""

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

#: Prints MiB that an engine in int4 holds without using them.
HELD = """
import ctypes, sys
from pathlib import Path
from foresay.server.engine.build import build_engine
from foresay.server.settings.config import EngineConfig

def resident() -> int:
    return int(Path("/proc/self/status").read_text().split("RssAnon:")[1].split()[0])

config = EngineConfig(target=sys.argv[1], draft="none", dtype="bfloat16", quantize="int4", kv_tokens=1024, threads=1)
engine, held = build_engine(config), resident()
ctypes.CDLL(None).malloc_trim(0)
print((held - resident()) / 1024)
"""


def said(arguments: list[str]) -> str:
    """What a Python of its own prints."""
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, *arguments], cwd=ROOT, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.slow
def test_prompts_of_new_lengths_leave_no_memory_behind(tmp_path):
    make("llama2", tmp_path, hidden_size=192, intermediate_size=384, vocab_size=512, num_hidden_layers=1)
    assert float(said(["-m", "tests.server.growth", str(tmp_path)])) < MOST


@pytest.mark.slow
def test_what_loading_needed_is_given_back(tmp_path):
    make("llama2", tmp_path, hidden_size=1024, intermediate_size=4096, vocab_size=512, num_hidden_layers=2)
    assert float(said(["-c", HELD, str(tmp_path)])) < MOST
