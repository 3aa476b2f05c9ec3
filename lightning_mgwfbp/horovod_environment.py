"""`HorovodEnvironment`: tells Lightning who is who among processes that horovodrun has launched."""

from __future__ import annotations

import socket

from lightning.fabric.plugins import ClusterEnvironment
from typing_extensions import override

from lightning_mgwfbp.exchange.horovod_hosts import own_address
from lightning_mgwfbp.exchange.horovod_rendezvous import init_launched, is_launched


class HorovodEnvironment(ClusterEnvironment):
    """Ranks are Horovod's own; torch.distributed, for Lightning's own traffic, meets at an address
    that rank 0 picks and Horovod hands on."""

    def __init__(self) -> None:
        self._hvd = init_launched()
        self._main: tuple[str, int] | None = None

    @property
    @override
    def creates_processes_externally(self) -> bool:
        return True

    @staticmethod
    @override
    def detect() -> bool:
        return is_launched()

    @property
    @override
    def main_address(self) -> str:
        return self._meeting_point()[0]

    @property
    @override
    def main_port(self) -> int:
        return self._meeting_point()[1]

    @override
    def world_size(self) -> int:
        return int(self._hvd.size())

    @override
    def set_world_size(self, size: int) -> None:
        if size != self.world_size():
            raise ValueError(
                f"`Trainer(devices=..., num_nodes=...)` makes {size} processes, but horovodrun has"
                f" launched {self.world_size()}: devices is the number on each host,"
                " num_nodes that of hosts."
            )

    @override
    def global_rank(self) -> int:
        return int(self._hvd.rank())

    @override
    def set_global_rank(self, rank: int) -> None:
        pass  # Horovod's counts; that both agree is checked when the transport is opened

    @override
    def local_rank(self) -> int:
        return int(self._hvd.local_rank())

    @override
    def node_rank(self) -> int:
        return int(self._hvd.cross_rank())

    def _meeting_point(self) -> tuple[str, int]:
        if self._main is None:
            mine = self._free_place() if self._hvd.rank() == 0 else None
            # named, since Horovod would name it by the type of `mine`, which is another elsewhere
            self._main = self._hvd.broadcast_object(mine, 0, name="lightning_mgwfbp.meeting_point")
        return self._main

    def _free_place(self) -> tuple[str, int]:
        alone = self._hvd.local_size() == self._hvd.size()
        with socket.socket() as probe:
            probe.bind(("", 0))
            return "127.0.0.1" if alone else own_address(alone), probe.getsockname()[1]
