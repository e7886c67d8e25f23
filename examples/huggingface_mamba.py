"""Train transformers' Mamba on a small text, letter by letter, and cut it to a quarter of its states.

python examples/huggingface_mamba.py --out out/huggingface_mamba

Model and optimizer are cut twice during training. Afterwards the model is an ordinary model of transformers:
`save_pretrained` saves it, `from_pretrained` loads it, and the loaded model writes the same text.
"""

import argparse
import time
from dataclasses import dataclass
from pathlib import Path

import torch
import transformers
from torch import Tensor
from transformers import MambaConfig, MambaForCausalLM

import compressm as cs

TEXT = Path(__file__).parent / "data" / "beekeeping.txt"


@dataclass(frozen=True)
class Size:
    """The size of the model and the length of its training; every step in `cuts` halves its states."""

    width: int = 48
    layers: int = 2
    states: int = 16
    length: int = 32
    batch: int = 8
    steps: int = 300
    cuts: tuple[int, ...] = (100, 150)
    every: int = 50  # steps between two printed lines
    written: int = 200  # letters


QUICK = Size(width=16, states=8, length=16, batch=4, steps=16, cuts=(4, 8), every=8, written=16)


class Letters:
    """A text as numbers; 0 is reserved for padding."""

    def __init__(self, text: str) -> None:
        self.alphabet = sorted(set(text))
        self.ids = self.encode(text)

    def encode(self, text: str) -> Tensor:
        """Turn every letter into a number."""
        return torch.tensor([self.alphabet.index(letter) + 1 for letter in text])

    def decode(self, ids: Tensor) -> str:
        """Turn numbers back into text."""
        return "".join(self.alphabet[k - 1] for k in ids.tolist() if k > 0)

    def windows(self, count: int, length: int, draw: torch.Generator) -> Tensor:
        """Draw pieces of the text from random places."""
        starts = torch.randint(len(self.ids) - length, (count,), generator=draw)
        return torch.stack([self.ids[start : start + length] for start in starts.tolist()])


def new_model(letters: Letters, setting: Size) -> MambaForCausalLM:
    """A model with random weights."""
    config = MambaConfig(
        vocab_size=len(letters.alphabet) + 1,
        hidden_size=setting.width,
        num_hidden_layers=setting.layers,
        state_size=setting.states,
        pad_token_id=0,
        bos_token_id=None,
        eos_token_id=None,
    )
    return MambaForCausalLM(config)


@torch.no_grad()
def loss_on(model: MambaForCausalLM, ids: Tensor) -> float:
    """The loss in nats per letter."""
    return float(model(ids, labels=ids, use_cache=False).loss)


def train(model: MambaForCausalLM, letters: Letters, setting: Size) -> None:
    """An ordinary training loop with one extra line: `compressor.step`."""
    draw = torch.Generator().manual_seed(0)
    shown = letters.windows(32, setting.length, draw)  # for the printed loss and for calibration
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
    compressor = cs.Compressor(
        model, optimizer, when=setting.cuts, keep=cs.KeepFraction(0.5), calibrate=lambda model: model(shown)
    )
    for step in range(1, setting.steps + 1):
        ids = letters.windows(setting.batch, setting.length, draw)
        optimizer.zero_grad()
        model(ids, labels=ids).loss.backward()
        optimizer.step()
        before = loss_on(model, shown) if step in setting.cuts else None
        for cut in compressor.step(step):
            print(f"step {step:4}: {cut}")
        if before is not None:
            print(f"step {step:4}: loss {before:.3f} before the cut, {loss_on(model, shown):.3f} after it")
        elif step % setting.every == 0:
            print(f"step {step:4}: loss {loss_on(model, shown):.3f}")


def written_by(model: MambaForCausalLM, letters: Letters, setting: Size) -> str:
    """Continue a few words with the most likely letter at each step."""
    start = letters.encode("In summer the ")[None]
    ids = model.generate(start, attention_mask=torch.ones_like(start), max_new_tokens=setting.written, do_sample=False)
    return letters.decode(ids[0])


def main() -> None:
    """Train, save and load the model, and let it write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("out/huggingface_mamba"), help="folder for the model")
    parser.add_argument("--quick", action="store_true", help="a tiny model for some seconds, which learns little")
    arguments = parser.parse_args()
    setting, began = QUICK if arguments.quick else Size(), time.perf_counter()
    transformers.logging.set_verbosity_error()  # no messages about kernels that only GPUs have
    transformers.logging.disable_progress_bar()
    torch.set_num_threads(1)  # more threads do not help with tensors this small
    torch.manual_seed(0)
    letters = Letters(TEXT.read_text(encoding="utf-8"))
    model = new_model(letters, setting)
    print(f"{len(letters.ids)} letters, {model.num_parameters()} parameters, {setting.states} states a channel")
    train(model, letters, setting)
    print(f"{model.num_parameters()} parameters, {model.config.state_size} states a channel")
    model.eval().save_pretrained(arguments.out)
    text = written_by(model, letters, setting)
    again = MambaForCausalLM.from_pretrained(arguments.out)
    print(f"\n{text}\n")
    print(f"The model read from {arguments.out} has {again.config.state_size} states a channel and writes", end=" ")
    print("the same." if written_by(again, letters, setting) == text else "something else.")
    print(f"{time.perf_counter() - began:.0f} s")


if __name__ == "__main__":
    main()
