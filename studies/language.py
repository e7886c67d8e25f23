"""Bytes of IMDB reviews: a Mamba-2 and a Gated DeltaNet cut after training, in all forms and by the rivals.

python studies/language.py --data FOLDER --prepare imdb.npz    # where the reviews are: one small file
python studies/language.py --data imdb.npz --out OUT --minutes 4
python studies/language.py --decode --out OUT                  # a token of fresh models: no data, no training

One model of each family is trained for a share of the time; its number of steps comes from the time of the first ones.
Then every way cuts it from 128 states to 64, 32 and 16: the perplexity of a byte right after the cut and 200 steps
later. At last, alone on the device, the memory and the time of a token are measured: by the clock on a GPU, by the time
of the process on a CPU, of which it has one thread. A second call goes on.
"""

from __future__ import annotations

import argparse
import math
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

import compressm as cs
from banks import Trainer, arms, captured, next_token_loss, repeated, schedule
from command import spoken
from compressm.files import replacing
from compressm_lab.data.text import FOLDERS
from compressm_lab.experiments.rows import count
from compressm_lab.runs.measurement import Measurement, Row
from memory_models import FAMILIES, Decoder, Parameters, Shape
from side_by_side import Job, collected, device, main, rows_of

BYTES = 256
_BLOCK = 25  # steps whose data are made at once
_KEPT_EVERY = 20  # blocks
_CUT = 40.0  # seconds that a cut, and the timing of tokens after all cuts, may take
_TIMED_AFTER, _TIMED = 10, 25  # steps
_MORE_AT = 0.1  # of the rate, at the end of the training and after cuts


@dataclass(frozen=True)
class Plan:
    """The models, their training and the cuts."""

    data: str
    width: int = 384
    depth: int = 6
    order: int = 128
    ranks: tuple[int, ...] = (64, 32, 16)
    length: int = 512
    batch: int = 32
    rate: float = 2e-3
    steps: int = 0  # 0: as many as `seconds` allow
    seconds: float = 90.0
    more: int = 200
    tested: int = 1024  # sequences
    calibrated: int = 32
    batches: tuple[int, ...] = (1, 32, 256)
    tokens: int = 64  # timed at once; an eighth of them on a CPU
    seed: int = 0

    def shape(self, family: str, order: int | None = None) -> Shape:
        order = order or self.order
        if family == "Mamba-2":
            return Shape(family, BYTES, self.width, self.depth, order, heads=self.width // 32)
        groups = max(1, self.width // 128)
        mlp = 4 * self.width // 3
        return Shape(family, BYTES, self.width, self.depth, order, heads=2 * groups, groups=groups, mlp=mlp)

    @property
    def dtype(self) -> torch.dtype:
        return torch.bfloat16 if device().type == "cuda" else torch.float32


SMALL = {"width": 32, "depth": 1, "order": 16, "ranks": (4,), "length": 32, "batch": 4, "steps": 8, "more": 4}
SMALL |= {"tested": 8, "calibrated": 4, "batches": (1, 2), "tokens": 3}


def prepare(folder: Path, file: Path, tested: int = 1 << 20) -> Path:
    """Put the bytes of all training reviews, and some of the test reviews, into one compressed file.

    Reviews stand in an order drawn once, a zero after each.
    """
    root = next(
        (path for path in (folder / "aclImdb", folder / "imdb" / "aclImdb", folder) if (path / "train").is_dir()), None
    )
    if root is None:
        raise SystemExit(f"{folder} has no aclImdb/train; expected the folder of the IMDB reviews")
    draw, found = np.random.default_rng(0), {}
    for part in ("train", "test"):
        paths = sorted(path for name in FOLDERS if name.startswith(part) for path in (root / name).glob("*.txt"))
        texts = [paths[k].read_bytes() + b"\0" for k in draw.permutation(len(paths))]
        found[part] = np.frombuffer(b"".join(texts), np.uint8)
    with replacing(file) as scratch, scratch.open("wb") as stream:
        np.savez_compressed(stream, train=found["train"], test=found["test"][:tested])
    return file


def text(plan: Plan, part: str) -> Tensor:
    """The bytes of a part of the data, on the device."""
    with np.load(plan.data) as stored:
        return torch.from_numpy(stored[part]).to(device())


def windows(whole: Tensor, count: int, length: int, seed: int) -> Tensor:
    """Pieces of the text (count, length) from random places."""
    generator = torch.Generator(whole.device).manual_seed(seed)
    starts = torch.randint(len(whole) - length, (count, 1), generator=generator, device=whole.device)
    return whole[starts + torch.arange(length, device=whole.device)].long()


def perplexity(trainer: Trainer, plan: Plan) -> float:
    """exp of the mean loss of a byte on the beginning of the test reviews."""
    whole = text(plan, "test")
    pieces = min(plan.tested, len(whole) // (plan.length + 1))
    ids = whole[: pieces * (plan.length + 1)].view(pieces, -1).long()
    total = 0.0
    with torch.no_grad():
        for some in ids.split(plan.batch):
            loss = next_token_loss(trainer.bank, trainer.shape, some[None], slice(None), trainer.dtype)
            total += len(some) / pieces * loss.item()
    return math.exp(total)


def train(plan: Plan, family: str, folder: Path, until: float) -> list[Row] | None:
    """Train the large model of a family; one row."""
    trainer, file = _fresh(plan, family), _file(folder, family)
    stored = trainer.load_(file) if file.exists() else {"done": 0, "steps": plan.steps}
    done, steps, step, whole = stored["done"], stored["steps"], captured(trainer, spoken), text(plan, "train")
    own = torch.full((1,), plan.rate, device=whole.device)
    began, until = time.time(), until - 5
    factors = schedule(steps, steps // 20, _MORE_AT).to(own.device) if steps else None
    while steps == 0 or done < steps:
        block, place = divmod(done, _BLOCK)
        if place == 0:  # so is every file
            ids = _block(plan, whole, block)
            if time.time() > until:
                trainer.save(file, done=done, steps=steps)
                return None
            if block % _KEPT_EVERY == 0 and steps:
                trainer.save(file, done=done, steps=steps)
        # Until the number of steps is known the rate rises as in any warm-up.
        step(ids[place][None], own * (factors[done] if factors is not None else (done + 1) / 500))
        done += 1
        if steps == 0 and done in (_TIMED_AFTER, _TIMED_AFTER + _TIMED):
            _synchronize()
            if done == _TIMED_AFTER:
                first = time.time()
            else:
                each = (time.time() - first) / _TIMED
                left = plan.seconds - (time.time() - began)
                steps = max(100, done + int(left / each))
                factors = schedule(steps, max(500, steps // 20), _MORE_AT).to(own.device)
                spoken(f"{family}: {1e3 * each:.1f} ms a step, so {steps} steps")
    trainer.save(file, done=done, steps=steps)
    return [_row(plan, family, "uncut", plan.order) | _count(trainer) | {"steps": steps}]


def cut(plan: Plan, family: str, arm: str, rank: int, folder: Path, until: float) -> list[Row] | None:
    """Cut the large model in one way, or not at all, and train it for some steps more; one row."""
    trainer = _fresh(plan, family)
    trainer.load_(_file(folder, family))
    whole = text(plan, "train")
    row = _row(plan, family, arm, rank) | {"perplexity": perplexity(trainer, plan)}
    if rank < plan.order:
        ids = windows(whole, plan.calibrated, plan.length, 2 * plan.seed + 1)
        trainer, errors = trainer.cut(rank, [arms(trainer.shape, plan.seed)[arm]], ids[None])
        row |= {"error": errors[0]}
    row |= {"perplexity_cut": perplexity(trainer, plan)} | _count(trainer)
    step, own = captured(trainer, spoken), torch.full((1,), _MORE_AT * plan.rate, device=whole.device)
    for k in range(plan.more):
        block, place = divmod(k, _BLOCK)
        if place == 0:
            ids = _block(plan, whole, 10**6 + block)
            if time.time() > until - 3:
                return None
        step(ids[place][None], own)
    return [row | {"perplexity_more": perplexity(trainer, plan), "more": plan.more}]


def decode(plan: Plan, family: str, folder: Path, until: float) -> list[Row] | None:
    """The memory of a sequence and the time of a token of all sizes; values do not matter, so they are fresh."""
    rows: list[Row] = []
    for stored in ("rows", "maps") if "Mapped" in arms(plan.shape(family)) else ("rows",):
        for rank in (plan.order, *plan.ranks) if stored == "rows" else plan.ranks:
            shape = plan.shape(family, rank if stored == "rows" else None)
            bank = repeated(shape, [plan.seed], device())
            if stored == "maps":
                bank |= _maps(bank, shape, rank)
            bank = {name: value.to(plan.dtype) if value.ndim > 2 else value for name, value in bank.items()}
            for batch in plan.batches:
                if time.time() > until - 2:
                    return None
                rows.append(_row(plan, family, stored, rank) | _timed(bank, shape, batch, plan))
    return rows


def _timed(bank: Parameters, shape: Shape, batch: int, plan: Plan) -> Row:
    """The median time of a step of so many sequences, each one token, as a CUDA graph where there is a GPU."""
    decoder = Decoder.of(bank, shape, batch, plan.dtype)
    step, ids = cs.CapturedStep(decoder), torch.zeros(1, batch, dtype=torch.long, device=device())
    on_gpu, seconds = device().type == "cuda", []
    # Other programs on the machine lengthen wall time; the host is idle while a GPU computes.
    clock, tokens = (time.perf_counter, plan.tokens) if on_gpu else (time.process_time, max(1, plan.tokens // 8))
    with torch.no_grad():
        for _ in range(6 if on_gpu else 2):
            step(ids)
        for _ in range(5):
            _synchronize()
            began = clock()
            for _ in range(tokens):
                step(ids)
            _synchronize()
            seconds.append((clock() - began) / tokens)
    weights = sum(value.numel() * value.element_size() for value in bank.values())
    sizes: Row = {"batch": batch, "state_bytes": decoder.state_bytes // batch, "weight_bytes": weights}
    return sizes | {"seconds": statistics.median(seconds)}


def _maps(bank: Parameters, shape: Shape, rank: int) -> Parameters:
    """Maps of every layer from its rows to `rank` states."""
    found = {}
    for name in bank:
        path, _, leaf = name.rpartition("conv1d.weight")
        if path and not leaf:
            for of in ("key_map", "query_map"):
                found[path + of] = torch.randn(1, shape.groups, shape.order, rank, device=device())
    return found


def _fresh(plan: Plan, family: str) -> Trainer:
    return Trainer(repeated(plan.shape(family), [plan.seed], device()), plan.shape(family), dtype=plan.dtype)


def _block(plan: Plan, whole: Tensor, block: int) -> Tensor:
    """Tokens (steps, batch, length + 1) of a block of steps."""
    drawn = windows(whole, _BLOCK * plan.batch, plan.length + 1, 2 * (plan.seed + 10**7 * (block + 1)))
    return drawn.unflatten(0, (_BLOCK, -1))


def _count(trainer: Trainer) -> Row:
    return {"parameters": trainer.values.shape[1]}


def _row(plan: Plan, family: str, arm: str, rank: int) -> Row:
    common: Row = {"family": family, "arm": arm, "order": plan.order, "rank": rank, "seed": plan.seed}
    return common | {"width": plan.width, "depth": plan.depth, "device": device().type}


def _file(folder: Path, family: str) -> Path:
    return folder / f"{_name(family, 'whole')}.pt"


def _name(family: str, arm: str, rank: int = 0) -> str:
    return f"{family.replace(' ', '-')}-{arm}{f'-{rank}' if rank else ''}".lower()


def _synchronize() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def jobs(plan: Plan, families: tuple[str, ...] = FAMILIES) -> tuple[list[Job], list[Job]]:
    """The jobs of perplexity, small orders first, and those of decoding."""
    whole = [Job(_name(family, "whole"), train, (plan, family)) for family in families]
    # The number of steps comes from the time of the first ones, which holds as long as only trainings share the device.
    trained, found = tuple(job.name for job in whole), whole
    for rank in (plan.order, *reversed(plan.ranks)):
        for family in families:
            for arm in ("uncut",) if rank == plan.order else arms(plan.shape(family)):
                found.append(Job(_name(family, arm, rank), cut, (plan, family, arm, rank), after=trained, least=_CUT))
    return found, [Job(_name(family, "decode"), decode, (plan, family), alone=True) for family in families]


def collect(trained: list[Job], timed: list[Job], folder: Path) -> list[Measurement]:
    """The perplexities, and the times and sizes of tokens."""
    steps = {row["family"]: row["steps"] for job in trained for row in rows_of(job, folder) or () if "steps" in row}
    rows = [row | {"steps": steps[row["family"]]} for row in collected(trained, folder) if "perplexity" in row]
    return [
        Measurement("language", "Bytes of IMDB reviews, cut after training", 1, rows),
        Measurement("language_decode", "A token of the byte models", 5, collected(timed, folder)),
    ]


def _options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--data", type=Path, help="the file that --prepare wrote")
    parser.add_argument("--prepare", type=Path, metavar="FILE", help="only make this file, from the folder --data")
    parser.add_argument("--steps", type=count, help="of the training (as many as its share of --minutes allows)")
    parser.add_argument("--share", type=float, default=0.42, help="of --minutes for the training (%(default)s)")
    parser.add_argument("--rate", type=float, default=Plan.rate, help="of the training (%(default)s)")
    parser.add_argument("--family", choices=FAMILIES, help="only this one")
    parser.add_argument("--decode", action="store_true", help="only the memory and the time of a token: without --data")


def _planned(given: argparse.Namespace) -> tuple[list[Job], Callable[[], list[Measurement]]]:
    if given.data is None and not given.decode:
        raise SystemExit("expected --data with the file that --prepare wrote, or --decode, which needs none")
    if given.prepare:
        prepare(given.data, given.prepare)
        raise SystemExit(f"{given.prepare}: {given.prepare.stat().st_size} bytes")
    data = "" if given.data is None else str(given.data.resolve())
    plan = Plan(data, rate=given.rate, seconds=60 * given.minutes * given.share)
    plan = replace(plan, **(SMALL if given.quick else {}))
    plan = replace(plan, steps=given.steps or plan.steps)
    trained, timed = jobs(plan, (given.family,) if given.family else FAMILIES)
    trained = [] if given.decode else trained
    return [*trained, *timed], partial(collect, trained, timed, given.out / "jobs")


if __name__ == "__main__":
    main(_planned, _options, description=(__doc__ or "").splitlines()[0], processes=8, progress=spoken)
