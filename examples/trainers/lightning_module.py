"""Cut a classifier while the Trainer of Lightning trains it, resume between the cuts, and load the checkpoint.

python examples/trainers/lightning_module.py --out out/lightning
"""

import argparse
from pathlib import Path

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from plain_loop import CUTS, STEPS, batch, build
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, Dataset

import compressm as cs
from compressm.integrations.lightning import CompressionCallback


class Batches(Dataset):
    """The first half of the plain loop's batches: an epoch ends where the checkpoint is."""

    def __len__(self) -> int:
        return STEPS // 2

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        return batch(index + 1)


class Classifier(pl.LightningModule):
    """A module like any other: nothing in it knows of cuts."""

    def __init__(self) -> None:
        super().__init__()
        self.model = build()

    def training_step(self, pair: tuple[torch.Tensor, torch.Tensor], index: int) -> torch.Tensor:
        """The loss of a batch."""
        return cross_entropy(self.model(pair[0]), pair[1])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """One optimizer; the callback finds it."""
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


def fit(steps: int, out: Path, resume: Path | None = None) -> Path:
    """Train up to a step; return the checkpoint."""
    callback = CompressionCallback(when=CUTS, keep=cs.EnergyTolerance(0.05))
    save = ModelCheckpoint(out, filename="{step}", every_n_train_steps=steps, save_top_k=-1)
    quiet = {"enable_progress_bar": False, "enable_model_summary": False, "logger": False}
    trainer = pl.Trainer(max_steps=steps, accelerator="cpu", callbacks=[callback, save], **quiet)
    trainer.fit(Classifier(), DataLoader(Batches(), batch_size=None), ckpt_path=resume)
    print(*callback.history, sep="\n")
    return Path(save.best_model_path)


def main() -> None:
    """Train in two parts, and load what was saved at the end."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("out/lightning"))
    out = parser.parse_args().out
    last = fit(STEPS, out, resume=fit(STEPS // 2, out))
    loaded = Classifier.load_from_checkpoint(last)
    print("loaded with", *[block.ssm.order for block in loaded.model.blocks], "states")


if __name__ == "__main__":
    main()
