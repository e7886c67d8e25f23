"""Cut a Mamba while the Trainer of transformers trains it; plain transformers loads the result.

python examples/trainers/transformers_mamba.py --out out/transformers
"""

import argparse
from pathlib import Path

import torch
from transformers import MambaConfig, MambaForCausalLM, Trainer, TrainingArguments

import compressm as cs
from compressm.integrations.transformers_trainer import CompressionCallback

TEXT = (Path(__file__).parents[1] / "data" / "beekeeping.txt").read_text()
LETTERS = sorted(set(TEXT))
IDS = torch.tensor([LETTERS.index(letter) + 1 for letter in TEXT])
WINDOWS = [{"input_ids": row, "labels": row} for row in IDS[: len(IDS) // 32 * 32].reshape(-1, 32)]


def train(steps: int, out: Path, resume: Path | None = None) -> Trainer:
    """Train up to a step, with a checkpoint there."""
    torch.manual_seed(0)
    config = MambaConfig(vocab_size=len(LETTERS) + 1, hidden_size=24, state_size=8, num_hidden_layers=2)
    inputs = torch.stack([window["input_ids"] for window in WINDOWS[:4]])
    callback = CompressionCallback(
        when=[10, 20], keep=cs.KeepFraction(0.5), uniform=True, calibrate=lambda model: model(inputs)
    )
    arguments = TrainingArguments(
        str(out), max_steps=steps, save_steps=steps, learning_rate=1e-2, report_to=[], disable_tqdm=True, use_cpu=True
    )
    trainer = Trainer(MambaForCausalLM(config), arguments, train_dataset=WINDOWS, callbacks=[callback])
    trainer.train(resume_from_checkpoint=None if resume is None else str(resume))
    print(*callback.history, sep="\n")
    return trainer


def main() -> None:
    """Train in two parts, save, and load without this package."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("out/transformers"))
    out = parser.parse_args().out
    train(15, out)
    trainer = train(30, out, resume=out / "checkpoint-15")
    trainer.save_model(str(out / "model"))
    loaded = MambaForCausalLM.from_pretrained(out / "model")
    print("loaded with", loaded.config.state_size, "states")


if __name__ == "__main__":
    main()
