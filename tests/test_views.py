"""Views: which ops are views in every case, what undoes a write through one, and where strides decide."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from thunder.core import prims
from thunder.core.proxies import TensorProxy
from thunder.core.trace import get_tracectx

from guarded_nvfuser.interpreter import eager
from guarded_nvfuser.states import Program, analyse
from guarded_nvfuser.views import Uncertain, definite_views, uncertain, undo
from tests.support import Config, compare
from tests.test_effects import COPIES, MAYBE_VIEWS, SHARING_OPS, VIEWS, Op, as_function, ramp
from tests.traces import calls, flat, mystery, ops, program_of, put, trace_of

# --- views in every case


def definite_steps(op: Op) -> list[list[str]]:
    """The steps of each op of a function, but for those that only prepare operands."""
    trace = trace_of(as_function(op), ramp(4, 4))
    results = {proxy.name for proxy in trace.bound_symbols[-1].flat_proxy_args} - {trace.args[0].name}
    makers = [bsym for bsym in trace.bound_symbols[:-1] if results & {out.name for out in bsym.flat_proxy_outs}]
    return [[step.sym.name for step in definite_views(bsym)] for bsym in makers]




@pytest.mark.parametrize("name", list(VIEWS))
def test_views_are_definite(name: str) -> None:
    assert definite_steps(VIEWS[name])
    assert all(definite_steps(VIEWS[name]))


@pytest.mark.parametrize("name", ["contiguous", "flatten", "reshape", "reshape_as"])
def test_what_strides_decide_is_not_definite(name: str) -> None:
    found = definite_steps(MAYBE_VIEWS[name])
    assert [] in found
    assert all(steps in ([], ["shallow_copy"]) for steps in found)  # of the same shape, it is the tensor itself


def test_conversion_that_changes_nothing_is_definite() -> None:
    same_dtype, same_device, other = definite_steps(MAYBE_VIEWS["to"])
    assert same_dtype == same_device == ["shallow_copy"]
    assert other == []


@pytest.mark.parametrize(
    "op",
    [
        *(pytest.param(op, id=name) for name, op in COPIES.items()),
    ],
)
def test_computations_are_no_views(op: Op) -> None:
    found = definite_steps(op)
    assert found
    assert not any(found)


@pytest.mark.parametrize("name", ["getitem with a list", "meshgrid", "cpu", "ravel"])
def test_what_pytorch_decides_is_not_definite(name: str) -> None:
    assert not any(definite_steps(SHARING_OPS[name]))


@pytest.mark.parametrize(
    "fn",
    [lambda x, y: x.copy_(y), lambda x, y: x.mul_(y), lambda x, y: mystery(x, y)],
    ids=["copy", "update", "undeclared"],
)
def test_ops_that_may_write_are_no_views(fn: Callable) -> None:
    trace = trace_of(fn, ramp(4, 4), ramp(4, 4), skip=True)
    [bsym] = [bsym for bsym in trace.bound_symbols[:-1] if bsym.sym.name != "unpack_trivial"]
    assert definite_views(bsym) == []


def test_steps_lead_from_the_operand_to_the_result() -> None:
    trace = trace_of(lambda x: x[1, 2:], ramp(4, 4))
    [bsym] = [bsym for bsym in trace.bound_symbols if "getitem" in bsym.sym.name]
    steps = definite_views(bsym)
    assert len(steps) == 2
    names = [trace.args[0].name, *(step.flat_proxy_outs[0].name for step in steps)]
    assert [step.flat_proxy_args[0].name for step in steps] == names[:-1]
    assert names[-1] == bsym.output.name


def test_pieces_are_views_of_one_operand() -> None:
    trace = trace_of(lambda x: x.chunk(2), ramp(4, 4))
    [bsym] = ops(trace, "chunk")
    steps = definite_views(bsym)
    assert [step.flat_proxy_args[0].name for step in steps] == [trace.args[0].name] * 2
    assert [step.flat_proxy_outs[0].name for step in steps] == [out.name for out in bsym.flat_proxy_outs]


# --- undoing a view

UNDONE: dict[str, tuple[Callable, Callable]] = {
    "transpose": (lambda x: prims.transpose(x, (1, 0)), lambda t: t.t()),
    "permute": (
        lambda x: prims.transpose(prims.reshape(x, (2, 2, 4)), (2, 0, 1)),
        lambda t: t.view(2, 2, 4).permute(2, 0, 1),
    ),
    "reshape": (lambda x: prims.reshape(x, (2, 8)), lambda t: t.view(2, 8)),
    "squeeze": (lambda x: prims.squeeze(prims.reshape(x, (1, 16)), (0,)), lambda t: t.view(1, 16).squeeze(0)),
    "unsqueeze": (lambda x: prims.broadcast_in_dim(x, (4, 1, 4), (0, 2)), lambda t: t.unsqueeze(1)),
    "whole slice": (lambda x: prims.slice_prim(x, (0, 0), (4, 4)), lambda t: t[:, :]),
    "whole slice with steps": (lambda x: prims.slice_prim(x, (0, 0), (4, 4), (1, 1)), lambda t: t[::1, ::1]),
    "shallow copy": (prims.shallow_copy, lambda t: t),
}
PARTS: dict[str, Callable] = {
    "slice": lambda x: prims.slice_prim(x, (0, 0), (2, 4)),
    "slice with steps": lambda x: prims.slice_prim(x, (0, 0), (4, 4), (2, 1)),
    "expand": lambda x: prims.broadcast_in_dim(x, (3, 4, 4), (1, 2)),
    "steps over one row": lambda x: prims.slice_prim(prims.reshape(x, (1, 16)), (0, 0), (1, 16), (1, 2)),
}


def undone(view: Callable, value: torch.Tensor, x: torch.Tensor) -> torch.Tensor | None:
    """What `undo` makes of a view's base, through all the steps of the view, computed by PyTorch."""
    refused = False

    def base_after(x: TensorProxy, value: TensorProxy) -> TensorProxy:
        nonlocal refused
        view(x)
        steps = [bsym for bsym in get_tracectx().bound_symbols if bsym.sym.name != "unpack_trivial"]
        for step in reversed(steps):
            new = undo(step, value, step.flat_proxy_args[0])
            if new is None:
                refused = True
                break
            value = new
        return value

    trace = flat(base_after, x, value)
    if refused:
        return None
    [result] = eager(trace.bound_symbols[:-1], trace.args, [trace.output], "undone")(x, value)
    return result


@pytest.mark.parametrize("name", UNDONE)
def test_write_through_a_view_is_undone(name: str) -> None:
    view, in_eager = UNDONE[name]
    base = ramp(4, 4)
    value = -10 * torch.arange(16.0).reshape(in_eager(base).shape)
    found = undone(view, value, ramp(4, 4))
    in_eager(base).copy_(value)
    assert torch.equal(found, base)


@pytest.mark.parametrize("name", PARTS)
def test_write_to_a_part_is_not_undone(name: str) -> None:
    shape = {"slice": (2, 4), "slice with steps": (2, 4), "expand": (3, 4, 4), "steps over one row": (1, 8)}[name]
    assert undone(PARTS[name], torch.zeros(shape), ramp(4, 4)) is None


def test_diagonal_is_not_undone() -> None:
    """A view that Thunder computes shows a part only."""
    trace = trace_of(lambda x: x.diagonal(), ramp(4, 4))
    [bsym] = ops(trace, "diagonal")
    assert undo(bsym, bsym.output, trace.args[0]) is None


@pytest.mark.parametrize("name", [*UNDONE, "slice", "expand"])
@pytest.mark.parametrize("order", ["late", "early"])
def test_writes_through_views_are_eagers(name: str, order: str) -> None:
    views: dict[str, Callable] = {key: in_eager for key, (_, in_eager) in UNDONE.items()}
    view = views.get(name) or {"slice": lambda t: t[:2], "expand": lambda t: t.expand(3, 4, 4)[0]}[name]

    def write(x, y):
        seen = view(x)
        before = seen * 2
        seen.add_(1)
        return before, x * y, seen

    assert compare(write, lambda: (ramp(4, 4), ramp(4, 4)), Config(schedule=order)) == []


# --- where strides decide


def uncertain_in(fn: Callable) -> Uncertain:
    return uncertain(program_of(fn, ramp(4, 4), ramp(4, 4), skip=True))


def written_after(x, y):
    z = x.reshape(16)
    x.mul_(2)
    return z + 1


def written_through(x, y):
    x.reshape(16).mul_(2)
    return x + 1


def written_and_returned(x, y):
    z = x.reshape(16)
    x.mul_(2)
    return z


def contiguous_written_after(x, y):
    z = x.contiguous()
    x.mul_(2)
    return z + 1


def of_a_view_written_after(x, y):
    z = x.t().flatten()
    x.mul_(2)
    return z + 1


def view_written_after(x, y):
    z = x.view(16)
    x.mul_(2)
    return z + 1


def written_before(x, y):
    x.mul_(2)
    return x.reshape(16) + 1


def read_before_the_write(x, y):
    z = x.reshape(16) + 1
    x.mul_(2)
    return z


def other_written(x, y):
    z = x.reshape(16)
    y.mul_(2)
    return z + 1


def nothing_written(x, y):
    return x.reshape(16), x


def local_copy_written(x, y):
    z = x.clone().reshape(16)
    z.mul_(2)
    return z + 1


IN_DOUBT = (
    written_after,
    written_through,
    written_and_returned,
    contiguous_written_after,
    of_a_view_written_after,
)
DECIDED = (
    view_written_after,
    written_before,
    read_before_the_write,
    other_written,
    nothing_written,
    local_copy_written,
)


def returned_beside_its_tensor(x, y):
    x.mul_(2)
    return x.reshape(16), x


def returned_of_a_local(x, y):
    z = x + y
    z.mul_(2)
    return z.reshape(16), z


def read_only(x, y):
    x.mul_(2)
    return x.reshape(16) + 1, x


@pytest.mark.parametrize("fn", IN_DOUBT)
def test_sharing_matters_if_a_side_is_written_and_the_other_seen(fn: Callable) -> None:
    program = program_of(fn, ramp(4, 4), ramp(4, 4), skip=True)
    assert set(uncertain(program).buffers) == {program.buffer_of[program.arguments[0]]}


@pytest.mark.parametrize("fn", DECIDED)
def test_sharing_does_not_matter_otherwise(fn: Callable) -> None:
    assert not uncertain_in(fn).buffers


@pytest.mark.parametrize("fn", [returned_beside_its_tensor, returned_of_a_local])
def test_result_beside_its_tensor_lasts(fn: Callable) -> None:
    program = program_of(fn, ramp(4, 4), ramp(4, 4), skip=True)
    found = uncertain(program)
    assert not found.buffers
    assert found.lasting == {id(bsym) for bsym in program.trace.bound_symbols if bsym.sym.name == "reshape"}


@pytest.mark.parametrize("fn", [read_only, nothing_written, view_written_after])
def test_what_nobody_can_tell_apart_does_not_last(fn: Callable) -> None:
    assert not uncertain_in(fn).lasting


@pytest.mark.parametrize("fn", [*IN_DOUBT, *DECIDED, returned_beside_its_tensor, returned_of_a_local, read_only])
@pytest.mark.parametrize("permuted", [False, True], ids=["dense", "permuted"])
def test_strides_decide_as_in_eager(fn: Callable, permuted: bool) -> None:
    def args() -> tuple[torch.Tensor, torch.Tensor]:
        return (ramp(4, 4).t() if permuted else ramp(4, 4)), ramp(4, 4)

    if fn is view_written_after and permuted:
        with pytest.raises(RuntimeError):
            fn(*args())
    else:
        assert compare(fn, args, Config()) == []


def test_time_is_linear() -> None:
    def repeat(times: int) -> Program:
        def steps(x, y):
            for _ in range(times):
                flattened = prims.reshape(x, (16,))
                x = put(prims.mul(x, y), x)
                y = prims.mul(prims.reshape(flattened, (4, 4)), y)
            return x, y

        return analyse(flat(steps, ramp(4, 4), ramp(4, 4)))

    assert len(uncertain(repeat(3)).buffers) == 1
    assert calls(uncertain, repeat(400)) < 8 * 1.3 * calls(uncertain, repeat(50))
