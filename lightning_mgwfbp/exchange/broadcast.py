"""Give every rank one rank's tensors or optimizer state, bit for bit.

Tensors travel as bytes, many in one message. On a transport that can only sum, `push_pull=True`
has the other ranks contribute zeros (BytePS's broadcast): sums of bytes with zeros are exact, for
integers, for NaN and for minus zero alike.
"""

from __future__ import annotations

import pickle
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.utils import _pytree as pytree

from lightning_mgwfbp.exchange.torch_transport import TorchTransport
from lightning_mgwfbp.exchange.transport import Transport

_MESSAGE_NBYTES = 32 * 2**20


def broadcast_tensors(
    tensors: Iterable[Tensor], root: int, transport: Transport, *, push_pull: bool = False
) -> None:
    """Overwrite `tensors`, of the same shapes and dtypes on all ranks, with rank `root`'s."""
    # detached: in-place writes to a Parameter itself would need no_grad and could lose its hooks
    for message in _messages(stored_once(t.detach()) for t in tensors if t.numel()):
        device = message[0].device
        if transport.rank == root or not push_pull:
            data = torch.cat([_as_bytes(t) for t in message])
        else:
            data = torch.zeros(sum(t.nbytes for t in message), dtype=torch.uint8, device=device)
        if push_pull:
            transport.all_reduce(data, key="push_pull").wait()
        else:
            transport.broadcast(data, root, key="broadcast").wait()
        if transport.rank != root:
            for tensor, part in zip(message, data.split([t.nbytes for t in message]), strict=True):
                tensor.copy_(_from_bytes(part, tensor))


def stored_once(tensor: Tensor) -> Tensor:
    """View each element of an expanded tensor's memory once; dimensions of stride 0 are gone."""
    for dim in reversed(range(tensor.dim())):
        if tensor.stride(dim) == 0 and tensor.shape[dim]:
            tensor = tensor.select(dim, 0)
    return tensor


def broadcast_parameters(
    parameters: Mapping[str, Any] | Iterable[Tensor] | Iterable[tuple[str, Tensor]],
    root_rank: int = 0,
    *,
    transport: Transport | None = None,
    push_pull: bool = False,
) -> None:
    """Overwrite parameters and buffers on all ranks with rank `root_rank`'s.

    Args:
        parameters: `module.state_dict()`, `module.parameters()` or `module.named_parameters()`;
            values that are not tensors are left alone.
        root_rank: whose values win.
        transport: carries the messages; by default torch.distributed over all ranks.
        push_pull: use only sums.
    """
    transport = TorchTransport.world() if transport is None else transport
    if isinstance(parameters, Mapping):
        values = list(parameters.values())
    else:
        values = [p[1] if isinstance(p, tuple) else p for p in parameters]
    tensors = [v for v in values if isinstance(v, Tensor)]
    broadcast_tensors(tensors, root_rank, transport, push_pull=push_pull)


def broadcast_optimizer_state(
    optimizer: Optimizer,
    root_rank: int = 0,
    *,
    transport: Transport | None = None,
    push_pull: bool = False,
) -> None:
    """Give every rank rank `root_rank`'s optimizer state and options.

    Any optimizer: what `state_dict()` holds is sent, tensors as tensors (the root's dtypes are
    kept), all else pickled: scalars, nested lists (LBFGS), an empty state. The other arguments
    are those of `broadcast_parameters`.
    """
    transport = TorchTransport.world() if transport is None else transport
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    device = parameters[0].device if parameters else torch.device("cpu")
    leaves, structure = pytree.tree_flatten(optimizer.state_dict())
    # what lies elsewhere (step counters on the CPU) is small, and not for the device's transport
    described = [
        _Described(v) if isinstance(v, Tensor) and v.device == device else v for v in leaves
    ]
    described, structure = _broadcast_pickled(
        (described, structure), root_rank, transport, push_pull
    )
    if transport.rank != root_rank:
        leaves = [v.empty(device) if isinstance(v, _Described) else v for v in described]
    moved = [v for v, d in zip(leaves, described, strict=True) if isinstance(d, _Described)]
    broadcast_tensors(moved, root_rank, transport, push_pull=push_pull)
    if transport.rank != root_rank:
        _load_exactly(optimizer, pytree.tree_unflatten(leaves, structure))


class _Described:
    """A tensor without its numbers."""

    def __init__(self, tensor: Tensor) -> None:
        self.shape = tensor.shape
        self.dtype = tensor.dtype

    def empty(self, device: torch.device) -> Tensor:
        return torch.empty(self.shape, dtype=self.dtype, device=device)


def _load_exactly(optimizer: Optimizer, state_dict: dict[str, Any]) -> None:
    optimizer.load_state_dict(state_dict)
    # load_state_dict casts to the parameter's dtype what the root may keep in another one
    parameters = [p for g in optimizer.param_groups for p in g["params"]]
    indices = [i for g in state_dict["param_groups"] for i in g["params"]]
    for parameter, index in zip(parameters, indices, strict=True):
        if index in state_dict["state"]:
            optimizer.state[parameter] = state_dict["state"][index]


def _broadcast_pickled(value: Any, root: int, transport: Transport, push_pull: bool) -> Any:
    if not push_pull:
        return transport.broadcast_object(value, root, key="broadcast_object")
    data = torch.frombuffer(bytearray(pickle.dumps(value)), dtype=torch.uint8)
    size = torch.tensor([data.numel()])
    broadcast_tensors([size], root, transport, push_pull=True)
    if transport.rank != root:
        data = torch.empty(int(size), dtype=torch.uint8)
    broadcast_tensors([data], root, transport, push_pull=True)
    return pickle.loads(data.numpy().tobytes())


def _messages(tensors: Iterable[Tensor]) -> Iterator[list[Tensor]]:
    """Runs of tensors on one device, a new one once `_MESSAGE_NBYTES` are reached."""
    message: list[Tensor] = []
    nbytes = 0
    for tensor in tensors:
        if message and (nbytes >= _MESSAGE_NBYTES or message[0].device != tensor.device):
            yield message
            message, nbytes = [], 0
        message.append(tensor)
        nbytes += tensor.nbytes
    if message:
        yield message


def _as_bytes(tensor: Tensor) -> Tensor:
    real = torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor
    return real.resolve_neg().reshape(-1).contiguous().view(torch.uint8)


def _from_bytes(data: Tensor, like: Tensor) -> Tensor:
    # a copy of its own: a slice of a message may start where the wider dtype must not
    dtype = like.dtype.to_real() if like.is_complex() else like.dtype
    real = data.clone().view(dtype)
    if like.is_complex():
        return torch.view_as_complex(real.view(*like.shape, 2))
    return real.view(like.shape)
