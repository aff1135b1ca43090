"""What a compiled function costs by its structure: regions, ops left to PyTorch, bytes moved between them."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import thunder
import torch
from thunder.core.dtypes import to_torch_dtype
from thunder.core.prims import PrimIDs
from thunder.core.proxies import Proxy, TensorProxy
from thunder.core.pytree import tree_map
from thunder.core.symbol import BoundSymbol
from thunder.core.trace import TraceCtx

from guarded_nvfuser.effects import leaves, prim_id, tensors
from guarded_nvfuser.hazards import is_region
from guarded_nvfuser.torch_ops import PARTIAL_WRITE_NAMES
from guarded_nvfuser.verdict import check_compiled


@dataclass(frozen=True)
class Cost:
    """The structural cost of a compiled function, forward and backward.

    Attributes:
        regions: nvFuser regions.
        ops: ops that PyTorch runs, without views and renames.
        bytes: what regions and these ops load from memory and store to it; inside a region nothing is counted.
    """

    regions: int
    ops: int
    bytes: int

    def __add__(self, other: Cost) -> Cost:
        return Cost(self.regions + other.regions, self.ops + other.ops, self.bytes + other.bytes)


def cost(jitted: Callable) -> Cost:
    """The structural cost of what a compiled function ran last.

    Args:
        jitted: what `thunder.jit` returned; it must have been called.

    Returns:
        Counts over its forward and backward traces. They are exact and need no GPU.

    Raises:
        TypeError: `jitted` was not made by `thunder.jit`.
        RuntimeError: it was never called.
    """
    check_compiled(jitted)
    traces = [thunder.last_traces(jitted)[-1]]
    backward = thunder.last_backward_traces(jitted) if thunder.compile_stats(jitted).last_backward_traces else []
    return sum((trace_cost(trace) for trace in (*traces, *backward[-1:])), Cost(0, 0, 0))


def trace_cost(trace: TraceCtx) -> Cost:
    """The structural cost of one execution trace."""
    total = Cost(0, 0, 0)
    for bsym in trace.bound_symbols:
        total += _region_cost(bsym) if is_region(bsym) else _op_cost(bsym)
    return total


def size_of(proxy: TensorProxy) -> int:
    """A tensor's size in bytes."""
    return math.prod(int(extent) for extent in proxy.shape) * proxy.dtype.bytes


def _region_cost(bsym: BoundSymbol) -> Cost:
    loaded: set[str] = set()
    stored = {out.name: out for out in tensors(bsym.flat_outs)}
    for sub in bsym.subsymbols:
        for leaf, effects in leaves(sub):
            if prim_id(leaf) is PrimIDs.COPY_:
                stored.update((out.name, out) for out in tensors(leaf.flat_outs))
                loaded.update(read.name for read in effects.reads)
            else:
                loaded.update(arg.name for arg in tensors(leaf.flat_args))
    inputs = {arg.name: arg for arg in tensors(bsym.flat_args) if arg.name in loaded}
    return Cost(1, 0, sum(map(size_of, (*inputs.values(), *stored.values()))))


def _op_cost(bsym: BoundSymbol) -> Cost:
    found = [effects for _, effects in leaves(bsym)]
    if not any(effects.reads or effects.writes for effects in found) and not _allocates(bsym):
        return Cost(0, 0, 0)
    if bsym.sym.python_impl is not None:
        return Cost(0, 0, 0)
    if bsym.sym.name in PARTIAL_WRITE_NAMES:
        return Cost(0, 1, 2 * _part(bsym))
    operands = {arg.name: arg for arg in tensors(bsym.flat_args)}
    shared = {out.name for effects in found for out, _ in effects.shares}
    written = {target.name for effects in found for target in effects.writes}
    read = {proxy.name for effects in found for proxy in effects.reads} & set(operands)
    moved = [operands[name] for name in read] + [operands[name] for name in written if name in operands]
    moved += [out for out in tensors(bsym.flat_outs) if out.name not in shared]
    is_view = not written and all(out.name in shared for out in tensors(bsym.flat_outs))
    return Cost(0, 0, 0) if is_view else Cost(0, 1, sum(map(size_of, moved)))


def _allocates(bsym: BoundSymbol) -> bool:
    return any(prim_id(leaf) in (PrimIDs.FULL, PrimIDs.IOTA, PrimIDs.UNIFORM) for leaf, _ in leaves(bsym))


def _part(bsym: BoundSymbol) -> int:
    """The bytes that a write into a part of a tensor changes."""
    target, values = tensors(bsym.flat_args)[0], tensors(bsym.flat_args)[1:]
    if bsym.sym.name != "write_setitem":
        return size_of(values[-1]) if values else size_of(target)
    with torch.device("meta"):
        whole = torch.empty(tuple(target.shape), dtype=to_torch_dtype(target.dtype))
        try:
            part = whole[tree_map(_as_meta, bsym.args[1])]
        except (RuntimeError, IndexError, NotImplementedError):  # a mask: its count is data
            return size_of(target)
    return part.numel() * target.dtype.bytes


def _as_meta(value):
    if isinstance(value, TensorProxy):
        return torch.empty(tuple(value.shape), dtype=to_torch_dtype(value.dtype), device="meta")
    return value.value if isinstance(value, Proxy) else value
