"""Traces of any length, as they reach a fusion pass: programs without and with mutation, in one region and in many."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import thunder
import torch
from thunder.core import prims
from thunder.core.prims import PrimIDs
from thunder.core.trace import TraceCtx, from_trace
from thunder.core.transform_common import dce
from thunder.core.update_aliases import insert_alias_updates
from thunder.executors.passes import _transform_for_operator_executor_execution
from thunder.extend import FusionExecutor, get_always_executors
from torch._subclasses.fake_tensor import FakeTensorMode

Make = Callable[[int], tuple[Callable, tuple[torch.Tensor, ...]]]
SIZES = (50, 100, 200, 400, 800, 1600, 3200, 6400, 12800)
_PRODUCT_EVERY = 16  # ops between two matrix products, which end a region


@dataclass(frozen=True)
class Synthetic:
    """A family of programs: `make(length)` gives a function of about that many ops, and its arguments."""

    name: str
    mutates: bool
    make: Make


def _tile(count: int) -> tuple[torch.Tensor, ...]:
    """CUDA tensors, fake ones: the passes look at them as at real ones, and a GPU is not needed."""
    with FakeTensorMode():
        return tuple(torch.empty(64, 64, device="cuda") for _ in range(count))


def pure(length: int) -> tuple[Callable, tuple]:
    """A chain of elementwise ops: one region."""

    def program(x, y):
        for _ in range(length // 2):
            x = (x * y).sin()
        return x

    return program, _tile(2)


def pure_products(length: int) -> tuple[Callable, tuple]:
    """The chain with a matrix product now and then: many regions."""

    def program(x, y):
        for index in range(length // 2):
            x = x @ y if index % (_PRODUCT_EVERY // 2) == 0 else x.cos()
            x = (x * y).sin() if index % 2 else x + y
        return x

    return program, _tile(2)


def in_place(length: int) -> tuple[Callable, tuple]:
    """Updates of four arguments in turn: one region once rewritten."""

    def program(a, b, c, d, y):
        for index in range(length // 2):
            target = (a, b, c, d)[index % 4]
            target.mul_(y)
            target.sin_()
        return a + b

    return program, _tile(5)


def in_place_products(length: int) -> tuple[Callable, tuple]:
    """A residual stream updated in place, with matrix products: many regions."""

    def program(x, y):
        for index in range(length // 4):
            h = x @ y if index % (_PRODUCT_EVERY // 4) == 0 else x * y
            x.add_(h.sin())
            x.mul_(0.5)
        return x

    return program, _tile(2)


def optimizer(length: int) -> tuple[Callable, tuple]:
    """Gradient descent with momentum: as many tensors as the program is long."""
    count = max(1, length // 4)

    def program(*tensors):
        for p, g, m in zip(tensors[:count], tensors[count : 2 * count], tensors[2 * count :]):
            m.mul_(0.9)
            m.add_(g)
            p.sub_(m * 0.1)

    return program, _tile(3 * count)


PROGRAMS = (
    Synthetic("pure", False, pure),
    Synthetic("pure_products", False, pure_products),
    Synthetic("in_place", True, in_place),
    Synthetic("in_place_products", True, in_place_products),
    Synthetic("optimizer", True, optimizer),
)


def traced(program: Callable, args: tuple) -> TraceCtx:
    """A program's trace with the return that `thunder.jit` makes.

    Thunder's tracer calls the function on proxies: it takes a fraction of the time that `thunder.jit`'s interpreter
    takes, and the ops are the same.
    """
    trace = thunder.trace()(program, *args)
    *body, last = trace.bound_symbols
    assert last.sym.id is PrimIDs.RETURN
    made = from_trace(trace)
    made.bound_symbols = [
        *body,
        prims.python_return.bind({"output": last.args[0], "flat_args": list(trace.args)}, output=None),
    ]
    return made


def for_fusion(trace: TraceCtx, executor: FusionExecutor, *, aliases: bool) -> TraceCtx:
    """A trace as `thunder.jit` hands it to an executor's fusion pass (thunder/executors/passes.py).

    Args:
        trace: what `traced` returned.
        executor: the fusion executor.
        aliases: whether to insert Thunder's barriers before in-place ops, as it does for its own executor.
    """
    if aliases:
        trace = insert_alias_updates(trace, [])
    return dce(_transform_for_operator_executor_execution(dce(trace), (executor, *get_always_executors())))
