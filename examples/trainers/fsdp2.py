"""Cut a model that `fully_shard` has sharded over several processes, and resume from its distributed checkpoint.

torchrun --nproc-per-node 2 examples/trainers/fsdp2.py --out out/fsdp2
"""

import argparse
from pathlib import Path

import torch
import torch.distributed as dist
from plain_loop import CUTS, STEPS, batch, build
from torch.distributed import checkpoint
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard
from torch.nn.functional import cross_entropy

import compressm as cs
from compressm.compression import take_stored_orders_


def train(first: int, last: int, folder: Path) -> None:
    """Train from one step to another; a later first step resumes from the folder."""
    model = build()
    if first > 1:
        take_stored_orders_(model, folder)  # before fully_shard: shards have the sizes of the checkpoint
    for block in model.blocks:
        fully_shard(block)
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    compressor = cs.Compressor(model, optimizer, when=CUTS, keep=cs.EnergyTolerance(0.05))
    if first > 1:
        weights, moments = get_state_dict(model, optimizer)
        checkpoint.load({"model": weights, "optimizer": moments}, checkpoint_id=folder)
        set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=moments)
        compressor.load_state_dict(torch.load(folder / "compressor.pt"))
    for step in range(first, last + 1):
        x, target = batch(step * dist.get_world_size() + dist.get_rank())
        loss = cross_entropy(model(x), target)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        events = compressor.step(step)
        if dist.get_rank() == 0:
            print(*(f"step {step}: {event}\n" for event in events), sep="", end="", flush=True)
    weights, moments = get_state_dict(model, optimizer)
    checkpoint.save({"model": weights, "optimizer": moments}, checkpoint_id=folder)
    if dist.get_rank() == 0:
        torch.save(compressor.state_dict(), folder / "compressor.pt")
        print("saved with", *[block.ssm.order for block in model.blocks], "states", flush=True)
    dist.barrier()


def main() -> None:
    """Train in two parts."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("out/fsdp2"))
    out = parser.parse_args().out
    dist.init_process_group("gloo")
    train(1, 30, out)
    train(31, STEPS, out)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
