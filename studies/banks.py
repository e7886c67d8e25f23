"""Training of a bank of models, each at a rate of its own, and cuts of its members by the library, moments included."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import compressm as cs
from command import Progress, silent
from compressm.adapters.base import adapter_for
from compressm.errors import CaptureError
from compressm.files import replacing
from compressm_lab.rivals import rivals
from memory_models import Parameters, Shape, forward, loaded_, make, stacked, with_order

_BETAS, _EPS, _LARGEST_GRADIENT = (0.9, 0.95), 1e-8, 1.0
_CALIBRATED_AT_ONCE = 4  # sequences; the scan of transformers in torch takes much memory


class Trainer:
    """AdamW without weight decay for a bank; gradients of a member are clipped to norm 1.

    All parameters lie in one tensor (K, total), of which those in `bank` are views. Every parameter has its own count
    of steps: what a cut adds starts at 0.
    """

    def __init__(
        self,
        bank: Parameters,
        shape: Shape,
        *,
        dtype: torch.dtype = torch.float32,
        predicted: slice = slice(None),
        moments: tuple[Parameters, Parameters] | None = None,
        counts: Mapping[str, float] | None = None,
    ) -> None:
        self.shape, self.dtype, self.predicted = shape, dtype, predicted
        self.sizes = {name: value.shape[1:] for name, value in bank.items()}
        self.values = _flat(bank)
        self.bank = {name: part.detach().requires_grad_() for name, part in self._parts(self.values).items()}
        zeros = torch.zeros_like(self.values)
        self.first, self.second = (zeros, zeros.clone()) if moments is None else map(_flat, moments)
        self.counts = torch.cat(
            [
                torch.full((size.numel(),), 0.0 if counts is None else counts.get(name, 0.0), device=zeros.device)
                for name, size in self.sizes.items()
            ]
        )

    def step(self, ids: Tensor, rates: Tensor) -> Tensor:
        """One step on tokens (K, batch, length + 1) at these rates (K); returns the losses of the members."""
        loss = next_token_loss(self.bank, self.shape, ids, self.predicted, self.dtype)
        gradients = torch.autograd.grad(loss.sum(), list(self.bank.values()))
        with torch.no_grad():
            gradient = _flat(dict(zip(self.bank, gradients, strict=True)))
            gradient *= (_LARGEST_GRADIENT / gradient.norm(dim=1, keepdim=True)).clamp_max(1)
            self.counts += 1
            self.first.lerp_(gradient, 1 - _BETAS[0])
            self.second.mul_(_BETAS[1]).addcmul_(gradient, gradient, value=1 - _BETAS[1])
            first, second = (
                moment / (1 - beta**self.counts) for moment, beta in zip((self.first, self.second), _BETAS, strict=True)
            )
            self.values -= rates[:, None] * first / (second.sqrt() + _EPS)
        return loss.detach()

    def members(self, chosen: Sequence[int]) -> Trainer:
        """A trainer of some members."""
        picked = torch.tensor(list(chosen), device=self.values.device)
        parts = [self._parts(whole[picked]) for whole in (self.values, self.first, self.second)]
        same: dict[str, Any] = {"dtype": self.dtype, "predicted": self.predicted}
        return Trainer(parts[0], self.shape, moments=(parts[1], parts[2]), counts=self._counts(), **same)

    def cut(self, order: int, options: Sequence[Mapping[str, Any]], ids: Tensor) -> tuple[Trainer, list[float]]:
        """A trainer of the members, each cut by the library, and the mean errors of their layers.

        Member k is cut with options[k] after a look at the tokens ids[k]; moments go along.
        """
        models, states, errors = [], [], []
        parts = [self._parts(whole) for whole in (self.values, self.first, self.second)]
        counts = self._counts()
        for k, own in enumerate(options):
            model = loaded_(make(self.shape).to(self.values.device), parts[0], k)
            optimizer = torch.optim.AdamW(model.parameters(), betas=_BETAS, eps=_EPS, weight_decay=0)
            for name, parameter in model.named_parameters():
                moments = {"exp_avg": parts[1][name][k].clone(), "exp_avg_sq": parts[2][name][k].clone()}
                optimizer.state[parameter] = {"step": torch.tensor(counts[name]), **moments}
            cuts = cs.compress_(
                model, keep=cs.TargetOrder(order), optimizer=optimizer, calibrate=calibration(ids[k]), **own
            )
            errors.append(sum(float(cut.measured_error or 0) for cut in cuts) / len(cuts))
            models.append(model)
            states.append({name: optimizer.state.get(p, {}) for name, p in model.named_parameters()})
        bank = stacked(models)
        moments = tuple(
            {
                name: torch.stack([own[name].get(key, torch.zeros_like(bank[name][0])) for own in states])
                for name in bank
            }
            for key in ("exp_avg", "exp_avg_sq")
        )
        same: dict[str, Any] = {"dtype": self.dtype, "predicted": self.predicted}
        new = Trainer(
            bank,
            with_order(self.shape, order),
            moments=moments,  # type: ignore[arg-type]
            counts={name: float(state.get("step", 0)) for name, state in states[0].items()},
            **same,
        )
        return new, errors

    def save(self, path: Path, **more: Any) -> None:
        """Write everything to a file, whole or not at all."""
        own = {"values": self.values, "first": self.first, "second": self.second, "counts": self.counts}
        with replacing(path) as scratch:
            torch.save({**{name: value.cpu() for name, value in own.items()}, "more": more}, scratch)

    def load_(self, path: Path) -> dict[str, Any]:
        """Go on from a file that a trainer of the same models wrote; returns what was written with it."""
        stored = torch.load(path, weights_only=True)
        for name in ("values", "first", "second", "counts"):
            getattr(self, name).copy_(stored[name])
        more: dict[str, Any] = stored["more"]
        return more

    def _parts(self, whole: Tensor) -> Parameters:
        """Views of a tensor (K, total), by parameter."""
        sizes = [size.numel() for size in self.sizes.values()]
        pieces = zip(self.sizes.items(), whole.split(sizes, dim=1), strict=True)
        return {name: part.unflatten(1, size) for (name, size), part in pieces}

    def _counts(self) -> dict[str, float]:
        sizes = [size.numel() for size in self.sizes.values()]
        return dict(zip(self.sizes, (part[0].item() for part in self.counts.split(sizes)), strict=True))


def arms(shape: Shape, seed: int = 0) -> dict[str, dict[str, Any]]:
    """Options of a cut by the name of the arm: the forms that layers of this kind can store, and the rivals."""
    model = make(with_order(shape, min(shape.order, 8)))
    stores = next(adapter for module in model.modules() if (adapter := adapter_for(module)) is not None).STORES
    forms = {"Mapped": {"form": cs.compression.Mapped()}, "Fitted": {"form": cs.compression.Fitted()}}
    return {name: own for name, own in {**forms, **rivals(seed)}.items() if own["form"].needed() in stores}


def calibration(ids: Tensor) -> Callable[[nn.Module], None]:
    """A function that runs a model on these tokens, some sequences at a time."""

    def calibrate(model: nn.Module) -> None:
        for part in ids.split(_CALIBRATED_AT_ONCE):
            model(part, use_cache=False)

    return calibrate


def next_token_loss(
    bank: Parameters, shape: Shape, ids: Tensor, predicted: slice, dtype: torch.dtype = torch.float32
) -> Tensor:
    """The mean loss of every member on the tokens that follow the steps `predicted`."""
    logits = forward(bank, shape, ids[..., :-1], dtype)[:, :, predicted]
    found = cross_entropy(logits.flatten(0, 2), ids[..., 1:][..., predicted].flatten(), reduction="none")
    return found.unflatten(0, (len(ids), -1)).mean(1)


def captured(trainer: Trainer, progress: Progress = silent) -> Callable[[Tensor, Tensor], Tensor]:
    """The trainer's step as a CUDA graph; as it is where that cannot be recorded, or without a GPU."""
    step = cs.CapturedStep(trainer.step)
    failed = False

    def run(ids: Tensor, rates: Tensor) -> Tensor:
        nonlocal failed
        if not failed:
            try:
                found: Tensor = step(ids, rates)
                return found
            except CaptureError as error:
                failed = True
                progress(f"without a CUDA graph: {error}")
        return trainer.step(ids, rates)

    return run


def schedule(steps: int, warmup: int, last: float) -> Tensor:
    """Factors of the rate: a linear warm-up, then a cosine down to `last`."""
    k = torch.arange(1, steps + 1, dtype=torch.float32)
    fallen = (k - warmup).clamp_min(0) / max(1, steps - warmup)
    return torch.minimum(k / max(1, warmup), last + (1 - last) * (1 + torch.cos(torch.pi * fallen)) / 2)


def repeated(shape: Shape, seeds: Sequence[int], device: torch.device) -> Parameters:
    """A bank of fresh models, one a seed."""
    return {name: value.to(device) for name, value in stacked([make(shape, seed) for seed in seeds]).items()}


def _flat(bank: Mapping[str, Tensor]) -> Tensor:
    return torch.cat([value.detach().flatten(1).float() for value in bank.values()], dim=1)
