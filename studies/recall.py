"""Associative recall: Mamba-2 and Gated DeltaNet cut in training, in all forms and by the rivals, beside small models.

python studies/recall.py --out OUT --minutes 5

A sequence lists pairs of a key and a value, then asks for the value of every key in another order; the accuracy is the
share of right values. Models of 64 states and small ones from scratch are trained at several rates; each size keeps the
rate that is best on validation. The large models of that rate are cut at half of their training, and go on with the
schedule they had. Members of one shape, whatever their rate, seed or cut, are one bank, which trains as one model; some
banks run side by side on the GPU; a second call goes on. `--small --processes 1` is for a CPU.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from torch import Tensor

from banks import Trainer, arms, captured, repeated, schedule
from command import spoken
from compressm.adapters import Basis
from compressm_lab.experiments.rows import count
from compressm_lab.runs.measurement import Measurement, Row
from memory_models import FAMILIES, Shape, forward
from side_by_side import Job, collected, device, main, rows_of

_TRAINING, _VALIDATION, _TEST = 0, 1, 2  # parts of the data, none of which shares a generator with another
_BLOCK = 50  # steps whose data are made at once
_KEPT_EVERY = 10  # blocks
_CUT = 40.0  # seconds that the cuts of a bank may take


@dataclass(frozen=True)
class Plan:
    """The task, the models and their training."""

    pairs: int = 32
    symbols: int = 64  # of keys, and as many of values
    width: int = 64
    depth: int = 2
    order: int = 64
    ranks: tuple[int, ...] = (32, 16)
    steps: int = 2500
    batch: int = 64
    rates: tuple[float, ...] = (1e-3, 2e-3, 4e-3, 8e-3)
    seeds: int = 3
    cut_at: float = 0.5
    tested: int = 1024
    calibrated: int = 128

    @property
    def length(self) -> int:
        return 4 * self.pairs

    @property
    def asked(self) -> slice:
        """The steps of the second half that hold a key; its value follows."""
        return slice(2 * self.pairs, None, 2)

    def shape(self, family: str, order: int) -> Shape:
        if family == "Mamba-2":
            return Shape(family, 2 * self.symbols, self.width, self.depth, order, heads=4)
        return Shape(family, 2 * self.symbols, self.width, self.depth, order, heads=2, groups=2, mlp=2 * self.width)


QUICK = Plan(pairs=3, symbols=8, width=16, depth=1, order=8, ranks=(4,), steps=24, batch=8, rates=(4e-3,), seeds=2)
QUICK = replace(QUICK, tested=32, calibrated=16)
# What one core of a CPU does in half an hour a family.
SMALL = Plan(pairs=16, symbols=32, ranks=(16,), steps=600, batch=32, rates=(2e-3, 4e-3, 8e-3, 1.6e-2), tested=512)


def sequences(plan: Plan, batch: int, generator: torch.Generator) -> Tensor:
    """Tokens (batch, length): keys are below `symbols`, values from there on."""
    where = generator.device

    def shuffled(n: int) -> Tensor:
        return torch.rand(batch, n, generator=generator, device=where).argsort(-1)

    keys = shuffled(plan.symbols)[:, : plan.pairs]
    values = torch.randint(plan.symbols, (batch, plan.pairs), generator=generator, device=where) + plan.symbols
    listed = torch.stack([keys, values], dim=-1)
    asked = listed.gather(1, shuffled(plan.pairs)[..., None].expand(-1, -1, 2))
    return torch.cat([listed, asked], dim=1).flatten(1)


def data(plan: Plan, seed: int, part: int, block: int, batch: int, where: torch.device) -> Tensor:
    """The tokens of a block of the data of this seed: the same whatever was drawn before."""
    generator = torch.Generator(where).manual_seed((seed * 3 + part) * 1_000_003 + block)
    return sequences(plan, batch, generator)


def accuracies(trainer: Trainer, plan: Plan, seeds: list[int], part: int) -> list[float]:
    """The share of right values of every member, on data of its own seed."""
    where = trainer.values.device
    ids = torch.stack([data(plan, seed, part, 0, plan.tested, where) for seed in seeds])
    found: Tensor = torch.zeros(len(seeds), device=where)
    parts = ids.split(128, dim=1)
    with torch.no_grad():
        for some in parts:
            logits = forward(trainer.bank, trainer.shape, some[..., :-1])[:, :, plan.asked]
            found += (logits.argmax(-1) == some[..., 1:][..., plan.asked]).float().mean((1, 2)) / len(parts)
    return found.tolist()


def _trained(trainer: Trainer, plan: Plan, seeds: list[int], rates: list[float], until: float, file: Path) -> bool:
    """Train from where the file says to the end; False if the time ends before, with everything in the file.

    At the cut all members are kept in a file beside it.
    """
    done = trainer.load_(file)["done"] if file.exists() else 0
    own = torch.tensor(rates, device=trainer.values.device)
    factors = schedule(plan.steps, plan.steps // 20, 0.02).to(own.device)
    step = captured(trainer, spoken)
    cut_at, first, began = round(plan.cut_at * plan.steps), done, time.perf_counter()
    for block in range(done // _BLOCK, -(-plan.steps // _BLOCK)):
        if time.time() > until:
            trainer.save(file, done=done)
            return False
        if block % _KEPT_EVERY == 0:
            trainer.save(file, done=done)
        ids = _block(plan, seeds, block, own.device)
        for k in range(done - block * _BLOCK, min(_BLOCK, plan.steps - block * _BLOCK)):
            step(ids[k], own * factors[block * _BLOCK + k])
            done = block * _BLOCK + k + 1
            if done == cut_at and not file.with_suffix(".cut").exists():
                trainer.save(file.with_suffix(".cut"), done=done)
    each = (time.perf_counter() - began) / max(1, done - first)
    spoken(f"{file.stem}: {len(seeds)} models, {1e3 * each:.1f} ms a step")
    return True


def _block(plan: Plan, seeds: list[int], block: int, where: torch.device) -> Tensor:
    """Tokens (steps, K, batch, length) of a block of steps; members of one seed read the same."""
    of_seed = {seed: data(plan, seed, _TRAINING, block, _BLOCK * plan.batch, where) for seed in set(seeds)}
    return torch.stack([of_seed[seed].unflatten(0, (_BLOCK, -1)) for seed in seeds], dim=1)


def train_from_scratch(plan: Plan, family: str, order: int, folder: Path, until: float) -> list[Row] | None:
    """Train all rates and seeds of one size as one bank; a row each."""
    members = [(rate, seed) for rate in plan.rates for seed in range(plan.seeds)]
    rates, seeds = [rate for rate, _ in members], [seed for _, seed in members]
    trainer = Trainer(
        repeated(plan.shape(family, order), seeds, device()), plan.shape(family, order), predicted=plan.asked
    )
    if not _trained(trainer, plan, seeds, rates, until, folder / f"{_name(family, order)}.pt"):
        return None
    found = [accuracies(trainer, plan, seeds, part) for part in (_VALIDATION, _TEST)]
    arm = "uncut" if order == plan.order else "from scratch"
    return [
        _row(plan, family, arm, order, order, seed, rate) | {"validation": validation, "accuracy": test}
        for (rate, seed), validation, test in zip(members, *found, strict=True)
    ]


def train_cut(
    plan: Plan, family: str, kept: str, ways: tuple[str, ...], rank: int, folder: Path, until: float
) -> list[Row] | None:
    """Cut the large models at half of their training in some ways, and train all of them to the end as one bank.

    The ways are those whose result is `kept` in the same shapes; a row a way and seed.
    """
    large = rows_of(_name(family, plan.order), folder)
    assert large is not None
    rate, seeds = best_rate(large), list(range(plan.seeds))
    shape, places = plan.shape(family, plan.order), [k for k, row in enumerate(large) if row["rate"] == rate]
    bank = repeated(shape, [int(row["seed"]) for row in large], device())
    every = Trainer(bank, shape, predicted=plan.asked)
    done = every.load_(folder / f"{_name(family, plan.order)}.cut")["done"]
    whole, members = every.members(places), [(way, seed) for way in ways for seed in seeds]
    before = accuracies(whole, plan, seeds, _TEST)
    ids = torch.stack([data(plan, seed, _TRAINING, 10**6, plan.calibrated, whole.values.device) for _, seed in members])
    options = {seed: arms(shape, seed) for seed in seeds}
    trainer, errors = every.members(places * len(ways)).cut(rank, [options[seed][way] for way, seed in members], ids)
    of_members = [seed for _, seed in members]
    after = accuracies(trainer, plan, of_members, _TEST)
    file = folder / f"{_name(family, rank, kept)}.pt"
    if not file.exists():
        trainer.save(file, done=done)
    if not _trained(trainer, plan, of_members, [rate] * len(members), until, file):
        return None
    found = [accuracies(trainer, plan, of_members, part) for part in (_VALIDATION, _TEST)]
    return [
        _row(plan, family, way, plan.order, rank, seed, rate)
        | {"accuracy_before": before[seed], "accuracy_cut": after[k], "error": errors[k]}
        | {"validation": found[0][k], "accuracy": found[1][k]}
        for k, (way, seed) in enumerate(members)
    ]


def best_rate(rows: list[Row]) -> float:
    """The rate of the best mean accuracy on validation."""
    rates = sorted({float(row["rate"]) for row in rows})
    return max(rates, key=lambda rate: fmean(float(row["validation"]) for row in rows if row["rate"] == rate))


def by_shape(shape: Shape) -> dict[str, tuple[str, ...]]:
    """The ways to cut by the shapes of what they keep, which can be trained as one bank: maps, or fewer rows."""
    ways = arms(shape)
    mapped = tuple(way for way, own in ways.items() if own["form"].needed() is Basis.MAPPED)
    return {"maps": mapped, "rows": tuple(way for way in ways if way not in mapped)}


def jobs(plan: Plan, families: tuple[str, ...] = FAMILIES) -> list[Job]:
    """Large models first, as cuts wait for them."""
    sizes = [(family, order) for order in (plan.order, *plan.ranks) for family in families]
    found = [Job(_name(family, order), train_from_scratch, (plan, family, order)) for family, order in sizes]
    for rank in reversed(plan.ranks):
        for family in families:
            after = (_name(family, plan.order),)
            for kept, ways in by_shape(plan.shape(family, plan.order)).items():
                given = (plan, family, kept, ways, rank)
                found.append(Job(_name(family, rank, kept), train_cut, given, after, least=_CUT))
    return found


def collect(plan: Plan, found: list[Job], folder: Path) -> list[Measurement]:
    """One row a training that is done."""
    return [Measurement("recall", "Associative recall, cut in training", plan.seeds, collected(found, folder))]


def _row(plan: Plan, family: str, arm: str, order: int, rank: int, seed: int, rate: float) -> Row:
    common: Row = {"family": family, "arm": arm, "order": order, "rank": rank, "seed": seed, "rate": rate}
    sizes: Row = {"steps": plan.steps, "pairs": plan.pairs, "symbols": plan.symbols, "width": plan.width}
    return common | sizes | {"depth": plan.depth, "batch": plan.batch, "device": device().type}


def _name(family: str, order: int, arm: str = "whole") -> str:
    return f"{family.replace(' ', '-')}-{order}-{arm}".lower()


def _options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--seeds", type=count, help=f"({Plan.seeds})")
    parser.add_argument("--steps", type=count, help=f"of a training ({Plan.steps})")
    parser.add_argument("--pairs", type=count, help=f"to be recalled ({Plan.pairs})")
    parser.add_argument("--order", type=count, help=f"of the large models ({Plan.order})")
    parser.add_argument("--family", choices=FAMILIES, help="only this one")
    parser.add_argument("--small", action="store_true", help="16 pairs and short trainings, for a CPU")


def _planned(given: argparse.Namespace) -> tuple[list[Job], Callable[[], list[Measurement]]]:
    named: dict[str, Any] = {name: getattr(given, name) for name in ("seeds", "steps", "pairs", "order")}
    plan = replace(
        QUICK if given.quick else SMALL if given.small else Plan(),
        **{name: value for name, value in named.items() if value},
    )
    found = jobs(plan, (given.family,) if given.family else FAMILIES)
    return found, partial(collect, plan, found, given.out / "jobs")


if __name__ == "__main__":
    main(_planned, _options, description=(__doc__ or "").splitlines()[0], processes=3, progress=spoken)
