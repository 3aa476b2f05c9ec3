"""A failure here means: somebody who gives a strategy of Trainer to Fabric is not told the way."""

from __future__ import annotations

import importlib

import pytest
from lightning.fabric import Fabric
from lightning.fabric.strategies import STRATEGY_REGISTRY

from lightning_mgwfbp import MGWFBPStrategy, strategy


@pytest.mark.parametrize("name", strategy._NAMES)
def test_a_name_is_refused_with_the_way_out(name: str) -> None:
    """Fabric calls it an invalid name."""
    words = rf"`Fabric\(strategy='{name}'\)` cannot work: .*Trainer.*lightning_mgwfbp.MergedOptim"
    with pytest.raises(ValueError, match=words):
        Fabric(strategy=name, accelerator="cpu", devices=2)


def test_an_object_is_refused_with_the_way_out() -> None:
    """The error shows an object's address, and nothing of what to do."""
    with pytest.raises(ValueError, match=r"MGWFBPStrategy, for Trainer.*lightning_mgwfbp.MergedO"):
        Fabric(strategy=MGWFBPStrategy(), accelerator="cpu", devices=2)  # type: ignore[arg-type]


def test_registering_twice_is_harmless() -> None:
    """A module that is loaded again fails, or Fabric's own names are others."""
    before = STRATEGY_REGISTRY.available_strategies()
    importlib.reload(strategy)
    assert STRATEGY_REGISTRY.available_strategies() == before
    assert set(strategy._NAMES) < set(before)
