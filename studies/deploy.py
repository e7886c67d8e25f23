"""Cut language models where they run: in onnxruntime, in ExecuTorch, in transformers alone and in llama.cpp.

python studies/deploy.py --out benchmarks/results

Two models of the bytes of a small text are trained, whole and cut after a third of the steps: an LRU of this library,
which is exported, and a Mamba of transformers, which is saved as transformers saves it. Every runtime reads the same
tokens one by one, on one core, and its logits are compared with those of PyTorch here. The processes of transformers
and llama.cpp cannot import compressm.

llama.cpp takes part if `llama_cpp` can be imported and $LLAMA_CPP is the folder of its source, where the converter is:
pip install llama-cpp-python
"""

from __future__ import annotations

import importlib.util
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import compressm as cs
from command import Progress, run, silent
from compressm_lab.runs.measurement import Measurement, Row

TEXT = Path(__file__).parents[1] / "examples" / "data" / "beekeeping.txt"
BYTES = 256


@dataclass(frozen=True)
class Size:
    """The size of both models; LRU and Mamba are cut from the first to the second order."""

    width: int = 128
    depth: int = 4
    lru: tuple[int, int] = (256, 28)
    mamba: tuple[int, int] = (64, 16)
    length: int = 24
    batch: int = 8
    steps: int = 150
    tokens: int = 512  # read one by one in every runtime


QUICK = Size(width=16, depth=2, lru=(16, 4), mamba=(8, 3), length=16, batch=4, steps=8, tokens=24)


@dataclass(frozen=True)
class Streamed:
    """The logits of a stream of tokens, the seconds of each, and the size of the file that was read."""

    logits: Tensor
    seconds: list[float]
    size: int


Runtime = Callable[[nn.Module, Tensor, Path], Streamed]


def measure_deploy(*, seeds: int = 1, quick: bool = False, progress: Progress = silent) -> Measurement:
    """Measure one row a model and runtime: difference of logits, size of the file, time of a token; whole and cut."""
    size, rows = QUICK if quick else Size(), []
    for seed in range(seeds):
        for name, (make, order, runtimes) in _models(size).items():
            text = Windows(seed)
            whole, small = (_trained(make, order[0], rank, size, seed) for rank in order)
            losses = [_loss(model, text, size) for model in (whole, small)]
            progress(
                f"{name}, seed {seed}: loss {losses[0]:.3f} with {order[0]} states, {losses[1]:.3f} with {order[1]}"
            )
            common = {"model": name, "seed": seed, "order": order[0], "rank": order[1], "device": "cpu"}
            common |= {"loss": losses[0], "loss_cut": losses[1]}
            for row in _rows(whole, small, text.ids[: size.tokens], runtimes):
                progress(f"{row['runtime']}: {1e6 * row['seconds']:.0f} -> {1e6 * row['seconds_cut']:.0f} µs a token")
                rows.append(common | row)
    return Measurement("deploy", "A token in other runtimes, before and after a cut", seeds, rows)


def _models(size: Size) -> dict[str, tuple[Callable[[int], nn.Module], tuple[int, int], dict[str, Runtime]]]:
    """Each kind of model, its orders and the runtimes that take it."""
    from transformers import MambaConfig, MambaForCausalLM

    def lru(order: int) -> nn.Module:
        return cs.models.LanguageModel(cs.layers.LRU, vocabulary=BYTES, depth=size.depth, width=size.width, order=order)

    def mamba(order: int) -> nn.Module:
        # llama.cpp's converter rounds the vocabulary up to a multiple of eight: bytes, one pair, and what is not used.
        sizes = {
            "vocab_size": BYTES + 8,
            "hidden_size": size.width,
            "num_hidden_layers": size.depth,
            "state_size": order,
        }
        return MambaForCausalLM(MambaConfig(**sizes, bos_token_id=None, eos_token_id=None, pad_token_id=None))

    ours: dict[str, Runtime] = {
        "PyTorch": by_step,
        "Stream": by_stream,
        "onnxruntime": by_onnx,
        "ExecuTorch": by_executorch,
    }
    theirs: dict[str, Runtime] = {"transformers": by_transformers}
    if has_llama():
        theirs["llama.cpp"] = by_llama
    return {"LRU": (lru, size.lru, ours), "Mamba of transformers": (mamba, size.mamba, theirs)}


def _rows(whole: nn.Module, small: nn.Module, tokens: Tensor, runtimes: dict[str, Runtime]) -> Iterator[Row]:
    expected = [_logits(model, tokens[None])[0] for model in (whole, small)]
    for name, runtime in runtimes.items():
        with tempfile.TemporaryDirectory() as folder:
            found = [
                runtime(model, tokens, Path(folder, which)) for model, which in ((whole, "whole"), (small, "small"))
            ]
        before, after = ((one.logits - wanted).abs().max().item() for one, wanted in zip(found, expected, strict=True))
        yield {
            "runtime": name,
            "difference": before,
            "difference_cut": after,
            "bytes": found[0].size,
            "bytes_cut": found[1].size,
            "seconds": statistics.median(found[0].seconds),
            "seconds_cut": statistics.median(found[1].seconds),
        }


class Windows:
    """The bytes of the text, and pieces of it from random places."""

    def __init__(self, seed: int) -> None:
        self.ids = torch.tensor(list(TEXT.read_bytes()))
        self._draw = torch.Generator().manual_seed(seed)

    def drawn(self, count: int, length: int) -> Tensor:
        """Pieces of the text, one a row."""
        starts = torch.randint(len(self.ids) - length, (count,), generator=self._draw)
        return torch.stack([self.ids[start : start + length] for start in starts.tolist()])


def _logits(model: nn.Module, ids: Tensor) -> Tensor:
    with torch.no_grad():
        found = model.eval()(ids)
    return (found[0] if isinstance(found, tuple) else found.logits).detach()


def _loss(model: nn.Module, text: Windows, size: Size) -> float:
    """The loss on the beginning of the text, in nats a byte."""
    ids = text.ids[: size.length * size.batch].unflatten(0, (size.batch, size.length))
    return cross_entropy(_logits(model, ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten()).item()


def _trained(make: Callable[[int], nn.Module], order: int, rank: int, size: Size, seed: int) -> nn.Module:
    """A model that is trained, and cut to `rank` states after a third of the steps."""
    torch.manual_seed(seed)
    model, text = make(order), Windows(seed)
    some = text.drawn(4 * size.batch, size.length)  # at least as many steps as states
    optimizer = torch.optim.AdamW(model.train().parameters(), lr=3e-3)
    for step in range(1, size.steps + 1):
        ids = text.drawn(size.batch, size.length + 1)
        found = model(ids[:, :-1])
        logits = found[0] if isinstance(found, tuple) else found.logits
        optimizer.zero_grad()
        cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten()).backward()
        optimizer.step()
        if rank < order and step == size.steps // 3:
            cs.compress_(model, keep=cs.TargetOrder(rank), optimizer=optimizer, calibrate=lambda model: model(some))
    return model.eval()


def timed(step: Callable[[int], Any], tokens: Tensor, size: int) -> Streamed:
    """Read the tokens one by one."""
    logits, seconds = [], []
    for token in tokens.tolist():
        began = time.perf_counter()
        found = step(token)
        seconds.append(time.perf_counter() - began)
        logits.append(torch.as_tensor(found).reshape(-1).float().clone())
    return Streamed(torch.stack(logits), seconds, size)


def by_step(model: nn.Module, tokens: Tensor, folder: Path) -> Streamed:
    """`model.step` of this library."""
    cs.save_model(model, folder)
    state = model.initial_state(1)

    def step(token: int) -> Tensor:
        nonlocal state
        logits, state = model.step(torch.tensor([token]), state)
        return logits

    with torch.inference_mode():
        return timed(step, tokens, (folder / "model.safetensors").stat().st_size)


def by_stream(model: nn.Module, tokens: Tensor, folder: Path) -> Streamed:
    """`cs.Stream`."""
    cs.save_model(model, folder)
    stream = cs.Stream(model, 1)
    return timed(lambda token: stream(torch.tensor([token])), tokens, (folder / "model.safetensors").stat().st_size)


def by_onnx(model: nn.Module, tokens: Tensor, folder: Path) -> Streamed:
    """An ONNX file of the step in onnxruntime, as somebody uses it who has no torch."""
    import onnxruntime

    file = _exported(model, folder / "model.onnx")
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    session = onnxruntime.InferenceSession(str(file), options, providers=["CPUExecutionProvider"])
    state = np.zeros((1, session.get_inputs()[1].shape[1]), dtype=np.float32)

    def step(token: int) -> np.ndarray:
        nonlocal state
        logits, state = session.run(None, {"x": np.array([token]), "state": state})
        return logits

    return timed(step, tokens, file.stat().st_size)


def by_executorch(model: nn.Module, tokens: Tensor, folder: Path) -> Streamed:
    """A file of the step for ExecuTorch, in its own runtime."""
    from executorch.runtime import Runtime

    file = _exported(model, folder / "model.pte")
    method = Runtime.get().load_program(str(file)).load_method("forward")
    state = torch.zeros(1, method.metadata.input_tensor_meta(1).sizes()[1])

    def step(token: int) -> Tensor:
        nonlocal state
        logits, following = method.execute([torch.tensor([token]), state])
        state = following.clone()  # the next call writes over it
        return logits

    return timed(step, tokens, file.stat().st_size)


def _exported(model: nn.Module, file: Path) -> Path:
    file.parent.mkdir()
    return cs.export(model, file).path


def by_transformers(model: nn.Module, tokens: Tensor, folder: Path) -> Streamed:
    """The files of `save_pretrained`, read by transformers alone."""
    model.save_pretrained(folder)
    return _alone("transformers", folder, tokens, (folder / "model.safetensors").stat().st_size)


def has_llama() -> bool:
    """True where llama.cpp and its converter are to be had."""
    return importlib.util.find_spec("llama_cpp") is not None and "LLAMA_CPP" in os.environ


def by_llama(model: nn.Module, tokens: Tensor, folder: Path) -> Streamed:
    """A GGUF file that llama.cpp's own converter made of the files of `save_pretrained`."""
    model.save_pretrained(folder)
    _byte_tokenizer().save_pretrained(folder)
    source, file = os.environ["LLAMA_CPP"], folder / "model.gguf"
    # The converter knows tokenizers by a hash; ours, a token a byte, is split as that of GPT-2.
    convert = f"""
import sys
sys.path[:0] = [{source!r}, {source + "/gguf-py"!r}]
import conversion.base
conversion.base.TextModel.get_vocab_base_pre = lambda self, tokenizer: "gpt-2"
import convert_hf_to_gguf
convert_hf_to_gguf.main()
"""
    _run("-c", convert, str(folder), "--outfile", str(file), "--outtype", "f32")
    return _alone("llama", file, tokens, file.stat().st_size)


def _byte_tokenizer() -> Any:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    # GPT-2 writes a byte that cannot be printed as a letter from 256 on.
    printable = {*range(33, 127), *range(161, 173), *range(174, 256)}
    others = iter(range(BYTES, 2 * BYTES))
    letters = [chr(byte) if byte in printable else chr(next(others)) for byte in range(BYTES)]
    # llama.cpp reads no tokenizer without a pair that is merged: one that never occurs in a text.
    pair = (letters[0], letters[1])
    vocabulary = {letter: k for k, letter in enumerate([*letters, "".join(pair)])}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[pair]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer)


def _alone(kind: str, path: Path, tokens: Tensor, size: int) -> Streamed:
    """Stream the tokens in a process of its own."""
    given, result = path.with_name("tokens.npy"), path.with_name("result.npz")
    np.save(given, tokens.numpy())
    _run(str(Path(__file__).with_name("alone.py")), kind, str(path), str(given), str(result))
    with np.load(result) as found:
        return Streamed(torch.from_numpy(found["logits"]).float(), found["seconds"].tolist(), size)


def _run(*arguments: str) -> None:
    done = subprocess.run([sys.executable, *arguments], capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{arguments[0]:.60} ended with {done.returncode}:\n{done.stderr[-2000:]}")


if __name__ == "__main__":
    run(measure_deploy, seeds=1, description=__doc__.splitlines()[0])
