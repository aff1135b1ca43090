"""Pieces of a region: parts that share no name, constants apart. nvFuser never needs one kernel for two of them."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from thunder.core.prims import PrimIDs
from thunder.core.proxies import TensorProxy
from thunder.core.symbol import BoundSymbol

from guarded_nvfuser.contract import Body, is_elementwise, loaded, operands_of, read_by
from guarded_nvfuser.effects import prim_id, tensors
from guarded_nvfuser.groups import Groups


@dataclass(frozen=True)
class Piece:
    """A part of a region, and the names that it uses or defines (targets apart)."""

    bsyms: tuple[BoundSymbol, ...]
    names: frozenset[str]


def pieces_of(body: Body) -> list[Piece]:
    """The pieces of a region, in linear time."""
    groups = Groups()
    used = [[p.name for p in loaded(body, (*read_by(bsym), *bsym.flat_outs))] for bsym in body.bsyms]
    for names in used:
        for name in names[1:]:
            groups.join(name, names[0])
    members: dict = {}
    for index, names in enumerate(used):
        members.setdefault(groups.find(names[0]) if names else "", []).append(index)
    return [
        Piece(tuple(body.bsyms[i] for i in each), frozenset(name for i in each for name in used[i]))
        for each in members.values()
    ]


def widenings(body: Body) -> Callable[[BoundSymbol], BoundSymbol | None]:
    """Which op of an update's piece makes more elements than the update's target has out of fewer.

    One kernel over the wider shape would load and store the target's elements in many threads; what is a single element
    does not tie the target's dimensions to others (tests/test_contract.py::test_widened,
    tests/test_kernels.py::test_widened).

    Args:
        body: a region.

    Returns:
        A function of an update, which gives the op or None.
    """
    widest: dict[int, tuple[_Growth, _Growth]] = {}
    for piece in pieces_of(body):
        found = [growth for bsym in piece.bsyms if (growth := _growth(bsym)) is not None]
        of_many = max((each for each in found if not each.of_one), key=lambda each: each.elements, default=_NONE)
        of_any = max(found, key=lambda each: each.elements, default=_NONE)
        widest.update((id(bsym), (of_many, of_any)) for bsym in piece.bsyms if prim_id(bsym) is PrimIDs.COPY_)

    def widening(update: BoundSymbol) -> BoundSymbol | None:
        size = _elements(operands_of(update)[1])
        growth = widest[id(update)][size in (1, math.inf)]
        return growth.bsym if growth.elements > size or size == math.inf else None

    return widening


@dataclass(frozen=True)
class _Growth:
    """An op with more elements than any of its operands, how many, and whether its operand is 0-d."""

    bsym: BoundSymbol | None
    elements: float
    of_one: bool = False


_NONE = _Growth(None, 0)


def _growth(bsym: BoundSymbol) -> _Growth | None:
    args, outs = tensors(bsym.flat_args), tensors(bsym.flat_outs)
    repeats = len({arg.name for arg in args}) < len(args)
    if not args or not outs or is_elementwise(bsym) or prim_id(bsym) in (PrimIDs.PAD, PrimIDs.COPY_):
        return None
    if prim_id(bsym) is PrimIDs.CAT and not repeats:
        return None
    elements, most = max(map(_elements, outs)), max(map(_elements, args))
    return _Growth(bsym, elements, args[0].ndim == 0) if elements > most or elements == math.inf else None


def _elements(proxy: TensorProxy) -> float:
    """How many elements a tensor has; infinitely many if the trace does not say."""
    return math.prod(proxy.shape) if all(isinstance(extent, int) for extent in proxy.shape) else math.inf
