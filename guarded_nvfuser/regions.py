"""Forming regions: Thunder's nvFuser passes over a partition that knows memory order and leaves barred ops alone.

Same steps as `nvFuserExecutor.fusion_pass` (thunder/executors/nvfuserex_impl.py), with order edges between the reads
and writes of a buffer, so that "dataflow" cannot swap them, and with regions made in linear time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from thunder.core import prims, utils
from thunder.core.compile_data import get_compile_option
from thunder.core.prims import PrimIDs
from thunder.core.proxies import TensorProxy, Variable, variableify
from thunder.core.symbol import BoundSymbol, has_tags
from thunder.core.trace import TraceCtx, from_trace
from thunder.core.transform_common import order_proxies
from thunder.executors.data_dependent_partition import Graph, consecutive_fusion, dataflow_merge, horizontal_merge
from thunder.executors.utils import comment_symbols

from guarded_nvfuser.effects import leaves, tensors
from guarded_nvfuser.states import Program


@dataclass(frozen=True)
class Region:
    """What `nvFuserExecutor.fuse` needs of a region: its symbols and the variables that cross its boundary."""

    bound_symbols: tuple[BoundSymbol, ...]
    inputs: tuple[Variable, ...]
    outputs: tuple[Variable, ...]


def touches(bsym: BoundSymbol, buffers: frozenset[int], program: Program) -> bool:
    """Whether an op names memory of one of some buffers, at any depth."""
    stack = [bsym]
    while stack:
        current = stack.pop()
        names = (*tensors(current.flat_args), *tensors(current.flat_outs))
        if any(program.buffer_of.get(proxy.name) in buffers for proxy in names):
            return True
        stack.extend(current.subsymbols)
    return False


def form(executor: Any, program: Program, barred: Callable[[BoundSymbol], bool]) -> TraceCtx:
    """Form regions over a program, keeping memory order, with some ops left to PyTorch.

    Args:
        executor: the nvFuser executor; its `can_fuse`, `fuse` and fuel are used.
        program: the analysed trace.
        barred: whether a bound symbol of the trace must not be fused.

    Returns:
        The trace with regions, before `settle` and before the fusions' final definition.
    """
    trace = program.trace

    def fusable(bsym: BoundSymbol) -> bool:
        return executor.can_fuse(bsym) and executor.has_cuda_input_or_output(bsym) and not barred(bsym)

    groups = partition(program, fusable)
    fused = from_trace(trace)
    fused.bound_symbols = list(_fuse_groups(executor, program, groups, fusable))
    return fused


def partition(program: Program, fusable: Callable[[BoundSymbol], bool]) -> list[list[BoundSymbol]]:
    """Split a trace into groups of bound symbols to fuse, by the compile option `fusion_type`.

    Raises:
        ValueError: `fusion_type` is neither "consecutive" nor "dataflow".
    """
    fusion_type = get_compile_option("fusion_type", "Choose the type of fusion to use") or "consecutive"
    decided: dict[int, bool] = {}

    def mergeable(a, b) -> bool:
        for node in (a, b):
            if len(node.group_bsyms) == 1 and not decided.setdefault(
                id(node.group_bsyms[0]), fusable(node.group_bsyms[0])
            ):
                return False
        return _same_tensor_types(a.group_bsyms[0], b.group_bsyms[0])

    if fusion_type == "consecutive":
        return consecutive_fusion(program.trace, mergeable)
    if fusion_type != "dataflow":
        raise ValueError(f"Unknown fusion type: {fusion_type!r}; the legal ones are 'consecutive' and 'dataflow'")
    graph = OrderedGraph(program)
    dataflow_merge(graph, mergeable)
    return horizontal_merge(graph, mergeable)


def _same_tensor_types(a: BoundSymbol, b: BoundSymbol) -> bool:
    """nvFuser takes no fusion with DTensors and plain tensors mixed."""
    kinds = [{type(arg) is TensorProxy for arg in tensors(bsym.flat_args)} for bsym in (a, b)]
    return kinds[0] == kinds[1] or (False not in kinds[0] and False not in kinds[1])


class OrderedGraph(Graph):
    """Thunder's dataflow graph with edges for memory: a write follows earlier reads and precedes later ones.

    Proxies alone do not tie a read of a buffer's old name to the write
    (tests/test_regions.py::test_dataflow_keeps_order), and a dead node may be placed after the return, which is
    lightning-thunder#2776.
    """

    def __init__(self, program: Program) -> None:
        super().__init__(program.trace)
        nodes = self._nodes_by_index(len(program.trace.bound_symbols))
        for before, after in memory_order(program):
            self._tie(nodes[before], nodes[after])
        last = nodes[-1]
        for node in nodes[:-1]:
            if not node.children:
                self._tie(node, last)

    def _nodes_by_index(self, count: int) -> list:
        nodes, stack = [None] * count, list(self.roots)
        while stack:
            node = stack.pop()
            if nodes[node.ID] is None:
                nodes[node.ID] = node
                stack.extend(node.children)
        return nodes

    def _tie(self, before, after) -> None:
        before.children.add(after)
        after.parents.add(before)
        if after in self.roots:
            self.roots.remove(after)


def memory_order(program: Program) -> Iterator[tuple[int, int]]:
    """Pairs (earlier, later) of top-level positions that touch one written buffer, where one of the two writes it."""
    last_write: dict[int, int] = {}
    reads: dict[int, list[int]] = {}
    for index, bsym in enumerate(program.trace.bound_symbols):
        for buffer, writes in _accesses(program, bsym):
            if buffer in last_write and last_write[buffer] != index:
                yield last_write[buffer], index
            if writes:
                yield from ((read, index) for read in reads.pop(buffer, ()) if read != index)
                last_write[buffer] = index
            else:
                reads.setdefault(buffer, []).append(index)


def _accesses(program: Program, bsym: BoundSymbol) -> Iterator[tuple[int, bool]]:
    for _, effects in leaves(bsym):
        for proxy in effects.reads:
            if program.buffer_of[proxy.name] in program.writes:
                yield program.buffer_of[proxy.name], False
        for proxy in effects.writes:
            yield program.buffer_of[proxy.name], True


def _fuse_groups(executor, program: Program, groups, fusable) -> Iterator[BoundSymbol]:
    producers, consumers = utils.producers_and_consumers(program.trace)
    producer_id = {name: id(bsym) for name, bsym in producers._dict.items()}
    counter = 0
    for group in groups:
        if not _worth_fusing(group, fusable) or not executor.get_fuel():
            yield from group
            continue
        region = make_region(group, producer_id, consumers, program)
        if region.outputs:
            yield executor.fuse(region, counter)
            counter += 1


def _worth_fusing(group: Sequence[BoundSymbol], fusable: Callable[[BoundSymbol], bool]) -> bool:
    shape_only = get_compile_option(
        "nv_enable_shape_only_fusion", "Allow nvFuser to create Fusion with shape only operations. Defaults to False."
    )
    if not shape_only and all(_is_shape_op(bsym) for bsym in group):
        return False
    return len(group) > 1 or fusable(group[0])


def _is_shape_op(bsym: BoundSymbol) -> bool:
    return all(has_tags(each, {prims.OpTags.SHAPE_OP}) for each in (bsym, *bsym.subsymbols))


def make_region(group: Sequence[BoundSymbol], producer_id: dict[str, int], consumers, program: Program) -> Region:
    """The region of a group of bound symbols, in time linear in its size (thunder's `Region` searches a list).

    An update of memory that outlives the region is always an output: Thunder drops a fusion without outputs, and
    moves one that the forward's results do not need into the backward (tests/test_regions.py::test_update_is_output).
    """
    inside = {id(bsym) for bsym in group}
    order = order_proxies(list(group))
    inputs, outputs = {}, {}
    for bsym in group:
        if bsym.sym.id not in comment_symbols:
            for arg in bsym.flat_proxy_args:
                if producer_id.get(arg.name) not in inside:
                    inputs[arg.name] = variableify(arg)
        for out in bsym.flat_proxy_outs:
            if producer_id.get(out.name) in inside and any(id(user) not in inside for user in consumers.get(out, ())):
                outputs[out.name] = variableify(out)
    for out in results_of_updates(group):
        outputs.setdefault(out.name, variableify(out))
    return Region(
        tuple(group),
        tuple(sorted(inputs.values(), key=lambda v: order[v.proxy.name])),
        tuple(sorted(outputs.values(), key=lambda v: order[v.proxy.name])),
    )


def results_of_updates(bsyms: Sequence[BoundSymbol]) -> Iterator[TensorProxy]:
    """The results of the copies into memory that was there before some symbols of one region."""
    inside = {out.name for bsym in bsyms for out in tensors(bsym.flat_outs)}
    for bsym in bsyms:
        for leaf, effects in leaves(bsym):
            if any(target.name not in inside for target in effects.writes):
                yield from tensors(leaf.flat_outs)


def without_dead_ops(trace: TraceCtx) -> TraceCtx:
    """Drop what nobody needs from a trace with regions, in linear time.

    Thunder's `dce` looks through a region's symbols once for each of them (thunder/core/transform_common.py,
    _remove_noop_subsymbols).
    """
    needed: set[str] = set()
    kept: list[BoundSymbol] = []
    for bsym in reversed(trace.bound_symbols):
        is_needed = any(out.name in needed for out in bsym.flat_proxy_outs)
        if is_needed or bsym.sym.id is PrimIDs.RETURN or has_tags(bsym, {prims.OpTags.DONT_DCE}):
            kept.append(bsym)
            needed.update(arg.name for arg in bsym.flat_proxy_args)
    cleaned = from_trace(trace)
    cleaned.bound_symbols = kept[::-1]
    return cleaned
