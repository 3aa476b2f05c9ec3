"""A small convolutional network on scikit-learn's handwritten digits (1,797 real 8x8 scans).

    python examples/digits.py --strategy mgwfbp --devices 2

trains it and asserts at least 97 % accuracy on scans it never saw. The data come inside the
scikit-learn package (UCI Optical Recognition of Handwritten Digits), so nothing is downloaded.
"""

import torch
from jsonargparse import CLI
from lightning.pytorch import LightningDataModule, LightningModule, Trainer, seed_everything
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset
from torchmetrics.classification import MulticlassAccuracy

import lightning_mgwfbp  # noqa: F401 - registers the strategy names

NUM_CLASSES = 10

# A distributed sampler repeats scans until every process has equally many, and would count the
# repeated ones twice. These sizes divide evenly by 1 to 6 processes, so accuracy there is exact.
VAL_SIZE = 240
TEST_SIZE = 360


def conv_block(in_channels: int, out_channels: int) -> nn.Sequential:
    """3x3 convolution, batch normalisation, ReLU; height and width stay."""
    return nn.Sequential(
        nn.Conv2d(in_channels, out_channels, kernel_size=3, padding=1, bias=False),
        nn.BatchNorm2d(out_channels),
        nn.ReLU(),
    )


class DigitsModule(LightningModule):
    """Classifies 8x8 grey scans: (batch, 1, 8, 8) to logits (batch, 10).

    Args:
        width: channels after the first convolution; the later ones have twice and four times it.
        learning_rate: of SGD, for batches of about 32 scans per process.
        momentum: of SGD, Nesterov's; 0 for none.
    """

    def __init__(self, width: int = 32, learning_rate: float = 0.02, momentum: float = 0.9) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.learning_rate = learning_rate
        self.momentum = momentum
        self.network = nn.Sequential(
            conv_block(1, width),
            conv_block(width, 2 * width),
            nn.MaxPool2d(2),  # 8x8 -> 4x4
            conv_block(2 * width, 4 * width),
            nn.MaxPool2d(2),  # 4x4 -> 2x2
            nn.Flatten(),
            nn.Linear(4 * width * 2 * 2, NUM_CLASSES),
        )
        # "micro" counts scans, not classes. torchmetrics adds up the counts of all processes, so
        # the logged accuracy is that of the whole set and not a mean of per-process means.
        self.val_acc = MulticlassAccuracy(NUM_CLASSES, average="micro")
        self.test_acc = MulticlassAccuracy(NUM_CLASSES, average="micro")

    def forward(self, images: Tensor) -> Tensor:
        return self.network(images)

    def loss(self, batch: list[Tensor]) -> Tensor:
        """Mean cross-entropy, in nats, of `[images, labels]`."""
        images, labels = batch
        return cross_entropy(self(images), labels)

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        loss = self.loss(batch)
        self.log("train_loss", loss, on_step=False, on_epoch=True, sync_dist=True)
        return loss

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        images, labels = batch
        self.val_acc(self(images), labels)
        self.log("val_acc", self.val_acc)

    def test_step(self, batch: list[Tensor], batch_idx: int) -> None:
        images, labels = batch
        self.test_acc(self(images), labels)
        self.log("test_acc", self.test_acc)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(
            self.parameters(),
            lr=self.learning_rate,
            momentum=self.momentum,
            nesterov=self.momentum > 0,
            weight_decay=5e-4,
        )


class DigitsData(LightningDataModule):
    """The 1,797 scans in a fixed stratified split: 1,197 train, 240 validation, 360 test.

    Args:
        batch_size: scans per process and step.
        seed: of the split; the order of the training scans follows `seed_everything`.
        num_workers: loader processes; the data lie in memory, so none are needed.
    """

    def __init__(self, batch_size: int = 32, seed: int = 0, num_workers: int = 0) -> None:
        super().__init__()
        self.batch_size = batch_size
        self.seed = seed
        self.num_workers = num_workers

    def setup(self, stage: str) -> None:
        digits = load_digits()
        images = torch.tensor(digits.images, dtype=torch.float32).unsqueeze(1) / 16  # in [0, 1]
        labels = torch.tensor(digits.target)  # (1797,)
        rest, test = train_test_split(
            range(len(labels)), test_size=TEST_SIZE, stratify=labels, random_state=self.seed
        )
        train, val = train_test_split(
            rest, test_size=VAL_SIZE, stratify=labels[rest], random_state=self.seed
        )
        self.train = TensorDataset(images[train], labels[train])
        self.val = TensorDataset(images[val], labels[val])
        self.test = TensorDataset(images[test], labels[test])

    def train_dataloader(self) -> DataLoader:
        return DataLoader(self.train, self.batch_size, shuffle=True, num_workers=self.num_workers)

    def val_dataloader(self) -> DataLoader:
        return DataLoader(self.val, self.batch_size, num_workers=self.num_workers)

    def test_dataloader(self) -> DataLoader:
        return DataLoader(self.test, self.batch_size, num_workers=self.num_workers)


def main(strategy: str = "mgwfbp", devices: int = 2, epochs: int = 10) -> None:
    """Train on the digits with `devices` CPU processes and assert the test accuracy."""
    seed_everything(1)
    trainer = Trainer(
        accelerator="cpu",
        devices=devices,
        strategy=strategy,
        max_epochs=epochs,
        deterministic=True,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
    )
    module, data = DigitsModule(), DigitsData()
    trainer.fit(module, data)
    (metrics,) = trainer.test(module, data, verbose=False)
    accuracy = metrics["test_acc"]
    if trainer.is_global_zero:
        print(f"digits: {strategy}, {devices} processes, test accuracy {accuracy:.4f}")
    assert accuracy >= 0.97, f"test accuracy {accuracy:.4f}, expected at least 0.97"


if __name__ == "__main__":
    CLI(main)
