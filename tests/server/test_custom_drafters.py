"""``--draft package.module:Class``: found by import, refused with a reason, and the one of docs/drafters.md served; and
the table of the drafters that come with the server."""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import aiohttp
import pytest

from bench.drive import LOOKUPS
from foresay.server.cli.pair import check
from foresay.server.engine.build import build_engine
from foresay.server.engine.drafters.entry import Entry, FromFiles
from foresay.server.engine.drafters.models import DraftModel
from foresay.server.engine.drafters.registry import ENTRIES, Custom, drafts, entry_of, settled
from foresay.server.settings.config import EngineConfig
from foresay.server.settings.resolved import choose_draft
from foresay.spec.errors import ConfigurationError, ForesayError
from foresay.spec.names import DRAFTERS, GRAMMAR, MTP, PREDICTION, SUFFIX
from foresay.spec.sampling import SamplingParams
from tests.same_tokens.witness import Job, Witness, run
from tests.server.live import LiveServer

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "drafters.md").read_text("utf-8")
(SHOWN,) = re.findall(r"^```python\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)
SMALL = {"max_model_len": 256, "kv_tokens": 1024, "dtype": "float32", "device": "cpu"}
#: What every class of the tests below has, but for what is tried.
WHOLE = """
class Base:
    name, needs = "mine", None
    def propose(self, sequences, shapes): return []
    def extend(self, sequence): pass
    def committed(self, sequence, path): pass
    def finished(self, sequence): pass
"""


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A directory that the command is started in; what was imported from it is forgotten."""
    monkeypatch.chdir(tmp_path)
    paths, known = list(sys.path), set(sys.modules)
    yield tmp_path
    sys.path[:] = paths
    for name in set(sys.modules) - known:
        if str(tmp_path) in str(getattr(sys.modules[name], "__file__", "")):
            del sys.modules[name]


def refused(draft: str) -> str:
    config = EngineConfig(draft=draft, **SMALL)  # type: ignore[arg-type]
    with pytest.raises(ConfigurationError) as error:
        build_engine(config)
    assert str(error.value).startswith(f"--draft {draft}: ")
    return str(error.value)


@pytest.mark.parametrize(
    ("source", "said"),
    [
        (None, "the module mine cannot be imported: ModuleNotFoundError: No module named 'mine'; looked on"),
        ("import nowhere.to_be_found", r"ModuleNotFoundError: No module named 'nowhere' \(.*mine\.py:1\)"),
        ("def f(:", "cannot be imported: SyntaxError"),
        ("1 / 0", r"cannot be imported: ZeroDivisionError: division by zero \(.*mine\.py:1\)"),
        ("raise SystemExit('no')", "cannot be imported: SystemExit: no"),
        ("", r"the module mine \(.*mine\.py\) has no class Own"),
        ("Own = 3", "has no class Own"),
        ("class Own: pass", "Own is not a drafter: it lacks propose, extend, committed, finished"),
        (f"{WHOLE}class Own(Base): extend = 3", "it lacks extend"),
        (f"{WHOLE}class Own(Base):\n def __init__(self, knob): pass", "it cannot be made: TypeError: .*knob"),
        (f"{WHOLE}class Own(Base):\n def __init__(self): 1 / 0", "it cannot be made: ZeroDivisionError"),
        (f"{WHOLE}class Own(Base): name = 'suffix'", "its name is 'suffix', and must be"),
        (f"{WHOLE}class Own(Base): name = 'a+b'", r"its name is 'a\+b', and must be"),
        (f"{WHOLE}class Own(Base): name = None", "its name is None, and must be"),
        (f"{WHOLE}class Own(Base): needs = 3", "its needs must be None or a FeatureRequest"),
        (
            "from foresay.spec.protocols import FeatureRequest"
            f"{WHOLE}class Own(Base): needs = FeatureRequest(layers=(99,))",
            "FeatureRequest of layers from 0 to",
        ),
        (
            f"from foresay.spec.protocols import FeatureRequest{WHOLE}class Own(Base): needs = FeatureRequest(True)",
            "lacks observe",
        ),
    ],
)  # fmt: skip
def test_what_is_no_drafter_is_refused(here: Path, source: str | None, said: str) -> None:
    if source is not None:
        (here / "mine.py").write_text(source)
    assert re.search(said, refused("mine:Own"))
    report = check(EngineConfig(draft="mine:Own", **SMALL))  # type: ignore[arg-type]
    imported = source is not None and "class Own(" in source and "extend = 3" not in source
    assert report.works == imported, report.fault


def test_two_of_one_name_are_refused(here: Path) -> None:
    (here / "mine.py").write_text(f"{WHOLE}class One(Base): pass\nclass Two(Base): pass")
    with pytest.raises(ConfigurationError, match="--draft mine:Two: is called mine, as is mine:One; rename one"):
        build_engine(EngineConfig(draft="mine:One,mine:Two", **SMALL))  # type: ignore[arg-type]


def test_it_is_made_with_what_it_declares(here: Path) -> None:
    made = "def __init__(self, target, *, vocab_size, more=7): type(self).got = target, vocab_size, more"
    (here / "mine.py").write_text(f"{WHOLE}class Own(Base):\n {made}")
    engine = build_engine(EngineConfig(draft="mine:Own", draft_tokens=2, **SMALL))  # type: ignore[arg-type]
    target, vocab_size, more = sys.modules["mine"].Own.got
    assert (Path(target) / "tokenizer.json").exists()
    assert (vocab_size, more) == (engine.info.vocab_size, 7)
    assert (engine.info.drafter, engine.info.draft) == ("mine", "mine:Own")


@pytest.mark.parametrize("draft", ["medusa:draft", "eagle3:draft", "eagle:draft", "draft_model:draft", "draft:draft"])
def test_names_with_a_path_are_no_modules(here: Path, draft: str) -> None:
    (here / f"{draft.partition(':')[0]}.py").write_text(f"{WHOLE}class draft(Base): pass")
    assert Custom.named(draft) is None


@pytest.mark.parametrize(
    "draft",
    ["ngram:6", "Qwen/Qwen3-0.6B", "./a:B", "a/b:C", "a.:B", "1a:B", "a:b:C", "a:", ":B", "a b:C", "suffix:Own"],
)
def test_what_looks_otherwise_is_no_module(here: Path, draft: str) -> None:
    assert Custom.named(draft) is None
    with pytest.raises(ForesayError):
        drafts(EngineConfig(), draft)


def test_a_directory_of_such_a_name_is_a_directory(here: Path) -> None:
    assert Custom.named("a.b:C") == Custom("a.b:C")
    (here / "a.b:C").mkdir()
    assert Custom.named("a.b:C") is None


def test_what_is_here_hides_nothing_that_is_installed(here: Path) -> None:
    (here / "json.py").write_text(f"{WHOLE}class Own(Base): pass")
    assert re.search(r"the module json \(.*json/__init__\.py\) has no class Own", refused("json:Own"))


JOBS = [
    Job(
        f"{prompt[0]}{temperature}",
        prompt,
        SamplingParams(temperature=temperature, seed=3, max_tokens=48, ignore_eos=True),
    )
    for prompt in ([40, 41, 42] * 6, [300, 7, 9, 11])
    for temperature in (0.0, 1.0)
]


def test_the_one_of_the_page(here: Path) -> None:
    """The same text, sooner: what it proposes is taken, under its name."""
    (here / "pairs.py").write_text(SHOWN)

    def texts(draft: str, **settings: object) -> dict[str, list[int]]:
        engine = build_engine(EngineConfig(draft=draft, **SMALL, **settings))  # type: ignore[arg-type]
        engine.runner = Witness(engine.runner.verifier, engine.drafter)
        found = {**run(engine, JOBS)}
        accepted[draft] = sum(sum(t.statistics.accepted_per_depth) for t in found.values() if t.statistics)
        return {name: text.tokens for name, text in found.items()}

    accepted: dict[str, int] = {}
    plain = texts("none")
    assert texts("pairs:Pairs", draft_tokens=4) == plain
    assert accepted["pairs:Pairs"] > 10
    assert texts("pairs:Pairs") == plain
    assert texts(f"pairs:Pairs,{SUFFIX}") == plain
    assert choose_draft(EngineConfig(draft="pairs:Pairs")).reason == "asked for"


async def test_it_is_served_from_where_the_command_is_started(here: Path) -> None:
    """Its engine process finds it, and it stands under its name in answers, in /health and in /metrics."""
    (here / "pairs.py").write_text(SHOWN)
    flags = ("--draft", "pairs:Pairs", "--draft-tokens", "3", "--max-model-len", "256")
    with LiveServer(here / "log", *flags) as server:
        url = server.wait_for_url()

        async def written(speculation: dict[str, object]) -> str:
            body = {"prompt": "one two one two one two one two", "max_tokens": 40, "temperature": 0}
            answer = await post(f"{url}/v1/completions", json={**body, "speculation": speculation})
            text: str = (await answer.json())["choices"][0]["text"]
            return text

        async with aiohttp.ClientSession() as session:
            get, post = session.get, session.post
            text = await written({"method": "pairs"})
            assert text
            assert text == await written({"off": True})
            assert (await (await get(f"{url}/health")).json())["draft"] == "pairs:Pairs"
            assert 'drafter="pairs"' in await (await get(f"{url}/metrics")).text()


# -- the table of drafters ---------------------------------------------------------------------------------------------


ROOT = Path(__file__).resolve().parents[2]
#: Those that consist of others, which tell themselves apart; and whoever has logits, a base of kinds, from the rest.
_OF_OTHERS = {
    "drafters/combined.py": ["CombinedDrafter", "RoutedDrafter"],
    "drafters/proposer.py": ["TreeDrafter", "HiddenStateDrafter"],
}


def test_every_drafter_that_can_be_named_has_an_entry_of_its_own() -> None:
    names = [name for entry in ENTRIES for name in entry.names]
    # A target's own layer for further tokens, and a model that was made to be one: the latter is named with its files.
    names.remove(MTP)
    assert sorted(names) == sorted(set(DRAFTERS) - {PREDICTION, GRAMMAR})
    assert len({entry.made for entry in ENTRIES}) == len(ENTRIES)
    assert set(LOOKUPS) == {"ngram", "suffix"}
    for name, make in LOOKUPS.items():
        assert make().name == name
        assert name in entry_of(make()).names


def told_apart(path: Path) -> list[str]:
    """The drafters' classes that a file asks about."""
    calls = [node for node in ast.walk(ast.parse(path.read_text("utf-8"))) if isinstance(node, ast.Call)]
    requested = [node.args[1] for node in calls if getattr(node.func, "id", "") in ("isinstance", "issubclass")]
    named = [getattr(part, "id", "") for question in requested for part in ast.walk(question)]
    return [name for name in named if name.endswith("Drafter")]


def test_no_other_module_distinguishes_their_classes() -> None:
    folders = ("spec", "verifier", "drafters", "server", "bench")
    files = [path for folder in folders for path in (ROOT / folder).rglob("*.py")]
    found = {str(path.relative_to(ROOT)): told_apart(path) for path in files}
    assert {path: names for path, names in found.items() if names} == _OF_OTHERS


def test_models_draft_before_lookups_and_each_as_named() -> None:
    eagle, medusa, model, ngram, suffix = (
        next(entry for entry in ENTRIES if name in entry.names)(name)
        for name in ("eagle", "medusa", "draft_model", "ngram", "suffix")
    )
    assert settled([suffix, ngram, model], EngineConfig(), "x") == [model, suffix, ngram]
    with pytest.raises(ConfigurationError, match="names two of one kind; one head can draft, not several"):
        settled([eagle, suffix, medusa], EngineConfig(), "x")
    with pytest.raises(ConfigurationError, match="names two of one kind; one draft model can draft"):
        settled([model, DraftModel("other")], EngineConfig(), "x")


def test_the_page_names_what_an_entry_says() -> None:
    page = (ROOT / "docs" / "drafters.md").read_text("utf-8").partition("## Adding one to Foresay")[2]
    fields = {name for name in {**vars(Entry), **Entry.__annotations__, **vars(FromFiles)} if not name.startswith("_")}
    own = {"option", "location", "directory", "at", "setting", "files", "warning"}
    assert {name for name in fields - own if f"`{name}`" not in page} == set()
