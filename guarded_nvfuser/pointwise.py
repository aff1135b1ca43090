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
    targets = _Targets(body)
    ordered: set[int] = set()
    for piece in pieces:
        inside = [bsym for bsym in piece.bsyms if prim_id(bsym) is PrimIDs.COPY_]
        if inside and _is_pointwise(body, piece) and all(targets.is_read_by_own(piece, update) for update in inside):
            links = None if alone else _Links(body, piece)
            ordered.update(id(update) for update in inside if links is None or links.hold(targets.names(update), update))
    return frozenset(ordered)


def _is_pointwise(body: Body, piece: Piece) -> bool:
    shapes = set()
    for bsym in piece.bsyms:
        if not is_elementwise(bsym) and prim_id(bsym) not in (PrimIDs.COPY_, PrimIDs.FULL):
            return False
        shapes.add(one_shape(body, bsym))
    shape = shapes.pop()
    return not shapes and shape is not None and all(isinstance(n, int) for n in shape) and any(n > 1 for n in shape)


class _Targets:
    """The inputs that each update writes, and what is computed from them: bit i stands for the i-th input."""

    def __init__(self, body: Body) -> None:
        self.body = body
        self.inputs: dict[int | str, set[str]] = {}
        for proxy in body.inputs:
            self.inputs.setdefault(body.buffer_of(proxy.name), set()).add(proxy.name)
        self.read = {arg.name for bsym in body.bsyms for arg in read_by(bsym)}
        self.bit = {proxy.name: 1 << index for index, proxy in enumerate(body.inputs)}
        depends = dict(self.bit)
        for bsym in body.bsyms:
            mask = 0
            for arg in read_by(bsym):
                mask |= depends.get(arg.name, 0)
            depends.update((out.name, depends.get(out.name, 0) | mask) for out in tensors(bsym.flat_outs))
        self.depends = depends

    def names(self, update: BoundSymbol) -> set[str]:
        """The inputs in the memory of an update's target."""
        return self.inputs.get(self.body.buffer_of(operands_of(update)[1].name), set())

    def is_read_by_own(self, piece: Piece, update: BoundSymbol) -> bool:
        """Whether an update's source is computed from its target, which the region reads by one name and in this piece
        only.
        """
        read = self.names(update) & self.read
        if len(read) != 1 or not read <= piece.names:
            return False
        return bool(self.depends.get(operands_of(update)[0].name, 0) & self.bit[next(iter(read))])


class _Links:
    """What holds the ops of a piece in one kernel: values that are computed once.

    Inputs, constants, and chains of unary ops and casts from them are computed anew in every kernel that needs them.
    """

    def __init__(self, body: Body, piece: Piece) -> None:
        self.groups = Groups()
        self.readers: dict[str, list[BoundSymbol]] = {}  # by input: who reads it, directly or at the end of a chain
        self.root = _roots(piece)
        for bsym in piece.bsyms:
            self._add(bsym)
        self.returned = {self.root.get(out.name) for out in body.outputs}

    def _add(self, bsym: BoundSymbol) -> None:
        outs = tensors(bsym.flat_outs)
        for proxy in (*read_by(bsym), *outs):
            if proxy.name not in self.root:
                self.groups.join(id(bsym), proxy.name)
        if outs and all(out.name in self.root for out in outs):
            return  # part of a chain: who reads its end reads the input
        for arg in read_by(bsym):
            if self.root.get(arg.name) is not None:
                self.readers.setdefault(self.root[arg.name], []).append(bsym)

    def hold(self, names: set[str], update: BoundSymbol) -> bool:
        """Whether an update is in one kernel with all readers of the inputs `names`."""
        own = self.groups.find(id(update))
        return self.returned.isdisjoint(names) and all(
            self.groups.find(id(bsym)) == own for name in names for bsym in self.readers.get(name, ())
        )


def _roots(piece: Piece) -> dict[str, str | None]:
    """Names that nvFuser computes anew in every kernel, each with the input it comes from; None for constants."""
    made = {out.name for bsym in piece.bsyms for out in tensors(bsym.flat_outs)}
    roots: dict[str, str | None] = {name: name for name in piece.names - made}
    for bsym in piece.bsyms:
        args = tensors(bsym.flat_args)
        chain = prim_id(bsym) in UNARY_PRIMS or prim_id(bsym) in (PrimIDs.CONVERT_ELEMENT_TYPE, PrimIDs.SHALLOW_COPY)
        if prim_id(bsym) is PrimIDs.FULL:
            roots.update((out.name, None) for out in tensors(bsym.flat_outs))
        elif chain and all(arg.name in roots for arg in args):
            roots.update((out.name, roots[args[0].name]) for out in tensors(bsym.flat_outs))
    return roots


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
