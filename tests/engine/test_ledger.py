"""A failure here is a gradient taken for new that is an average, or the other way round."""

import pytest
import torch
from torch import Tensor, nn

from lightning_mgwfbp.engine.ledger import GradientLedger


class Book:
    """One parameter and its ledger."""

    def __init__(self, sets_aside: bool = False) -> None:
        self.parameter = nn.Parameter(torch.zeros(1))
        self.ledger = GradientLedger([self.parameter], sets_aside=sets_aside)

    def accumulate(self, value: float) -> None:
        """What autograd does."""
        (self.parameter * value).sum().backward()

    def exchange(self, average: float | None, *, kept: bool = True) -> tuple[float | None, bool]:
        """Return what was sent, and whether it was new."""
        sent, new = self.ledger.take(0)
        assert self.grad is None
        self.ledger.put(0, None if average is None else torch.tensor([average]))
        self.ledger.add_back(lambda _: kept)
        return number(sent), new

    @property
    def grad(self) -> float | None:
        return number(self.parameter.grad)


def number(tensor: Tensor | None) -> float | None:
    return None if tensor is None else tensor.item()


def test_take_and_put() -> None:
    """The plain case: what was accumulated leaves, the average comes."""
    book = Book()
    assert book.exchange(None) == (None, False)
    book.accumulate(1.0)
    book.accumulate(2.0)
    assert book.ledger.is_new(0)
    assert book.exchange(5.0) == (3, True)
    assert book.grad == 5
    assert not book.ledger.is_new(0)


def test_an_average_is_sent_along_but_is_not_new() -> None:
    """Ranks with nothing new must add the average too, and keep it where nobody has anything."""
    book = Book()
    book.accumulate(1.0)
    book.exchange(5.0)
    assert book.exchange(None) == (5, False)  # used nowhere
    assert book.grad == 5
    assert book.exchange(7.0) == (5, False)  # 5 + what is new on another rank
    assert book.grad == 7


@pytest.mark.parametrize("sets_aside", [False, True])
def test_what_is_written_to_is_new(sets_aside: bool) -> None:
    """A gradient that the user has changed, replaced or set is taken for an average, and lost."""
    book = Book(sets_aside)
    book.accumulate(1.0)
    book.exchange(5.0)
    book.accumulate(1.0)
    book.accumulate(2.0)
    assert book.exchange(9.0) == (8, True)
    assert book.grad == 9
    assert book.parameter.grad is not None
    book.parameter.grad.mul_(2)
    assert book.exchange(3.0) == (18, True)
    book.parameter.grad = book.parameter.grad.clone()
    assert book.exchange(4.0) == (3, True)
    book.parameter.grad = None
    book.parameter.grad = torch.ones(1)  # of torch.autograd.grad, or of a rule of the user's own
    assert book.exchange(2.0) == (1, True)


def test_what_was_put_back_is_an_average_still() -> None:
    """A picture of gradients, taken and cleared between two steps, makes averages new again."""
    book = Book()
    book.accumulate(1.0)
    book.exchange(5.0)
    kept, book.parameter.grad = book.parameter.grad, None
    book.accumulate(3.0)
    assert book.grad == 3
    book.parameter.grad = kept
    assert not book.ledger.is_new(0)


def test_what_the_user_clears_is_cleared() -> None:
    """An average, or what another backward has left, that the user removed comes back."""
    for sets_aside in (False, True):
        book = Book(sets_aside)
        book.accumulate(1.0)
        book.exchange(5.0)
        book.parameter.grad = None
        book.ledger.set_averages_aside()
        book.accumulate(1.0)
        assert book.exchange(1.0) == (1, True)
        assert book.grad == 1
        assert book.parameter.grad is not None
        book.parameter.grad.zero_()
        book.accumulate(3.0)
        assert book.exchange(6.0) == (3, True)
        assert book.grad == 6


def test_late_parts() -> None:
    """What arrives while a bucket is on its way is overwritten by the average."""
    book = Book()
    book.accumulate(1.0)
    book.ledger.take(0)
    assert book.ledger.take_late(0) is None
    book.accumulate(2.0)
    assert number(book.ledger.take_late(0)) == 2
    assert book.grad is None
    book.ledger.put(0, torch.tensor([5.0]))
    book.ledger.add(0, torch.tensor([0.5]))
    assert book.grad == 5.5
    assert not book.ledger.is_new(0)
    book.accumulate(1.0)
    assert number(book.ledger.take(0)[0]) == 6.5


def test_averages_are_set_aside() -> None:
    """A residual is kept of what was averaged before, or the average is lost."""
    book = Book(sets_aside=True)
    book.accumulate(1.0)
    book.exchange(5.0)
    book.ledger.set_averages_aside()
    book.accumulate(2.0)
    book.accumulate(0.5)
    assert book.grad == 2.5
    assert book.exchange(7.0) == (2.5, True)
    assert book.grad == 12
    assert not book.ledger.is_new(0)


def test_what_was_set_aside_comes_back() -> None:
    """A rank that has nothing new loses its average, or sends it."""
    book = Book(sets_aside=True)
    book.accumulate(1.0)
    book.exchange(5.0)
    for said in (True, False):  # whether backward was said to begin
        if said:
            book.ledger.set_averages_aside()
        assert book.exchange(None) == (None, False)  # used nowhere
        assert book.grad == 5
    assert book.exchange(2.0) == (None, False)  # used on another rank
    assert book.grad == 7
    assert number(book.ledger.take(0)[0]) is None


def test_a_backward_that_fails_leaves_what_was_there() -> None:
    """Who catches the error finds no gradient, or the average in the place of a new one."""
    book = Book(sets_aside=True)
    book.accumulate(1.0)
    book.exchange(5.0)
    book.ledger.set_averages_aside()
    book.ledger.put_back()
    assert book.grad == 5
    assert not book.ledger.is_new(0)


def test_what_other_ranks_have_not_aside_is_sent_along() -> None:
    """Ranks differ by the average that one has added again, and the other has sent."""
    book = Book(sets_aside=True)
    book.accumulate(1.0)
    book.exchange(5.0)
    book.ledger.weight = 2.0
    assert not book.ledger.has_asides
    book.ledger.take(0)
    assert book.ledger.has_asides
    book.ledger.put(0, torch.tensor([3.0]))
    assert {i: aside.item() for i, aside in book.ledger.asides().items()} == {0: 10}
    book.ledger.add_back(lambda _: False)
    assert not book.ledger.has_asides
    book.ledger.add(0, torch.tensor([2.5]))
    assert book.grad == 5.5


def test_sparse_and_strided_averages_are_added() -> None:
    """A sparse average cannot be the left side of a sum with a strided one."""
    one = torch.ones(1)
    for aside, average in ((one, one.to_sparse()), (one.to_sparse(), one.to_sparse()), (one, one)):
        book = Book(sets_aside=True)
        book.ledger.put(0, aside.clone())
        book.ledger.set_averages_aside()
        book.parameter.grad = average.clone()
        book.ledger.take(0)
        book.ledger.put(0, average.clone())
        book.ledger.add_back(lambda _: True)
        assert book.parameter.grad is not None
        assert book.parameter.grad.to_dense().item() == 2


def test_what_a_rank_has_weighs_by_how_many_contribute() -> None:
    """An average over those that contribute: new parts, late ones, and averages sent along."""
    for weight in (2.0, 0.0):
        book = Book()
        book.ledger.weight = weight
        book.accumulate(3.0)
        assert number(book.ledger.take(0)[0]) == 3 * weight
        book.accumulate(4.0)
        assert number(book.ledger.take_late(0)) == 4 * weight
        book.ledger.put(0, torch.tensor([5.0]))
        assert number(book.ledger.take(0)[0]) == 5 * weight
        book.ledger.put(0, None)
        assert book.grad == 5
