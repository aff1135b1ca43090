"""The buffers of a trace, their states, and the state that every read must see: program order's meaning, written down.

A buffer is memory that one or more proxies name; a state is what it holds between two writes. `analyse(trace)` walks
the trace once in program order. In a joint forward-backward trace a backward read must see what the forward saved.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

from thunder.core.dtypes import is_inexact_dtype
from thunder.core.prims import PrimIDs
from thunder.core.proxies import ProxyTag, TensorProxy
from thunder.core.pytree import tree_flatten
from thunder.core.symbol import BoundSymbol, BoundSymbolTag
from thunder.core.trace import TraceCtx

from guarded_nvfuser.contract import Body, Rules, body_of
from guarded_nvfuser.effects import Effects, leaves, prim_id, tensors
from guarded_nvfuser.groups import Groups

Key = tuple[str, tuple[str, ...]]


def key_of(bsym: BoundSymbol) -> Key:
    """The identity of an op across Thunder's passes: its name and what it defines (its arguments, if it defines
    nothing).

    Rematerialisation repeats an op under the same output names, CSE drops it; neither renames it.
    """
    outs = tuple(out.name for out in tensors(bsym.flat_outs))
    return bsym.sym.name, outs or tuple(f"<{arg.name}" for arg in tensors(bsym.flat_args))


@dataclass(frozen=True)
class Write:
    """One write of a buffer: the op, the name it writes through, and the state it makes."""

    bsym: BoundSymbol
    target: str
    buffer: int
    state: int
    backward: bool = False


@dataclass(frozen=True)
class Entry:
    """One op of the program: the states its reads must see, by name, and its tensor arguments in order."""

    bsym: BoundSymbol
    sees: dict[str, int]
    args: tuple[str, ...]
    backward: bool


@dataclass(frozen=True)
class StaleSave:
    """A backward read of a state that the forward overwrote after saving it."""

    entry: Entry
    name: str
    state: int


@dataclass(frozen=True)
class UntrackedRead:
    """A forward read whose value reached the buffer in a way that Thunder's autograd did not follow."""

    bsym: BoundSymbol
    name: str
    write: Write


@dataclass
class Program:
    """The meaning of a trace in program order; filled by `analyse`, not changed afterwards.

    Attributes:
        trace: the analysed trace.
        buffer_of: buffer number by proxy name. Names that may share memory have one number.
        tensor_of: tensor number by proxy name. Names of one tensor, not only of one memory, have one number.
        bound: the state of its buffer at which a name was defined.
        derived: names that an op made to share memory with one of its operands.
        inputs: buffers that the caller can see; `results`: names that the trace returns.
        entries: every op at every depth, by `key_of`.
        writes: by buffer, the writes in order; `writes[b][k].state == k + 1`.
        proxies: a proxy for every name; `arguments`: the trace's own; `overlaps`: pairs of them that overlap in memory.
        tracked: names that depend on an input that requires grad.
        stale_saves, ambiguous_saves, untracked: what autograd would get wrong (joint traces only).
        detached: reads of a tensor with a history after a write under no_grad, which Thunder's autograd takes for a new
            tensor and eager for the old one (tests/test_autograd.py::test_no_grad_blocks_inside).
    """

    trace: TraceCtx
    buffer_of: dict[str, int] = field(default_factory=dict)
    tensor_of: dict[str, int] = field(default_factory=dict)
    bound: dict[str, int] = field(default_factory=dict)
    derived: set[str] = field(default_factory=set)
    inputs: set[int] = field(default_factory=set)
    grad_inputs: set[int] = field(default_factory=set)
    results: tuple[str, ...] = ()
    gradients: tuple[str, ...] = ()
    entries: dict[Key, Entry] = field(default_factory=dict)
    writes: dict[int, list[Write]] = field(default_factory=dict)
    proxies: dict[str, TensorProxy] = field(default_factory=dict)
    names: dict[int, list[str]] = field(default_factory=dict)
    stale_saves: list[StaleSave] = field(default_factory=list)
    ambiguous_saves: list[StaleSave] = field(default_factory=list)
    untracked: list[UntrackedRead] = field(default_factory=list)
    detached: list[UntrackedRead] = field(default_factory=list)
    joint: bool = False
    overlaps: tuple[tuple[str, str], ...] = ()
    arguments: tuple[str, ...] = ()
    tracked: set[str] = field(default_factory=set)

    def tracks(self, bsym: BoundSymbol) -> bool:
        """Whether autograd must follow an op: an operand depends on a tensor that requires grad."""
        return any(arg.name in self.tracked for arg in tensors(bsym.flat_args))

    def final(self, buffer: int) -> int:
        """The state in which the program leaves a buffer."""
        return len(self.writes.get(buffer, ()))

    def forward_final(self, buffer: int) -> int:
        """The state in which the forward leaves a buffer."""
        return sum(not write.backward for write in self.writes.get(buffer, ()))

    def write(self, buffer: int, state: int) -> Write | None:
        """The write that made a state; None for state 0."""
        return self.writes[buffer][state - 1] if state else None

    def body(self, region: BoundSymbol, rules: Rules) -> Body:
        """A region as nvFuser will get it, with what the program knows of its memory."""
        return body_of(
            region,
            buffer_of=lambda name: self.buffer_of.get(name, name),
            tensor_of=lambda name: self.tensor_of.get(name, name),
            rules=rules,
        )

    @property
    def mutates(self) -> bool:
        """Whether anything is written."""
        return bool(self.writes)


def writes_anything(trace: TraceCtx) -> bool:
    """One scan: whether any op of a trace writes memory (the price that programs without mutation pay)."""
    return any(effects.writes for bsym in trace.bound_symbols for _, effects in leaves(bsym))


def returned(trace: TraceCtx) -> tuple[list[TensorProxy], list[TensorProxy]]:
    """The tensors that a trace hands to its caller: results of the forward, and gradients (joint traces)."""
    value = next(b.args for b in reversed(trace.bound_symbols) if b.sym.id is PrimIDs.RETURN)
    if len(value) == 1 and isinstance(value[0], dict) and "flat_args" in value[0]:
        joint = "fw_flat_out" in value[0]
        results = value[0]["fw_flat_out"] if joint else value[0]["output"]
        return _flat(results), _flat(value[0]["output"]) if joint else []
    return _flat(value), []


def is_joint(trace: TraceCtx) -> bool:
    """Whether a trace holds forward and backward together, as Thunder's fusion passes see them."""
    value = next(b.args for b in reversed(trace.bound_symbols) if b.sym.id is PrimIDs.RETURN)
    return len(value) == 1 and isinstance(value[0], dict) and "fw_flat_out" in value[0]


def analyse(trace: TraceCtx, overlaps: tuple[tuple[str, str], ...] = ()) -> Program:
    """Number the states of every buffer of a trace and record what each read must see.

    Args:
        trace: a computation trace before fusion, in program order.
        overlaps: pairs of arguments, by name, that share memory without being one tensor.

    Returns:
        The program. Time is linear in the number of bound symbols, subsymbols included.
    """
    program = Program(trace, joint=is_joint(trace), overlaps=overlaps)
    steps = [(bsym, leaf, effects) for bsym in trace.bound_symbols for leaf, effects in leaves(bsym)]
    inputs = tensors(tree_flatten((trace.args, trace.kwargs))[0])
    _number_buffers(program, steps, inputs)
    results, gradients = returned(trace)
    program.arguments = tuple(proxy.name for proxy in inputs)
    program.results = tuple(result.name for result in results)
    program.gradients = tuple(gradient.name for gradient in gradients)
    _Walk(program, inputs).run()
    return program


def _flat(value: Any) -> list[TensorProxy]:
    return list(tensors(tree_flatten(value)[0]))


_SAME_TENSOR = frozenset((PrimIDs.UPDATE_ALIASES, PrimIDs.SHALLOW_COPY, PrimIDs.COPY_))


def _number_buffers(program: Program, steps: list[tuple[BoundSymbol, BoundSymbol, Effects]], inputs) -> None:
    memory, tensor = Groups(), Groups()
    for proxy in (*inputs, *_mentioned(program.trace)):
        program.proxies.setdefault(proxy.name, proxy)
    for _, leaf, effects in steps:
        for proxy in (*tensors(leaf.flat_args), *tensors(leaf.flat_outs)):
            program.proxies.setdefault(proxy.name, proxy)
        for out, source in effects.shares:
            memory.join(out.name, source.name)
            program.derived.add(out.name)
            if prim_id(leaf) in _SAME_TENSOR:
                tensor.join(out.name, source.name)
    for a, b in program.overlaps:
        memory.join(a, b)
    program.buffer_of, program.tensor_of = memory.numbers(program.proxies), tensor.numbers(program.proxies)
    for name, number in program.buffer_of.items():
        program.names.setdefault(number, []).append(name)
    program.inputs = {program.buffer_of[proxy.name] for proxy in inputs}
    program.grad_inputs = {program.buffer_of[proxy.name] for proxy in inputs if proxy.requires_grad}


def _mentioned(trace: TraceCtx) -> Iterator[TensorProxy]:
    stack = list(reversed(trace.bound_symbols))
    while stack:
        bsym = stack.pop()
        yield from tensors(bsym.flat_args)
        yield from tensors(bsym.flat_outs)
        stack.extend(reversed(bsym.subsymbols))


class _Walk:
    """The one walk in program order: keeps each buffer's current state and what autograd believes of each name."""

    def __init__(self, program: Program, inputs: tuple[TensorProxy, ...]) -> None:
        self.program = program
        self.state: dict[int, int] = {}
        self.saved: dict[str, set[int]] = {}  # forward reads of a name, by state
        self.believed: dict[str, int] = {proxy.name: 0 for proxy in inputs}  # the state autograd takes a name for
        self.tracked = program.tracked
        self.tracked.update(proxy.name for proxy in inputs if proxy.requires_grad)
        self.tracked_buffers = set(program.grad_inputs)
        self.detached: dict[int, Write] = {}
        self.backward_reads: list[tuple[Entry, str]] = []
        self.backward_views: dict[str, str] = {}  # views that the backward makes, by what they show
        self.backward_names = {
            out.name
            for bsym in program.trace.bound_symbols
            if BoundSymbolTag.BACKWARD in bsym.tags or bsym.sym.id is PrimIDs.GET_GRAD
            for out in tensors(bsym.flat_outs)
        }

    def run(self) -> None:
        program = self.program
        for bsym in program.trace.bound_symbols:
            self.visit(bsym, BoundSymbolTag.BACKWARD in bsym.tags)
        if program.joint:
            for name in program.results:
                self.check_tracked(program.trace.bound_symbols[-1], name)
                self.check_connected(name)
                if program.tensor_of[name] not in {program.tensor_of[argument] for argument in program.arguments}:
                    self.check_attached(program.trace.bound_symbols[-1], name)
            for entry, name in self.backward_reads:
                self.settle_save(entry, name)

    def now(self, name: str) -> int:
        return self.state.get(self.program.buffer_of[name], 0)

    def visit(self, bsym: BoundSymbol, backward: bool) -> None:
        found = list(leaves(bsym))
        if len(found) == 1 and found[0][0] is bsym:
            return self.visit_leaf(bsym, found[0][1], backward)
        args = tuple(arg.name for arg in tensors(bsym.flat_args))
        entry = Entry(bsym, {name: self.now(name) for name in args}, args, backward)
        for sub in bsym.subsymbols:
            self.visit(sub, backward or BoundSymbolTag.BACKWARD in sub.tags)
        self.program.entries.setdefault(key_of(bsym), entry)

    def visit_leaf(self, bsym: BoundSymbol, effects: Effects, backward: bool) -> None:
        program, args = self.program, tuple(arg.name for arg in tensors(bsym.flat_args))
        entry = Entry(bsym, {name: self.now(name) for name in args}, args, backward)
        for name in dict.fromkeys(read.name for read in effects.reads):
            self.read(entry, name)
        for target in effects.writes:
            self.write(bsym, target.name, effects.opaque, backward)
        for out in tensors(bsym.flat_outs):
            program.bound.setdefault(out.name, self.now(out.name))
        self.follow(bsym, effects)
        if backward and not effects.writes:
            self.backward_views.update((out.name, source.name) for out, source in effects.shares)
        program.entries.setdefault(key_of(bsym), entry)

    def read(self, entry: Entry, name: str) -> None:
        if entry.backward:
            self.backward_reads.append((entry, name))
        elif self.program.joint:
            self.saved.setdefault(name, set()).add(self.now(name))
            self.check_tracked(entry.bsym, name)
            if any(ProxyTag.DETACHED_AUTOGRAD_GRAPH not in out.tags for out in tensors(entry.bsym.flat_outs)):
                self.check_attached(entry.bsym, name)

    def write(self, bsym: BoundSymbol, target: str, opaque: bool, backward: bool) -> None:
        buffer = self.program.buffer_of[target]
        self.state[buffer] = state = self.state.get(buffer, 0) + 1
        self.program.writes.setdefault(buffer, []).append(Write(bsym, target, buffer, state, backward))
        if bsym.kwargs.get("grad_enabled") is False and buffer in self.tracked_buffers and self.program.joint:
            self.detached[buffer] = self.program.writes[buffer][-1]
        if opaque:
            self.believed.update(dict.fromkeys(self.program.names[buffer], state))

    def follow(self, bsym: BoundSymbol, effects: Effects) -> None:
        """What Thunder's autograd (which follows proxies, not memory) takes the outputs of an op to be."""
        source_of = {out.name: source.name for out, source in effects.shares}
        is_view = not effects.writes
        tracked = any(arg.name in self.tracked for arg in tensors(bsym.flat_args))
        for out in tensors(bsym.flat_outs):
            source = source_of.get(out.name)
            if source is not None and is_view:
                self.believed[out.name] = self.believed.get(source, self.program.bound.get(source, 0))
            else:
                self.believed[out.name] = self.now(out.name)
            if tracked and is_inexact_dtype(out.dtype) and ProxyTag.DETACHED_AUTOGRAD_GRAPH not in out.tags:
                self.tracked.add(out.name)
                self.tracked_buffers.add(self.program.buffer_of[out.name])

    def check_attached(self, bsym: BoundSymbol, name: str) -> None:
        write = self.detached.get(self.program.buffer_of[name])
        if write is not None:
            self.program.detached.append(UntrackedRead(bsym, name, write))

    def check_tracked(self, bsym: BoundSymbol, name: str) -> None:
        """A value that autograd does not know of: written through another name since (tests/test_autograd.py)."""
        buffer, believed = self.program.buffer_of[name], self.believed.get(name, 0)
        for state in range(believed, self.now(name)):
            write = self.program.writes[buffer][state]
            names = [arg.name for arg in tensors(write.bsym.flat_args)]
            if name in self.tracked or any(arg in self.tracked for arg in names):
                self.program.untracked.append(UntrackedRead(bsym, name, write))
                return

    def check_connected(self, name: str) -> None:
        """An argument that requires no grad but is returned after a write that does: Thunder leaves it unconnected."""
        program, buffer = self.program, self.program.buffer_of[name]
        if buffer in program.inputs - program.grad_inputs:
            for write in program.writes.get(buffer, ()):
                if any(arg.name in self.tracked for arg in tensors(write.bsym.flat_args)[:1]):
                    program.untracked.append(UntrackedRead(program.trace.bound_symbols[-1], name, write))
                    return

    def settle_save(self, entry: Entry, name: str) -> None:
        """Decide which state a backward read means, now that the whole forward has been seen."""
        program, buffer, seen = self.program, self.program.buffer_of[name], name
        while name in self.backward_views:
            name = self.backward_views[name]
        if name in self.backward_names:
            return
        states = self.saved.get(name) or {program.bound.get(name, 0)}
        state = min(states)
        entry.sees[seen] = state
        if len(states) > 1:
            program.ambiguous_saves.append(StaleSave(entry, name, state))
        elif state < program.final(buffer):
            program.stale_saves.append(StaleSave(entry, name, state))
