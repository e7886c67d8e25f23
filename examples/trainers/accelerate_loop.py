"""Cut a classifier in a loop with Accelerate, and resume between the cuts.

python examples/trainers/accelerate_loop.py --out out/accelerate
"""

import argparse
from pathlib import Path

import torch
from accelerate import Accelerator
from plain_loop import CUTS, STEPS, batch, build
from torch.nn.functional import cross_entropy

import compressm as cs
from compressm.integrations.accelerate import AcceleratedCompressor


def train(last: int, out: Path, resume: bool = False) -> None:
    """Train up to a step, from the beginning or from the saved state."""
    accelerator = Accelerator(cpu=True)
    model = build()
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-2))
    compressor = AcceleratedCompressor(accelerator, model, optimizer, when=CUTS, keep=cs.EnergyTolerance(0.05))
    if resume:
        accelerator.load_state(str(out))
    while compressor.count < last:
        x, target = batch(compressor.count + 1)
        accelerator.backward(cross_entropy(model(x), target))
        optimizer.step()
        optimizer.zero_grad()
        for event in compressor.step():
            print(f"step {compressor.count}: {event}")
    accelerator.save_state(str(out))
    print("saved with", *[block.ssm.order for block in accelerator.unwrap_model(model).blocks], "states")


def main() -> None:
    """Train in two parts."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("out/accelerate"))
    out = parser.parse_args().out
    train(30, out)
    train(STEPS, out, resume=True)


if __name__ == "__main__":
    main()
