"""The judge: every way in which a fused trace can differ from its program is found, and nothing else is."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable
from dataclasses import dataclass

import pytest
import thunder
import torch
from thunder.core import prims
from thunder.core.prims import PrimIDs
from thunder.core.proxies import variableify
from thunder.core.symbol import BoundSymbol

from guarded_nvfuser import guarded_nvfuser_ex, interpreter
from guarded_nvfuser.contract import Looser, Rule, Rules
from guarded_nvfuser.errors import HazardError, layout_error
from guarded_nvfuser.hazards import (
    Hazard,
    Kind,
    execution_order,
    judge,
    overlap_hazards,
    program_hazards,
    refusals,
)
from guarded_nvfuser.layouts import is_dense
from guarded_nvfuser.options import Schedule, schedule
from guarded_nvfuser.rewrite import rewrite
from guarded_nvfuser.states import analyse, is_joint
from tests.generator import Features, Seeded, generate
from tests.support import differences, run
from tests.traces import (
    STRICT,
    Fusion,
    Recorder,
    calls,
    flat,
    jit,
    mystery,
    one_region,
    ops,
    program_of,
    put,
    split,
    stock,
    with_symbols,
)


def x4() -> torch.Tensor:
    return torch.arange(1.0, 17.0).reshape(4, 4) / 8


def leaf() -> torch.Tensor:
    return x4().requires_grad_()


def kinds(hazards: tuple[Hazard, ...]) -> set[Kind]:
    return {hazard.kind for hazard in hazards}


def of_stock(fn: Callable, *args: torch.Tensor, **options) -> Callable[[], tuple[Hazard, ...]]:
    """The hazards of what Thunder's own passes make of a function."""
    return lambda: stock(fn, *(args or (x4(), x4())), **options).hazards()


# --- every kind, with a twin that has none


def read_twice_across_a_write(x, y):
    a = x + y
    put(a * 2, x)
    return a, x + y


def read_twice_beside_a_write(x, y):
    a = x * 3
    put(a * 2, y)
    return a, x * 3


def recomputed_after_the_write(x, y):
    a = x.sin()
    x.mul_(2)
    return a + x @ y


def not_recomputed_after_the_write(x, y):
    a = y.sin()
    x.mul_(2)
    return a + x @ y


def write_twice(x, y):
    x.mul_(y)
    x.add_(1)
    return x * y


def write_once(x, y):
    return x.mul_(y)


def write_a_local(x, y):
    local = x.sin()
    local.mul_(y)
    return local + 1


def write_an_argument(x, y):
    y.mul_(x.sin())
    return x + 1


def write_nobody_reads(x, y):
    a = x.sin()
    x.mul_(2)
    return a + y @ y


def write_that_is_returned(x, y):
    a = y.sin()
    updated = x.mul_(2)
    return updated, a + y @ y


def save_then_write(x):
    y = x * 1.0
    a = y.sin()
    y.mul_(2)
    return a + y


def save_the_result(x):
    y = x * 1.0
    a = y.exp()
    y.mul_(2)
    return a + y


def write_a_view(x):
    y = x * 1.0
    y[0].mul_(2)
    return y * 3


def write_a_tensor(x):
    y = x * 1.0
    y.mul_(2)
    return y * 3


def write_a_view_of_a_leaf(x):
    x[0].mul_(2)
    return x + 1


def write_a_view_of_a_buffer(x, y):
    y[0].mul_(2)
    return x * y


def write_after_reshape(x, y):
    z = x.t().reshape(16)
    x.mul_(2)
    return z + 1


def write_after_view(x, y):
    z = x.view(16)
    x.mul_(2)
    return z + 1


def _overlapping(fn: Callable) -> tuple[Hazard, ...]:
    return overlap_hazards(one_region(fn, x4(), x4(), overlaps=True).program)


def _layout(target: torch.Tensor) -> tuple[Hazard, ...]:
    region = one_region(lambda x, y: put(prims.mul(x, y), x), target, x4()).regions[0]
    dense = is_dense(target.shape, target.stride())
    return () if dense else layout_error(region, [region.args[0]]).hazards


def _reasons(fn: Callable) -> tuple[Hazard, ...]:
    return rewrite(program_of(fn, x4(), x4(), skip=True)).reasons


def call_an_undeclared_op(x, y):
    part = mystery(x, y)
    return part + 1


@dataclass(frozen=True)
class Twins:
    """What finds a hazard of one kind, and the nearest program that has none."""

    bad: Callable[[], tuple[Hazard, ...]]
    good: Callable[[], tuple[Hazard, ...]]


KINDS: dict[Kind, Twins] = {
    Kind.RAW: Twins(of_stock(read_twice_across_a_write, skip=True), of_stock(read_twice_beside_a_write, skip=True)),
    Kind.WAR: Twins(of_stock(recomputed_after_the_write), of_stock(not_recomputed_after_the_write)),
    Kind.WAW: Twins(of_stock(write_twice, skip=True), of_stock(write_once, skip=True)),
    Kind.TARGET: Twins(of_stock(write_a_local, skip=True), of_stock(write_an_argument)),
    Kind.LOST: Twins(of_stock(write_nobody_reads, skip=True), of_stock(write_that_is_returned, skip=True)),
    Kind.SAVED: Twins(of_stock(save_then_write, leaf()), of_stock(save_the_result, leaf())),
    Kind.UNTRACKED: Twins(
        lambda: program_hazards(program_of(write_a_view, leaf())),
        lambda: program_hazards(program_of(write_a_tensor, leaf())),
    ),
    Kind.LAYOUT: Twins(lambda: _layout(torch.ones(4, 8)[:, :4]), lambda: _layout(torch.ones(4, 4).t())),
    Kind.LEAF: Twins(
        lambda: refusals(program_of(write_a_view_of_a_leaf, leaf())),
        lambda: refusals(program_of(write_a_view_of_a_buffer, leaf(), x4())),
    ),
    Kind.OVERLAP: Twins(
        lambda: _overlapping(lambda x, y: put(prims.mul(x, y), x)), lambda: _overlapping(lambda x, y: prims.mul(x, y))
    ),
    Kind.UNCERTAIN: Twins(lambda: _reasons(write_after_reshape), lambda: _reasons(write_after_view)),
    Kind.UNDECLARED: Twins(lambda: _reasons(call_an_undeclared_op), lambda: _reasons(write_once)),
}


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
def test_hazard_is_found(kind: Kind) -> None:
    assert kind in kinds(KINDS[kind].bad())


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
def test_twin_has_no_hazard(kind: Kind) -> None:
    assert KINDS[kind].good() == ()


def test_every_kind_has_twins() -> None:
    assert KINDS.keys() == set(Kind)


def test_codes_are_stable_and_distinct() -> None:
    assert [kind.value for kind in Kind] == [f"GNV{number:03}" for number in range(1, len(Kind) + 1)]


# --- what a hazard says


def test_read_across_regions_names_both_states() -> None:
    fusion = stock(recomputed_after_the_write, x4(), x4())
    [hazard] = fusion.hazards()
    [sine] = [bsym for bsym in ops(fusion.fused, "sin") if bsym.sym.is_prim]
    [write] = fusion.program.writes[hazard.buffer]
    assert (hazard.kind, hazard.must, hazard.may, hazard.rule) == (Kind.WAR, None, write, None)
    assert hazard.read is sine
    region = next(bsym for bsym in fusion.regions if any(sub is sine for sub in bsym.subsymbols))
    assert hazard.region == region.sym.name


def test_read_inside_a_region_names_the_claim() -> None:
    def beside(x, y):
        before = prims.cos(prims.transpose(x, (1, 0)))
        return put(prims.mul(x, y), x), before

    fusion = one_region(beside, x4(), x4())
    [hazard] = fusion.hazards()
    assert (hazard.kind, hazard.rule, hazard.region) == (Kind.WAR, Rule.CLOSED, "nvFusion0")
    assert hazard.read.sym.name == "transpose"
    assert hazard.may.target == hazard.name == fusion.program.arguments[0]


def test_region_may_be_accepted_under_looser_rules() -> None:
    def beside(x, y):
        before = prims.mul(prims.cos(x), y)
        return put(prims.mul(x, y), x), before

    fusion = one_region(beside, x4(), x4())
    assert kinds(fusion.hazards()) == {Kind.WAR}
    assert fusion.hazards(Looser.POINTWISE) == ()


def test_updates_of_cpu_tensors_are_for_the_interpreter() -> None:
    fusion = one_region(lambda x, y: put(prims.mul(x, y), x), x4(), x4())
    [hazard] = judge(fusion.program, fusion.fused, Rules(frozenset(), any_device=False))
    assert (hazard.kind, hazard.rule) == (Kind.TARGET, Rule.TARGET_ON_DEVICE)
    assert fusion.hazards() == ()


# --- what a pass may do to a program


def steps(x, y):
    """Reads of each state, two writes of one tensor, and one of another."""
    before = prims.sin(x)
    first = put(prims.mul(x, y), x)
    between = prims.cos(first)
    second = put(prims.add(first, y), first)
    after = prims.tanh(second)
    third = put(prims.exp(y), y)
    return before, between, after, third


class Steps:
    """The trace of `steps`, and what becomes of it when symbols move."""

    def __init__(self) -> None:
        self.trace = flat(steps, x4(), x4())
        self.program = analyse(self.trace)
        self.symbols = {bsym.sym.name: bsym for bsym in self.trace.bound_symbols}
        self.first, self.second, self.third = ops(self.trace, "copy_")

    def of(self, *changes: tuple[BoundSymbol, list[BoundSymbol]]) -> tuple[Hazard, ...]:
        """The hazards when each symbol of a pair is replaced by the symbols beside it."""
        replaced = {id(bsym): new for bsym, new in changes}
        bsyms = [new for bsym in self.trace.bound_symbols for new in replaced.get(id(bsym), [bsym])]
        return judge(self.program, with_symbols(self.trace, bsyms), STRICT)


def test_unchanged_program_has_no_hazards() -> None:
    assert Steps().of() == ()


def test_read_moved_behind_a_write() -> None:
    it = Steps()
    sine = it.symbols["sin"]
    [hazard] = it.of((sine, []), (it.first, [it.first, sine]))
    assert (hazard.kind, hazard.read, hazard.must, hazard.may.bsym) == (Kind.WAR, sine, None, it.first)
    assert hazard.region is None


def test_read_moved_before_its_write() -> None:
    """A read by the target's name, not by the result's: data flow does not hold it back."""

    def by_name(x, y):
        put(prims.mul(x, y), x)
        return prims.cos(x)

    trace = flat(by_name, x4(), x4())
    cosine, update = ops(trace, "cos")[0], ops(trace, "copy_")[0]
    *before, mul, _, _, back = trace.bound_symbols
    [hazard] = judge(analyse(trace), with_symbols(trace, [*before, cosine, mul, update, back]), STRICT)
    assert (hazard.kind, hazard.read, hazard.must.bsym, hazard.may) == (Kind.RAW, cosine, update, None)


def test_read_repeated_behind_a_write() -> None:
    """Rematerialisation repeats an op under the same name where it is needed again."""
    it = Steps()
    sine = it.symbols["sin"]
    assert kinds(it.of((it.first, [it.first, sine]))) == {Kind.WAR}
    assert it.of((sine, [sine, sine])) == ()


def test_read_merged_across_a_write() -> None:
    """CSE lets readers of the second result read the first."""

    def read_twice(x, y):
        a = prims.sin(x)
        put(y, x)
        b = prims.sin(x)
        return prims.cos(a), prims.cos(b)

    trace = flat(read_twice, x4(), x4())
    (a, b), (_, cos_b) = ops(trace, "sin"), ops(trace, "cos")
    merged = cos_b.from_bsym_swap_proxies({variableify(b.output): a.output}, skip_output=True)
    bsyms = [bsym for bsym in trace.bound_symbols if bsym is not b]
    fused = with_symbols(trace, [merged if bsym is cos_b else bsym for bsym in bsyms])
    [hazard] = judge(analyse(trace), fused, STRICT)
    update = ops(trace, "copy_")[0]
    assert (hazard.kind, hazard.read, hazard.must.bsym, hazard.may) == (Kind.RAW, b, update, None)


def test_read_merged_without_a_write() -> None:
    def read_twice(x, y):
        a = prims.sin(x)
        put(y, x)
        b, c = prims.sin(x), prims.sin(x)
        return prims.cos(a), prims.cos(b), prims.cos(c)

    trace = flat(read_twice, x4(), x4())
    (_, b, c), (*_, cos_c) = ops(trace, "sin"), ops(trace, "cos")
    merged = cos_c.from_bsym_swap_proxies({variableify(c.output): b.output}, skip_output=True)
    bsyms = [bsym for bsym in trace.bound_symbols if bsym is not c]
    fused = with_symbols(trace, [merged if bsym is cos_c else bsym for bsym in bsyms])
    assert judge(analyse(trace), fused, STRICT) == ()


def test_result_merged_across_a_write() -> None:
    def read_twice(x, y):
        a = prims.sin(x)
        put(y, x)
        return a, prims.sin(x)

    trace = flat(read_twice, x4(), x4())
    a, b = ops(trace, "sin")
    *body, back = (bsym for bsym in trace.bound_symbols if bsym is not b)
    back = back.from_bsym_swap_proxies({variableify(b.output): a.output}, skip_output=True)
    [hazard] = judge(analyse(trace), with_symbols(trace, [*body, back]), STRICT)
    assert (hazard.kind, hazard.read) == (Kind.RAW, b)


def test_write_dropped() -> None:
    it = Steps()
    at_return, lost = it.of((it.third, []))
    assert (at_return.kind, at_return.read.sym.id, at_return.must.bsym) == (Kind.RAW, PrimIDs.RETURN, it.third)
    assert (lost.kind, lost.must.bsym, lost.read) == (Kind.LOST, it.third, None)
    assert Kind.LOST in kinds(it.of((it.first, []), (it.second, [])))


def test_dropped_write_of_a_local_is_no_loss() -> None:
    def local(x, y):
        value = prims.sin(x)
        put(y, value)
        return prims.cos(x)

    trace = flat(local, x4(), x4())
    kept = [bsym for bsym in trace.bound_symbols if bsym.sym.name not in ("copy_", "sin")]
    assert analyse(trace).mutates
    assert judge(analyse(trace), with_symbols(trace, kept), STRICT) == ()


def test_write_repeated() -> None:
    it = Steps()
    assert Kind.WAW in kinds(it.of((it.third, [it.third, it.third])))


def test_writes_in_the_other_order() -> None:
    def overwrite(x, y):
        return put(prims.sin(y), x), put(prims.cos(y), x)

    trace = flat(overwrite, x4(), x4())
    first, second = ops(trace, "copy_")
    other = {id(first): second, id(second): first}
    cosine = ops(trace, "cos")[0]
    moved = [cosine, *(other.get(id(bsym), bsym) for bsym in trace.bound_symbols if bsym is not cosine)]
    found = judge(analyse(trace), with_symbols(trace, moved), STRICT)
    assert Kind.WAW in kinds(found)
    assert judge(analyse(trace), trace, STRICT) == ()


def test_write_into_another_tensor() -> None:
    """CSE takes two tensors with equal values for one; the program writes one of them."""

    def equal(x, y):
        a, b = prims.sin(x), prims.sin(x)
        put(y, a)
        return prims.cos(a), prims.cos(b)

    trace = flat(equal, x4(), x4())
    a, b = ops(trace, "sin")
    swap = {variableify(b.output): a.output}
    bsyms = [bsym.from_bsym_swap_proxies(swap, skip_output=True) for bsym in trace.bound_symbols if bsym is not b]
    assert judge(analyse(trace), with_symbols(trace, bsyms), STRICT)
    assert judge(analyse(trace), trace, STRICT) == ()


# --- regions


def test_value_inside_a_region_keeps_its_state() -> None:
    """A region loads its inputs when it starts; what is computed from them later is of that time."""

    def late_use(x, y):
        updated = put(prims.mul(x, y), x)
        return updated, prims.sin(y)

    assert one_region(late_use, x4(), x4()).hazards() == ()


def test_read_of_the_old_name_inside_a_region() -> None:
    """The region loaded the argument before its update: the read must see the update, and does not."""

    def by_name(x, y):
        updated = put(prims.sin(y), x)
        return updated, prims.cos(x)

    assert Kind.RAW in kinds(one_region(by_name, x4(), x4()).hazards())


def test_read_of_the_result_inside_a_region() -> None:
    def by_result(x, y):
        updated = put(prims.sin(y), x)
        return updated, prims.cos(updated)

    assert one_region(by_result, x4(), x4()).hazards() == ()


def keep_a_clone(x, y):
    kept = x.clone()
    x.add_(y)
    return kept


def keep_a_computation(x, y):
    kept = x * 1.5
    x.add_(y)
    return kept


def keep_a_clone_of_the_other(x, y):
    kept = y.clone()
    x.add_(y)
    return kept


@pytest.mark.parametrize("fusion_type", ["consecutive", "dataflow"])
def test_returned_clone_is_its_input(fusion_type: str) -> None:
    """nvFuser returns a clone as the tensor that it was made from, so that it changes with it."""
    found = stock(keep_a_clone, x4(), x4(), fusion_type=fusion_type).hazards()
    assert kinds(found) == {Kind.WAR}
    assert found[-1].read.sym.id is PrimIDs.RETURN
    for twin in (keep_a_computation, keep_a_clone_of_the_other):
        assert stock(twin, x4(), x4(), fusion_type=fusion_type).hazards() == ()


def test_swap_through_a_clone() -> None:
    def swap(x, y):
        kept = x.clone()
        x.copy_(y)
        y.copy_(kept)

    def through_a_value(x, y):
        kept = x @ y
        x.copy_(y)
        y.copy_(kept)

    assert Kind.WAR in kinds(stock(swap, x4(), x4()).hazards())
    assert stock(through_a_value, x4(), x4()).hazards() == ()


def test_view_that_a_region_computes_does_not_follow_its_tensor() -> None:
    """A result that is a view in eager must change with its tensor; computed in a region it may not."""

    def view_and_write(x, y):
        view = x.t()
        beside = view * y
        x.add_(1)
        return view + 1, beside

    found = stock(view_and_write, x4(), x4()).hazards(*Looser)
    fusion = stock(view_and_write, x4(), x4())
    assert kinds(found) <= {Kind.RAW, Kind.WAR}
    assert bool(found) == any(ops(region, "transpose") for region in fusion.regions)


@pytest.mark.parametrize(("skip", "wrong"), [(False, True), (True, False)])
def test_dataflow_order(skip: bool, wrong: bool) -> None:
    """With "dataflow" nothing orders an earlier read before a later write of another name."""
    fusion = stock(write_nobody_reads, x4(), x4(), fusion_type="dataflow", skip=skip)
    assert (Kind.WAR in kinds(fusion.hazards())) == wrong
    assert fusion.hazards()


# --- the backward


def test_save_that_is_overwritten() -> None:
    fusion = stock(save_then_write, leaf())
    [hazard] = [hazard for hazard in fusion.hazards() if hazard.kind is Kind.SAVED]
    assert hazard.read.sym.name == "cos"  # the sine's derivative
    assert hazard.may.bsym.sym.name == "copy_"
    assert hazard.must is None


def test_hazards_of_a_program_are_its_own() -> None:
    """They depend on no order of execution: the trace itself has the wrong gradient, or eager refuses it."""
    found = program_hazards(program_of(write_a_view, leaf()))
    assert {hazard.region for hazard in found} == {None}
    assert all(hazard.must is hazard.may for hazard in found)
    assert program_hazards(program_of(recomputed_after_the_write, x4(), x4())) == ()


@pytest.mark.parametrize("mode", ["rewrite", "raise", "fallback"])
@pytest.mark.parametrize("fn", [lambda x: x.mul_(2), write_a_view_of_a_leaf], ids=["leaf", "view of a leaf"])
def test_write_that_eager_refuses_is_refused(fn: Callable, mode: str) -> None:
    with pytest.raises(RuntimeError, match="leaf Variable that requires grad is being used in an in-place operation"):
        fn(leaf())
    with pytest.raises((HazardError, RuntimeError), match="leaf Variable that requires grad"):
        thunder.jit(fn, executors=[guarded_nvfuser_ex], guard_on_hazard=mode)(leaf())


def test_overlap_needs_a_write() -> None:
    assert overlap_hazards(one_region(lambda x, y: put(prims.mul(x, y), x), x4(), x4()).program) == ()
    [hazard] = _overlapping(lambda x, y: put(prims.mul(x, y), y))
    assert hazard.may.bsym.sym.name == "copy_"


# --- the order of execution


def write_in_forward(x, y):
    y.mul_(2)
    return (x * y).sin()


def write_nobody_needs(x, y):
    a = x.exp()
    y.add_(1)
    return a * 2


def write_a_local_copy(x, y):
    local = y.clone()
    local.mul_(x)
    local.add_(1)
    return local @ x


def save_a_result_and_write(x, y):
    a = (x * y).exp()
    y.mul_(a)
    return a + y @ x


def many_results(x, y):
    a, b = x.sin(), (x @ y).tanh()
    y.copy_(y * 2)
    return a, b, y, (a * b).sum()


JOINT = (write_in_forward, write_nobody_needs, write_a_local_copy, many_results, save_a_result_and_write)


@pytest.mark.parametrize("fn", JOINT)
@pytest.mark.parametrize("skip", [False, True], ids=["aliases", "skip"])
@pytest.mark.parametrize("fusion_type", ["consecutive", "dataflow"])
def test_order_is_thunders(fn: Callable, skip: bool, fusion_type: str) -> None:
    fusion, split_forward, split_backward = split(fn, leaf(), x4(), skip=skip, fusion_type=fusion_type)
    assert is_joint(fusion.fused)
    forward, backward = execution_order(fusion.fused)
    at = {out.name: i for i, bsym in enumerate(split_forward.bound_symbols) for out in bsym.flat_proxy_outs}
    positions = [at[out.name] for bsym in forward for out in bsym.flat_proxy_outs]
    assert positions == sorted(positions)
    behind = {out.name: i for i, bsym in enumerate(split_backward.bound_symbols) for out in bsym.flat_proxy_outs}
    gradients = [bsym for bsym in backward if bsym.sym.id is PrimIDs.GET_GRAD]
    made = [bsym for bsym in backward if bsym.sym.id is not PrimIDs.GET_GRAD]
    assert not {out.name for bsym in made for out in bsym.flat_proxy_outs} & set(at)
    kept = [behind[out.name] for bsym in made for out in bsym.flat_proxy_outs if out.name in behind]
    assert kept == sorted(kept)
    assert gradients
    assert kept


def test_order_of_a_plain_trace_is_its_own() -> None:
    fused = stock(recomputed_after_the_write, x4(), x4()).fused
    forward, backward = execution_order(fused)
    assert backward == []
    assert all(a is b for a, b in zip(forward, fused.bound_symbols[:-1], strict=True))


def test_write_that_no_result_needs_is_lost() -> None:
    """Thunder drops a region without outputs, and with it the write that the caller waits for."""

    def between_products(x, y):
        a = x @ x
        y.add_(1)
        return a @ x

    def returned(x, y):
        a = x @ x
        updated = y.add_(1)
        return a @ x, updated

    fusion = stock(between_products, leaf(), x4(), skip=True)
    assert not any(ops(bsym, "copy_") for part in execution_order(fusion.fused) for bsym in part)
    assert kinds(fusion.hazards()) == {Kind.LOST}
    assert stock(returned, leaf(), x4(), skip=True).hazards() == ()


# --- no hazards, no difference


@pytest.mark.parametrize("seed", range(24))
def test_traces_without_hazards_are_right(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """What Thunder's own passes make of a random program gives eager's results, unless the judge objects.

    Regions are run under both schedules, whatever the contract accepts.
    """
    monkeypatch.setattr(interpreter, "violations", lambda body: body.updates)
    program = generate(Seeded(seed), Features(statements=(3, 7)))
    recorder = Recorder()
    options = {"skip": seed % 2 == 0, "fusion_type": ("consecutive", "dataflow")[seed // 2 % 2]}
    jitted = jit(recorder, program.fn, **options)
    expected = run(program.fn, program.make_args)
    for which in Schedule:
        found = None
        with warnings.catch_warnings(), schedule(which), contextlib.suppress(AssertionError, NameError, RuntimeError):
            warnings.simplefilter("ignore")
            found = run(jitted, program.make_args)
            found.shared = expected.shared  # which results share memory is looked at elsewhere (results.py)
        if recorder.fused is None:
            return  # Thunder's passes fail
        hazards = judge(analyse(recorder.trace), recorder.fused, STRICT)
        assert hazards or found is not None and differences(expected, found) == [], program.source


# --- time


def test_time_is_linear_in_a_region() -> None:
    def repeat(times: int) -> Fusion:
        def ops_of(x, y):
            value = x
            for _ in range(times):
                value = prims.add(prims.sin(value), y)
            return put(value, x), prims.cos(x)

        return one_region(ops_of, x4(), x4())

    assert repeat(10).hazards()
    few, many = repeat(100), repeat(800)
    assert calls(many.hazards) < 8 * 1.3 * calls(few.hazards)


def test_time_is_linear_in_the_writes() -> None:
    def repeat(times: int) -> tuple:
        def writes(x, y):
            for _ in range(times):
                x = put(prims.mul(prims.sin(x), y), x)
            return x

        trace = flat(writes, x4(), x4())
        return analyse(trace), trace, STRICT

    assert judge(*repeat(10)) == ()
    assert calls(judge, *repeat(800)) < 8 * 1.3 * calls(judge, *repeat(100))
