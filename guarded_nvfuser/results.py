"""The memory of results: whatever a region returns must share memory with what it shares memory with in eager.

nvFuser returns a result that only moves data of an input as that input's memory, a clone too
(csrc/alias_analysis.cpp), and Thunder's CSE and cast removal return one tensor for two. Where somebody could see it,
PyTorch makes these results.
"""

from __future__ import annotations

from typing import Any

from thunder.core import prims
from thunder.core.prims import PrimIDs
from thunder.core.proxies import TensorProxy, variableify
from thunder.core.pytree import tree_flatten, tree_unflatten
from thunder.core.symbol import BoundSymbol
from thunder.core.trace import TraceCtx, from_trace, tracectx
from thunder.core.transform_common import NON_FUNCTIONAL_OPS

from guarded_nvfuser.contract import body_of
from guarded_nvfuser.effects import is_hidden_view, is_random, prim_id, tensors
from guarded_nvfuser.hazards import is_region
from guarded_nvfuser.moved import moved_from, moved_results
from guarded_nvfuser.regions import Region, results_of_updates
from guarded_nvfuser.states import Program, Write, returned


def in_doubt(trace: TraceCtx, fused: TraceCtx) -> bool:
    """Whether the results of a trace without writes may share other memory than in eager: one look at the regions'
    outputs.
    """
    before, after = ([result.name for result in returned(each)[0]] for each in (trace, fused))
    if before != after or any(is_hidden_view(bsym) for bsym in trace.bound_symbols):
        return True
    visible = set(after) | {
        arg.name for bsym in fused.bound_symbols if not is_region(bsym) for arg in tensors(bsym.flat_args)
    }
    for bsym in filter(is_region, fused.bound_symbols):
        producer = {out.name: sub for sub in bsym.subsymbols for out in tensors(sub.flat_outs)}
        outs = [out.name for out in tensors(bsym.flat_outs) if out.name in visible and out.name in producer]
        if any(moved_from(producer[name], producer) is not None for name in outs):
            return True
    return False


def draws_whole(trace: TraceCtx) -> bool:
    """Whether a trace holds a random op that Thunder's CSE does not know for one."""
    return any(
        bsym.sym.executor is not None and bsym.sym.id not in NON_FUNCTIONAL_OPS and is_random(bsym)
        for bsym in trace.bound_symbols
    )


def settle(executor, program: Program, fused: TraceCtx) -> TraceCtx:
    """Take results that nvFuser may return as other tensors' memory out of their regions, where that could be seen.

    Args:
        executor: makes the changed fusions.
        program: what the trace before fusion means.
        fused: a trace with regions.

    Returns:
        The trace with those results computed by PyTorch (views stay views, clones become copies); the same trace if
        there are none. Contract rule 4 (tests/test_regions.py::test_returned_clone_is_a_copy).
    """
    exposure = _Exposure(program)
    settled: list[BoundSymbol] = []
    for bsym in fused.bound_symbols:
        settled.extend(_settle_region(executor, exposure, bsym) if is_region(bsym) else (bsym,))
    if len(settled) == len(fused.bound_symbols) and all(a is b for a, b in zip(settled, fused.bound_symbols)):
        return fused
    trace = from_trace(fused)
    trace.bound_symbols = settled
    return trace


def exposed_views(program: Program) -> frozenset[int]:
    """Ops (by identity) that eager runs as views and Thunder as computations, where somebody could see the
    difference.
    """
    exposure = _Exposure(program)
    return frozenset(
        id(bsym)
        for bsym in program.trace.bound_symbols
        if is_hidden_view(bsym) and any(exposure.view(out.name) for out in tensors(bsym.flat_outs))
    )


class _Exposure:
    """Which sharing of memory somebody can see: through a later write, or through two results."""

    def __init__(self, program: Program) -> None:
        self.program = program
        self.visible: dict[int, set[str]] = {}
        for name in program.results:
            self.visible.setdefault(program.buffer_of[name], set()).add(name)
        for buffer in program.inputs:
            self.visible.setdefault(buffer, set()).add("")

    def pair(self, out: str, source: str) -> bool:
        """Whether it matters that a region's result and the tensor it was moved from are, or are not, one memory."""
        program = self.program
        mine, other = program.buffer_of.get(out, -1), program.buffer_of.get(source, -1)
        if mine in program.writes or other in program.writes:
            return True
        if mine == other:
            return len(self.visible.get(mine, ())) > 1
        return mine in self.visible and other in self.visible

    def view(self, out: str) -> bool:
        """Whether it matters that a result is a view of a value inside its region."""
        buffer = self.program.buffer_of.get(out, -1)
        return buffer in self.program.writes or len(self.visible.get(buffer, ())) > 1


def _settle_region(executor, exposure: _Exposure, bsym: BoundSymbol) -> tuple[BoundSymbol, ...]:
    body = body_of(bsym)
    producer = {out.name: sub for sub in bsym.subsymbols for out in tensors(sub.flat_outs)}
    inputs = {proxy.name for proxy in body.inputs}
    moved = {
        each.result.name: each.root.name
        for each in moved_results(body)
        if exposure.pair(each.result.name, each.partner.name)
    }
    for out in body.outputs:
        if (
            out.name not in moved
            and exposure.view(out.name)
            and (root := _view_root(exposure.program, producer, out.name))
        ):
            moved[out.name] = root
    if not moved:
        return (bsym,)
    before, after = [], []
    order = {out.name: index for index, sub in enumerate(bsym.subsymbols) for out in tensors(sub.flat_outs)}
    for out, root in sorted(moved.items(), key=lambda item: order[item[0]]):
        chain = _chain(producer, out, root)
        (before if root in inputs else after).extend(chain)
    return (*_once(before), *_without(executor, bsym, moved, inputs), *_once(after))


def _view_root(program: Program, producer: dict[str, BoundSymbol], name: str) -> str | None:
    """The value inside a region that a result is a view of, if it is one."""
    root = name
    while root in producer and prim_id(producer[root]) is not PrimIDs.COPY_:
        if (source := moved_from(producer[root], producer)) is None:
            break
        if program.buffer_of.get(source.name) != program.buffer_of.get(name):
            break
        root = source.name
    return root if root != name else None


def _chain(producer: dict[str, BoundSymbol], out: str, root: str) -> list[BoundSymbol]:
    chain = []
    while out != root:
        chain.append(producer[out])
        out = moved_from(producer[out], producer).name
    return chain[::-1]


def _once(chain: list[BoundSymbol]) -> tuple[BoundSymbol, ...]:
    """Symbols by first occurrence; chains of several results may share their beginning."""
    return tuple({id(bsym): bsym for bsym in chain}.values())


def _without(executor, bsym: BoundSymbol, moved: dict[str, str], inputs: set[str]) -> tuple[BoundSymbol, ...]:
    """The region without its moved results, but with the values that they are made from."""
    outputs = {p.name: p for p in bsym.flat_proxy_outs if p.name not in moved}
    inner = {out.name: out for sub in bsym.subsymbols for out in sub.flat_proxy_outs}
    outputs.update(
        (root, inner[root]) for root in moved.values() if root not in inputs and root not in {*outputs, *moved}
    )
    outputs.update((out.name, out) for out in results_of_updates(bsym.subsymbols))
    if not outputs:
        return ()
    region = Region(
        tuple(bsym.subsymbols),
        tuple(variableify(arg) for arg in bsym.flat_proxy_args),
        tuple(variableify(out) for out in outputs.values()),
    )
    return (executor.fuse(region, int(bsym.sym.name.removeprefix("nvFusion"))),)


def keep_updates(program: Program) -> TraceCtx:
    """Tie the last write of every input to the return, so that no pass takes it for dead or for a part of the backward.

    The return names all arguments (`flat_args`); an argument that was written is named by an alias of it and of the
    write's result, which PyTorch's executor passes through (tests/test_results.py::test_write_stays_in_the_forward).
    """
    trace, return_bsym = program.trace, program.trace.bound_symbols[-1]
    value = return_bsym.args[0] if len(return_bsym.args) == 1 else None
    if not isinstance(value, dict) or "flat_args" not in value:
        return trace
    kept = from_trace(trace)
    ties, flat = [], list(value["flat_args"])
    with tracectx(kept):
        for position, arg in enumerate(flat):
            last = _last_forward_write(program, arg)
            if last is not None and program.bound.get(arg.name, 0) < last.state and tensors(last.bsym.flat_outs):
                sources = (arg, tensors(last.bsym.flat_outs)[0])
                aliases = tuple(TensorProxy(like=source, requires_grad=source.requires_grad) for source in sources)
                ties.append(prims.update_aliases.bind(sources, output=aliases))
                flat[position] = aliases[0]
    if not ties:
        return trace
    kept.bound_symbols = [*trace.bound_symbols[:-1], *ties, return_bsym.from_bsym(args=({**value, "flat_args": flat},))]
    return kept


def _last_forward_write(program: Program, arg: Any) -> Write | None:
    if not isinstance(arg, TensorProxy):
        return None
    writes = program.writes.get(program.buffer_of.get(arg.name, -1), ())
    return next((write for write in reversed(writes) if not write.backward), None)


def separate_results(program: Program, fused: TraceCtx) -> TraceCtx:
    """Give every result that has memory of its own in eager memory of its own, where a pass returned another tensor
    for it.

    Args:
        program: what the trace before fusion means.
        fused: a trace with regions.

    Returns:
        The trace with clones before its return; the same trace if none are needed
        (tests/test_results.py::test_equal_results_are_two_tensors).
    """
    owner: dict[int, int] = {buffer: buffer for buffer in program.inputs}
    found, copies = returned(fused)[0], {}
    for position, (meant, result) in enumerate(zip(program.results, found)):
        mine, other = program.buffer_of[meant], program.buffer_of.get(result.name, -1)
        if owner.setdefault(other, mine) != mine:
            copies[position] = result
    if not copies:
        return fused
    separated = from_trace(fused)
    with tracectx(separated):
        clones = {position: TensorProxy(like=result) for position, result in copies.items()}
        made = [prims.clone.bind(result, output=clones[position]) for position, result in copies.items()]
    *body, return_bsym = fused.bound_symbols
    end = next((index for index, bsym in enumerate(body) if bsym.sym.id is PrimIDs.GET_GRAD), len(body))
    separated.bound_symbols = [*body[:end], *made, *body[end:], _returning(return_bsym, clones)]
    if program.joint:
        separated.bound_symbols = _with_gradients_of(program, separated)
    return separated


def _with_gradients_of(program: Program, trace: TraceCtx) -> list[BoundSymbol]:
    """The symbols with every `get_grad` naming the result that stands for its own: Thunder finds gradients by name."""
    stands_for = dict(zip(reversed(program.results), reversed(returned(trace)[0])))
    wanted = {
        bsym.output.name: stands_for[bsym.args[0].name]
        for bsym in program.trace.bound_symbols
        if bsym.sym.id is PrimIDs.GET_GRAD and bsym.args[0].name in stands_for
    }
    return [
        bsym.from_bsym(args=(wanted[bsym.output.name],))
        if bsym.sym.id is PrimIDs.GET_GRAD and bsym.output.name in wanted
        else bsym
        for bsym in trace.bound_symbols
    ]


def _returning(return_bsym: BoundSymbol, clones: dict[int, TensorProxy]) -> BoundSymbol:
    """The return with some of its results, counted as in `states.returned`, replaced."""
    value: Any = return_bsym.args[0] if len(return_bsym.args) == 1 else return_bsym.args
    if not (isinstance(value, dict) and "flat_args" in value):
        return return_bsym.from_bsym(args=tuple(_replaced(return_bsym.args, clones)))
    key = "fw_flat_out" if "fw_flat_out" in value else "output"
    return return_bsym.from_bsym(args=({**value, key: _replaced(value[key], clones)},))


def _replaced(tree: Any, clones: dict[int, TensorProxy]) -> Any:
    flat, spec = tree_flatten(tree)
    positions = [index for index, leaf in enumerate(flat) if isinstance(leaf, TensorProxy)]
    for position, clone in clones.items():
        flat[positions[position]] = clone
    return tree_unflatten(flat, spec)
