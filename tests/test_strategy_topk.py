"""A failure here means: a compressor does not train inside Lightning as its paper has it."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from ranks import train_ranks
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset
from training import (
    Books,
    Toy,
    ToyData,
    assert_same,
    make_strategy,
    quiet_trainer,
    sparse,
    toy,
    train,
)

from lightning_mgwfbp import PowerSGD, Quantize8, RandomK, TopK
from lightning_mgwfbp.exchange.compressors import Compressor

COMPRESSORS = {
    "topk": TopK(0.1, dense_below_numel=0),
    "randomk": RandomK(0.1, dense_below_numel=0),
    "int8": Quantize8(dense_below_numel=0),
    "powersgd": PowerSGD(rank=2, dense_below_numel=0),
}
each = pytest.mark.parametrize("compressor", COMPRESSORS.values(), ids=COMPRESSORS)


def _train(rank: int, strategy: str, kwargs: dict[str, Any]) -> Any:
    return train(rank, strategy, **kwargs)


@pytest.mark.slow
@each
@pytest.mark.parametrize("model", ["toy", "digits"])
def test_compressors_train(compressor: Any, model: str) -> None:
    """The same weights on all ranks, a lower loss, and gradients that are not DDP's."""
    kwargs = {"model": model, "strategy_kwargs": sparse(compressor)}
    first, second = train_ranks(_train, "mgwfbp", kwargs)
    parameters = first["gradients"][0]
    for name in parameters:
        assert torch.equal(first["state"][name], second["state"][name]), name
    early, late = (
        sum(float(r["losses"][i]) for r in (first, second) for i in batches)
        for batches in (range(5), range(-5, 0))
    )
    assert late < early
    (exact, _) = train_ranks(_train, "ddp", {"model": model, "steps": 1})
    assert any(not torch.equal(parameters[n], g) for n, g in exact["gradients"][0].items())
    assert 1.0 not in first["plan"].densities  # no group is cheaper whole


@pytest.mark.slow
@pytest.mark.parametrize(
    ("strategy", "compressor"),
    [("mgwfbp_topk", None), ("mgwfbp", "topk"), ("mgwfbp", "randomk"), ("mgwfbp", "int8")],
)
def test_names_of_compressors(strategy: str, compressor: str | None) -> None:
    """The strategy's registered names and the compressors' own, at their defaults."""
    kwargs = sparse(compressor) if compressor else sparse("topk")
    first, second = train_ranks(_train, strategy, {"model": "digits", "strategy_kwargs": kwargs})
    assert torch.equal(first["state"]["network.6.weight"], second["state"]["network.6.weight"])
    average = first["gradients"][-1]["network.3.0.weight"]  # the one that is not small
    if compressor == "int8":
        assert average.count_nonzero() > average.numel() / 2
    else:
        k = round(0.01 * average.numel())
        assert k <= average.count_nonzero() <= 2 * k


@pytest.mark.slow
@pytest.mark.parametrize("compressor", [TopK(1.0, dense_below_numel=0), RandomK(1.0)])
@pytest.mark.parametrize(
    "trainer_kwargs",
    [{}, {"accumulate_grad_batches": 2}, {"gradient_clip_val": 0.05}],
    ids=["plain", "accumulate", "clip"],
)
def test_sending_everything_is_ddp(compressor: Any, trainer_kwargs: dict[str, Any]) -> None:
    """density=1.0: bit for bit, as without a compressor."""
    kwargs = {"model": "digits", "steps": 6, **trainer_kwargs}
    dense = {"planner": "wfbp", "warmup_steps": 3}
    first, second = train_ranks(
        _train, "mgwfbp", {"strategy_kwargs": {"compressor": compressor, **dense}, **kwargs}
    )
    ddp, other_ddp = train_ranks(_train, "ddp", kwargs)
    assert_same(first["state"], ddp["state"])
    assert_same(second["state"], other_ddp["state"])  # batch statistics are each rank's own


class _TwoBackwards(Toy):
    """Manual optimization: the second backward of a step adds to the averages of the first.

    Some steps have one only, some none.
    """

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: list[Tensor], batch_idx: int) -> None:  # type: ignore[override]
        optimizer = self.optimizers()
        for part in batch[0].chunk(2)[: batch_idx % 3]:
            self.manual_backward(self.loss([part], batch_idx))
        optimizer.step()
        optimizer.zero_grad()


def _differs(batch_idx: int, rank: int) -> bool:
    return (batch_idx + rank) % 3 != 0


MODULES = {"plain": Toy, "two backwards": _TwoBackwards, "unused": lambda: Toy(use=_differs)}


def _keep_books(
    rank: int, module: str, strategy_kwargs: dict[str, Any], kwargs: dict[str, Any]
) -> Books:
    pl.seed_everything(7, verbose=False)
    books = Books()
    trainer = quiet_trainer(
        strategy=make_strategy("mgwfbp", **strategy_kwargs),
        max_epochs=1,
        limit_train_batches=24,
        precision="64-true",
        callbacks=[books],
        **kwargs,
    )
    trainer.fit(MODULES[module](), ToyData())
    return books


def _assert_nothing_is_lost(ranks: list[Books]) -> None:
    """The sum of what the ranks put in is what they received together, and what they have left."""
    for name, received in ranks[0].received.items():
        assert torch.equal(received, ranks[1].received[name]), name
        given = sum(books.given[name] for books in ranks)
        left = sum(books.left.get(name, torch.zeros_like(received)) for books in ranks)
        torch.testing.assert_close(2 * received + left, given, rtol=1e-12, atol=1e-12)
    assert any(left.count_nonzero() > left.numel() / 4 for left in ranks[0].left.values())


@pytest.mark.slow
@each
@pytest.mark.parametrize(
    ("module", "trainer_kwargs"),
    [
        ("plain", {"accumulate_grad_batches": 3}),
        ("two backwards", {}),
        ("unused", {"accumulate_grad_batches": 2}),
    ],
)
def test_every_gradient_enters_once(
    compressor: Any, module: str, trainer_kwargs: dict[str, Any]
) -> None:
    """Conservation through accumulation, several backwards in a step, unused parameters."""
    _assert_nothing_is_lost(train_ranks(_keep_books, module, sparse(compressor), trainer_kwargs))


@pytest.mark.parametrize(
    "trainer_kwargs",
    [
        {"gradient_clip_val": 0.01},
        {"gradient_clip_val": 0.003, "gradient_clip_algorithm": "value"},
    ],
    ids=["norm", "value"],
)
def test_clipping_is_of_averages(trainer_kwargs: dict[str, Any]) -> None:
    """Trainer(gradient_clip_val=...) changes neither what is sent nor what is left."""
    compressor = sparse(COMPRESSORS["topk"])
    _assert_nothing_is_lost(train_ranks(_keep_books, "plain", compressor, trainer_kwargs))


def test_replanning_keeps_what_is_left() -> None:
    """replan_every_n_steps: rests move to the buckets of the new plan, several times."""
    kwargs = sparse(TopK(0.1, dense_below_numel=0), replan_every_n_steps=4, planner="auto")
    _assert_nothing_is_lost(train_ranks(_keep_books, "unused", kwargs, {}))


def _densities(rank: int, compressor: Compressor) -> dict[int, set[int]]:
    """How many numbers of `side.weight`'s average are not zero, by epoch."""
    seen: dict[int, set[int]] = {}

    class Spy(pl.Callback):
        def on_before_optimizer_step(self, trainer: Any, pl_module: Any, _: Any) -> None:
            count = int(pl_module.side.weight.grad.count_nonzero())
            seen.setdefault(trainer.current_epoch, set()).add(count)

    module, data = toy()
    strategy = make_strategy("mgwfbp", **sparse(compressor))
    trainer = quiet_trainer(
        strategy=strategy, max_epochs=4, limit_train_batches=4, callbacks=[Spy()]
    )
    trainer.fit(module, data)
    return seen


def _halves(epoch: int) -> float:
    return 0.5 ** (epoch + 1)


@pytest.mark.parametrize("schedule", [[0.5, 0.25, 0.125], _halves])
def test_density_follows_the_epoch(schedule: Any) -> None:
    """Schedules: each epoch's density reaches the exchange, within it and after its end."""
    compressor = RandomK(1 / 16, density_schedule=schedule, dense_below_numel=0)
    for seen in train_ranks(_densities, compressor):
        # of 256, once the warm-up has ended, in which it shared its message with other tensors
        assert [seen[epoch] for epoch in (1, 2, 3)] == [{64}, {32}, {16}]


def _clip_locally(rank: int) -> tuple[dict[str, Tensor], list[str]]:
    said: list[str] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("lightning_mgwfbp.fit_session.rank_zero_info", said.append)
        compressor = TopK(0.1, local_clip_norm=0.05, dense_below_numel=0)
        result = train(rank, "mgwfbp", strategy_kwargs=sparse(compressor), steps=8)
    norms = [torch.stack([g.norm() for g in r.values()]).norm() for r in result["gradients"]]
    assert max(norms) < 0.1  # without it they are up to 0.6
    return result["state"], said


def test_local_clipping_trains_and_says_so_once() -> None:
    """local_clip_norm: an exchange that begins after backward."""
    (state, said), (other, _) = train_ranks(_clip_locally)
    assert_same(state, other)
    assert len([line for line in said if "local_clip_norm" in line]) == 1


class _Words(pl.LightningModule):
    """An embedding, of whose rows a batch touches few, and a layer."""

    def __init__(self, is_sparse: bool) -> None:
        super().__init__()
        self.words = nn.Embedding(600, 8, sparse=is_sparse)
        self.head = nn.Linear(8, 4)

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        return self.head(self.words(batch[0])).square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.5)


def _embed(rank: int, strategy: str, is_sparse: bool, strategy_kwargs: Any) -> dict[str, Tensor]:
    pl.seed_everything(7, verbose=False)
    module = _Words(is_sparse)
    numbers = torch.randint(600, (256, 5), generator=torch.Generator().manual_seed(3))
    loader = DataLoader(TensorDataset(numbers), batch_size=4)
    chosen = make_strategy(strategy, **strategy_kwargs)
    quiet_trainer(strategy=chosen, max_steps=12).fit(module, loader)
    return module.state_dict()


@pytest.mark.parametrize("strategy", ["mgwfbp", "mgwfbp_topk"])
@pytest.mark.parametrize("planner", ["wfbp", "single"])
def test_sparse_embeddings(strategy: str, planner: str) -> None:
    """Rows travel exactly, beside whatever compressor; more of them than one message takes."""
    kwargs = {"planner": planner, "warmup_steps": 3}
    dense, _ = train_ranks(_embed, "mgwfbp", False, kwargs)
    first, second = train_ranks(_embed, strategy, True, kwargs)
    assert_same(first, second)
    for name, value in dense.items():
        torch.testing.assert_close(first[name], value, rtol=1e-6, atol=1e-7)
