"""A failure here is memory that two messages receive in, or that is kept for ever."""

import torch

from lightning_mgwfbp.exchange.scratch import Scratch


def test_what_is_out_is_nobody_elses() -> None:
    """Two messages are received in one place."""
    scratch = Scratch()
    like = torch.empty(4, 5)
    one, two = scratch.take(like), scratch.take(like)
    assert one.data_ptr() != two.data_ptr()
    scratch.give_back(one)
    assert scratch.take(like).data_ptr() == one.data_ptr()


def test_memory_is_used_again_for_any_shape_and_dtype_of_its_size() -> None:
    """Every message costs new pages, or comes out in the shape of the one before."""
    scratch = Scratch()
    like = [
        torch.empty(4, 6),
        torch.empty(3, 4, dtype=torch.float64),
        torch.empty(8, 6).t()[:, ::2],
    ]
    places = set()
    for each in like:
        taken = scratch.take(each)
        assert (taken.shape, taken.dtype) == (each.shape, each.dtype)
        assert taken.is_contiguous()
        places.add(taken.data_ptr())
        scratch.give_back(taken)
    assert len(places) == 1


def test_no_more_is_kept_than_was_once_out() -> None:
    """Sizes of an earlier plan stay in memory for ever."""
    scratch = Scratch()
    for numel in (100, 70, 30):
        taken = [scratch.take(torch.empty(numel)) for _ in range(10)]
        for each in taken:
            scratch.give_back(each)
        kept = [each.nbytes for each in scratch._kept]
        assert sum(kept) <= 4 * 100 * 10
        assert kept.count(4 * numel) == 10
