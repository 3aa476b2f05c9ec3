"""Ways to damage a document of mappings, lists and values, for tests with hypothesis."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

from hypothesis import strategies as st

Path = tuple[Any, ...]


def nested(depth: int) -> list[Any]:
    """Lists in each other."""
    value: list[Any] = []
    for _ in range(depth):
        value = [value]
    return value


WRONG = (
    None,
    True,
    -1,
    0,
    1.5,
    2**53 + 1,
    10**400,
    1e16,
    1e308,
    float("nan"),
    float("inf"),
    "",
    "x",
    "\ud800",
    [],
    [None],
    ["x", "x"],
    [[0, 1]],
    nested(200),
    {},
    {"x": {"y": [1]}},
)


def paths(document: Any, path: Path = ()) -> Iterator[Path]:
    """To every part of `document`, itself included."""
    yield path
    if isinstance(document, dict):
        for key in document:
            yield from paths(document[key], (*path, key))
    elif isinstance(document, list):
        for index, part in enumerate(document):
            yield from paths(part, (*path, index))


@st.composite
def damaged(draw: st.DrawFn, document: Any, wrong: tuple[Any, ...] = WRONG) -> Any:
    """`document` with one part replaced, left out or doubled, or with one more."""
    path = draw(st.sampled_from(list(paths(document))))
    how = draw(st.sampled_from(("replace", "replace", "replace", "leave out", "double", "add")))
    if not path or how == "replace":
        return _with(document, path, draw(st.sampled_from(wrong)))
    document = copy.deepcopy(document)
    *above, last = path
    parent = _at(document, tuple(above))
    if how == "leave out":
        del parent[last]
    elif isinstance(parent, list):
        parent.insert(last, parent[last] if how == "double" else draw(st.sampled_from(wrong)))
    else:
        parent[f"{last} again"] = parent[last]
    return document


def _with(document: Any, path: Path, value: Any) -> Any:
    if not path:
        return value
    document = copy.deepcopy(document)
    _at(document, path[:-1])[path[-1]] = value
    return document


def _at(document: Any, path: Path) -> Any:
    for key in path:
        document = document[key]
    return document
