"""When the next forward needs each parameter: what an update may still take after backward."""

from collections.abc import Mapping
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from lightning_mgwfbp.plan.profile import ModelProfile


def forward_split(profile: ModelProfile) -> list[float]:
    """Seconds from each parameter's first use in forward to that of the next one used.

    As measured; where that is not known of all, forward is split like backward. In backward order.
    """
    measured = [layer.forward_seconds for layer in profile.layers]
    known = [seconds for seconds in measured if seconds is not None]
    if len(known) == len(measured):
        return known
    if profile.backward_seconds == 0:
        return [profile.forward_seconds / len(measured)] * len(measured)
    ratio = profile.forward_seconds / profile.backward_seconds
    return [layer.backward_seconds * ratio for layer in profile.layers]


def forward_tails(profile: ModelProfile) -> NDArray[np.float64]:
    """Seconds from each parameter's first use to the end of forward: (layers,), backward order.

    Forward uses the parameters in the order of `forward_index`, those of the same index at once;
    where that is not known of all, in the reverse of backward's order.
    """
    measured = [layer.forward_index for layer in profile.layers]
    backwards = range(len(measured), 0, -1)
    indices = np.array(backwards if None in measured else measured)  # (layers,)
    by_index = np.argsort(indices, kind="stable")
    split = np.array(forward_split(profile))[by_index]
    to_the_end = np.cumsum(split[::-1])[::-1]
    first = np.searchsorted(indices[by_index], indices)  # of those with the same index
    return to_the_end[first]


def with_forward_times(
    profile: ModelProfile, first_use_seconds: Mapping[str, float], forward_seconds: float
) -> ModelProfile:
    """`profile` with measured times of forward.

    Args:
        profile: whose forward it is.
        first_use_seconds: from the beginning of forward to each parameter's first use, by name;
            one that is absent may be used at once.
        forward_seconds: from the beginning of forward to its end. No parameter is used later than
            that, though medians of noisy times may say so.
    """
    uses = np.array([first_use_seconds.get(name, 0.0) for name in profile.names])  # (layers,)
    uses = np.minimum(uses, forward_seconds)
    by_use = np.argsort(uses, kind="stable")
    until_next = np.diff(uses[by_use], append=forward_seconds)
    layers = list(profile.layers)
    for index, layer in enumerate(by_use.tolist()):
        layers[layer] = replace(
            layers[layer], forward_seconds=float(until_next[index]), forward_index=index
        )
    return replace(profile, layers=tuple(layers), forward_seconds=forward_seconds)
