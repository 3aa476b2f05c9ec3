"""A failure here means: a tensor that ranks cannot send is not named, or only on one rank."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from ranks import train_ranks
from torch import nn
from training import Toy, ToyData, assert_same, make_strategy, quiet_trainer

from lightning_mgwfbp import MergedOptimizer
from lightning_mgwfbp.exchange.transport import LoopbackTransport


class Odd(Toy):
    def __init__(self, add: Callable[[nn.Module], None]) -> None:
        super().__init__()
        add(self)


def _sparse(module: nn.Module) -> None:
    module.register_buffer("graph", torch.eye(3).to_sparse())


def _rows(module: nn.Module) -> None:
    module.register_buffer("graph", torch.eye(3).to_sparse_csr())


def _lazy(module: nn.Module) -> None:
    module.late = nn.LazyLinear(3)


def _lazy_buffer(module: nn.Module) -> None:
    module.late = nn.LazyBatchNorm1d(affine=False)


def _nothing(module: nn.Module) -> None:
    pass


def _expanded(module: nn.Module) -> None:
    module.register_buffer("scale", torch.randn(1).expand(3))


def _ignored(module: nn.Module) -> None:
    _sparse(module)
    module._ddp_params_and_buffers_to_ignore = ["graph"]  # type: ignore[assignment]


def fit(rank: int, adds: list[Callable[[nn.Module], None]], seed: bool = False) -> Any:
    """The error's text, or what each rank ends with."""
    torch.manual_seed(rank if seed else 0)
    module = Odd(adds[rank])
    trainer = quiet_trainer(strategy=make_strategy("mgwfbp", warmup_steps=1), max_steps=3)
    try:
        trainer.fit(module, ToyData())
    except (ValueError, RuntimeError) as error:
        return str(error)
    return {name: value.clone() for name, value in module.state_dict().items()}


REFUSED = {
    "sparse": (_sparse, "Buffer 'graph' is of layout torch.sparse_coo, and cannot", "to_dense"),
    "rows": (_rows, "Buffer 'graph' is of layout torch.sparse_csr, and cannot", "_to_ignore"),
    "lazy": (_lazy, "Parameter 'late.weight' is not initialized, and cannot", "Run a batch"),
    "lazy buffer": (_lazy_buffer, "Buffer 'late.running_mean' is not initial", "Run a batch"),
}


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:Lazy modules are a new feature", "ignore:Sparse CSR tensor")
@pytest.mark.parametrize("case", REFUSED)
def test_all_ranks_name_it(case: str) -> None:
    """torch's own error, on one rank, which names nothing; or a rank that waits."""
    add, words, way_out = REFUSED[case]
    for error in train_ranks(fit, [add, add]):
        assert error.startswith(words)
        assert way_out in error
    for error in train_ranks(fit, [_nothing, add]):
        assert error.startswith("The ranks disagree: ")


@pytest.mark.slow
def test_one_rank_alone_has_it_otherwise() -> None:
    """A message of a rank is longer than the others'."""
    for error in train_ranks(fit, [_expanded, _dense]):
        assert "buffer 'scale' is shape (3,) expanded from ()" in error


def _dense(module: nn.Module) -> None:
    module.register_buffer("scale", torch.randn(3))


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:Sparse invariant checks")
def test_what_can_be_exchanged_or_need_not() -> None:
    """An expanded buffer is not rank 0's everywhere, or an ignored one is refused."""
    first, second = train_ranks(fit, [_expanded, _expanded], True)
    assert_same(first, second)
    assert (first["scale"] == first["scale"][0]).all()
    results = train_ranks(fit, [_ignored, _ignored])
    assert torch.equal(results[0]["head.weight"], results[1]["head.weight"])


@pytest.mark.filterwarnings("ignore:Lazy modules are a new feature")
def test_merged_optimizer_names_it() -> None:
    """A plain loop ends in torch's error, which names nothing."""
    module = nn.LazyLinear(3)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    with pytest.raises(ValueError, match=r"Parameter 'weight' is not initialized.* Run a batch"):
        MergedOptimizer(optimizer, module.named_parameters(), transport=LoopbackTransport.solo())


class Reassigning(Toy):
    """Puts another buffer in the place of its own in the sixth step, on the ranks given."""

    def __init__(self, buffer: torch.Tensor, ranks: tuple[int, ...]) -> None:
        super().__init__()
        self.register_buffer("bank", torch.zeros(3))
        self.other, self.ranks = [buffer], ranks

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if batch_idx == 5 and self.global_rank in self.ranks:
            self.bank = self.other[0]
        return super().training_step(batch, batch_idx)


def _reassign(rank: int, buffer: torch.Tensor, ranks: tuple[int, ...]) -> str:
    trainer = quiet_trainer(strategy=make_strategy("mgwfbp", warmup_steps=2), max_steps=9)
    try:
        trainer.fit(Reassigning(buffer, ranks), ToyData())
    except (ValueError, RuntimeError) as error:
        return str(error)
    return ""


@pytest.mark.slow
def test_reassigned_in_the_middle_of_training() -> None:
    """A rank fills its buffer with a part of another rank's, or is killed without a word."""
    for buffer in (torch.ones(5), torch.ones(1).expand(3), torch.eye(3).to_sparse()):
        for ranks in ((0,), (1,)):
            for error in train_ranks(_reassign, buffer, ranks):
                assert error.startswith("The ranks disagree: buffer 'bank' is ")
    assert train_ranks(_reassign, torch.ones(5), (0, 1)) == ["", ""]
    for error in train_ranks(_reassign, torch.eye(3).to_sparse(), (0, 1)):
        assert error.startswith("Buffer 'bank' is of layout torch.sparse_coo")
