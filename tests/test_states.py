"""Buffers, states and what every read must see: the meaning of a program in program order."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from thunder.core import prims
from thunder.core.prims import PrimIDs
from thunder.core.proxies import variableify

from guarded_nvfuser.states import Program, analyse, is_joint, key_of, returned, writes_anything
from tests.traces import Recorder, calls, flat, jit, ops, program_of, put, trace_of

SKIP = pytest.mark.parametrize("skip", [False, True], ids=["aliases", "skip"])


def x4() -> torch.Tensor:
    return torch.ones(4, 4)


def leaf() -> torch.Tensor:
    return torch.ones(4, 4, requires_grad=True)


def seen_by(program: Program, op: str, index: int = 0) -> list[int]:
    """The states that the reads of a primitive must see, in the order of its operands."""
    bsym = [bsym for bsym in ops(program.trace, op) if bsym.sym.is_prim][index]
    entry = program.entries[key_of(bsym)]
    return [entry.sees[name] for name in entry.args]


def same_buffer(program: Program, a: str, b: str) -> bool:
    return program.buffer_of[a] == program.buffer_of[b]


def same_tensor(program: Program, a: str, b: str) -> bool:
    return program.tensor_of[a] == program.tensor_of[b]


# --- writes make states, reads see them


@SKIP
def test_every_write_makes_a_state(skip: bool) -> None:
    def twice(x):
        x.mul_(2)
        x.add_(1)
        return x + 1

    program = program_of(twice, x4(), skip=skip)
    buffer = program.buffer_of[program.arguments[0]]
    assert program.writes.keys() == {buffer}
    assert [write.state for write in program.writes[buffer]] == [1, 2]
    assert program.final(buffer) == program.forward_final(buffer) == 2
    assert program.write(buffer, 0) is None
    assert [program.write(buffer, state).bsym for state in (1, 2)] == [w.bsym for w in program.writes[buffer]]
    assert program.mutates


def test_functional_twin_makes_no_state() -> None:
    def twice(x):
        return x * 2 + 1 + 1

    program = program_of(twice, x4())
    assert not program.mutates
    assert program.final(program.buffer_of[program.arguments[0]]) == 0


@SKIP
def test_reads_see_the_state_of_program_order(skip: bool) -> None:
    def between(x):
        a = x.sin()
        x.mul_(2)
        b = x.cos()
        x.add_(1)
        return a, b, x.exp()

    program = program_of(between, x4(), skip=skip)
    assert [seen_by(program, op) for op in ("sin", "cos", "exp")] == [[0], [1], [2]]
    assert seen_by(program, "copy_", 1) == [0, 1]  # a value of its own, and the target before the write


@SKIP
def test_result_sees_the_last_state(skip: bool) -> None:
    def update(x):
        x.mul_(2)
        return x

    program = program_of(update, x4(), skip=skip)
    [result] = program.results
    assert same_buffer(program, result, program.arguments[0])
    entry = program.entries[key_of(program.trace.bound_symbols[-1])]
    assert entry.sees[result] == 1


def test_a_write_is_known_by_its_target_and_its_op() -> None:
    trace = flat(lambda x, y: put(y, x), x4(), x4())
    program = analyse(trace)
    [[write]] = program.writes.values()
    assert write.target == trace.args[0].name
    assert write.bsym is ops(trace, "copy_")[0]
    assert not write.backward


# --- which names are one memory, and which are one tensor


@SKIP
def test_view_shares_its_base_and_is_another_tensor(skip: bool) -> None:
    def through(x):
        view = x.t()
        x.mul_(2)
        return view.cos()

    program = program_of(through, x4(), skip=skip)
    view = ops(program.trace, "transpose")[0].output.name
    assert same_buffer(program, view, program.arguments[0])
    assert not same_tensor(program, view, program.arguments[0])
    assert view in program.derived
    assert seen_by(program, "cos") == [1]


@SKIP
def test_clone_is_memory_of_its_own(skip: bool) -> None:
    def apart(x):
        copy = x.t().clone()
        x.mul_(2)
        return copy.cos()

    program = program_of(apart, x4(), skip=skip)
    copy = ops(program.trace, "clone")[-1].output.name
    assert not same_buffer(program, copy, program.arguments[0])
    assert copy not in program.derived
    assert seen_by(program, "cos") == [0]


@SKIP
def test_write_through_a_view_writes_the_base(skip: bool) -> None:
    def through(x):
        x[:2].mul_(2)
        return x.cos()

    program = program_of(through, x4(), skip=skip)
    assert program.final(program.buffer_of[program.arguments[0]]) == 1
    assert seen_by(program, "cos") == [1]


def test_pieces_of_one_tensor_are_one_buffer() -> None:
    """The trace does not say whether views overlap: the worst case."""

    def pieces(x):
        upper, lower = x[:2], x[2:]
        upper.mul_(2)
        return lower.cos()

    assert seen_by(program_of(pieces, x4()), "cos") == [1]


def test_copys_result_is_its_target() -> None:
    trace = flat(lambda x, y: put(y, x), x4(), x4())
    program, (x, y) = analyse(trace), (proxy.name for proxy in trace.args)
    result = ops(trace, "copy_")[0].output.name
    assert same_buffer(program, result, x)
    assert same_tensor(program, result, x)
    assert not same_buffer(program, result, y)
    assert program.bound[result] == 1


def test_update_aliases_gives_names_to_tensors() -> None:
    trace = flat(lambda x, y: prims.update_aliases((x, y)), x4(), x4())
    program = analyse(trace)
    new = [out.name for out in ops(trace, "update_aliases")[0].flat_proxy_outs]
    for alias, argument in zip(new, program.arguments, strict=True):
        assert same_tensor(program, alias, argument)
        assert same_buffer(program, alias, argument)
    assert not same_buffer(program, *new)


def test_alias_is_bound_to_the_state_in_which_it_was_made() -> None:
    def rename_after(x, y):
        put(y, x)
        return prims.update_aliases((x,))

    trace = flat(rename_after, x4(), x4())
    program = analyse(trace)
    [alias] = ops(trace, "update_aliases")[0].flat_proxy_outs
    assert program.bound[program.arguments[0]] == 0
    assert program.bound[alias.name] == 1


def test_arguments_that_overlap_are_one_buffer() -> None:
    trace = flat(lambda x, y: (put(x + 1, x), y * 2), x4(), x4())
    x, y = (proxy.name for proxy in trace.args)
    apart, overlapping = analyse(trace), analyse(trace, ((x, y),))
    assert not same_buffer(apart, x, y)
    assert seen_by(apart, "mul") == [0]
    assert same_buffer(overlapping, x, y)
    assert not same_tensor(overlapping, x, y)
    assert seen_by(overlapping, "mul") == [1]


def test_caller_sees_inputs_and_results_only() -> None:
    def local(x):
        y = x + 1
        y.mul_(2)
        return y * 3

    program = program_of(local, x4())
    [buffer] = program.writes
    assert buffer not in program.inputs
    assert program.inputs == {program.buffer_of[program.arguments[0]]}
    assert buffer not in {program.buffer_of[name] for name in program.results}


def test_computed_values_are_buffers_of_their_own() -> None:
    trace = flat(lambda x: (x + 1, x + 1), x4())
    program = analyse(trace)
    assert len({program.buffer_of[name] for name in (*program.arguments, *program.results)}) == 3
    assert not program.derived


# --- what is asked of a trace


def test_key_survives_other_operands() -> None:
    trace = flat(lambda x, y: x * 2 + y, x4(), x4())
    mul, (x, y) = ops(trace, "mul")[-1], trace.args
    swapped = mul.from_bsym_swap_proxies({variableify(x): y}, skip_output=True)
    assert [proxy.name for proxy in swapped.flat_proxy_args] == [y.name]
    assert key_of(swapped) == key_of(mul)
    assert key_of(ops(trace, "add")[-1]) != key_of(mul)


def test_key_of_an_op_without_results_is_its_operands() -> None:
    first, second = (flat(fn, x4(), x4()).bound_symbols[-1] for fn in (lambda x, y: x, lambda x, y: y))
    assert first.sym.id is second.sym.id is PrimIDs.RETURN
    assert key_of(first) != key_of(second)


@pytest.mark.parametrize(
    ("fn", "expected"),
    [
        (lambda x: x.mul_(2), True),
        (lambda x: x[:2].copy_(x[2:]), True),
        (lambda x: x * 2, False),
        (lambda x: x.clone().view(16), False),
    ],
    ids=["method", "through a view", "computation", "view of a copy"],
)
def test_writes_anything(fn: Callable, expected: bool) -> None:
    assert writes_anything(trace_of(fn, x4())) == expected


def test_returned_by_a_plain_trace() -> None:
    trace = flat(lambda x, y: (x, {"sum": x + y}), x4(), x4())
    results, gradients = returned(trace)
    assert [proxy.name for proxy in results] == [trace.args[0].name, ops(trace, "add")[-1].output.name]
    assert not gradients
    assert not is_joint(trace)


def test_returned_by_a_joint_trace() -> None:
    trace = trace_of(lambda x, y: (x * y, y + 1), leaf(), x4())
    results, gradients = returned(trace)
    assert is_joint(trace)
    assert [tuple(proxy.shape) for proxy in results] == [(4, 4), (4, 4)]
    assert len(gradients) == 1  # y requires none
    assert not {proxy.name for proxy in results} & {proxy.name for proxy in gradients}


def test_tracked_names_depend_on_what_requires_grad() -> None:
    program = program_of(lambda x, y: (x * y, y + 1, x > y), leaf(), x4())
    assert program.joint
    assert [name in program.tracked for name in program.arguments] == [True, False]
    assert [name in program.tracked for name in program.results] == [True, False, False]
    multiply, add = ops(program.trace, "mul")[0], ops(program.trace, "add")[0]
    assert program.tracks(multiply)
    assert not program.tracks(add)


# --- what backward reads


def eager_refuses(fn: Callable, *args: torch.Tensor) -> bool:
    """Whether eager's backward finds that a saved tensor was modified."""
    try:
        fn(*args).sum().backward()
    except RuntimeError as error:
        assert "modified by an inplace operation" in str(error)
        return True
    return False


def save_then_write(x):
    y = x * 1.0
    a = y.sin()
    y.mul_(2)
    return a + y


def write_then_save(x):
    y = x * 1.0
    y.mul_(2)
    return y.sin() + y


def save_the_result(x):
    y = x * 1.0
    a = y.exp()
    y.mul_(2)
    return a + y


def save_an_argument(x, y):
    a = x * y
    y.mul_(2)
    return a


def save_a_copy(x, y):
    a = x * y.clone()
    y.mul_(2)
    return a


@pytest.mark.parametrize(
    ("fn", "args"),
    [
        (save_then_write, (leaf,)),
        (write_then_save, (leaf,)),
        (save_the_result, (leaf,)),
        (save_an_argument, (leaf, x4)),
        (save_a_copy, (leaf, x4)),
    ],
)
def test_stale_saves_are_what_eager_refuses(fn: Callable, args: tuple[Callable, ...]) -> None:
    refused = eager_refuses(fn, *(make() for make in args))
    program = program_of(fn, *(make() for make in args))
    assert program.joint
    assert bool(program.stale_saves) == refused
    for save in program.stale_saves:
        assert save.entry.backward
        assert save.entry.sees[save.name] == save.state == 0
        assert program.final(program.buffer_of[save.name]) == 1


def test_backward_reads_of_a_name_in_two_states_are_ambiguous() -> None:
    """Without names per state, the trace does not say which of the two sines and cosines backward means."""

    def one_name(x):
        y = x * 1.0
        a = y.sin()
        y.mul_(2)
        return a + y.cos()

    program = program_of(one_name, leaf(), skip=True)
    buffer = next(iter(program.writes))
    assert program.ambiguous_saves
    assert {program.buffer_of[save.name] for save in program.ambiguous_saves} == {buffer}
    assert not program_of(one_name, leaf()).ambiguous_saves


def test_backward_reads_of_one_state_are_not_ambiguous() -> None:
    program = program_of(lambda x: (x * 1.0).sin() + (x * 1.0).cos(), leaf(), skip=True)
    assert not program.ambiguous_saves
    assert not program.stale_saves


def write_a_view_and_read_the_base(x):
    y = x * 1.0
    y[0].mul_(2)
    return y * 3


def write_and_read_one_name(x):
    y = x * 1.0
    y.mul_(2)
    return y * 3


def write_an_argument(x, y):
    y.copy_(x * 2)
    return y


def write_an_argument_with_itself(x, y):
    y.mul_(2)
    return x * y


@pytest.mark.parametrize(
    ("fn", "args", "missed"),
    [
        (write_a_view_and_read_the_base, (leaf,), True),
        (write_and_read_one_name, (leaf,), False),
        (write_an_argument, (leaf, x4), True),
        (write_an_argument_with_itself, (leaf, x4), False),
    ],
)
def test_untracked_reads_miss_a_gradient(fn: Callable, args: tuple[Callable, ...], missed: bool) -> None:
    """What autograd does not follow by proxies is a gradient that Thunder's own joint trace gets wrong."""
    program = program_of(fn, *(make() for make in args))
    assert bool(program.untracked) == missed
    in_eager, found = ([make() for make in args] for _ in range(2))
    fn(*in_eager).sum().backward()
    result = jit(Recorder(), fn)(*found)
    if result.requires_grad:
        result.sum().backward()
    right = found[0].grad is not None and torch.allclose(found[0].grad, in_eager[0].grad)
    assert right != missed


def test_old_name_after_a_write_is_untracked() -> None:
    """With `skip_inplace_alias_updates` a program reads by the name from before the write."""
    program = program_of(write_and_read_one_name, leaf(), skip=True)
    assert program.untracked
    assert all(read.write.state == 1 for read in program.untracked)
    assert not program_of(write_an_argument_with_itself, leaf(), x4(), skip=True).untracked


class WritesInBackward(torch.autograd.Function):
    """Doubles; its backward updates what it saved."""

    @staticmethod
    def forward(ctx, x, y):
        ctx.save_for_backward(y)
        return x * 2

    @staticmethod
    def backward(ctx, grad):
        (y,) = ctx.saved_tensors
        y.mul_(3)
        return grad * 2 * y, None


def test_writes_of_the_backward_are_apart() -> None:
    program = program_of(lambda x, y: WritesInBackward.apply(x, y), leaf(), x4())
    [buffer] = program.writes
    assert [write.backward for write in program.writes[buffer]] == [True]
    assert program.final(buffer) == 1
    assert program.forward_final(buffer) == 0


def test_time_is_linear() -> None:
    def repeat(times: int) -> Callable:
        def steps(x, y):
            for _ in range(times):
                x = put(x.sin() * y, x)
            return x

        return steps

    few, many = (flat(repeat(times), x4(), x4()) for times in (100, 800))
    assert calls(analyse, many) < 8 * 1.3 * calls(analyse, few)
