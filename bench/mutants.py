"""Whether the tests find faults: ``python -m bench mutants --product GLOB --tests DIRECTORY --label before``.

A mutant is the product with one small fault, in a copy of the tree. It is run against the tests that execute its line,
and if none of them fails, against the whole files of those; what failed is appended to ``results/mutants.jsonl``. A
run that was stopped goes on where it was. ``--compare before after`` lists what only one of two labels found.

Which tests execute a line is seen by coverage.py, once for a label (``--map`` keeps it). Without that, or for lines
that only other processes or compiled kernels execute, it is all of ``--tests``.
"""

from __future__ import annotations

import ast
import importlib.util
import json
import os
import random
import re
import shlex
import shutil
import sqlite3
import subprocess
import sys
import tempfile
from argparse import ArgumentParser, Namespace
from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from bench import BadOption

ROOT = Path(__file__).resolve().parent.parent
RESULTS = Path(__file__).with_name("results") / "mutants.jsonl"
FLIPPED: dict[type[ast.AST], Any] = {
    ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot, ast.IsNot: ast.Is, ast.In: ast.NotIn, ast.NotIn: ast.In, ast.And: ast.Or, ast.Or: ast.And,
    ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Add, ast.FloorDiv: ast.Mult, ast.LShift: ast.RShift,
}  # fmt: skip
#: What pytest says of a test or of a file that failed.
FAILED = re.compile(r"^(?:FAILED|ERROR) (tests/[\w/]+\.py(?:::\w+)?)", re.MULTILINE)

#: Where it is, first and past the last byte, what takes its place, and the kind of the fault.
Mutation = tuple[int, int, str, str]


def options(parser: ArgumentParser) -> None:
    parser.add_argument("--product", nargs="+", default=[], help="globs of the files to put faults in")
    parser.add_argument("--tests", nargs="+", default=[], help="files and directories of tests")
    parser.add_argument("--label", default="now", help="which run of several this is")
    parser.add_argument("--count", type=int, default=60)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--limit", type=int, default=300, help="seconds for each run of tests")
    parser.add_argument("--map", type=Path, help="the data of coverage.py, made where it is missing")
    parser.add_argument("--through", type=shlex.split, default=[], help='a command before each, as "nice -n 15"')
    parser.add_argument("--compare", nargs=2, metavar="LABEL")


def main(args: Namespace) -> None:
    """Run the mutants that the label lacks, or compare two labels."""
    if args.compare:
        print("\n".join(compared(*args.compare)))
        return
    files = sorted({file for glob in args.product for file in ROOT.glob(glob)})
    if not files or not args.tests:
        raise BadOption("--product and --tests name what is to be tried")
    every = [(file, mutation) for file in files for mutation in mutations(file.read_text("utf-8"))]
    done = {record["mutant"] for record in records(args.label)}
    with tempfile.TemporaryDirectory(prefix="mutants-") as directory:
        tree = Path(directory).resolve()
        copy(tree)
        executing = coverage(tree, args)
        for file, mutation in random.Random(args.seed).sample(every, min(args.count, len(every))):
            name = file.relative_to(ROOT).as_posix()
            source = file.read_bytes()
            line = source.count(b"\n", 0, mutation[0]) + 1
            record = {"label": args.label, "mutant": f"{name}:{line}:{mutation[0]}:{mutation[3]}"}
            if record["mutant"] in done:
                continue
            (tree / name).write_bytes(source[: mutation[0]] + mutation[2].encode() + source[mutation[1] :])
            record |= tried(tree, sorted(executing[name, line]), args)
            (tree / name).write_bytes(source)
            with RESULTS.open("a", encoding="utf-8") as results:
                results.write(json.dumps(record) + "\n")
            print(record["mutant"], *record["killed"] or ["SURVIVED"], flush=True)


def copy(tree: Path) -> None:
    """The tree as it is, without what git ignores, and the environment."""
    listed = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]
    for name in subprocess.run(listed, cwd=ROOT, check=True, capture_output=True, text=True).stdout.splitlines():
        if not name.startswith("bench/results/") and (ROOT / name).exists():
            (tree / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, tree / name, follow_symlinks=False)
    (tree / ".venv").symlink_to(sys.prefix)


def pytest(tree: Path, arguments: Sequence[str], args: Namespace, before: Sequence[str] = ()) -> tuple[int, str]:
    """The exit status and output of tests in the tree."""
    command = [*args.through, "timeout", "-k", "9", str(args.limit), sys.executable, *before, "-m", "pytest", "-q"]
    path = os.pathsep.join([str(tree), *os.environ.get("PYTHONPATH", "").split(os.pathsep)])
    ran = subprocess.run(
        [*command, "-p", "no:cacheprovider", "--tb=no", *arguments],
        cwd=tree, env=os.environ | {"PYTHONPATH": path}, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip
    return ran.returncode, ran.stdout


def tried(tree: Path, tests: list[str], args: Namespace) -> dict[str, Any]:
    """Which files were run and which of them failed."""
    whole = sorted({test.partition("::")[0] for test in tests}) or args.tests
    status, output = 0, ""
    for chosen in (tests, whole) if tests else (whole,):
        status, output = pytest(tree, chosen, args)
        if status:
            break
    return {"tried": whole, "killed": sorted(set(FAILED.findall(output))) or ([f"status {status}"] if status else [])}


def coverage(tree: Path, args: Namespace) -> dict[tuple[str, int], set[str]]:
    """The tests that execute each line of each file."""
    found: dict[tuple[str, int], set[str]] = defaultdict(set)
    if args.map is None or importlib.util.find_spec("coverage") is None:
        return found
    if not args.map.exists():
        whole = Namespace(through=args.through, limit=20 * args.limit)
        run = ["-m", "coverage", "run", f"--data-file={args.map.resolve()}", "--source=."]
        status, output = pytest(tree, ["-p", "bench.mutants", *args.tests], whole, run)
        if status:
            raise BadOption(f"the tests fail without a fault: {output[-2000:]}")
    with sqlite3.connect(args.map) as data:
        for path, test, bits in data.execute(
            "select file.path, context.context, numbits from line_bits"
            " join file on file.id = file_id join context on context.id = context_id where context.context != ''"
        ):
            name = re.sub(r"^.*?/(?=(?:server|spec|drafters|verifier|kvpaging)/)", "", path)
            for line in (8 * at + bit for at, byte in enumerate(bits) for bit in range(8) if byte >> bit & 1):
                found[name, line].add(test)
    return found


def pytest_runtest_setup(item: Any) -> None:
    """Lines are those of the test, where pytest has this module as a plugin; all it is parametrised with is one."""
    current = importlib.import_module("coverage").Coverage.current()
    if current is not None:
        current.switch_context(item.nodeid.partition("[")[0])


def mutations(source: str) -> Iterator[Mutation]:
    """All of a file that compile."""
    starts = [0]
    for line in source.encode().splitlines(keepends=True):
        starts.append(starts[-1] + len(line))
    for node, replacement, kind in faults(ast.parse(source)):
        first = starts[node.lineno - 1] + node.col_offset
        past = starts[(node.end_lineno or 0) - 1] + (node.end_col_offset or 0)
        yield first, past, replacement, kind


def faults(node: ast.AST) -> Iterator[tuple[Any, str, str]]:
    """Nodes with what may take their place, and the kind of fault; none in annotations, assertions and f-strings."""
    for name, value in ast.iter_fields(node):
        if name in ("annotation", "returns", "decorator_list", "bases") or isinstance(node, ast.JoinedStr | ast.Assert):
            continue
        for child in value if isinstance(value, list) else [value]:
            if isinstance(child, ast.AST):
                yield from ((child, text, kind) for text, kind in of_node(child))
                yield from faults(child)


def of_node(node: ast.AST) -> Iterator[tuple[str, str]]:
    match node:
        case ast.Compare(left, [op, *ops], rest) if type(op) in FLIPPED:
            yield f"({ast.unparse(ast.Compare(left, [FLIPPED[type(op)](), *ops], rest))})", "comparison"
        case ast.BoolOp(op, values):
            yield f"({ast.unparse(ast.BoolOp(FLIPPED[type(op)](), values))})", "and, or"
        case ast.BinOp(left, op, right) if type(op) in FLIPPED:
            yield f"({ast.unparse(ast.BinOp(left, FLIPPED[type(op)](), right))})", "operator"
        case ast.Constant(bool(value)):
            yield str(not value), "constant"
        case ast.Constant(int(value)):
            yield str(value + 1), "constant"
        case ast.Call(function, [first, second, *rest], keywords) if not isinstance(first, ast.Starred):
            yield ast.unparse(ast.Call(function, [second, first, *rest], keywords)), "arguments"
        case ast.Return(value) if value is not None and ast.unparse(value) != "None":
            yield "return None", "return"
        case ast.Expr(ast.Call()):
            yield "pass", "call"
        case ast.If(test, _, []) if ast.unparse(test) != "TYPE_CHECKING":
            yield f"if False and ({ast.unparse(test)}): pass", "branch"
        case ast.IfExp(test, body, other):
            yield f"({ast.unparse(ast.IfExp(ast.UnaryOp(ast.Not(), test), body, other))})", "not"


def records(label: str) -> list[dict[str, Any]]:
    lines = RESULTS.read_text("utf-8").splitlines() if RESULTS.exists() else []
    return [record for record in map(json.loads, lines) if record["label"] == label]


def compared(before: str, after: str) -> Iterator[str]:
    """What only one of two labels found, and how many each did of those that both tried."""
    found = [{record["mutant"]: record["killed"] for record in records(label)} for label in (before, after)]
    both = sorted(found[0].keys() & found[1].keys())
    for mutant in both:
        if bool(found[0][mutant]) != bool(found[1][mutant]):
            yield f"{mutant}: {found[0][mutant]} before, {found[1][mutant]} after"
    killed = [sum(bool(each[mutant]) for mutant in both) for each in found]
    yield f"{len(both)} mutants: {killed[0]} killed before, {killed[1]} after"
    alone = {tests[0] for each in found for tests in each.values() if len(tests) == 1}
    yield from (f"alone in killing one: {test}" for test in sorted(alone))
