"""Cut a classifier in a training loop of one's own, stop in the middle, and resume at the smaller orders.

python examples/trainers/plain_loop.py --out out/plain_loop
"""

import argparse
from pathlib import Path

import torch
from torch.nn.functional import cross_entropy

import compressm as cs
from compressm.compression import load_checkpoint, save_checkpoint

STEPS, CUTS = 60, [20, 40]


def batch(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Noise with a tone of one of four pitches: which one?"""
    draw = torch.Generator().manual_seed(step)
    pitch, phase = torch.randint(4, (16, 1), generator=draw), torch.rand(16, 1, generator=draw)
    x = torch.sin(6.28 * (phase + torch.arange(32) * 0.05 * (1 + pitch))) + 0.5 * torch.randn(16, 32, generator=draw)
    return x[..., None], pitch[:, 0]


def build() -> cs.models.SequenceClassifier:
    """A model at its order before any cut."""
    torch.manual_seed(0)
    return cs.models.SequenceClassifier(cs.layers.LRU, depth=2, width=16, order=32, inputs=1, classes=4)


def train(first: int, last: int, path: Path) -> cs.models.SequenceClassifier:
    """Train from one step to another; a later first step resumes from the file."""
    model = build()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    compressor = cs.Compressor(model, optimizer, when=CUTS, keep=cs.EnergyTolerance(0.05))
    if first > 1:
        load_checkpoint(path, model=model, optimizer=optimizer, compressor=compressor)
    for step in range(first, last + 1):
        x, target = batch(step)
        loss = cross_entropy(model(x), target)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        for event in compressor.step(step):
            print(f"step {step}: {event}")
    print(f"step {last}: loss {loss.item():.3f}")
    save_checkpoint(path, model=model, optimizer=optimizer, compressor=compressor, step=last)
    return model


def main() -> None:
    """Train in two parts, and save the smaller model."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("out/plain_loop"))
    out = parser.parse_args().out
    out.mkdir(parents=True, exist_ok=True)
    train(1, 30, out / "training.ckpt")
    model = train(31, STEPS, out / "training.ckpt")
    cs.save_model(model, out / "model")
    loaded = cs.load_model(out / "model")
    print("saved with", *[block.ssm.order for block in loaded.blocks], "states")


if __name__ == "__main__":
    main()
