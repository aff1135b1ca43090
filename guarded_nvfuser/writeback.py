"""Elision: a write-back joins the region that computes its value, where nvFuser's contract allows it.

A rewritten program ends with one copy per changed input. `peel` takes these copies off before regions are formed, so
that every pass of Thunder's works on a pure program; `put_back` adds each to the region that computes its value, if
that region is right with it under every schedule (contract.py) and nobody reads the input's old state later; the
others stay copies.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from thunder.core.prims import PrimIDs
from thunder.core.proxies import Proxy, TensorProxy
from thunder.core.pytree import tree_flatten, tree_unflatten
from thunder.core.symbol import BoundSymbol
from thunder.core.trace import TraceCtx, from_trace

from guarded_nvfuser.contract import Rules
from guarded_nvfuser.effects import leaves, prim_id, tensors
from guarded_nvfuser.fuel import Fuel
from guarded_nvfuser.hazards import execution_order, is_region
from guarded_nvfuser.renaming import renamed
from guarded_nvfuser.states import Program, analyse
from guarded_nvfuser.violations import violations


@dataclass(frozen=True)
class WriteBack:
    """One copy at the end of the forward: its symbol, and the positions in the return's `flat_args` that name its
    result.
    """

    copy: BoundSymbol
    positions: tuple[int, ...]

    @property
    def value(self) -> TensorProxy:
        """What is written."""
        return tensors(self.copy.flat_args)[0]

    @property
    def target(self) -> TensorProxy:
        """The input that it is written to."""
        return tensors(self.copy.flat_args)[1]

    @property
    def result(self) -> TensorProxy:
        """The copy's result, which is the input."""
        return tensors(self.copy.flat_outs)[0]


def forward_end(bsyms: Sequence[BoundSymbol]) -> int:
    """Where the forward ends: at the first gradient that is asked for, or at the return."""
    return next((i for i, bsym in enumerate(bsyms) if bsym.sym.id in (PrimIDs.GET_GRAD, PrimIDs.RETURN)), len(bsyms))


@dataclass(frozen=True)
class Tail:
    """The end of a rewritten program's forward: the write-backs, and the views of changed inputs that are results."""

    backs: tuple[WriteBack, ...] = ()
    views: tuple[BoundSymbol, ...] = ()

    @property
    def names(self) -> set[str]:
        """What the tail defines."""
        return {
            out.name for bsym in (*(back.copy for back in self.backs), *self.views) for out in tensors(bsym.flat_outs)
        }


def peel(program: Program) -> tuple[Program, Tail]:
    """Take the write-backs off a program.

    Args:
        program: a rewritten, analysed program.

    Returns:
        The program without the copies at its forward's end, which returns their values instead, and what was taken off.
    """
    bsyms = program.trace.bound_symbols
    end = forward_end(bsyms)
    start = _tail_start(program, bsyms, end)
    value = bsyms[-1].args[0] if len(bsyms[-1].args) == 1 else None
    if start == end or not isinstance(value, dict) or "flat_args" not in value:
        return program, Tail()
    flat = value["flat_args"]
    copies = [bsym for bsym in bsyms[start:end] if _is_write_back(program, bsym)]
    backs = tuple(
        WriteBack(
            copy, tuple(i for i, arg in enumerate(flat) if isinstance(arg, Proxy) and arg.name == _result(copy).name)
        )
        for copy in copies
    )
    tail = Tail(backs, tuple(bsym for bsym in bsyms[start:end] if bsym not in copies))
    asked = {bsym.args[0].name for bsym in bsyms[end:] if bsym.sym.id is PrimIDs.GET_GRAD}
    if not backs or not all(back.positions for back in backs) or not asked.isdisjoint(tail.names):
        return program, Tail()
    return analyse(_peeled(program.trace, start, end, tail), program.overlaps), tail


def _peeled(trace: TraceCtx, start: int, end: int, tail: Tail) -> TraceCtx:
    """The trace without its tail; values, and targets, stand in the return for what the tail defines."""
    bsyms = trace.bound_symbols
    values = {back.result.name: back.value for back in tail.backs}
    values |= {out.name: tail.backs[0].value for bsym in tail.views for out in tensors(bsym.flat_outs)}
    *backward, return_bsym = [renamed(bsym, values) for bsym in bsyms[end:]]
    value = return_bsym.args[0]
    flat = [*value["flat_args"], *(back.target for back in tail.backs)]  # no pass may drop a target's definition
    peeled = from_trace(trace)
    peeled.bound_symbols = [*bsyms[:start], *backward, return_bsym.from_bsym(args=({**value, "flat_args": flat},))]
    return peeled


def _tail_start(program: Program, bsyms: Sequence[BoundSymbol], end: int) -> int:
    """Where the tail begins: copies to inputs, then views that depend on nothing but their results."""
    start = end
    while start and (_is_write_back(program, bsyms[start - 1]) or _is_view(bsyms[start - 1])):
        start -= 1
    defined: set[str] = set()
    for index in range(start, end):
        args = {arg.name for arg in tensors(bsyms[index].flat_args)}
        if not _is_write_back(program, bsyms[index]) and not (args and args <= defined):
            start, defined = index + 1, set()
            continue
        defined.update(out.name for out in tensors(bsyms[index].flat_outs))
    return start


def _is_view(bsym: BoundSymbol) -> bool:
    found = [effects for _, effects in leaves(bsym)]
    return any(effects.shares for effects in found) and not any(effects.writes for effects in found)


def _result(copy: BoundSymbol) -> TensorProxy:
    return tensors(copy.flat_outs)[0]


def _is_write_back(program: Program, bsym: BoundSymbol) -> bool:
    if prim_id(bsym) is not PrimIDs.COPY_ or not tensors(bsym.flat_outs):
        return False
    whole = {program.tensor_of[name] for name in program.arguments}
    return program.tensor_of[tensors(bsym.flat_args)[1].name] in whole


def put_back(
    program: Program, fused: TraceCtx, tail: Tail, *, elide: bool, rules: Rules, fuel: Fuel | None = None
) -> TraceCtx:
    """Put the write-backs into a trace with regions: into the region that makes the value, or behind everything.

    Args:
        program: the program with its write-backs, which gives the memory of names.
        fused: the trace that was formed from the peeled program, before its fusions' final definition.
        tail: what `peel` took off.
        elide: whether write-backs may join regions.
        rules: what the contract allows.
        fuel: decides which of those that may join are let to; None: all.

    Returns:
        The trace that writes every changed input once and returns it by the write's result.
    """
    if not tail.backs:
        return fused
    return _Placing(program, fused, tail, rules, fuel or Fuel(None)).run(elide)


class _Placing:
    def __init__(self, program: Program, fused: TraceCtx, tail: Tail, rules: Rules, fuel: Fuel) -> None:
        self.program, self.fused, self.tail, self.rules, self.fuel = program, fused, tail, rules, fuel
        self.backs = tail.backs
        self.bsyms = list(fused.bound_symbols)
        flat = self.bsyms[-1].args[0]["flat_args"]
        self.values = {back.result.name: flat[back.positions[0]] for back in self.backs}  # passes may have renamed them
        self.joined: dict[str, int] = {}  # result -> position of its region

    def run(self, elide: bool) -> TraceCtx:
        if elide:
            for position, backs in self.candidates().items():
                name = self.bsyms[position].sym.name
                self.join(position, [back for back in backs if self.fuel.may_elide(back.copy, name)])
        placed = from_trace(self.fused)
        end = forward_end(self.bsyms)
        rest = [self.bound(back) for back in self.backs if back.result.name not in self.joined]
        rest += self.tail.views
        placed.bound_symbols = [*self.bsyms[:end], *rest, *self.bsyms[end:-1], self.returning(self.bsyms[-1])]
        return placed

    def bound(self, back: WriteBack) -> BoundSymbol:
        value = self.values[back.result.name]
        return renamed(back.copy, {} if value.name == back.value.name else {back.value.name: value})

    def candidates(self) -> dict[int, list[WriteBack]]:
        """Write-backs whose value a region makes and whose target nobody reads later, by the region's position."""
        made_at = {
            out.name: index for index, bsym in enumerate(self.bsyms) if is_region(bsym) for out in bsym.flat_proxy_outs
        }
        defined_at = {
            out.name: i
            for i, b in enumerate(self.bsyms)
            if b.sym.id is not PrimIDs.UNPACK_TRIVIAL
            for out in tensors(b.flat_outs)
        }
        order = {id(bsym): rank for rank, bsym in enumerate(b for part in execution_order(self.fused) for b in part)}
        last_read: dict[int, int] = {}
        for bsym in self.bsyms[:-1]:
            for arg in tensors(bsym.flat_args):
                buffer = self.program.buffer_of.get(arg.name, -1)
                last_read[buffer] = max(last_read.get(buffer, -1), order[id(bsym)])
        for back in self.backs:  # a value that no region makes is read by a copy at the end
            value = self.values[back.result.name].name
            if value not in made_at:
                last_read[self.program.buffer_of.get(value, -1)] = len(order)
        found: dict[int, list[WriteBack]] = {}
        for back in self.backs:
            index = made_at.get(self.values[back.result.name].name)
            if index is None:
                continue
            read_later = last_read.get(self.program.buffer_of[back.target.name], -1) > order[id(self.bsyms[index])]
            if not read_later and defined_at.get(back.target.name, -1) < index:
                found.setdefault(index, []).append(back)
        return found

    def join(self, position: int, backs: list[WriteBack]) -> None:
        """Add as many updates to a region as the contract allows; those that break a claim are taken out again."""
        while backs:
            region = self.with_updates(self.bsyms[position], backs)
            broken = {_result(violation.update).name for violation in violations(self.program.body(region, self.rules))}
            if not broken:
                break
            fewer = [back for back in backs if back.result.name not in broken]
            if len(fewer) == len(backs):
                return  # an update that was there before is at odds with one of these
            backs = fewer
        else:
            return
        self.bsyms[position] = region
        self.joined.update((back.result.name, position) for back in backs)
        self.read_results(position, backs)

    def with_updates(self, region: BoundSymbol, backs: list[WriteBack]) -> BoundSymbol:
        """The region with updates added, and without outputs that only the write-backs need."""
        unneeded = {self.values[b.result.name].name for b in backs} - self.kept_values(backs)
        targets = {back.target.name: back.target for back in backs}
        args = {arg.name: arg for arg in region.args} | targets
        outs = [out for out in region.flat_proxy_outs if out.name not in unneeded]
        return region.from_bsym(
            args=tuple(args.values()),
            output=[*outs, *(back.result for back in backs)],
            subsymbols=(*region.subsymbols, *(self.bound(back) for back in backs)),
        )

    def kept_values(self, backs: list[WriteBack]) -> set[str]:
        """Values that are results of their own beside the input that they are written to."""
        results = {result.name for result in self.results()}
        return {self.values[back.result.name].name for back in backs} & results

    def results(self) -> list[TensorProxy]:
        """The return's results, without those that the tail defines."""
        inputs = self.tail.names
        value = self.bsyms[-1].args[0]
        found = tensors(_flat(value.get("fw_flat_out", value["output"])))
        return [proxy for meant, proxy in zip(self.program.results, found) if meant not in inputs]

    def read_results(self, position: int, backs: list[WriteBack]) -> None:
        """Let later ops read the updated input: it holds the value, which then needs no memory of its own."""
        kept = self.kept_values(backs)
        swap = {}
        for back in backs:
            value = self.values[back.result.name]
            if value.name not in kept:
                swap.setdefault(value.name, back.result)
                self.values = {
                    n: back.result if v.name == value.name and n != back.result.name else v
                    for n, v in self.values.items()
                }
        if not swap:
            return
        for index in range(position + 1, len(self.bsyms) - 1):
            bsym = self.bsyms[index]
            if any(arg.name in swap for arg in bsym.flat_proxy_args):
                self.bsyms[index] = renamed(bsym, swap)

    def returning(self, bsym: BoundSymbol) -> BoundSymbol:
        """The return with every changed input named by its write's result."""
        value = bsym.args[0]
        flat = list(value["flat_args"])[: -len(self.backs)]
        for back in self.backs:
            for position in back.positions:
                flat[position] = back.result
        inputs = {name: self.program.proxies[name] for name in self.tail.names}
        key = "fw_flat_out" if "fw_flat_out" in value else "output"
        results = _with_results(value[key], self.program.results, inputs)
        return bsym.from_bsym(args=({**value, "flat_args": flat, key: results},))


def _flat(tree) -> list:
    return tree_flatten(tree)[0]


def _with_results(tree, names: Sequence[str], inputs: dict[str, TensorProxy]):
    """The results with those that are changed inputs named so; `names` are the program's, in order."""
    flat, spec = tree_flatten(tree)
    places = [i for i, leaf in enumerate(flat) if isinstance(leaf, TensorProxy)]
    for place, name in zip(places, names):
        flat[place] = inputs.get(name, flat[place])
    return tree_unflatten(flat, spec)
