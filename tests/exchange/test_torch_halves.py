"""A failure here is a message that is waited for wrongly."""

import pytest

from lightning_mgwfbp.exchange.torch_halves import _Messages


class Message:
    """One that has come; `error` is raised as the wait for it returns."""

    def __init__(self, error: BaseException | None = None) -> None:
        self.error = error
        self.waits = 0

    def wait(self) -> None:
        self.waits += 1
        if self.error is not None:
            raise self.error


def test_what_has_come_is_not_waited_for_again() -> None:
    """After Ctrl-C, closing waits for the timeout, since gloo counts what has come."""
    messages = [Message(), Message(KeyboardInterrupt()), Message()]
    both = _Messages(messages)  # type: ignore[arg-type]
    with pytest.raises(KeyboardInterrupt):
        both.wait()
    both.wait()
    assert [message.waits for message in messages] == [1, 1, 1]


def test_what_has_failed_fails_again() -> None:
    """Who waits second takes rows for received that have not come."""
    messages = [Message(), Message(RuntimeError("the cable was cut")), Message()]
    both = _Messages(messages)  # type: ignore[arg-type]
    for _ in range(2):
        with pytest.raises(RuntimeError, match="the cable was cut"):
            both.wait()
    assert [message.waits for message in messages] == [1, 2, 0]
