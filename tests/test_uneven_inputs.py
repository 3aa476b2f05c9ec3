"""A failure here means: ranks with unequally many batches hang, lose data, or average wrongly."""

from __future__ import annotations

import re
from functools import partial
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from ranks import train_ranks
from torch import Tensor
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset
from training import Books, assert_same, sparse
from uneven import SIZE, Model, Validated, by_hand, fit, make_loader, numbers, with_join

from lightning_mgwfbp import MGWFBPStrategy, PowerSGD, TopK

pytestmark = [
    pytest.mark.filterwarnings("ignore:Be aware that when using `ckpt_path`"),
    # these loaders do not know where they were
    pytest.mark.filterwarnings("ignore:.*resuming from a checkpoint that ended before"),
    pytest.mark.filterwarnings("ignore:You are using the `dataloader_iter` step flavor"),
]


def _beside_join(rank: int, counts: tuple[int, ...], **kwargs: Any) -> dict[str, Any]:
    return {**fit(rank, counts, **kwargs), "expected": with_join(rank, counts)}


def _call(rank: int, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return function(rank, *args, **kwargs)


def on_ranks(function: Any, *args: Any, world_size: int = 2, **kwargs: Any) -> list[Any]:
    return train_ranks(_call, function, args, kwargs, world_size=world_size)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["sized", "stream", "lying"])
@pytest.mark.parametrize("counts", [(3, 6), (6, 3)])
@pytest.mark.parametrize("strategy", ["mgwfbp", "mgwfbp_cross_iteration"])
def test_weights_are_those_under_torchs_join(
    kind: str, counts: tuple[int, int], strategy: str
) -> None:
    """What ranks that stand by contribute, the divisor, or who goes on for how long."""
    for rank, result in enumerate(on_ranks(_beside_join, counts, kind=kind, strategy=strategy)):
        assert_same(result["state"], result["expected"])
        assert result["steps"] == 2 * max(counts)
        assert len(result["taken"]) == 2 * counts[rank]


@pytest.mark.slow
@pytest.mark.parametrize("accumulate", [1, 2, 4])
@pytest.mark.parametrize("counts", [(3, 6), (5, 2)])
def test_ragged_windows_optimizers_and_schedulers(accumulate: int, counts: tuple[int, int]) -> None:
    """Who contributes to an accumulation window; Adam's state or rates drift apart."""
    expected = by_hand(counts, accumulate=accumulate, optimizer="adam")
    results = on_ranks(
        fit, counts, accumulate_grad_batches=accumulate, model_kwargs={"optimizer": "adam"}
    )
    steps = 2 * -(-max(counts) // accumulate)
    for result in results:
        assert_same(result["state"], expected)
        assert result["steps"] == steps
        assert result["rates"] == pytest.approx([0.05 * 0.7 ** (steps // 2)])


@pytest.mark.horovod
def test_over_horovod() -> None:
    """The same over Horovod, beside which the counts travel over gloo."""
    for result in on_ranks(_beside_join, (3, 6), strategy="mgwfbp_horovod"):
        assert_same(result["state"], result["expected"])


class _Shapes(pl.Callback):
    """Of the batches that hooks see."""

    def __init__(self) -> None:
        self.shapes: list[torch.Size] = []

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, *_: Any) -> None:
        self.shapes.append(batch[0].shape)


class _Consuming(Model):
    def on_before_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        return [batch.pop()]  # which the next one must not miss


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["stream", "sized"])
def test_a_rank_without_any_batch(kind: str) -> None:
    """It ends, or its hooks find no batch; three ranks, of which one or two stand by."""
    counts = (0, 2, 5)
    results = on_ranks(fit, counts, kind=kind, model=_Consuming, callbacks=[_Shapes], world_size=3)
    expected = by_hand(counts)
    for result in results:
        assert_same(result["state"], results[0]["state"])
        torch.testing.assert_close(result["state"], expected, rtol=1e-5, atol=1e-6)
        assert result["callbacks"][0]["shapes"] == [(4, 5)] * 10
    assert [len(result["taken"]) for result in results] == [0, 4, 10]


@pytest.mark.slow
@pytest.mark.parametrize("counts", [(2, 5), (5, 2)])
def test_buffers_are_those_of_a_rank_that_goes_on(counts: tuple[int, int]) -> None:
    """Rank 0's running statistics, which checkpoints hold, stand still when it does."""
    results = on_ranks(fit, counts, model_kwargs={"norm": True})
    assert_same(results[0]["state"], by_hand(counts, norm=True))


class _WeightedBooks(Books):
    """Books in which a gradient counts by how few contribute beside it."""

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        for name, p in pl_module.named_parameters():
            self.given[name], self.received[name] = torch.zeros_like(p), torch.zeros_like(p)
            self._hooks.append(p.register_hook(partial(self._enter, name, trainer)))

    def _enter(self, name: str, trainer: pl.Trainer, gradient: Tensor) -> None:
        contributors = trainer.strategy.inputs.contributors
        self.given[name].add_(gradient, alpha=trainer.world_size / len(contributors))


@pytest.mark.slow
@pytest.mark.parametrize(
    "compressor",
    [TopK(0.3, dense_below_numel=0), PowerSGD(rank=1, dense_below_numel=0)],
    ids=["topk", "powersgd"],
)
def test_nothing_that_was_left_behind_is_lost(compressor: Any) -> None:
    """Residuals are sent with another weight than the gradients that left them had."""
    results = on_ranks(
        _books, (3, 7), strategy_kwargs=sparse(compressor), accumulate_grad_batches=2
    )
    assert results[0]["left"]
    for name, received in results[0]["received"].items():
        sent = [r["given"][name] - r["left"].get(name, 0) for r in results]
        torch.testing.assert_close(received, sum(sent) / len(sent), rtol=1e-4, atol=1e-6)


def _books(rank: int, counts: tuple[int, ...], **kwargs: Any) -> dict[str, Any]:
    books = _WeightedBooks()
    fit(rank, counts, callbacks=[books], **kwargs)
    return {"given": books.given, "received": books.received, "left": books.left}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("limit", "taken", "steps"), [(4, [3, 4], 4), (0.75, [3, 4], 4), (2, [2, 2], 2)]
)
def test_limit_train_batches(limit: float, taken: list[int], steps: int) -> None:
    """The limit is of each rank's own length, so that ranks would part."""
    results = on_ranks(fit, (3, 6), epochs=1, limit_train_batches=limit)
    assert [len(result["taken"]) for result in results] == taken
    assert [result["steps"] for result in results] == [steps] * 2


class _Growing(Model):
    """Loads anew in each epoch, other numbers of batches."""

    def train_dataloader(self) -> Any:
        counts = ((3, 2), (1, 4), (2, 2))[self.current_epoch]
        return make_loader("stream", self.global_rank, counts[self.global_rank])


@pytest.mark.slow
def test_epochs_of_other_lengths() -> None:
    """Loaders that are made anew, and who stands by in one epoch is not to in the next."""
    results = on_ranks(
        fit, (0, 0), model=_Growing, kind="own", epochs=3, reload_dataloaders_every_n_epochs=1
    )
    assert [len(result["taken"]) for result in results] == [6, 8]
    assert [result["steps"] for result in results] == [9] * 2
    assert_same(results[0]["state"], results[1]["state"])


class _Fourth(pl.Callback):
    """The weights after the fourth step, which rank 0 stands by in."""

    def __init__(self) -> None:
        self.state: dict[str, Tensor] = {}

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *_: Any) -> None:
        if trainer.global_step == 4:
            self.state = {k: v.clone() for k, v in pl_module.state_dict().items()}


@pytest.mark.slow
def test_validation_and_checkpoints(tmp_path: Path) -> None:
    """One rank is in validation or at a checkpoint's barrier while the others still train."""
    saving = ModelCheckpoint(str(tmp_path), "{step}", every_n_train_steps=4, save_top_k=-1)
    options = {"model": Validated, "limit_val_batches": 1.0, "enable_checkpointing": True}
    results = on_ranks(fit, (2, 5), callbacks=[_Fourth, saving], **options)
    assert_same(results[0]["state"], by_hand((2, 5)))
    assert results[0]["metrics"]["val_loss"] == results[1]["metrics"]["val_loss"]
    saved = torch.load(tmp_path / "step=4.ckpt", weights_only=True)
    assert saved["global_step"] == 4
    for result in results:
        assert_same(saved["state_dict"], result["callbacks"][0]["state"])
    options["enable_checkpointing"] = False
    resumed = on_ranks(fit, (2, 5), ckpt_path=str(tmp_path / "step=4.ckpt"), **options)
    assert [result["steps"] for result in resumed] == [10, 10]
    assert_same(resumed[0]["state"], resumed[1]["state"])


class _Logging(Model):
    """Logs the mean of an epoch, or each step's."""

    def __init__(self, on_step: bool = False) -> None:
        super().__init__()
        self.on_step = on_step
        self.losses: list[float] = []

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        self.log("loss", loss, on_step=self.on_step, on_epoch=not self.on_step, sync_dist=True)
        self.losses.append(float(loss.detach()))
        return loss

    def on_train_end(self) -> None:
        self.taken = self.losses


@pytest.mark.slow
def test_a_mean_over_an_epoch_is_over_all_batches() -> None:
    """Batches of ranks that stand by are logged again, or the others' weigh less."""
    results = on_ranks(fit, (2, 5), model=_Logging, epochs=1)
    losses = [loss for result in results for loss in result["taken"]]
    for result in results:
        assert result["metrics"]["loss"] == pytest.approx(sum(losses) / 7)


def _end(rank: int, counts: tuple[int, ...], **kwargs: Any) -> tuple[str, str]:
    """How fit ends."""
    try:
        fit(rank, counts, **kwargs)
    except Exception as error:
        return type(error).__name__, str(error)
    return "", "it has ended"


ERROR = {"strategy_kwargs": {"uneven_inputs": "error"}}
AS_MANY = "The ranks have unequally many training batches: "


@pytest.mark.parametrize(
    ("kind", "counts", "said"),
    [
        ("sized", (3, 6), "rank 0 has 3, rank 1 has 6. Give all as many, by Trainer(limit_"),
        ("list", (6, 3), "rank 0 has at least 4, rank 1 has 3."),
        ("sized", (0, 6), "rank 0 has 0, rank 1 has 6. Give all as many, by drop_last"),
        ("stream", (2, 4), "rank 0 has 2, rank 1 has at least 3."),
        ("stream", (4, 0), "rank 0 has at least 1, rank 1 has 0."),
    ],
)
def test_every_rank_says_who_has_how_many(kind: str, counts: tuple[int, int], said: str) -> None:
    """Unequal ranks hang, or only one of them says why."""
    for name, message in on_ranks(_end, counts, kind=kind, **ERROR):
        assert (name, message[: len(AS_MANY + said)]) == ("RuntimeError", AS_MANY + said)
        assert 'uneven_inputs="join"' in message


class _Manual(Model):
    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False


class _Fetching(Model):
    def training_step(self, dataloader_iter: Any) -> Any:  # type: ignore[override]
        raise NotImplementedError


class _OwnBackward(Model):
    def backward(self, loss: Tensor) -> None:  # type: ignore[override]
        loss.backward()


class _Lbfgs(Model):
    def configure_optimizers(self) -> Any:
        return torch.optim.LBFGS(self.parameters())


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "manual": ({"model": _Manual}, "ValueError: .*automatic_optimization=False"),
    "batch norm": (
        {"model_kwargs": {"norm": True}, "sync_batchnorm": True},
        r"ValueError: .*Trainer\(sync_batchnorm=True\)",
    ),
    "dataloader_iter": ({"model": _Fetching}, r"ValueError: .*training_step\(dataloader_iter\)"),
    "backward": ({"model": _OwnBackward}, "ValueError: .*`_OwnBackward.backward`"),
    "lbfgs": ({"model": _Lbfgs}, "ValueError: .*LBFGS"),
    "loaders": ({"kind": "pair"}, "ValueError: .*there are 2 training dataloaders"),
    "log": (
        {"model": _Logging, "model_kwargs": {"on_step": True}},
        r"RuntimeError: .*self.log\(..., sync_dist=True, on_step=True\)",
    ),
    "logged by some": (
        {"model": _Logging, "counts": (0, 2)},
        r"RuntimeError: Ranks \[0\] had no training batch .*training_step.loss",
    ),
}


@pytest.mark.parametrize("refused", REFUSED)
def test_what_cannot_join_is_refused(refused: str) -> None:
    """A rank that stands by is waited for in vain, silently."""
    options, said = REFUSED[refused]
    for end in on_ranks(_end, **{"counts": (2, 3), "kind": "list", **options}):
        assert re.match(said, ": ".join(end), re.DOTALL), end


def test_an_unknown_choice() -> None:
    """A typing error is taken for one of the choices."""
    with pytest.raises(ValueError, match=r"uneven_inputs=.* one of error, join, got 'joint'"):
        MGWFBPStrategy(uneven_inputs="joint")  # type: ignore[arg-type]


class _Seen(pl.Callback):
    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        self.loader = type(trainer.train_dataloader).__name__
        self.counts = trainer.strategy.inputs._counts


def _equal(rank: int) -> tuple[dict[str, Any], ...]:
    shared = fit(rank, (4, 4), callbacks=[_Seen], model=_Shared, kind="own", **ERROR)
    own = fit(rank, (4, 4), kind="list", **ERROR)
    return shared, own, {"state": with_join(rank, (4, 4))}


class _Shared(Model):
    """One data set, of which each rank has a part."""

    def train_dataloader(self) -> Any:
        data = TensorDataset(numbers(0, 8))
        return DataLoader(data, batch_size=SIZE, sampler=DistributedSampler(data))


@pytest.mark.slow
def test_equal_ranks_need_no_messages_and_are_ddp() -> None:
    """Loaders of equal length by construction are counted, or counting changes the training."""
    for shared, own, ddp in on_ranks(_equal):
        assert shared["callbacks"] == [{"loader": "DataLoader", "counts": None}]
        assert_same(own["state"], ddp["state"])
