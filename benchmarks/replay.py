"""A measured model played back: its layers sleep for the profiled times and yield its gradients.

A stand-in for a model on an accelerator: computing takes its time but leaves this machine's cores
to the communication. `ModelProfile.scaled` sets the ratio between the two.
"""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from lightning_mgwfbp.plan import ModelProfile, forward_split

# What autograd and Python take between two layers, at most: an accelerator's host runs ahead of it
# by that much, so this is no part of the model's time. Any longer wait is, as a stall.
OVERHEAD_SECONDS = 1e-4


class Sleeper:
    """Makes blocks of code last their given times, right in sum.

    The operating system adds some 0.1 ms to a sleep, many times the length of the shortest layers:
    what one sleep takes too long, the next is shortened by.
    """

    def __init__(self) -> None:
        self.restart()

    def restart(self) -> None:
        """Forget how late it is: a new step begins."""
        self._late = 0.0
        self._ended = time.perf_counter()

    @contextmanager
    def lasting(self, seconds: float) -> Iterator[None]:
        """Sleep at the end of the block for what is left of `seconds`."""
        begun = time.perf_counter()
        self._late += min(begun - self._ended, OVERHEAD_SECONDS)
        until = begun + seconds - self._late
        yield
        if (left := until - time.perf_counter()) > 0:
            time.sleep(left)
        self._ended = time.perf_counter()
        self._late = self._ended - until


class _Layer(torch.autograd.Function):
    """The identity on `x`, `weight` being a parameter that x passes on the way."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, layer: "ReplayLayer") -> Tensor:
        ctx.layer = layer
        with layer.sleeper.lasting(layer.forward_seconds):
            ctx.save_for_backward(weight)
            return x.clone()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        # The gradient of |weight|^2 / 2: finite values of differing magnitude, as a sparse exchange
        # wants them. New memory every time, since autograd makes the tensor it is given `.grad`,
        # and a buffer filled again in the next step would change that under its holder.
        with ctx.layer.sleeper.lasting(ctx.layer.backward_seconds):
            (weight,) = ctx.saved_tensors
            return grad, weight.clone(), None


class ReplayLayer(nn.Module):
    """One profiled parameter, in a module of its own so that a forward pre-hook can wait for it."""

    def __init__(
        self,
        numel: int,
        dtype: torch.dtype,
        forward_seconds: float,
        backward_seconds: float,
        sleeper: Sleeper,
    ) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(numel).to(dtype))  # (numel,)
        self.forward_seconds = forward_seconds
        self.backward_seconds = backward_seconds
        self.sleeper = sleeper

    def forward(self, x: Tensor) -> Tensor:
        return _Layer.apply(x, self.weight, self)


class Replay(nn.Sequential):
    """`profile` as a module: zeros of shape () in, the same out as the loss.

    Its parameters are those of the profile, flat, last layer first: backward then produces their
    gradients in the profile's order. Forward takes the layers in the opposite order (a chain's
    backward is its forward reversed); where the profile does not say how long each layer's forward
    takes, `profile.forward_seconds` is shared out in proportion to backward.
    """

    def __init__(self, profile: ModelProfile) -> None:
        sleeper = Sleeper()
        layers = [
            ReplayLayer(
                layer.numel,
                getattr(torch, layer.dtype),
                forward_seconds,
                layer.backward_seconds,
                sleeper,
            )
            for layer, forward_seconds in zip(profile.layers, forward_split(profile), strict=True)
        ]
        super().__init__(*reversed(layers))
        self._sleeper = sleeper

    def forward(self, x: Tensor) -> Tensor:
        self._sleeper.restart()
        return super().forward(x)
