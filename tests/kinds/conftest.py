"""Keeps what other tests have scripted or compiled in a process out of these ones' ranks."""

import pytest
from ranks import discard_pool


@pytest.fixture(scope="session", autouse=True)
def fresh_ranks() -> None:
    """Where scripted functions exist no update is late."""
    discard_pool()
