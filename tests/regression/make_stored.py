"""How the files in `stored` were made: by the version of commit df8a60f, before modules moved.

    python -m tests.regression.make_stored

It is run with that version only, and stays to say what the files hold. A later version must read them as they are:
files made anew would prove nothing. Checkpoints are packed by xz, a third of their size; `unpacked` brings them back.
"""

import contextlib
import lzma
import os
import random
import shutil
import signal
import sys
from unittest.mock import patch

import numpy as np
import torch

import compressm as cs
from tests.regression.pin import written
from tests.regression.stored_cases import (
    CHECKPOINTS,
    STORED,
    TRACKED_STEPS,
    TRAINING_STEPS,
    TRANSFORMERS,
    Training,
    cut_transformers,
    models,
    move,
    orders,
    outputs,
    tracked,
)
from tests.regression.trainings import HERE, ROOT, command_line

INTERRUPTED_AT = 6


def main():
    """Every file, and `expected.json` with what they give."""
    shutil.rmtree(STORED, ignore_errors=True)
    STORED.mkdir()
    torch.set_num_threads(1)
    random.seed(0)
    np.random.seed(0)  # noqa: NPY002 - its state goes into checkpoints
    expected = {"models": make_models(), "checkpoints": make_checkpoints(), "tracker": make_tracker()}
    expected["transformers"] = make_transformers()
    make_runs()
    make_result()
    for path in STORED.rglob("*.pt"):
        path.with_suffix(".pt.xz").write_bytes(lzma.compress(path.read_bytes(), preset=9 | lzma.PRESET_EXTREME))
        path.unlink()
    for path in STORED.rglob("*"):
        path.chmod(0o755 if path.is_dir() else 0o644)
    (STORED / "expected.json").write_text(written(expected))


def make_models():
    found = {}
    for name, model in models().items():
        cs.save_model(model, STORED / "models" / f"{name}.safetensors")
        found[name] = {"orders": orders(model), "outputs": outputs(model).tolist()}
    return found


def make_checkpoints():
    found = {}
    (STORED / "checkpoints").mkdir()
    for name, (step, guarded) in CHECKPOINTS.items():
        training = Training(guarded)
        training.train(1, step)
        training.save(STORED / "checkpoints" / f"{name}.pt", step)
        then = training.summary()
        losses = training.train(step + 1, TRAINING_STEPS)
        found[name] = {"then": then, "losses": losses, "in the end": training.summary()}
    return found


def make_tracker():
    model, tracker = tracked()
    for step in range(TRACKED_STEPS - 1):
        tracker.step(step)
        move(model, step)
    torch.save(tracker.state_dict(), STORED / "tracker.pt")
    tracker.step(TRACKED_STEPS - 1)
    spectra = [{name: sigma.tolist() for name, sigma in record.items()} for record in tracker.spectra]
    return {"steps": tracker.steps, "spectra": spectra, "bounds": tracker.bounds}


def make_transformers():
    import transformers

    found = {}
    for name, ranks in (("equal", (3, 3)), ("unequal", (2, 3))):
        torch.manual_seed(0)
        model = transformers.MambaForCausalLM(transformers.MambaConfig(**TRANSFORMERS)).eval()
        cut_transformers(model, *ranks)
        model.save_pretrained(STORED / "transformers" / name)
        if name == "unequal":
            cs.save_model(model, STORED / "transformers" / "ours.safetensors")
        found[name] = {"orders": list(ranks), "outputs": outputs(model).tolist()}
    return found | {"ours.safetensors": found["unequal"]}


def make_runs():
    """A run that is finished, one that Ctrl-C ended in the middle of its sixth step, one whose guard undid a cut."""
    os.environ["COMPRESSM_COMMIT"] = "df8a60f"
    compressm("train", HERE / "stored-run.yaml", "--out", STORED / "finished", "--device", "cpu", code=0)
    adamw, steps = torch.optim.AdamW.step, []

    def interrupted(*arguments, **options):
        steps.append(1)
        if len(steps) == INTERRUPTED_AT:
            signal.raise_signal(signal.SIGINT)
        return adamw(*arguments, **options)

    with patch.object(torch.optim.AdamW, "step", interrupted):
        compressm("train", HERE / "stored-run.yaml", "--out", STORED / "interrupted", "--device", "cpu", code=130)
    few = ("--set", "training.evaluate_every=6", "--device", "cpu")
    compressm("train", HERE / "recipes" / "s5-rollback.yaml", "--out", STORED / "restored", *few, code=0)
    shutil.rmtree(STORED / "restored" / "checkpoints")


def make_result():
    """What `compressm bench reduction` and the figure of it in `compressm reproduce` leave."""
    sizes = ("--order", "2", "--order", "4", "--repeats", "1")
    compressm("bench", "reduction", *sizes, "--out", STORED / "result", code=0)
    (STORED / "result" / "reduction-cpu.png").unlink()


def compressm(*arguments, code):
    """The command, which must end with `code`."""
    app = command_line(ROOT / "src", ".app").app
    with contextlib.redirect_stdout(sys.stderr):
        ended = app(list(map(str, arguments)), standalone_mode=False)
    assert (ended or 0) == code, ended


if __name__ == "__main__":
    main()
