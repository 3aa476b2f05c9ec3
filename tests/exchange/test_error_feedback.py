"""A failure here is a rest that is lost, sent twice, or given to another parameter."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_mgwfbp.exchange.buckets import Bucket
from lightning_mgwfbp.exchange.error_feedback import (
    ErrorFeedback,
    Memory,
    TwoPhase,
    own_or_mean,
)

SHAPES = {"weight": (3, 2), "filters": (2, 2, 2, 2), "bias": (3,), "scalar": ()}


def bucket_of(*names: str, dtype: torch.dtype = torch.float32) -> Bucket:
    parameters = [torch.zeros(SHAPES[n], dtype=dtype) for n in names]
    parameters = [
        p.contiguous(memory_format=torch.channels_last) if p.ndim == 4 else p for p in parameters
    ]
    return Bucket(parameters, names, compressed=len(names))


def pack(bucket: Bucket, value: float, used: list[bool] | None = None) -> None:
    gradients = [torch.full_like(p, value) for p in bucket.parameters]
    bucket.pack(gradients, used or [True] * len(gradients))


def leave(feedback: ErrorFeedback, *buckets: Bucket) -> None:
    """Keep all that was packed."""
    for bucket in buckets:
        feedback.of(bucket).accumulate(1.0)
        feedback.of(bucket).settle()
    feedback.conclude(True)


def residual(feedback: ErrorFeedback) -> dict[str, Any]:
    return {n: r.tolist() for n, r in feedback.state_dict().get("residual", {}).items()}


def test_two_phase() -> None:
    """What was written aside counts too early, or after a step that was dropped."""
    value = TwoPhase(torch.ones(2))
    assert value.valid.tolist() == [0, 0]
    for written, is_right, valid in ((5.0, True, 5), (6.0, False, 5), (7.0, True, 7)):
        value.next.fill_(written)
        assert value.next.tolist() == [written] * 2
        value.conclude(is_right)
        assert value.valid.tolist() == [valid] * 2
    value.conclude(True)  # nothing was written: a bucket that was not exchanged
    assert value.valid.tolist() == [7, 7]


def test_two_phase_needs_two_buffers() -> None:
    """Each step allocates anew."""
    value = TwoPhase(torch.ones(2))
    seen = set()
    for _ in range(5):
        seen.add(value.next.data_ptr())
        value.conclude(True)
    assert len(seen) == 2


@pytest.mark.parametrize(
    ("dtype", "wide"),
    [
        (torch.bfloat16, torch.float32),
        (torch.float16, torch.float32),
        (torch.float32, torch.float32),
        (torch.float64, torch.float64),
        (torch.complex64, torch.complex64),
    ],
    ids=str,
)
def test_rests_are_held_wide(dtype: torch.dtype, wide: torch.dtype) -> None:
    """Small rests of narrow gradients are rounded away; complex ones lose a half."""
    feedback = ErrorFeedback()
    bucket = bucket_of("weight", "scalar", dtype=dtype)
    feedback.adopt([bucket])
    pack(bucket, 1.0)
    leave(feedback, bucket)
    pack(bucket, 2.0**-12)  # an eighth of a bfloat16's last place at 1
    leave(feedback, bucket)
    kept = feedback.state_dict()["residual"]
    assert kept["weight"].dtype == kept["scalar"].dtype == wide
    assert torch.equal(kept["weight"], torch.full((3, 2), 1 + 2.0**-12, dtype=wide))
    assert torch.equal(kept["scalar"], torch.tensor(1 + 2.0**-12, dtype=wide))


def test_factor_and_momentum() -> None:
    """Rests in units of the loss scale, or velocities that accumulate otherwise than DGC's."""
    bucket = bucket_of("bias")
    memory = Memory(bucket, momentum=0.5)
    pack(bucket, 8.0)
    sums = []
    for _ in range(3):
        sums.append(memory.accumulate(0.25)[0].item())
        memory.settle()
        memory.conclude(True)
    assert sums == [2.0, 5.0, 8.5]  # velocities 2, 3, 3.5
    assert memory.named()["velocity"]["bias"].tolist() == [3.5] * 3


@pytest.mark.parametrize(
    ("momentum", "used", "is_flushed", "is_right", "is_kept"),
    [
        (0.0, True, True, True, False),
        (0.5, True, True, True, True),  # a velocity goes on
        (0.0, False, True, True, True),
        (0.0, True, False, True, True),
        (0.0, True, True, False, True),
    ],
)
def test_memory_is_given_back_once_all_is_sent(
    momentum: float, used: bool, is_flushed: bool, is_right: bool, is_kept: bool
) -> None:
    """Twice a model's memory stays for zeros; or it is given back while something is owed."""
    bucket = bucket_of("bias")
    feedback = ErrorFeedback(momentum)
    feedback.adopt([bucket])
    pack(bucket, 3.0)
    leave(feedback, bucket)
    pack(bucket, 4.0, used=[used])
    feedback.of(bucket).accumulate(1.0).zero_()  # all is sent
    feedback.of(bucket).settle(is_flushed=is_flushed)
    assert residual(feedback) == {"bias": [3.0] * 3}
    feedback.conclude(is_right)
    left = 0.0 if used and is_right else 3.0
    assert residual(feedback) == ({"bias": [left] * 3} if is_kept else {})
    assert feedback.of(bucket).is_empty == (not is_kept)
    pack(bucket, 1.0)
    leave(feedback, bucket)  # the next is not taken for one that is flushed
    assert residual(feedback)["bias"] != [0.0] * 3


@pytest.mark.parametrize("momentum", [0.0, 0.5])
def test_what_sits_out_sends_nothing_and_keeps_its_rest(momentum: float) -> None:
    """A parameter that is used nowhere is stepped, or an unused one forgets what it owes."""
    bucket = bucket_of("weight", "bias")
    feedback = ErrorFeedback(momentum)
    feedback.adopt([bucket])
    pack(bucket, 3.0)
    leave(feedback, bucket)
    before = {k: r["bias"].clone() for k, r in feedback.state_dict().items()}
    pack(bucket, 4.0, used=[True, False])
    sent = feedback.of(bucket).accumulate(1.0)
    assert bucket.chunks(sent)[1].tolist() == [0.0] * 3
    assert bucket.chunks(sent)[0].tolist() == [7.0 + 3 * momentum] * 6
    sent.zero_()  # all is sent
    feedback.of(bucket).settle()
    feedback.conclude(True)
    after = feedback.state_dict()
    assert {k: r["bias"].tolist() for k, r in after.items()} == {
        k: r.tolist() for k, r in before.items()
    }
    assert not after["residual"]["weight"].any()


def test_rests_follow_their_parameters() -> None:
    """A regrouping gives rests to others, tears layouts, or forgets who is in no bucket."""
    first, second = bucket_of("weight", "filters"), bucket_of("bias")
    feedback = ErrorFeedback()
    feedback.adopt([first, second])
    filters = torch.arange(16.0).view(2, 2, 2, 2)
    first.pack([torch.full((3, 2), 2.0), filters], [True, True])
    pack(second, 3.0)
    leave(feedback, first, second)
    before = residual(feedback)
    assert before["filters"] == filters.tolist()
    feedback.adopt([bucket_of("bias", "filters")])  # weight has left
    assert residual(feedback) == before
    together = bucket_of("filters", "weight", "bias", "scalar")
    feedback.adopt([together])
    assert residual(feedback) == {**before, "scalar": 0.0}
    pack(together, 1.0)
    leave(feedback, together)
    assert residual(feedback)["filters"] == (filters + 1).tolist()


def test_an_own_copy_of_what_is_absent() -> None:
    """One parameter that has left keeps a whole bucket in memory."""
    feedback = ErrorFeedback()
    bucket = bucket_of("weight", "bias")
    feedback.adopt([bucket])
    pack(bucket, 1.0)
    leave(feedback, bucket)
    feedback.adopt([bucket_of("weight")])
    assert feedback._absent["residual"]["bias"].untyped_storage().nbytes() == 3 * 4


def test_a_parameter_whose_gradients_turn_out_to_be_sparse() -> None:
    """Its bucket carries no gradient of it any more, and its rest does not fit."""
    feedback = ErrorFeedback()
    bucket = bucket_of("weight", "bias")
    feedback.adopt([bucket])
    pack(bucket, 2.0)
    leave(feedback, bucket)
    before = residual(feedback)
    parameters = [torch.zeros(3), torch.zeros(3, 2)[:0]]
    flag_only = Bucket(parameters, ["bias", "weight"], compressed=1)
    feedback.adopt([flag_only])
    assert residual(feedback) == before
    flag_only.pack([torch.ones(3), None], [True, True])
    leave(feedback, flag_only)
    feedback.adopt([bucket])
    assert residual(feedback) == {"weight": before["weight"], "bias": [3.0] * 3}


def test_nothing_is_allocated_before_it_is_needed() -> None:
    """A dense phase takes three times the memory of the gradients."""
    memory = Memory(bucket_of("weight"), momentum=0.0)
    assert memory.is_empty
    memory.conclude(True)
    assert memory.named() == {}


def test_state_is_a_copy_and_replaces_what_is_kept() -> None:
    """A saved state changes with the next step, or is added to what is there."""
    feedback, bucket = ErrorFeedback(), bucket_of("weight", "bias")
    feedback.adopt([bucket])
    pack(bucket, 1.0)
    leave(feedback, bucket)
    saved = feedback.state_dict()
    pack(bucket, 5.0)
    leave(feedback, bucket)
    assert saved["residual"]["bias"].tolist() == [1.0] * 3
    feedback.load_state_dict(saved)
    assert residual(feedback)["bias"] == [1.0] * 3
    feedback.load_state_dict({})
    pack(bucket, 2.0)
    leave(feedback, bucket)
    assert residual(feedback)["bias"] == [2.0] * 3
    assert saved["residual"]["bias"].tolist() == [1.0] * 3


def test_a_rest_of_another_shape_is_refused() -> None:
    """A rest of another model is broadcast into this one's."""
    feedback = ErrorFeedback()
    feedback.adopt([bucket_of("weight")])
    with pytest.raises(ValueError, match=r"residual of 'weight' has shape \(1, 2\).*\(3, 2\)"):
        feedback.load_state_dict({"residual": {"weight": torch.ones(1, 2)}})


def states(*values: float) -> list[dict[str, dict[str, Tensor]]]:
    return [{"residual": {"bias": torch.full((3,), v)}} for v in values]


def test_own_or_mean() -> None:
    """Another number of ranks takes over more, or less, than was left."""
    given = states(1.0, 2.0, 6.0)
    assert own_or_mean(given, 1, 3)["residual"]["bias"].tolist() == [2.0] * 3
    for world_size in (1, 2, 4):
        for rank in range(world_size):
            folded = own_or_mean(given, rank, world_size)["residual"]["bias"]
            torch.testing.assert_close(folded, torch.full((3,), 3.0))
    missing = [*states(4.0), {}]
    assert own_or_mean(missing, 0, 1)["residual"]["bias"].tolist() == [2.0] * 3
    assert given[0]["residual"]["bias"].tolist() == [1.0] * 3
