"""A small GPT on the source text of Python's own standard library.

    python examples/gpt.py --strategy mgwfbp --devices 2

trains it for a few steps and asserts that it predicts held-out source text far better than byte
frequencies can. Tokens are bytes. With the default sizes it has 10.8 million parameters: 6 blocks
of 12 width^2 + 13 width (10.65 M), byte embeddings 256 x width that also serve as the output layer
(0.10 M), and position embeddings 64 x width (0.02 M), at width 384. Architecture: GPT-2
(Radford et al., 2019), with the normalisation before each part of a block.
"""

import math
import sysconfig
from pathlib import Path

import torch
from jsonargparse import CLI
from lightning.pytorch import LightningDataModule, LightningModule, Trainer, seed_everything
from lightning.pytorch.utilities.types import OptimizerLRSchedulerConfig
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, scaled_dot_product_attention
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader, TensorDataset

import lightning_mgwfbp  # noqa: F401 - registers the strategy names

VOCABULARY = 256  # a token is a byte


class Attention(nn.Module):
    """Causal multi-head self-attention: (batch, time, width) to the same."""

    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.heads = heads
        self.dropout = dropout
        self.query_key_value = nn.Linear(width, 3 * width)
        self.projection = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        # Each of query, key, value: (batch, heads, time, width / heads).
        query, key, value = (
            part.unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for part in self.query_key_value(x).chunk(3, dim=-1)
        )
        dropout = self.dropout * self.training
        y = scaled_dot_product_attention(query, key, value, dropout_p=dropout, is_causal=True)
        return self.projection(y.transpose(1, 2).flatten(-2))


class Block(nn.Module):
    """One transformer block: attention, then a two-layer perceptron, each with a residual."""

    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        attention = Attention(width, heads, dropout)
        self.attention = nn.Sequential(nn.LayerNorm(width), attention, nn.Dropout(dropout))
        self.perceptron = nn.Sequential(
            nn.LayerNorm(width),
            nn.Linear(width, 4 * width),
            nn.GELU(),
            nn.Linear(4 * width, width),
            nn.Dropout(dropout),
        )

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(x)
        return x + self.perceptron(x)


class GPTModule(LightningModule):
    """Predicts the next byte: tokens (batch, time) to logits (batch, time, 256).

    Args:
        layers: transformer blocks.
        heads: attention heads; must divide `width` (ValueError).
        width: size of the embeddings.
        context: longest sequence, in tokens, that the position embeddings cover.
        dropout: probability, for embeddings, attention weights and both residual branches.
        learning_rate: AdamW's, at the end of the warm-up.
        weight_decay: AdamW's, for matrices and embeddings; biases and norms have none.
        beta2: AdamW's, how long it remembers the size of gradients.
        warmup_steps: optimizer steps in which the learning rate rises linearly; from there to the
            Trainer's last step it falls to a tenth along half a cosine.
    """

    def __init__(
        self,
        *,
        layers: int = 6,
        heads: int = 6,
        width: int = 384,
        context: int = 64,
        dropout: float = 0.1,
        learning_rate: float = 5e-4,
        weight_decay: float = 0.1,
        beta2: float = 0.95,
        warmup_steps: int = 10,
    ) -> None:
        super().__init__()
        if width % heads:
            raise ValueError(f"`GPTModule(heads=...)` must divide width={width}, got {heads}.")
        self.save_hyperparameters()
        self.learning_rate = learning_rate
        self.weight_decay = weight_decay
        self.beta2 = beta2
        self.warmup_steps = warmup_steps
        self.token_embedding = nn.Embedding(VOCABULARY, width)
        self.position_embedding = nn.Embedding(context, width)
        self.dropout = nn.Dropout(dropout)
        self.blocks = nn.Sequential(*(Block(width, heads, dropout) for _ in range(layers)))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, VOCABULARY, bias=False)
        self.head.weight = self.token_embedding.weight
        init_weights(self, layers)

    def forward(self, tokens: Tensor) -> Tensor:
        time, context = tokens.shape[1], self.position_embedding.num_embeddings
        if time > context:
            raise ValueError(f"`GPTModule(context={context})` got {time} tokens; lower block_size.")
        positions = torch.arange(time, device=tokens.device)
        x = self.token_embedding(tokens) + self.position_embedding(positions)
        return self.head(self.norm(self.blocks(self.dropout(x))))

    def loss(self, batch: list[Tensor]) -> Tensor:
        """Mean cross-entropy, in nats per byte, of `[sequences]`, uint8 (batch, time + 1)."""
        tokens = batch[0].long()
        return cross_entropy(self(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        loss = self.loss(batch)
        self.log("train_loss", loss)
        return loss

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        self.log("val_loss", self.loss(batch), sync_dist=True)

    def test_step(self, batch: list[Tensor], batch_idx: int) -> None:
        self.log("test_loss", self.loss(batch), sync_dist=True)

    def configure_optimizers(self) -> OptimizerLRSchedulerConfig:
        parameters = list(self.parameters())
        param_groups = [
            {"params": [p for p in parameters if p.ndim >= 2], "weight_decay": self.weight_decay},
            {"params": [p for p in parameters if p.ndim < 2], "weight_decay": 0.0},
        ]
        optimizer = torch.optim.AdamW(param_groups, lr=self.learning_rate, betas=(0.9, self.beta2))
        total = self.trainer.estimated_stepping_batches
        schedule = LambdaLR(optimizer, lambda step: warmup_cosine(step, self.warmup_steps, total))
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


def init_weights(module: GPTModule, layers: int) -> None:
    """GPT-2's: normal, narrower for weights that write into the residual stream; biases zero."""
    for name, parameter in module.named_parameters():
        if parameter.ndim >= 2:
            residual = name.endswith(("projection.weight", "perceptron.3.weight"))
            nn.init.normal_(parameter, std=0.02 / math.sqrt(2 * layers) if residual else 0.02)
        elif name.endswith("bias"):
            nn.init.zeros_(parameter)


def warmup_cosine(step: int, warmup_steps: int, total_steps: float) -> float:
    """Fraction of the full learning rate at `step`: linear rise, half a cosine down to 0.1."""
    if step < warmup_steps:
        return (step + 1) / (warmup_steps + 1)
    progress = min(1.0, (step - warmup_steps) / max(1, total_steps - warmup_steps))
    return 0.1 + 0.9 * (1 + math.cos(math.pi * progress)) / 2


def early_density(step: int) -> float:
    """A schedule for `TopK(density_schedule=...)`: denser at first, 1 % from step 750 on."""
    for until, density in (
        (75, 0.4),
        (225, 0.25),
        (375, 0.125),
        (525, 0.0625),
        (675, 0.03),
        (750, 0.015),
    ):
        if step < until:
            return density
    return 0.01


class StdlibText(LightningDataModule):
    """The standard library's top-level modules, in order of their names, as one run of bytes.

    It is cut by position: the first 30/32 train, the next 1/32 validates, the last 1/32 tests,
    each in sequences of `block_size + 1` bytes that share none (inputs and next-byte targets).
    Every Python release has its own text, so losses compare within one release only.

    Args:
        block_size: tokens that the model sees at once.
        batch_size: sequences per process and step.
        max_bytes: use no more than this much of the text (all releases have over 4 MB).
    """

    def __init__(
        self, block_size: int = 64, batch_size: int = 4, max_bytes: int = 1_000_000
    ) -> None:
        super().__init__()
        self.block_size = block_size
        self.batch_size = batch_size
        self.max_bytes = max_bytes

    def setup(self, stage: str) -> None:
        """Read and cut the text; ValueError if validation would be shorter than one sequence."""
        files = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
        text = b"".join(file.read_bytes() for file in files)[: self.max_bytes]
        held_out = len(text) // 32
        if held_out <= self.block_size:
            raise ValueError(
                f"`StdlibText(block_size={self.block_size})` needs validation text of at least "
                f"{self.block_size + 1} bytes, got {held_out} ({len(text)} / 32): give a smaller "
                f"block_size or a larger max_bytes than {self.max_bytes}."
            )
        tokens = torch.frombuffer(bytearray(text), dtype=torch.uint8)
        length = self.block_size + 1
        self.train, self.val, self.test = (
            TensorDataset(part[: len(part) // length * length].view(-1, length))
            for part in tokens.split([len(text) - 2 * held_out, held_out, held_out])
        )

    def train_dataloader(self) -> DataLoader:
        return DataLoader(self.train, self.batch_size, shuffle=True)

    def val_dataloader(self) -> DataLoader:
        return DataLoader(self.val, self.batch_size)

    def test_dataloader(self) -> DataLoader:
        return DataLoader(self.test, self.batch_size)


def unigram_loss(data: StdlibText) -> float:
    """Nats per validation byte of the best model without context: the training frequencies."""
    counts = data.train.tensors[0].flatten().bincount(minlength=VOCABULARY) + 1.0
    log_probability = (counts / counts.sum()).log()  # (256,)
    return -log_probability[data.val.tensors[0].flatten().long()].mean().item()


def main(strategy: str = "mgwfbp", devices: int = 2, steps: int = 120) -> None:
    """Train the GPT with `devices` CPU processes and assert how far the loss fell."""
    seed_everything(1)
    trainer = Trainer(
        accelerator="cpu",
        devices=devices,
        strategy=strategy,
        max_steps=steps,
        deterministic=True,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
    )
    module, data = GPTModule(), StdlibText()
    trainer.fit(module, data)
    (metrics,) = trainer.validate(module, data, verbose=False)
    loss, unigram = metrics["val_loss"], unigram_loss(data)
    if trainer.is_global_zero:
        print(
            f"gpt: {strategy}, {devices} processes, {steps} steps, validation loss {loss:.3f} "
            f"nats per byte (unigram {unigram:.3f}, uniform {math.log(VOCABULARY):.3f})"
        )
    assert loss < 0.9 * unigram, f"validation loss {loss:.3f}, expected below 0.9 x {unigram:.3f}"


if __name__ == "__main__":
    CLI(main)
