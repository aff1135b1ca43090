"""Results that nvFuser returns as memory of an input or of another result, because they only move data (contract, rule 4).

csrc/alias_analysis.cpp evaluates permutes, slices, broadcasts, squeezes, compatible reshapes and plain copies as views, a
clone too; a cast to a wider type and back cancels (csrc/preseg_passes/consecutive_cast.cpp); a reduction or a scan over
extents of 1, or an extremum over an expanded dimension, is a squeeze (csrc/ops/arith.cpp).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from thunder.core.prims import PrimIDs
from thunder.core.proxies import TensorProxy
from thunder.core.symbol import BoundSymbol

from guarded_nvfuser.contract import Body
from guarded_nvfuser.effects import VIEW_PRIMS, prim_id, tensors

MOVEMENT_PRIMS = VIEW_PRIMS | {PrimIDs.CLONE, PrimIDs.RESHAPE, PrimIDs.STRIDE_ORDER, PrimIDs.CONVERT_ELEMENT_TYPE}
_REDUCTIONS = frozenset((PrimIDs.SUM, PrimIDs.AMAX, PrimIDs.AMIN, PrimIDs.PROD))
_EXTREMA = frozenset((PrimIDs.AMAX, PrimIDs.AMIN))


def moved_from(bsym: BoundSymbol, producer: Mapping[str, BoundSymbol] | None = None) -> TensorProxy | None:
    """The operand whose memory nvFuser may return as this op's result, if the op only moves data.

    Args:
        bsym: an op of a region.
        producer: the region's ops by their results' names.

    Returns:
        The operand; for an update its target, since its result is that; None for a computation. A cast counts, since a
        later one may undo it: callers compare the dtypes at the ends of a chain.
    """
    prim, args, outs = prim_id(bsym), tensors(bsym.flat_args), tensors(bsym.flat_outs)
    if not args or not outs:
        return None
    if prim is PrimIDs.COPY_:
        return args[1]
    if prim in MOVEMENT_PRIMS:
        return args[0]
    if prim in _REDUCTIONS and (_elements(args[0]) == _elements(outs[0]) or _over_expanded(prim, args[0], producer)):
        return args[0]
    if bsym.sym.name == "cumsum" and 1 in args[0].shape:
        return args[0]
    if prim in (PrimIDs.CAT, PrimIDs.PAD) and len(args) == 1 and tuple(args[0].shape) == tuple(outs[0].shape):
        return args[0]
    return None


def _over_expanded(prim: PrimIDs, operand: TensorProxy, producer: Mapping[str, BoundSymbol] | None) -> bool:
    made = producer.get(operand.name) if producer and prim in _EXTREMA else None
    return made is not None and prim_id(made) is PrimIDs.BROADCAST_IN_DIM


def _elements(proxy: TensorProxy) -> int:
    return math.prod(int(extent) for extent in proxy.shape)


@dataclass(frozen=True)
class Moved:
    """A result that may be another tensor's memory.

    Attributes:
        result: the result; `partner`: the input or other result whose memory it may share.
        root: what both are moved from: the partner, or a value inside the region that is neither.
    """

    result: TensorProxy
    partner: TensorProxy
    root: TensorProxy


def moved_results(body: Body) -> Iterator[Moved]:
    """Results that may share memory with an input or with another result of a region.

    Args:
        body: a region.

    Yields:
        Each such result with the input or result nearest to it; of several that are moved from one value inside the region,
        each with the first (tests/test_moved.py::test_siblings_share).
    """
    producer = {out.name: bsym for bsym in body.bsyms for out in tensors(bsym.flat_outs)}
    known = {proxy.name for proxy in (*body.inputs, *body.outputs)}
    updated = {out.name for update in body.updates for out in tensors(update.flat_outs)}
    siblings: dict[str, TensorProxy] = {}
    for out in body.outputs:
        if out.name in updated:
            continue
        chain = list(chain_of(producer, out))
        partner = next((proxy for proxy in chain if proxy.name in known and proxy.dtype == out.dtype), None)
        if partner is not None:
            yield Moved(out, partner, next((proxy for proxy in chain if proxy.name in updated), partner))
        elif chain:
            root = chain[-1]
            first = siblings.setdefault(root.name, out)
            if first is not out:
                yield Moved(out, first, root)


def chain_of(producer: Mapping[str, BoundSymbol], out: TensorProxy) -> Iterator[TensorProxy]:
    """What a value was moved from, step by step, up to an input or a computed value."""
    name = out.name
    while name in producer and (source := moved_from(producer[name], producer)) is not None:
        yield source
        name = source.name
