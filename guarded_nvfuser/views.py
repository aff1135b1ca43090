"""Views in a trace: which ops are views in every case, how a write through one is undone, and where strides decide."""

from __future__ import annotations

from dataclasses import dataclass

import thunder.torch as ltorch
from thunder.core import prims
from thunder.core.prims import PrimIDs
from thunder.core.proxies import TensorProxy
from thunder.core.symbol import BoundSymbol

from guarded_nvfuser.effects import is_hidden_view, leaves, prim_id, tensors
from guarded_nvfuser.states import Program

# Thunder's own list of the torch ops that return views in every case (thunder/torch/__init__.py).
_DEFINITE_NAMES = frozenset(symbol.name for symbol in ltorch._syms_returning_views)


def definite_views(bsym: BoundSymbol) -> list[BoundSymbol]:
    """The steps of an op that eager runs as a view in every case.

    Args:
        bsym: a top-level symbol.

    Returns:
        Views, each of one operand, in order; empty if the op computes something or strides decide what it is.
    """
    if is_hidden_view(bsym):
        return [bsym] if bsym.sym.name in _DEFINITE_NAMES else []
    steps = [(leaf, effects) for leaf, effects in leaves(bsym) if not _does_nothing(leaf, effects)]
    named = bsym.sym.name in _DEFINITE_NAMES
    for leaf, effects in steps:
        by_strides = effects.reads and not (named and prim_id(leaf) in (PrimIDs.RESHAPE, None))
        if not effects.shares or effects.writes or effects.opaque or by_strides or not tensors(leaf.flat_args):
            return []
    covered: set[str] = set()
    views = []
    for leaf, _ in steps:  # a whole op may follow its own parts (effects.leaves): the parts say more
        outs = {out.name for out in tensors(leaf.flat_outs)}
        if not outs <= covered:
            views.append(leaf)
        covered |= outs
    return views


def _does_nothing(leaf: BoundSymbol, effects) -> bool:
    names = {arg.name for arg in tensors(leaf.flat_args)}
    return not (effects.reads or effects.writes or effects.shares) and all(
        out.name in names for out in tensors(leaf.flat_outs)
    )


def undo(view: BoundSymbol, value: TensorProxy, base: TensorProxy) -> TensorProxy | None:
    """The value of a view's base after a write of the whole view, if the view shows every element once.

    Args:
        view: the op that made the view; call inside a trace context, in which the inverse is recorded.
        value: what was written, of the view's shape.
        base: the view's operand.

    Returns:
        A tensor of the base's shape; None where the view shows a part of the base, or an element twice.
    """
    prim, args = prim_id(view), view.args
    out = tensors(view.flat_outs)[0]
    if prim is PrimIDs.SHALLOW_COPY or prim is PrimIDs.SLICE and tuple(out.shape) == tuple(base.shape):
        return value if _whole(view) else None
    if prim is PrimIDs.TRANSPOSE:
        permutation = tuple(args[1])
        return prims.transpose(value, tuple(permutation.index(dim) for dim in range(len(permutation))))
    if (
        prim in (PrimIDs.RESHAPE, PrimIDs.VIEW, PrimIDs.SQUEEZE)
        or prim is PrimIDs.BROADCAST_IN_DIM
        and _same_size(out, base)
    ):
        return prims.reshape(value, tuple(base.shape))
    return None


def _whole(view: BoundSymbol) -> bool:
    """Whether a slice has unit steps (one of the base's shape then shows it as it is)."""
    return prim_id(view) is not PrimIDs.SLICE or len(view.args) < 4 or all(step == 1 for step in view.args[3] or ())


def _same_size(a: TensorProxy, b: TensorProxy) -> bool:
    return a.numel == b.numel if not callable(a.numel) else a._numel == b._numel


@dataclass(frozen=True)
class Uncertain:
    """What the trace does not decide about ops that may be views (`reshape`, `contiguous`), because it holds no
    strides.

    Attributes:
        buffers: written buffers for which it matters whether such an op is a view, each with one: a side is written after the op,
            and
            somebody looks at the other side after that. PyTorch decides when such ops run as they are.
        lasting: such ops (by identity) with nothing written after them, but with both sides in the caller's sight: made
            from the real memory at the end, they share it if they do in eager.
    """

    buffers: dict[int, BoundSymbol]
    lasting: frozenset[int]


def uncertain(program: Program) -> Uncertain:
    """Find the views that strides decide (tests/test_rewrite.py::test_maybe_view_is_left,
    test_maybe_view_of_a_result).
    """
    return _Sides(program).result()


class _Sides:
    """The buffers of a program split where a view is uncertain, with the times at which each part is written and
    seen.
    """

    def __init__(self, program: Program) -> None:
        self.program = program
        self.parent: dict[str, str] = {}
        self.edges: list[tuple[int, str, str]] = []
        self.writes: list[tuple[int, str]] = []
        self.seen: list[tuple[int, str]] = []
        for time, bsym in enumerate(program.trace.bound_symbols):
            self.look(time, bsym)

    def look(self, time: int, bsym: BoundSymbol) -> None:
        certain = {id(view) for view in definite_views(bsym)}
        for leaf, effects in leaves(bsym):
            self.seen += [(time, proxy.name) for proxy in effects.reads]
            self.writes += [(time, proxy.name) for proxy in effects.writes]
            for out, source in effects.shares:
                if id(leaf) in certain or effects.writes or prim_id(leaf) is PrimIDs.UPDATE_ALIASES:
                    self.join(out.name, source.name)
                else:
                    self.edges.append((time, out.name, source.name))

    def find(self, name: str) -> str:
        while self.parent.setdefault(name, name) != name:
            self.parent[name] = self.parent[self.parent[name]]
            name = self.parent[name]
        return name

    def join(self, a: str, b: str) -> None:
        self.parent[self.find(a)] = self.find(b)

    def result(self) -> Uncertain:
        program = self.program
        last_seen: dict[str, float] = {}
        for time, name in self.seen:
            last_seen[self.find(name)] = max(time, last_seen.get(self.find(name), -1))
        visible = {self.find(name) for name in (*program.arguments, *program.results, *program.gradients)}
        last_seen.update(dict.fromkeys(visible, float("inf")))
        written: dict[str, list[int]] = {}
        for time, name in self.writes:
            written.setdefault(self.find(name), []).append(time)
        buffers: dict[int, BoundSymbol] = {}
        lasting: set[int] = set()
        for time, out, source in self.edges:
            here, there = self.find(out), self.find(source)
            if here == there:
                continue
            if self.conflict(time, here, there, written, last_seen):
                buffers.setdefault(program.buffer_of[out], program.trace.bound_symbols[time])
            elif here in visible and there in visible and program.buffer_of[out] in program.writes:
                lasting.add(id(program.trace.bound_symbols[time]))
        return Uncertain(buffers, frozenset(lasting))

    @staticmethod
    def conflict(time: int, here: str, there: str, written: dict[str, list[int]], last_seen: dict[str, float]) -> bool:
        for mine, other in ((here, there), (there, here)):
            first = next((t for t in written.get(mine, ()) if t > time), None)
            if first is not None and last_seen.get(other, -1) > first:
                return True
        return False
