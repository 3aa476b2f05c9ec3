"""A failure here means: bad input is not one clear error on every rank, or leaves processes."""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.strategies import DDPStrategy
from processes import python, run
from ranks import train_ranks
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel
from training import make_strategy, quiet_trainer, toy

from lightning_mgwfbp import AlphaBeta, MergePlan, MGWFBPStrategy, ModelProfile, TopK
from lightning_mgwfbp.ddp_arguments import TABLE
from lightning_mgwfbp.plan import LayerProfile


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"planner": "fastest"}, "fastest"),
        ({"planner": 7}, "planner"),
        ({"compressor": "fp4"}, "fp4"),
        ({"compressor": 0.01}, "compressor"),
        ({"compressor": TopK}, "compressor"),
        ({"warmup_steps": 0}, "warmup_steps"),
        ({"warmup_steps": 2.5}, "warmup_steps"),
        ({"replan_every_n_steps": -1}, "replan_every_n_steps"),
        ({"replan_every_n_steps": 9, "profile": "p.json"}, "replan_every_n_steps"),
        ({"profile": 3}, "profile"),
        ({"link": 3}, "link"),
    ],
)
def test_arguments_are_checked_at_once(arguments: dict[str, Any], message: str) -> None:
    """`MGWFBPStrategy(...)` itself raises, naming the argument or the value."""
    with pytest.raises(ValueError, match=message):
        MGWFBPStrategy(**arguments)


@pytest.mark.parametrize("value", [-1e-6, float("nan"), float("inf"), "fast", True])
def test_a_link_has_sensible_numbers(value: Any) -> None:
    """alpha and beta: finite, not negative."""
    with pytest.raises(ValueError, match="alpha"):
        AlphaBeta(alpha=value, beta=1e-9)
    with pytest.raises(ValueError, match="beta"):
        AlphaBeta(alpha=1e-6, beta=value)


@pytest.mark.parametrize("name", sorted(TABLE))
def test_every_argument_of_ddp_is_refused_or_warned_about(name: str) -> None:
    """ddp_arguments.TABLE: at its neutral value silence, at any other a warning or an error."""
    nothing, refused, _ = TABLE[name]
    MGWFBPStrategy(**{name: nothing})
    other = (not nothing) if isinstance(nothing, bool) else 3
    if refused:
        with pytest.raises(ValueError, match=name):
            MGWFBPStrategy(**{name: other})
    else:
        with pytest.warns(UserWarning, match=name):
            MGWFBPStrategy(**{name: other})


def test_the_table_covers_ddps_signatures() -> None:
    """A new argument of DDP or DDPStrategy must get its row."""
    ours = set(inspect.signature(MGWFBPStrategy.__init__).parameters) | {"ddp_comm_hook", *TABLE}
    for theirs in (DDPStrategy, DistributedDataParallel):
        names = set(inspect.signature(theirs.__init__).parameters) - {"self", "kwargs", "module"}
        assert names <= ours


def test_an_unknown_argument_is_named() -> None:
    with pytest.raises(TypeError, match="bucket_size"):
        MGWFBPStrategy(bucket_size=3)


@pytest.mark.horovod
def test_a_backend_beside_horovod_is_warned_about() -> None:
    """Who asks for NCCL believes that it carries gradients."""
    with pytest.warns(UserWarning, match=r"process_group_backend='nccl'.*no effect on gradients"):
        MGWFBPStrategy(transport="horovod", process_group_backend="nccl")
    MGWFBPStrategy(transport="horovod", process_group_backend="gloo")


def test_mps_is_refused() -> None:
    """There are no collectives on MPS."""
    strategy = MGWFBPStrategy(parallel_devices=[torch.device("mps")])
    with pytest.raises(ValueError, match="mps"):
        strategy.setup_environment()


def _write(folder: Path) -> None:
    (folder / "text.json").write_text("not JSON")
    (folder / "link.json").write_text('{"format": 1, "alpha": -1.0, "beta": 0.0}')
    MergePlan(("other.weight",), ((0, 1),)).save(folder / "foreign_plan.json")
    layer = LayerProfile("stem.weight", 128, "float32", 0.1)
    ModelProfile("m", (layer,), forward_seconds=1.0).save(folder / "foreign_profile.json")


def _error(rank: int, strategy_kwargs: dict[str, Any], frozen: bool = False) -> str:
    module, data = toy()
    module.requires_grad_(not frozen)
    strategy = make_strategy("mgwfbp", **strategy_kwargs)
    with pytest.raises(ValueError) as error:  # noqa: PT011 - the caller looks at it
        quiet_trainer(strategy=strategy, max_steps=2).fit(module, data)
    return str(error.value)


@pytest.mark.parametrize(
    ("argument", "file", "messages"),
    [
        ("planner", "text.json", ["`planner=...`", "text.json", "JSON"]),
        ("planner", "missing.json", ["missing.json"]),
        ("planner", "foreign_plan.json", ["`planner=...`", "head.bias"]),
        ("profile", "text.json", ["text.json"]),
        ("profile", "foreign_profile.json", ["`profile=...`", "head.bias"]),
        ("link", "link.json", ["link.json", "alpha"]),
    ],
)
def test_bad_files_are_the_same_error_on_every_rank(
    argument: str, file: str, messages: list[str], tmp_path: Path
) -> None:
    """Malformed, missing or foreign; foreign ones name the first difference."""
    _write(tmp_path)
    first, second = train_ranks(_error, {argument: str(tmp_path / file)})
    assert first == second
    assert all(message in first for message in messages)


def test_a_model_without_trainable_parameters() -> None:
    """Nothing to exchange is an error before training, not a hang in it."""
    first, second = train_ranks(_error, {}, True)
    assert first == second
    assert "trainable" in first


def _by(name: str, momentum: float = 0.9) -> Callable[[list[Tensor]], torch.optim.Optimizer]:
    kwargs = {"momentum": momentum} if name == "SGD" else {}
    return partial(getattr(torch.optim, name), lr=0.1, **kwargs)


def _momentum_error(rank: int, optimizers: list[Any]) -> str:
    module, data = toy()
    module.automatic_optimization = len(optimizers) == 1
    layers = (module.stem, module.head)
    module.configure_optimizers = lambda: [
        make(layer.parameters()) for make, layer in zip(optimizers, layers, strict=False)
    ]
    strategy = make_strategy("mgwfbp", compressor=TopK(0.1, momentum_correction=0.9))
    with pytest.raises(ValueError, match="momentum") as error:
        quiet_trainer(strategy=strategy, max_steps=2).fit(module, data)
    return str(error.value)


@pytest.mark.parametrize(
    ("optimizers", "named"),
    [
        ([_by("SGD")], "got SGD(momentum=0.9): it would count twice"),
        ([_by("Adam")], "got Adam: what it replaces is the momentum of SGD"),
        ([_by("SGD", 0.0), _by("SGD", 0.5)], "got SGD(momentum=0.5): it would count twice"),
        ([_by("SGD", 0.0), _by("AdamW")], "got AdamW: what it replaces is the momentum of SGD"),
    ],
)
def test_momentum_that_would_count_twice(optimizers: list[Any], named: str) -> None:
    """momentum_correction: refused on every rank before training, whichever optimizer it is."""
    first, second = train_ranks(_momentum_error, optimizers)
    assert first == second
    assert "`TopK(momentum_correction=0.9)` needs torch.optim.SGD(momentum=0)" in first
    assert named in first


def _disagreement(rank: int) -> str:
    module, data = toy()
    if rank == 1:
        module.side = torch.nn.Linear(16, 17)
    with pytest.raises(RuntimeError, match="disagree") as error:
        quiet_trainer(strategy="mgwfbp", max_steps=2).fit(module, data)
    return str(error.value)


def test_different_models_are_the_same_error_on_every_rank() -> None:
    """Agreement comes before anything is exchanged."""
    first, second = train_ranks(_disagreement)
    assert first == second
    assert "side.weight" in first


@pytest.mark.slow
def test_an_error_leaves_no_process_behind(tmp_path: Path) -> None:
    """With Lightning's own launcher, which started the other rank."""
    _write(tmp_path)
    options = {"strategy": {"planner": str(tmp_path / "foreign_plan.json")}}
    ended = run(python("fit.py", json.dumps(options)))
    assert ended.code != 0
    assert not ended.orphans
    assert ended.output.count("ValueError: ") == 2
    assert "RESULT" not in ended.output
