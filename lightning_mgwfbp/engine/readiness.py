"""`Readiness`: which buckets have all the gradients that this backward will give them."""

from __future__ import annotations

from collections.abc import Sequence


class Readiness:
    """Counts gradients as they come.

    How often a parameter fires in one backward is learnt: the most often it has so far. So one that
    never fires holds nobody up, and one that fires twice is not sent half-done.

    Args:
        count: of parameters.
    """

    def __init__(self, count: int) -> None:
        self._fired = [0] * count  # since backward began
        self._expected = [0] * count
        self._missing: list[int] = []  # parameters of each bucket

    def forget(self) -> None:
        """Learn anew, lest one unusual backward hold buckets back for ever."""
        self._expected = [0] * len(self._expected)

    def begin(self, buckets: Sequence[Sequence[int]]) -> None:
        """Begin a backward.

        Args:
            buckets: the parameters of each that can have a gradient.
        """
        self._missing = [sum(1 for i in members if self._expected[i]) for members in buckets]

    def begin_again(self, buckets: Sequence[Sequence[int]]) -> None:
        """Begin a backward in the place of one that has failed, of which nothing is learnt."""
        self._fired = [0] * len(self._fired)
        self.begin(buckets)

    def fire(self, parameter: int, bucket: int) -> bool:
        """Count a gradient of a parameter in this bucket; return whether that completes it."""
        self._fired[parameter] += 1
        if self._fired[parameter] != self._expected[parameter]:
            return False
        self._missing[bucket] -= 1
        return self.is_complete(bucket)

    def is_complete(self, bucket: int) -> bool:
        """Whether all that is expected has come."""
        return not self._missing[bucket]

    def end(self) -> None:
        """End a backward, and learn from it."""
        self._expected = list(map(max, self._expected, self._fired))
        self._fired = [0] * len(self._fired)
