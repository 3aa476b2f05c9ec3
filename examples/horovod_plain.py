"""The digits in a plain loop over Horovod: `MergedOptimizer` in hvd.DistributedOptimizer's place.

    horovodrun -np 2 python examples/horovod_plain.py

Coming from a program that uses Horovod, four lines change (marked below). To show that nothing
else does, it trains a second time with Horovod's own optimizer and asserts that both reach the same
weights, and at least 97 % accuracy on scans they never saw.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import horovod.torch as hvd
import torch
from torch import nn
from torch.optim import SGD, Optimizer
from torch.utils.data import DataLoader, DistributedSampler

from lightning_mgwfbp import (
    HorovodTransport,
    MergedOptimizer,
    broadcast_optimizer_state,
    broadcast_parameters,
)

sys.path.insert(0, str(Path(__file__).parent.parent))  # for `examples.digits`
from examples.digits import DigitsData, DigitsModule

EPOCHS = 6
LEAST_ACCURACY = 0.97


def merged(model: nn.Module, sgd: Optimizer, transport: HorovodTransport) -> Optimizer:
    # in the place of hvd.broadcast_parameters and hvd.broadcast_optimizer_state
    broadcast_parameters(model.state_dict(), root_rank=0, transport=transport)
    broadcast_optimizer_state(sgd, root_rank=0, transport=transport)
    # in the place of hvd.DistributedOptimizer
    return MergedOptimizer(sgd, model.named_parameters(), transport=transport)


def horovods_own(model: nn.Module, sgd: Optimizer, _: HorovodTransport) -> Optimizer:
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    # hvd.broadcast_optimizer_state makes a new SGD's state by a step, weight decay and all
    return hvd.DistributedOptimizer(sgd, named_parameters=model.named_parameters())


def train(
    distribute: Callable[[nn.Module, Optimizer, HorovodTransport], Optimizer],
    transport: HorovodTransport,
) -> DigitsModule:
    """Train this rank's share of the digits."""
    torch.manual_seed(hvd.rank())  # other weights on each rank, until rank 0's are broadcast
    model, data = DigitsModule(), DigitsData()
    data.setup("fit")
    sampler = DistributedSampler(data.train, hvd.size(), hvd.rank(), shuffle=True, seed=1)
    loader = DataLoader(data.train, data.batch_size, sampler=sampler)
    sgd = SGD(model.parameters(), lr=0.02, momentum=0.9, nesterov=True, weight_decay=5e-4)
    optimizer = distribute(model, sgd, transport)
    for epoch in range(EPOCHS):
        sampler.set_epoch(epoch)
        for batch in loader:
            optimizer.zero_grad()
            model.loss(batch).backward()
            optimizer.step()
    return model


@torch.no_grad()
def accuracy(model: DigitsModule) -> float:
    data = DigitsData()
    data.setup("test")
    images, labels = data.test.tensors
    return (model.eval()(images).argmax(1) == labels).double().mean().item()


def main() -> None:
    transport = HorovodTransport()  # in the place of hvd.init()
    model, other = train(merged, transport), train(horovods_own, transport)
    reached = accuracy(model)
    if transport.rank == 0:
        print(f"digits over Horovod, {transport.world_size} ranks: test accuracy {reached:.4f}")
    for ours, theirs in zip(model.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs)
    assert reached >= LEAST_ACCURACY, f"test accuracy {reached:.4f}, expected {LEAST_ACCURACY}"


if __name__ == "__main__":
    main()
