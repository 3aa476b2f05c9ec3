"""The models on which the contenders are compared, each a module that returns its loss.

Making the loss part of the module gives every contender the same step: `module(*inputs)` and
`.backward()`, whether the module is plain or wrapped.
"""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, mse_loss, relu

from benchmarks.replay import Replay
from examples.gpt import VOCABULARY, GPTModule
from lightning_mgwfbp.plan import ModelProfile

PROFILES = Path(__file__).parents[1] / "tests" / "data" / "profiles"


@dataclass(frozen=True)
class Workload:
    """A module and one batch for it: `module(*inputs)` is the loss."""

    module: nn.Module
    inputs: tuple[Tensor, ...]


class WithLoss(nn.Module):
    """`criterion(network(inputs), targets)` as one module."""

    def __init__(self, network: nn.Module, criterion: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.network = network
        self.criterion = criterion

    def forward(self, inputs: Tensor, targets: Tensor) -> Tensor:
        return self.criterion(self.network(inputs), targets)


class ResidualBlock(nn.Module):
    """Two 3x3 convolutions and a shortcut (He et al., 2016)."""

    def __init__(self, channels_in: int, channels: int, stride: int) -> None:
        super().__init__()
        self.convolutions = nn.Sequential(
            convolution(channels_in, channels, 3, stride),
            nn.ReLU(),
            convolution(channels, channels, 3, 1),
        )
        self.shortcut = (
            nn.Identity() if stride == 1 else convolution(channels_in, channels, 1, stride)
        )

    def forward(self, x: Tensor) -> Tensor:
        return relu(self.convolutions(x) + self.shortcut(x))


def convolution(channels_in: int, channels: int, size: int, stride: int) -> nn.Sequential:
    """A convolution and its normalisation.

    Normalised by groups of channels, not over the batch: batch statistics are buffers that DDP
    broadcasts in every step, so that contenders would differ by more than the gradient exchange.
    """
    return nn.Sequential(
        nn.Conv2d(channels_in, channels, size, stride, padding=size // 2, bias=False),
        nn.GroupNorm(32, channels),
    )


def convolutional() -> Workload:
    """ResNet-18 with a 3x3 stem on 16 images of 32x32 pixels: 11.2 million parameters."""
    widths = (64, 64, 128, 128, 256, 256, 512, 512)
    strides = (1, 1, 2, 1, 2, 1, 2, 1)
    network = nn.Sequential(
        convolution(3, 64, 3, 2),
        nn.ReLU(),
        *map(ResidualBlock, (64, *widths), widths, strides),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(512, 10),
    )
    batch = torch.randn(16, 3, 32, 32), torch.randint(10, (16,))
    return Workload(WithLoss(network, cross_entropy), batch)


def gpt() -> Workload:
    """The GPT of examples/gpt.py on 4 sequences of 64 random tokens: 10.8 million parameters."""
    tokens = torch.randint(VOCABULARY, (4, 65))
    # Logits (batch, time, vocabulary) to (batch, vocabulary, time), as `cross_entropy` wants them.
    module = WithLoss(GPTModule(), lambda y, targets: cross_entropy(y.transpose(1, 2), targets))
    return Workload(module, (tokens[:, :-1], tokens[:, 1:]))


class ResidualTanh(nn.Linear):
    """x + tanh(W x + b): hundreds of these can be stacked and still train."""

    def forward(self, x: Tensor) -> Tensor:
        return x + super().forward(x).tanh()


def narrow() -> Workload:
    """500 layers of width 64: 1,000 small tensors, 2.1 million parameters."""
    network = nn.Sequential(*(ResidualTanh(64, 64) for _ in range(500)))
    return Workload(WithLoss(network, mse_loss), (torch.randn(32, 64), torch.randn(32, 64)))


MODELS: dict[str, Callable[[], Workload]] = {
    "conv": convolutional,
    "gpt": gpt,
    "narrow": narrow,
}


def builder(name: str) -> Callable[[], Workload]:
    """What builds the workload that `name` stands for.

    Args:
        name: a key of `MODELS`, or `replay:PROFILE[@SCALE]`, where PROFILE is the stem of a file in
            tests/data/profiles or a path ending in .json, and SCALE multiplies all its times.

    Raises:
        ValueError: for any other name, or a file that is no profile.
        OSError: if the profile cannot be read.
    """
    if name in MODELS:
        return MODELS[name]
    kind, _, rest = name.partition(":")
    stem, _, scale = rest.partition("@")
    if kind != "replay" or not stem:
        raise ValueError(
            f"`--models` takes {', '.join(MODELS)} or replay:PROFILE[@SCALE], got {name!r}."
        )
    path = Path(stem) if stem.endswith(".json") else PROFILES / f"{stem}.json"
    profile = ModelProfile.load(path).scaled(parse_scale(scale or "1"))
    return lambda: Workload(Replay(profile), (torch.zeros(()),))


def parse_scale(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise ValueError(
            f"`--models replay:PROFILE@SCALE` needs a number as SCALE, got {text!r}."
        ) from None
