"""Mode fallback: what stock would get wrong is left to PyTorch in program order, and nothing else is."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import thunder
import torch

from guarded_nvfuser import HazardWarning, Kind, cost, guarded_nvfuser_ex, verdicts
from guarded_nvfuser.executor import InterpretableNvFuserExecutor
from guarded_nvfuser.hazards import is_region
from tests.generator import put
from tests.support import CONFIGS, Config, compare, differences, jit, run

FALLBACK_CONFIGS = [
    Config("fallback", config.fusion_type, config.skip, config.schedule) for config in CONFIGS if not config.skip
]


def three() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return tuple(torch.randn(4, 4, generator=generator) for _ in range(3))


def stock_is_wrong(
    fn: Callable, *, fusion_type: str = "consecutive", skip: bool = False, backward: bool = False
) -> bool:
    """Whether Thunder's own executor gives something else than eager under one of the schedules, or fails."""
    stock = InterpretableNvFuserExecutor("stock_nvfuser")
    for order in ("late", "early"):
        config = Config(None, fusion_type, skip, order)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            try:
                found = run(jit(fn, config, stock), three, backward=backward)
            except (RuntimeError, AssertionError):
                return True
        if differences(run(fn, three, backward=backward), found):
            return True
    return False


def fused(jitted: Callable) -> list[str]:
    """The names of the ops inside regions."""
    bsyms = filter(is_region, thunder.last_traces(jitted)[-1].bound_symbols)
    return [sub.sym.name for bsym in bsyms for sub in bsym.subsymbols]


def left(jitted: Callable) -> list[str]:
    """The names of the ops that PyTorch runs, without renames and bookkeeping."""
    names = [bsym.sym.name for bsym in thunder.last_traces(jitted)[-1].bound_symbols if not is_region(bsym)]
    return [name for name in names if name not in ("update_aliases", "python_del", "python_return", "unpack_trivial")]


def check(fn: Callable) -> None:
    for config in FALLBACK_CONFIGS:
        assert compare(fn, three, config) == [], config


# --- common subexpressions


def test_cse_across_a_write() -> None:
    """One expression before and after a write is two values; Thunder's CSE takes the second for the first."""

    def fn(x, y, z):
        a = x + y
        put(a * 2, x)
        b = x + y
        return a, b

    assert stock_is_wrong(fn)
    check(fn)


def test_cse_merges_no_written_tensors() -> None:
    """Two tensors with equal values of which one is then written stay two."""

    def fn(x, y, z):
        a = x.sin()
        b = x.sin()
        a.mul_(y)
        return a, b

    assert stock_is_wrong(fn)
    check(fn)


def test_cse_still_merges_what_nobody_writes() -> None:
    """Beside a hazard, equal pure values are computed once."""

    def fn(x, y, z):
        before = x.sin()
        x.mul_(2)
        return before + x @ y, z.exp() * 2, z.exp() * 3

    jitted = jit(fn, Config("fallback"))
    jitted(*three())
    assert fused(jitted).count("exp") == 1
    check(fn)


# --- dead writes and order


def test_dead_write() -> None:
    """A write to memory that nobody looks at again is dropped; Thunder's dataflow runs it behind the return."""

    def fn(x, y, z):
        scratch = x + 1
        scratch.mul_(y)
        return x * 3

    assert stock_is_wrong(fn, fusion_type="dataflow")
    check(fn)
    jitted = jit(fn, Config("fallback", "dataflow"))
    jitted(*three())
    assert "copy_" not in fused(jitted) + left(jitted)


def test_a_write_to_an_argument_is_never_dead() -> None:
    """What the caller can see is written, though no result needs it."""

    def fn(x, y, z):
        before = x.sin()
        x.mul_(2)
        y.copy_(z)
        return before + x @ z

    check(fn)


def test_recomputed_read() -> None:
    """A value that rematerialisation would compute again from the overwritten tensor is computed before the write."""

    def fn(x, y, z):
        a = x.sin()
        x.mul_(2)
        b = x @ y
        return a + b

    assert stock_is_wrong(fn)
    check(fn)


def test_dataflow_swaps_nothing() -> None:
    """ThunderFX's partition does not move a read behind a write."""

    def fn(x, y, z):
        a = x @ y
        x.add_(z)
        b = x @ y
        x.sin_()
        return a, b, x

    assert stock_is_wrong(fn, fusion_type="dataflow", skip=True)
    check(fn)


# --- what is left to PyTorch


def hazard_beside_a_clean_part(x, y, z):
    before = x.sin()
    x.mul_(2)
    clean = (z + 1).tanh() * z
    return before + x @ y, clean


def test_only_ops_on_the_hazards_buffer_are_left() -> None:
    """Ops on the hazard's tensor run in PyTorch, all others stay in regions."""
    with pytest.warns(HazardWarning):
        jitted = jit(hazard_beside_a_clean_part, Config("fallback"))
        jitted(*three())
    assert left(jitted) == ["sin", "mul", "copy_", "matmul"]
    assert {"tanh", "add", "mul"} <= set(fused(jitted))
    check(hazard_beside_a_clean_part)


def test_safe_programs_are_left_as_stock_fuses_them() -> None:
    """Without a hazard there are Thunder's own regions, and nothing is said."""

    def fn(x, y, z):
        x.add_(y)
        return (x * z).sin()

    with warnings.catch_warnings():
        warnings.simplefilter("error", HazardWarning)
        jitted = jit(fn, Config("fallback"))
        jitted(*three())
    stock = jit(fn, Config(None), InterpretableNvFuserExecutor("stock_nvfuser"))
    stock(*three())
    assert cost(jitted) == cost(stock)
    assert verdicts(jitted)[0].safe


def test_verdict_tells_what_was_wrong() -> None:
    """The verdict holds the hazards of stock's regions, readable afterwards, one per compilation."""
    with pytest.warns(HazardWarning):
        jitted = jit(hazard_beside_a_clean_part, Config("fallback"))
        jitted(*three())
        jitted(*three())
        jitted(*[torch.randn(2, 2) for _ in range(3)])
    found = verdicts(jitted)
    assert len(found) == 2
    for verdict in found:
        assert not verdict.safe
        assert [(hazard.kind, hazard.name) for hazard in verdict.hazards][0][0] is Kind.WAR


def test_one_round_may_show_the_next_hazard() -> None:
    """Barring one tensor may make a hazard of another: rounds go on until none is left, and the result is right."""

    def fn(x, y, z):
        a = x.sin()
        b = y.cos()
        x.mul_(2)
        y.add_(x)
        z.copy_(x)
        c = (x @ y) @ z
        x.copy_(a)
        return a + c, b * c, x, z

    assert stock_is_wrong(fn)
    check(fn)


@pytest.mark.parametrize(
    "body",
    [
        "x[1:3].mul_(2); return x + y",
        "v = x.t(); x.mul_(2); return v + y",
        "v = x.view(16); v.sin_(); return x * y, v",
        "r = x.t().reshape(16); x.mul_(2); return r, x",
        "x[:, 0] = y[:, 1]; x.add_(z); return x[:, :2]",
        "a, b = x.chunk(2); a.copy_(b); return x * y",
        "x.index_copy_(0, torch.tensor([1]), y[:1]); return x.sum(), x",
        "x[0], x[1] = x[1].clone(), x[0].clone(); return x",
        "d = x.diagonal(); d.zero_(); return x @ y",
    ],
)
def test_views(body: str) -> None:
    """Writes and reads through views keep program order."""
    scope: dict[str, Any] = {"torch": torch}
    exec("def fn(x, y, z):\n" + "".join(f"    {line.strip()}\n" for line in body.split(";")), scope)
    check(scope["fn"])


@pytest.mark.parametrize("calls", [2, 3])
def test_later_calls(calls: int) -> None:
    """The state that one call leaves is what the next one starts from."""

    def fn(x, y, z):
        before = x.sin()
        x.mul_(0.5)
        return before + x @ y

    for config in FALLBACK_CONFIGS:
        assert compare(fn, three, config, calls=calls) == []


def test_fallback_is_a_choice_per_function() -> None:
    """The same function in other modes next to it is not affected."""
    results = {}
    for mode in ("rewrite", "fallback"):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", HazardWarning)
            jitted = thunder.jit(hazard_beside_a_clean_part, executors=[guarded_nvfuser_ex], guard_on_hazard=mode)
            results[mode] = jitted(*three())
        assert ("sin" in left(jitted)) == (mode == "fallback")
    assert all(torch.allclose(a, b) for a, b in zip(results["rewrite"], results["fallback"]))
