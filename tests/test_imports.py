"""Each module imports alone, and the ones a user meets first import fast."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("kvpaging", "spec", "verifier", "drafters", "server")

# Imports every module named on the command line as the first one of the project: what the project's other modules left
# in sys.modules is thrown out before each, while torch and the like stay, which only saves time.
ALONE = """
import importlib, sys, traceback
failed = 0
for name in sys.argv[1:]:
    for loaded in [m for m in sys.modules if m.partition(".")[0] == "foresay"]:
        del sys.modules[loaded]
    try:
        importlib.import_module(name)
    except BaseException:
        failed += 1
        print(f"--- {name} does not import alone", file=sys.stderr)
        traceback.print_exc()
sys.exit(failed)
"""


def modules_of(package: str) -> list[str]:
    """Dotted names of the package's modules, ``__main__`` files left out since importing those runs them."""
    paths = sorted((ROOT / package).rglob("*.py"))
    parts = [path.relative_to(ROOT).with_suffix("").parts for path in paths if path.stem != "__main__"]
    return [".".join(("foresay", *(part[:-1] if part[-1] == "__init__" else part))) for part in parts]


def python(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, *arguments], cwd=ROOT, capture_output=True, text=True, check=False)


@pytest.mark.parametrize("every", [pytest.param(1, marks=pytest.mark.soak), 5])
def test_each_module_imports_alone(every: int) -> None:
    names = [name for package in PACKAGES for name in modules_of(package)]
    if importlib.util.find_spec("ray") is None:
        names.remove("foresay.server.replicas.cluster")
    assert {"foresay.spec.accept", "foresay.server.cli.main", "foresay.verifier.model.config"} <= set(names)
    done = python("-W", "error", "-c", ALONE, *names[::every])
    assert done.returncode == 0, done.stderr


def test_the_facade_imports_nothing_heavy() -> None:
    done = python("-c", "import sys, foresay; print(*sys.modules)")
    assert done.returncode == 0, done.stderr
    assert not {"torch", "transformers", "msgspec", "foresay.server"} & set(done.stdout.split())


def test_a_server_without_replicas_imports_nothing_of_them() -> None:
    """Nor does its engine process."""
    code = (
        "import sys, foresay.server.cli.serving, foresay.server.http.life, foresay.server.engine_process.process as p\n"
        "p._import(); print(*sys.modules)"
    )
    done = python("-c", code)
    assert done.returncode == 0, done.stderr
    assert not [name for name in done.stdout.split() if name.startswith(("ray", "foresay.server.replicas"))]


def test_the_facade_lists_and_finds_its_names() -> None:
    import foresay

    assert sorted(foresay.__all__) == dir(foresay)
    assert all(getattr(foresay, name) is not None for name in foresay.__all__)
    with pytest.raises(AttributeError, match="no attribute 'Engin'"):
        _ = foresay.Engin


def test_a_drafter_may_still_import_a_sequence_by_its_old_name() -> None:
    import foresay.spec.sequence

    with pytest.warns(FutureWarning, match="SequenceState"):
        assert foresay.spec.sequence.__getattr__("Sequence") is foresay.spec.sequence.SequenceState
    with pytest.raises(AttributeError, match="no attribute 'Sequences'"):
        _ = foresay.spec.sequence.Sequences  # type: ignore[attr-defined]
