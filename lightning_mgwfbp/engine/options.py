"""What a user may choose about the exchange, checked once; shared by strategy and wrapper."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Literal, TypeGuard, TypeVar, get_args

from torch.optim import SGD, Optimizer

from lightning_mgwfbp.engine.agreement import facts_of
from lightning_mgwfbp.exchange.compressors import Compressor
from lightning_mgwfbp.exchange.methods import ExchangeMethod, resolve_compressor
from lightning_mgwfbp.exchange.transport import Transport
from lightning_mgwfbp.plan import AlphaBeta, MergePlan, ModelProfile, Planner, resolve_planner

Schedule = Literal["backward", "cross_iteration"]
Record = TypeVar("Record", AlphaBeta, ModelProfile, MergePlan)


@dataclass(frozen=True)
class Settings:
    """The options with names resolved and files read."""

    planner: Planner | MergePlan
    compressor: ExchangeMethod | None
    warmup_steps: int
    replan_every_n_steps: int | None
    detect_divergence_every_n_steps: int | None
    profile: ModelProfile | None
    link: AlphaBeta | None
    static_graph: bool
    schedule: Schedule


@dataclass(frozen=True)
class Options:
    """The arguments that `MGWFBPStrategy` and `MergedOptimizer` have in common, as given.

    Args:
        planner: a name, a Planner, a saved plan, or the path of one, ending in .json.
        compressor: a name, a Compressor, PowerSGD, DDPCommHook or None.
        warmup_steps: optimizer steps to profile.
        replan_every_n_steps: profile and plan anew after so many steps, or None.
        detect_divergence_every_n_steps: compare all weights of the ranks after so many steps; None:
            a slice of them at times, see `engine.divergence.DEFAULT_CHECKS`.
        profile, link: a record that was measured before, or its path.
        static_graph: see `Reducer`.
        schedule: what communication hides behind: "backward" alone, or "cross_iteration": the next
            forward too; "auto": the latter where nothing stands against it.

    Raises:
        ValueError: naming the argument, what was got, and the choices.
    """

    planner: str | Planner | MergePlan = "auto"
    compressor: str | ExchangeMethod | None = None
    warmup_steps: int = 5
    replan_every_n_steps: int | None = None
    detect_divergence_every_n_steps: int | None = None
    profile: ModelProfile | str | None = None
    link: AlphaBeta | str | None = None
    static_graph: bool = False
    schedule: Schedule | Literal["auto"] = "backward"

    def __post_init__(self) -> None:
        resolve_compressor(self.compressor)
        choices = (*get_args(Schedule), "auto")
        require_choice("schedule=...", self.schedule, choices)
        _require_positive("warmup_steps", self.warmup_steps)
        if not isinstance(self.static_graph, bool):
            raise ValueError(
                f"`static_graph=...` must be True or False, got {self.static_graph!r}."
            )
        for name, kind in (("profile", ModelProfile), ("link", AlphaBeta)):
            given = getattr(self, name)
            if not isinstance(given, kind | str | None):
                raise ValueError(
                    f"`{name}=...` must be a {kind.__name__} or the path of one, got {given!r}."
                )
        is_saved = isinstance(self.planner, MergePlan) or _is_path(self.planner)
        if not is_saved:
            resolve_planner(self.planner)  # type: ignore[arg-type]
        if self.detect_divergence_every_n_steps is not None:
            every_n_steps = self.detect_divergence_every_n_steps
            _require_positive("detect_divergence_every_n_steps", every_n_steps)
        if self.replan_every_n_steps is not None:
            _require_positive("replan_every_n_steps", self.replan_every_n_steps)
            if is_saved or self.profile is not None:
                raise ValueError(
                    "`replan_every_n_steps=...` measures anew, which a saved `profile=...` or a"
                    " saved plan as `planner=...` is there to spare: leave one of them out."
                )

    def facts(self) -> dict[str, str]:
        """The options as the ranks compare them."""
        options = ((f.name, getattr(self, f.name)) for f in fields(self))
        return {name: text for each in options for name, text in facts_of(*each)}

    def settle(self, transport: Transport) -> Settings:
        """Resolve names and read files; the schedule is one by now. Collective.

        Raises:
            ValueError: a file cannot be read or is not what it should be; on every rank.
        """
        planner, schedule = self.planner, self.schedule
        assert schedule != "auto"
        if _is_path(planner):
            saved = _read(planner, MergePlan, "planner", transport)
            assert saved is not None
            planner = saved
        return Settings(
            planner=planner if isinstance(planner, MergePlan) else resolve_planner(planner),
            compressor=resolve_compressor(self.compressor),
            warmup_steps=self.warmup_steps,
            replan_every_n_steps=self.replan_every_n_steps,
            detect_divergence_every_n_steps=self.detect_divergence_every_n_steps,
            profile=_read(self.profile, ModelProfile, "profile", transport),
            link=_read(self.link, AlphaBeta, "link", transport),
            static_graph=self.static_graph,
            schedule=schedule,
        )


def require_no_momentum(method: ExchangeMethod | None, optimizer: Optimizer) -> None:
    """Refuse momentum correction beside an optimizer that has a momentum, which would count twice.

    Raises:
        ValueError: naming both.
    """
    if not isinstance(method, Compressor) or not method.momentum_correction:
        return
    momentum = method.momentum_correction
    if not isinstance(optimizer, SGD):
        got, why = type(optimizer).__name__, "what it replaces is the momentum of SGD"
    else:
        own = max(param_group["momentum"] for param_group in optimizer.param_groups)
        if own == 0:
            return
        got, why = f"SGD(momentum={own})", "it would count twice"
    raise ValueError(
        f"`{type(method).__name__}(momentum_correction={momentum})` needs"
        f" torch.optim.SGD(momentum=0), got {got}: {why}. Give that, or leave"
        " momentum_correction out."
    )


def require_choice(argument: str, value: object, choices: Sequence[str]) -> None:
    """Refuse what is none of `choices`.

    Raises:
        ValueError: naming the argument, as the user typed it, what was got, and the choices.
    """
    if value not in choices:
        raise ValueError(f"`{argument}` must be one of {', '.join(choices)}, got {value!r}.")


def _require_positive(argument: str, steps: object) -> None:
    if isinstance(steps, bool) or not isinstance(steps, int) or steps < 1:
        raise ValueError(f"`{argument}=...` must be a whole number of at least 1, got {steps!r}.")


def _is_path(planner: object) -> TypeGuard[str]:
    return isinstance(planner, str) and planner.endswith(".json")


def _read(
    given: Record | str | None, kind: type[Record], argument: str, transport: Transport
) -> Record | None:
    """Rank 0 reads the file; its content, or its error, is every rank's."""
    if not isinstance(given, str):
        return given
    outcome: Record | ValueError | None = None
    if transport.rank == 0:
        try:
            outcome = kind.load(given)
        except OSError as error:
            outcome = ValueError(
                f"`{argument}={given!r}` cannot be read: {error.strerror}. A training saves one"
                " with `WarmupCallback(save_dir=...)`."
            )
        except ValueError as error:
            outcome = ValueError(f"`{argument}=...`: {error}")
    outcome = transport.broadcast_object(outcome, 0, key=argument)
    if isinstance(outcome, ValueError):
        raise outcome
    return outcome
