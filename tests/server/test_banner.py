from __future__ import annotations

import io
import json
import shlex

import pytest

from foresay.server.cli import serving
from foresay.server.settings.config import ServeConfig
from foresay.spec.request import EngineInfo

INFO = EngineInfo(
    target="bundled",
    drafter="bundled/draft",
    drafter_reason="comes with the bundled target",
    dtype="bfloat16",
    dtype_reason="the processor multiplies bf16",
    device="cpu",
    exact=True,
    exact_reason="rows are bit-equal in any batch (probed)",
    kv_tokens=4096,
    page_size=16,
    max_model_len=1024,
    max_seqs=4,
    draft_shape=(1, 1, 1, 1),
    vocab_size=4096,
    eos_token_ids=(0,),
    memory="target 28.0 MiB, KV cache of 4,096 tokens 35.0 MiB",
)


def shown(config: ServeConfig, out: io.StringIO) -> str:
    serving.show(INFO, config, "bundled", 8123, out=out)
    return out.getvalue()


def test_the_banner_says_what_runs_why_and_where() -> None:
    text = shown(ServeConfig(), io.StringIO())
    lines = dict(line.split("  ", 1) for line in text.splitlines() if "  " in line.strip())
    fields = {name.strip(): value.strip() for name, value in lines.items()}
    assert fields["drafter"] == "bundled/draft, 4 tokens ahead (comes with the bundled target)"
    assert fields["dtype"] == "bfloat16 on cpu (the processor multiplies bf16)"
    assert fields["exact"] == "yes: rows are bit-equal in any batch (probed)"
    assert fields["KV cache"].startswith("4,096 tokens")
    assert fields["memory"] == "target 28.0 MiB, KV cache of 4,096 tokens 35.0 MiB"
    assert fields["context"] == "1,024 tokens"
    assert (fields["page"], fields["API"]) == ("http://127.0.0.1:8123/", "http://127.0.0.1:8123/v1")
    assert fields["access"] == "this machine only"
    assert "warning" not in fields


def test_the_banner_says_what_the_engine_warns_of() -> None:
    import msgspec

    out = io.StringIO()
    info = msgspec.structs.replace(INFO, warnings=("--draft x knows only 10 of the target's 290 tokens",))
    serving.show(info, ServeConfig(), "bundled", 80, out)
    assert "warning   --draft x knows only 10 of the target's 290 tokens\n" in out.getvalue()


def test_the_line_to_try_is_one_shell_command_with_a_json_body() -> None:
    line = next(line for line in shown(ServeConfig(), io.StringIO()).splitlines() if "curl" in line)
    words = shlex.split(line)
    assert words[:3] == ["curl", "-N", "http://127.0.0.1:8123/v1/chat/completions"]
    body = json.loads(words[-1])
    assert body["model"] == "bundled" and body["messages"][0]["role"] == "user", "the toy has a chat template"


@pytest.mark.parametrize(
    ("host", "url", "warned"),
    [
        ("127.0.0.1", "http://127.0.0.1:80", False),
        ("localhost", "http://localhost:80", False),
        ("::1", "http://[::1]:80", False),
        ("0.0.0.0", "http://127.0.0.1:80", True),
        ("::", "http://[::1]:80", True),
        ("192.168.1.2", "http://192.168.1.2:80", True),
    ],
)
def test_an_address_others_can_reach_is_warned_about(host: str, url: str, warned: bool) -> None:
    assert ServeConfig(host=host).base_url(80) == url
    assert bool(serving.warnings(ServeConfig(host=host))) is warned
    assert serving.access(ServeConfig(host=host)).startswith("anyone" if warned else "this machine")


def test_a_tree_is_distinguished_from_a_chain() -> None:
    import msgspec

    tree = msgspec.structs.replace(INFO, draft_shape=(3, 2, 1))
    none = msgspec.structs.replace(INFO, draft_shape=(), drafter="none", drafter_reason="")
    assert dict(serving.rows(tree))["drafter"].startswith("bundled/draft, a tree of 3,2,1")
    chosen = msgspec.structs.replace(INFO, draft_shape=(1, 1, 1), chosen=True)
    assert dict(serving.rows(chosen))["drafter"].startswith("bundled/draft, up to 3 tokens ahead, as many as pay at")
    plain = msgspec.structs.replace(INFO, quantization="int8", activations="model", activations_reason="why")
    assert dict(serving.rows(plain))["activations"] == "not rounded (why)"
    assert dict(serving.rows(none))["drafter"] == "none"
