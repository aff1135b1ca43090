"""Every program of tests/cases.py: eager's results in the modes rewrite and fallback, eager's results or a refusal in
mode raise.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.utils._pytree import tree_flatten, tree_map

from guarded_nvfuser import HazardError, guarded_nvfuser_ex
from guarded_nvfuser.executor import InterpretableNvFuserExecutor
from guarded_nvfuser.options import schedule
from tests.cases import CASES, Case
from tests.support import Config, Outcome, differences, jit, run

# A gradient that Thunder derives wrongly when nothing renames the written tensor: refused, which the promise allows.
REFUSED_UNTRACKED = {"linear_tanh_in_place"}
# Thunder makes a write of one element a write of the whole view, which torch refuses where the view overlaps itself.
REFUSED_BY_TORCH = {"write_through_expand"}

SCHEDULES = ("late", "early")
PARTITIONS = [(fusion_type, skip) for fusion_type in ("consecutive", "dataflow") for skip in (False, True)]
GPU_CONFIGS = [Config(mode, "consecutive") for mode in ("rewrite", "fallback")] + [Config("rewrite", "dataflow", True)]


def params() -> list:
    """Every case as a pytest parameter."""
    return [pytest.param(case, id=case.name) for case in CASES]


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


class Subject:
    """One case in eager or compiled, to be run several times from the same state."""

    def __init__(self, case: Case, compiled: Callable[[Callable], Callable] | None, device: str = "cpu") -> None:
        torch.manual_seed(0)
        fn = case.fn() if case.module else case.fn
        if compiled is None and case.eager is not None:
            fn = case.eager
        self.case, self.device = case, device
        self.state = [*fn.to(device).buffers(), *fn.parameters()] if case.module else []
        self.initial = [tensor.detach().clone() for tensor in self.state]
        self.callee = fn if compiled is None else compiled(fn)

    def reset(self) -> None:
        with torch.no_grad():
            for tensor, value in zip(self.state, self.initial):
                tensor.copy_(value)
                tensor.grad = None

    def run(self) -> Outcome:
        """What a caller sees of one call: results, arguments with their surroundings, the module's state, gradients."""
        case = self.case
        self.reset()
        inside = contextlib.nullcontext() if self.device == "cpu" else torch.device(self.device)
        with inside, warnings.catch_warnings():
            warnings.simplefilter("ignore")
            if case.warm_args is not None:
                self.callee(*make_args(case.warm_args, self.device))
            args = make_args(case.make_args, self.device)
            surroundings = [whole(leaf) for leaf in tree_flatten(args)[0]]
            return run(self.callee, lambda: args, backward=case.backward, state=[*self.state, *surroundings])


def guarded(case: Case, config: Config, executor: Any = guarded_nvfuser_ex, device: str = "cpu") -> Subject:
    return Subject(case, lambda fn: jit(fn, config, executor), device)


def compare(case: Case, config: Config, device: str = "cpu") -> None:
    """Fail unless a compiled case does what eager does, under both schedules."""
    expected, subject = Subject(case, None, device).run(), guarded(case, config, device=device)
    for order in SCHEDULES:
        with schedule(order):
            assert differences(expected, subject.run()) == [], (config, order)


@pytest.mark.parametrize("case", params())
def test_rewrite(case: Case) -> None:
    """Mode rewrite gives what eager gives, whatever the partition, the barriers and the schedule."""
    for fusion_type, skip in PARTITIONS:
        compare(case, Config("rewrite", fusion_type, skip))


@pytest.mark.parametrize("case", params())
def test_fallback(case: Case) -> None:
    """Mode fallback gives what eager gives; without Thunder's renames it may refuse to differentiate."""
    for fusion_type, skip in (("consecutive", False), ("dataflow", True)):
        if case.name in REFUSED_UNTRACKED and skip:
            with pytest.raises(HazardError, match="GNV007"):
                compare(case, Config("fallback", fusion_type, skip))
        elif case.name in REFUSED_BY_TORCH:
            with pytest.raises(RuntimeError, match="more than one element of the written-to tensor"):
                compare(case, Config("fallback", fusion_type, skip))
        else:
            compare(case, Config("fallback", fusion_type, skip))


def attempt(subject: Subject, expected: Outcome, order: str, refusal: type[Exception] = HazardError) -> bool | None:
    """Whether a compiled case gives eager's results; None where it is refused."""
    try:
        with schedule(order):
            return not differences(expected, subject.run())
    except refusal:
        return None


@pytest.mark.parametrize("case", params())
def test_raise(case: Case) -> None:
    """Mode raise refuses whatever stock gets wrong, refuses nothing without a hazard, and is right where it does
    not refuse.
    """
    expected = Subject(case, None).run()
    stock = guarded(case, Config(None), InterpretableNvFuserExecutor("stock_nvfuser"))
    subject = guarded(case, Config("raise"))
    for order in SCHEDULES:
        answer = attempt(subject, expected, order)
        assert answer in (True, None)
        if "no_hazard" in case.kinds:
            assert answer is True
        if attempt(stock, expected, order, RuntimeError) is False:
            assert answer is None


@pytest.mark.gpu
@pytest.mark.parametrize("case", params())
def test_on_a_gpu(case: Case) -> None:
    """The same on real nvFuser: eager's results in the modes rewrite and fallback, no wrong ones in mode raise."""
    for config in GPU_CONFIGS:
        if case.name in REFUSED_UNTRACKED and config.mode == "fallback" and config.skip:
            continue
        if case.name == "write_through_expand" and config.mode == "fallback":
            continue
        compare(case, config, "cuda")
    if case.name != "write_through_expand":
        expected = Subject(case, None, "cuda").run()
        assert attempt(guarded(case, Config("raise"), device="cuda"), expected, "late") in (True, None)


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
