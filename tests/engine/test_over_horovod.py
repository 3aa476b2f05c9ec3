"""A failure here is a training over Horovod that leads elsewhere than the same over gloo."""

from __future__ import annotations

from typing import Any

import pytest
import row_examples
import torch
from engine_examples import Layers, data_of, gradients
from horovod_ranks import on_horovod_ranks
from network_examples import COMPRESSORS, batch, network
from torch import Tensor
from torch.optim import SGD

from lightning_mgwfbp.engine.merged_optimizer import MergedOptimizer
from lightning_mgwfbp.exchange.power_sgd import PowerSGD
from lightning_mgwfbp.exchange.torch_transport import TorchTransport
from lightning_mgwfbp.exchange.transport import Transport
from lightning_mgwfbp.plan import AlphaBeta

pytestmark = pytest.mark.horovod

METHODS = {"bf16": "bf16", "fp16": "fp16", **COMPRESSORS, "powersgd": PowerSGD(1, 20)}
# of layers 0, 1, 2: what each rank uses in a micro-batch
USED = [((0, 1, 2), (0, 2)), ((1,), (1,)), ((0,), ()), ((), ()), ((0, 1, 2), (2,))]


def dense(transport: Transport) -> list[Any]:
    """Accumulation, unused parameters, a second synced backward; the gradients of every step."""
    model = Layers()
    merged = MergedOptimizer(
        SGD(model.parameters(), lr=0.1, momentum=0.9),
        model.named_parameters(),
        transport=transport,
        link=AlphaBeta(1e-3, 1e-9),
        warmup_steps=2,
        planner="wfbp",
    )
    seen = []
    for step in range(8):
        merged.zero_grad()
        for micro in range(3):
            used = USED[(step + micro) % len(USED)][transport.rank]
            loss = model(data_of(transport.rank, step, micro), used) if used else None
            if micro < step % 3:
                with merged.no_sync():
                    loss is None or loss.backward()
            elif loss is not None:
                loss.backward()
        merged.synchronize()
        seen.append(gradients(model))
        merged.step()
    assert merged.plan is not None
    merged.close()
    return seen


def compressed(transport: Transport, method: Any) -> list[Tensor]:
    """Weights after ten steps, half of them after the plan."""
    model = network()
    merged = MergedOptimizer(
        SGD(model.parameters(), lr=0.1),
        model.named_parameters(),
        transport=transport,
        compressor=method,
        link=AlphaBeta(1e-9, 1.0),
        planner="wfbp",
        warmup_steps=2,
    )
    for step in range(6):
        merged.zero_grad()
        model(batch(transport.rank, step)).square().mean().backward()
        merged.step()
    assert merged.plan is not None
    merged.close()
    return [p.detach() for p in model.parameters()]


def rows(transport: Transport, method: str) -> list[Any]:
    training = row_examples.Training(transport, method, sparse=True)
    steps = [s for steps in row_examples.CASES.values() for s in steps]
    seen = [training.step(*micro_batches, seed=i) for i, micro_batches in enumerate(steps)]
    training.reducer.close()
    return seen


def _on_both(transport: Transport, fn: Any, args: tuple[Any, ...]) -> bool:
    ours, theirs = fn(transport, *args), fn(TorchTransport(), *args)
    torch.testing.assert_close(ours, theirs, rtol=0, atol=0)
    return True


def same_on_both(fn: Any, *args: Any) -> bool:
    return on_horovod_ranks(_on_both, fn, args) == [True, True]


def test_dense() -> None:
    """A gradient of some step differs by a bit."""
    assert same_on_both(dense)


@pytest.mark.filterwarnings("ignore:Horovod cannot sum bfloat16")
@pytest.mark.parametrize("method", METHODS)
def test_with_a_compressor(method: str) -> None:
    """A weight differs by a bit after steps that left rests."""
    assert same_on_both(compressed, METHODS[method])


@pytest.mark.parametrize("method", row_examples.METHODS)
def test_sparse_embeddings(method: str) -> None:
    """Rows are lost, or meet other rows."""
    assert same_on_both(rows, method)
