"""`JoinedRanks`: what is open between the ranks of a strategy, from its setup to its teardown."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta
from typing import Literal, get_args

import lightning.pytorch as pl
from lightning.fabric.plugins.collectives.torch_collective import default_pg_timeout

from lightning_mgwfbp.engine.options import require_choice
from lightning_mgwfbp.exchange.broadcast import broadcast_tensors
from lightning_mgwfbp.exchange.horovod_transport import HorovodTransport
from lightning_mgwfbp.exchange.torch_transport import TorchTransport
from lightning_mgwfbp.exchange.transport import Transport
from lightning_mgwfbp.module_state import (
    BufferRefresher,
    exchanged_buffers,
    exchanged_parameters,
)
from lightning_mgwfbp.uneven_inputs import OnUneven, UnevenInputs

Carrier = Literal["auto", "torch", "horovod"]


@dataclass(frozen=True)
class JoinOptions:
    """How a strategy joins its ranks, by the names of `MGWFBPStrategy`'s arguments.

    Raises:
        ValueError: naming the argument, what was got, and the choices.
    """

    transport: Carrier
    timeout: timedelta | None
    init_sync: bool
    broadcast_buffers: bool
    uneven_inputs: OnUneven

    def __post_init__(self) -> None:
        for name, choices in (("transport", Carrier), ("uneven_inputs", OnUneven)):
            argument = f"MGWFBPStrategy({name}=...)"
            require_choice(argument, getattr(self, name), get_args(choices))

    @property
    def limit(self) -> timedelta:
        """How long a collective may take."""
        return default_pg_timeout if self.timeout is None else self.timeout

    @property
    def exchanges_buffers(self) -> bool:
        """Whether all ranks are ever given one's buffers."""
        return self.init_sync or self.broadcast_buffers

    def facts(self) -> dict[str, str]:
        """The options as the ranks compare them."""
        names = ("broadcast_buffers", "init_sync", "uneven_inputs", "transport")
        return {name: repr(getattr(self, name)) for name in names}


class JoinedRanks:
    """A transport, and what goes over it beside gradients. Collective to make.

    Where it is asked for, all ranks have rank 0's parameters and buffers then.

    Args:
        module: the same on all ranks but for its values.
        options: likewise.

    Attributes:
        transport: carries gradients.
        inputs: knows which ranks have batches.
        buffers: refreshes them, if anybody does.
    """

    def __init__(self, module: pl.LightningModule, options: JoinOptions) -> None:
        self.transport = _opened(options)
        self.inputs = UnevenInputs(
            module.trainer, self.transport, options.uneven_inputs, options.timeout
        )
        self.buffers: BufferRefresher | None = None
        if options.init_sync:
            parameters = [p for _, p in exchanged_parameters(module)]
            broadcast_tensors(parameters + exchanged_buffers(module), 0, self.transport)
        if options.broadcast_buffers:
            self.buffers = BufferRefresher(module, self.transport)

    def close(self) -> None:
        """Give back what was opened."""
        try:
            self.inputs.close()
        finally:
            self.transport.close()


def _opened(options: JoinOptions) -> Transport:
    if options.transport != "horovod":
        return TorchTransport(timeout=options.timeout)
    return HorovodTransport.over(TorchTransport.world(), options.limit)
