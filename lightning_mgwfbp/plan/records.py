"""What the saved records share: strict JSON, atomic files, and checks whose errors name the field.

A record checks itself when it is made, so a file and a caller are held to the same rules; reading
only adds to the error which file and which entry was at fault.
"""

import json
import math
import os
import re
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from numbers import Integral, Real
from pathlib import Path
from typing import Any, TypeVar

FORMAT = 1
# No clock and no network comes near, and sums and products of such numbers are finite.
MOST = 1e15
MOST_COUNT = 2**53  # of what a float can tell apart
_SURROGATE = re.compile("[\ud800-\udfff]")  # in JSON, but in no text that can be printed
SavedRecord = TypeVar("SavedRecord", bound="Saved")


class Saved(ABC):
    """A record that lives in a JSON file."""

    @abstractmethod
    def to_json(self) -> str:
        """The record as JSON text; `from_json` gives an equal record back."""

    @classmethod
    @abstractmethod
    def from_json(cls: type[SavedRecord], text: str, source: str) -> SavedRecord:
        """Read `text`; a ValueError names `source`, the field and what was got."""

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the file whole or not at all: a reader never sees half of it."""
        target = Path(path)
        aside = target.with_name(f".{target.name}.{os.getpid()}.partial")
        try:
            aside.write_text(self.to_json(), encoding="utf-8")
            os.replace(aside, target)
        finally:
            aside.unlink(missing_ok=True)

    @classmethod
    def load(cls: type[SavedRecord], path: str | os.PathLike[str]) -> SavedRecord:
        """Read the file `path`; OSError where it cannot be read, ValueError where it is wrong."""
        with located(str(path)):
            text = Path(path).read_text(encoding="utf-8")
        return cls.from_json(text, str(path))


@contextmanager
def located(where: str) -> Iterator[None]:
    """Let a ValueError raised inside say that it happened at `where`."""
    try:
        yield
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from None


def dump(**fields: Any) -> str:
    """One JSON object with `format` first."""
    return json.dumps({"format": FORMAT, **fields}, indent=0, allow_nan=False)


def parse(text: str, required: Sequence[str], optional: Sequence[str] = ()) -> dict[str, Any]:
    """The named keys of the JSON object `text`, as in `pick`; further keys are ignored."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"not JSON ({error})") from None
    fields = pick(value, ("format", *required), optional)
    number = fields.pop("format")
    if isinstance(number, bool) or number != FORMAT:
        raise ValueError(f"'format' must be {FORMAT}, got {shown(number)}")
    return fields


def pick(value: Any, required: Sequence[str], optional: Sequence[str] = ()) -> dict[str, Any]:
    """The named keys of a mapping, without those optional ones that it lacks."""
    if not isinstance(value, Mapping):
        raise ValueError(f"must be a mapping of names to values, got {shown(value)}")
    for key in required:
        if key not in value:
            raise ValueError(f"lacks the key {key!r}")
    return {key: value[key] for key in (*required, *optional) if key in value}


def require_text(name: str, value: object) -> None:
    if not isinstance(value, str) or _SURROGATE.search(value):
        raise ValueError(f"{name} must be a string, got {shown(value)}")


def require_list(name: str, value: object) -> None:
    if not isinstance(value, list | tuple):
        raise ValueError(f"{name} must be a list, got {shown(value)}")


def require_count(name: str, value: object, least: int = 0) -> None:
    if not isinstance(value, Integral) or isinstance(value, bool) or value < least:
        raise ValueError(f"{name} must be a whole number, at least {least}, got {shown(value)}")
    if int(value) > MOST_COUNT:
        raise ValueError(f"{name} must be at most {MOST_COUNT:,}, got {shown(value)}")


def require_number(name: str, value: object, unit: str = "seconds") -> None:
    if not is_number(value):
        got = shown(value)
        raise ValueError(f"{name} must be a finite number of {unit}, at least 0, got {got}")
    if value > MOST:  # type: ignore[operator]
        raise ValueError(f"{name} must be at most {MOST:g} {unit}, got {shown(value)}")


def require_density(name: str, value: object) -> None:
    """A density is the fraction of elements that travels."""
    if not is_number(value) or not 0 < float(value) <= 1:  # type: ignore[arg-type]
        raise ValueError(f"{name} must be in (0, 1], got {shown(value)}")


def shown(value: object) -> str:
    """`value` for an error: the beginning of it, however large or nested it is."""
    try:
        return f"{value!r:.60}"
    except (ValueError, RecursionError):  # a whole number of more digits than Python prints
        return f"a {type(value).__name__} too large to print"


def counted(count: int, noun: str) -> str:
    """1 group, 2 groups."""
    return f"{count:,} {noun}" + ("" if count == 1 else "s")


def is_number(value: object) -> bool:
    if not isinstance(value, Real) or isinstance(value, bool):
        return False
    try:
        return 0 <= float(value) < math.inf
    except OverflowError:  # JSON knows no largest integer
        return False


def require_distinct(name: str, values: Sequence[str]) -> None:
    """Parameters are told apart by name, so there is at least one and none comes twice."""
    if not values:
        raise ValueError(f"{name} must name at least one parameter, got none")
    seen: set[str] = set()
    for value in values:
        if value in seen:
            raise ValueError(f"{name} must differ, got {value!r} twice")
        seen.add(value)


def require_same_parameters(what: str, own: Sequence[str], names: Sequence[str]) -> None:
    """`what` lists the parameters `own`; ValueError naming the first that differs from `names`."""
    way_out = f"it was made for another model: leave it out, or give the {what} of this model"
    known, wanted = set(own), set(names)
    for name in names:
        if name not in known:
            raise ValueError(f"the {what} lacks the parameter {name!r}; {way_out}")
    for name in own:
        if name not in wanted:
            raise ValueError(f"the {what} has a foreign parameter {name!r}; {way_out}")
