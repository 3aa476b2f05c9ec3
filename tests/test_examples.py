"""The example models and data sets: what the configs, the demo and the benchmarks build on."""

import math
import sys
from pathlib import Path

import pytest
import torch
from lightning.pytorch import LightningModule, Trainer
from processes import run
from torch import Tensor

from examples.digits import DigitsData, DigitsModule
from examples.gpt import GPTModule, StdlibText, unigram_loss, warmup_cosine


def tiny_gpt(**changes: float) -> GPTModule:
    sizes = {"layers": 2, "heads": 2, "width": 32, "context": 16, "dropout": 0.0}
    return GPTModule(**(sizes | changes))


def tiny_text() -> StdlibText:
    text = StdlibText(block_size=16, batch_size=4, max_bytes=20_000)
    text.setup("fit")
    return text


def digits() -> DigitsData:
    data = DigitsData()
    data.setup("fit")
    return data


def step(module: LightningModule, batch: list[Tensor]) -> tuple[float, float]:
    """The loss of `batch` before and after one step of the module's own optimizer on it."""
    configured = module.configure_optimizers()
    optimizer = configured["optimizer"] if isinstance(configured, dict) else configured
    before = module.loss(batch)
    before.backward()
    optimizer.step()
    return before.item(), module.loss(batch).item()


def test_digits_shapes() -> None:
    """Failing: the digits are not what the network is built for."""
    images, labels = next(iter(digits().train_dataloader()))
    assert images.shape == (32, 1, 8, 8)
    assert images.min() == 0
    assert images.max() == 1
    assert DigitsModule(width=4)(images).shape == (32, 10)
    assert labels.shape == (32,)


def test_digits_split_is_a_stratified_partition() -> None:
    """Failing: scans are trained on and tested on, or lost, or classes are out of balance."""
    data = digits()
    splits = (data.train, data.val, data.test)
    assert [len(split) for split in splits] == [1197, 240, 360]
    # All 1,797 scans differ from each other, so counting distinct ones shows any overlap.
    images = torch.cat([split.tensors[0] for split in splits])
    assert len(images.flatten(1).unique(dim=0)) == 1797
    for split in splits:
        shares = split.tensors[1].bincount(minlength=10) / len(split)
        torch.testing.assert_close(shares, torch.full((10,), 0.1), atol=0.01, rtol=0)


def test_digits_split_follows_its_seed_alone() -> None:
    """Failing: two ranks, or two runs, would hold different test sets."""
    torch.manual_seed(1)
    first = digits().test.tensors[0]
    torch.manual_seed(2)
    assert torch.equal(first, digits().test.tensors[0])
    other = DigitsData(seed=1)
    other.setup("fit")
    assert not torch.equal(first, other.test.tensors[0])


def test_digits_step_lowers_the_loss() -> None:
    """Failing: the digits model's loss, gradients or optimizer."""
    torch.manual_seed(0)
    before, after = step(DigitsModule(width=8), next(iter(digits().train_dataloader())))
    assert after < before


def test_gpt_has_about_ten_million_parameters_and_tied_embeddings() -> None:
    """Failing: the size that the benchmarks quote, or the shared input and output embedding."""
    module = GPTModule()
    block = 12 * 384**2 + 13 * 384
    expected = 6 * block + (256 + 64) * 384 + 2 * 384
    assert sum(p.numel() for p in module.parameters()) == expected == 10_770_432
    assert module.head.weight is module.token_embedding.weight


def test_gpt_is_causal() -> None:
    """Failing: a position sees bytes that come after it, and the loss means nothing."""
    torch.manual_seed(0)
    module = tiny_gpt().eval()
    tokens = torch.randint(256, (1, 16))
    changed = tokens.clone()
    changed[0, 10] += 1 if changed[0, 10] < 255 else -1
    same = (module(tokens) == module(changed)).all(dim=-1)[0]
    assert same[:10].all()
    assert not same[10:].any()


def test_gpt_rejects_bad_sizes() -> None:
    """Failing: a size that cannot work is no longer named before training starts."""
    with pytest.raises(ValueError, match=r"heads=\.\.\.\).*width=32, got 3"):
        tiny_gpt(heads=3)
    with pytest.raises(ValueError, match=r"StdlibText\(block_size=64\)"):
        StdlibText(max_bytes=1000).setup("fit")
    with pytest.raises(ValueError, match=r"GPTModule\(context=16\).* 17 tokens"):
        tiny_gpt()(torch.zeros(1, 17, dtype=torch.long))


@pytest.mark.filterwarnings("ignore:.*does not have many workers")
def test_gpt_trains_under_a_trainer() -> None:
    """Failing: the GPT's loss, param_groups, schedule or logging."""
    torch.manual_seed(0)
    module, text = tiny_gpt(learning_rate=1e-2, warmup_steps=2), tiny_text()
    trainer = Trainer(
        accelerator="cpu",
        max_steps=20,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    (before,) = trainer.validate(module, text, verbose=False)
    trainer.fit(module, text)
    (after,) = trainer.validate(module, text, verbose=False)
    assert before["val_loss"] == pytest.approx(math.log(256), abs=0.1)
    assert after["val_loss"] < before["val_loss"] - 1
    assert [g["weight_decay"] for g in trainer.optimizers[0].param_groups] == [0.1, 0.0]
    assert trainer.optimizers[0].param_groups[0]["lr"] == pytest.approx(1e-3)


def test_warmup_cosine_rises_then_falls_to_a_tenth() -> None:
    """Failing: the learning-rate schedule's corners."""
    rates = [warmup_cosine(step, warmup_steps=4, total_steps=24) for step in range(30)]
    assert rates[:5] == pytest.approx([0.2, 0.4, 0.6, 0.8, 1.0])
    assert rates[14] == pytest.approx(0.55)
    assert rates[24:] == pytest.approx([0.1] * 6)
    assert warmup_cosine(10, warmup_steps=4, total_steps=math.inf) == 1.0


def test_stdlib_text_is_cut_without_overlap() -> None:
    """Failing: validation text is trained on, or input and target bytes are misaligned."""
    text = tiny_text()
    again = tiny_text()
    splits = [split.tensors[0] for split in (text.train, text.val, text.test)]
    assert [split.shape[1] for split in splits] == [17, 17, 17]
    for split, repeated in zip(splits, (again.train, again.val, again.test), strict=True):
        assert torch.equal(split, repeated.tensors[0])
    # Each split is a slice of one buffer, so its bytes' addresses show any overlap.
    ends = [split.storage_offset() + split.numel() for split in splits]
    assert all(end <= split.storage_offset() for end, split in zip(ends, splits[1:], strict=False))
    assert sum(split.numel() for split in splits) > 20_000 - 3 * 17


def test_unigram_loss_is_the_entropy_of_uniform_bytes() -> None:
    """Failing: the bar that the GPT example has to beat."""
    text = tiny_text()
    text.train.tensors[0].copy_(torch.arange(text.train.tensors[0].numel()).view(-1, 17) % 256)
    assert unigram_loss(text) == pytest.approx(math.log(256), abs=0.01)


@pytest.mark.horovod
def test_horovod_plain_reaches_the_weights_of_horovods_own_optimizer() -> None:
    """Failing: MergedOptimizer in a program that was written for Horovod."""
    horovodrun = [sys.executable, "-m", "horovod.runner.launch", "-np", "2", "--gloo"]
    example = Path(__file__).parent.parent / "examples" / "horovod_plain.py"
    ended = run([*horovodrun, sys.executable, str(example)])
    assert ended.code == 0, ended.output[-3000:]
    assert not ended.orphans
    assert "digits over Horovod, 2 ranks: test accuracy 0.9" in ended.output
