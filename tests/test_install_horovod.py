"""A failure here is an installation of Horovod that fails late, or without a word of what to do."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

SCRIPT = Path(__file__).parent.parent / "scripts" / "install_horovod.sh"


def error_of(tmp_path: Path, *arguments: str, **environment: str) -> str:
    """What the script says; it must fail before it builds or installs anything."""
    cache = tmp_path / "cache"
    ended = subprocess.run(
        ["bash", str(SCRIPT), *arguments],
        env={**os.environ, "PYTHON": sys.executable, "XDG_CACHE_HOME": str(cache), **environment},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert ended.returncode == 1
    assert not cache.exists()
    return ended.stderr


def executable(path: Path, text: str) -> str:
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return str(path)


def test_an_unknown_argument(tmp_path: Path) -> None:
    """An option that is misspelt is ignored, minutes long."""
    assert "--rebuild, got --rebiuld" in error_of(tmp_path, "--rebiuld")


def test_no_interpreter(tmp_path: Path) -> None:
    """The shell's own words."""
    assert "set PYTHON" in error_of(tmp_path, PYTHON=str(tmp_path / "python"))


def test_a_missing_compiler(tmp_path: Path) -> None:
    """CMake's pages, instead of the package to install."""
    error = error_of(tmp_path, CXX="no-such-compiler")
    assert "missing: a C++20 compiler" in error
    assert "apt install" in error


def test_an_old_compiler(tmp_path: Path) -> None:
    """Errors in torch's headers, after a minute."""
    error = error_of(tmp_path, CXX=executable(tmp_path / "c++", "exit 1"))
    assert "does not know C++20" in error
    assert "or set CXX" in error


def test_no_torch(tmp_path: Path) -> None:
    """Horovod's setup, which asks for any framework."""
    blocked = tmp_path / "torch"
    blocked.mkdir()
    (blocked / "__init__.py").write_text("raise ImportError")
    error = error_of(tmp_path, PYTHONPATH=str(tmp_path))
    assert "torch is not installed" in error


def test_all_that_is_missing_is_said_at_once(tmp_path: Path) -> None:
    """One installation per attempt."""
    tools = tmp_path / "bin"
    tools.mkdir()
    for name in ("bash", "env", "sort", "grep"):
        found = next(p for d in os.get_exec_path() if (p := Path(d) / name).exists())
        (tools / name).symlink_to(found)
    error = error_of(tmp_path, PATH=str(tools), CXX="no-such-compiler")
    for what in ("a C++20 compiler", "cmake", "make"):
        assert f"missing: {what}" in error
