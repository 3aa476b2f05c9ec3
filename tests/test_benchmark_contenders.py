"""The benchmark's rows that need Horovod: they average, and it runs only while they are at work."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
from ranks import run_ranks
from torch import Tensor, nn

from benchmarks import run
from benchmarks.contenders import CONTENDERS
from benchmarks.processes import run_on_loopback
from benchmarks.worker import run_block
from lightning_mgwfbp.exchange.horovod_rendezvous import load_horovod

HOROVOD = [name for name, row in CONTENDERS.items() if row.horovod]


def weights_after_blocks(rank: int, name: str) -> list[Tensor]:
    torch.manual_seed(0)
    module = nn.Sequential(*(nn.Linear(4, 4) for _ in range(3)))
    loss = nn.Sequential(module, Loss())
    torch.manual_seed(rank)
    inputs = (torch.randn(8, 4),)
    with CONTENDERS[name].running():
        stepper = CONTENDERS[name].build(loss)
        run_block(stepper, inputs, 7)  # beyond the warm-up
    for _ in range(2):
        assert not load_horovod().is_initialized()
        with CONTENDERS[name].running():
            run_block(stepper, inputs, 2)
    return [p.detach() for p in module.parameters()]


class Loss(nn.Module):
    def forward(self, y: Tensor) -> Tensor:
        return y.square().mean()


@pytest.mark.horovod
@pytest.mark.parametrize("name", HOROVOD)
def test_over_horovod_the_weights_are_those_of_ddp(name: str) -> None:
    """Localises: a row that averages nothing, or no longer does after Horovod's restart."""
    ours, theirs = run_ranks(weights_after_blocks, name)
    torch.testing.assert_close(ours, theirs, rtol=0, atol=0)
    torch.testing.assert_close(ours, run_ranks(weights_after_blocks, "ddp")[0], rtol=0, atol=0)
    alone, _ = run_ranks(weights_after_blocks, "compute")
    assert not torch.equal(ours[0], alone[0])


ONE_BLOCK = """
import sys
import torch
import torch.distributed as dist
from benchmarks import models
from benchmarks.contenders import CONTENDERS
from benchmarks.worker import run_block

dist.init_process_group("gloo")
torch.manual_seed(0)  # the same weights on all ranks, as benchmarks/worker.py has them
row, workload = CONTENDERS[sys.argv[1]], models.builder("narrow")()
with row.running():
    run_block(row.build(workload.module), workload.inputs, 7)  # the link is timed in the warm-up
dist.destroy_process_group()
"""


@pytest.mark.horovod
@pytest.mark.parametrize("name", ["horovod", "over_horovod"])  # both all-reduce
def test_only_horovods_own_row_is_fused_by_horovod(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Localises: a row runs with the other's settings, which Horovod reads when it starts."""
    # in fresh processes, since not every restart of Horovod starts its timeline again
    timeline = tmp_path / "timeline.json"
    monkeypatch.setenv("HOROVOD_TIMELINE", str(timeline))
    run_on_loopback([[sys.executable, "-c", ONE_BLOCK, name]] * 2, timeout=120)
    activities = timeline.read_text()
    assert "ALLREDUCE" in activities
    assert ("MEMCPY_IN_FUSION_BUFFER" in activities) == (name == "horovod")


def refusal(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> str:
    monkeypatch.setattr(sys, "argv", ["run.py", "--contenders", "ddp,horovod"])
    with pytest.raises(SystemExit):
        run.main()
    return capsys.readouterr().err


def test_without_horovod_only_its_rows_are_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Localises: a missing Horovod found on a rank, or missed by who does not ask for it."""
    monkeypatch.setitem(sys.modules, "horovod.torch", None)
    monkeypatch.setattr(sys, "argv", ["run.py"])
    assert not set(run.parse_arguments().contenders) & set(HOROVOD)
    assert "scripts/install_horovod.sh" in refusal(monkeypatch, capsys)


@pytest.mark.horovod
def test_settings_for_all_rows_are_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Localises: a cycle time that keeps Horovod running beside the other rows."""
    monkeypatch.setenv("HOROVOD_CYCLE_TIME", "2")
    assert "HOROVOD_CYCLE_TIME=2 in the environment: unset it" in refusal(monkeypatch, capsys)
