"""Ops of this library's own that PyTorch runs: writes into a part of a tensor, and what Thunder's PyTorch executor
lacks.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from thunder.core import prims
from thunder.core.prims import PrimIDs
from thunder.core.proxies import TensorProxy
from thunder.core.symbol import Symbol
from thunder.extend import OperatorExecutor

ex = OperatorExecutor("guarded_nvfuser_torch")

# Thunder's PyTorch executor has no implementation of prims.lerp; nvFuser does.
_lerp = ex.register_operator("lerp", like=prims.lerp, fn=torch.lerp)
ex.register_implementation(prims.lerp, _lerp)


def _setitem(target: torch.Tensor, index: Any, value: Any) -> torch.Tensor:
    target[index] = value
    return target


def _index_add(target: torch.Tensor, index: torch.Tensor, value: torch.Tensor, dim: int) -> torch.Tensor:
    return target.index_add_(dim, index, value)


def _index_copy(target: torch.Tensor, index: torch.Tensor, value: torch.Tensor, dim: int) -> torch.Tensor:
    return target.index_copy_(dim, index, value)


def _index_put(target: torch.Tensor, indices: Any, values: torch.Tensor, accumulate: bool) -> torch.Tensor:
    return target.index_put_(tuple(indices), values, accumulate)


def _scatter(target: torch.Tensor, index: torch.Tensor, value: Any, dim: int) -> torch.Tensor:
    return target.scatter_(dim, index, value)


def _scatter_add(target: torch.Tensor, index: torch.Tensor, value: torch.Tensor, dim: int) -> torch.Tensor:
    return target.scatter_add_(dim, index, value)


def _in_place(name: str, fn: Callable) -> Symbol:
    """An op that changes a part of its first operand and returns it."""

    def meta(target: TensorProxy, *_: Any) -> TensorProxy:
        return TensorProxy(like=target)

    return ex.register_operator(name, meta=meta, fn=fn, tags=(prims.OpTags.DONT_DCE,))


# The in-place op for a primitive that copies a tensor and changes a part of the copy; same operands in the same order.
PARTIAL_WRITES: dict[PrimIDs, Symbol] = {
    PrimIDs.COPY_WITH_SETITEM: _in_place("write_setitem", _setitem),
    PrimIDs.INDEX_ADD: _in_place("write_index_add", _index_add),
    PrimIDs.INDEX_COPY: _in_place("write_index_copy", _index_copy),
    PrimIDs.INDEX_PUT: _in_place("write_index_put", _index_put),
    PrimIDs.SCATTER: _in_place("write_scatter", _scatter),
    PrimIDs.SCATTER_ADD: _in_place("write_scatter_add", _scatter_add),
}
PARTIAL_WRITE_NAMES = frozenset(symbol.name for symbol in PARTIAL_WRITES.values())
