"""A failure here is a DDP communication hook that does other than under DDP."""

import re
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from jsonargparse import ArgumentParser
from loopback import on_ranks, same_bits
from ranks import run_ranks
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import (
    debugging_hooks,
    default_hooks,
    post_localSGD_hook,
    powerSGD_hook,
    quantization_hooks,
)
from torch.futures import Future

from lightning_mgwfbp.exchange.buckets import Bucket
from lightning_mgwfbp.exchange.comm_hook import CommHookExchanger, DDPCommHook
from lightning_mgwfbp.exchange.torch_transport import TorchTransport
from lightning_mgwfbp.exchange.transport import LoopbackTransport

SHAPES = ((6, 40), (5,), (8, 3, 2, 2), (30, 20))
STEPS = 6


class Weights(nn.Module):
    """Parameters whose gradients are what `forward` is given."""

    def __init__(self) -> None:
        super().__init__()
        self.weights = nn.ParameterList([nn.Parameter(torch.zeros(s)) for s in SHAPES])

    def forward(self, gradients: list[Tensor]) -> Tensor:
        pairs = zip(self.weights, gradients, strict=True)
        return torch.stack([(w * g).sum() for w, g in pairs]).sum()


def gradients(rank: int, step: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(100 * step + rank)
    return [torch.randn(shape, generator=generator) for shape in SHAPES]


def by_ddp(rank: int, hook: Any, state: Any) -> tuple[list[list[Tensor]], list[list[int]]]:
    """Averages of each step, and in which order DDP's one bucket held the parameters."""
    module = Weights()
    number = {p: i for i, p in enumerate(module.weights)}
    orders: list[list[int]] = []

    def watched(state: Any, bucket: dist.GradBucket) -> Future[Tensor]:
        orders.append([number[p] for p in bucket.parameters()])
        return hook(state, bucket)

    ddp = nn.parallel.DistributedDataParallel(module)
    ddp.register_comm_hook(state, watched)
    averages = []
    for step in range(STEPS):
        module.zero_grad()
        ddp(gradients(rank, step)).backward()
        averages.append([p.grad.clone() for p in module.weights])
    return averages, orders


def by_us(
    rank: int, hook: Any, state: Any, orders: list[list[int]], buckets: int = 1
) -> list[list[Tensor]]:
    """The same on buckets of ours, which hold the parameters in the same orders."""
    transport = TorchTransport()
    exchanger = CommHookExchanger(transport, DDPCommHook(hook, state))
    parameters = list(Weights().weights)
    averages = []
    for step, order in enumerate(orders):
        groups = [order[i::buckets] for i in range(buckets)]
        held = [Bucket([parameters[i] for i in g], [str(i) for i in g], len(g)) for g in groups]
        exchanger.adopt(held)
        given = gradients(rank, step)
        exchanges = []
        for number, (bucket, group) in enumerate(zip(held, groups, strict=True)):
            used = [i != 1 or rank == 1 for i in group]
            bucket.pack([given[i] for i in group], used, notice=rank == 1)
            exchanges.append(exchanger.start(bucket, key=f"bucket {number}"))
        result: dict[int, Tensor] = {}
        for exchange, bucket, group in zip(exchanges, held, groups, strict=True):
            exchange.finish()
            assert bucket.used() == [True] * len(group)
            assert bucket.noticed()
            result.update(zip(group, bucket.gradients(), strict=True))
        exchanger.conclude()
        averages.append([result[i] for i in range(len(SHAPES))])
    transport.close()
    return averages


def power_sgd(**options: Any) -> Any:
    given = {"matrix_approximation_rank": 2, "start_powerSGD_iter": 2, **options}
    return powerSGD_hook.PowerSGDState(None, **given)


def local_sgd() -> Any:
    return post_localSGD_hook.PostLocalSGDState(None, dist.new_subgroups(1)[0], 3)


def nothing() -> None:
    return None


def growing(_: Any, bucket: Any) -> Future[Tensor]:
    """Pads the buffer in place, as batched_powerSGD_hook does."""
    buffer = bucket.buffer()
    numel = buffer.numel()
    buffer.resize_(2 * numel)
    buffer[numel:].fill_(torch.nan)
    future = dist.all_reduce(buffer.div_(2), async_op=True).get_future()
    return future.then(lambda done: done.value()[0].resize_(numel))


HOOKS: dict[str, tuple[Any, Callable[[], Any]]] = {
    "allreduce": (default_hooks.allreduce_hook, nothing),
    "fp16": (default_hooks.fp16_compress_hook, nothing),
    "bf16": (default_hooks.bf16_compress_hook, nothing),
    "fp16 around": (default_hooks.fp16_compress_wrapper(default_hooks.allreduce_hook), nothing),
    "bf16 around": (default_hooks.bf16_compress_wrapper(default_hooks.allreduce_hook), nothing),
    "noop": (debugging_hooks.noop_hook, nothing),
    "powerSGD": (powerSGD_hook.powerSGD_hook, power_sgd),
    "powerSGD batched by shape": (
        powerSGD_hook.powerSGD_hook,
        partial(power_sgd, batch_tensors_with_same_shape=True),
    ),
    "powerSGD, cold": (powerSGD_hook.powerSGD_hook, partial(power_sgd, warm_start=False)),
    "fp16 around powerSGD": (
        default_hooks.fp16_compress_wrapper(powerSGD_hook.powerSGD_hook),
        partial(power_sgd, orthogonalization_epsilon=1e-4),
    ),
    "post-local SGD": (post_localSGD_hook.post_localSGD_hook, local_sgd),
    "growing": (growing, nothing),
}


def compared(rank: int, name: str) -> list[bool]:
    hook, make_state = HOOKS[name]
    theirs, orders = by_ddp(rank, hook, make_state())
    ours = by_us(rank, hook, make_state(), orders)
    assert len(orders) == STEPS
    return [
        same_bits(*p) for pair in zip(ours, theirs, strict=True) for p in zip(*pair, strict=True)
    ]


@pytest.mark.parametrize("name", HOOKS)
def test_it_gives_what_it_gives_under_ddp(name: str) -> None:
    """One of torch's own hooks: what it sees of a bucket, or where its result goes."""
    assert all(map(all, run_ranks(compared, name)))


def many_buckets(rank: int) -> list[list[Tensor]]:
    return by_us(rank, powerSGD_hook.powerSGD_hook, power_sgd(), [[3, 2, 1, 0]] * 20, buckets=3)


def test_hooks_of_several_messages_do_not_meet_in_another_order() -> None:
    """PowerSGD over gloo hangs, or sums one bucket's factors with another's."""
    first, second = run_ranks(many_buckets)
    for mine, theirs in zip(first, second, strict=True):
        assert all(map(same_bits, mine, theirs))


def one_bucket(parameter: Tensor, hook: Any) -> tuple[CommHookExchanger, Bucket]:
    exchanger = CommHookExchanger(TorchTransport.world(), DDPCommHook(hook))
    bucket = Bucket([parameter], ["weight"], 1)
    exchanger.adopt([bucket])
    return exchanger, bucket


def listed(_: Any, bucket: Any) -> Any:
    return dist.all_reduce(bucket.buffer().div_(2), async_op=True).get_future()


def a_list(rank: int) -> list[float]:
    exchanger, bucket = one_bucket(torch.empty(2), listed)
    bucket.pack([torch.full((2,), 1.0 + rank)], [True])
    exchanger.start(bucket, key="bucket 0").finish()
    return bucket.data.tolist()


def test_the_future_of_a_work_holds_a_list() -> None:
    """Hooks written for older versions of torch."""
    assert run_ranks(a_list) == [[1.5, 1.5]] * 2


def seen_by(hook_bucket: Any) -> list[Any]:
    shapes = [
        [tuple(t.shape) for t in g] for g in (hook_bucket.gradients(), [hook_bucket.buffer()])
    ]
    return [hook_bucket.index(), hook_bucket.is_last(), len(hook_bucket.parameters()), *shapes]


def look_at_buckets(_: int) -> list[Any]:
    seen: list[Any] = []

    def hook(_: Any, bucket: Any) -> Future[Tensor]:
        seen.append(seen_by(bucket))
        return debugging_hooks.noop_hook(None, bucket)

    exchanger = CommHookExchanger(TorchTransport.world(), DDPCommHook(hook))
    flag_only = torch.empty(0, 4)
    buckets = [
        Bucket([torch.empty(3, 4)], ["a"], 1),
        Bucket([torch.empty(2, 2, dtype=torch.complex64), flag_only.to(torch.complex64)], "bc", 1),
        Bucket([flag_only], ["d"]),
    ]
    exchanger.adopt(buckets)
    for number, bucket in enumerate(buckets):
        bucket.pack([None] * len(bucket.parameters), [False] * len(bucket.parameters))
        exchanger.start(bucket, key=f"bucket {number}").finish()
    return seen


def test_what_a_hook_sees() -> None:
    """A hook that counts steps by `is_last`, where the last bucket carries flags only; complex."""
    expected = [[0, False, 1, [(3, 4)], [(12,)]], [1, True, 1, [(2, 2, 2)], [(8,)]]]
    assert run_ranks(look_at_buckets) == [expected] * 2


def outside_the_plan(rank: int) -> list[float]:
    exchanger, _ = one_bucket(torch.empty(2), debugging_hooks.noop_hook)
    late = Bucket([torch.empty(2)])
    late.pack([torch.full((2,), 1.0 + rank)], [True])
    exchanger.start(late, key="amendment").finish()
    return late.data.tolist()


def test_what_no_plan_foresaw_travels_exactly() -> None:
    """A hook is called with a bucket that has no place among the others."""
    assert run_ranks(outside_the_plan) == [[1.5, 1.5]] * 2


def places(_: int) -> int:
    exchanger, bucket = one_bucket(torch.empty(3), debugging_hooks.noop_hook)
    seen = set()
    for _ in range(4):
        bucket.pack([torch.ones(3)], [True])
        seen.add(bucket.buffer.data_ptr())
        exchanger.start(bucket, key="bucket 0").finish()
        exchanger.conclude()
        bucket.gradients()
    return len(seen)


def test_nothing_holds_the_memory_of_a_bucket() -> None:
    """A future keeps its result, and so each step takes new memory."""
    assert run_ranks(places) == [1, 1]


def raises_at_once(_: Any, bucket: Any) -> Any:
    raise KeyError("no such bucket")


def raises_later(_: Any, bucket: Any) -> Any:
    def fail(_: Any) -> Tensor:
        raise KeyError("too late")

    return debugging_hooks.noop_hook(None, bucket).then(fail)


def gives_no_future(_: Any, bucket: Any) -> Any:
    return bucket.buffer()


def gives_half(_: Any, bucket: Any) -> Any:
    future: Future[Tensor] = Future()
    future.set_result(bucket.buffer()[:2])
    return future


def error_of(_: int, hook: Any) -> str:
    exchanger, bucket = one_bucket(torch.empty(3), hook)
    bucket.pack([torch.ones(3)], [True])
    with pytest.raises(Exception) as caught:  # noqa: PT011
        exchanger.start(bucket, key="bucket 0").finish()
    return f"{caught.type.__name__}: {caught.value}"


@pytest.mark.parametrize(
    ("hook", "message"),
    [
        (raises_at_once, "KeyError: 'no such bucket'"),
        (raises_later, "RuntimeError: .*KeyError: 'too late'"),
        (gives_no_future, r"TypeError: .*gives_no_future\)` must return a .*Future, got Tensor"),
        (
            gives_half,
            r"TypeError: .*gives_half\)` must hold one real tensor of .* 3 .*, got \(2,\)",
        ),
        # these two index what a future holds as NCCL has it, under DDP, too
        (quantization_hooks.quantization_pertensor_hook, "RuntimeError: .*IndexError"),
        (quantization_hooks.quantization_perchannel_hook, "RuntimeError: .*IndexError"),
    ],
)
def test_errors_surface(hook: Any, message: str) -> None:
    """A hook's mistake is lost in a callback, or does not say whose it is."""
    for error in run_ranks(error_of, hook):
        assert re.match(message, error, re.DOTALL)


def gives_an_empty_future(*_: Any) -> Any:
    return Future()


def errors_of_waiting(_: int) -> list[str]:
    transport = TorchTransport(timeout=timedelta(seconds=0.2))
    exchanger = CommHookExchanger(transport, DDPCommHook(gives_an_empty_future))
    buckets = [Bucket([torch.empty(3)], ["weight"], 1) for _ in range(2)]
    exchanger.adopt(buckets)
    for bucket in buckets:
        bucket.pack([torch.ones(3)], [True])
    exchange = exchanger.start(buckets[0], key="bucket 0")
    calls = [exchange.finish, lambda: exchanger.start(buckets[1], key="bucket 1")]
    errors = []
    for call in calls:
        with pytest.raises(RuntimeError) as caught:
            call()
        errors.append(str(caught.value))
    transport.close()
    return errors


def test_a_future_that_is_never_completed() -> None:
    """It is waited for without end: by the exchange itself, or by the next one."""
    for errors in run_ranks(errors_of_waiting):
        for error in errors:
            assert re.match(r"the future of .*empty_future\)` has not been .* within 0.2 s", error)


@pytest.mark.parametrize("hook", [dist.BuiltinCommHookType.ALLREDUCE, None, "allreduce"])
def test_only_python_functions(hook: Any) -> None:
    """DDP's built-in hooks, which are written against its own reducer, fail far away."""
    with pytest.raises(ValueError, match=r"`DDPCommHook\(hook=\.\.\.\)` .*allreduce_hook"):
        DDPCommHook(hook)


def on_loopback(transport: LoopbackTransport) -> None:
    CommHookExchanger(transport, DDPCommHook(debugging_hooks.noop_hook))


def test_only_over_torch_distributed() -> None:
    """Horovod carries the tails while the hook finds no process group."""
    with pytest.raises(ValueError, match=r"needs `transport='torch'`, got LoopbackTransport"):
        on_ranks(on_loopback)


class Hook:
    def __call__(self, state: Any, bucket: Any) -> Any:
        return None

    def method(self, state: Any, bucket: Any) -> Any:
        return None


def test_ranks_read_the_same_text() -> None:
    """An address in it, which differs: ranks believe that their options do."""
    hook = powerSGD_hook.powerSGD_hook
    assert repr(DDPCommHook(hook, power_sgd())) == (
        "DDPCommHook(hook=torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook.powerSGD_hook,"
        " state=PowerSGDState)"
    )
    hooks = [partial(hook, bucket=1), Hook(), Hook().method, lambda state, bucket: None]
    for each in hooks:
        assert " at 0x" not in repr(DDPCommHook(each))


def test_yaml() -> None:
    """LightningCLI cannot build it."""
    parser = ArgumentParser(exit_on_error=False)
    parser.add_argument("--compressor", type=DDPCommHook | None)
    name = "torch.distributed.algorithms.ddp_comm_hooks.default_hooks.fp16_compress_hook"
    chosen = {"class_path": f"{DDPCommHook.__module__}.DDPCommHook", "init_args": {"hook": name}}
    built = parser.instantiate_classes(parser.parse_object({"compressor": chosen}))
    assert built.compressor == DDPCommHook(default_hooks.fp16_compress_hook)
