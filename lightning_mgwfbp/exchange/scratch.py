"""`Scratch`: memory to receive in, used again and again."""

from __future__ import annotations

import threading

import torch
from torch import Tensor


class Scratch:
    """Gives out tensors like others, and keeps those that come back for the next of their size.

    100 MB of fresh pages cost 10 to 40 ms. It keeps no more bytes than were once out at the same
    time, so that sizes which are no longer asked for make way. For several threads.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._kept: list[Tensor] = []  # longest unused first
        self._kept_nbytes = 0
        self._out_nbytes = 0
        self._most_out_nbytes = 0

    def take(self, like: Tensor) -> Tensor:
        """Return a contiguous tensor of the shape, dtype and device of `like`, of any content."""
        with self._lock:
            self._out_nbytes += like.nbytes
            self._most_out_nbytes = max(self._most_out_nbytes, self._out_nbytes)
            for place, kept in enumerate(self._kept):
                if kept.nbytes == like.nbytes and kept.device == like.device:
                    self._kept_nbytes -= kept.nbytes
                    return self._kept.pop(place).view(like.dtype).view(like.shape)
        return torch.empty_like(like, memory_format=torch.contiguous_format)

    def give_back(self, tensor: Tensor) -> None:
        """Take `tensor`, which `take` returned and nobody uses any more."""
        with self._lock:
            self._out_nbytes -= tensor.nbytes
            self._kept_nbytes += tensor.nbytes
            self._kept.append(tensor.view(-1).view(torch.uint8))
            while self._kept_nbytes + self._out_nbytes > self._most_out_nbytes:
                self._kept_nbytes -= self._kept.pop(0).nbytes
