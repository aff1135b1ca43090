"""The rule POINTWISE: regions, or pieces of them, that nvFuser makes one kernel which loads before it stores.

nvFuser merges the ops of a piece into one kernel along values that it computes once; inputs, constants
and chains of unary ops from them are repeated in every kernel and hold nothing together (csrc/fusion_segmenter.cpp,
finalMerge and shouldForward). A whole region is first tried as one kernel, unless an output is a view of a computed value
(csrc/preseg_passes/mark_aliases_prepare.cpp cuts the region there).
"""

from __future__ import annotations

from thunder.core.prims import PrimIDs
from thunder.core.symbol import BoundSymbol

from guarded_nvfuser.contract import Body, is_elementwise, one_shape, operands_of, read_by
from guarded_nvfuser.effects import UNARY_PRIMS, prim_id, tensors
from guarded_nvfuser.groups import Groups
from guarded_nvfuser.pieces import Piece, pieces_of


def read_before_written(body: Body) -> frozenset[int]:
    """The updates (by identity) whose target every reader in the region sees as it was on entry.

    Args:
        body: a region.

    Returns:
        Updates in a piece of elementwise ops over one shape with an extent over 1 (a 0-d input is not loaded into a register
        first), whose source reads its own target (a blind overwrite may be stored before another's load), and that are held
        together with all readers of the target; tests/test_contract.py::test_pointwise_needs_own_target,
        test_pointwise_needs_one_piece, test_pointwise_needs_a_link.
    """
    pieces = pieces_of(body)
    alone = len(pieces) == 1 and not _returns_moved_values(body)
    ordered: set[int] = set()
    for piece in pieces:
        inside = [bsym for bsym in piece.bsyms if prim_id(bsym) is PrimIDs.COPY_]
        if inside and _is_pointwise(body, piece) and all(_reads_own_target(body, piece, update) for update in inside):
            ordered.update(id(update) for update in inside if alone or _is_linked(body, piece, update))
    return frozenset(ordered)


def _is_pointwise(body: Body, piece: Piece) -> bool:
    shapes = set()
    for bsym in piece.bsyms:
        if not is_elementwise(bsym) and prim_id(bsym) not in (PrimIDs.COPY_, PrimIDs.FULL):
            return False
        shapes.add(one_shape(body, bsym))
    shape = shapes.pop()
    return not shapes and shape is not None and all(isinstance(n, int) for n in shape) and any(n > 1 for n in shape)


def _target_names(body: Body, update: BoundSymbol) -> set[str]:
    buffer = body.buffer_of(operands_of(update)[1].name)
    return {proxy.name for proxy in body.inputs if body.buffer_of(proxy.name) == buffer}


def _reads_own_target(body: Body, piece: Piece, update: BoundSymbol) -> bool:
    """Whether an update's source is computed from its target, which the region reads by one name and in this piece only."""
    names = _target_names(body, update)
    read = {arg.name for bsym in body.bsyms for arg in read_by(bsym) if arg.name in names}
    if len(read) != 1 or not read <= piece.names:
        return False
    reached = set(read)
    for bsym in piece.bsyms:
        if any(arg.name in reached for arg in read_by(bsym)):
            reached.update(out.name for out in tensors(bsym.flat_outs))
    return operands_of(update)[0].name in reached


def _repeatable(piece: Piece) -> set[str]:
    """Names that nvFuser computes anew in every kernel: inputs, constants, and chains of unary ops and casts from them."""
    made = {out.name for bsym in piece.bsyms for out in tensors(bsym.flat_outs)}
    names = set(piece.names) - made
    for bsym in piece.bsyms:
        chain = prim_id(bsym) in UNARY_PRIMS or prim_id(bsym) in (PrimIDs.CONVERT_ELEMENT_TYPE, PrimIDs.SHALLOW_COPY)
        if prim_id(bsym) is PrimIDs.FULL or chain and all(arg.name in names for arg in tensors(bsym.flat_args)):
            names.update(out.name for out in tensors(bsym.flat_outs))
    return names


def _is_linked(body: Body, piece: Piece, update: BoundSymbol) -> bool:
    """Whether values that are computed once lead from the update to every reader of its target."""
    repeatable = _repeatable(piece)
    groups = Groups()
    for bsym in piece.bsyms:
        for proxy in (*read_by(bsym), *tensors(bsym.flat_outs)):
            if proxy.name not in repeatable:
                groups.join(id(bsym), proxy.name)
    of_target = _target_names(body, update)
    readers = []
    for bsym in piece.bsyms:
        if not any(arg.name in of_target for arg in read_by(bsym)):
            continue
        outs = {out.name for out in tensors(bsym.flat_outs)}
        if outs and outs <= repeatable:
            of_target |= outs  # who reads a chain from the target reads the target
        else:
            readers.append(bsym)
    if of_target & {out.name for out in body.outputs}:
        return False
    return all(groups.find(id(bsym)) == groups.find(id(update)) for bsym in readers)


def _returns_moved_values(body: Body) -> bool:
    """Whether an output may be a view of a computed value: a copy or a cast that a later pass takes for one."""
    producer = {out.name: bsym for bsym in body.bsyms for out in tensors(bsym.flat_outs)}
    moves = (PrimIDs.CLONE, PrimIDs.SHALLOW_COPY, PrimIDs.CONVERT_ELEMENT_TYPE)
    for out in body.outputs:
        name, moved = out.name, False
        while name in producer and prim_id(producer[name]) in moves:
            step, source = prim_id(producer[name]), tensors(producer[name].flat_args)[0]
            moved = moved or step is not PrimIDs.SHALLOW_COPY and source.dtype == out.dtype
            name = source.name
        if moved and name in producer:
            return True
    return False
