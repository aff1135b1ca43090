"""The rewrite: a program that mutates, as one that computes values and writes each changed input back once.

Walks the program in order and keeps, for every written buffer, the value that it holds by now. A write of a whole
tensor only changes that value; reads read it; views are made from it again. At the end every changed input is written
once. A write into a part of a tensor goes to the real memory, in place and in order: a functional one would copy the
rest too.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial

from thunder.core import prims
from thunder.core.prims import PrimIDs
from thunder.core.proxies import Proxy, ProxyTag, TensorProxy
from thunder.core.pytree import tree_map
from thunder.core.symbol import BoundSymbol
from thunder.core.trace import TraceCtx, from_trace, tracectx
from thunder.executors import torchex

from guarded_nvfuser.effects import leaves, prim_id, tensors
from guarded_nvfuser.hazards import Hazard, Kind
from guarded_nvfuser.renaming import renamed
from guarded_nvfuser.states import Program
from guarded_nvfuser.torch_ops import PARTIAL_WRITES
from guarded_nvfuser.views import definite_views, uncertain, undo


@dataclass(frozen=True)
class Rewritten:
    """A rewritten trace, the names of the buffers that were left as they were, and why, where the rewrite found out."""

    trace: TraceCtx
    left: frozenset[str]
    reasons: tuple[Hazard, ...]


def rewrite(program: Program, barred: frozenset[str] = frozenset(), *, tracked: bool = False) -> Rewritten:
    """Make a program free of mutation, but for one write per changed input and writes into parts of tensors.

    Args:
        program: the analysed trace.
        barred: names of buffers to leave as they are.
        tracked: gradients will be derived from the result: writes that autograd must follow are made functional.

    Returns:
        The new trace and what was left: barred buffers, those that an undeclared op touches, and those whose sharing the
        trace does not decide (tests/test_rewrite.py::test_maybe_view_is_left).
    """
    doubts, undeclared = uncertain(program), _undeclared(program)
    reasons = [Hazard(Kind.UNCERTAIN, buffer, _name(program, buffer), op) for buffer, op in doubts.buffers.items()]
    reasons += [Hazard(Kind.UNDECLARED, buffer, _name(program, buffer), op) for buffer, op in undeclared.items()]
    left = {program.buffer_of[name] for name in barred if name in program.buffer_of} | {*doubts.buffers, *undeclared}
    while True:
        try:
            trace = _Rewriter(program, frozenset(left), doubts.lasting, tracked).run()
        except _Inexpressible as found:
            left.add(found.buffer)
        else:
            names = frozenset(name for buffer in left for name in program.names[buffer])
            return Rewritten(trace, names, tuple(reasons))


def _name(program: Program, buffer: int) -> str:
    return program.names[buffer][0]


class _Inexpressible(Exception):
    """A write that has no functional form."""

    def __init__(self, buffer: int) -> None:
        self.buffer = buffer


def _undeclared(program: Program) -> dict[int, BoundSymbol]:
    """Buffers that an op touches whose effects nobody declared, each with the op."""
    return {
        program.buffer_of[proxy.name]: bsym
        for bsym in program.trace.bound_symbols
        for leaf, effects in leaves(bsym)
        if effects.opaque
        for proxy in (*tensors(leaf.flat_args), *tensors(leaf.flat_outs))
    }


@dataclass(frozen=True)
class _View:
    """A name that is what `op` makes of `base`, another name of the same buffer."""

    base: str
    op: BoundSymbol


@dataclass
class _Store:
    """One tensor of its own memory, and what it holds by now.

    Attributes:
        memory: the tensor in the new trace; `value`: what should be in it by now, None if it is there.
        version: counts the writes; views made for another version are stale.
        written_by: the op that wrote last, whose place in the user's source the write-back takes.
    """

    root: str
    memory: TensorProxy
    is_input: bool
    value: TensorProxy | None = None
    version: int = 0
    written_by: BoundSymbol | None = None

    @property
    def holds(self) -> TensorProxy:
        return self.memory if self.value is None else self.value


class _Rewriter:
    def __init__(self, program: Program, left: frozenset[int], lasting: frozenset[int], tracked: bool) -> None:
        self.program, self.tracked, self.left, self.lasting = program, tracked, left, lasting
        self.buffers = set(program.writes) - left
        self.new = from_trace(program.trace)
        self.same: dict[str, str] = {}  # another name of one tensor -> the first
        self.views: dict[str, _View] = {}
        self.stores: dict[str, _Store] = {}
        self.root_of: dict[str, str] = {}
        self.made: dict[tuple[str, int], TensorProxy] = {}
        self.home: dict[str, str] = {}  # the store in whose memory (or value) a proxy of the new trace lies
        self.live: dict[str, str] = {}  # the store in whose memory it lies now
        self.defined: set[str] = set()
        self.stem: dict[str, str] = {}  # the value that another one only rearranges, to write it through a view
        self.partial: dict[str, tuple[BoundSymbol, str, int]] = {}
        self.uses = _uses(program)

    def run(self) -> TraceCtx:
        for proxy in self._inputs():
            self.add_store(proxy.name, proxy, is_input=True)
        with tracectx(self.new):
            for bsym in self.program.trace.bound_symbols:
                self.visit(bsym)
        return self.new

    def _inputs(self) -> Iterator[TensorProxy]:
        for buffer in sorted(self.buffers & self.program.inputs):
            yield from (self.program.proxies[n] for n in self.program.names[buffer] if n in self.program.arguments)

    def add_store(self, name: str, memory: TensorProxy, *, is_input: bool) -> None:
        self.stores[name] = _Store(name, memory, is_input)
        self.root_of[name] = name
        self.home[memory.name] = self.live[memory.name] = name

    # --- the walk

    def visit(self, bsym: BoundSymbol) -> None:
        self.stand_at(bsym)
        found = list(leaves(bsym))
        if bsym.sym.id is PrimIDs.RETURN:
            self.finish(bsym)
        elif any(self.follows(target) for _, effects in found for target in effects.writes):
            self.mutate(bsym, found)
        elif any(self.follows(out) for out in tensors(bsym.flat_outs)) and (views := self.views_in(bsym)):
            for view in views:
                self.add_view(view)
        else:
            self.compute(bsym)

    def stand_at(self, bsym: BoundSymbol | None) -> None:
        """Give the ops that are made now the place of `bsym` in the user's source."""
        self.new._current_source_filename = bsym and bsym.source_filename
        self.new._current_source_positions = bsym and bsym.source_positions

    def views_in(self, bsym: BoundSymbol) -> list[BoundSymbol]:
        return [bsym] if id(bsym) in self.lasting else definite_views(bsym)

    def follows(self, proxy: TensorProxy) -> bool:
        return self.program.buffer_of.get(proxy.name) in self.buffers

    def mutate(self, bsym: BoundSymbol, found: list) -> None:
        """An op that writes: its parts one by one, down to the copies."""
        if len(found) == 1 and found[0][0] is bsym:
            source, target = tensors(bsym.flat_args)[:2]
            self.write(bsym, source, target)
            return
        for sub in bsym.subsymbols:
            self.visit(sub)

    def add_view(self, view: BoundSymbol) -> None:
        """A view: nothing is made until somebody reads it."""
        args, outs = tensors(view.flat_args), tensors(view.flat_outs)
        if prim_id(view) is PrimIDs.UPDATE_ALIASES:
            self.add_aliases(args, outs)
            return
        base = self.first(args[0].name)
        for out in outs:
            self.views[out.name] = _View(base, view)
            self.root_of[out.name] = self.root_of[base]

    def add_aliases(self, args: tuple[TensorProxy, ...], outs: tuple[TensorProxy, ...]) -> None:
        """Further names for tensors; those that are left as they are need the op."""
        rest = [(arg, out) for arg, out in zip(args, outs) if not self.known(arg.name)]
        self.same.update((out.name, self.first(arg.name)) for arg, out in zip(args, outs) if self.known(arg.name))
        if rest:
            self.emit(prims.update_aliases.bind(tuple(arg for arg, _ in rest), output=tuple(out for _, out in rest)))

    def first(self, name: str) -> str:
        return self.same.get(name, name)

    def compute(self, bsym: BoundSymbol) -> None:
        """A pure op reads what its operands hold by now; its results are tensors of their own."""
        if bsym.subsymbols and prim_id(bsym) is None and _writes_a_part(bsym) and not self.must_track(bsym):
            for sub in bsym.subsymbols:  # what the write of the part needs is made beside it
                self.visit(sub)
            return
        swap = {arg.name: self.read(arg.name) for arg in _everywhere(bsym, "flat_proxy_args") if self.known(arg.name)}
        new = self.emit(bsym, swap)
        for leaf, _ in leaves(new):
            if prim_id(leaf) in PARTIAL_WRITES:
                self.note_partial(bsym, leaf)
        for out in tensors(bsym.flat_outs):
            if self.follows(out) and out.name not in self.stores:
                self.add_store(out.name, out, is_input=False)

    def known(self, name: str) -> bool:
        return self.first(name) in self.root_of

    def note_partial(self, bsym: BoundSymbol, new: BoundSymbol) -> None:
        """A copy of a tensor with a part changed: if it is then written back, only that part is."""
        for leaf, _ in leaves(bsym):
            base = tensors(leaf.flat_args)[:1]
            if prim_id(leaf) in PARTIAL_WRITES and base and self.known(base[0].name):
                name = self.first(base[0].name)
                version = self.stores[self.root_of[name]].version
                self.partial[tensors(new.flat_outs)[0].name] = new, name, version

    # --- reading

    def read(self, name: str) -> TensorProxy:
        """The proxy of the new trace for what a name holds at this point of the program."""
        name = self.first(name)
        store = self.stores[self.root_of[name]]
        return store.holds if name == store.root else self.view_of(name, store.version, memory=False)

    def view_of(self, name: str, version: int, *, memory: bool) -> TensorProxy:
        """A view made again, from its base's present value or from the memory itself."""
        key = name, version if not memory else -version - 1
        if key not in self.made:
            view, store = self.views[name], self.stores[self.root_of[name]]
            if view.base == store.root:
                base = store.memory if memory else store.holds
            else:
                base = self.view_of(view.base, version, memory=memory)
            outs = tensors(view.op.flat_outs)
            new = self.emit(view.op, {tensors(view.op.flat_args)[0].name: base}, fresh=self.repeats(view.op))
            for out, made in zip(outs, tensors(new.flat_outs)):
                self.made[out.name, key[1]] = made
                self.inherit(made, base)
        return self.made[key]

    def repeats(self, op: BoundSymbol) -> bool:
        return any(out.name in self.defined for out in _everywhere(op, "flat_proxy_outs"))

    def inherit(self, proxy: TensorProxy, base: TensorProxy) -> None:
        for of in (self.home, self.live):
            if base.name in of:
                of[proxy.name] = of[base.name]

    def emit(
        self, bsym: BoundSymbol, swap: dict[str, TensorProxy] | None = None, *, fresh: bool = False
    ) -> BoundSymbol:
        """Place an op in the new trace with other operands, and under new names if it is there already."""
        args = {arg.name: arg for arg in _everywhere(bsym, "flat_proxy_args")} if swap else {}
        others = {name: swap[name] for name in args if name in swap and swap[name].name != name}
        if fresh:
            others |= {out.name: out.replace_name() for out in _everywhere(bsym, "flat_proxy_outs")}
        new = renamed(bsym, others, outputs=fresh)
        self.defined.update(out.name for out in _everywhere(new, "flat_proxy_outs"))
        self.new.bound_symbols.append(new)
        return new

    # --- writing

    def write(self, bsym: BoundSymbol, source: TensorProxy, target: TensorProxy) -> None:
        name = self.first(target.name)
        self.same.update((out.name, name) for out in tensors(bsym.flat_outs))
        if self.first(source.name) == name:
            return  # a tensor copied into itself
        store = self.stores[self.root_of[name]]
        part = self.partial_write(source.name, name)
        if part is not None and not self.must_track(bsym):
            self.write_part(store, lambda: self.bind_partial(part, self.memory_of(name)))
        else:
            value = self.read(source.name) if self.known(source.name) else source
            if bsym.kwargs.get("grad_enabled") is False and source.name in self.program.tracked and self.tracked:
                value = prims.clone(value)  # no gradient flows through a copy made under no_grad
                value.tags.add(ProxyTag.DETACHED_AUTOGRAD_GRAPH)
            if not self.known(source.name) and self.program.buffer_of.get(source.name) in self.program.writes:
                value = prims.clone(value)  # memory that is left and may change before this value is written back
            if tuple(value.shape) != tuple(target.shape):  # Thunder lets a 0-d CPU tensor be copied into any shape
                value = prims.broadcast_in_dim(value, tuple(target.shape), ())
            self.write_whole(bsym, store, name, value)

    def partial_write(self, source: str, target: str) -> BoundSymbol | None:
        """The op that made `source` as a copy of `target` with a part changed, if nothing was written since."""
        new, base, version = self.partial.get(source, (None, None, None))
        store = self.stores[self.root_of[target]]
        return new if base == target and version == store.version and self.uses.get(source) == 1 else None

    def must_track(self, bsym: BoundSymbol) -> bool:
        return self.tracked and self.program.tracks(bsym)

    def write_whole(self, bsym: BoundSymbol, store: _Store, name: str, value: TensorProxy) -> None:
        stem = self.stem.get(value.name, value.name)
        while name != store.root:
            view = self.views[name]
            base = self.program.proxies[view.base]
            undone = undo(view.op, value, base)
            if undone is None:
                if not self.must_track(bsym):
                    return self.write_part(store, partial(self.copy_to, name, value))
                undone = self.with_part(view, value, base)
            else:
                self.inherit(undone, value)
            name, value = view.base, undone
        store.version += 1
        store.written_by = bsym
        store.value = None if value.name == store.memory.name else value
        self.home.setdefault(value.name, store.root)
        self.stem[value.name] = stem

    def with_part(self, view: _View, value: TensorProxy, base: TensorProxy) -> TensorProxy:
        """The functional write of a slice: a copy of the base with a part changed."""
        if prim_id(view.op) is not PrimIDs.SLICE:
            raise _Inexpressible(self.program.buffer_of[base.name])
        start, end, step = (*view.op.args[1:4], None)[:3]
        index = tuple(slice(*each) for each in zip(start, end, step or [1] * len(start)))
        return prims.copy_with_setitem(self.read(view.base), index, value)

    def write_part(self, store: _Store, write) -> None:
        """Write into a part of the real memory, after bringing it up to date, and let later reads see it.

        Names that alias the memory and the write's result tie later reads to it
        (tests/test_rewrite.py::test_slice_write).
        """
        self.bring_up_to_date(store)
        self.keep_borrowed(store)
        result = write()
        result.tags.add(ProxyTag.DETACHED_AUTOGRAD_GRAPH)  # autograd has no rule for it and needs none (`must_track`)
        aliases = prims.update_aliases((store.memory, result))
        store.memory, store.version = aliases[0], store.version + 1
        self.home[aliases[0].name] = self.live[aliases[0].name] = store.root

    def bind_partial(self, new: BoundSymbol, target: TensorProxy) -> TensorProxy:
        return PARTIAL_WRITES[prim_id(new)](target, *self._operands(new))

    @staticmethod
    def _operands(new: BoundSymbol) -> list:
        return [*new.args[1:], *new.kwargs.values()]

    def memory_of(self, name: str) -> TensorProxy:
        """The tensor that a name is, in real memory."""
        name = self.first(name)
        store = self.stores[self.root_of[name]]
        return store.memory if name == store.root else self.view_of(name, store.version, memory=True)

    def copy_to(self, name: str, value: TensorProxy) -> TensorProxy:
        return self.copy(value, self.memory_of(name))

    @staticmethod
    def copy(value: TensorProxy, target: TensorProxy) -> TensorProxy:
        """A copy that PyTorch makes, also where the target has gaps."""
        return torchex.copy_(value, target, grad_enabled=False)

    def bring_up_to_date(self, store: _Store) -> None:
        if store.value is None:
            return
        if store.is_input:
            self.keep_borrowed(store)
            store.memory = self.copy(self.apart(store, store.value), store.memory)
            store.memory.tags.add(ProxyTag.DETACHED_AUTOGRAD_GRAPH)
        else:
            store.memory = store.value if self.owns(store) else prims.clone(store.value)
        store.value, store.version = None, store.version + 1
        self.home[store.memory.name] = self.live[store.memory.name] = store.root

    def apart(self, store: _Store, value: TensorProxy) -> TensorProxy:
        """A value that does not lie in the memory that it is about to be written to."""
        return prims.clone(value) if self.live.get(value.name) == store.root else value

    def owns(self, store: _Store, *, at_end: bool = False) -> bool:
        """Whether a value is nobody else's: made for this write alone, and not memory of another tensor."""
        name, program = self.stem[store.value.name], self.program
        taken = program.derived | {*program.results, *program.arguments}
        if (
            self.home.get(store.value.name) != store.root
            or name in taken
            or name in self.root_of
            or name not in self.defined
        ):
            return False
        alone = at_end or self.uses.get(name, 0) <= 1
        return alone and not any(other.value is store.value for other in self.stores.values() if other is not store)

    def keep_borrowed(self, store: _Store) -> None:
        """Copy what other tensors hold in memory that is about to change."""
        for other in self.stores.values():
            if other is not store and other.value is not None and self.home.get(other.value.name) == store.root:
                other.value = prims.clone(other.value)
                name = other.value.name
                self.home[name], self.stem[name] = other.root, name
                self.defined.add(name)

    # --- the end

    def finish(self, bsym: BoundSymbol) -> None:
        """Write the changed inputs back and return what eager returns."""
        results = {name: self.result(name) for name in self.program.results if self.known(name)}
        self.write_back()
        for name in self.program.results:
            store = self.stores[self.root_of[self.first(name)]] if self.known(name) else None
            if store is not None and store.is_input:
                results[name] = self.memory_of(name)
        value = bsym.args[0]
        flat = [self.memory_of(arg.name) if self._is_input(arg) else arg for arg in value["flat_args"]]
        new_value = {**value, "flat_args": flat, "output": _swapped(value["output"], results)}
        self.new.bound_symbols.append(bsym.from_bsym(args=(new_value,)))

    def _is_input(self, arg: object) -> bool:
        return isinstance(arg, TensorProxy) and self.known(arg.name)

    def result(self, name: str) -> TensorProxy | None:
        """A result that lies in memory of the program's own: the value itself, if nobody else has it."""
        name = self.first(name)
        store = self.stores[self.root_of[name]]
        if store.is_input:
            return None
        if store.value is not None:
            store.memory = store.value if self.owns(store, at_end=True) else prims.clone(store.value)
            self.live[store.memory.name] = store.root
            store.value, store.version = None, store.version + 1
        return self.memory_of(name)

    def write_back(self) -> None:
        """One copy per changed input; a value that lies in another changed input's memory is copied before that."""
        pending = {s.root: s for s in self.stores.values() if s.is_input and s.value is not None}
        while pending:
            borrowed = {self.live.get(s.value.name) for s in pending.values()} - {None}
            ready = [s for s in pending.values() if s.root not in borrowed]
            if not ready:  # a cycle: x and y swap
                store = next(iter(pending.values()))
                for other in pending.values():
                    if self.live.get(other.value.name) == store.root:
                        other.value = prims.clone(other.value)
                continue
            for store in ready:
                self.stand_at(store.written_by)
                store.memory = prims.copy_(store.value, store.memory, grad_enabled=False)
                store.value = None
                store.version += 1
                del pending[store.root]


def _everywhere(bsym: BoundSymbol, what: str) -> list[Proxy]:
    """Arguments or outputs of a symbol at every depth."""
    found, stack = [], [bsym]
    while stack:
        current = stack.pop()
        found += getattr(current, what)
        stack.extend(current.subsymbols)
    return found


def _writes_a_part(bsym: BoundSymbol) -> bool:
    return any(prim_id(leaf) in PARTIAL_WRITES for leaf, _ in leaves(bsym))


def _uses(program: Program) -> dict[str, int]:
    """How many ops read each name."""
    counts: dict[str, int] = {}
    for bsym in program.trace.bound_symbols:
        for leaf, _ in leaves(bsym):
            for name in {arg.name for arg in tensors(leaf.flat_args)}:
                counts[name] = counts.get(name, 0) + 1
    return counts


def _swapped(tree, results: dict[str, TensorProxy]):
    return tree_map(lambda leaf: results.get(leaf.name, leaf) if isinstance(leaf, TensorProxy) else leaf, tree)
