"""Which gradients travel together: contiguous merge groups that partition the parameters.

The planners write this record, the engine and the simulator read it; it has no other behaviour.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

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
    shown,
)

_OPTIONAL = ("densities", "pieces", "gather_order", "compressor")  # left out of files where empty


@dataclass(frozen=True)
class MergePlan(Saved):
    """Merge groups as `[start, stop)` index pairs into `names`, both in backward order.

    ValueError if the groups do not partition the names: each one starts where the one before
    stopped, none is empty, and the last stops at the last name; if the densities are not one per
    group, each None or in (0, 1]; or if only one of pieces and gather_order is there, pieces are
    not at least one for each group, or gather_order has not as many of each group.
    """

    names: tuple[str, ...]
    groups: tuple[tuple[int, int], ...]
    planner: str = ""
    densities: tuple[float | None, ...] = ()
    """Per group, if any: the fraction of its compressible elements that travels.

    1 is all of them, whole, by all-reduce; None is as the compressor says.
    """
    pieces: tuple[int, ...] = ()
    """Per group, where the halves of its all-reduce go by themselves.

    How many messages each half is cut into, at least one.
    """
    gather_order: tuple[int, ...] = ()
    """The second halves of all pieces in their order, the same on all ranks, each by its group.

    A group is in it once for each of its pieces, which follow each other. There if and only if
    there are pieces.
    """
    compressor: str = field(default="", compare=False)
    """The kind that it was made for, in words: another sends other bytes. Empty if not known."""

    def __post_init__(self) -> None:
        require_text("planner", self.planner)
        require_text("compressor", self.compressor)
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
        self._check_halves()

    def _check_densities(self) -> None:
        self._check_one_per_group("densities", self.densities)
        for index, density in enumerate(self.densities):
            if density is not None:
                require_density(f"densities[{index}]", density)

    def _check_halves(self) -> None:
        self._check_one_per_group("pieces", self.pieces)
        for index, count in enumerate(self.pieces):
            require_count(f"pieces[{index}]", count, least=1)
        require_list("gather_order", self.gather_order)
        for index, group in enumerate(self.gather_order):
            require_count(f"gather_order[{index}]", group)
        if bool(self.pieces) != bool(self.gather_order):
            lacking = "gather_order" if self.pieces else "pieces"
            raise ValueError(f"{lacking} must be given too: pieces and gather_order go together")
        gathered, due = Counter(self.gather_order), Counter(dict(enumerate(self.pieces)))
        for group in sorted(gathered | due):
            if gathered[group] != due[group]:
                raise ValueError(
                    f"gather_order must name group {group} once for each of its {due[group]}"
                    f" pieces, got it {gathered[group]} times"
                )

    def _check_one_per_group(self, name: str, values: Sequence[object]) -> None:
        require_list(name, values)
        if values and len(values) != len(self.groups):
            raise ValueError(
                f"{name} must be one for each of the {len(self.groups)} groups, got {len(values)}"
            )

    @property
    def density_of_groups(self) -> tuple[float | None, ...]:
        """One for each group, also where the plan chooses none."""
        return self.densities or (None,) * len(self.groups)

    def check_names(self, names: Sequence[str]) -> None:
        """ValueError naming the first parameter that only one of the plan and `names` has."""
        require_same_parameters("merge plan", self.names, names)

    def to_json(self) -> str:
        optional = {key: getattr(self, key) for key in _OPTIONAL if getattr(self, key)}
        return dump(planner=self.planner, names=self.names, groups=self.groups, **optional)

    @classmethod
    def from_json(cls, text: str, source: str) -> "MergePlan":
        with located(source):
            fields = parse(text, ("planner", "names", "groups"), _OPTIONAL)
            planner, compressor = fields.pop("planner"), fields.pop("compressor", "")
            for name, value in fields.items():
                require_list(name, value)
            groups = tuple(_pair(index, pair) for index, pair in enumerate(fields.pop("groups")))
            lists = {name: tuple(value) for name, value in fields.items()}
            return cls(planner=planner, groups=groups, compressor=compressor, **lists)


def _pair(index: int, pair: object) -> tuple[int, int]:
    name = f"groups[{index}]"
    if not isinstance(pair, list) or len(pair) != 2:
        raise ValueError(f"{name} must be a [start, stop] pair, got {shown(pair)}")
    for bound in pair:
        require_count(name, bound)
    return pair[0], pair[1]
