"""The program of mode "fallback": the same ops in the same order, but every state of a barred buffer has its own name.

PyTorch runs the ops on barred buffers in program order, which is eager. Names per state keep Thunder's CSE from
taking two reads across a write for one (tests/test_fallback.py::test_cse_across_a_write); what backward needs of a
state that the forward overwrites is copied first (tests/test_autograd.py).
"""

from __future__ import annotations

from thunder.core import prims
from thunder.core.prims import PrimIDs
from thunder.core.proxies import Proxy, TensorProxy
from thunder.core.symbol import BoundSymbol, BoundSymbolTag
from thunder.core.trace import TraceCtx, from_trace, tracectx
from thunder.core.transform_common import dce

from guarded_nvfuser.effects import leaves, tensors
from guarded_nvfuser.renaming import renamed
from guarded_nvfuser.states import Program, analyse


def in_program_order(program: Program, barred: frozenset[str]) -> Program:
    """Rename and copy so that program order alone decides what the ops on barred buffers read.

    Args:
        program: the program as Thunder traced it.
        barred: names of the barred buffers.

    Returns:
        The analysed new program; it means what PyTorch eager does, or better (a gradient where eager would refuse).
    """
    return analyse(_Renaming(program, frozenset(program.buffer_of[name] for name in barred)).trace(), program.overlaps)


def without_dead_writes(program: Program) -> Program:
    """Drop writes to memory that the program allocated and never looks at again.

    Thunder keeps every copy (prims.copy_ is DONT_DCE); one that nobody reads may end up behind the return, or alone
    in the backward (lightning-thunder#2776, tests/test_fallback.py::test_dead_write).

    Args:
        program: the program as Thunder traced it.

    Returns:
        The analysed program without them; the same one if there are none.
    """
    wanted = {program.buffer_of[name] for name in (*program.results, *program.gradients)} | program.inputs
    kept: list[BoundSymbol] = []
    for bsym in reversed(program.trace.bound_symbols):
        written = _written(program, bsym)
        if written is not None and not (written & wanted):
            continue
        kept.append(bsym)
        stack = [bsym]
        while stack:
            current = stack.pop()
            wanted |= {program.buffer_of[arg.name] for arg in tensors(current.flat_args)}
            stack.extend(current.subsymbols)
    if len(kept) == len(program.trace.bound_symbols):
        return program
    trace = from_trace(program.trace)
    trace.bound_symbols = kept[::-1]
    return analyse(dce(trace), program.overlaps)


def _written(program: Program, bsym: BoundSymbol) -> frozenset[int] | None:
    """The buffers that an op writes and makes; None for an op that writes nothing or does more than is declared."""
    effects = [found for _, found in leaves(bsym)]
    if not any(found.writes for found in effects) or any(found.opaque for found in effects):
        return None
    made = {program.buffer_of[out.name] for out in tensors(bsym.flat_outs)}
    return frozenset(made | {program.buffer_of[target.name] for found in effects for target in found.writes})


class _Renaming:
    def __init__(self, program: Program, buffers: frozenset[int]) -> None:
        self.program, self.buffers = program, buffers
        self.new = from_trace(program.trace)
        self.bsyms: list[BoundSymbol] = []
        self.state: dict[int, int] = {}
        self.latest: dict[str, tuple[TensorProxy, int]] = {}  # the newest alias of a name, and its state
        self.written: dict[int, tuple[TensorProxy, ...]] = {}  # the result of a buffer's last write: ties aliases to it
        self.saved: dict[str, TensorProxy] = {}
        self.saves: dict[tuple[int, int], list[str]] = {}
        for save in program.stale_saves:
            buffer = program.buffer_of[save.name]
            names = self.saves.setdefault((buffer, save.state), [])
            if buffer in buffers and save.name not in names:
                names.append(save.name)

    def trace(self) -> TraceCtx:
        with tracectx(self.new):
            for bsym in self.program.trace.bound_symbols:
                self.place(bsym)
        self.new.bound_symbols = self.bsyms
        return self.new

    def place(self, bsym: BoundSymbol) -> None:
        if BoundSymbolTag.BACKWARD in bsym.tags and self.saved:
            bsym = self.swapped(bsym, self.saved)
        swap = {name: alias for name in self.stale_names(bsym) if (alias := self.renew(name, bsym)) is not None}
        swap |= self.save_before(bsym, swap)
        self.bsyms.append(self.returning(bsym, swap) if bsym.sym.id is PrimIDs.RETURN else self.swapped(bsym, swap))
        for leaf, effects in leaves(bsym):
            for target in effects.writes:
                buffer = self.program.buffer_of[target.name]
                self.state[buffer] = self.state.get(buffer, 0) + 1
                self.written[buffer] = tensors(leaf.flat_outs)[:1]
        for out in tensors(bsym.flat_outs):
            if self.buffer(out.name) in self.buffers:
                self.latest.setdefault(out.name, (out, self.state.get(self.buffer(out.name), 0)))

    def buffer(self, name: str) -> int:
        return self.program.buffer_of.get(name, -1)

    def swapped(self, bsym: BoundSymbol, swap: dict[str, TensorProxy]) -> BoundSymbol:
        return renamed(bsym, {arg.name: swap[arg.name] for arg in _arguments(bsym) if arg.name in swap})

    def returning(self, bsym: BoundSymbol, swap: dict[str, TensorProxy]) -> BoundSymbol:
        """The return: arguments are renamed; results keep their names, by which Thunder knows their gradients."""
        value = bsym.args[0] if len(bsym.args) == 1 else None
        if not isinstance(value, dict) or "flat_args" not in value:
            return bsym
        flat = [swap.get(arg.name, arg) if isinstance(arg, TensorProxy) else arg for arg in value["flat_args"]]
        return bsym.from_bsym(args=({**value, "flat_args": flat},))

    def stale_names(self, bsym: BoundSymbol) -> list[str]:
        names = dict.fromkeys(arg.name for arg in tensors(bsym.flat_args) if self.buffer(arg.name) in self.buffers)
        return [
            name
            for name in names
            if self.current(name)[1] != self.state.get(self.buffer(name), 0) or name in self.renamed
        ]

    @property
    def renamed(self) -> set[str]:
        return {name for name, (alias, _) in self.latest.items() if alias.name != name}

    def current(self, name: str) -> tuple[TensorProxy, int]:
        return self.latest.get(name, (self.program.proxies[name], self.program.bound.get(name, 0)))

    def renew(self, name: str, bsym: BoundSymbol) -> TensorProxy | None:
        """The name of a stale name's memory in its current state: the newest alias, or one more."""
        alias, state = self.current(name)
        now = self.state.get(self.buffer(name), 0)
        if state != now:
            alias = self.alias((alias, *self.written.get(self.buffer(name), ())), bsym)[0]
            self.latest[name] = alias, now
        return alias

    def alias(self, sources: tuple[TensorProxy, ...], bsym: BoundSymbol) -> tuple[TensorProxy, ...]:
        aliases = tuple(TensorProxy(like=source, requires_grad=source.requires_grad) for source in sources)
        self.add(prims.update_aliases.bind(sources, output=aliases), bsym)
        return aliases

    def add(self, new: BoundSymbol, like: BoundSymbol) -> None:
        new.tags |= like.tags & {BoundSymbolTag.BACKWARD}
        self.bsyms.append(new)

    def save_before(self, bsym: BoundSymbol, swap: dict[str, TensorProxy]) -> dict[str, TensorProxy]:
        """Copy what backward needs of the states that an op overwrites, and tie the copies to the op.

        Thunder runs in the forward only what the forward's results need, so the copy is made an operand of the write.
        """
        more: dict[str, TensorProxy] = {}
        for _, effects in leaves(bsym):
            for target in effects.writes:
                buffer = self.buffer(target.name)
                names = self.saves.pop((buffer, self.state.get(buffer, 0)), ())
                for name in names if buffer in self.buffers else ():
                    source = self.current(name)[0]
                    copy = TensorProxy(like=source)
                    self.add(prims.clone.bind(source, output=copy), bsym)
                    held = {**self.program.proxies, **swap, **more}[target.name]
                    more[target.name], self.saved[name] = self.alias((held, copy), bsym)
        return more


def _arguments(bsym: BoundSymbol) -> list[Proxy]:
    found, stack = [], [bsym]
    while stack:
        current = stack.pop()
        found += current.flat_proxy_args
        stack.extend(current.subsymbols)
    return found
