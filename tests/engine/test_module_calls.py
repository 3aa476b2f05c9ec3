"""A failure here means: a module cannot be exported or copied while a MergedOptimizer trains it."""

from __future__ import annotations

import copy
import gc
import importlib.util
import io
import pickle
import weakref
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn.modules import module as torch_module

from lightning_mgwfbp import AlphaBeta
from lightning_mgwfbp.engine import cross_iteration
from lightning_mgwfbp.engine.merged_optimizer import MergedOptimizer
from lightning_mgwfbp.exchange.transport import LoopbackTransport

pytestmark = [
    pytest.mark.filterwarnings("ignore:`torch.jit.*:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:.*torch.jit.*deprecated"),
]
X = torch.randn(4, 6, generator=torch.Generator().manual_seed(0))
Network = Callable[[Tensor], Tensor]


class Net(nn.Module):
    """Parameters of its own and of its layers'."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(6))
        self.layers = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3))

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x * self.scale)


def exported(net: nn.Module) -> Network:
    program = torch.export.export(net, (X,))
    saved = io.BytesIO()
    torch.export.save(program, saved)  # which calls nothing: the weights must be whole before
    saved.seek(0)
    return torch.export.load(saved).module()


def onnx(net: nn.Module, dynamo: bool) -> Network:
    from onnx import load_model_from_string  # noqa: PLC0415
    from onnx.reference import ReferenceEvaluator  # noqa: PLC0415

    saved = io.BytesIO()
    torch.onnx.export(net, (X,), saved, dynamo=dynamo)
    model = load_model_from_string(saved.getvalue())
    run, name = ReferenceEvaluator(model).run, model.graph.input[0].name
    return lambda x: torch.from_numpy(run(None, {name: x.numpy()})[0])


WAYS: dict[str, Callable[[nn.Module], Network]] = {
    "trace": lambda net: torch.jit.trace(net, X),
    "script": torch.jit.script,
    "export": exported,
    "make_fx": lambda net: make_fx(net)(X),
    "symbolic_trace": torch.fx.symbolic_trace,
}
ONNX: dict[str, Callable[[nn.Module], Network]] = {
    "onnx": lambda net: onnx(net, dynamo=True),
    "onnx of TorchScript": lambda net: onnx(net, dynamo=False),
}
COPIES: dict[str, Callable[[nn.Module], Network]] = {
    "deepcopy": copy.deepcopy,
    "pickle": lambda net: pickle.loads(pickle.dumps(net)),
}
NO_ONNX = pytest.mark.skipif(
    not (importlib.util.find_spec("onnx") and importlib.util.find_spec("onnxscript")),
    reason="torch.onnx.export needs onnx and onnxscript, which are not installed",
)
BOTH = pytest.mark.parametrize("schedule", ["backward", "cross_iteration"])


@pytest.fixture(autouse=True)
def deferring_in_spite_of_scripts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the process has scripted functions nothing would be pending in a forward."""
    monkeypatch.setattr(cross_iteration, "scripted_functions_exist", lambda: False)


def net_of() -> Net:
    torch.manual_seed(1)
    return Net()


def merged_of(net: Net, schedule: Any) -> MergedOptimizer:
    return MergedOptimizer(
        torch.optim.Adam(net.parameters(), lr=0.05),
        net.named_parameters(),
        transport=LoopbackTransport.solo(),
        planner="wfbp",
        link=AlphaBeta(1e-3, 1e-9),
        warmup_steps=2,
        schedule=schedule,
        module=net,
    )


def step(net: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    optimizer.zero_grad()
    net(X).square().mean().backward()
    optimizer.step()


def both_trained(
    schedule: str, way: Callable[[nn.Module], Network], where: str
) -> Iterator[tuple[Tensor, Tensor, bool]]:
    """Before each step, what the export and a network trained by plain torch compute, and whether
    a step was pending; then the weights of both."""
    net, plain = net_of(), net_of()
    ours, theirs = merged_of(net, schedule), torch.optim.Adam(plain.parameters(), lr=0.05)
    for _ in range(6):
        pending = ours._session.pending
        around: AbstractContextManager[Any] = nullcontext()
        if where == "forward":  # as in a training_step
            around = ours._session.forward()
        with around, torch.no_grad():
            yield way(net)(X), plain(X), pending
        step(net, ours)
        step(plain, theirs)
    ours.close()
    for a, b in zip(net.parameters(), plain.parameters(), strict=True):
        yield a.detach(), b.detach(), False


def check(schedule: str, way: Callable[[nn.Module], Network], where: str) -> None:
    results = list(both_trained(schedule, way, where))
    for a, b, _ in results:
        torch.testing.assert_close(a, b, rtol=0, atol=1e-6 if way in ONNX.values() else 0)
    assert any(pending for *_, pending in results) == (schedule == "cross_iteration")


@pytest.mark.parametrize("where", ["between", "forward"])
@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)
@BOTH
def test_exports(schedule: str, way: Callable[[nn.Module], Network], where: str) -> None:
    """What watches the module is in the way, or a pending step is lost, late, or in the graph."""
    check(schedule, way, where)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # both exporters have much to say about themselves
@NO_ONNX
@pytest.mark.parametrize("where", ["between", "forward"])
@pytest.mark.parametrize("way", ONNX.values(), ids=ONNX)
@BOTH
def test_onnx(schedule: str, way: Callable[[nn.Module], Network], where: str) -> None:
    """The same in both of torch.onnx's ways."""
    check(schedule, way, where)


@pytest.mark.parametrize("way", COPIES.values(), ids=COPIES)
@BOTH
def test_copies(schedule: str, way: Callable[[nn.Module], Network]) -> None:
    """A copy in the middle of a forward has weights of another time."""
    check(schedule, way, "forward")


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
@BOTH
def test_functions_are_not_compiled_in_each_step(schedule: str) -> None:
    """Compiled code is bound to hooks that come and go."""
    net = net_of()
    compiled: list[int] = []  # by number of the step
    steps: list[int] = []

    def backend(graph: torch.fx.GraphModule, _: Any) -> Any:
        compiled.append(len(steps))
        return graph.forward

    teacher = nn.Sequential(nn.Linear(6, 6), nn.Tanh())
    function = torch.compile(lambda x: teacher(x).exp(), backend=backend, fullgraph=True)
    net.register_forward_pre_hook(lambda _, args: function(args[0].detach()))
    optimizer = merged_of(net, schedule)
    for number in range(6):
        step(net, optimizer)
        steps.append(number)
    optimizer.close()
    assert set(compiled) <= {0, 1}


def global_hooks() -> list[dict[int, Any]]:
    return [
        dict(torch_module._global_forward_pre_hooks),
        dict(torch_module._global_forward_hooks),
    ]


@BOTH
def test_global_hooks_only_while_they_are_needed(schedule: str) -> None:
    """Every module of the process pays, or a closed optimizer is told of calls."""
    before = global_hooks()
    net = net_of()
    optimizer = merged_of(net, schedule)
    assert global_hooks() != before  # the warm-up
    for _ in range(5):
        step(net, optimizer)
    assert optimizer._session.pending == (schedule == "cross_iteration")
    optimizer.flush()
    # one hook waits for the next call of the module, and is gone before that calls others
    assert [len(hooks) for hooks in global_hooks()] == [len(before[0]) + 1, len(before[1])]
    seen: list[Any] = []
    watch = net.layers[0].register_forward_pre_hook(lambda *_: seen.append(global_hooks()))
    with torch.no_grad():
        net(X)  # which is not for training
    step(net, optimizer)
    watch.remove()
    assert (seen[0] != before, seen[1]) == (True, before)
    with pytest.raises(RuntimeError, match="size of tensor"):
        net(torch.ones(1, 7))  # completes nothing
    optimizer.close()
    assert global_hooks() == before
    assert not any(m._forward_pre_hooks or m._forward_hooks for m in net.modules())


@BOTH
def test_closed_within_the_warm_up(schedule: str) -> None:
    """Hooks of a warm-up that does not end stay."""
    before = global_hooks()
    net = net_of()
    optimizer = merged_of(net, schedule)
    step(net, optimizer)
    net(X)
    optimizer.close()
    assert global_hooks() == before


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
def test_no_step_is_pending_where_modules_are_compiled() -> None:
    """torch warns of global hooks at each call of a compiled module."""
    before = global_hooks()
    net = net_of()
    net.layers = torch.compile(net.layers, backend="eager")
    optimizer = merged_of(net, "cross_iteration")
    for _ in range(4):
        step(net, optimizer)
        assert global_hooks() == before
    optimizer.close()


def test_one_that_is_never_closed() -> None:
    """It is kept alive, and every module of the process pays for it."""
    before = global_hooks()
    net = net_of()
    optimizer = merged_of(net, "backward")
    for _ in range(5):
        step(net, optimizer)
    assert global_hooks() != before
    gone = weakref.ref(optimizer)
    del net, optimizer
    gc.collect()
    assert gone() is None
    assert global_hooks() == before
