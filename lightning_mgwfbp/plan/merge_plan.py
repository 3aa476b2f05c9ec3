"""Which gradients travel together: contiguous merge groups that partition the parameters.

The planners write this record, the engine and the simulator read it; it has no other behaviour.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from lightning_mgwfbp.plan.records import (
    Saved,
    dump,
    located,
    parse,
    require_count,
    require_density,
    require_distinct,
    require_list,
    require_same_parameters,
    require_text,
)


@dataclass(frozen=True)
class MergePlan(Saved):
    """Merge groups as `[start, stop)` index pairs into `names`, both in backward order.

    ValueError if the groups do not partition the names: each one starts where the one before
    stopped, none is empty, and the last stops at the last name; or if the densities are not one
    per group, each None or in (0, 1].
    """

    names: tuple[str, ...]
    groups: tuple[tuple[int, int], ...]
    planner: str = ""
    densities: tuple[float | None, ...] = ()
    """Per group, if any: the fraction of its compressible elements that travels.

    1 is all of them, whole, by all-reduce; None is as the compressor says.
    """

    def __post_init__(self) -> None:
        require_text("planner", self.planner)
        require_list("names", self.names)
        for name in self.names:
            require_text("names", name)
        require_distinct("names", self.names)
        covered = 0
        for start, stop in self.groups:
            if start != covered or stop <= start:
                raise ValueError(
                    f"groups must follow each other without a gap, got [{start}, {stop}) where "
                    f"a group that starts at {covered} was due"
                )
            covered = stop
        if covered != len(self.names):
            raise ValueError(
                f"groups must cover all {len(self.names)} parameters, got {covered} covered"
            )
        self._check_densities()

    def _check_densities(self) -> None:
        require_list("densities", self.densities)
        if self.densities and len(self.densities) != len(self.groups):
            raise ValueError(
                f"densities must be one for each of the {len(self.groups)} groups, "
                f"got {len(self.densities)}"
            )
        for index, density in enumerate(self.densities):
            if density is not None:
                require_density(f"densities[{index}]", density)

    @property
    def density_of_groups(self) -> tuple[float | None, ...]:
        """One for each group, also where the plan chooses none."""
        return self.densities or (None,) * len(self.groups)

    def check_names(self, names: Sequence[str]) -> None:
        """ValueError naming the first parameter that only one of the plan and `names` has."""
        require_same_parameters("merge plan", self.names, names)

    def to_json(self) -> str:
        optional = {"densities": self.densities} if self.densities else {}
        return dump(planner=self.planner, names=self.names, groups=self.groups, **optional)

    @classmethod
    def from_json(cls, text: str, source: str) -> "MergePlan":
        with located(source):
            fields = parse(text, ("planner", "names", "groups"), ("densities",))
            fields.setdefault("densities", [])
            for name in ("names", "groups", "densities"):
                require_list(name, fields[name])
            groups = tuple(_pair(index, pair) for index, pair in enumerate(fields["groups"]))
            densities = tuple(fields["densities"])
            return cls(tuple(fields["names"]), groups, fields["planner"], densities)


def _pair(index: int, pair: object) -> tuple[int, int]:
    name = f"groups[{index}]"
    if not isinstance(pair, list) or len(pair) != 2:
        raise ValueError(f"{name} must be a [start, stop] pair, got {pair!r:.60}")
    for bound in pair:
        require_count(name, bound)
    return pair[0], pair[1]
