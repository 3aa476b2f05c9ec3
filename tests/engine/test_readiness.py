"""A failure here is a bucket that is sent too early, or held back for ever."""

from lightning_mgwfbp.engine.readiness import Readiness

BUCKETS = [[0, 1], [2]]


def completes(readiness: Readiness, *fired: int) -> list[bool]:
    """Whether each gradient of a backward completes its bucket."""
    readiness.begin(BUCKETS)
    completed = [readiness.fire(i, int(i == 2)) for i in fired]
    readiness.end()
    return completed


def test_the_last_of_those_expected_completes_a_bucket() -> None:
    """A part of a bucket is sent, or all of it only when backward has ended."""
    readiness = Readiness(3)
    assert completes(readiness, 0, 1, 2) == [False] * 3  # nothing is known yet
    assert completes(readiness, 1, 2, 0) == [False, True, True]


def test_what_never_fires_holds_nobody_up() -> None:
    """One unused parameter costs all overlap."""
    readiness = Readiness(3)
    completes(readiness, 1)
    assert completes(readiness, 1) == [True]
    readiness.begin(BUCKETS)
    assert readiness.is_complete(1)


def test_what_fires_twice_is_not_sent_half_done() -> None:
    """A shared block's gradient is sent before its other part has come."""
    readiness = Readiness(3)
    completes(readiness, 0, 0, 1)
    assert completes(readiness, 0, 1, 0) == [False, False, True]
    assert completes(readiness, 0, 1) == [False, False]  # it may come yet
    readiness.forget()
    assert completes(readiness, 0, 1) == [False, False]
    assert completes(readiness, 0, 1) == [False, True]
