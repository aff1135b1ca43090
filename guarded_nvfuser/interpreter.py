"""Regions without a GPU: the same ops through Thunder's PyTorch executor, in an order that nvFuser could choose.

The two schedules show less than real nvFuser can do (whole tensors, no races inside an op), so they are no judge; they
are how regions run on the CPU, and how PyTorch runs a region whose layouts nvFuser would get wrong.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from thunder.core import prims
from thunder.core.codeutils import SigInfo
from thunder.core.prims import PrimIDs
from thunder.core.proxies import Proxy, variableify
from thunder.core.symbol import BoundSymbol
from thunder.core.trace import TraceCtx, tracectx
from thunder.core.transform_common import dce
from thunder.executors.passes import _transform_for_operator_executor_execution
from thunder.extend import get_always_executors

from guarded_nvfuser import torch_ops
from guarded_nvfuser.contract import Body, Rules
from guarded_nvfuser.effects import prim_id, tensors
from guarded_nvfuser.layouts import OnGaps, gaps, split_off, update_targets
from guarded_nvfuser.moved import moved_results
from guarded_nvfuser.options import Schedule, current_schedule
from guarded_nvfuser.violations import violations


def eager(bsyms: Sequence[BoundSymbol], inputs: Sequence[Proxy], outputs: Sequence[Proxy], name: str) -> Callable:
    """A function that runs a region's ops one by one in PyTorch, in program order.

    Args:
        bsyms: the region's flat symbols.
        inputs: its inputs, which are the function's parameters.
        outputs: its outputs, which the function returns as a list.
        name: the region's name.

    Returns:
        A callable of `len(inputs)` arguments.
    """
    return _callable(list(bsyms), inputs, outputs, name)


def scheduled(
    bsyms: Sequence[BoundSymbol], inputs: Sequence[Proxy], outputs: Sequence[Proxy], name: str, which: Schedule
):
    """A function that runs a region under a schedule of the contract; see `eager` for the arguments.

    Where the contract itself promises that reads come before updates, both schedules are the late one.
    """
    body = Body(tuple(bsyms), tensors(inputs), tensors(outputs), rules=Rules(any_device=True))
    plan = _late(bsyms) if which is Schedule.LATE or not violations(body) else _early(bsyms)
    return _callable(_returning_memory(_reading_sources(plan), inputs, outputs), inputs, outputs, name)


class InterpretedRegion:
    """What a region's symbol calls on a machine without a GPU: compiled once per schedule and layout, on first use.

    Args:
        region: the fusion symbol, whose subsymbols are the final body.
        on_gaps: called once per layout with the region and the positions of the targets that nvFuser would get wrong
            (layouts.py); it may raise. None: layouts are not looked at.
    """

    def __init__(self, region: BoundSymbol, on_gaps: OnGaps | None = None) -> None:
        self.name = region.sym.name
        self._region, self._on_gaps = region, on_gaps
        self._inputs, self._outputs = tuple(region.flat_proxy_args), tuple(region.flat_proxy_outs)
        self._targets = update_targets(region.subsymbols, self._inputs) if on_gaps is not None else ()
        self._compiled: dict[tuple[Schedule, tuple[int, ...]], Callable] = {}

    def __call__(self, *args: Any) -> list:
        key = current_schedule(), gaps(args, self._targets)
        if key not in self._compiled:
            self._compiled[key] = self._compile(*key)
        return self._compiled[key](*args)

    def __repr__(self) -> str:
        return f"InterpretedRegion({self.name})"

    def _compile(self, which: Schedule, positions: tuple[int, ...]) -> Callable:
        bsyms = self._region.subsymbols
        if not positions:
            return scheduled(bsyms, self._inputs, self._outputs, self.name, which)
        self._on_gaps(self._region, positions)
        split = split_off(bsyms, self._inputs, self._outputs, positions)
        if split is None:
            return eager(bsyms, self._inputs, self._outputs, self.name)
        run = scheduled(split.bsyms, self._inputs, split.outputs, self.name, which)
        return lambda *args: split.finish(run(*args), args)


def _callable(bsyms: list[BoundSymbol], inputs: Sequence[Proxy], outputs: Sequence[Proxy], name: str) -> Callable:
    trace = TraceCtx()
    trace.args = tuple(inputs)
    trace._siginfo = SigInfo.from_name_and_args(name, inputs)
    trace.names = {p.name for b in bsyms for p in (*b.flat_proxy_args, *b.flat_proxy_outs)} | {p.name for p in inputs}
    with tracectx(trace):
        unpacked = [prims.unpack_trivial.bind(proxy, name=proxy.name, output=proxy) for proxy in inputs]
        trace.bound_symbols = [*unpacked, *bsyms, prims.python_return.bind(list(outputs), output=None)]
    claimed = _transform_for_operator_executor_execution(dce(trace), (torch_ops.ex, *get_always_executors()))
    return claimed.python_callable(include_decorators=False)


def _is_update(bsym: BoundSymbol) -> bool:
    return prim_id(bsym) is PrimIDs.COPY_


def _late(bsyms: Sequence[BoundSymbol]) -> list[BoundSymbol]:
    return [b for b in bsyms if not _is_update(b)] + [b for b in bsyms if _is_update(b)]


def _early(bsyms: Sequence[BoundSymbol]) -> list[BoundSymbol]:
    """Each update right behind what its source needs, before everything else."""
    producer = {out.name: bsym for bsym in bsyms for out in bsym.flat_proxy_outs}
    placed: dict[int, BoundSymbol] = {}

    def place(bsym: BoundSymbol) -> None:
        stack = [(bsym, False)]
        while stack:
            current, ready = stack.pop()
            if ready:
                placed.setdefault(id(current), current)
            elif id(current) not in placed:
                stack.append((current, True))
                args = current.flat_proxy_args[:1] if _is_update(current) else current.flat_proxy_args
                stack.extend((producer[a.name], False) for a in args if a.name in producer)

    for bsym in (*filter(_is_update, bsyms), *bsyms):
        place(bsym)
    return list(placed.values())


def _reading_sources(plan: list[BoundSymbol]) -> list[BoundSymbol]:
    """Let readers of an update's result read its source: inside a fusion that is the value, wherever the store
    happens.
    """
    swap = {}
    for bsym in plan:
        if _is_update(bsym) and bsym.flat_proxy_outs:
            swap[variableify(bsym.flat_proxy_outs[0])] = bsym.flat_proxy_args[0]
    return [b.from_bsym_swap_proxies(swap, skip_output=True) if swap else b for b in plan]


def _returning_memory(plan: list[BoundSymbol], inputs: Sequence[Proxy], outputs: Sequence[Proxy]) -> list[BoundSymbol]:
    """Return results that only move an input's data as that input's memory, as nvFuser does
    (csrc/alias_analysis.cpp).
    """
    given = {proxy.name for proxy in inputs}
    found = moved_results(Body(tuple(plan), tensors(inputs), tensors(outputs)))
    moved = {each.result.name for each in found if each.partner.name in given}
    producer = {out.name: bsym for bsym in plan for out in tensors(bsym.flat_outs)}
    plain: set[int] = set()
    for name in moved:
        while name in producer and len(tensors(producer[name].flat_args)) == 1:
            if prim_id(producer[name]) is PrimIDs.CLONE:
                plain.add(id(producer[name]))
            name = tensors(producer[name].flat_args)[0].name
    return [_shallow(bsym) if id(bsym) in plain else bsym for bsym in plan]


def _shallow(bsym: BoundSymbol) -> BoundSymbol:
    return prims.shallow_copy.bind(tensors(bsym.flat_args)[0], output=tensors(bsym.flat_outs)[0])
