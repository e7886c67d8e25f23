"""Reductions of matrix states, and how an optimizer's moments go through the same change of basis."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, final

import torch
from jaxtyping import Float
from torch import Tensor, nn

from compressm.adapters.memory import KEY_MAP, QUERY_MAP, Memory, MemoryAdapter, Rows, with_rows
from compressm.families.base import Change, Values, Writing


@final
@dataclass(frozen=True)
class MemoryReduction:
    """k ← Wᵀ k and q ← Tᵀ q for every member of the bank, in the rows of keys and queries or, if `mapped`, behind them.

    A fit adds `fitted` to the rows: to those of keys and to those of queries.
    """

    W: Float[Tensor, "bank n r"]
    T: Float[Tensor, "bank n r"]
    mapped: bool = False
    fitted: tuple[Mapping[str, Tensor], Mapping[str, Tensor]] | None = None

    @property
    def order(self) -> int:
        return self.W.shape[-1]

    def applied(self, memory: Memory) -> Memory:
        """The smaller memory."""
        if memory.key_map is not None and memory.query_map is not None:
            return replace(memory, key_map=memory.key_map @ self.W, query_map=memory.query_map @ self.T)
        if self.mapped:
            return replace(memory, key_map=self.W, query_map=self.T)
        keys, queries = (
            {name: _along(matrix.mT, rows) for name, rows in part.items()}
            for part, matrix in ((memory.keys, self.W), (memory.queries, self.T))
        )
        if self.fitted is not None:
            keys, queries = (
                {name: rows + added[name] for name, rows in part.items()}
                for part, added in zip((keys, queries), self.fitted, strict=True)
            )
        return Memory(keys, queries)

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
        moved = None
        if self.fitted is not None:
            keys, queries = ({name: rows.to(device) for name, rows in part.items()} for part in self.fitted)
            moved = (keys, queries)
        return MemoryReduction(self.W.to(device), self.T.to(device), self.mapped, moved)


@final
@dataclass(frozen=True)
class MemoryChange(Change):
    """Rows of keys θ' = Wᵀ θ and rows of queries θ' = Tᵀ θ.

    The reduced layer is the full one with k = T k̂ and q = W q̂, so a step d of the keys' new rows is a step T d of the
    old ones: gradients of keys go with Tᵀ, and those of queries with Wᵀ, divided by their `gain`. The same holds for
    the columns of maps. What a fit adds does not move with the old values.
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
        return self._carried(squares, self.reduction.T.square(), (self.reduction.W / self.gain).square())

    def update(self, moments: Values) -> dict[str, Tensor]:
        return self._carried(moments, self.reduction.W, self.reduction.T * self.gain)

    def update_squares(self, squares: Values) -> dict[str, Tensor]:
        return self._carried(squares, self.reduction.W.square(), (self.reduction.T * self.gain).square())

    def first(self, name: str, moment: Tensor) -> Tensor:
        order = self.reduction.order
        if name in (KEY_MAP, QUERY_MAP):
            return moment[..., :order].clone()
        rows = self.rows[name]
        parts = (None if place is None else moment[place[:, :order]] for place in (rows.keys, rows.queries))
        return with_rows(name, moment, rows, *parts)

    def _carried(self, moments: Values, of_keys: Tensor, of_queries: Tensor) -> dict[str, Tensor]:
        """Map rows of keys and queries by these matrices (bank, n, r), transposed; columns of maps by themselves."""
        carried = {}
        for name, moment in moments.items():
            if name in (KEY_MAP, QUERY_MAP):
                carried[name] = moment @ (of_keys if name == KEY_MAP else of_queries).to(moment)
                continue
            rows = self.rows[name]
            parts = (
                None if place is None else _along(matrix.mT.to(moment), moment[place])
                for matrix, place in ((of_keys, rows.keys), (of_queries, rows.queries))
            )
            carried[name] = with_rows(name, moment, rows, *parts)
        return carried


def _along(matrix: Float[Tensor, "bank r n"], rows: Float[Tensor, "bank n ..."]) -> Tensor:
    """The matrix times the rows of every member of the bank, whatever their shape."""
    return (matrix @ rows.flatten(2) if rows.ndim > 2 else (matrix @ rows[..., None])).reshape(
        *matrix.shape[:2], *rows.shape[2:]
    )
