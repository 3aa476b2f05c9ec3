"""A failure here means: training over Horovod is no longer what it is over torch.distributed."""

from __future__ import annotations

import socket
import sys
import warnings
from functools import partial
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from processes import run
from ranks import run_ranks, train_ranks
from torch import Tensor
from training import ToyData, assert_same, drawn, make_strategy, quiet_trainer, sparse, train

from lightning_mgwfbp import PowerSGD, Quantize8, TopK
from lightning_mgwfbp.exchange.horovod_rendezvous import (
    _warn_of_fusion,
    load_horovod,
    start_horovod,
    stop_horovod,
)
from lightning_mgwfbp.exchange.transport import LoopbackTransport
from lightning_mgwfbp.horovod_environment import HorovodEnvironment

TOPK = TopK(0.1, dense_below_numel=0)
WFBP = {"planner": "wfbp", "warmup_steps": 3}


def _unused_on_one_rank_at_times(batch_idx: int, rank: int) -> bool:
    return batch_idx % 3 == rank


UNUSED = {"model_kwargs": {"use": _unused_on_one_rank_at_times}}
TRAININGS: dict[str, dict[str, Any]] = {
    "dense": {"model": "digits", "strategy_kwargs": WFBP},
    "accumulated, clipped": {
        "model": "digits",
        "strategy_kwargs": WFBP,
        "accumulate_grad_batches": 2,
        "gradient_clip_val": 0.05,
    },
    "unused": {"strategy_kwargs": WFBP, "accumulate_grad_batches": 2, **UNUSED},
    "fp16": {"strategy_kwargs": {"compressor": "fp16", **WFBP}},
    "topk": {
        "strategy_kwargs": sparse(TOPK),
        "accumulate_grad_batches": 2,
        "gradient_clip_val": 0.05,
        **UNUSED,
    },
    "int8": {"strategy_kwargs": sparse(Quantize8(dense_below_numel=0))},
    "powersgd": {"strategy_kwargs": sparse(PowerSGD(rank=2, dense_below_numel=0))},
}


def _over_both(rank: int, training: str) -> list[dict[str, Any]]:
    names = ("mgwfbp", "mgwfbp_horovod")
    return [train(rank, name, steps=8, **TRAININGS[training]) for name in names]


@pytest.mark.horovod
@pytest.mark.parametrize("training", TRAININGS)
def test_losses_and_weights_are_those_over_torch(training: str) -> None:
    """Dense and compressed exchanges, batch statistics, accumulation, clipping, unused ones."""
    for over_torch, over_horovod in train_ranks(_over_both, training):
        assert_same(over_horovod["state"], over_torch["state"])
        assert len(over_torch["losses"]) >= 8
        assert all(map(torch.equal, over_horovod["losses"], over_torch["losses"]))
        for ours, theirs in zip(over_horovod["gradients"], over_torch["gradients"], strict=True):
            assert_same(ours, theirs)
        assert len(over_horovod["plan"].groups) > 3


def _saved(
    rank: int, strategy: str, folder: str, epochs: int, resume: str | None = None
) -> dict[str, Any]:
    pl.seed_everything(7, verbose=False)
    module, _ = drawn()
    trainer = quiet_trainer(
        strategy=make_strategy(strategy, **sparse(TOPK)),
        max_epochs=epochs,
        limit_train_batches=6,
        enable_checkpointing=True,
        callbacks=[ModelCheckpoint(folder, "{step}", every_n_train_steps=6, save_top_k=-1)],
    )
    trainer.fit(module, ToyData(), ckpt_path=resume)
    return module.state_dict()


@pytest.mark.horovod
@pytest.mark.filterwarnings("ignore:The dirpath has changed")
def test_a_checkpoint_holds_the_same_residuals_and_resumes(tmp_path: Path) -> None:
    """Residuals that are gathered, and taken up again, by Horovod."""
    whole, half, end = (str(tmp_path / name) for name in ("whole", "half", "end"))
    expected = train_ranks(_saved, "mgwfbp", whole, 2)
    train_ranks(_saved, "mgwfbp_horovod", half, 1)
    resumed = train_ranks(_saved, "mgwfbp_horovod", end, 2, f"{half}/step=6.ckpt")
    for ours, theirs in zip(resumed, expected, strict=True):
        assert_same(ours, theirs)
    for ours, theirs in (
        (f"{half}/step=6", f"{whole}/step=6"),
        (f"{end}/step=12", f"{whole}/step=12"),
    ):
        for rank, other in zip(_residuals(ours), _residuals(theirs), strict=True):
            assert_same(rank, other)
            assert rank["side.weight"].any()


def _residuals(path: str) -> list[dict[str, Tensor]]:
    saved = torch.load(f"{path}.ckpt", weights_only=True)["mgwfbp"]["exchanger"]
    return [rank["residual"] for rank in saved]


_WITHOUT_HOROVOD = """
import sys
sys.modules["horovod"] = None  # cannot be imported
import lightning.pytorch as pl
import lightning_mgwfbp
pl.Trainer(strategy="mgwfbp", accelerator="cpu", devices=1, logger=False)
pl.Trainer(strategy="mgwfbp_horovod", accelerator="cpu", devices=1, logger=False)
"""


@pytest.mark.slow
def test_without_horovod_only_its_strategy_fails() -> None:
    """An import of Horovod where nobody asked for it, or an error without the ways out."""
    ended = run([sys.executable, "-c", _WITHOUT_HOROVOD])
    assert ended.code == 1
    assert "line 7" in ended.output, ended.output
    error = ended.output.split("ModuleNotFoundError: ")[-1]
    assert "scripts/install_horovod.sh" in error
    assert '`strategy="mgwfbp"`' in error


def _inits_first(_: int) -> list[list[str]]:
    said = []
    _warn_of_fusion.cache_clear()  # this process may have said it in an earlier test
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HOROVOD_CONTROLLER", "gloo")  # MPI could not be started again
        patch.setenv("HOROVOD_CPU_OPERATIONS", "gloo")
        for starts in (load_horovod().init, partial(start_horovod, LoopbackTransport.solo())):
            starts()
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                for _ in range(2):
                    HorovodEnvironment()
            said.append([str(w.message) for w in caught])
            stop_horovod()
    return said


@pytest.mark.horovod
def test_fusion_that_a_user_has_left_on_is_warned_of_once() -> None:
    """hvd.init() before the strategy: merge groups that Horovod merges again, unsaid."""
    for of_a_user, ours in run_ranks(_inits_first):
        assert len(of_a_user) == 1
        assert "Leave `hvd.init()` out, or set HOROVOD_FUSION_THRESHOLD=0" in of_a_user[0]
        assert not ours


def _environment_of_one(_: int) -> tuple[str, str]:
    start_horovod(LoopbackTransport.solo())
    try:
        environment = HorovodEnvironment()
        with pytest.raises(ValueError, match="makes 2 processes") as error:
            environment.set_world_size(2)
        return environment.main_address, str(error.value)
    finally:
        stop_horovod()


@pytest.mark.horovod
def test_a_trainer_of_another_size_is_refused() -> None:
    """Trainer(devices=2) under `horovodrun -np 1`: it would wait for a rank that is not there."""
    for address, error in run_ranks(_environment_of_one):
        assert address == "127.0.0.1"  # all are here, whatever this host's name resolves to
        assert "horovodrun has launched 1: devices is the number on each host" in error


@pytest.mark.horovod
def test_a_host_that_others_cannot_find_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """horovodrun on several hosts: one rank's "connection refused", for which the others wait."""
    for name, value in {"RANK": "1", "SIZE": "2", "LOCAL_SIZE": "1"}.items():
        monkeypatch.setenv(f"HOROVOD_{name}", value)
    monkeypatch.setattr(socket, "gethostbyname", lambda host: "127.0.1.1")
    with pytest.raises(RuntimeError, match=r"address 127\.0\.1\.1.*/etc/hosts"):
        HorovodEnvironment()
