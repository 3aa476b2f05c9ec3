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
    require_distinct,
    require_list,
    require_same_parameters,
    require_text,
)


@dataclass(frozen=True)
class MergePlan(Saved):
    """Merge groups as `[start, stop)` index pairs into `names`, both in backward order.

    ValueError if the groups do not partition the names: each one starts where the one before
    stopped, none is empty, and the last stops at the last name.
    """

    names: tuple[str, ...]
    groups: tuple[tuple[int, int], ...]
    planner: str = ""

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

    def check_names(self, names: Sequence[str]) -> None:
        """ValueError naming the first parameter that only one of the plan and `names` has."""
        require_same_parameters("merge plan", self.names, names)

    def to_json(self) -> str:
        return dump(planner=self.planner, names=self.names, groups=self.groups)

    @classmethod
    def from_json(cls, text: str, source: str) -> "MergePlan":
        with located(source):
            fields = parse(text, ("planner", "names", "groups"))
            require_list("groups", fields["groups"])
            require_list("names", fields["names"])
            groups = tuple(_pair(index, pair) for index, pair in enumerate(fields["groups"]))
            return cls(tuple(fields["names"]), groups, fields["planner"])


def _pair(index: int, pair: object) -> tuple[int, int]:
    name = f"groups[{index}]"
    if not isinstance(pair, list) or len(pair) != 2:
        raise ValueError(f"{name} must be a [start, stop] pair, got {pair!r:.60}")
    for bound in pair:
        require_count(name, bound)
    return pair[0], pair[1]
