"""A failure here is a rank that starts from other parameters or state than rank `root`'s."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from loopback import on_ranks, same_bits
from torch import Tensor, nn

from lightning_mgwfbp.exchange import broadcast
from lightning_mgwfbp.exchange.broadcast import broadcast_parameters, broadcast_tensors
from lightning_mgwfbp.exchange.transport import LoopbackTransport

ways = pytest.mark.parametrize("push_pull", [False, True], ids=["broadcast", "push-pull"])


def everything(seed: int) -> list[Tensor]:
    """Tensors of every kind; their numbers depend on `seed`, their shapes do not."""
    generator = torch.Generator().manual_seed(seed)
    payload = torch.tensor([0x7FC00000 + seed + 1], dtype=torch.int32).view(torch.float32)
    return [
        torch.tensor(float(seed)),
        torch.tensor([True, seed > 0, False]),
        torch.tensor([2**62 + seed, -seed]),
        torch.randn(5, generator=generator).bfloat16(),
        torch.randn(3, generator=generator).half(),
        torch.randn(2, 2, dtype=torch.complex64, generator=generator).conj(),
        torch.randn(3, dtype=torch.complex64, generator=generator).conj().imag,  # lazily negated
        torch.empty(0, 3),
        torch.randn(4, 6, generator=generator)[:, ::2].t(),
        torch.randn(2, 3, 2, 2, generator=generator).to(memory_format=torch.channels_last),
        torch.cat([payload, torch.tensor([-0.0 if seed else 0.0, torch.inf])]),
        torch.full((3,), seed, dtype=torch.uint8),
        torch.tensor(seed, dtype=torch.int16),
        torch.randn(2, 1, 3, generator=generator).expand(2, 4, 3),
        torch.randn(1, generator=generator).expand(3),
        torch.randn(1, dtype=torch.complex64, generator=generator).expand(3),
    ]


def overwrite(transport: LoopbackTransport, root: int, push_pull: bool) -> list[Tensor]:
    tensors = everything(seed=transport.rank)
    broadcast_tensors(tensors, root, transport, push_pull=push_pull)
    return tensors


@ways
@pytest.mark.parametrize("root", [0, 2])
@pytest.mark.parametrize("message_nbytes", [1, 40, 2**20])
def test_every_kind_of_tensor_bit_for_bit(
    push_pull: bool, root: int, message_nbytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A dtype, a layout, a NaN's payload, or where one message ends and the next begins."""
    monkeypatch.setattr(broadcast, "_MESSAGE_NBYTES", message_nbytes)
    for received in on_ranks(overwrite, root, push_pull, world_size=3):
        assert all(map(same_bits, received, everything(seed=root)))


def as_mapping(module: nn.Module) -> Any:
    return {**module.state_dict(), "epoch": 3, "nothing": None}


def as_list(module: nn.Module) -> Any:
    return [*module.parameters(), *module.buffers()]


def as_iterator_of_pairs(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    yield from module.named_parameters()
    yield from module.named_buffers()


def give_module(
    transport: LoopbackTransport, given: Callable[[nn.Module], Any], push_pull: bool
) -> dict[str, Tensor]:
    module = nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2))
    with torch.no_grad():
        for number, tensor in enumerate(module.state_dict().values()):
            tensor.fill_(10 * number + transport.rank)
    broadcast_parameters(given(module), 1, transport=transport, push_pull=push_pull)
    assert all(p.requires_grad and p.is_leaf for p in module.parameters())
    return dict(module.state_dict())


@ways
@pytest.mark.parametrize("given", [as_mapping, as_list, as_iterator_of_pairs])
def test_parameters_and_buffers_in_any_form(
    push_pull: bool, given: Callable[[nn.Module], Any]
) -> None:
    """One of the forms in which parameters may be given, or a Parameter that lost its nature."""
    for state in on_ranks(give_module, given, push_pull):
        for number, tensor in enumerate(state.values()):
            assert (tensor == 10 * number + 1).all()


def with_hooks(transport: LoopbackTransport) -> tuple[float, int]:
    parameter = nn.Parameter(torch.tensor([2.0 + transport.rank]))
    fired: list[int] = []
    parameter.register_hook(lambda gradient: gradient * 10)
    parameter.register_post_accumulate_grad_hook(lambda _: fired.append(1))
    broadcast_parameters([parameter], 0, transport=transport)
    (parameter * parameter).sum().backward()
    assert parameter.grad is not None
    return parameter.grad.item(), len(fired)


def test_hooks_on_a_parameter_survive() -> None:
    """The user's hooks on parameters stop firing after the broadcast."""
    assert on_ranks(with_hooks) == [(40.0, 1), (40.0, 1)]


def test_by_default_all_ranks_of_torch_distributed_take_part() -> None:
    """Without torch.distributed the message must say what to initialise."""
    with pytest.raises(RuntimeError, match="init_process_group"):
        broadcast_parameters(nn.Linear(2, 2).parameters())
