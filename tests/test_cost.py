"""Structural costs: counts and bytes of small programs, worked out by hand, and of programs beside their twins."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import thunder
import torch

from guarded_nvfuser import Cost, cost, guarded_nvfuser_ex
from guarded_nvfuser.cost import size_of, trace_cost
from tests.quality import PAIRS, Pair
from tests.traces import Recorder, flat, jit

F32, BF16 = 4, 2  # bytes of an element
TILE = 16  # elements of the arguments below


def x4(dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.arange(16.0).reshape(4, 4).to(dtype)


def cost_of(fn: Callable, *args: torch.Tensor, **options) -> Cost:
    jitted = thunder.jit(fn, executors=[guarded_nvfuser_ex], **options)
    jitted(*(args or (x4(), x4())))
    return cost(jitted)


# --- regions


def one_op(x, y):
    return x + y


def many_ops(x, y):
    return ((x + y).sin() * y).exp()


def two_results(x, y):
    return x * 2, x * 3


def reduction(x, y):
    return (x * y).sum()


def constant(x, y):
    return torch.full((4, 4), 2.0)


def update(x, y):
    x.mul_(y)


def update_and_read(x, y):
    x.mul_(y)
    return x * 2


def overwrite(x, y):
    x.copy_(y.sin())


@pytest.mark.parametrize(
    ("fn", "tiles"),
    [(one_op, 3), (many_ops, 3), (two_results, 3), (constant, 1), (update, 3), (update_and_read, 4), (overwrite, 2)],
)
def test_region_moves_its_inputs_and_outputs_once(fn: Callable, tiles: int) -> None:
    """An update loads its target only if it reads it."""
    assert cost_of(fn) == Cost(1, 0, tiles * TILE * F32)


def test_region_moves_what_its_dtypes_take() -> None:
    assert cost_of(one_op, x4(torch.bfloat16), x4(torch.bfloat16)) == Cost(1, 0, 3 * TILE * BF16)
    assert cost_of(lambda x, y: x.double() * y, x4(), x4()).bytes >= 2 * TILE * F32 + TILE * 8


def test_scalar_result() -> None:
    assert cost_of(reduction) == Cost(1, 0, 2 * TILE * F32 + F32)


# --- ops that PyTorch runs


@pytest.mark.parametrize(
    ("fn", "ops", "elements"),
    [
        (lambda x, y: x @ y, 1, 3 * TILE),
        (lambda x, y: (x @ y) @ y, 2, 6 * TILE),
        (lambda x, y: x.copy_(y), 1, 2 * TILE),
        (lambda x, y: x.clone(), 1, 2 * TILE),
        (lambda x, y: (x.t(), y[1:], x.view(2, 8)), 0, 0),
        (lambda x, y: x, 0, 0),
    ],
    ids="product,products,copy,clone,views,nothing".split(","),
)
def test_op_moves_its_operands_and_results(fn: Callable, ops: int, elements: int) -> None:
    assert cost_of(fn) == Cost(0, ops, elements * F32)


@pytest.mark.parametrize(
    ("write", "elements"),
    [
        (lambda x, y: x.__setitem__(slice(0, 1), y[:1]), 4),
        (lambda x, y: x.__setitem__((slice(None), 2), y[0]), 4),
        (lambda x, y: x.__setitem__(torch.tensor([0, 2]), 1.0), 8),
    ],
    ids=["rows", "column", "index"],
)
def test_write_into_a_part_moves_the_part(write: Callable, elements: int) -> None:
    """Read the values, write them; the rest of the tensor stays where it is."""

    def write_and_multiply(x, y):
        write(x, y)
        return x @ y

    product = cost_of(lambda x, y: x @ y)
    found = cost_of(write_and_multiply)
    assert found.bytes - product.bytes == 2 * elements * F32
    assert found.ops - product.ops == 1


def test_write_by_a_mask_counts_the_whole() -> None:
    """How many elements a mask selects is data."""

    def write(x, y):
        x[y > 0] = 1.0

    assert cost_of(write) == Cost(1, 1, (TILE * F32 + TILE) + 2 * TILE * F32)


# --- both


def test_regions_and_ops_add_up() -> None:
    def between(x, y):
        return ((x + 1) @ y).sin()

    assert cost_of(between) == Cost(2, 1, (2 + 3 + 2) * TILE * F32)


def test_forward_and_backward_are_counted() -> None:
    jitted = thunder.jit(lambda x, y: (x * y).sum(), executors=[guarded_nvfuser_ex])
    jitted(x4().requires_grad_(), x4())
    forward, backward = 2 * TILE * F32 + F32, F32 + 2 * TILE * F32
    assert cost(jitted) == Cost(2, 0, forward + backward)


def test_costs_add() -> None:
    assert Cost(1, 2, 3) + Cost(10, 20, 30) == Cost(11, 22, 33)


def test_functions_without_the_executor_have_a_cost() -> None:
    """Plain Thunder's, to compare with: every op alone."""
    jitted = thunder.jit(many_ops, executors=[])
    jitted(x4(), x4())
    assert cost(jitted) == Cost(0, 4, (3 + 2 + 3 + 2) * TILE * F32)


def test_last_call_is_counted() -> None:
    jitted = thunder.jit(one_op, executors=[guarded_nvfuser_ex])
    jitted(x4(), x4())
    small = cost(jitted)
    jitted(x4().repeat(2, 1), x4().repeat(2, 1))
    assert cost(jitted).bytes == 2 * small.bytes


def test_trace_that_only_renames_costs_nothing() -> None:
    assert trace_cost(flat(lambda x: x, x4())) == Cost(0, 0, 0)


@pytest.mark.parametrize(("dtype", "size"), [(torch.float32, 64), (torch.bfloat16, 32), (torch.bool, 16)])
def test_size(dtype: torch.dtype, size: int) -> None:
    [proxy] = flat(lambda x: x, x4().to(dtype)).args
    assert size_of(proxy) == size == x4().to(dtype).untyped_storage().nbytes()


def test_size_of_a_scalar_and_of_nothing() -> None:
    scalar, empty = flat(lambda x, y: (x, y), torch.tensor(1.0), torch.zeros(0, 4)).args
    assert (size_of(scalar), size_of(empty)) == (4, 0)


# --- misuse


def test_function_that_was_not_compiled() -> None:
    with pytest.raises(TypeError, match="not a compiled function"):
        cost(one_op)


def test_function_that_was_not_called() -> None:
    with pytest.raises(RuntimeError, match="call it once"):
        cost(thunder.jit(one_op, executors=[guarded_nvfuser_ex]))


# --- programs that mutate, beside their functional twins

QUICK = {"tanh_power", "add_mul_relu", "batch_norm_1d", "batch_norm_2d", "kv_cache", "softmax", "rms_norm"}


@pytest.mark.parametrize("pair", [pair for pair in PAIRS if pair.name in QUICK], ids=lambda pair: pair.name)
def test_mutation_costs_nothing(pair: Pair) -> None:
    program, twin = cost_of(pair.program, *pair.make_args()), cost_of(pair.twin, *pair.make_args())
    assert program.regions <= twin.regions
    assert program.ops <= twin.ops
    assert program.bytes <= twin.bytes


def test_stock_pays_for_barriers() -> None:
    """The count tells a program in pieces from one in one piece."""

    def tanh_power(x, y):
        x.tanh_()
        return x * x * x * x

    stock = jit(Recorder(), tanh_power)
    stock(x4(), x4())
    guarded = cost_of(tanh_power)
    assert guarded == Cost(1, 0, 3 * TILE * F32)
    assert cost(stock).regions > guarded.regions
    assert cost(stock).bytes > guarded.bytes
