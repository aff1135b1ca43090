"""Common subexpressions: merged where nobody can tell, kept apart where memory or a write tells them apart."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import thunder
import torch
import torch.nn.functional as F
from thunder.core import prims
from thunder.core.trace import TraceCtx

from guarded_nvfuser import guarded_nvfuser_ex
from guarded_nvfuser.cse import merge_common
from guarded_nvfuser.hazards import is_region
from guarded_nvfuser.states import Program, analyse
from tests.support import Config, compare
from tests.traces import calls, flat, formed, ops, program_of, put


def x4() -> torch.Tensor:
    return torch.arange(16.0).reshape(4, 4)


def merged(program: Program, trace: TraceCtx | None = None) -> TraceCtx:
    return merge_common(program, trace or program.trace)


def count(trace: TraceCtx, name: str) -> int:
    """How often a trace computes a primitive, in regions or not."""
    return sum(bsym.sym.is_prim or bsym.sym.executor is not None for bsym in ops(trace, name) if not bsym.subsymbols)


def both(fn: Callable) -> tuple[int, int]:
    """How often the merged trace of a function of two tensors computes `sin`: in regions, and without any."""
    fusion = formed(fn, x4(), x4(), skip=True)
    assert fusion.regions
    program = program_of(fn, x4(), x4(), skip=True)
    return count(merged(fusion.program, fusion.fused), "sin"), count(merged(program), "sin")


# --- merged, and kept


def equal_reads(x, y):
    return x.sin() + x.sin() * y


def reads_across_a_write(x, y):
    a = x.sin() * y
    x.copy_(y)
    return a + x.sin()


def reads_across_a_write_to_another(x, y):
    a = x.sin() * 2
    y.copy_(y * 2)
    return a + x.sin()


def reads_through_a_view_across_a_write(x, y):
    view = x.t()
    a = view.sin() * y
    x.copy_(y)
    return a + view.sin()


def reads_after_a_write(x, y):
    x.copy_(y)
    return x.sin() + x.sin() * 2


def written_tensors(x, y):
    a, b = x.sin(), x.sin()
    a.copy_(y)
    return a * b * 2


def results(x, y):
    return x.sin(), x.sin()


def a_result_and_a_value(x, y):
    a = x.sin()
    return a, x.sin() + y


def results_behind_views(x, y):
    return x.sin().view(16), x.sin().view(16)


@pytest.mark.parametrize(
    ("fn", "expected"),
    [
        (equal_reads, 1),
        (reads_across_a_write_to_another, 1),
        (reads_after_a_write, 1),
        (reads_across_a_write, 2),
        (reads_through_a_view_across_a_write, 2),
        (written_tensors, 2),
        (results, 2),
        (a_result_and_a_value, 2),
        (results_behind_views, 2),
    ],
)
def test_what_is_computed_once(fn: Callable, expected: int) -> None:
    assert both(fn) == (expected, expected)


@pytest.mark.parametrize("fn", [reads_across_a_write, written_tensors, results, results_behind_views])
@pytest.mark.parametrize("mode", ["rewrite", "fallback"])
def test_what_is_kept_apart_is_right(fn: Callable, mode: str) -> None:
    for order in ("late", "early"):
        assert compare(fn, lambda: (x4(), x4() + 1), Config(mode=mode, skip=True, schedule=order)) == []


def test_equal_chains_are_merged_whole() -> None:
    def chains(x, y):
        return (x.sin() * y).exp() + (x.sin() * y).exp() * 2

    program = program_of(chains, x4(), x4())
    trace = merged(program)
    assert [count(trace, name) for name in ("sin", "exp")] == [1, 1]
    assert count(trace, "mul") == 2  # the other one doubles


@pytest.mark.parametrize(
    ("fn", "expected"),
    [
        (lambda x: (prims.mul(x, 2.0), prims.mul(x, 2.0)), 1),
        (lambda x: (prims.mul(x, 2.0), prims.mul(x, 3.0)), 2),
        (lambda x: (prims.mul(x, 2.0), prims.mul(prims.neg(x), 2.0)), 2),
    ],
    ids=["same", "constant", "operand"],
)
def test_constants_and_operands_tell_ops_apart(fn: Callable, expected: int) -> None:
    def summed(x):
        a, b = fn(x)
        return prims.add(a, b)

    assert count(merged(analyse(flat(summed, x4()))), "mul") == expected


def test_nothing_to_merge_leaves_the_regions_as_they_are() -> None:
    fusion = formed(lambda x, y: x.sin() + y.cos(), x4(), x4())
    [region] = [bsym for bsym in merged(fusion.program, fusion.fused).bound_symbols if is_region(bsym)]
    assert region is fusion.regions[0]


# --- regions


def test_regions_are_merged_each_for_itself() -> None:
    """A region repeats what another computes rather than load it: rematerialisation decides that."""

    def apart(x, y):
        a = x.sin() * 2
        b = a @ y
        return x.sin() * b

    fusion = formed(apart, x4(), x4())
    assert len(fusion.regions) == 2
    assert count(merged(fusion.program, fusion.fused), "sin") == 2


def test_merged_output_is_renamed_in_later_regions() -> None:
    def two_outputs(x, y):
        a, b = x.sin(), x.sin()
        c = (a * 2) @ (b * 2)
        return (c + a) * b

    fusion = formed(two_outputs, x4(), x4())
    before = fusion.regions[0]
    first, second = [b for b in merged(fusion.program, fusion.fused).bound_symbols if is_region(b)]
    names = [out.name for out in first.flat_proxy_outs]
    assert len(names) == len(set(names)) == len(before.flat_proxy_outs) - 2  # sin and its double, each once
    assert {arg.name for arg in second.flat_proxy_args} & set(names)
    inputs = [arg.name for arg in second.flat_proxy_args]
    assert len(inputs) == len(set(inputs))
    defined = {out.name for bsym in (first, *second.subsymbols) for out in bsym.flat_proxy_outs}
    used = {arg.name for bsym in second.subsymbols for arg in bsym.flat_proxy_args}
    assert used <= defined | set(inputs)


# --- random numbers

RANDOM: dict[str, Callable] = {
    "bernoulli": torch.bernoulli,
    "dropout": lambda x: F.dropout(x, 0.5),
    "poisson": torch.poisson,
    "rand": lambda x: torch.rand(1000),
    "rand_like": torch.rand_like,
    "rrelu": lambda x: F.rrelu(-x, training=True),
    "alpha_dropout": lambda x: F.alpha_dropout(x, 0.5, training=True),
    "dropout2d": lambda x: F.dropout2d(x[None, :, None, None], 0.5),
    "multinomial": lambda x: torch.multinomial(x, 50),
    "randint": lambda x: torch.randint(0, 100, (1000,)),
    "randn": lambda x: torch.randn(1000),
    "randn_like": torch.randn_like,
}


@pytest.mark.parametrize("pure", [True, False], ids=["pure", "writes"])
@pytest.mark.parametrize(
    "draw",
    [pytest.param(draw, id=name) for name, draw in RANDOM.items()],
)
def test_random_numbers_are_drawn_twice(draw: Callable, pure: bool) -> None:
    def twice(x, y):
        a, b = draw(x), draw(x)
        if not pure:
            y.mul_(2)
        return a + 1, b + 1

    args = torch.full((1000,), 0.5), torch.ones(4)
    assert not torch.equal(*twice(*args))
    assert not torch.equal(*thunder.jit(twice, executors=[guarded_nvfuser_ex])(*args))


def test_time_is_linear() -> None:
    def repeat(times: int) -> Program:
        def steps(x, y):
            for _ in range(times):
                x = put(prims.add(prims.mul(prims.sin(x), y), prims.mul(prims.sin(x), y)), x)
            return x

        return analyse(flat(steps, x4(), x4()))

    assert count(merged(repeat(60)), "sin") == 60
    assert calls(merged, repeat(480)) < 8 * 1.3 * calls(merged, repeat(60))
