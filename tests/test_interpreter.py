"""Regions without a GPU: what the two schedules of the contract do, and what they share with nvFuser."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import thunder
import torch
from thunder.core import prims
from thunder.core.proxies import TensorProxy
from thunder.core.symbol import BoundSymbol
from thunder.core.trace import TraceCtx, tracectx

from guarded_nvfuser import guarded_nvfuser_ex
from guarded_nvfuser.executor import InterpretableNvFuserExecutor
from guarded_nvfuser.hazards import is_region
from guarded_nvfuser.interpreter import InterpretedRegion, eager, scheduled
from guarded_nvfuser.options import SCHEDULE_VARIABLE, Schedule, schedule
from tests.generator import put


def stock_region(fn: Callable, *args: Any) -> BoundSymbol:
    """The one region that Thunder's own passes form, without barriers and without their check."""
    jitted = thunder.jit(
        fn,
        executors=[InterpretableNvFuserExecutor("stock_nvfuser")],
        skip_inplace_alias_updates=True,
        disable_inplace_copy_check=True,
    )
    jitted(*[arg.clone() for arg in args])
    [region] = [bsym for bsym in thunder.last_traces(jitted)[-1].bound_symbols if is_region(bsym)]
    return region


def parts(region: BoundSymbol) -> tuple[Sequence[BoundSymbol], list, list, str]:
    return region.subsymbols, region.flat_proxy_args, region.flat_proxy_outs, region.sym.name


def under(which: Schedule, fn: Callable, *args: torch.Tensor) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Results of a function's region under a schedule, and its inputs afterwards."""
    region = stock_region(fn, *args)
    inputs = dict(zip(inspect.signature(fn).parameters, [arg.clone() for arg in args]))
    results = scheduled(*parts(region), which)(*[inputs[arg.name] for arg in region.flat_proxy_args])
    return results, list(inputs.values())


def x_and_w() -> tuple[torch.Tensor, torch.Tensor]:
    return torch.arange(1.0, 5.0).reshape(2, 2), torch.full((2, 2), 10.0)


def total_then_double(x):
    total = x.sum()
    x.mul_(2)
    return total


def test_late_reads_what_was_there_at_entry() -> None:
    """Under late, every read of an updated input sees its value at entry; the update lands at exit."""
    results, [after] = under(Schedule.LATE, total_then_double, x_and_w()[0])
    assert results[0].item() == 10
    assert torch.equal(after, x_and_w()[0] * 2)


def test_early_lands_as_soon_as_the_source_is_known() -> None:
    """Under early, reads that do not feed the update see what it wrote."""
    results, [after] = under(Schedule.EARLY, total_then_double, x_and_w()[0])
    assert results[0].item() == 20
    assert torch.equal(after, x_and_w()[0] * 2)


def test_schedules_differ_only_where_the_contract_allows_it() -> None:
    """A region that obeys the contract has one meaning; its updates come last under both schedules."""

    def scale(x, w):
        return put(x * w + 1, x)

    def square(x, w):
        h = x * w
        y = h * h
        put(h, x)
        return y

    for fn in (scale, square):
        outcomes = [under(which, fn, *x_and_w()) for which in Schedule]
        for left, right in zip(outcomes[0], outcomes[1]):
            assert all(torch.equal(a, b) for a, b in zip(left, right))


def test_updated_input_comes_back_as_itself() -> None:
    """The result of an update is the input's memory, as from nvFuser, not a copy."""
    region = stock_region(lambda x, w: x.mul_(w), *x_and_w())
    x, w = x_and_w()
    for which in Schedule:
        [result] = scheduled(*parts(region), which)(x, w)
        assert result is x


def test_readers_of_an_updates_result_read_its_source() -> None:
    """Inside a region the result of an update is the value that was computed, wherever the store happens."""

    def fn(x, w):
        r = put(x * w, x)
        return r + 1

    for which in Schedule:
        results, [after, _] = under(which, fn, *x_and_w())
        assert torch.equal(results[-1], x_and_w()[0] * 10 + 1)
        assert torch.equal(after, x_and_w()[0] * 10)


@pytest.mark.parametrize(
    "move",
    [
        lambda x: x.clone(),
        lambda x: x.t().clone(),
        lambda x: x.reshape(4).clone(),
    ],
    ids=["clone", "transposed", "reshaped"],
)
def test_moved_results_come_back_as_the_inputs_memory(move: Callable) -> None:
    """nvFuser returns a result that only moves an input's data as that input's memory; so does the interpreter."""
    region = stock_region(lambda x, w: (move(x), x * w), *x_and_w())
    x, w = x_and_w()
    results = scheduled(*parts(region), Schedule.LATE)(x, w)
    pointers = [result.untyped_storage().data_ptr() == x.untyped_storage().data_ptr() for result in results]
    assert sorted(pointers) == [False, True]


def test_a_clone_inside_stays_a_copy() -> None:
    """A clone whose values are computed with, and that nobody gets, is no alias of the input."""
    results, [after, _] = under(Schedule.LATE, lambda x, w: (x.clone() * w, w + 1), *x_and_w())
    assert torch.equal(results[0], x_and_w()[0] * 10)
    assert torch.equal(after, x_and_w()[0])


def test_eager_runs_in_program_order() -> None:
    """For layouts that nvFuser gets wrong, a region runs as PyTorch runs its ops: reads after a write see it."""

    def fn(x, w):
        before = x + w
        put(before, x)
        return before, x * w

    region = stock_region(fn, *x_and_w())
    x, w = x_and_w()
    results = dict(zip((out.name for out in region.flat_proxy_outs), eager(*parts(region))(x, w)))
    expected_x, expected_w = x_and_w()
    expected = fn(expected_x, expected_w)
    assert torch.equal(x, expected_x)
    assert any(torch.equal(result, expected[1]) for result in results.values())
    assert any(torch.equal(result, expected[0]) for result in results.values())


def test_lerp_is_known() -> None:
    """nvFuser has lerp, Thunder's PyTorch executor does not: the interpreter brings its own."""
    jitted = thunder.jit(lambda x, w: x.lerp_(w, 0.25) * 2, executors=[guarded_nvfuser_ex])
    x, w = x_and_w()
    [result, y] = jitted(x, w), x_and_w()[0]
    assert torch.allclose(result, y.lerp_(w, 0.25) * 2)
    assert torch.allclose(x, y)
    [region] = [bsym for bsym in thunder.last_traces(jitted)[-1].bound_symbols if is_region(bsym)]
    assert "lerp" in [sub.sym.name for sub in region.subsymbols]


def test_schedule_is_chosen_per_call(monkeypatch: pytest.MonkeyPatch) -> None:
    """One compiled function can be called under both schedules, by block or by variable, in any order."""
    region = stock_region(total_then_double, x_and_w()[0])
    interpreted = InterpretedRegion(region)
    totals = []
    for which in ("late", "early", "late", "early"):
        with schedule(which):
            totals.append(interpreted(x_and_w()[0])[0].item())
    assert totals == [10, 20, 10, 20]
    monkeypatch.setenv(SCHEDULE_VARIABLE, "early")
    assert interpreted(x_and_w()[0])[0].item() == 20
    monkeypatch.delenv(SCHEDULE_VARIABLE)
    assert interpreted(x_and_w()[0])[0].item() == 10
    assert repr(interpreted) == f"InterpretedRegion({region.sym.name})"


def test_two_updates_keep_program_order_when_late() -> None:
    """Late updates land in the order in which they stand."""

    def fn(x, w):
        put(w * 2, x)
        put(w * 3, x)
        return w + 1

    _, [after, _] = under(Schedule.LATE, fn, *x_and_w())
    assert torch.equal(after, torch.full((2, 2), 30.0))


def test_early_places_long_chains() -> None:
    """An update at the end of more ops than Python recurses is placed without recursion."""
    trace, count = TraceCtx(), 1500
    with tracectx(trace):
        x = TensorProxy("x", shape=(2,), device=thunder.devices.cpu, dtype=thunder.float32)
        value = x
        for _ in range(count):
            value = prims.add(value, 1.0)
        total = prims.sum(x, (0,))
        result = prims.copy_(value, x, grad_enabled=False)
    region = list(trace.bound_symbols)
    tensor = torch.zeros(2)
    [seen, _] = scheduled(region, [x], [total, result], "chain", Schedule.EARLY)(tensor)
    assert seen.item() == 2 * count
    assert torch.equal(tensor, torch.full((2,), float(count)))


def test_numbers_are_arguments_too() -> None:
    """A region that takes a number from its caller gets it under its own name."""
    jitted = thunder.jit(lambda x, scale: x.mul_(scale) + 1, executors=[guarded_nvfuser_ex], cache="symbolic values")
    for scale in (2.0, 3.0):
        x = torch.ones(2)
        assert torch.equal(jitted(x, scale), torch.full((2,), scale + 1))
        assert torch.equal(x, torch.full((2,), scale))
    assert thunder.cache_misses(jitted) == 1
