"""Forming regions: memory order, what crosses a boundary, what is left alone, and what a region hands out."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import thunder
import torch
from thunder.core.symbol import BoundSymbol
from thunder.core.trace import TraceCtx
from thunder.core.utils import producers_and_consumers
from thunder.executors.data_dependent_partition import fuse_bound_symbols

from guarded_nvfuser import guarded_nvfuser_ex
from guarded_nvfuser.executor import InterpretableNvFuserExecutor
from guarded_nvfuser.hazards import is_region
from guarded_nvfuser.regions import form, make_region, memory_order, partition, results_of_updates, touches
from guarded_nvfuser.states import analyse
from tests.generator import put
from tests.support import Config, jit
from tests.traces import Recorder, calls, program_of, recorded
from tests.traces import jit as record


def x_and_w() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return torch.randn(4, 4, generator=generator), torch.randn(4, 4, generator=generator)


def read_write_read(x, w):
    y = x.sin()
    x.mul_(2)
    z = x @ w
    return y + z


def two_reads_across_a_write(x, w):
    y = x @ w
    put(w * 2, x)
    z = x @ w
    return y + z


def names_of(groups: list[list[BoundSymbol]]) -> list[list[str]]:
    return [[bsym.sym.name for bsym in group] for group in groups]


def groups_of(fn: Callable, split: Callable[[Recorder, TraceCtx], Any], **options: Any) -> list[list[str]]:
    """The names of the ops of each group that a partition makes of a function's trace."""
    kept: list[list[list[str]]] = []

    def make(recorder: Recorder, trace: TraceCtx) -> TraceCtx:
        kept.append(names_of(split(recorder, trace)))
        return trace

    recorded(make, fn, *x_and_w(), **options)
    [groups] = kept
    return [group for group in groups if group != ["unpack_trivial"]]


def fusable(recorder: Recorder) -> Callable[[BoundSymbol], bool]:
    return lambda bsym: recorder.can_fuse(bsym) and recorder.has_cuda_input_or_output(bsym)


def ours(recorder: Recorder, trace: TraceCtx) -> list[list[BoundSymbol]]:
    return partition(analyse(trace), fusable(recorder))


def thunders(recorder: Recorder, trace: TraceCtx) -> list[list[BoundSymbol]]:
    decide = fusable(recorder)

    def mergeable(a: Any, b: Any) -> bool:
        return all(len(node.group_bsyms) > 1 or decide(node.group_bsyms[0]) for node in (a, b))

    return fuse_bound_symbols(trace, mergeable)


# --- order


def test_dataflow_keeps_order() -> None:
    """Dataflow alone puts a read of a buffer's old name behind the write, and two reads across a write side by side;
    with edges for memory every op stays on its side of the write.
    """
    options = {"fusion_type": "dataflow", "skip": True}
    assert groups_of(read_write_read, thunders, **options)[:3] == [["mul_"], ["matmul"], ["sin", "add"]]
    assert groups_of(read_write_read, ours, **options)[:3] == [["sin", "mul_"], ["matmul"], ["add"]]
    assert groups_of(two_reads_across_a_write, thunders, **options)[:2] == [["matmul"], ["matmul"]]
    assert groups_of(two_reads_across_a_write, ours, **options)[:3] == [["matmul"], ["mul", "copy_"], ["matmul"]]


@pytest.mark.parametrize("fusion_type", ["consecutive", "dataflow"])
def test_nothing_stands_behind_the_return(fusion_type: str) -> None:
    """A dead update is kept before the return; Thunder's dataflow places it behind (lightning-thunder#2776)."""

    def scratch(x, w):
        s = x + 1
        s.mul_(2)
        return x * w

    assert groups_of(scratch, ours, fusion_type=fusion_type)[-1] == ["python_return"]
    if fusion_type == "dataflow":
        assert groups_of(scratch, thunders, fusion_type=fusion_type)[-1] == ["mul_"]


@pytest.mark.parametrize("fusion_type", ["consecutive", "dataflow"])
def test_pure_programs_are_split_as_thunder_splits_them(fusion_type: str) -> None:
    """Without a write there is no memory order, and the partition is Thunder's own."""

    def pure(x, w):
        a = (x + 1).sin()
        b = a @ w
        return (b * a).sum(), (w * 3).cos()

    assert groups_of(pure, ours, fusion_type=fusion_type) == groups_of(pure, thunders, fusion_type=fusion_type)


def test_memory_order_ties_reads_and_writes_of_one_buffer() -> None:
    """A write follows the reads before it and precedes those after it; reads of one state are free."""

    def fn(x, w):
        a = x + w
        b = x * w
        x.mul_(2)
        c = x - w
        w.add_(1)
        x.sin_()
        return a, b, c

    program = program_of(fn, *x_and_w(), skip=True)
    at = {bsym.sym.name: index for index, bsym in enumerate(program.trace.bound_symbols)}
    found = set(memory_order(program))
    expected = {
        ("add", "mul_"),
        ("mul", "mul_"),
        ("mul_", "sub"),
        ("mul_", "sin_"),
        ("sub", "sin_"),
        ("add", "add_"),
        ("mul", "add_"),
        ("sub", "add_"),
    }
    pairs = {(before, after) for before in at for after in at if (at[before], at[after]) in found}
    assert {pair for pair in pairs if "python_return" not in pair} == expected
    assert all(before < after for before, after in found)


def test_memory_order_sees_views() -> None:
    """A read of a view is a read of its base."""

    def fn(x, w):
        row = x[0]
        y = row + w[0]
        x.mul_(2)
        return y

    program = program_of(fn, *x_and_w(), skip=True)
    names = [bsym.sym.name for bsym in program.trace.bound_symbols]
    assert (names.index("add"), names.index("mul_")) in set(memory_order(program))


# --- boundaries


def test_update_is_output() -> None:
    """An update of memory that outlives its region is an output of it: Thunder drops a region without outputs, and the
    update with it.
    """

    def quiet(x, w):
        put(w * 2, x)

    x, w = x_and_w()
    stock = thunder.jit(quiet, executors=[InterpretableNvFuserExecutor("stock_nvfuser")])
    stock(x, w)
    assert not any(map(is_region, thunder.last_traces(stock)[-1].bound_symbols))
    assert not torch.equal(x, w * 2)
    for mode in ("rewrite", "fallback"):
        jitted = jit(quiet, Config(mode))
        x, w = x_and_w()
        jitted(x, w)
        assert torch.equal(x, w * 2)
        for bsym in filter(is_region, thunder.last_traces(jitted)[-1].bound_symbols):
            outs = {out.name for out in bsym.flat_proxy_outs}
            assert {out.name for out in results_of_updates(bsym.subsymbols)} <= outs


def test_update_stays_in_the_forward_of_a_joint_trace() -> None:
    """Nor does Thunder move a region with an update that no result needs into the backward."""

    def fn(x, w):
        x.mul_(2)
        return w * 3

    for mode in ("rewrite", "fallback", "raise"):
        jitted = jit(fn, Config(mode))
        x, w = x_and_w()
        result = jitted(x, w.requires_grad_())
        assert torch.equal(x, x_and_w()[0] * 2)  # before any backward
        result.sum().backward()
        assert torch.equal(x, x_and_w()[0] * 2)
        assert torch.equal(w.grad, torch.full((4, 4), 3.0))


def test_temporary_targets_are_no_outputs() -> None:
    """An update of a tensor that the region itself makes is not one of memory that outlives it."""

    def fn(x, w):
        t = x * w
        put(w, t)
        return t + 1

    program = program_of(fn, *x_and_w(), skip=True)
    body = [bsym for bsym in program.trace.bound_symbols if bsym.sym.name in ("mul", "copy_", "add")]
    assert list(results_of_updates(body)) == []
    assert [out.name for out in results_of_updates(body[1:])] == [out.name for out in body[1].flat_proxy_outs]


def region_of(fn: Callable, ops: tuple[str, ...], **options: Any):
    """The region that some of a function's ops would be, as `fuse` gets it."""
    program = program_of(fn, *x_and_w(), **options)
    group = [bsym for bsym in program.trace.bound_symbols if bsym.sym.name in ops]
    producers, consumers = producers_and_consumers(program.trace)
    return make_region(group, {name: id(bsym) for name, bsym in producers._dict.items()}, consumers, program)


def test_only_what_crosses_the_boundary_is_named() -> None:
    """Inputs are read inside and made outside; outputs are made inside and read outside; temporaries are neither."""

    def fn(x, w):
        a = x + w
        b = a * x
        c = b.sin()
        return c @ w

    region = region_of(fn, ("add", "mul", "sin"))
    assert [variable.proxy.name for variable in region.inputs] == ["x", "w"]
    assert [variable.proxy.name for variable in region.outputs] == ["c"]
    assert [bsym.sym.name for bsym in region.bound_symbols] == ["add", "mul", "sin"]
    middle = region_of(fn, ("mul",))  # in the order of first use
    assert [variable.proxy.name for variable in middle.inputs] == ["a", "x"]
    assert [variable.proxy.name for variable in middle.outputs] == ["b"]


def chain(length: int) -> Callable:
    def fn(x, w):
        for _ in range(length):
            x = x + w
        return x

    return fn


def test_regions_are_made_in_linear_time() -> None:
    """Twice the ops cost about twice the work; Thunder's own region searches a list and costs four times as much."""
    work = {}
    for length in (50, 100):
        program = program_of(chain(length), *x_and_w())
        group = [bsym for bsym in program.trace.bound_symbols if bsym.sym.name == "add"]
        assert len(group) == length
        producers, consumers = producers_and_consumers(program.trace)
        ids = {name: id(bsym) for name, bsym in producers._dict.items()}
        work[length] = calls(make_region, group, ids, consumers, program)
    assert work[100] < 2.2 * work[50]


# --- what is left alone


def test_touches_looks_at_every_depth() -> None:
    """An op touches a buffer if it, or a part of it, names it or a view of it."""

    def fn(x, w):
        view = x.t()
        a = view + w
        b = w * 2
        x.sin_()
        return a + b

    program = program_of(fn, *x_and_w(), skip=True)
    buffers = frozenset([program.buffer_of["x"]])
    found = [bsym.sym.name for bsym in program.trace.bound_symbols if touches(bsym, buffers, program)]
    assert [name for name in found if name not in ("unpack_trivial", "python_return")] == ["t", "add", "sin_"]
    assert not any(touches(bsym, frozenset(), program) for bsym in program.trace.bound_symbols)


def test_barred_ops_stay_outside() -> None:
    """Ops that must not be fused are left in place, and regions form around them."""

    def fn(x, w):
        a = (x + 1) * w
        b = a.sin()
        return (b - x) / w

    recorder = Recorder(lambda recorder, trace: form(recorder, analyse(trace), lambda bsym: bsym.sym.name == "sin"))
    jitted = record(recorder, fn)
    result = jitted(*x_and_w())
    inside = [[sub.sym.name for sub in bsym.subsymbols] for bsym in filter(is_region, recorder.fused.bound_symbols)]
    assert inside == [["add", "mul"], ["sub", "div"]]
    assert "sin" in [bsym.sym.name for bsym in recorder.fused.bound_symbols]
    assert torch.allclose(result, fn(*x_and_w()))


def test_all_barred_is_program_order() -> None:
    """With every op barred there is no region, and the program runs op by op: the loop of mode fallback ends here."""
    recorder = Recorder(lambda recorder, trace: form(recorder, analyse(trace), lambda bsym: True))
    x, y = x_and_w()[0], x_and_w()[0]
    result = record(recorder, read_write_read)(x, x_and_w()[1])
    assert not any(map(is_region, recorder.fused.bound_symbols))
    assert torch.allclose(result, read_write_read(y, x_and_w()[1]))
    assert torch.equal(x, y)


# --- what a region hands out


@pytest.mark.parametrize("mode", ["rewrite", "raise", "fallback"])
def test_returned_clone_is_a_copy(mode: str) -> None:
    """nvFuser returns a clone of an input as that input; a guarded program returns memory of its own, as eager does."""

    def fn(x, w):
        return x.clone(), x * w

    x, w = x_and_w()
    stock = thunder.jit(fn, executors=[InterpretableNvFuserExecutor("stock_nvfuser")])
    assert stock(x, w)[0].untyped_storage().data_ptr() == x.untyped_storage().data_ptr()
    jitted = jit(fn, Config(mode))
    copied, product = jitted(x, w)
    copied.zero_()
    assert torch.equal(x, x_and_w()[0])
    assert torch.equal(product, x * w)


@pytest.mark.parametrize("mode", ["rewrite", "fallback"])
def test_returned_clone_of_a_written_argument_holds_the_old_values(mode: str) -> None:
    """A clone taken before a write and returned after it: stock returns the written argument."""

    def fn(x, w):
        t = x.clone()
        x.add_(w)
        return t

    x, w = x_and_w()
    assert torch.equal(jit(fn, Config(mode))(x, w), x_and_w()[0])
    assert torch.equal(x, x_and_w()[0] + w)


def test_returned_views_stay_views() -> None:
    """A view of an argument or of a computed result shares its memory, as in eager, though nvFuser computes it."""

    def fn(x, w):
        y = x * w
        return x.t(), y, y.view(16)

    x, w = x_and_w()
    transposed, y, flat = thunder.jit(fn, executors=[guarded_nvfuser_ex])(x, w)
    transposed.zero_()
    assert x.eq(0).all()
    flat.fill_(3.0)
    assert y.eq(3.0).all()
