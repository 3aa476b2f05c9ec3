"""A failure here is a gradient that lies wrongly in its merge group's flat buffer."""

import pytest
import torch
from loopback import same_bits
from torch import Tensor

from lightning_mgwfbp.exchange.buckets import Bucket, real_dtype


def random_like(parameter: Tensor, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(parameter.shape, dtype=parameter.dtype, generator=generator)


MIXED = {
    "float32": [torch.empty(3, 4), torch.empty(()), torch.empty(0, 5), torch.empty(7)],
    "bfloat16": [torch.empty(5, dtype=torch.bfloat16), torch.empty(2, 2, dtype=torch.bfloat16)],
    "complex": [
        torch.empty(3, dtype=torch.complex64),
        torch.empty((), dtype=torch.complex64),
        torch.empty(0, 2, dtype=torch.complex64),
    ],
    "channels_last": [
        torch.empty(4, 3, 2, 2).to(memory_format=torch.channels_last),
        torch.empty(3, 5).t(),
    ],
    "not dense": [torch.empty(1).expand(4), torch.empty(4, 6)[:, ::2]],
}


@pytest.mark.parametrize("parameters", MIXED.values(), ids=MIXED)
def test_gradients_come_back_bit_for_bit(parameters: list[Tensor]) -> None:
    """Offsets, shapes, or the pairs of reals of complex numbers."""
    bucket = Bucket(parameters)
    given = [random_like(p, seed) for seed, p in enumerate(parameters)]
    bucket.pack(given, [True] * len(given))
    assert all(map(same_bits, bucket.gradients(), given))
    assert bucket.buffer.dtype == real_dtype(parameters[0].dtype)


def summed_tail(dtype: torch.dtype, notices: list[bool], agains: list[bool]) -> Bucket:
    """A bucket that has come from so many ranks, added up one by one as a reduce-scatter does."""
    parameter = torch.zeros(1, dtype=dtype)
    total, mine = Bucket([parameter]), Bucket([parameter])
    for rank, (notice, again) in enumerate(zip(notices, agains, strict=True)):
        mine.pack([parameter], [True], notice, again, share=1 / len(notices))
        if rank == 0:
            total.pack([parameter], [True], notice, again, share=1 / len(notices))
        else:
            total.tail.add_(mine.tail)
    return total


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("ranks", [2, 19, 31, 91, 512, 1000])
@pytest.mark.parametrize("again", [True, False])
def test_one_rank_is_heard_among_many(dtype: torch.dtype, ranks: int, again: bool) -> None:
    """Narrow sums hide a rank's notice, or that it is out of step; or they make one up."""
    nobody, all_alike = [False] * ranks, [again] * ranks
    one = [*nobody[1:], True]
    assert summed_tail(dtype, nobody, all_alike).noticed() is False
    assert summed_tail(dtype, one, all_alike).noticed() is True
    assert summed_tail(dtype, nobody, [*all_alike[1:], not again]).noticed() is None


LARGE = [torch.empty(40_000), torch.empty(40_000, 1).t(), torch.empty(3)]


@pytest.mark.parametrize("parameters", [*MIXED.values(), LARGE], ids=[*MIXED, "large"])
@pytest.mark.parametrize("all_used", [True, False])
def test_packing_a_share_is_packing_and_scaling(parameters: list[Tensor], all_used: bool) -> None:
    """Gradients or flags that weigh more than others in the mean; or are scaled twice."""
    given = [random_like(p, seed) for seed, p in enumerate(parameters)]
    used = [all_used, *[True] * (len(given) - 1)]
    gradients = [g if there else None for g, there in zip(given, used, strict=True)]
    at_once, after = Bucket(parameters), Bucket(parameters)
    at_once.pack(gradients, used, notice=True, share=1 / 3)
    after.pack(gradients, used, notice=True)
    for bucket in (at_once, after, after):
        bucket.scale_to(1 / 3)
    assert same_bits(at_once.buffer, after.buffer)
    assert after.noticed()


def test_strides_are_the_parameters_own() -> None:
    """Gradients of channels_last weights change their layout, which slows the optimizer down."""
    parameters = MIXED["channels_last"]
    bucket = Bucket(parameters)
    bucket.pack([random_like(p, 0) for p in parameters], [True] * len(parameters))
    assert [g.stride() for g in bucket.gradients()] == [p.stride() for p in parameters]


def test_a_lazy_conjugate_is_sent_as_what_it_means() -> None:
    """Imaginary parts arrive with the wrong sign."""
    parameter = torch.empty(3, dtype=torch.complex128)
    lazy = random_like(parameter, 1).conj()
    assert lazy.is_conj()
    bucket = Bucket([parameter])
    bucket.pack([lazy], [True])
    assert same_bits(bucket.gradients()[0], lazy.resolve_conj())


def test_flags_and_notice() -> None:
    """The tail: who was used, and the value behind it; what was there before must be gone."""
    bucket = Bucket([torch.empty(2), torch.empty(3), torch.empty(0)])
    bucket.pack([torch.ones(2), torch.ones(3), torch.ones(0)], [True] * 3, notice=True)
    assert bucket.used() == [True, True, True]
    assert bucket.noticed()
    bucket.pack([None, torch.ones(3), None], [False, True, False])
    assert bucket.used() == [False, True, False]
    assert not bucket.noticed()
    assert torch.equal(bucket.gradients()[0], torch.zeros(2))
    assert bucket.buffer.numel() == 5 + 3 + 3


@pytest.mark.parametrize("multiple", [1, 9, 12, 64])
def test_padding_lies_behind_the_tail(multiple: int) -> None:
    """What is cut into equal shards is no multiple, or padding is taken for flags."""
    bucket = Bucket([torch.empty(2), torch.empty(3), torch.empty(1)])  # and 6 numbers more
    bucket.pad(multiple)
    assert bucket.padded.numel() == -(-12 // multiple) * multiple
    for _ in range(2):
        bucket.pack([torch.ones(2), None, torch.ones(1)], [True, False, True], notice=True)
        held = bucket.padded  # so that the next round is in other memory
        held[12:] = 9
        assert bucket.buffer.tolist() == [1, 1, 0, 0, 0, 1, 1, 0, 1, 1, 0, 1]
        assert bucket.data.tolist() == [1, 1, 0, 0, 0, 1]
        assert bucket.used() == [True, False, True]
        assert bucket.buffer.data_ptr() == bucket.padded.data_ptr()


@pytest.mark.parametrize(
    "hold",
    [
        lambda view: view,
        lambda view: view.detach(),
        lambda view: view[1:],
        lambda view: view.numpy(),
        lambda view: view.view(torch.int32),
    ],
    ids=["view", "detach", "slice", "numpy", "other dtype"],
)
def test_what_somebody_holds_is_never_overwritten(hold: object) -> None:
    """A gradient that the user kept changes under their hands in the next step."""
    bucket = Bucket([torch.empty(3)])
    bucket.pack([torch.tensor([1.0, 2.0, 3.0])], [True])
    held = hold(bucket.gradients()[0])  # type: ignore[operator]
    before = held.tolist()
    bucket.pack([torch.full((3,), 9.0)], [True])
    assert held.tolist() == before
    assert bucket.gradients()[0].tolist() == [9.0] * 3


def test_the_storage_stays_while_nobody_holds_it() -> None:
    """Memory is taken anew in every step."""
    bucket = Bucket([torch.empty(3), torch.empty(2)])
    places = set()
    for step in range(4):
        bucket.pack([torch.full((3,), float(step)), None], [True, False])
        places.add(bucket.buffer.data_ptr())
        assert {bucket.gradients()[0].data_ptr()} == places
    assert len(places) == 1
