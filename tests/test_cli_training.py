"""A failure here means: YAML and the command line cannot say what Python can about the strategy."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

from benchmarks import netlab
from lightning_mgwfbp import (
    AlphaBeta,
    Cast,
    DDPCommHook,
    MGWFBPStrategy,
    Optimal,
    PowerSGD,
    Quantize8,
    RandomK,
    Threshold,
    TopK,
)
from lightning_mgwfbp.cli import lightning_cli, main

ROOT = Path(__file__).parent.parent
CLASS_PATH = "lightning_mgwfbp.MGWFBPStrategy"


@pytest.fixture(autouse=True)
def _at_the_root(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(sys, "argv", ["lightning-mgwfbp"])
    yield
    if torch.distributed.is_initialized():  # a Trainer leaves its process group behind
        torch.distributed.destroy_process_group()


def strategy_from(tmp_path: Path, strategy: Any) -> MGWFBPStrategy:
    """The strategy that `fit` builds and runs one batch with, on one device."""
    extra = tmp_path / "extra.yaml"
    extra.write_text(yaml.safe_dump({"trainer": {"strategy": strategy}}))
    cli = lightning_cli(
        [
            "fit",
            "--config=configs/digits.yaml",
            f"--config={extra}",
            "--trainer.fast_dev_run=true",
            "--trainer.devices=1",
            "--trainer.logger=false",
            "--trainer.enable_model_summary=false",
        ]
    )
    assert isinstance(cli.trainer.strategy, MGWFBPStrategy)
    return cli.trainer.strategy


def test_a_name_is_enough(tmp_path: Path) -> None:
    """trainer.strategy: mgwfbp"""
    assert strategy_from(tmp_path, "mgwfbp")._options.planner == "auto"


@pytest.mark.parametrize(
    ("argument", "written", "meant"),
    [
        ("planner", "optimal", "optimal"),
        ("planner", "measured/plan.json", "measured/plan.json"),
        (
            "planner",
            {"class_path": "lightning_mgwfbp.Threshold", "init_args": {"nbytes": 1024}},
            Threshold(1024),
        ),
        ("planner", {"class_path": "lightning_mgwfbp.Optimal"}, Optimal()),
        ("compressor", "bf16", "bf16"),
        (
            "compressor",
            {"class_path": "lightning_mgwfbp.Cast", "init_args": {"dtype": "float16"}},
            Cast("float16"),
        ),
        ("compressor", "topk", "topk"),
        (
            "compressor",
            {
                "class_path": "lightning_mgwfbp.TopK",
                "init_args": {"density": 0.001, "density_schedule": [0.25, 0.0625]},
            },
            TopK(0.001, density_schedule=[0.25, 0.0625]),
        ),
        (
            "compressor",
            {"class_path": "lightning_mgwfbp.TopK", "init_args": {"density": "auto"}},
            TopK("auto"),
        ),
        (
            "compressor",
            {"class_path": "lightning_mgwfbp.RandomK", "init_args": {"density": 0.1}},
            RandomK(0.1),
        ),
        ("compressor", {"class_path": "lightning_mgwfbp.Quantize8"}, Quantize8()),
        (
            "compressor",
            {"class_path": "lightning_mgwfbp.PowerSGD", "init_args": {"rank": 2}},
            PowerSGD(rank=2),
        ),
        (
            "compressor",
            {
                "class_path": "lightning_mgwfbp.DDPCommHook",
                "init_args": {
                    "hook": "torch.distributed.algorithms.ddp_comm_hooks"
                    ".default_hooks.fp16_compress_hook"
                },
            },
            DDPCommHook(default_hooks.fp16_compress_hook),
        ),
        ("link", {"alpha": 1e-4, "beta": 8e-9}, AlphaBeta(1e-4, 8e-9)),
        ("link", "measured/link.json", "measured/link.json"),
        ("profile", "measured/profile.json", "measured/profile.json"),
        ("warmup_steps", 9, 9),
        ("static_graph", True, True),
    ],
)
def test_options_in_yaml(argument: str, written: Any, meant: Any, tmp_path: Path) -> None:
    """class_path and init_args, of the strategy and within its options."""
    strategy = {"class_path": CLASS_PATH, "init_args": {argument: written}}
    assert getattr(strategy_from(tmp_path, strategy)._options, argument) == meant


def test_a_wrong_option_in_yaml_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """jsonargparse turns the strategy's ValueError into a usage error."""
    strategy = {"class_path": CLASS_PATH, "init_args": {"warmup_steps": 0}}
    with pytest.raises((SystemExit, ValueError)) as error:
        strategy_from(tmp_path, strategy)
    assert "warmup_steps" in capsys.readouterr().err + str(error.value)


@pytest.mark.parametrize("density", [0, 1.5, "half"])
def test_a_wrong_density_in_yaml_is_named(
    density: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """One error, in the words of the compressor."""
    compressor = {"class_path": "lightning_mgwfbp.TopK", "init_args": {"density": density}}
    strategy = {"class_path": CLASS_PATH, "init_args": {"compressor": compressor}}
    with pytest.raises((SystemExit, ValueError)) as error:
        strategy_from(tmp_path, strategy)
    said = capsys.readouterr().err + str(error.value)
    assert "density" in said
    assert str(density) in said


def test_the_gpt_config_trains() -> None:
    """configs/gpt.yaml, one batch."""
    cli = lightning_cli(
        [
            "fit",
            "--config=configs/gpt.yaml",
            "--trainer.fast_dev_run=true",
            "--trainer.devices=1",
            "--trainer.logger=false",
            "--trainer.enable_model_summary=false",
            "--model.init_args.layers=1",
        ]
    )
    assert torch.isfinite(cli.trainer.callback_metrics["val_loss"])


@pytest.mark.slow
def test_bench_prints_a_fit_and_saves_it(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """`bench` on two local processes."""
    path = tmp_path / "link.json"
    main(["bench", "--largest-nbytes", "65536", "--json", "--save", str(path)])
    result = json.loads(capfd.readouterr().out.strip().splitlines()[-1])
    assert AlphaBeta.load(path) == AlphaBeta(result["alpha"], result["beta"])
    assert result["world_size"] == 2
    sizes = [nbytes for nbytes, _ in result["samples"]]
    assert sizes == sorted(sizes)
    assert (sizes[0], sizes[-1]) == (8, 65536)


def test_bench_says_what_its_seconds_leave_out(capsys: pytest.CaptureFixture[str]) -> None:
    """Who gives --seconds 1 and waits for ten is not told that ranks take long to start."""
    with pytest.raises(SystemExit):
        main(["bench", "--help"])
    assert "starting the ranks comes on top" in " ".join(capsys.readouterr().out.split())


@pytest.mark.parametrize(
    "words",
    [
        ["--largest-nbytes", "0"],
        ["--seconds", "-1"],
        ["--save", "/nowhere/link.json"],
        ["--backend", "mpi"],
        ["--backend", "nccl"],
    ],
)
def test_bench_refuses_nonsense(
    words: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A trace of each rank, or minutes of timing, in the place of one line and exit code 2."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(SystemExit) as error:
        main(["bench", *words])
    assert error.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert words[0] in line


@pytest.mark.slow
def test_bench_finds_the_rate_of_a_link() -> None:
    """On a link of 1 Gbit/s beta is within a tenth of 8 ns per byte."""
    reason = netlab.unavailable()
    if reason is not None:
        pytest.skip(f"needs hosts made of network namespaces: {reason}")
    command = [sys.executable, "-m", "lightning_mgwfbp", "bench", "--json"]
    with netlab.Lab(hosts=2, rate="1gbit") as lab:
        printed, _ = lab.run([command] * 2, timeout=120)
    assert json.loads(printed)["beta"] == pytest.approx(8e-9, rel=0.1)
