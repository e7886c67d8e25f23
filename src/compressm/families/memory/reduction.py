"""Reductions of matrix states, and how an optimizer's moments go through the same change of basis."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, final

import torch
from jaxtyping import Float
from torch import Tensor, nn

from compressm.adapters.memory import KEY_MAP, QUERY_MAP, Memory, MemoryAdapter, Parts, Rows, with_rows
from compressm.families.base import Change, Values, Writing


@final
@dataclass(frozen=True)
class MemoryReduction:
    """k ← Wᵀ k and q ← Tᵀ q for every member of the bank, in the rows of keys and queries or, if `mapped`, behind them.

    Rows of gates are averaged by `mixing`, or selected by W. A fit adds `fitted` to the rows.
    """

    W: Float[Tensor, "bank n r"]
    T: Float[Tensor, "bank n r"]
    mapped: bool = False
    fitted: Parts | None = None
    mixing: Float[Tensor, "bank r n"] | None = None

    @property
    def order(self) -> int:
        return self.W.shape[-1]

    def applied(self, memory: Memory) -> Memory:
        """The smaller memory."""
        if memory.key_map is not None and memory.query_map is not None:
            return replace(memory, key_map=memory.key_map @ self.W, query_map=memory.query_map @ self.T)
        if self.mapped:
            return replace(memory, key_map=self.W, query_map=self.T)
        parts = [
            {name: _along(matrix, rows) for name, rows in part.items()}
            for part, matrix in zip(memory.parts, (self.W.mT, self.T.mT, self.of_gates), strict=True)
        ]
        if self.fitted is not None:
            parts = [
                {name: rows + added[name] for name, rows in part.items()}
                for part, added in zip(parts, self.fitted, strict=True)
            ]
        return memory.with_parts(parts)

    @property
    def of_gates(self) -> Float[Tensor, "bank r n"]:
        """The matrix that rows of gates are multiplied by."""
        return self.W.mT if self.mixing is None else self.mixing

    def change(self, module: nn.Module, adapter: MemoryAdapter[Any], memory: Memory) -> MemoryChange:
        """The change of a module with this memory."""
        new = self.applied(memory)
        writing = Writing.of(module, adapter, new, new.order)
        if new.key_map is not None:
            # Nothing changes beside the maps.
            maps = {name: writing.values[name] for name in (KEY_MAP, QUERY_MAP)}
            writing = Writing(maps, added=writing.added)
        return MemoryChange(module, writing, adapter.rows(module), self, adapter.query_gain(module, new.order))

    def to(self, device: torch.device | str) -> MemoryReduction:
        """A copy on `device`."""
        fitted = None
        if self.fitted is not None:
            keys, queries, gates = ({name: rows.to(device) for name, rows in part.items()} for part in self.fitted)
            fitted = (keys, queries, gates)
        mixing = None if self.mixing is None else self.mixing.to(device)
        return MemoryReduction(self.W.to(device), self.T.to(device), self.mapped, fitted, mixing)


@final
@dataclass(frozen=True)
class MemoryChange(Change):
    """Rows of keys θ' = Wᵀ θ and rows of queries θ' = Tᵀ θ; those of gates are averaged, θ' = M θ.

    The reduced layer is the full one with k = T k̂ and q = W q̂, so a step d of the keys' new rows is a step T d of the
    old ones: gradients of keys go with Tᵀ, and those of queries with Wᵀ, divided by their `gain`. The same holds for
    the columns of maps. Gates are the diagonal of T diag(α̂) Wᵀ, which moves by Mᵀ d: their gradients go with M. What a
    fit adds does not move with the old values.
    """

    module: nn.Module
    writing: Writing
    rows: Mapping[str, Rows]
    reduction: MemoryReduction
    gain: float = 1.0  # of the rows of queries

    @property
    def resized(self) -> Sequence[str]:
        return [name for name in self.values if name not in self.writing.added]

    def gradient(self, moments: Values) -> dict[str, Tensor]:
        return self._carried(moments, self.reduction.T, self.reduction.W / self.gain)

    def gradient_squares(self, squares: Values) -> dict[str, Tensor]:
        return self._carried(squares, self.reduction.T, self.reduction.W / self.gain, squared=True)

    def update(self, moments: Values) -> dict[str, Tensor]:
        return self._carried(moments, self.reduction.W, self.reduction.T * self.gain)

    def update_squares(self, squares: Values) -> dict[str, Tensor]:
        return self._carried(squares, self.reduction.W, self.reduction.T * self.gain, squared=True)

    def first(self, name: str, moment: Tensor) -> Tensor:
        order = self.reduction.order
        if name in (KEY_MAP, QUERY_MAP):
            return moment[..., :order].clone()
        rows = self.rows[name]
        return with_rows(
            name, moment, rows, [None if place is None else moment[place[:, :order]] for place in rows.parts]
        )

    def _carried(
        self, moments: Values, of_keys: Tensor, of_queries: Tensor, *, squared: bool = False
    ) -> dict[str, Tensor]:
        """Map rows of keys and queries by these matrices (bank, n, r), transposed; columns of maps by themselves.

        `squared` squares the entries of all matrices.
        """
        matrices = [of_keys, of_queries, self.reduction.of_gates.mT]
        matrices = [matrix.square() for matrix in matrices] if squared else matrices
        carried = {}
        for name, moment in moments.items():
            if name in (KEY_MAP, QUERY_MAP):
                carried[name] = moment @ matrices[name == QUERY_MAP].to(moment)
                continue
            rows = self.rows[name]
            parts = [
                None if place is None else _along(matrix.mT.to(moment), moment[place])
                for matrix, place in zip(matrices, rows.parts, strict=True)
            ]
            carried[name] = with_rows(name, moment, rows, parts)
        return carried


def _along(matrix: Float[Tensor, "bank r n"], rows: Float[Tensor, "bank n ..."]) -> Tensor:
    """The matrix times the rows of every member of the bank, whatever their shape."""
    return (matrix @ rows.flatten(2) if rows.ndim > 2 else (matrix @ rows[..., None])).reshape(
        *matrix.shape[:2], *rows.shape[2:]
    )
