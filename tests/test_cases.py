"""Every program of tests/cases.py: eager's results in the modes rewrite and fallback, eager's results or a refusal in
mode raise.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.utils._pytree import tree_flatten, tree_map

from guarded_nvfuser import HazardError, guarded_nvfuser_ex
from guarded_nvfuser.executor import InterpretableNvFuserExecutor
from guarded_nvfuser.options import schedule
from tests.cases import CASES, Case
from tests.support import CONFIGS, Config, Outcome, differences, jit, run

SHARING = "arguments that share memory are taken for separate tensors or for one"
EXPAND = "a write through an expanded view reaches torch as an overlapping copy_ and is refused there"
# A gradient that Thunder derives wrongly when nothing renames the written tensor: refused, which the promise allows.
REFUSED_UNTRACKED = {"linear_tanh_in_place"}

FALLBACK_CONFIGS = [
    Config("fallback", fusion_type, skip, order)
    for fusion_type, skip, order in (
        ("consecutive", False, "late"),
        ("consecutive", True, "early"),
        ("dataflow", False, "early"),
        ("dataflow", True, "late"),
    )
]
GPU_CONFIGS = [Config(mode, "consecutive") for mode in ("rewrite", "fallback")] + [Config("rewrite", "dataflow", True)]


def shares_arguments(case: Case) -> bool:
    return not {"runtime_alias", "duplicate_arg"}.isdisjoint(case.kinds)


def params(*, expand_fails: bool) -> list:
    """Every case as a pytest parameter, marked where it is known to fail."""
    found = []
    for case in CASES:
        marks = []
        if shares_arguments(case):
            marks = [pytest.mark.xfail(strict=False, reason=SHARING)]
        elif expand_fails and case.name == "write_through_expand":
            marks = [pytest.mark.xfail(strict=True, raises=RuntimeError, reason=EXPAND)]
        found.append(pytest.param(case, id=case.name, marks=marks))
    return found


def moved(value: Any, device: str, storages: dict[int, torch.UntypedStorage]) -> Any:
    """A tensor on another device with its layout, and with the same sharing of memory as the original."""
    if not isinstance(value, torch.Tensor):
        return value
    storage = value.untyped_storage()
    there = storages.setdefault(storage.data_ptr(), storage.clone().to(device=torch.device(device)))
    moved_value = torch.empty(0, dtype=value.dtype, device=device)
    moved_value.set_(there, value.storage_offset(), value.size(), value.stride())
    return moved_value.requires_grad_(value.requires_grad)


def make_args(maker: Callable, device: str) -> Any:
    args = maker()
    if device == "cpu":
        return args
    storages: dict[int, torch.UntypedStorage] = {}
    return tree_map(lambda value: moved(value, device, storages), args)


def whole(tensor: torch.Tensor) -> torch.Tensor:
    """All the memory that a tensor lies in: its neighbours too."""
    with torch.no_grad():
        return torch.empty(0, dtype=tensor.dtype, device=tensor.device).set_(tensor.untyped_storage())


def outcome(case: Case, compiled: Callable[[Callable], Callable], device: str = "cpu", *, eager: bool = False) -> Outcome:
    """What a caller sees of one call: results, arguments with their surroundings, the module's state, gradients."""
    torch.manual_seed(0)
    fn = case.fn() if case.module else (case.eager or case.fn if eager else case.fn)
    state = []
    if case.module:
        fn = fn.to(device)
        state = [*fn.buffers(), *fn.parameters()]
    inside = contextlib.nullcontext() if device == "cpu" else torch.device(device)
    with inside, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        callee = compiled(fn)
        if case.warm_args is not None:
            callee(*make_args(case.warm_args, device))
        args = make_args(case.make_args, device)
        state += [whole(leaf) for leaf in tree_flatten(args)[0]]
        return run(callee, lambda: args, backward=case.backward, state=state)


def compare(case: Case, config: Config, executor: Any = guarded_nvfuser_ex, device: str = "cpu") -> list[str]:
    """How a compiled case differs from eager, in words."""
    expected = outcome(case, lambda fn: fn, device, eager=True)
    with schedule(config.schedule):
        return differences(expected, outcome(case, lambda fn: jit(fn, config, executor), device))


@pytest.mark.parametrize("case", params(expand_fails=False))
def test_rewrite(case: Case) -> None:
    """Mode rewrite gives what eager gives, whatever the partition, the barriers and the schedule."""
    for config in CONFIGS:
        assert compare(case, config) == [], config


@pytest.mark.parametrize("case", params(expand_fails=True))
def test_fallback(case: Case) -> None:
    """Mode fallback gives what eager gives; without Thunder's renames it may refuse to differentiate."""
    for config in FALLBACK_CONFIGS:
        if case.name in REFUSED_UNTRACKED and config.skip:
            with pytest.raises(HazardError, match="GNV007"):
                compare(case, config)
            continue
        assert compare(case, config) == [], config


def attempt(case: Case, config: Config, executor: Any, device: str = "cpu") -> bool | None:
    """Whether a compiled case gives eager's results; None where it is refused with an error."""
    try:
        return not compare(case, config, executor, device)
    except NotImplementedError:
        return None


@pytest.mark.parametrize("case", params(expand_fails=True))
def test_raise(case: Case) -> None:
    """Mode raise refuses whatever stock gets wrong, refuses nothing without a hazard, and is right where it does
    not refuse.
    """
    stock = InterpretableNvFuserExecutor("stock_nvfuser")
    for order in ("late", "early"):
        config = Config(None, schedule=order)
        guarded = attempt(case, replace(config, mode="raise"), guarded_nvfuser_ex)
        assert guarded in (True, None)
        if "no_hazard" in case.kinds:
            assert guarded is True
        if attempt(case, config, stock) is False:
            assert guarded is None


@pytest.mark.gpu
@pytest.mark.parametrize("case", params(expand_fails=False))
def test_on_a_gpu(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same on real nvFuser: eager's results in the modes rewrite and fallback, no wrong ones in mode raise."""
    monkeypatch.setenv("GUARDED_NVFUSER_INTERPRET", "0")
    for config in GPU_CONFIGS:
        if case.name in REFUSED_UNTRACKED and config.mode == "fallback" and config.skip:
            continue
        if case.name == "write_through_expand" and config.mode == "fallback":
            continue
        assert compare(case, config, device="cuda") == [], config
    refused = case.name == "write_through_expand"
    assert refused or attempt(case, Config("raise"), guarded_nvfuser_ex, "cuda") in (True, None)


def test_moving_keeps_layout_and_sharing() -> None:
    """The twin on a GPU compares like with like: moved arguments share memory as the originals do."""
    base = torch.arange(24.0).reshape(4, 6)
    storages: dict[int, torch.UntypedStorage] = {}
    left, right = (moved(part, "cpu", storages) for part in (base[:, 1:4], base[2:]))
    assert torch.equal(left, base[:, 1:4])
    assert left.stride() == (6, 1)
    left.zero_()
    assert right[:, 1:4].eq(0).all()
    assert base.ne(0).sum() == 23


def test_cases_cover_every_kind() -> None:
    """No kind of hazard is without a program, and no name stands for two."""
    kinds = {kind for case in CASES for kind in case.kinds}
    assert {"raw", "war", "waw", "cse", "remat", "view", "autograd_saved", "cross_element", "no_hazard"} <= kinds
    assert len({case.name for case in CASES}) == len(CASES)
