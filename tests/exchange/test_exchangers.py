"""A failure here is a mean over the ranks that is not the mean."""

from typing import Any

import pytest
import torch
from loopback import on_ranks
from torch import Tensor

from lightning_mgwfbp.exchange.buckets import Bucket
from lightning_mgwfbp.exchange.compressors import Cast
from lightning_mgwfbp.exchange.exchangers import DenseExchanger
from lightning_mgwfbp.exchange.transport import LoopbackTransport


def exchange(
    transport: LoopbackTransport, gradients: list[list[Tensor | None]], *options: Any
) -> Bucket:
    """Average this rank's entry of `gradients`; a (3,) and a (2, 2) parameter."""
    dtype = next(g.dtype for g in gradients[0] if g is not None)
    bucket = Bucket([torch.empty(3, dtype=dtype), torch.empty(2, 2, dtype=dtype)])
    given = gradients[transport.rank]
    bucket.pack(given, [g is not None for g in given], notice=transport.rank == 1)
    DenseExchanger(transport, *options).start(bucket, key="bucket 0").finish()
    return bucket


def random_gradients(world_size: int, scale: float = 1.0) -> list[list[Tensor | None]]:
    generator = torch.Generator().manual_seed(world_size)
    shapes = ((3,), (2, 2))
    return [
        [scale * torch.randn(shape, generator=generator) for shape in shapes]
        for _ in range(world_size)
    ]


@pytest.mark.parametrize("world_size", [1, 2, 3, 5])
@pytest.mark.parametrize("compressor", [None, Cast("float16"), Cast("bfloat16")], ids=repr)
def test_every_rank_gets_the_mean(world_size: int, compressor: Cast | None) -> None:
    """The factor 1/P, or which buffer is sent and which is read."""
    given = random_gradients(world_size)
    buckets = on_ranks(exchange, given, compressor, world_size=world_size)
    averages = [bucket.gradients() for bucket in buckets]
    eps = 2.0**-22 if compressor is None else torch.finfo(compressor.wire_dtype(torch.float32)).eps
    for i in range(2):
        stacked = torch.stack([rank[i] for rank in given])  # type: ignore[misc]
        bound = world_size * eps * stacked.abs().mean(0)  # each of P roundings of partial sums
        for average in averages:
            assert torch.all((average[i] - stacked.mean(0)).abs() <= bound)
            assert torch.equal(average[i], averages[0][i])


def test_a_rank_without_gradient_counts_as_zeros_and_flags_survive() -> None:
    """The mean is over those who had one, or narrow formats round the flags away."""
    ones = [torch.ones(3), torch.ones(2, 2)]
    given = [[ones[0], None], [None, None], [None, None]]
    for bucket in on_ranks(exchange, given, Cast("bfloat16"), world_size=3):
        torch.testing.assert_close(
            bucket.gradients()[0], torch.full((3,), 1 / 3), rtol=4e-3, atol=0
        )
        assert bucket.used() == [True, False]
        assert bucket.noticed()


@pytest.mark.parametrize("world_size", [2, 4])
def test_the_sum_does_not_overflow_in_a_narrow_format(world_size: int) -> None:
    """1/P is applied after the sum: float16 ends at 65504."""
    given = [[torch.full((3,), 60000.0), torch.full((2, 2), -60000.0)]] * world_size
    for bucket in on_ranks(exchange, given, Cast("float16"), world_size=world_size):
        assert bucket.gradients()[0].tolist() == [60000.0] * 3


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("compressor", [None, Cast("float16")], ids=repr)
def test_what_is_not_finite_reaches_every_rank(value: float, compressor: Cast | None) -> None:
    """Ranks decide differently whether to skip a step."""
    given = random_gradients(2)
    given[1][0][1] = value  # type: ignore[index]
    for bucket in on_ranks(exchange, given, compressor):
        first, second = bucket.gradients()
        torch.testing.assert_close(first[1], torch.tensor(value), equal_nan=True)
        assert torch.isfinite(first[[0, 2]]).all()
        assert torch.isfinite(second).all()
