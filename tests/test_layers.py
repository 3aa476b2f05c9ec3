"""A failure here is an import that runs upward among the layers, or torch in the numerics."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parent.parent / "lightning_mgwfbp"
LAYERS = ("plan", "exchange", "measure", "engine", "shell", "front")
# what nobody below may import
FRONT = {"__init__", "__main__", "cli", "bench", "plan_command", "report"}
FILES = sorted(PACKAGE.rglob("*.py"))


def layer(module: str) -> int:
    """Index of a module of the package; files beside the folders are the shell or the front."""
    head = [*module.split("."), "__init__"][1]
    if head in LAYERS:
        return LAYERS.index(head)
    return LAYERS.index("front" if head in FRONT else "shell")


def imports(path: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: write imports with the package's name"
            # `from lightning_mgwfbp import cli` imports a module, not only the package.
            own = node.module == PACKAGE.name
            yield from (f"{node.module}.{each.name}" for each in node.names if own)
            if not own:
                yield str(node.module)


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_imports_run_downward(path: Path) -> None:
    """A lower layer knows a higher one."""
    own = path.relative_to(PACKAGE.parent).with_suffix("").parts
    for name in imports(path):
        if name.split(".")[0] == PACKAGE.name:
            assert layer(name) <= layer(".".join(own)), f"{path} imports {name}"
        if own[1] == "plan":
            assert name.split(".")[0] not in {"torch", "lightning"}, f"{path} imports {name}"


def test_the_walk_sees_the_package() -> None:
    """The test above walks nothing, and so holds nothing."""
    assert {"plan/costs.py", "cli.py"} <= {str(path.relative_to(PACKAGE)) for path in FILES}
