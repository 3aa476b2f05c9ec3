"""A failure here is something that a plain tensor allows and a gradient does not, or that spoils
the next exchange."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.multiprocessing as mp
from torch import Tensor, nn

from lightning_mgwfbp.exchange.buckets import Bucket

LAYOUTS = {
    "matrix": torch.empty(4, 3),
    "scalar": torch.empty(()),
    "channels last": torch.empty(2, 3, 4, 5).contiguous(memory_format=torch.channels_last),
    "complex": torch.empty(3, 2, dtype=torch.complex64),
    "bf16": torch.empty(5, dtype=torch.bfloat16),
    "expanded": torch.empty(3).expand(4, 3),
}


class Step:
    """A bucket of two parameters whose gradients are in `.grad`, and their values."""

    def __init__(self, like: Tensor) -> None:
        self.like = like
        self.bucket = Bucket([like, like])
        self.number = 0

    def gradients(self) -> tuple[list[Tensor], list[Tensor]]:
        """Those of the next step, and what they are."""
        self.number += 1
        generator = torch.Generator().manual_seed(self.number)
        values = [
            torch.randn(self.like.shape, generator=generator).to(self.like.dtype) for _ in range(2)
        ]
        self.bucket.pack(values, [True, True])
        return self.bucket.gradients(), values


def saved(tensor: Tensor) -> int:
    file = io.BytesIO()
    torch.save(tensor, file)
    return file.tell()


def in_parameter(gradient: Tensor) -> None:
    parameter = nn.Parameter(torch.empty_like(gradient))
    parameter.grad = gradient
    assert parameter.grad is not None
    parameter.grad = parameter.grad.clone()


DEEDS: dict[str, Callable[[Tensor], Any]] = {
    "detach_": lambda g: g.detach_(),
    "requires_grad_": lambda g: g.requires_grad_() if g.is_floating_point() else None,
    "in place": lambda g: g.mul_(3).add_(1),
    "cleared": lambda g: g.zero_(),
    "clone": in_parameter,
    "deepcopy": copy.deepcopy,
    "pickle": lambda g: pickle.loads(pickle.dumps(g)),
    "numpy": lambda g: g.numpy() if g.dtype != torch.bfloat16 else None,
    "set_": lambda g: g.set_(torch.ones(2, dtype=g.dtype)),
    "data": lambda g: setattr(g, "data", torch.ones(2, dtype=g.dtype)),
    "share_memory_": lambda g: g.share_memory_(),
    "transposed": lambda g: g.t_() if g.dim() <= 2 else g.transpose_(0, 1),
    "hook": lambda g: setattr(g, "note", "mine"),
}


@pytest.mark.parametrize("like", LAYOUTS.values(), ids=LAYOUTS)
@pytest.mark.parametrize("deed", DEEDS.values(), ids=DEEDS)
def test_whatever_is_done_to_one_the_next_are_right(
    deed: Callable[[Tensor], Any], like: Tensor
) -> None:
    """It raises, changes the other gradient, or the next step's; held or let go."""
    for holds in (False, True):
        step = Step(like)
        held = []
        for _ in range(3):
            (first, second), values = step.gradients()
            assert torch.equal(first, values[0])
            result = deed(first)
            assert torch.equal(second, values[1])
            assert first.grad_fn is None
            assert not hasattr(second, "note")
            if holds:
                held.append((first, first.detach().clone(), second, values[1], result))
        for first, was, second, value, _ in held:
            assert torch.equal(first.detach(), was)
            assert torch.equal(second, value)


def test_versions_are_each_gradients_own() -> None:
    """What is done to one gradient makes another one look as if it had been changed."""
    step = Step(torch.empty(3))
    (first, second), _ = step.gradients()
    before = first._version, second._version
    first.add_(1)
    assert (first._version > before[0], second._version) == (True, before[1])
    assert not first._is_view()


def test_one_gradient_is_saved_without_the_others() -> None:
    """A file has the whole bucket in it."""
    small, large = torch.empty(3), torch.empty(100_000)
    bucket = Bucket([large, small])
    bucket.pack([torch.ones_like(large), torch.ones_like(small)], [True, True])
    assert saved(bucket.gradients()[1]) == saved(torch.ones(3))
    assert bucket.gradients()[1].untyped_storage().nbytes() == small.nbytes


def test_memory_is_taken_anew_only_where_it_is_held() -> None:
    """Each step allocates, or overwrites what somebody looks at."""
    step = Step(torch.empty(4))
    places = []
    for held in (False, True, False, False):
        gradients, _ = step.gradients()
        places.append(step.bucket.buffer.data_ptr())
        view = gradients[0][1:] if held else None
        del gradients
        if held:
            kept = view
    del view
    assert places[0] == places[1] != places[2] == places[3]
    assert kept is not None


def test_an_array_alone_holds_it() -> None:
    """NumPy sees the next step's numbers."""
    step = Step(torch.empty(4))
    gradients, values = step.gradients()
    array = gradients[0].numpy()
    del gradients
    step.gradients()
    assert array.tolist() == values[0].tolist()


def test_it_cannot_grow() -> None:
    """torch says so; a storage that grew would lie where nobody looks."""
    (first, _), _ = Step(torch.empty(4)).gradients()
    with pytest.raises(RuntimeError, match="not resizable"):
        first.resize_(100)


def _double(received: Any, answer: Any) -> None:
    gradient = received.get()
    gradient.mul_(2)
    answer.put(gradient.sum().item())


@pytest.mark.slow
def test_shared_with_another_process() -> None:
    """The other process changes what the next exchange writes, or neither sees the other."""
    context = mp.get_context("spawn")
    there, back = context.Queue(), context.Queue()
    process = context.Process(target=_double, args=(there, back))
    process.start()
    step = Step(torch.empty(4))
    (first, second), values = step.gradients()
    there.put(first)
    total = back.get(timeout=60)
    process.join()
    assert total == pytest.approx(2 * values[0].sum().item(), rel=1e-5)
    assert torch.equal(first, 2 * values[0])
    assert torch.equal(second, values[1])
    (following, _), values = step.gradients()
    assert torch.equal(following, values[0])
    assert not torch.equal(first, values[0])
