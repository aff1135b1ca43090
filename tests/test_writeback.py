"""Write-backs: one copy per changed argument, in the region that computes its value or behind everything."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import thunder
import torch

from guarded_nvfuser import cost
from guarded_nvfuser.hazards import is_region
from guarded_nvfuser.options import schedule
from guarded_nvfuser.rewrite import rewrite
from guarded_nvfuser.states import analyse
from guarded_nvfuser.writeback import forward_end, peel
from tests.generator import compile_source
from tests.support import Config, differences, jit, run
from tests.traces import program_of


def three() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return tuple(torch.randn(4, 4, generator=generator) for _ in range(3))


def program(body: str) -> Callable:
    """A function of x, y, z whose statements are separated by semicolons."""
    lines = "".join(f"    {line.strip()}\n" for line in body.split(";"))
    return compile_source(f"def program(x, y, z):\n{lines}")


def compiled(body: str, fusion_type: str = "consecutive", **options: Any) -> Callable:
    jitted = jit(program(body), Config("rewrite", fusion_type), **options)
    jitted(*three())
    return jitted


def placed(jitted: Callable) -> tuple[int, int]:
    """How many write-backs stand in regions, and how many are copies of their own."""
    bsyms = thunder.last_traces(jitted)[-1].bound_symbols
    inside = sum(sub.sym.name == "copy_" for bsym in bsyms if is_region(bsym) for sub in bsym.subsymbols)
    return inside, sum(bsym.sym.name == "copy_" for bsym in bsyms)


def check(body: str, **options: Any) -> None:
    """Fail unless a program does what eager does, in both partitions and under both schedules."""
    fn = program(body)
    expected = run(fn, three)
    for fusion_type in ("consecutive", "dataflow"):
        jitted = jit(fn, Config("rewrite", fusion_type), **options)
        for order in ("late", "early"):
            with schedule(order):
                assert differences(expected, run(jitted, three)) == [], (body, fusion_type, order)


# body, write-backs in regions, copies of their own
PROGRAMS = [
    ("x.mul_(2); return x", 1, 0),
    ("x.mul_(y); y.add_(z); return z * 2", 2, 0),
    ("x.tanh_(); return x * x", 1, 0),
    ("return x.mul_(2) @ y", 1, 0),
    ("s = x.sum(0, keepdim=True); x.mul_(0.5); return y + s", 0, 1),  # the sum reads other elements than it writes
    ("x.copy_(x.t() * 2); return y + 1", 1, 0),
    ("x.copy_(x.t() + y)", 1, 0),
    ("x.copy_(y)", 0, 1),  # no region makes the value
    ("x.copy_(y @ z)", 0, 1),
    ("s = x.sin(); x.mul_(2); z.copy_(x @ y); return s * z", 0, 2),  # the old x is read behind the region
    ("t = y + z; x.copy_(t); return t.sum(), x", 1, 0),
]


@pytest.mark.parametrize("body, inside, outside", PROGRAMS, ids=[body for body, *_ in PROGRAMS])
def test_a_write_back_joins_the_region_of_its_value_where_the_contract_allows(
    body: str, inside: int, outside: int
) -> None:
    """A write-back is an update of the region that computes the value, or a copy, never both and never neither."""
    assert placed(compiled(body)) == (inside, outside)
    check(body)


@pytest.mark.parametrize("body, inside, outside", PROGRAMS, ids=[body for body, *_ in PROGRAMS])
def test_without_elision_every_write_back_is_a_copy(body: str, inside: int, outside: int) -> None:
    """guard_elide=False keeps all of them apart, behind everything, with the same results."""
    jitted = compiled(body, guard_elide=False)
    assert placed(jitted) == (0, inside + outside)
    names = [bsym.sym.name for bsym in thunder.last_traces(jitted)[-1].bound_symbols]
    names = [name for name in names if name not in ("python_del", "python_return")]
    assert set(names[-(inside + outside) :]) == {"copy_"}
    check(body, guard_elide=False)


def test_elision_saves_ops_and_bytes() -> None:
    """A joined write-back costs no op and does not load its value again."""
    body = "x.mul_(y); y.add_(1); return x * y"
    joined, apart = cost(compiled(body)), cost(compiled(body, guard_elide=False))
    assert joined.ops == 0
    assert apart.ops == 2
    assert joined.bytes < apart.bytes


def test_results_read_the_updated_argument() -> None:
    """What is computed later from a written-back value reads the argument: the value gets no memory of its own."""
    jitted = compiled("x.mul_(2); return x @ y")
    [region] = [bsym for bsym in thunder.last_traces(jitted)[-1].bound_symbols if is_region(bsym)]
    assert [out.name for out in region.flat_proxy_outs] == [
        out.name for sub in region.subsymbols if sub.sym.name == "copy_" for out in sub.flat_proxy_outs
    ]
    assert cost(jitted).bytes == 2 * 64 + 3 * 64  # the region's x in and out; the matmul's operands and result


def test_a_value_that_is_also_a_result_keeps_memory_of_its_own() -> None:
    """A result that eager computes is not the argument that it was also written to."""
    for body in ("s = x + y; x.copy_(s); return s", "s = x + y; x.copy_(s); z.copy_(s); return s, x"):
        check(body)
        x, y, z = three()
        found = jit(program(body), Config("rewrite"))(x, y, z)
        result = found[0] if isinstance(found, tuple) else found
        assert result is not x
        result.zero_()
        assert torch.equal(x, three()[0] + y)


def test_one_value_for_several_arguments() -> None:
    """Each argument gets the value, whether it joins or not."""
    for body in ("s = x + y; x.copy_(s); y.copy_(s)", "s = z.sin(); x.copy_(s); y.copy_(s); return x"):
        check(body)


def test_updates_that_are_at_odds_do_not_join_together() -> None:
    """Of write-backs that break the contract in one region, the others still join."""
    body = "s = x.sin(); x.mul_(2); y.mul_(3); return s @ z, x"
    assert placed(compiled(body)) == (1, 1)
    check(body)


@pytest.mark.parametrize(
    "body",
    [
        "s = x.sin(); x.mul_(2); return s + x @ y",
        "a = x @ y; x.add_(1); b = x @ y; return a + b",
        "a = x.sum(); x.mul_(2); y.mul_(a); return x.sum() + y.sum()",
        "a = (x @ y).sin(); x.copy_(a); y.copy_(a * 2); return z @ a",
        "x.mul_(y); y.mul_(x); z.add_(x @ y); x.sub_(z); return x",
        "x.copy_(y); y.mul_(2); return x @ z",
    ],
)
def test_old_states_are_read_before_they_are_written(body: str) -> None:
    """No write-back lands before somebody that still reads the argument's old state."""
    check(body)


def test_views_of_changed_arguments_that_are_returned() -> None:
    """A returned view of a changed argument is made from the updated memory, and does not keep the write-back out."""
    for body in ("x.mul_(2); return x.t()", "x.mul_(2); return x.view(16), x[0]"):
        assert placed(compiled(body)) == (1, 0)
        check(body)


# --- peeling


def rewritten(body: str) -> Any:
    traced = program_of(program(body), *three(), skip=True)
    return analyse(rewrite(traced).trace)


def test_peeling_takes_off_the_copies_at_the_end() -> None:
    """The peeled program writes nothing and returns the values in the places of the copies' results."""
    full = rewritten("x.mul_(2); y.add_(x); return x + y")
    peeled, tail = peel(full)
    assert not peeled.mutates
    assert [back.target.name for back in tail.backs] == ["x", "y"]
    flat = [arg.name for arg in peeled.trace.bound_symbols[-1].args[0]["flat_args"]]
    for back in tail.backs:
        assert [flat[position] for position in back.positions] == [back.value.name]
        assert back.copy in full.trace.bound_symbols
        assert back.copy not in peeled.trace.bound_symbols


def test_nothing_is_peeled_from_a_pure_program() -> None:
    """A program without write-backs is returned as it is."""
    pure = program_of(program("return x + y"), *three())
    peeled, tail = peel(pure)
    assert peeled is pure
    assert tail.backs == ()


def test_the_forward_ends_before_gradients_are_asked_for() -> None:
    """In a joint trace write-backs stand before the first gradient, so that they happen without a backward."""

    def fn(x, w):
        x.mul_(2)
        return w * x.detach() * 3

    x, w = three()[0], three()[1].requires_grad_()
    trace = program_of(fn, x, w).trace
    names = [bsym.sym.name for bsym in trace.bound_symbols]
    assert forward_end(trace.bound_symbols) == names.index("get_grad")
    assert forward_end(program_of(program("return x + y"), *three()).trace.bound_symbols) > 0
    jitted = jit(fn, Config("rewrite"))
    jitted(x, w)
    assert torch.equal(x, three()[0] * 2)
    assert placed(jitted) in ((1, 0), (0, 1))
