"""A failure here is a density other than the user's for an epoch or step."""

from typing import Any

import pytest

from lightning_mgwfbp.exchange.compressors import Compressor, RandomK, TopK
from lightning_mgwfbp.exchange.compressors.schedule import checked_density

WARM_UP = (0.25, 0.0625, 0.015625, 0.004)
compressors = pytest.mark.parametrize("compressor", [TopK, RandomK])


def halving(at: int) -> float:
    return 0.5**at


class Halving:
    def __call__(self, at: int) -> float:
        return 0.5**at

    def at(self, at: int) -> float:
        return 0.5**at


@compressors
@pytest.mark.parametrize("unit", ["epoch", "step"])
def test_a_list_holds_one_density_for_each(compressor: type[Any], unit: str) -> None:
    """The wrong entry, or what holds after the last."""
    chosen = compressor(density=0.001, density_schedule=list(WARM_UP), schedule_unit=unit)
    densities = [
        chosen.density_at(**{"epoch": 99, "step": 99, unit: at}) for at in (0, 1, 2, 3, 4, 1000)
    ]
    assert densities == [*WARM_UP, 0.001, 0.001]


@compressors
@pytest.mark.parametrize("function", [halving, Halving(), Halving().at], ids=["f", "object", "m"])
def test_a_function_is_asked_each_time(compressor: type[Any], function: Any) -> None:
    """The function is not asked, or not for the epoch or step that it is."""
    by_epoch = compressor(density=0.5, density_schedule=function)
    by_step = compressor(density=0.5, density_schedule=function, schedule_unit="step")
    assert by_epoch.density_at(epoch=2, step=5) == 0.25
    assert by_step.density_at(epoch=2, step=5) == 1 / 32


@compressors
@pytest.mark.parametrize("answer", [0, -0.1, 1.5, float("nan"), True, None, "0.1"])
def test_what_a_function_returns_is_checked(compressor: type[Any], answer: Any) -> None:
    """Nonsense travels on into message sizes, where nobody knows where it came from."""
    chosen = compressor(density=0.5, density_schedule=lambda _: answer)
    expected = rf"`{compressor.__name__}\(density_schedule=\.\.\.\)` at 3 must be in \(0, 1\], got"
    with pytest.raises(ValueError, match=expected):
        chosen.density_at(epoch=3, step=0)


@compressors
def test_without_a_schedule_the_density_holds(compressor: type[Any]) -> None:
    """A constant density does not stay what it is."""
    assert compressor(density=0.3).density_at(epoch=7, step=700) == 0.3


@compressors
def test_schedules_are_values(compressor: type[Any]) -> None:
    """Ranks compare options by their text: an address in it, or a list beside a tuple, differs."""

    def with_schedule(schedule: Any) -> Compressor:
        chosen: Compressor = compressor(density=0.1, density_schedule=schedule)
        return chosen

    assert with_schedule([1, 0.5]) == with_schedule((1.0, 0.5))
    assert hash(with_schedule([1, 0.5])) == hash(with_schedule((1.0, 0.5)))
    assert with_schedule(halving) == with_schedule(halving)
    assert hash(with_schedule(halving)) == hash(with_schedule(halving))
    assert f"density_schedule={__name__}.halving" in repr(with_schedule(halving))
    assert f"density_schedule={__name__}.Halving," in repr(with_schedule(Halving()))
    assert f"density_schedule={__name__}.Halving.at" in repr(with_schedule(Halving().at))
    for function in (halving, Halving(), Halving().at, lambda at: 0.5):
        assert "0x" not in repr(with_schedule(function))


@compressors
@pytest.mark.parametrize("schedule", [[], (), 0.1, {0: 0.1}, {0.1}])
def test_what_is_no_schedule(compressor: type[Any], schedule: Any) -> None:
    """A typing error fails far away, in the epoch that first needs the entry."""
    expected = rf"`{compressor.__name__}\(density_schedule=\.\.\.\)` must be one density or more"
    with pytest.raises(ValueError, match=expected):
        compressor(density=0.1, density_schedule=schedule)


@compressors
def test_a_function_by_its_path(compressor: type[Any]) -> None:
    """A YAML file cannot hold a function, or a wrong path fails in the first step."""
    by_path = compressor(density=0.5, density_schedule=f"{__name__}.halving")
    assert by_path == compressor(density=0.5, density_schedule=halving)
    for path in ("0.1", "halving", f"{__name__}.nothing", "nothing.at_all", "math.pi"):
        with pytest.raises(ValueError, match=rf"density_schedule=\.\.\.\)` .*{path!r}"):
            compressor(density=0.5, density_schedule=path)


@compressors
@pytest.mark.parametrize("entry", [0, -0.1, 1.5, float("nan"), True, None, "0.1"])
def test_every_entry_is_checked(compressor: type[Any], entry: Any) -> None:
    """The same for one entry."""
    expected = rf"`{compressor.__name__}\(density_schedule=\.\.\.\)` entry 1 must be in \(0, 1\]"
    with pytest.raises(ValueError, match=expected):
        compressor(density=0.1, density_schedule=[0.5, entry])


@compressors
def test_units(compressor: type[Any]) -> None:
    """A unit that does not exist, or one that nothing is counted in, is taken without a word."""
    with pytest.raises(ValueError, match=r"\(schedule_unit=\.\.\.\)` must be 'epoch' or 'step'"):
        compressor(density=0.1, density_schedule=[0.5], schedule_unit="batch")
    with pytest.warns(UserWarning, match="no effect without `density_schedule`") as warned:
        compressor(density=0.1, schedule_unit="step")
    assert warned[0].filename == __file__


@pytest.mark.parametrize("density", [0, -1, 1.0001, float("nan"), float("inf"), True, "all", None])
def test_a_density_is_a_fraction(density: object) -> None:
    """What is no density is taken for one."""
    with pytest.raises(ValueError, match=r"^here must be in \(0, 1\], got "):
        checked_density("here", density)
    assert checked_density("here", 1) == 1.0
