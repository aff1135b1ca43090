"""The judge: walks a fused trace once and finds every read that may see another state than the one it must see.

Outside regions PyTorch runs op by op; a region reads its inputs as they are when it starts and updates them when it
ends, provided that the contract accepts it (contract.py). `judge(program, fused)` compares this with what the program
means.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from enum import Enum
from functools import cached_property

from thunder.core import prims
from thunder.core.prims import PrimIDs
from thunder.core.proxies import Proxy
from thunder.core.pytree import tree_iter
from thunder.core.symbol import BoundSymbol
from thunder.core.trace import TraceCtx

from guarded_nvfuser.contract import ALL_RULES, Body, Rule, Rules, Violation
from guarded_nvfuser.effects import Effects, is_hidden_view, leaves, tensors
from guarded_nvfuser.moved import moved_results
from guarded_nvfuser.states import Entry, Program, UntrackedRead, Write, is_joint, key_of, returned
from guarded_nvfuser.values import Values
from guarded_nvfuser.violations import violations


class Kind(Enum):
    """What goes wrong, with the stable code that messages carry."""

    RAW = "GNV001"
    WAR = "GNV002"
    WAW = "GNV003"
    TARGET = "GNV004"
    LOST = "GNV005"
    SAVED = "GNV006"
    UNTRACKED = "GNV007"
    LAYOUT = "GNV008"
    LEAF = "GNV009"
    OVERLAP = "GNV010"
    UNCERTAIN = "GNV011"
    UNDECLARED = "GNV012"


@dataclass(frozen=True)
class Hazard:
    """One read that may see the wrong state, or one write that may be lost or land in the wrong place.

    Attributes:
        kind: what goes wrong.
        buffer: the buffer's number in the program.
        name: the tensor's name in the trace.
        read: the op that reads; None where only writes are at odds.
        must: the write that made the state that the read must see; None for the state on entry.
        may: the write whose state it may see instead; None for the state on entry.
        region: the nvFusion in which it happens; None between regions.
        rule: the claim of the contract that fails; None where the order between regions is wrong.
    """

    kind: Kind
    buffer: int
    name: str
    read: BoundSymbol | None = None
    must: Write | None = None
    may: Write | None = None
    region: str | None = None
    rule: Rule | None = None


def is_region(bsym: BoundSymbol) -> bool:
    """Whether a bound symbol is a region of nvFuser's (its own or this library's executor)."""
    return bsym.sym.is_fusion and bsym.sym.name.startswith("nvFusion")


def judge(program: Program, fused: TraceCtx, rules: Rules = ALL_RULES) -> tuple[Hazard, ...]:
    """Find every hazard of a fused trace.

    Args:
        program: what the trace before fusion means.
        fused: the trace after fusion, rematerialisation, cast removal, CSE and DCE; forward and backward.
        rules: what the contract allows in a region.

    Returns:
        The hazards in the order in which they happen. Time is linear in the length of the fused trace.
    """
    return _Judge(program, rules).run(fused)


def refusals(program: Program) -> tuple[Hazard, ...]:
    """What no mode can run: writes that eager refuses too, and gradients that Thunder cannot express.

    Args:
        program: the program as Thunder traced it, before anything is rewritten.
    """
    leaf = [
        Hazard(Kind.LEAF, write.buffer, write.target, None, None, write)
        for writes in program.writes.values()
        for write in writes
        if write.bsym.kwargs.get("grad_enabled") and write.buffer in program.grad_inputs
    ]
    return (*leaf, *(_untracked(read) for read in program.detached))


def lost_views(program: Program, names: Collection[str]) -> tuple[Hazard, ...]:
    """Writes of memory that eager sees through a view, and that Thunder's decomposition of it does not share.

    Args:
        program: a program without gradients (with them, names are gone).
        names: the ops that make such views: "diagonal" (tests/test_autograd.py::
            test_writes_through_diagonals_are_right_or_refused) or "einsum" (tests/test_effects.py::
            test_writes_through_such_views_are_eagers).
    """
    found = []
    for bsym in program.trace.bound_symbols:
        if bsym.sym.name not in names or not is_hidden_view(bsym):
            continue
        out = tensors(bsym.flat_outs)[0].name
        writes = program.writes.get(program.buffer_of[out])
        if writes:
            found.append(Hazard(Kind.UNTRACKED, program.buffer_of[out], out, bsym, writes[0], writes[0]))
    return tuple(found)


def _untracked(read: UntrackedRead) -> Hazard:
    return Hazard(Kind.UNTRACKED, read.write.buffer, read.name, read.bsym, read.write, read.write)


def program_hazards(program: Program) -> tuple[Hazard, ...]:
    """Hazards of a program itself, in any order of execution: what Thunder's autograd derived wrongly.

    Thunder derives gradients before it fuses, by proxies: a write through a view, or a tensor read by an old name with
    `skip_inplace_alias_updates`, is missing from them (tests/test_autograd.py).
    """
    found = [_untracked(read) for read in program.untracked]
    for save in program.ambiguous_saves:
        buffer = program.buffer_of[save.name]
        write = program.writes[buffer][save.state]
        found.append(Hazard(Kind.UNTRACKED, buffer, save.name, save.entry.bsym, write, write))
    return tuple(found)


def overlap_hazards(program: Program) -> tuple[Hazard, ...]:
    """One hazard for every pair of arguments that overlap in memory, one of them written."""
    found = []
    for a, b in program.overlaps:
        writes = program.writes.get(program.buffer_of[a], [])
        if writes:
            found.append(Hazard(Kind.OVERLAP, program.buffer_of[a], f"{a}` and `{b}", None, None, writes[0]))
    return tuple(found)


def execution_order(trace: TraceCtx) -> tuple[list[BoundSymbol], list[BoundSymbol]]:
    """The bound symbols of a trace in the order in which they will run: the forward's, then the backward's.

    Thunder splits a joint trace after fusion, and what the forward's results do not need runs with the backward,
    wherever it stood (thunder/transforms/autodiff.py, split_into_forward_and_backward;
    test_hazards.py::test_order_is_thunders).
    """
    bsyms = [bsym for bsym in trace.bound_symbols if bsym.sym.id is not PrimIDs.RETURN]
    if not is_joint(trace):
        return bsyms, []
    value = trace.bound_symbols[-1].args[0]
    needed = {p.name for p in tree_iter((value["fw_flat_out"], value["flat_args"])) if isinstance(p, Proxy)}
    forward, backward = [], []
    for bsym in reversed(bsyms):
        if bsym.sym == prims.get_grad:
            backward.append(bsym)
        elif any(out.name in needed for out in bsym.flat_proxy_outs) or bsym.sym == prims.unpack_trivial:
            args = {arg.name for arg in bsym.flat_proxy_args}
            needed |= args | {out.name for out in bsym.flat_proxy_outs if out.name not in args}
            forward.append(bsym)
        elif any(target in needed for target in _copied_into(bsym)):
            needed |= {arg.name for arg in bsym.flat_proxy_args}
            forward.append(bsym)
        else:
            backward.append(bsym)
    return forward[::-1], backward[::-1]


def _copied_into(bsym: BoundSymbol) -> list[str]:
    """Targets of the copies that a symbol outside regions will be decomposed into before the split."""
    if is_region(bsym):
        return []
    return [leaf.args[1].name for leaf, _ in leaves(bsym) if leaf.sym == prims.copy_ or leaf.sym.name == "copy_"]


@dataclass(frozen=True)
class _Risk:
    """A region's result that only moves data: it may be `buffer`'s memory, or hold what that memory held at `state`."""

    buffer: int
    state: int
    copy: bool  # the program says that it is memory of its own


class _Judge:
    def __init__(self, program: Program, rules: Rules) -> None:
        self.program, self.rules = program, rules
        self.state: dict[int, int] = {}
        self.risks: dict[str, tuple[_Risk, ...]] = {}
        self.found: dict[tuple, Hazard] = {}

    @cached_property
    def values(self) -> Values:
        """Value numbers, needed only where a pass swapped names."""
        return Values(self.program)

    def run(self, fused: TraceCtx) -> tuple[Hazard, ...]:
        forward, backward = execution_order(fused)
        self.walk(forward)
        self.finish_forward(fused)
        self.walk(backward)
        return tuple(self.found.values())

    def walk(self, bsyms: list[BoundSymbol]) -> None:
        for bsym in bsyms:
            if is_region(bsym):
                self.region(bsym)
                continue
            for leaf, effects in leaves(bsym):
                self.op(leaf, effects)

    def add(self, kind: Kind, name: str, read: BoundSymbol | None, must: int, may: int, region=None, rule=None) -> None:
        buffer = self.program.buffer_of[name]
        if read is not None and kind is Kind.RAW and self._entry_is_backward(read):
            kind = Kind.SAVED
        hazard = Hazard(kind, buffer, name, read, self._write(buffer, must), self._write(buffer, may), region, rule)
        self.found.setdefault((id(read) if read is not None else name, buffer, kind is Kind.LOST), hazard)

    def _entry_is_backward(self, bsym: BoundSymbol) -> bool:
        entry = self.program.entries.get(key_of(bsym))
        return entry is not None and entry.backward

    def _write(self, buffer: int, state: int) -> Write | None:
        return self.program.write(buffer, min(state, self.program.final(buffer)))

    def now(self, name: str) -> int:
        return self.state.get(self.program.buffer_of.get(name, -1), 0)

    # --- between regions

    def op(self, leaf: BoundSymbol, effects: Effects) -> None:
        for read in dict.fromkeys(proxy.name for proxy in effects.reads):
            self.read(leaf, read, self.now(read))
        for target in effects.writes:
            self.land(leaf, target.name)
        self.check_shares(leaf, effects)
        for out, source in effects.shares:
            if source.name in self.risks and not effects.writes:
                self.risks[out.name] = self.risks[source.name]

    def check_shares(self, leaf: BoundSymbol, effects: Effects, region: str | None = None) -> None:
        """A view or an update of one buffer where the program has another: a pass took two tensors for one."""
        program = self.program
        for out, source in effects.shares:
            mine, other = program.buffer_of.get(out.name), program.buffer_of.get(source.name)
            if mine != other and (mine in program.writes or other in program.writes):
                name = out.name if mine in program.writes else source.name
                self.add(Kind.WAW, name, leaf, self.now(name), self.now(name) + 1, region)

    def read(self, leaf: BoundSymbol, name: str, seen: int, region: str | None = None) -> None:
        """One read of `name` at state `seen`: compare with what the program says, and with what its memory may be."""
        must = self.must_see(leaf, name)
        if must is None:
            self.blame(leaf, name, region)
        elif must != seen:
            self.add(self.kind(leaf, must, seen), name, leaf, must, seen, region)
        for risk in self.risks.get(name, ()):
            if self.state.get(risk.buffer, 0) != risk.state:
                self.at_risk(leaf, name, risk, region)

    def blame(self, leaf: BoundSymbol, name: str, region: str | None) -> None:
        entry = self.program.entries[key_of(leaf)]
        meant = entry.args[[arg.name for arg in tensors(leaf.flat_args)].index(name)]
        self.swapped(leaf, entry, meant, name, region)

    def kind(self, leaf: BoundSymbol, must: int, seen: int) -> Kind:
        if self._entry_is_backward(leaf) and must < seen:
            return Kind.SAVED
        return Kind.RAW if must > seen else Kind.WAR

    def at_risk(self, leaf: BoundSymbol, name: str, risk: _Risk, region: str | None) -> None:
        writes, now = self.program.writes[risk.buffer], self.state.get(risk.buffer, 0)
        old = writes[risk.state - 1] if risk.state else None
        must, may = (old, writes[now - 1]) if risk.copy else (writes[now - 1], old)
        hazard = Hazard(Kind.WAR if risk.copy else Kind.RAW, risk.buffer, name, leaf, must, may, region)
        self.found.setdefault((id(leaf), risk.buffer, False), hazard)

    def must_see(self, leaf: BoundSymbol, name: str) -> int | None:
        """The state that a read must see; None where a pass put another value in the place of the program's."""
        program, entry = self.program, self.program.entries.get(key_of(leaf))
        if entry is None:
            return program.bound.get(name, 0)
        if name in entry.sees:
            return entry.sees[name]
        args = tuple(arg.name for arg in tensors(leaf.flat_args))
        if len(args) != len(entry.args):
            return program.bound.get(name, 0)
        meant = entry.args[args.index(name)]
        return self.values.state_to_read(entry, meant, name)

    def land(self, leaf: BoundSymbol, target: str, region: str | None = None) -> None:
        """One write: it must be the program's next write of this memory, and land in no other."""
        program, buffer = self.program, self.program.buffer_of[target]
        writes = program.writes.get(buffer, [])
        now = self.state.get(buffer, 0)
        if now < len(writes) and key_of(writes[now].bsym) == key_of(leaf):
            self.state[buffer] = now + 1
        else:
            self.add(Kind.WAW, target, leaf, now, now + 1, region)
            self.state[buffer] = next((w.state for w in writes if key_of(w.bsym) == key_of(leaf)), now + 1)
        if any(risk.copy for risk in self.risks.get(target, ())):
            self.add(Kind.WAW, target, leaf, now, now + 1, region)

    # --- inside a region

    def region(self, bsym: BoundSymbol) -> None:
        name = bsym.sym.name
        body = self.program.body(bsym, self.rules)
        carried = {proxy.name: self.now(proxy.name) for proxy in body.inputs}
        self.check_risky_inputs(body, name)
        updates = [self.step(leaf, effects, carried, name) for b in body.bsyms for leaf, effects in leaves(b)]
        for violation in violations(body):
            self.violated(violation, name)
        for leaf, target in filter(None, updates):
            self.land(leaf, target, name)
        self.mark_risks(body, carried)

    def check_risky_inputs(self, body: Body, region: str) -> None:
        for proxy in body.inputs:
            for risk in self.risks.get(proxy.name, ()):
                if self.state.get(risk.buffer, 0) != risk.state:
                    reader = next((b for b in body.bsyms if proxy.name in {a.name for a in tensors(b.flat_args)}), None)
                    if reader is not None:
                        self.at_risk(reader, proxy.name, risk, region)

    def step(self, leaf: BoundSymbol, effects: Effects, carried: dict[str, int], region: str):
        """One op of a region: values carry the state that they were loaded in. Returns an update, if it is one."""
        for read in dict.fromkeys(proxy.name for proxy in effects.reads):
            must = self.must_see(leaf, read)
            seen = carried.get(read, self.program.bound.get(read, 0))
            if must is None:
                self.blame(leaf, read, region)
            elif must != seen:
                self.add(self.kind(leaf, must, seen), read, leaf, must, seen, region)
        self.check_shares(leaf, effects, region)
        for out, source in effects.shares:
            carried[out.name] = carried.get(source.name, self.program.bound.get(source.name, 0))
        if not effects.writes:
            return None
        for out in tensors(leaf.flat_outs):
            carried[out.name] = self.program.bound.get(out.name, 0)
        return leaf, effects.writes[0].name

    def violated(self, violation: Violation, region: str) -> None:
        target = tensors(violation.update.flat_args)[1].name
        state = self.state.get(self.program.buffer_of[target], 0)
        if violation.reader is None:
            kind = Kind.WAW if violation.rule in (Rule.ONE_UPDATE, Rule.ONE_NAME) else Kind.TARGET
            return self.add(kind, target, violation.update, state, state + 1, region, violation.rule)
        kind = Kind.SAVED if self._entry_is_backward(violation.reader) else Kind.WAR
        self.add(kind, target, violation.reader, state, state + 1, region, violation.rule)

    def mark_risks(self, body: Body, carried: dict[str, int]) -> None:
        """Results whose memory is in doubt: moved data of an input or of another result (contract, rule 4), and views
        of memory outside that the region computes."""
        program = self.program
        for moved in moved_results(body):
            out, partner = moved.result, moved.partner
            buffer, own = program.buffer_of.get(partner.name, -1), program.buffer_of.get(out.name)
            if buffer in program.writes or own in program.writes:
                state = carried.get(partner.name, program.bound.get(partner.name, 0))
                self.risks[out.name] = (*self.risks.get(out.name, ()), _Risk(buffer, state, copy=buffer != own))
        updated = {out.name for update in body.updates for out in tensors(update.flat_outs)}
        for out in body.outputs:
            buffer = program.buffer_of.get(out.name)
            if buffer in program.writes and out.name in program.derived - updated and out.name not in self.risks:
                state = carried.get(out.name, program.bound.get(out.name, 0))
                self.risks[out.name] = (_Risk(buffer, state, copy=False),)

    # --- when the forward returns

    def finish_forward(self, fused: TraceCtx) -> None:
        """Every write of the forward has happened, and every result holds the value that it holds in eager."""
        program, return_bsym = self.program, fused.bound_symbols[-1]
        for meant, found in zip(program.results, returned(fused)[0]):
            self.finish_result(return_bsym, meant, found.name)
        for buffer, writes in program.writes.items():
            state, final = self.state.get(buffer, 0), program.forward_final(buffer)
            if buffer in program.inputs and state < final:
                lost = writes[state]
                hazard = Hazard(Kind.LOST, buffer, lost.target, None, lost, self._write(buffer, state))
                self.found.setdefault(("lost", buffer), hazard)

    def finish_result(self, return_bsym: BoundSymbol, meant: str, found: str) -> None:
        program = self.program
        must = program.forward_final(program.buffer_of[meant])
        if found != meant and found in program.buffer_of:
            entry = Entry(return_bsym, {meant: must}, (meant,), False)
            must = self.values.state_to_read(entry, meant, found)
            if must is None:
                return self.swapped(return_bsym, entry, meant, found)
        if must != self.now(found):
            self.add(Kind.RAW, found, return_bsym, must, self.now(found))
        for risk in self.risks.get(found, ()):
            if self.state.get(risk.buffer, 0) != risk.state:
                self.at_risk(return_bsym, found, risk, None)

    def swapped(self, reader: BoundSymbol, entry: Entry, meant: str, found: str, region: str | None = None) -> None:
        """A pass took one value for another: blame the read behind it that sees another state."""
        blamed, name, must, seen = self.values.difference(entry, meant, found) or (
            reader,
            found,
            self.now(found),
            self.now(found),
        )
        self.add(Kind.RAW if must > seen else Kind.WAR, name, blamed, must, seen, region)
