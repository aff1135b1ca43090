"""Common subexpressions, merged only where memory allows it.

Thunder's pass compares ops by name and arguments. It takes two tensors with equal values for one, also where the
program then writes one of them (tests/test_fallback.py::test_cse_merges_no_written_tensors), and reads across a write
for equal.
"""

from __future__ import annotations

from collections.abc import Iterator

from thunder.core.prims import PrimIDs
from thunder.core.proxies import Proxy, Variable, variableify
from thunder.core.symbol import BoundSymbol
from thunder.core.trace import TraceCtx, from_trace

from guarded_nvfuser.effects import FACTORY_PRIMS, is_random, leaves, prim_id, tensors
from guarded_nvfuser.hazards import is_region
from guarded_nvfuser.states import Program, key_of


def merge_common(program: Program, trace: TraceCtx) -> TraceCtx:
    """Compute equal values once, per region and between the ops outside regions.

    Args:
        program: what the trace before fusion means.
        trace: a trace with regions.

    Returns:
        A trace in which ops that read equal values in equal states are one, unless somebody could tell their results
        apart by their memory. Time is linear in the length of the trace.
    """
    return _Merge(program).run(trace)


class _Merge:
    def __init__(self, program: Program) -> None:
        self.program = program
        self.results = {program.buffer_of[name] for name in program.results}
        self.renamed: dict[Variable, Proxy] = {}

    def run(self, trace: TraceCtx) -> TraceCtx:
        merged = from_trace(trace)
        outside: dict = {}
        kept: list[BoundSymbol] = []
        for bsym in trace.bound_symbols:
            if is_region(bsym):
                kept.append(self.region(bsym))
            else:
                kept.extend(self.step(bsym, outside, self.renamed))
        merged.bound_symbols = kept
        return merged

    def region(self, bsym: BoundSymbol) -> BoundSymbol:
        """One region: only renames of its own inputs hold in it, because rematerialisation repeats definitions."""
        args = {variableify(arg) for arg in bsym.flat_proxy_args}
        renamed = {name: proxy for name, proxy in self.renamed.items() if name in args} if self.renamed else {}
        inside: dict = {}
        before = len(renamed)
        body = [kept for sub in bsym.subsymbols for kept in self.step(sub, inside, renamed)]
        if len(renamed) == before and len(body) == len(bsym.subsymbols) and not renamed:
            return bsym
        outs = {variableify(out) for out in bsym.flat_proxy_outs}
        self.renamed.update((name, proxy) for name, proxy in renamed.items() if name in outs)
        return bsym.from_bsym(
            args=tuple(self._once(renamed, bsym.args)),
            output=list(self._once(renamed, bsym.output)),
            subsymbols=tuple(body),
        )

    @staticmethod
    def _once(renamed: dict[Variable, Proxy], proxies) -> Iterator[Proxy]:
        seen = set()
        for proxy in proxies:
            proxy = renamed.get(Variable(proxy), proxy) if isinstance(proxy, Proxy) else proxy
            if proxy.name not in seen:
                seen.add(proxy.name)
                yield proxy

    def step(self, bsym: BoundSymbol, known: dict, renamed: dict[Variable, Proxy]) -> tuple[BoundSymbol, ...]:
        """The op itself, with renamed arguments, or nothing if it was computed before."""
        if renamed and any(Variable(arg) in renamed for arg in bsym.flat_proxy_args):
            bsym = bsym.from_bsym_swap_proxies(renamed, skip_output=True)
        if not self.mergeable(bsym):
            return (bsym,)
        key = (bsym.rhs, self.states(bsym))
        first = known.setdefault(key, bsym)
        if first is bsym or first._executor is not bsym._executor:
            return (bsym,)
        for mine, theirs in zip(bsym.flat_proxy_outs, first.flat_proxy_outs):
            renamed[variableify(mine)] = theirs
        return ()

    def mergeable(self, bsym: BoundSymbol) -> bool:
        program = self.program
        if is_random(bsym) or prim_id(bsym) in FACTORY_PRIMS - {PrimIDs.FULL, PrimIDs.IOTA}:
            return False
        outs = tensors(bsym.flat_outs)
        if not outs or bsym.sym.python_impl is not None or prim_id(bsym) in (PrimIDs.GET_GRAD, PrimIDs.UPDATE_ALIASES):
            return False
        buffers = {program.buffer_of.get(out.name) for out in outs}
        if not buffers.isdisjoint(program.writes) or not buffers.isdisjoint(self.results):
            return False
        return not any(effects.writes or effects.opaque for _, effects in leaves(bsym))

    def states(self, bsym: BoundSymbol) -> tuple:
        """The states in which an op reads buffers that are written somewhere; an op that Thunder added reads as
        bound.
        """
        entry = self.program.entries.get(key_of(bsym))
        return tuple(
            (arg.name, entry.sees.get(arg.name) if entry is not None else key_of(bsym))
            for arg in tensors(bsym.flat_args)
            if self.program.buffer_of.get(arg.name) in self.program.writes
        )
