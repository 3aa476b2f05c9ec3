"""A failure here is a difference between the ranks that goes unseen, or is misnamed."""

from collections.abc import Callable

import pytest
import torch
from loopback import on_ranks
from torch import nn

from lightning_mgwfbp.engine.agreement import parameter_facts, require_agreement
from lightning_mgwfbp.exchange.transport import LoopbackTransport


def message(transport: LoopbackTransport, facts: Callable[[int], dict[str, str]]) -> str:
    try:
        require_agreement(transport, facts(transport.rank))
    except RuntimeError as error:
        return str(error)
    return ""


def facts_of(*layers: nn.Module, **options: str) -> dict[str, str]:
    return {**options, **parameter_facts(list(nn.Sequential(*layers).named_parameters()))}


def frozen() -> nn.Module:
    module = nn.Linear(2, 3)
    module.bias.requires_grad_(False)
    return module


def channels_last() -> nn.Module:
    return nn.Conv2d(2, 3, 2).to(memory_format=torch.channels_last)  # type: ignore[call-overload]


USUAL = facts_of(nn.Linear(2, 3), planner="'auto'")
DIFFERENT = {
    "shape": (facts_of(nn.Linear(4, 3), planner="'auto'"), ["'0.weight'", "(3, 2)", "(3, 4)"]),
    "dtype": (facts_of(nn.Linear(2, 3).half(), planner="'auto'"), ["'0.weight'", "float16"]),
    "frozen": (facts_of(frozen(), planner="'auto'"), ["'0.bias'", "requires_grad=False"]),
    "missing": (
        facts_of(nn.Linear(2, 3, bias=False), planner="'auto'"),
        ["the number of parameters", "is 2 on", "1 on"],
    ),
    "option": (facts_of(nn.Linear(2, 3), planner="'wfbp'"), ["planner", "'auto'", "'wfbp'"]),
    "unknown": ({**USUAL, "more": "x"}, ["more is missing on rank 0 and x on"]),
}


@pytest.mark.parametrize(("other", "named"), DIFFERENT.values(), ids=DIFFERENT)
def test_all_ranks_raise_the_same_text(other: dict[str, str], named: list[str]) -> None:
    """A rank that goes on alone, or another difference than the first is named."""
    for odd_rank in (1, 2):
        texts = on_ranks(
            message, lambda r, odd=odd_rank: other if r == odd else USUAL, world_size=3
        )
        assert len(set(texts)) == 1
        assert all(part in texts[0] for part in [*named, f"on rank {odd_rank}", "same options"])
    texts = on_ranks(message, lambda rank: USUAL if rank else other)
    assert texts[0] == texts[1] != ""


def test_order_counts() -> None:
    """Parameters of the same shape, in another order on one rank, are averaged with each other."""
    named = list(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)).named_parameters())
    swapped = [named[2], named[1], named[0], named[3]]
    (text, _) = on_ranks(message, lambda rank: parameter_facts(swapped if rank else named))
    assert "parameter '0.weight' is number 0" in text
    assert "number 2" in text


def test_strides_count() -> None:
    """A channels_last model on one rank: gradients would be averaged in another order."""
    (text, _) = on_ranks(
        message, lambda rank: facts_of(channels_last() if rank else nn.Conv2d(2, 3, 2))
    )
    assert "strides (8, 4, 2, 1)" in text
    assert "strides (8, 1, 4, 2)" in text


@pytest.mark.parametrize("world_size", [1, 3])
def test_equal_ranks_hear_nothing(world_size: int) -> None:
    """A false alarm."""
    texts = on_ranks(message, lambda _: facts_of(nn.Linear(2, 3), a="1"), world_size=world_size)
    assert texts == [""] * world_size
