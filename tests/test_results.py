"""Results: which tensors they are, which memory they share, and that nothing of the forward is lost or delayed."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import thunder
import torch

from guarded_nvfuser.executor import InterpretableNvFuserExecutor
from guarded_nvfuser.hazards import is_region
from tests.support import Config, compare, jit

MODES = ("rewrite", "raise", "fallback")


def x_and_w(*, grad: bool = False) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return torch.randn(4, 4, generator=generator), torch.randn(4, 4, generator=generator).requires_grad_(grad)


def share(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.untyped_storage().data_ptr() == b.untyped_storage().data_ptr()


def stock(fn: Callable) -> Callable:
    return thunder.jit(fn, executors=[InterpretableNvFuserExecutor("stock_nvfuser")])


# --- writes belong to the forward


def scale_beside(x, w):
    x.mul_(2)
    return w * 3


def scale_statistics(x, w):
    x.mul_(0.9).add_(w.detach().mean(0), alpha=0.1)
    return w.sin()


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("fn", [scale_beside, scale_statistics])
def test_write_stays_in_the_forward(fn: Callable, mode: str) -> None:
    """A write that no result needs happens in the call, backward or not, and never in the backward."""
    jitted = jit(fn, Config(mode))
    x, w = x_and_w(grad=True)
    expected_x, expected_w = x_and_w(grad=True)
    for _ in range(2):
        result, expected = jitted(x, w), fn(expected_x, expected_w)
        assert torch.allclose(x, expected_x)
    result.sum().backward()
    expected.sum().backward()
    assert torch.allclose(x, expected_x)
    assert torch.allclose(w.grad, expected_w.grad)
    written = [op for op in all_names(thunder.last_traces(jitted)[-1]) if op == "copy_"]
    assert written
    assert "copy_" not in all_names(thunder.last_backward_traces(jitted)[-1])


def all_names(trace: thunder.core.trace.TraceCtx) -> list[str]:
    found = []
    for bsym in trace.bound_symbols:
        found += [sub.sym.name for sub in bsym.subsymbols] if is_region(bsym) else [bsym.sym.name]
    return found


@pytest.mark.parametrize("mode", MODES)
def test_write_without_results_is_not_lost(mode: str) -> None:
    """A function that returns nothing still writes."""

    def fn(x, w):
        x.copy_(w)

    x, w = x_and_w()
    assert jit(fn, Config(mode))(x, w) is None
    assert torch.equal(x, w)


# --- results with memory of their own


@pytest.mark.parametrize("mode", MODES)
def test_equal_results_are_two_tensors(mode: str) -> None:
    """Two results with equal values are two tensors, as in eager; CSE would return one for both."""

    def fn(x, w):
        return x + w, x + w, x * w

    first, second = stock(fn)(*x_and_w())[:2]
    assert first is second
    first, second, third = jit(fn, Config(mode))(*x_and_w())
    assert not share(first, second)
    first.zero_()
    assert torch.equal(second, sum(x_and_w()))
    assert torch.equal(third, x_and_w()[0] * x_and_w()[1])


@pytest.mark.parametrize("mode", ["rewrite", "fallback"])
def test_equal_results_are_two_tensors_with_gradients(mode: str) -> None:
    """Each of them has its own part in the gradient."""

    def fn(x, w):
        a, b = w * x, w * x
        return a, b

    x, w = x_and_w(grad=True)
    a, b = jit(fn, Config(mode))(x, w)
    assert not share(a, b)
    (a.sum() + 3 * b.sum()).backward()
    assert torch.allclose(w.grad, 4 * x)


@pytest.mark.parametrize(
    "expression",
    [
        "x.clone()",
        "x.contiguous().clone()",
        "(x * 1.0)",
        "x.double().float()",
        "x.reshape(16).clone().reshape(4, 4)",
        "x.t().clone().t()",
        "torch.cat([x], 0)",
        "x.unsqueeze(0).sum(0)",
        "(x + 0)",
    ],
)
def test_a_computed_result_is_not_the_argument(expression: str) -> None:
    """A result that eager computes never shares memory with an argument, though it holds the same values."""
    scope: dict = {"torch": torch}
    exec(f"def fn(x, w):\n    return {expression}, w * 2\n", scope)
    x, w = x_and_w()
    assert not share(scope["fn"](x, w)[0], x)
    found, _ = jit(scope["fn"], Config("rewrite"))(x, w)
    assert not share(found, x)
    assert torch.equal(found, x)


@pytest.mark.parametrize(
    "expression",
    [
        "x",
        "x.view(16)",
        "x.t()",
        "x[1:]",
        "x.contiguous()",
        "x.float()",
        "x.reshape(2, 8)",
        "x.expand(3, 4, 4)",
        "x.detach()",
    ],
)
@pytest.mark.parametrize("written", [False, True])
def test_a_view_of_the_argument_is_one(expression: str, written: bool) -> None:
    """A result that is a view in eager shares the argument's memory, written or not, with eager's strides."""
    scope: dict = {"torch": torch}
    write = "x.mul_(2)\n    " if written else ""
    exec(f"def fn(x, w):\n    {write}return {expression}, w * 2\n", scope)
    found, _ = jit(scope["fn"], Config("rewrite"))(*(args := x_and_w()))
    expected, _ = scope["fn"](*(twins := x_and_w()))
    assert share(found, args[0])
    assert (found.shape, found.stride()) == (expected.shape, expected.stride())
    assert torch.equal(found, expected)
    assert torch.equal(args[0], twins[0])


# --- results that are written arguments


def scaled(x, w):
    return x.mul_(w)


def scaled_through_views(x, w):
    x.view(16).mul_(w.view(16))
    return x


def scaled_twice_returned(x, w):
    x.mul_(w)
    return x, w + 1, x


def copied(x, w):
    return x.copy_(w)


def part_written(x, w):
    x[1:] = w[1:]
    return x


def swapped(x, w):
    t = x.clone()
    x.copy_(w)
    w.copy_(t)
    return x, w


HAZARDS_ON_STOCK = (part_written, swapped, scaled_through_views)  # refused in mode raise


@pytest.mark.parametrize(
    "fn, mode",
    [(fn, mode) for fn in (scaled, scaled_twice_returned, copied) for mode in MODES]
    + [(fn, mode) for fn in HAZARDS_ON_STOCK for mode in ("rewrite", "fallback")],
)
def test_a_written_argument_comes_back_as_itself(fn: Callable, mode: str) -> None:
    """Where eager returns the very argument, so does the compiled program: the same object, on every call."""
    jitted = jit(fn, Config(mode))
    for _ in range(2):
        args = x_and_w()
        results, expected = jitted(*args), fn(*(twins := x_and_w()))
        if not isinstance(results, tuple):
            results, expected = (results,), (expected,)
        for result, meant in zip(results, expected):
            assert torch.equal(result, meant)
            for arg, twin in zip(args, twins):
                assert (result is arg) == (meant is twin)
                assert torch.equal(arg, twin)


@pytest.mark.parametrize("mode", ["rewrite", "fallback"])
def test_results_in_containers_keep_their_shape(mode: str) -> None:
    """Nested results come back in eager's containers, numbers and None included, with written arguments among them."""

    def fn(x, w):
        x.add_(w)
        return {"x": x, "pair": (x * 2, [w, None]), "n": 3}

    x, w = x_and_w()
    found = jit(fn, Config(mode))(x, w)
    assert list(found) == ["x", "pair", "n"]
    assert found["x"] is x
    assert found["pair"][1][0] is w
    assert found["pair"][1][1] is None
    assert found["n"] == 3
    assert torch.allclose(found["pair"][0], sum(x_and_w()) * 2)


def views_and_writes(x, w):
    y = x * w
    v = y[0]
    y.add_(1)
    return y, v, y.t()


def aliases_of_a_temporary(x, w):
    y = x * w
    z = y.view(16)
    z.sin_()
    return z, y


def old_and_new(x, w):
    before = x * 1.0
    x.mul_(2)
    return before, x, x + 0


@pytest.mark.parametrize("mode", ["rewrite", "fallback"])
@pytest.mark.parametrize("fn", [views_and_writes, aliases_of_a_temporary, old_and_new])
def test_sharing_among_results_is_eagers(fn: Callable, mode: str) -> None:
    """Results share memory with each other and with arguments exactly where they do in eager."""
    for fusion_type in ("consecutive", "dataflow"):
        for order in ("late", "early"):
            assert compare(fn, x_and_w, Config(mode, fusion_type, schedule=order)) == []
