"""A failure here is a gradient taken for new that is an average, or the other way round."""

import torch
from torch import Tensor, nn

from lightning_mgwfbp.engine.ledger import GradientLedger


class Book:
    """One parameter and its ledger."""

    def __init__(self, sets_aside: bool = False) -> None:
        self.parameter = nn.Parameter(torch.zeros(1))
        self.ledger = GradientLedger([self.parameter], sets_aside=sets_aside)

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


class AsideBook(Book):
    """The same where averages are set aside; `accumulate` runs the hook before it, too."""

    def __init__(self) -> None:
        super().__init__(sets_aside=True)

    def accumulate(self, value: float) -> None:
        self.ledger.set_aside(0)
        super().accumulate(value)

    def exchange(self, average: float | None) -> float | None:
        """Return what was sent."""
        sent = number(self.ledger.take(0))
        self.ledger.put(0, None if average is None else torch.tensor([average]))
        return sent


def test_averages_are_set_aside() -> None:
    """A rest is kept of what was averaged before, or the average is lost."""
    book = AsideBook()
    book.accumulate(1.0)
    assert book.exchange(5.0) == 1
    book.accumulate(2.0)
    book.accumulate(0.5)  # a micro-batch under no_sync
    assert book.grad == 2.5
    assert book.exchange(7.0) == 2.5
    assert (book.grad, book.ledger.is_new[0]) == (12, False)


def test_what_was_set_aside_comes_back() -> None:
    """A rank that has nothing new loses its average, or sends it."""
    book = AsideBook()
    book.accumulate(1.0)
    book.exchange(5.0)
    assert book.exchange(None) is None  # used nowhere
    assert book.grad == 5
    assert book.exchange(2.0) is None  # used on another rank
    assert book.grad == 7
    assert book.ledger.take(0) is None
    assert book.grad is None


def test_what_was_cleared_does_not_come_back() -> None:
    """zero_grad, before the backward or before the exchange, has no effect."""
    book = AsideBook()
    book.accumulate(1.0)
    book.exchange(5.0)
    book.parameter.grad = None
    book.accumulate(2.0)
    book.exchange(3.0)
    assert book.grad == 3
    book.accumulate(1.0)
    book.parameter.grad = None  # what was new, with the average that is set aside
    assert book.exchange(None) is None
    assert book.grad is None
    book.accumulate(1.0)
    book.exchange(5.0)
    book.accumulate(1.0)
    book.parameter.grad = None  # and then another backward
    book.accumulate(4.0)
    assert book.exchange(2.0) == 4
    assert book.grad == 2
    assert book.parameter.grad is not None
    book.parameter.grad.zero_()
    book.accumulate(1.0)
    book.exchange(6.0)
    assert book.grad == 6


def test_late_parts_leave_the_average_aside() -> None:
    """A parameter that fires on its way loses the average, or takes the late part for it."""
    book = AsideBook()
    for fired_before in (True, False):
        book.parameter.grad = None
        book.accumulate(1.0)
        book.exchange(5.0)
        if fired_before:
            book.accumulate(2.0)
        assert number(book.ledger.take(0)) == (2 if fired_before else None)
        book.accumulate(0.25)
        book.accumulate(0.25)
        assert number(book.ledger.put(0, torch.tensor([3.0]))) == 0.5
        assert book.grad == 8
        book.ledger.add(0, torch.tensor([0.125]))
        assert (book.grad, book.ledger.is_new[0]) == (8.125, False)


def test_sparse_and_strided_averages_are_added() -> None:
    """A sparse average cannot be the left side of a sum with a strided one."""
    one = torch.ones(1)
    for aside, average in ((one, one.to_sparse()), (one.to_sparse(), one.to_sparse()), (one, one)):
        book = AsideBook()
        book.parameter.grad = aside.clone()
        book.ledger.set_aside(0)
        book.parameter.grad, book.ledger.is_new[0] = average.clone(), True
        book.ledger.take(0)
        book.ledger.put(0, average.clone())
        assert book.parameter.grad is not None
        assert book.parameter.grad.to_dense().item() == 2


def test_what_a_rank_has_weighs_by_how_many_contribute() -> None:
    """An average over those that contribute: new parts, late ones, and averages sent along."""
    for weight in (2.0, 0.0):
        book = Book()
        book.ledger.weight = weight
        book.accumulate(3.0)
        assert number(book.ledger.take(0)) == 3 * weight
        book.accumulate(4.0)
        assert number(book.ledger.put(0, torch.tensor([5.0]))) == 4 * weight
        assert number(book.ledger.take(0)) == 5 * weight
        book.ledger.put(0, None)
        assert book.grad == 5
