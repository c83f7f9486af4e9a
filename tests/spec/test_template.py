"""Templates: what a file may hold, cutting, and the best one for measured accuracies."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from foresay.spec.errors import ConfigurationError
from foresay.spec.shape import Template
from foresay.spec.tree import TreeShape

DRAWN = [[0], [0, 0], [0, 1], [1]]


def read(file: Path, content: object) -> TreeShape:
    file.write_text(content if isinstance(content, str) else json.dumps(content))
    return TreeShape.parse(str(file))


@pytest.mark.parametrize("form", [list, lambda paths: {"name": "mine", "choices": paths}])
def test_a_file_of_paths_alone_or_under_choices(tmp_path, form) -> None:
    shape = read(tmp_path / "tree.json", form(DRAWN))
    assert shape.template == Template.of(DRAWN)
    assert (shape.widths, shape.levels, shape.nodes, shape.is_chain) == ((2, 2), 2, 5, False)


def test_first_choices_alone_are_a_chain(tmp_path) -> None:
    assert read(tmp_path / "tree.json", [[0], [0, 0], [0, 0, 0]]) == TreeShape.chain(3)
    assert not read(tmp_path / "tree.json", [[0], [0, 1]]).is_chain


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        ([[0], [1, 0]], "the path [1, 0] is there, but not [1] above it"),
        ([[0], [0, 0, 2], [0, 1]], "the path [0, 0, 2] is there, but not [0, 0] above it"),
        ([[0], [1], [0]], "the path [0] appears twice"),
        ([[0], [-1]], "path number 2 is [-1], but a path is a list of ranks, counted from 0"),
        ([[0], []], "path number 2 is [], but"),
        ([[0], [True]], "path number 2 is [true], but"),
        ([[0], [0.0]], "path number 2 is [0.0], but"),
        ([[0], 3], "path number 2 is 3, but"),
        ([[rank] for rank in range(64)], "a tree has 1 to 63 drafted nodes, got 64 paths"),
        ([], "a tree has 1 to 63 drafted nodes, got 0 paths"),
        ({"paths": DRAWN}, "must hold a list of rank paths such as [[0], [0, 0], [1]]"),
        ("7", "must hold a list of rank paths"),
        ("[[0], [1]", "is not JSON (Expecting"),
    ],
)
def test_what_is_wrong_with_a_file_is_named(tmp_path, content, problem) -> None:
    with pytest.raises(ConfigurationError) as raised:
        read(tmp_path / "tree.json", content)
    assert str(raised.value).startswith(f"--draft-tree {tmp_path / 'tree.json'}: ")
    assert problem in str(raised.value)
    assert "\n" not in str(raised.value)


def test_a_file_that_is_not_there_or_no_text(tmp_path) -> None:
    with pytest.raises(ConfigurationError, match=r"gone\.json: cannot be read \(No such file"):
        TreeShape.parse(str(tmp_path / "gone.json"))
    (tmp_path / "bytes.json").write_bytes(b"\xff\xfe[")
    with pytest.raises(ConfigurationError, match=r"bytes\.json: is not JSON"):
        TreeShape.parse(str(tmp_path / "bytes.json"))


@pytest.mark.parametrize("levels", range(-1, 6))
def test_a_template_cut_to_fewer_levels(levels) -> None:
    paths = [[0], [1], [0, 0], [1, 2], [0, 0, 0], [0, 0, 0, 3]]
    cut = TreeShape.of(Template.of(paths)).limited(levels)
    left = [path for path in paths if len(path) <= levels]
    assert cut == (TreeShape.of(Template.of(left)) if left else TreeShape())
    assert cut.levels == max(0, min(levels, 4))
