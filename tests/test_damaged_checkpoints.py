"""A failure here is a damaged checkpoint that leads to a hang, or to words on some ranks only."""

from __future__ import annotations

import shutil
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch
from ranks import train_ranks
from training import drawn, make_strategy, quiet_trainer, sparse

from lightning_mgwfbp import TopK

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore:Be aware that when using `ckpt_path`"),
    pytest.mark.filterwarnings("ignore:You're resuming from a checkpoint that ended before"),
]


class Executes:
    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> tuple[object, ...]:
        return Path.touch, (self.marker,)


def _fit(folder: Path, steps: int, resume: Path | None = None) -> str:
    """What is said, if anything; saves the trained run."""
    module, data = drawn()
    strategy = make_strategy("mgwfbp", **sparse(TopK(0.1, dense_below_numel=0)))
    trainer = quiet_trainer(strategy=strategy, max_steps=steps)
    try:
        trainer.fit(module, data, ckpt_path=resume)
    except (ValueError, RuntimeError) as error:
        return f"{type(error).__name__}: {error}"
    if resume is None:
        trainer.save_checkpoint(folder / "good.ckpt")
    return ""


def _save(rank: int, folder: Path) -> str:
    return _fit(folder, 4)


def _resume(rank: int, folder: Path, names: list[str]) -> list[str]:
    return [_fit(folder, 5, folder / name.format(rank=rank)) for name in names]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("checkpoints")
    assert train_ranks(_save, path) == ["", ""]
    return path


def write(folder: Path, name: str, content: bytes) -> str:
    (folder / name).write_bytes(content)
    return name


def texts_of(folder: Path, names: list[str]) -> list[str]:
    """What both ranks say of each."""
    first, second = train_ranks(_resume, folder, names)
    assert first == second
    return first


def in_pickle(content: bytes, path: Path) -> int:
    """Where in the file the pickle begins."""
    with zipfile.ZipFile(path) as archive:
        (info,) = [each for each in archive.infolist() if each.filename.endswith("data.pkl")]
    return info.header_offset + len(info.FileHeader())


def test_a_file_that_cannot_be_read(folder: Path) -> None:
    """Cut, flipped, empty, foreign: one ValueError that names the file, and nothing else."""
    good = (folder / "good.ckpt").read_bytes()
    pickled = in_pickle(good, folder / "good.ckpt")
    flipped = bytearray(good)
    flipped[pickled + 3 : pickled + 40] = bytes(37)
    names = [
        *(write(folder, f"cut {n}.ckpt", good[: len(good) * n // 8]) for n in range(8)),
        write(folder, "end.ckpt", good[:-1]),
        write(folder, "flipped.ckpt", bytes(flipped)),
        write(folder, "text.ckpt", b"not a checkpoint"),
        "missing.ckpt",
        ".",
    ]
    for name, text in zip(names, texts_of(folder, names), strict=True):
        path = str(folder / name)
        assert text.startswith(f"ValueError: the checkpoint '{path}' cannot be read: "), text


def test_nothing_is_executed(folder: Path) -> None:
    """A pickle that would run something is loaded."""
    marker = folder / "executed"
    for name, is_zip in (("zip.ckpt", True), ("old.ckpt", False)):
        content = torch.load(folder / "good.ckpt", weights_only=True)
        content["mgwfbp"]["plan"] = Executes(marker)
        torch.save(content, folder / name, _use_new_zipfile_serialization=is_zip)
    names = ["zip.ckpt", "old.ckpt"]
    for name, text in zip(names, texts_of(folder, names), strict=True):
        assert f"{name}' cannot be read: UnpicklingError" in text
    assert not marker.exists()
    torch.load(folder / "zip.ckpt", weights_only=False)
    assert marker.exists()  # it would have


def _changed(folder: Path, name: str, **changes: Any) -> str:
    content = torch.load(folder / "good.ckpt", weights_only=True)
    content["mgwfbp"].update(changes)
    torch.save(content, folder / name)
    return name


def test_an_exchange_state_that_is_damaged(folder: Path) -> None:
    """It is taken up, or only the rank that looks at it ends."""
    names = [
        _changed(folder, "plan.ckpt", plan="{}"),
        _changed(folder, "exchanger.ckpt", exchanger=[]),
    ]
    plan, exchanger = texts_of(folder, names)
    assert plan == "ValueError: checkpoint['mgwfbp']: plan: lacks the key 'format'"
    assert "exchanger must have a state for each rank" in exchanger


def test_damage_on_one_rank_ends_all(folder: Path) -> None:
    """On several nodes each has its own copy; the others wait for the rank that has raised."""
    good = (folder / "good.ckpt").read_bytes()
    for name in ("cut", "state", "none", "rests"):
        shutil.copy(folder / "good.ckpt", folder / f"{name} 0.ckpt")
    write(folder, "cut 1.ckpt", good[:1000])
    _changed(folder, "state 1.ckpt", plan="{}")
    content = torch.load(folder / "good.ckpt", weights_only=True)
    content["mgwfbp"]["exchanger"][0]["residual"]["stem.weight"][0, 0] += 1
    torch.save(content, folder / "rests 1.ckpt")
    del content["mgwfbp"]
    torch.save(content, folder / "none 1.ckpt")
    names = [f"{name} {{rank}}.ckpt" for name in ("cut", "state", "none", "rests")]
    cut, state, none, rests = texts_of(folder, names)
    path = folder / "cut 1.ckpt"
    assert cut.startswith(f"ValueError: On rank 1: the checkpoint '{path}' cannot be read")
    assert state == "ValueError: On rank 1: checkpoint['mgwfbp']: plan: lacks the key 'format'"
    assert "The ranks disagree: checkpoint['mgwfbp'] is SavedState on rank 0 and None" in none
    assert "checkpoint['mgwfbp'].exchanger[0]['residual']['stem.weight'] is Tensor" in rests


def test_the_good_one_resumes(folder: Path) -> None:
    """All of the above would be refused anyway."""
    assert texts_of(folder, ["good.ckpt"]) == [""]
