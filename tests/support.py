"""Running a program in eager and compiled, and comparing everything that a caller can see."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import thunder
import torch
from torch.utils._pytree import tree_flatten

from guarded_nvfuser import guarded_nvfuser_ex
from guarded_nvfuser.options import schedule


@dataclass(frozen=True)
class Config:
    """How a program is compiled and run."""

    mode: str | None = "rewrite"
    fusion_type: str = "consecutive"
    skip: bool = False
    schedule: str = "late"

    def __str__(self) -> str:
        return f"{self.mode}-{self.fusion_type}-{'skip' if self.skip else 'aliases'}-{self.schedule}"


CONFIGS = [
    Config(fusion_type=fusion_type, skip=skip, schedule=order)
    for fusion_type in ("consecutive", "dataflow")
    for skip in (False, True)
    for order in ("late", "early")
]


@dataclass
class Outcome:
    """What a caller sees of some calls: results, arguments afterwards, which of them share memory, gradients."""

    results: list[torch.Tensor]
    arguments: list[torch.Tensor]
    gradients: list[torch.Tensor | None]
    shared: list[tuple[int, int]]
    others: list[Any]


def jit(fn: Callable, config: Config, executor: Any = guarded_nvfuser_ex, **options: Any) -> Callable:
    """Compile as a user would, with a configuration's options."""
    if config.mode is not None:
        options.setdefault("guard_on_hazard", config.mode)
    return thunder.jit(
        fn, executors=[executor], fusion_type=config.fusion_type, skip_inplace_alias_updates=config.skip, **options
    )


def run(fn: Callable, make_args: Callable, *, calls: int = 1, backward: bool = False, state: Sequence = ()) -> Outcome:
    """Call a function and look at everything that it may have touched."""
    args = make_args()
    flat_args = [leaf for leaf in tree_flatten(args)[0] if isinstance(leaf, torch.Tensor)] + list(state)
    for _ in range(calls):
        out = fn(*args)
    flat = tree_flatten(out)[0]
    results = [leaf for leaf in flat if isinstance(leaf, torch.Tensor)]
    if backward:
        sum((r.double() * (i + 1)).sum() for i, r in enumerate(results) if r.requires_grad).backward()
    seen = results + flat_args
    pointers = [t.untyped_storage().data_ptr() for t in seen]
    shared = [(i, j) for i in range(len(seen)) for j in range(i) if pointers[i] == pointers[j] and seen[i].numel()]
    gradients = [t.grad for t in flat_args]
    others = [leaf for leaf in flat if not isinstance(leaf, torch.Tensor)]
    return Outcome(results, flat_args, gradients, shared, others)


def differences(eager: Outcome, other: Outcome, *, exact: bool = False, coarse: bool = False) -> list[str]:
    """How two outcomes differ, in words; empty if a caller cannot tell them apart."""
    found = []
    for what in ("results", "arguments", "gradients"):
        left, right = getattr(eager, what), getattr(other, what)
        if len(left) != len(right):
            found.append(f"{what}: {len(left)} in eager, {len(right)} here")
        for index, (a, b) in enumerate(zip(left, right)):
            if not same(a, b, exact, coarse):
                found.append(f"{what}[{index}]: {a} in eager, {b} here")
    if eager.shared != other.shared:
        found.append(f"shared memory: {eager.shared} in eager, {other.shared} here")
    if eager.others != other.others:
        found.append(f"other results: {eager.others} in eager, {other.others} here")
    return found


def same(a: torch.Tensor | None, b: torch.Tensor | None, exact: bool = False, coarse: bool = False) -> bool:
    """Whether two tensors agree in dtype, shape and values (to rounding, unless exact)."""
    if a is None or b is None:
        return a is b
    if a.dtype != b.dtype or a.shape != b.shape:
        return False
    if exact or not a.is_floating_point():
        return torch.equal(a.detach(), b.detach())
    tolerance = 3e-2 if coarse else {torch.float64: 1e-9, torch.float32: 1e-5}.get(a.dtype, 1e-2)
    return torch.allclose(a.detach().double(), b.detach().double(), rtol=tolerance, atol=tolerance, equal_nan=True)


def compare(
    fn: Callable,
    make_args: Callable,
    config: Config,
    *,
    eager: Callable | None = None,
    calls: int = 1,
    backward: bool = False,
) -> list[str]:
    """Differences between eager and the guarded program under a configuration."""
    torch.manual_seed(0)
    expected = run(eager or fn, make_args, calls=calls, backward=backward)
    torch.manual_seed(0)
    with warnings.catch_warnings(), schedule(config.schedule):
        warnings.simplefilter("ignore")
        found = run(jit(fn, config), make_args, calls=calls, backward=backward)
    return differences(expected, found)
