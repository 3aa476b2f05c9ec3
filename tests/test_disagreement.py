"""A failure here is a difference between the ranks that spoils training, or ends in a hang."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import pytest
import torch
from horovod_ranks import on_horovod_ranks
from lightning.pytorch.strategies import DDPStrategy
from processes import finish, python, start
from ranks import discard_pool, free_port, run_ranks, train_ranks
from torch import Tensor, nn
from training import Toy, ToyData, make_strategy, quiet_trainer

from lightning_mgwfbp import AlphaBeta, MergedOptimizer, MergePlan, ModelProfile, RandomK, TopK
from lightning_mgwfbp.engine import agreement
from lightning_mgwfbp.exchange.torch_transport import TorchTransport
from lightning_mgwfbp.exchange.transport import Transport
from lightning_mgwfbp.plan import Cost, LayerProfile, Optimal, Planner

pytestmark = pytest.mark.slow


class Net(Toy):
    """With a buffer, and two layers that share a weight."""

    def __init__(self) -> None:
        super().__init__()
        self.twin, self.tied = nn.Linear(16, 16), nn.Linear(16, 16)
        self.tied.weight = self.side.weight
        self.register_buffer("mean", torch.zeros(3))
        self.decay = 0.9
        self.make: Any = torch.optim.SGD
        self.arguments: dict[str, Any] = {"lr": 0.1}
        self.stepped: Any = self.parameters

    def configure_optimizers(self) -> Any:
        optimizer = self.make(self.stepped(), **self.arguments)
        return [optimizer], [torch.optim.lr_scheduler.ExponentialLR(optimizer, self.decay)]


class Other(Net):
    pass


@dataclass
class Given:
    """What one rank is given."""

    module: Net = field(default_factory=Net)
    strategy: dict[str, Any] = field(default_factory=dict)
    trainer: dict[str, Any] = field(default_factory=dict)
    version: str = "1.0"


@dataclass(frozen=True)
class Weighted(RandomK):
    """A user's compressor, whose text does not say all."""

    weights: Tensor | None = field(default=None, repr=False)
    hidden: int = field(default=0, repr=False)


class UsersPlanner(Planner):
    """One that is no dataclass, and says nothing of itself but its address."""

    name = "users"

    def __init__(self, size: int) -> None:
        self.size = size

    def groups(self, profile: ModelProfile, cost: Cost) -> Iterable[tuple[int, int]]:
        return Optimal().groups(profile, cost)


def named_plan(*groups: tuple[int, int]) -> MergePlan:
    names = [n for n, _ in Net().named_parameters()]
    return MergePlan(tuple(names[::-1]), (*groups, (groups[-1][1], len(names))))


def profile(seconds: float) -> ModelProfile:
    layers = [LayerProfile(n, p.numel(), "float32", 1.0) for n, p in Net().named_parameters()]
    layers[2] = LayerProfile(layers[2].name, layers[2].numel, "float32", seconds)
    return ModelProfile("net", tuple(layers), 1.0)


def _buffer(given: Given, name: str, value: Tensor) -> None:
    given.module.register_buffer(name, value)


def _tie_otherwise(given: Given) -> None:
    given.module.tied.weight = given.module.twin.weight


def _frozen(given: Given) -> None:
    given.module.side.bias.requires_grad_(False)


def _swapped(given: Given) -> None:
    given.module.stepped = lambda: [*given.module.parameters()][::-1]


def _fewer(given: Given) -> None:
    given.module.stepped = lambda: [*given.module.parameters()][1:]


def strategy(**arguments: Any) -> Callable[[Given], None]:
    return lambda given: given.strategy.update(arguments)


def trainer(**arguments: Any) -> Callable[[Given], None]:
    return lambda given: given.trainer.update(arguments)


def module(**attributes: Any) -> Callable[[Given], None]:
    def change(given: Given) -> None:
        for name, value in attributes.items():
            setattr(given.module, name, value)

    return change


Change = Callable[[Given], None]
# what all ranks are given, what one of them is given then, and words of the error
CASES: dict[str, tuple[Change, Change, str]] = {}
USUAL: Change = strategy()


def case(name: str, other: Change, said: str, usual: Change = USUAL) -> None:
    CASES[name] = usual, other, said


case("versions", lambda g: setattr(g, "version", "2.0"), "the version of lightning-mgwfbp is 1.0")
case("class", lambda g: setattr(g, "module", Other()), "the LightningModule is Net on")
case("shape", lambda g: setattr(g.module, "stem", nn.Linear(8, 17)), "'stem.weight' is number 0,")
case("dtype", lambda g: g.module.twin.double(), "parameter 'twin.weight'")
case("count", lambda g: setattr(g.module, "more", nn.Linear(1, 1)), "number of parameters is 9")
case("frozen", _frozen, "requires_grad=True on rank 0 and number 3")
case("tied", _tie_otherwise, "'tied.weight' is tied to 'side.weight' on rank 0 and tied to")
case("buffer shape", lambda g: _buffer(g, "mean", torch.zeros(4)), "buffer 'mean' is shape (3,)")
case("buffer dtype", lambda g: _buffer(g, "mean", torch.zeros(3).int()), "buffer 'mean' is shape")
case("buffer name", lambda g: _buffer(g, "more", torch.zeros(3)), "the number of buffers is 1 on")
case("planner", strategy(planner="wfbp"), "planner is 'auto' on rank 0 and 'wfbp'")
case(
    "users planner",
    strategy(planner=UsersPlanner(2)),
    "planner.size is 1 on rank 0 and 2",
    strategy(planner=UsersPlanner(1)),
)
case(
    "plan",
    strategy(planner=named_plan((0, 3))),
    "planner.groups is tuple of length 3 on rank 0 and tuple",
    strategy(planner=named_plan((0, 2), (2, 4))),
)
case("wire dtype", strategy(compressor="bf16"), "compressor is None on rank 0 and 'bf16'")
case(
    "density",
    strategy(compressor=TopK(0.02)),
    "compressor.density is 0.01 on rank 0 and 0.02",
    strategy(compressor=TopK(0.01)),
)
case(
    "hidden field",
    strategy(compressor=Weighted(0.1, hidden=1)),
    "compressor.hidden is 0 on rank 0 and 1",
    strategy(compressor=Weighted(0.1)),
)
case(
    "tensor",
    strategy(compressor=Weighted(0.1, weights=torch.tensor([1.0, -0.0]))),
    "compressor.weights is Tensor of (2,), torch.float32, bits ",
    strategy(compressor=Weighted(0.1, weights=torch.tensor([1.0, 0.0]))),
)
case("profile", strategy(profile=profile(2.0)), "profile is None on rank 0 and ModelProfile")
case(
    "profile entry",
    strategy(profile=profile(2.0)),
    "profile.layers[2].backward_seconds is 1.0 on rank 0 and 2.0",
    strategy(profile=profile(1.0)),
)
case("link", strategy(link=AlphaBeta(1.0, 1.0)), "link is None on rank 0 and AlphaBeta")
case("warm-up", strategy(warmup_steps=7), "warmup_steps is 5 on rank 0 and 7")
case("watch", strategy(detect_divergence_every_n_steps=7), "divergence_every_n_steps is None")
case("schedule", strategy(schedule="cross_iteration"), "schedule is 'backward' on rank 0")
case("static graph", strategy(static_graph=True), "static_graph is False on rank 0 and True")
case("broadcasts", strategy(broadcast_buffers=False), "broadcast_buffers is True on rank 0")
case("optimizer", module(make=torch.optim.Adam), "optimizer 0 is torch.optim.sgd.SGD on rank 0 and")
case("rate", module(arguments={"lr": 0.2}), "param_groups[0]['lr'] is 0.1 on rank 0 and 0.2")
case(
    "option",
    module(arguments={"lr": 0.1, "momentum": 0.5}),
    "optimizer 0's param_groups[0]['momentum'] is 0 on rank 0 and 0.5",
)
case("order", _swapped, "param_groups[0]['params'][0] is 'stem.weight' on rank 0 and 'tied.bias'")
case("fewer stepped", _fewer, "param_groups[0]['params'] is list of length 9 on rank 0")
case("scheduler", module(decay=0.8), "learning-rate scheduler 0's state['gamma'] is 0.9 on rank 0")
case("accumulation", trainer(accumulate_grad_batches=2), "(accumulate_grad_batches=...) is 1")
case("clipping", trainer(gradient_clip_val=0.5), "Trainer(gradient_clip_val=...) is None on rank 0")
case("steps", trainer(max_steps=3), "Trainer(max_steps=...) is 2 on rank 0 and 3")
case("precision", trainer(precision="bf16-mixed"), "Trainer(precision=...) is '32-true' on rank 0")
case("validation", trainer(check_val_every_n_epoch=2), "Trainer(check_val_every_n_epoch=...) is 1")
# these choose what a rank compares with
CARRIERS = {"transport": (USUAL, strategy(transport="horovod"), "transport is 'torch' on rank 0")}
ALONE = ("versions", "shape", "count", "dtype", "frozen", "planner", "plan", "density", "tensor")
ALONE += ("optimizer", "rate", "option", "order", "fewer stepped", "warm-up", "schedule")


def _fit(is_odd: bool, ranks: int, usual: Change, other: Change, carrier: str) -> str:
    """What `fit` says, before any gradient exists."""
    given = Given(strategy={"transport": carrier}, trainer={"max_steps": 2, "devices": ranks})
    usual(given)
    if is_odd:
        other(given)
    chosen = make_strategy("mgwfbp", **given.strategy)
    true_version = agreement.version
    agreement.version = lambda name: given.version  # type: ignore[assignment]
    try:
        quiet_trainer(strategy=chosen, **given.trainer).fit(given.module, ToyData())
    except RuntimeError as error:
        assert all(p.grad is None for p in given.module.parameters())
        return str(error)
    finally:
        agreement.version = true_version
    return ""


def _fit_all(rank: int, ranks: int, carrier: str, cases: list[str]) -> dict[str, str]:
    """What each case leads to, where rank 1 is the odd one."""
    everything = {**CASES, **CARRIERS}
    torch.manual_seed(1)
    return {name: _fit(rank == 1, ranks, *everything[name][:2], carrier) for name in cases}


def assert_same_words(everyone: list[dict[str, str]], odd: int) -> None:
    for name, first in everyone[0].items():
        texts = {said[name] for said in everyone}
        assert texts == {first}, f"{name}: {texts}"
        assert first.startswith("The ranks disagree: "), f"{name}: {first}"
        assert {**CASES, **CARRIERS}[name][2] in first, f"{name}: {first}"
        assert f" on rank {odd}. All ranks must build the same model" in first


def test_every_difference_is_named_on_every_rank() -> None:
    """Over torch.distributed, where the odd rank is neither the first nor the last."""
    said = train_ranks(_fit_all, 3, "torch", list(CASES), world_size=3)
    assert_same_words(said, 1)


@pytest.mark.horovod
def test_over_horovod() -> None:
    """The same over Horovod; and where one rank alone asks for it, which opens nothing."""
    names = ["shape", "buffer name", "plan", "tensor", "rate", "accumulation"]
    assert_same_words(train_ranks(_fit_all, 2, "horovod", names), 1)
    assert_same_words(train_ranks(_fit_all, 2, "torch", ["transport"]), 1)


def _equal(rank: int) -> str:
    given = Given()
    compressor = Weighted(0.1, weights=torch.ones(2))
    given.strategy = {"planner": UsersPlanner(1), "compressor": compressor}
    options = make_strategy("mgwfbp", **given.strategy)
    quiet_trainer(strategy=options, max_steps=1).fit(given.module, ToyData())
    return repr(options._options.facts())


@pytest.mark.filterwarnings("ignore:.*has no effect.*:UserWarning")
def test_equal_ranks_train() -> None:
    """Addresses in the text of a planner, or a tensor's identity, count as differences."""
    first, second = train_ranks(_equal)
    assert first == second


def _merge(transport: Transport, odd: int) -> dict[str, str]:
    """What MergedOptimizer says."""
    said = {}
    for name in ALONE:
        usual, other, _ = CASES[name]
        given = Given()
        usual(given)
        if transport.rank == odd:
            other(given)
        true_version = agreement.version
        agreement.version = lambda _, given=given: given.version  # type: ignore[assignment]
        ((optimizer,), _) = given.module.configure_optimizers()
        options = {"module": given.module, "transport": transport, **given.strategy}
        with pytest.raises(RuntimeError) as error:
            MergedOptimizer(optimizer, given.module.named_parameters(), **options)
        agreement.version = true_version
        said[name] = str(error.value)
    return said


def _merge_over_torch(rank: int, odd: int) -> dict[str, str]:
    transport = TorchTransport()
    try:
        return _merge(transport, odd)
    finally:
        transport.close()


def test_merged_optimizer() -> None:
    """The wrapper alone compares less, or says it otherwise on some rank."""
    assert_same_words(run_ranks(_merge_over_torch, 1, world_size=3), 1)


@pytest.mark.horovod
def test_merged_optimizer_over_horovod() -> None:
    """The same over Horovod."""
    assert_same_words(on_horovod_ranks(_merge, 1), 1)


def _with_ddp(rank: int) -> tuple[str, float]:
    limit = timedelta(seconds=5)
    ours = make_strategy("mgwfbp", timeout=limit)
    chosen = DDPStrategy(timeout=limit) if rank else ours
    began = time.monotonic()
    with pytest.raises(RuntimeError) as error:
        quiet_trainer(strategy=chosen, max_steps=2).fit(Net(), ToyData())
    return str(error.value), time.monotonic() - began


def test_one_rank_under_ddp_ends_within_the_timeout() -> None:
    """Who exchanges gradients otherwise than we do leaves us waiting for ever, or unnoticed."""
    try:
        for said, seconds in train_ranks(_with_ddp):
            assert said
            assert seconds < 30
    finally:
        discard_pool()  # their process groups are of no more use


@pytest.mark.parametrize("hook", ["configure_model", "configure_optimizers"])
def test_an_error_of_one_rank_while_setting_up_ends_the_others(hook: str) -> None:
    """They wait until the timeout, half an hour, for a rank that has gone."""
    shared = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": "2"}
    command = python("raise_early.py", hook)
    ranks = [start(command, LOCAL_RANK=str(i), NODE_RANK="0", **shared) for i in range(2)]
    survivor, raised = (finish(rank, limit_seconds=60.0) for rank in ranks)
    assert f"ValueError: rank 1 raises in {hook}" in raised.output
    assert survivor.code != 0
    assert not survivor.orphans
    assert "exchanging what all ranks must have in common failed" in survivor.output
    assert "read the other ranks' output first" in survivor.output
