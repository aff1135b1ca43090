"""Ops that copy in eager in every case, and that Thunder traces as views where they change nothing.

`x.repeat(1, 1)` and `x.flip([])` are memory of their own in eager; Thunder's decomposition returns x's memory.
"""

from __future__ import annotations

from thunder.core import prims
from thunder.core.symbol import BoundSymbol
from thunder.core.trace import TraceCtx, from_trace, tracectx

from guarded_nvfuser.effects import leaves, tensors
from guarded_nvfuser.renaming import renamed

_COPYING_NAMES = frozenset(("repeat", "flip"))


def with_copies(trace: TraceCtx) -> TraceCtx:
    """Add the copy that Thunder leaves out (tests/test_effects.py::test_copies_do_not_change_with_their_source).

    Args:
        trace: a computation trace before fusion.

    Returns:
        The trace in which such an op's result is a clone; the same trace if it holds none.
    """
    if not any(_is_view_of_a_copy(bsym) for bsym in trace.bound_symbols):
        return trace
    new = from_trace(trace)
    with tracectx(new):
        for bsym in trace.bound_symbols:
            new.bound_symbols += _copied(bsym) if _is_view_of_a_copy(bsym) else [bsym]
    return new


def _is_view_of_a_copy(bsym: BoundSymbol) -> bool:
    if bsym.sym.name not in _COPYING_NAMES or bsym.sym.executor is not None:
        return False
    return bool(tensors(bsym.flat_outs)) and all(effects.shares for _, effects in leaves(bsym))


def _copied(bsym: BoundSymbol) -> list[BoundSymbol]:
    out = tensors(bsym.flat_outs)[0]
    view = out.replace_name()
    copy = prims.clone.bind(view, output=out)
    return [renamed(bsym, {out.name: view}, outputs=True), copy]
