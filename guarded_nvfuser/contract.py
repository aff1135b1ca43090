"""nvFuser's in-place contract for one region: which updates of a region mean the same under every schedule.

After a fusion with `add_output(out, alias_input=x)`, x's memory holds `out`; nvFuser promises nothing else
(csrc/fusion.h, comment at `aliasOutputToInput`): no order against other reads of x, none between two updates. So an
update is accepted only where no order can matter. `D(x)` is x's memory among the region's inputs and all that is
computed from it.

STRICT: everything that reads D(x) is elementwise over x's shape (ALIGNED) and flows into the update (CLOSED); nothing
of D(x) leaves the region but the update's result, which nothing inside reads. The writing thread then reads x only at
the element that it writes. POINTWISE: the region is one connected piece of elementwise ops over one shape and every
update's source reads its own target; the pointwise scheduler loads each input into registers once, before any store.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

from thunder.core.devices import DeviceType
from thunder.core.prims import PrimIDs
from thunder.core.proxies import TensorProxy
from thunder.core.symbol import BoundSymbol
from thunder.core.utils import is_cpu_scalar_tensor

from guarded_nvfuser.effects import ELEMENTWISE_PRIMS, VIEW_PRIMS, prim_id, tensors


class Rule(Enum):
    """The claims that make an update safe; the value says what may happen where one fails."""

    TARGET_IS_INPUT = "nvFuser can only update an input of the fusion; this target is made inside it"
    TARGET_ON_DEVICE = "nvFuser stores through a pointer that it takes from a CUDA tensor; this target is not on CUDA"
    ONE_NAME = "two inputs of the fusion name this memory; nvFuser takes them for independent tensors"
    ONE_UPDATE = "nvFuser does not order two updates of one tensor; the last store wins, whichever it is"
    SAME_KIND = "nvFuser stores the source's elements through the target's pointer without checking shape or dtype"
    ALIGNED = (
        "the read loads other elements than the update's thread writes; another thread may have stored them already"
    )
    CLOSED = "nothing orders this read against the update; nvFuser may load it before or after the store, by shape"
    ESCAPES = "nvFuser may recompute this value from the updated memory where a later kernel of the fusion needs it"
    RESULT_USED = "nvFuser may recompute what is read here from the updated memory, in another kernel of the fusion"


@dataclass(frozen=True)
class Violation:
    """One failed claim about an update: the rule, the update, and the op that may go wrong (None: the update)."""

    rule: Rule
    update: BoundSymbol
    reader: BoundSymbol | None = None


@dataclass(frozen=True)
class Body:
    """A region as nvFuser will get it.

    Attributes:
        bsyms: flat ops in order; `inputs` and `outputs`: the tensors that cross its boundary.
        buffer_of: which memory a name is; `tensor_of`: which tensor, so that aliases of one tensor count as one.
        any_device: the region is interpreted, its CPU tensors stand for CUDA tensors.
    """

    bsyms: tuple[BoundSymbol, ...]
    inputs: tuple[TensorProxy, ...]
    outputs: tuple[TensorProxy, ...]
    buffer_of: Callable[[str], int | str] = str
    tensor_of: Callable[[str], int | str] = str
    any_device: bool = False

    @property
    def updates(self) -> tuple[BoundSymbol, ...]:
        """The copy_ symbols, in order."""
        return tuple(bsym for bsym in self.bsyms if prim_id(bsym) is PrimIDs.COPY_)


def body_of(region: BoundSymbol, **names: Any) -> Body:
    """The `Body` of a fusion symbol; without `buffer_of`, every name is memory of its own."""
    return Body(tuple(region.subsymbols), tensors(region.flat_args), tensors(region.flat_outs), **names)


def violations(body: Body) -> tuple[Violation, ...]:
    """Every claim of the contract that a region breaks.

    Args:
        body: the region.

    Returns:
        The violations in program order; none for a region without updates. Time is linear in the region's size.
    """
    updates = body.updates
    if not updates:
        return ()
    found = [v for update in updates for v in _target_violations(body, update)]
    found += _repeated_targets(body, updates)
    ordered = read_before_written(body)
    found += [v for v in _Dependence(body, updates).violations() if id(v.update) not in ordered]
    order = {id(bsym): index for index, bsym in enumerate(body.bsyms)}
    return tuple(sorted(found, key=lambda v: order[id(v.reader if v.reader is not None else v.update)]))


def is_elementwise(bsym: BoundSymbol) -> bool:
    """Whether each element of the results depends on the same element of the operands alone."""
    return prim_id(bsym) in _ALIGNED_PRIMS


_ALIGNED_PRIMS = ELEMENTWISE_PRIMS | {PrimIDs.CONVERT_ELEMENT_TYPE, PrimIDs.CLONE, PrimIDs.SHALLOW_COPY}


def _one_shape(body: Body, bsym: BoundSymbol) -> tuple | None:
    """The shape that all results and operands of an elementwise op have; 0-d operands are scalars to it."""
    shapes = {tuple(proxy.shape) for proxy in tensors(bsym.flat_outs)}
    shapes |= {tuple(proxy.shape) for proxy in _loaded(body, bsym.flat_args)} - ({()} if shapes else set())
    return shapes.pop() if len(shapes) == 1 else None


def _operands(update: BoundSymbol) -> tuple[TensorProxy, TensorProxy]:
    source, target = tensors(update.flat_args)[:2]
    return source, target


def _target_violations(body: Body, update: BoundSymbol) -> list[Violation]:
    source, target = _operands(update)
    found = []
    if target.name not in {proxy.name for proxy in body.inputs}:
        found.append(Violation(Rule.TARGET_IS_INPUT, update))
    elif not body.any_device and target.device.devicetype is not DeviceType.CUDA:
        found.append(Violation(Rule.TARGET_ON_DEVICE, update))
    if tuple(source.shape) != tuple(target.shape) or source.dtype != target.dtype or source.device != target.device:
        found.append(Violation(Rule.SAME_KIND, update))
    return found


def _repeated_targets(body: Body, updates: tuple[BoundSymbol, ...]) -> list[Violation]:
    """Memory that is updated twice, or that two inputs name (tests/test_contract.py::test_two_updates,
    test_two_names).
    """
    names: dict[int | str, set[int | str]] = {}
    for proxy in body.inputs:
        names.setdefault(body.buffer_of(proxy.name), set()).add(body.tensor_of(proxy.name))
    first: set[int | str] = set()
    found = []
    for update in updates:
        buffer = body.buffer_of(_operands(update)[1].name)
        if buffer in first:
            found.append(Violation(Rule.ONE_UPDATE, update))
        elif len(names.get(buffer, ())) > 1:
            found.append(Violation(Rule.ONE_NAME, update))
        first.add(buffer)
    return found


class _Dependence:
    """D(x) of every update at once, as bit masks: bit i of a name says that it is computed from update i's target."""

    def __init__(self, body: Body, updates: tuple[BoundSymbol, ...]) -> None:
        self.body, self.updates = body, updates
        self.bit_of_buffer: dict[int | str, int] = {}
        self.bits_of_shape: dict[tuple, int] = {}
        for index, update in enumerate(updates):
            target = _operands(update)[1]
            self.bit_of_buffer[body.buffer_of(target.name)] = (
                self.bit_of_buffer.get(body.buffer_of(target.name), 0) | 1 << index
            )
            self.bits_of_shape[tuple(target.shape)] = self.bits_of_shape.get(tuple(target.shape), 0) | 1 << index
        self.index = {id(update): index for index, update in enumerate(updates)}
        self.reads = self._reads()
        self.feeds = self._feeds()

    def _reads(self) -> dict[str, int]:
        """Which targets each name is computed from. An update reads its source only."""
        mask = {proxy.name: self.bit_of_buffer.get(self.body.buffer_of(proxy.name), 0) for proxy in self.body.inputs}
        for bsym in self.body.bsyms:
            seen = self._seen(bsym, mask)
            mask.update((out.name, seen) for out in tensors(bsym.flat_outs))
        return mask

    def _seen(self, bsym: BoundSymbol, mask: dict[str, int]) -> int:
        args = tensors(bsym.flat_args)
        if id(bsym) in self.index:
            args = args[:1]
        seen = 0
        for arg in args:
            seen |= mask.get(arg.name, 0)
        return seen

    def _feeds(self) -> dict[int, int]:
        """Which updates each op flows into, by identity of the op."""
        needed: dict[str, int] = {}
        feeds: dict[int, int] = {}
        for bsym in reversed(self.body.bsyms):
            mask = 0
            for out in tensors(bsym.flat_outs):
                mask |= needed.get(out.name, 0)
            args = tensors(bsym.flat_args)
            if id(bsym) in self.index:
                mask |= 1 << self.index[id(bsym)]
                args = args[:1]
            feeds[id(bsym)] = mask
            for arg in args:
                needed[arg.name] = needed.get(arg.name, 0) | mask
        return feeds

    def violations(self) -> list[Violation]:
        results = {out.name: index for index, update in enumerate(self.updates) for out in tensors(update.flat_outs)}
        found, blamed = [], {}
        for bsym in self.body.bsyms:
            found += self._at(bsym, results, blamed)
        producer = {out.name: bsym for bsym in self.body.bsyms for out in tensors(bsym.flat_outs)}
        for out in self.body.outputs:
            bits = self.reads.get(out.name, 0)
            if out.name in results:
                bits &= ~(1 << results[out.name])
            bits &= ~blamed.get(out.name, 0)
            found += [Violation(Rule.ESCAPES, self.updates[i], producer.get(out.name)) for i in _bits(bits)]
        return found

    def _at(self, bsym: BoundSymbol, results: dict[str, int], blamed: dict[str, int]) -> list[Violation]:
        """The claims that one op breaks, each once: what is computed from a blamed value is not blamed again."""
        seen, own = self._seen(bsym, self.reads), self.index.get(id(bsym))
        if own is not None:
            seen &= ~(1 << own)
        inherited = self._seen(bsym, blamed)
        used = 0
        for arg in tensors(bsym.flat_args):
            if arg.name in results and self.reads[arg.name]:
                used |= 1 << results[arg.name]
        closed = self.feeds[id(bsym)]
        unaligned = seen & closed & ~self._aligned_with(bsym) & ~inherited
        open_reads = seen & ~closed & ~used & ~inherited
        used &= ~inherited
        blame = inherited | unaligned | open_reads | used
        blamed.update((out.name, blame) for out in tensors(bsym.flat_outs))
        rules = ((Rule.ALIGNED, unaligned), (Rule.RESULT_USED, used), (Rule.CLOSED, open_reads))
        return [Violation(rule, self.updates[i], bsym) for rule, mask in rules for i in _bits(mask)]

    def _aligned_with(self, bsym: BoundSymbol) -> int:
        """The updates whose target has the one shape of all operands and results of an elementwise op."""
        if id(bsym) in self.index:
            return self.bits_of_shape.get(tuple(_operands(bsym)[0].shape), 0)
        if not is_elementwise(bsym):
            return 0
        shape = _one_shape(self.body, bsym)
        return 0 if shape is None else self.bits_of_shape.get(shape, 0)


def _loaded(body: Body, values: Sequence) -> tuple[TensorProxy, ...]:
    """The tensors among operands, without 0-d CPU tensors, which nvFuser passes to its kernels by value."""
    return tuple(p for p in tensors(values) if body.any_device or not is_cpu_scalar_tensor(p))


def _bits(mask: int) -> list[int]:
    found = []
    while mask:
        low = mask & -mask
        found.append(low.bit_length() - 1)
        mask ^= low
    return found


def read_before_written(body: Body) -> frozenset[int]:
    """POINTWISE: the updates (by identity) whose target every reader in the region sees as it was on entry.

    Holds for an update in a connected piece of elementwise ops over one shape in which every update's source reads
    its own target: a blind overwrite may be stored before another reader's load
    (tests/test_contract.py::test_pointwise_needs_own_target), and pieces become kernels of their own, in an order
    that ignores updates (::test_pointwise_needs_one_piece). A 0-d input is not loaded into a register first
    (csrc/scheduler/utils.cpp, cacheInputs).
    """
    updates = body.updates
    dependence = _Dependence(body, updates)
    ordered: set[int] = set()
    for piece in _pieces(body):
        inside = [update for update in updates if id(update) in piece.ops]
        if inside and _is_pointwise(body, piece) and all(_reads_own_target(body, piece, dependence, u) for u in inside):
            ordered.update(id(update) for update in inside)
    return frozenset(ordered)


@dataclass(frozen=True)
class _Piece:
    """A connected part of a region: identities of its ops, and the names that they use or define (targets apart)."""

    bsyms: tuple[BoundSymbol, ...]
    ops: frozenset[int]
    names: frozenset[str]


def _pieces(body: Body) -> list[_Piece]:
    parent: dict[str, str] = {}

    def find(name: str) -> str:
        while parent.setdefault(name, name) != name:
            parent[name] = parent[parent[name]]
            name = parent[name]
        return name

    used = [_names(body, bsym) for bsym in body.bsyms]
    for names in used:
        for name in names[1:]:
            parent[find(name)] = find(names[0])
    grouped: dict[str, list[int]] = {}
    for index, names in enumerate(used):
        grouped.setdefault(find(names[0]) if names else "", []).append(index)
    return [
        _Piece(
            tuple(body.bsyms[i] for i in members),
            frozenset(id(body.bsyms[i]) for i in members),
            frozenset(name for i in members for name in used[i]),
        )
        for members in grouped.values()
    ]


def _names(body: Body, bsym: BoundSymbol) -> list[str]:
    args = _operands(bsym)[:1] if prim_id(bsym) is PrimIDs.COPY_ else bsym.flat_args
    return [proxy.name for proxy in _loaded(body, (*args, *bsym.flat_outs))]


def _is_pointwise(body: Body, piece: _Piece) -> bool:
    shapes = set()
    for bsym in piece.bsyms:
        if prim_id(bsym) not in _ALIGNED_PRIMS and prim_id(bsym) not in (PrimIDs.COPY_, PrimIDs.FULL):
            return False
        shapes.add(_one_shape(body, bsym))
    shape = shapes.pop()
    return (
        not shapes
        and shape is not None
        and all(isinstance(extent, int) for extent in shape)
        and any(extent > 1 for extent in shape)
    )


def _reads_own_target(body: Body, piece: _Piece, dependence: _Dependence, update: BoundSymbol) -> bool:
    """Whether an update's source is computed from its target, which the region reads by one name and in this piece
    only.
    """
    source, target = _operands(update)
    if not dependence.reads.get(source.name, 0) >> dependence.index[id(update)] & 1:
        return False
    buffer = body.buffer_of(target.name)
    inputs = {proxy.name for proxy in body.inputs if body.buffer_of(proxy.name) == buffer}
    read = {arg.name for bsym in body.bsyms for arg in _read(bsym) if arg.name in inputs}
    return len(read) == 1 and read <= piece.names


def _read(bsym: BoundSymbol) -> tuple[TensorProxy, ...]:
    args = tensors(bsym.flat_args)
    return args[:1] if prim_id(bsym) is PrimIDs.COPY_ else args


# Ops whose result nvFuser may hand back as its operand's memory (csrc/alias_analysis.cpp; a reduction over size-1
# dimensions is a squeeze, csrc/ops/arith.cpp).
MOVEMENT_PRIMS = VIEW_PRIMS | {PrimIDs.CLONE, PrimIDs.RESHAPE, PrimIDs.STRIDE_ORDER}
_SQUEEZING = frozenset((PrimIDs.SUM, PrimIDs.AMAX, PrimIDs.AMIN, PrimIDs.PROD))


def moved_from(bsym: BoundSymbol) -> TensorProxy | None:
    """The operand whose memory nvFuser may return as this op's result, if the op only moves data (casts included).

    Casts count because a widening cast and its inverse cancel (thunder's remove_redundant_casts and nvFuser's
    ConsecutiveCast); a caller compares dtypes at both ends of a chain.
    """
    prim, args = prim_id(bsym), tensors(bsym.flat_args)
    if prim in MOVEMENT_PRIMS or prim is PrimIDs.CONVERT_ELEMENT_TYPE:
        return args[0] if args else None
    if prim is PrimIDs.COPY_:
        return None
    if prim in _SQUEEZING and args and tensors(bsym.flat_outs):
        return args[0] if _elements(args[0]) == _elements(tensors(bsym.flat_outs)[0]) else None
    if prim in (PrimIDs.CAT, PrimIDs.PAD) and args and tensors(bsym.flat_outs):
        same = tuple(args[0].shape) == tuple(tensors(bsym.flat_outs)[0].shape)
        return args[0] if same and len(args) == 1 else None
    return None


def _elements(proxy: TensorProxy) -> int:
    return math.prod(int(extent) for extent in proxy.shape)


def moved_results(body: Body) -> Iterator[tuple[TensorProxy, TensorProxy]]:
    """Results that nvFuser may return as memory of an input or of another result, because they only move its data.

    Args:
        body: a region.

    Yields:
        Pairs (result, the input or other result nearest to it). A chain whose dtype changed in the end is a
        computation.
    """
    producer = {out.name: bsym for bsym in body.bsyms for out in tensors(bsym.flat_outs)}
    known = {proxy.name for proxy in (*body.inputs, *body.outputs)}
    for out in body.outputs:
        name, first = out.name, True
        while name in producer and (source := moved_from(producer[name])) is not None:
            if source.name in known and source.dtype == out.dtype and (source.name != out.name or first):
                yield out, source
                break
            name, first = source.name, False
