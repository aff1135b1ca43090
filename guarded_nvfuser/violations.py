"""Checking a region against the contract: its updates' targets, and what reads them.

For every update one of the rules must hold: STRICT, or one of the looser ones that count (contract.py).
"""

from __future__ import annotations

from thunder.core.devices import DeviceType
from thunder.core.prims import PrimIDs
from thunder.core.symbol import BoundSymbol

from guarded_nvfuser.contract import (
    Body,
    Looser,
    Rule,
    Violation,
    is_elementwise,
    loaded,
    one_shape,
    operands_of,
    read_by,
)
from guarded_nvfuser.effects import prim_id, tensors
from guarded_nvfuser.moved import moved_from
from guarded_nvfuser.pieces import widenings
from guarded_nvfuser.pointwise import read_before_written


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
    found += [*_repeated_targets(body, updates), *order_violations(body, updates)]
    order = {id(bsym): index for index, bsym in enumerate(body.bsyms)}
    return tuple(sorted(found, key=lambda v: order[id(v.reader if v.reader is not None else v.update)]))


def _target_violations(body: Body, update: BoundSymbol) -> list[Violation]:
    source, target = operands_of(update)
    found = []
    if target.name not in {proxy.name for proxy in body.inputs}:
        found.append(Violation(Rule.TARGET_IS_INPUT, update))
    elif not body.rules.any_device and target.device.devicetype is not DeviceType.CUDA:
        found.append(Violation(Rule.TARGET_ON_DEVICE, update))
    if tuple(source.shape) != tuple(target.shape) or source.dtype != target.dtype or source.device != target.device:
        found.append(Violation(Rule.SAME_KIND, update))
    return found


def _repeated_targets(body: Body, updates: tuple[BoundSymbol, ...]) -> list[Violation]:
    """Memory that is updated twice, or of which two inputs are different tensors.

    Aliases of one tensor count as one (tests/test_contract.py::test_two_updates, test_two_names, test_two_aliases).
    """
    names: dict[int | str, set[int | str]] = {}
    for proxy in body.inputs:
        names.setdefault(body.buffer_of(proxy.name), set()).add(body.tensor_of(proxy.name))
    first: set[int | str] = set()
    found = []
    for update in updates:
        buffer = body.buffer_of(operands_of(update)[1].name)
        if buffer in first:
            found.append(Violation(Rule.ONE_UPDATE, update))
        elif len(names.get(buffer, ())) > 1:
            found.append(Violation(Rule.ONE_NAME, update))
        first.add(buffer)
    return found


_REDUCTIONS = (PrimIDs.SUM, PrimIDs.PROD, PrimIDs.AMAX, PrimIDs.AMIN, PrimIDs.VAR, PrimIDs.VAR_MEAN)
_Finding = tuple[Rule, int, BoundSymbol]  # the claim, the updates (bits) for which it fails, the op


class _Dependence:
    """What every name of a region depends on, as bit masks: bit i stands for update i."""

    def __init__(self, body: Body, updates: tuple[BoundSymbol, ...]) -> None:
        self.body, self.updates = body, updates
        self.index = {id(update): index for index, update in enumerate(updates)}
        self.bits_of_shape: dict[tuple, int] = {}
        bits_of_buffer: dict[int | str, int] = {}
        for index, update in enumerate(updates):
            target = operands_of(update)[1]
            buffer, shape = body.buffer_of(target.name), tuple(target.shape)
            bits_of_buffer[buffer] = bits_of_buffer.get(buffer, 0) | 1 << index
            self.bits_of_shape[shape] = self.bits_of_shape.get(shape, 0) | 1 << index
        self.depends = {p.name: bits_of_buffer.get(body.buffer_of(p.name), 0) for p in body.inputs}
        self.chained = dict(
            self.depends
        )  # through ops of one operand alone: what nvFuser may recompute from the target
        self.moved = dict(self.depends)  # through ops that only move data: what nvFuser may take for the target itself
        self._forward()
        self.feeds = self._feeds()

    @property
    def moving(self) -> int:
        """The updates whose source only moves the data of their target."""
        bits = 0
        for index, update in enumerate(self.updates):
            bits |= self.moved.get(operands_of(update)[0].name, 0) & 1 << index
        return bits

    def _forward(self) -> None:
        producer = {out.name: bsym for bsym in self.body.bsyms for out in tensors(bsym.flat_outs)}
        for bsym in self.body.bsyms:
            operands = {proxy.name for proxy in loaded(self.body, read_by(bsym))}
            depends = _union(self.depends, operands)
            chained = _union(self.chained, operands) if len(operands) == 1 and not _combines(bsym, producer) else 0
            source = moved_from(bsym, producer)
            moved = self.moved.get(source.name, 0) if source is not None else 0
            for out in tensors(bsym.flat_outs):
                self.depends[out.name], self.chained[out.name], self.moved[out.name] = depends, chained, moved

    def _feeds(self) -> dict[int, int]:
        """Which updates each op flows into, by identity of the op."""
        needed: dict[str, int] = {}
        feeds: dict[int, int] = {}
        for bsym in reversed(self.body.bsyms):
            mask = _union(needed, {out.name for out in tensors(bsym.flat_outs)})
            mask |= 1 << self.index[id(bsym)] if id(bsym) in self.index else 0
            feeds[id(bsym)] = mask
            for arg in read_by(bsym):
                needed[arg.name] = needed.get(arg.name, 0) | mask
        return feeds

    def aligned_with(self, bsym: BoundSymbol) -> int:
        """The updates whose target has the one shape of all operands and results of an elementwise op."""
        if id(bsym) in self.index:
            return self.bits_of_shape.get(tuple(operands_of(bsym)[0].shape), 0)
        shape = one_shape(self.body, bsym) if is_elementwise(bsym) else None
        return 0 if shape is None else self.bits_of_shape.get(shape, 0)

    def unclosed(self, reach: dict[str, int]) -> list[_Finding]:
        """Reads that do not flow into the update, and values that leave the region.

        `reach` says which names count as the target's: `depends` or `chained`.
        """
        results = {out.name: index for index, update in enumerate(self.updates) for out in tensors(update.flat_outs)}
        producer = {out.name: bsym for bsym in self.body.bsyms for out in tensors(bsym.flat_outs)}
        found: list[_Finding] = []
        blamed: dict[str, int] = {}
        for bsym in self.body.bsyms:
            self._unclosed_at(bsym, reach, results, blamed, found)
        for out in self.body.outputs:
            bits = reach.get(out.name, 0) & ~blamed.get(out.name, 0)
            if out.name in results:
                bits &= ~(1 << results[out.name])
            if bits:
                found.append((Rule.ESCAPES, bits, producer.get(out.name, self.updates[0])))
        return found

    def _unclosed_at(self, bsym: BoundSymbol, reach: dict, results: dict, blamed: dict, found: list[_Finding]) -> None:
        """What one op breaks, each once: what is computed from a blamed value is not blamed again."""
        operands = {proxy.name for proxy in read_by(bsym)}
        own = 1 << self.index[id(bsym)] if id(bsym) in self.index else 0
        inherited = _union(blamed, operands)
        used = 0
        for name in operands & set(results):
            used |= 1 << results[name] if reach[name] else 0
        open_reads = _union(reach, operands) & ~own & ~self.feeds[id(bsym)] & ~used & ~inherited
        used &= ~inherited
        blamed.update((out.name, inherited | open_reads | used) for out in tensors(bsym.flat_outs))
        found += [(rule, mask, bsym) for rule, mask in ((Rule.RESULT_USED, used), (Rule.CLOSED, open_reads)) if mask]

    def unaligned(self) -> list[_Finding]:
        """Ops on the way to an update that read other elements of its target than the one that is written."""
        found: list[_Finding] = []
        blamed: dict[str, int] = {}
        for bsym in self.body.bsyms:
            operands = {proxy.name for proxy in read_by(bsym)}
            own = 1 << self.index[id(bsym)] if id(bsym) in self.index else 0
            inherited = _union(blamed, operands)
            mask = _union(self.depends, operands) & self.feeds[id(bsym)] & ~own & ~self.aligned_with(bsym) & ~inherited
            blamed.update((out.name, inherited | mask) for out in tensors(bsym.flat_outs))
            if mask:
                found.append((Rule.ALIGNED, mask, bsym))
        return found


def order_violations(body: Body, updates: tuple[BoundSymbol, ...]) -> list[Violation]:
    """What reads an update's target so that the order of load and store matters, under every rule that counts."""
    dependence, looser = _Dependence(body, updates), body.rules.looser
    reach = dependence.chained if Looser.BEHIND_TWO_OPERANDS in looser else dependence.depends
    found = dependence.unclosed(reach)
    unaligned = _needing_isolation(dependence)
    if Looser.ISOLATED in looser:  # what only moves the target's data is the target's memory to nvFuser, cut off or not
        unaligned = [(rule, mask & dependence.moving, bsym) for rule, mask, bsym in unaligned if rule is Rule.ALIGNED]
    found += unaligned
    failing = _bits_of(found)
    if failing and Looser.POINTWISE in looser:
        ordered = read_before_written(body)
        failing &= sum(1 << index for index, update in enumerate(updates) if id(update) not in ordered)
    return [Violation(rule, updates[index], bsym) for rule, mask, bsym in found for index in _indices(mask & failing)]


def in_place(body: Body) -> frozenset[str]:
    """The updates that the kernel which reads the target may store itself; the others need to be isolated.

    Args:
        body: a region without violations.

    Returns:
        Names of the updates' results.
    """
    updates = body.updates
    isolated = _bits_of(_needing_isolation(_Dependence(body, updates))) if updates else 0
    ordered = read_before_written(body) if isolated and Looser.POINTWISE in body.rules.looser else frozenset()
    stored = [update for index, update in enumerate(updates) if not isolated >> index & 1 or id(update) in ordered]
    return frozenset(out.name for update in stored for out in tensors(update.flat_outs))


def _needing_isolation(dependence: _Dependence) -> list[_Finding]:
    widest = widenings(dependence.body)
    found = dependence.unaligned()
    for index, update in enumerate(dependence.updates):
        if (op := widest(update)) is not None:
            found.append((Rule.WIDENED, 1 << index, op))
    return found


def _bits_of(findings: list[_Finding]) -> int:
    bits = 0
    for _, mask, _ in findings:
        bits |= mask
    return bits


def _union(masks: dict[str, int], names: set[str]) -> int:
    bits = 0
    for name in names:
        bits |= masks.get(name, 0)
    return bits


def _indices(mask: int) -> list[int]:
    found = []
    while mask:
        low = mask & -mask
        found.append(low.bit_length() - 1)
        mask ^= low
    return found


def _combines(bsym: BoundSymbol, producer: dict[str, BoundSymbol]) -> bool:
    """Whether an op is a reduction, whose value nvFuser stores between kernels; one that only moves data is none."""
    return prim_id(bsym) in _REDUCTIONS and moved_from(bsym, producer) is None
