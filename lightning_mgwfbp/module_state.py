"""What of a LightningModule takes part in data-parallel training, and the refreshing of buffers."""

from __future__ import annotations

from torch import Tensor, nn

from lightning_mgwfbp.engine.named_buffers import NamedBuffers
from lightning_mgwfbp.exchange.broadcast import broadcast_tensors
from lightning_mgwfbp.exchange.transport import Transport


def exchanged_parameters(module: nn.Module) -> list[tuple[str, nn.Parameter]]:
    """All named parameters but those that the module asks DDP to ignore."""
    ignored = _ignored(module)
    return [(name, p) for name, p in module.named_parameters() if name not in ignored]


def tied_parameters(module: nn.Module) -> dict[str, str]:
    """Further names of parameters that `exchanged_parameters` has under the name given here."""
    names = {id(p): name for name, p in exchanged_parameters(module)}
    every = module.named_parameters(remove_duplicate=False)
    known = ((name, names.get(id(p), name)) for name, p in every)
    return {name: first for name, first in known if name != first}


def named_exchanged_buffers(module: nn.Module) -> list[tuple[str, Tensor]]:
    """All buffers but those that the module asks DDP to ignore."""
    ignored = _ignored(module)
    return [(name, b) for name, b in module.named_buffers() if name not in ignored]


def exchanged_buffers(module: nn.Module) -> list[Tensor]:
    """The same without their names."""
    return [b for _, b in named_exchanged_buffers(module)]


def shared_buffers(module: nn.Module) -> NamedBuffers:
    """The same, to be looked at again and again."""
    return NamedBuffers(module, lambda: _ignored(module))


def _ignored(module: nn.Module) -> set[str]:
    # the attribute in which DistributedDataParallel looks for the same
    return set(getattr(module, "_ddp_params_and_buffers_to_ignore", ()))


class BufferRefresher:
    """Gives all ranks rank 0's buffers before a forward that follows an exchanged one, as DDP does.

    Between the micro-batches of an accumulation window each rank's buffers go their own way, and
    validation begins with the same ones everywhere. Where rank 0 has no forward, all are given
    another's right after it: rank 0's are those that checkpoints have.

    Attributes:
        buffers: those that are refreshed.
    """

    def __init__(self, module: nn.Module, transport: Transport) -> None:
        self.buffers = shared_buffers(module)
        self._transport = transport
        self._stale = True

    def before_forward(self, *, goes_stale: bool) -> None:
        """Refresh where due; collective then.

        Args:
            goes_stale: whether gradients of the coming forward will be exchanged.
        """
        if self._stale:
            self._broadcast(0)
        self._stale = goes_stale

    def after_forward(self, root: int) -> None:
        """Refresh where rank 0 cannot be waited for; collective then.

        Args:
            root: the lowest rank that had a forward.
        """
        if self._stale and root != 0:
            self._broadcast(root)
            self._stale = False

    def _broadcast(self, root: int) -> None:
        broadcast_tensors([b for _, b in self.buffers.look()], root, self._transport)
