"""Read tokens one by one with transformers or llama.cpp, in a process that cannot import compressm.

python studies/alone.py transformers|llama MODEL TOKENS.npy RESULT.npz
"""

import sys
import time
from collections.abc import Callable

import numpy as np

sys.modules["compressm"] = None  # type: ignore[assignment] # from here on an import of it fails


def transformers_step(path: str) -> Callable[[int], np.ndarray]:
    """A step of a model that `save_pretrained` wrote."""
    import torch
    from transformers import AutoModelForCausalLM, logging

    logging.set_verbosity_error()
    torch.set_num_threads(1)
    torch.set_grad_enabled(False)
    model, cache = AutoModelForCausalLM.from_pretrained(path).eval(), None

    def step(token: int) -> np.ndarray:
        nonlocal cache
        found = model(torch.tensor([[token]]), cache_params=cache, use_cache=True)
        cache = found.cache_params
        return found.logits[0, -1].numpy()

    return step


def llama_step(path: str) -> Callable[[int], np.ndarray]:
    """A step of a GGUF file on one thread of the CPU."""
    from llama_cpp import Llama

    model = Llama(path, n_threads=1, n_threads_batch=1, n_ctx=4096, verbose=False, logits_all=True)

    def step(token: int) -> np.ndarray:
        model.eval([token])
        return model.scores[model.n_tokens - 1]

    return step


def main() -> None:
    """Stream the tokens, and write logits and seconds of each."""
    kind, path, tokens, result = sys.argv[1:]
    step = {"transformers": transformers_step, "llama": llama_step}[kind](path)
    logits, seconds = [], []
    for token in np.load(tokens).tolist():
        began = time.perf_counter()
        found = step(token)
        seconds.append(time.perf_counter() - began)
        logits.append(found.copy())
    np.savez(result, logits=np.stack(logits), seconds=np.array(seconds))


if __name__ == "__main__":
    main()
