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
        self.spread: dict[str, bool] = {}  # whether a broadcast that adds a dimension lies on the way to a name
        self._forward()
        self.feeds = self._feeds()

    def _forward(self) -> None:
        for bsym in self.body.bsyms:
            operands = {proxy.name for proxy in loaded(self.body, read_by(bsym))}
            depends = _union(self.depends, operands)
            chained = _union(self.chained, operands) if len(operands) == 1 and not _is_reduction(bsym) else 0
            spread = any(self.spread.get(name) for name in operands) or _adds_dimension(bsym)
            for out in tensors(bsym.flat_outs):
                self.depends[out.name], self.chained[out.name], self.spread[out.name] = depends, chained, spread

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

    def findings(self, reach: dict[str, int]) -> list[_Finding]:
        """The claims that fail, where `reach` says which names count as the target's: `depends` or `chained`."""
        results = {out.name: index for index, update in enumerate(self.updates) for out in tensors(update.flat_outs)}
        producer = {out.name: bsym for bsym in self.body.bsyms for out in tensors(bsym.flat_outs)}
        found: list[_Finding] = []
        blamed: dict[str, int] = {}
        for bsym in self.body.bsyms:
            self._at(bsym, reach, results, blamed, found)
        for out in self.body.outputs:
            bits = reach.get(out.name, 0) & ~blamed.get(out.name, 0)
            if out.name in results:
                bits &= ~(1 << results[out.name])
            if bits:
                found.append((Rule.ESCAPES, bits, producer.get(out.name, self.updates[0])))
        return found

    def _at(self, bsym: BoundSymbol, reach: dict, results: dict, blamed: dict, found: list[_Finding]) -> None:
        """The claims that one op breaks, each once: what is computed from a blamed value is not blamed again."""
        operands = {proxy.name for proxy in read_by(bsym)}
        own = 1 << self.index[id(bsym)] if id(bsym) in self.index else 0
        inherited, closed = _union(blamed, operands), self.feeds[id(bsym)]
        used = 0
        for name in operands & set(results):
            used |= 1 << results[name] if reach[name] else 0
        unaligned = _union(self.depends, operands) & ~own & closed & ~self.aligned_with(bsym) & ~inherited
        open_reads = _union(reach, operands) & ~own & ~closed & ~used & ~inherited
        used &= ~inherited
        blame = inherited | unaligned | open_reads | used
        blamed.update((out.name, blame) for out in tensors(bsym.flat_outs))
        rules = ((Rule.ALIGNED, unaligned), (Rule.RESULT_USED, used), (Rule.CLOSED, open_reads))
        found += [(rule, mask, bsym) for rule, mask in rules if mask]


def order_violations(body: Body, updates: tuple[BoundSymbol, ...]) -> list[Violation]:
    """What reads an update's target so that the order of load and store matters, under every rule that counts."""
    dependence = _Dependence(body, updates)
    strict = dependence.findings(dependence.depends)
    failing = _bits_of(strict)
    reported = strict
    if failing and Looser.BEHIND_TWO_OPERANDS in body.rules.looser:
        reported = dependence.findings(dependence.chained)
        failing &= _bits_of(reported)
    if failing and Looser.BROADCAST in body.rules.looser:
        open_bits = _bits_of([finding for finding in strict if finding[0] is not Rule.ALIGNED])
        spread = [dependence.spread.get(operands_of(update)[0].name, False) for update in updates]
        failing &= open_bits | sum(1 << index for index, isolated in enumerate(spread) if not isolated)
    if failing and Looser.POINTWISE in body.rules.looser:
        ordered = read_before_written(body)
        failing &= sum(1 << index for index, update in enumerate(updates) if id(update) not in ordered)
    return [
        Violation(rule, updates[index], bsym) for rule, mask, bsym in reported for index in _indices(mask & failing)
    ]


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


def _is_reduction(bsym: BoundSymbol) -> bool:
    return prim_id(bsym) in (PrimIDs.SUM, PrimIDs.PROD, PrimIDs.AMAX, PrimIDs.AMIN, PrimIDs.VAR, PrimIDs.VAR_MEAN)


def _adds_dimension(bsym: BoundSymbol) -> bool:
    """Whether an op is a broadcast that nvFuser makes a BroadcastOp; an expand of a dimension is none."""
    if prim_id(bsym) is not PrimIDs.BROADCAST_IN_DIM:
        return False
    return tensors(bsym.flat_outs)[0].ndim > tensors(bsym.flat_args)[0].ndim
