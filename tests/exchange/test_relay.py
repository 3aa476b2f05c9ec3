"""A failure here is an all-gather that is sent too early, too late, or beside too many others."""

from __future__ import annotations

import threading
import time

import torch

from lightning_mgwfbp.exchange.relay import Relay


class Message:
    """Done once it is let go."""

    def __init__(self) -> None:
        self.over = threading.Event()

    def wait(self) -> None:
        assert self.over.wait(30)


class Relayed:
    """A relay whose all-gathers need so many reduce-scatters, and how many of them it has sent."""

    def __init__(self, *needed: int) -> None:
        self.sent = 0
        self.all_gathers = [Message() for _ in needed]
        self.relay = Relay(needed, self._send, self._fail, torch.device("cpu"))

    def put(self, done: bool = True) -> Message:
        message = Message()
        if done:
            message.over.set()
        self.relay.put(message)
        return message

    def wait_for(self, sent: int) -> None:
        deadline = time.monotonic() + 30
        while self.sent < sent:
            assert time.monotonic() < deadline
            time.sleep(1e-3)
        self.stays(sent)

    def stays(self, sent: int) -> None:
        time.sleep(0.05)
        assert self.sent == sent

    def _send(self, number: int) -> Message:
        assert number == self.sent
        self.sent += 1
        return self.all_gathers[number]

    def _fail(self, error: BaseException) -> None:
        raise error


def test_a_gap_is_filled_at_once() -> None:
    """The link idles although a piece is reduced."""
    relayed = Relayed(1, 2)
    relayed.put()
    relayed.wait_for(1)
    relayed.put()
    relayed.wait_for(2)
    relayed.relay.stop()


def test_a_piece_waits_for_its_own_reduce_scatter() -> None:
    """Rows that are no sums are sent."""
    relayed = Relayed(2, 1)
    relayed.put()
    relayed.stays(0)
    relayed.put()
    relayed.wait_for(2)
    relayed.relay.stop()


def test_what_is_ready_goes_beside_reduce_scatters_under_way() -> None:
    """The link idles because another rank is behind with its reduce-scatters."""
    relayed = Relayed(1, 2, 3)
    for done in (True, True, False):
        last = relayed.put(done)
    relayed.wait_for(2)
    last.over.set()
    relayed.all_gathers[0].over.set()
    relayed.wait_for(3)
    relayed.relay.stop()


def test_few_are_under_way_at_a_time() -> None:
    """A reduce-scatter finds the link full of all-gathers."""
    relayed = Relayed(1, 2, 3, 4, 5)
    for _ in range(5):
        relayed.put()
    for already_over in range(4):
        relayed.wait_for(2 + already_over)
        relayed.all_gathers[already_over].over.set()
    relayed.relay.stop()
