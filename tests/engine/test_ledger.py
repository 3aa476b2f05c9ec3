"""A failure here is a gradient taken for new that is an average, or the other way round."""

import pytest
import torch
from torch import Tensor, nn

from lightning_mgwfbp.engine.ledger import GradientLedger


class Book:
    """One parameter and its ledger."""

    def __init__(self) -> None:
        self.parameter = nn.Parameter(torch.zeros(1))
        self.ledger = GradientLedger(["weight"], [self.parameter])

    def accumulate(self, value: float) -> None:
        """What autograd and the hook behind it do."""
        new = torch.full((1,), value)
        grad = self.parameter.grad
        self.parameter.grad = new if grad is None else grad + new
        self.ledger.is_new[0] = True

    @property
    def grad(self) -> float | None:
        return None if self.parameter.grad is None else self.parameter.grad.item()


def number(tensor: Tensor | None) -> float | None:
    return None if tensor is None else tensor.item()


def test_take_and_put() -> None:
    """The plain case: what was accumulated leaves, the average comes."""
    book = Book()
    book.accumulate(1.0)
    book.accumulate(2.0)
    assert number(book.ledger.take(0)) == 3
    assert book.grad is None
    assert book.ledger.put(0, torch.tensor([5.0])) is None
    assert (book.grad, book.ledger.is_new[0]) == (5, False)


def test_an_average_is_sent_along_but_is_not_new() -> None:
    """Ranks with nothing new must add the average too, and keep it where nobody has anything."""
    book = Book()
    book.accumulate(1.0)
    book.ledger.take(0)
    book.ledger.put(0, torch.tensor([5.0]))
    assert number(book.ledger.take(0)) == 5
    assert not book.ledger.is_new[0]
    book.ledger.put(0, None)  # used nowhere
    assert book.grad == 5
    assert number(book.ledger.take(0)) == 5
    book.ledger.put(0, torch.tensor([7.0]))  # 5 + what is new on another rank
    assert book.grad == 7


def test_what_is_new_is_taken_with_the_average() -> None:
    """A second backward without zero_grad, on a rank that took part."""
    book = Book()
    book.ledger.put(0, torch.tensor([5.0]))
    book.accumulate(1.0)
    book.accumulate(2.0)
    assert number(book.ledger.take(0)) == 8
    assert book.ledger.is_new[0]
    book.ledger.put(0, torch.tensor([9.0]))
    assert book.grad == 9


def test_late_parts_are_handed_back() -> None:
    """What arrives while a bucket is on its way is overwritten by the average."""
    book = Book()
    book.accumulate(1.0)
    book.ledger.take(0)
    book.accumulate(2.0)
    assert number(book.ledger.put(0, torch.tensor([5.0]))) == 2
    book.ledger.add(0, torch.tensor([0.5]))
    assert book.grad == 5.5
    book.accumulate(1.0)
    assert number(book.ledger.take(0)) == 6.5


def test_zero_grad_forgets_the_average() -> None:
    """An average that the user removed comes back."""
    book = Book()
    book.ledger.put(0, torch.tensor([5.0]))
    book.parameter.grad = None
    book.accumulate(1.0)
    assert number(book.ledger.take(0)) == 1
    book.ledger.put(0, torch.tensor([1.0]))
    assert book.grad == 1


def test_a_sparse_gradient_is_refused() -> None:
    """A sparse gradient crashes further down, without a name."""
    book = Book()
    book.parameter.grad = torch.ones(1).to_sparse()
    book.ledger.is_new[0] = True
    with pytest.raises(TypeError, match=r"'weight' is sparse.*sparse=False"):
        book.ledger.take(0)
