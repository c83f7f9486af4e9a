"""Foresay next to llama.cpp: which prompts each gets, how answers are summed up, and what the README says of them."""

from __future__ import annotations

import json
from argparse import Namespace
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from bench import llama, peers, plain, prompts, readme
from bench.experiment import Case, Sample, Taken
from bench.serving import Answer, Server, ServerFailed, exchange
from tests.server.live import LiveServer

BODY = {"model": None, "prompt": [1, 2, 3], "max_tokens": 512, "seed": 1, "ignore_eos": True}
GGUF = (Path("w-q4_1.gguf"), Path("w-q4_0.gguf"))


def arguments(**changes: Any) -> Namespace:
    given = {"target": "bundled", "ways": ["none", "auto"], "gguf": GGUF, "llama_server": Path("llama-server")}
    more = {"xllamacpp": None, "llama_ways": ["plain", "ngram-mod"], "draft_gguf": None, "threads": 2, "seed": 0}
    drawn = {"prompts": [("own", prompts.OWN)], "edits": [], "limit": 2, "temperatures": (0.0, 1.0), "max_tokens": 8}
    return Namespace(**{**given, **more, **drawn, **changes})


def test_each_way_of_ours_and_each_format_of_theirs_has_a_server() -> None:
    def commands(args: Namespace) -> dict[str, Sequence[str]]:
        return {server.name: server.command for server in peers.servers_of(args, slots=3)}

    found = commands(arguments(ways=["none", "eagle3:/some/HEAD --draft-tokens 4"]))
    assert list(found) == [
        "foresay none",
        "foresay eagle3 HEAD --draft-tokens 4",
        *(f"llama.cpp {file} {way}" for file in ("w-q4_1", "w-q4_0") for way in ("plain", "ngram-mod")),
    ]
    ours, theirs = found["foresay eagle3 HEAD --draft-tokens 4"], found["llama.cpp w-q4_0 ngram-mod"]
    assert ours[ours.index("--draft") :][:4] == ["--draft", "eagle3:/some/HEAD", "--draft-tokens", "4"]
    assert ours[ours.index("--max-seqs") + 1] == theirs[theirs.index("-np") + 1] == "3"
    assert theirs[theirs.index("-c") + 1] == str(3 * llama.CONTEXT), "as much for each request"
    assert "xllamacpp w-q4_1 ngram-mod" in commands(arguments(llama_server=None, xllamacpp=Path("python")))


def test_each_prompt_is_sent_once_and_at_one_temperature(tmp_path: Path) -> None:
    text = tmp_path / "text.md"
    text.write_text("\n".join(f"The {number}th of many lines." for number in range(200)))
    code = tmp_path / "code.jsonl"
    code.write_text(json.dumps({"task_id": "HumanEval/0", "prompt": "def once():"}))
    args = arguments(prompts=[("own", prompts.OWN), ("code", code)], edits=[text])
    drawn = peers.prompts_of(args, 4)
    assert len({one.ids for one in drawn}) == len({one.name for one in drawn}) == len(drawn)
    by_kind = {kind: [one.temperature for one in drawn if one.kind == kind] for kind in ("own", "code", "editing")}
    assert by_kind == {"own": [0.0, 1.0, 0.0, 1.0], "code": [0.0], "editing": [0.0, 1.0, 0.0]}
    with pytest.raises(prompts.BadPrompts, match="twice"):
        peers.prompts_of(arguments(prompts=[("own", prompts.OWN), ("again", prompts.OWN)]), 2)


def test_prompts_for_code_are_a_users() -> None:
    drawn = peers.instructed("code", prompts.Prompt("HumanEval/0", "def once():", chat=False))
    assert drawn.chat and "def once():" in drawn.text and drawn.text.startswith("Complete")
    reported = prompts.Prompt("own", "Once", chat=False)
    assert peers.instructed("own", reported) is reported


def test_a_server_whose_first_answer_fails_is_stopped(monkeypatch: pytest.MonkeyPatch) -> None:
    @contextmanager
    def started(*arguments: Any, **options: Any) -> Iterator[tuple[None, int]]:
        try:
            yield None, 1  # no one listens there
        finally:
            stopped.append(True)

    stopped: list[bool] = []
    monkeypatch.setattr("bench.serving.started", started)
    with pytest.raises(ConnectionError) as failed, Server("", [], "/ready", {}):
        pass
    assert stopped, f"not only once {failed} is collected"


def test_one_client_times_every_server(tmp_path: Path) -> None:
    with LiveServer(tmp_path / "log", "--draft", "none") as live:
        server = Server("foresay none", [], "/ready", {"model": None})
        server.port = int(live.wait_for_url().rpartition(":")[2])
        counted: list[int] = []
        group = [peers.PeerPrompt("own", f"{number}", (1, 2, 3 + number)) for number in range(3)]
        answer = peers.sent(server, group[0], arguments(max_tokens=24), endless=True)
        whole = exchange(server.port, {**BODY, "stream": False})
        heard = exchange(server.port, {**BODY, "stream": True}, counted.append)
        with pytest.raises(ServerFailed, match="prompt"):
            peers.sent(server, peers.PeerPrompt("own", "none", (1 << 30,)), arguments())
        with ThreadPoolExecutor(3) as pool:
            measured = peers.together(server, pool, arguments(max_tokens=8)).measure(Case("", "", group), 0)
    assert answer.tokens == 24 and 0 < answer.first <= answer.whole <= answer.seconds, "one event may bring all of it"
    assert (answer.first, answer.whole) == (answer.arrivals[0], answer.arrivals[-2]), "the last event counts tokens"
    assert (whole.text, whole.tokens) == (heard.text, heard.tokens) and whole.text
    assert len(whole.arrivals) == 1 < len(heard.arrivals) == len(counted) and counted[:2] == [1, 2]
    assert isinstance(measured, Sample) and measured.figures[peers.DECODING] > 0


def answers() -> list[Taken]:
    """Of two prompts, and a third that all but one answer with a word."""

    def given(way: str, first: float, speed: float, long: int = 2) -> list[Taken]:
        made = [
            Answer("", 21, [], first, first + 20 / speed, 9.0) if n < long else Answer("", 2, [], first, 9.0, 9.0)
            for n in range(3)
        ]
        return [
            Taken(way, Case("", f"{n}", peers.PeerPrompt("chat", f"{n}", ())), 0, peers.sample(answer))
            for n, answer in enumerate(made)
        ]

    ours = [*given("foresay none", 0.1, 100), *given("foresay auto", 0.1, 300), *given("foresay ngram", 0.2, 150, 3)]
    theirs = [*given("llama.cpp A plain", 0.4, 50), *given("llama.cpp B plain", 0.2, 40)]
    return [*ours, *theirs, *given("llama.cpp B ngram-mod", 0.3, 75)]


def test_the_fastest_of_either_side_are_compared_and_auto_with_the_rest() -> None:
    found = peers.summary(answers())
    assert found["ways"]["foresay none"]["tokens_per_second"].size == 2, "an answer of two tokens has no decode rate"
    assert peers.DECODING not in peers.sample(Answer("", 21, [], 0.3, 0.3, 0.3)).figures, "nor has one of one event"
    pairs = {name: (pair["ours"], pair["theirs"], pair["times"].ratio) for name, pair in found["versus"].items()}
    assert pairs["decoding"] == ("foresay auto", "llama.cpp B ngram-mod", pytest.approx(4.0))
    assert pairs["plain"] == ("foresay none", "llama.cpp A plain", pytest.approx(2.0))
    assert pairs["first token"] == ("foresay none", "llama.cpp B plain", pytest.approx(2.0))
    assert {way: times.ratio for way, times in found["auto_over"].items()} == {
        "foresay none": pytest.approx(3.0),
        "foresay ngram": pytest.approx(2.0),
    }
    alone = peers.summary([one for one in answers() if one.variant == "foresay none"])
    assert alone["versus"] == alone["auto_over"] == {}, "nobody to compare with"


def test_the_readme_shows_others_in_the_format_that_suits_each_way_best(tmp_path: Path) -> None:
    found = peers.kinds_of(answers())["together"]["0"]
    shape = {"bench": "peers", "target": "w.gguf", "distinct_prompts": 6, "server_threads": 2, "max_tokens": 8}
    machine = {"cores": 2, "cpu": "X", "load_1m": 1.0}
    kinds = {kind: {"0": found, "1": found} for kind in ("together", "chat", "editing")}
    entry = plain({**shape, "machine": machine, "llama.cpp": "1", "kinds": kinds})
    speeds = {way: figures["tokens_per_second"] for way, figures in entry["kinds"]["chat"]["0"]["ways"].items()}
    at_once = {"bench": "at_once", "target": "w.gguf", "max_tokens": 8, "at_once": {"1": speeds, "8": speeds}}
    older = {**entry, "target": "other.gguf"}
    for number, record in enumerate([older, entry, at_once, {**entry, "kinds": {"together": {}, "own": {}}}]):
        (tmp_path / f"{number}-{record['bench']}.json").write_text(json.dumps(record))
    text = readme.block(readme.newest(tmp_path), readme.on_gpu())
    assert "| llama.cpp A plain | 50 / 50 | 50 / 50 | 50 / 50 |" in text and "B plain |" not in text
    assert "| foresay auto | 300 / 300 |" in text and "| foresay auto | 300 | 300 |" in text
    same = "4.00 (4.00 to 4.00)"
    assert f"- Decoding is {same} times as fast at T = 0, {same} at T = 1.\n" in text
    assert (
        text.count("\n- ") == 4
        and "(`auto`) make ours another 3.00 (3.00 to 3.00) times as fast at T = 0, 3.00" in text
    )
    assert "0-peers.json" in text and "1-peers.json" in text and "2-at_once.json" in text, "the newest of several kinds"
    assert "| other.gguf | 100 / 100 | 300 / 300 | 75 / 75 | 4.00 / 4.00 |" in text and "| w.gguf |" not in text
