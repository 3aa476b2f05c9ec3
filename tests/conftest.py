"""Puts this folder on the import path of every test, and keeps the tests off each other's cores."""

import os

import pytest
import torch
from ranks import discard_pool

torch.set_num_threads(1)


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "horovod: needs Horovod, and therefore is slow")


@pytest.hookimpl(tryfirst=True)  # `-m "not slow"` is applied by another of these hooks
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """What needs Horovod is slow, and skipped where it cannot be imported; never in CI."""
    why = "" if "CI" in os.environ else _why_no_horovod()
    for item in items:
        if item.get_closest_marker("horovod"):
            item.add_marker(pytest.mark.slow)
            if why:
                item.add_marker(pytest.mark.skip(reason=why))


@pytest.fixture(scope="module", autouse=True)
def fresh_ranks_for_deferred_steps(request: pytest.FixtureRequest) -> None:
    """What other tests have scripted or compiled in a process keeps updates from being late."""
    if request.module.__name__.startswith("test_cross_iteration_"):
        discard_pool()


def _why_no_horovod() -> str:
    try:
        import horovod.torch  # noqa: F401, PLC0415
    except ImportError as error:
        return f"scripts/install_horovod.sh has not installed Horovod: {error}"
    return ""
