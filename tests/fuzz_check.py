"""One program against eager, under one configuration: the same, refused, different, crashed, or too much for Thunder.

Compared is what a caller sees: results, arguments with all the memory that they lie in, which of them share memory and
where in it, gradients. Differences count beyond what rounding explains, which the program's own run in float64
measures: where that run gives the same values, arithmetic was exact, and so is the comparison.
"""

from __future__ import annotations

import re
import traceback
import warnings
from collections.abc import Callable
from dataclasses import dataclass, replace
from enum import Enum
from functools import cached_property
from typing import Any

import thunder
import torch

from guarded_nvfuser import HazardError, HazardWarning, verdicts
from guarded_nvfuser.executor import InterpretableNvFuserExecutor
from guarded_nvfuser.options import schedule
from tests.generator import Program, step
from tests.support import Config, jit

STOCK = InterpretableNvFuserExecutor("stock_nvfuser")
MODES = ("rewrite", "fallback", "raise")
PARTITIONS = [(fusion_type, skip) for fusion_type in ("consecutive", "dataflow") for skip in (False, True)]
SCHEDULES = ("late", "early")


class Outcome(Enum):
    """How a compiled program compares with eager."""

    SAME = "same as eager"
    REFUSED = "refused"
    DIFFERENT = "different"
    CRASHED = "crashed"
    CANNOT = "Thunder cannot"


@dataclass(frozen=True)
class Finding:
    """What a program did under a configuration.

    Attributes:
        what: in words; for what went wrong, the same words for the same cause as far as they can be told apart.
        detail: values or a traceback; `left`: whether ops were left to PyTorch; `wrote`: whether the guard saw a write.
    """

    outcome: Outcome
    config: Config
    what: str = ""
    detail: str = ""
    left: bool = False
    wrote: bool = False

    @property
    def failed(self) -> bool:
        return self.outcome in (Outcome.DIFFERENT, Outcome.CRASHED)

    @property
    def signature(self) -> str:
        """What tells distinct failures apart."""
        return f"{self.config.mode}: {self.outcome.value}: {self.what}"


@dataclass(frozen=True)
class Seen:
    """What a caller sees after some calls: tensors by label, and places of memory that two of them share."""

    tensors: dict[str, torch.Tensor | None]
    shared: frozenset[tuple[str, str, int]]


def look(make: Callable, fn: Callable, program: Program, tracked: list[list[bool]] | None = None) -> Seen:
    """Call a function as a program says, and look at everything that it may have touched.

    Args:
        make: the maker of its arguments.
        fn: the program, or what it was compiled to.
        program: says how often it is called, and whether with a backward pass.
        tracked: per call, which results take part in the backward pass.
    """
    args = make()
    seen: dict[str, torch.Tensor | None] = {}
    for call in range(program.calls):
        results = step(fn, args, program.backward, tracked and tracked[call])
        seen.update((f"result {index} of call {call}", result) for index, result in enumerate(results))
    seen.update((f"argument {name}", arg) for name, arg in zip(program.params, args))
    shared = frozenset(_shared(seen))
    seen.update((f"memory of {name}", _memory(arg)) for name, arg in zip(program.params, args))
    if program.backward:
        seen.update((f"gradient of {name}", arg.grad) for name, arg in zip(program.params, args) if arg.is_leaf)
    return Seen({k: v if v is None else v.detach().clone() for k, v in seen.items()}, shared)


def _memory(arg: torch.Tensor) -> torch.Tensor:
    """All the memory that a tensor lies in: its neighbours too."""
    with torch.no_grad():
        return torch.empty(0, dtype=arg.dtype).set_(arg.untyped_storage())


def _shared(seen: dict[str, torch.Tensor]) -> list[tuple[str, str, int]]:
    labels, found = list(seen), []
    for i, a in enumerate(labels):
        for b in labels[:i]:
            if seen[a].untyped_storage().data_ptr() == seen[b].untyped_storage().data_ptr():
                found.append((b, a, seen[a].data_ptr() - seen[b].data_ptr()))
    return found


class Eager:
    """What eager gives for a program, and by how much rounding may change it."""

    def __init__(self, program: Program) -> None:
        self.program, (self.make, self.fn) = program, program.functions()
        self.tracked = self._tracked()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            self.seen = look(self.make, self.fn, program, self.tracked)

    def _tracked(self) -> list[list[bool]] | None:
        """Per call, which results require grad in eager."""
        if not self.program.backward:
            return None
        args, found = self.make(), []
        for _ in range(self.program.calls):
            found.append([result.requires_grad for result in step(self.fn, args, True)])
        return found

    @cached_property
    def rounding(self) -> dict[str, float]:
        """Per tensor, its largest distance from the same in float64; 0 where arithmetic was exact."""
        wide = self.program.widened()
        if wide is None:
            return {}
        make, fn = self.program.functions(wide)
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                seen = look(make, fn, self.program, self.tracked)
        except RuntimeError:
            return dict.fromkeys(self.seen.tensors, 1e-2)
        return {label: _distance(value, seen.tensors[label]) for label, value in self.seen.tensors.items()}

    def differences(self, other: Seen) -> list[tuple[str, str]]:
        """How an outcome differs: a kind, and the details."""
        found = []
        for label, value in self.seen.tensors.items():
            if (how := self._differs(label, value, other.tensors.get(label))) is not None:
                kind = label.split()[0]
                found.append((f"{kind} {how}", f"{label}: {value} in eager, {other.tensors.get(label)} here"))
        if self.seen.shared != other.shared:
            lost, more = self.seen.shared - other.shared, other.shared - self.seen.shared
            words = f"shared in eager alone: {sorted(lost)}; shared here alone: {sorted(more)}"
            found.append(("memory not shared" if lost else "memory shared", words))
        return found

    def _differs(self, label: str, a: torch.Tensor | None, b: torch.Tensor | None) -> str | None:
        if a is None or b is None:
            return None if a is b else "missing" if b is None else "made up"
        if a.dtype != b.dtype:
            return "dtype"
        if a.shape != b.shape:
            return "shape"
        return "values" if _distance(a, b) > self._allowed(label, a) else None

    def _allowed(self, label: str, a: torch.Tensor) -> float:
        if not a.is_floating_point():
            return 0.0
        rounding = max(self.rounding.values(), default=torch.finfo(torch.float64).eps)
        if rounding == 0.0:
            return 0.0
        largest = max(1.0, *(float(v.double().abs().max()) for v in self.seen.tensors.values() if v is not None))
        return 32 * max(rounding, self.rounding.get(label, 0.0), torch.finfo(torch.float64).eps * largest)


def _distance(a: torch.Tensor | None, b: torch.Tensor | None) -> float:
    if a is None or b is None or a.shape != b.shape:
        return 0.0 if a is b else float("inf")
    if a.numel() == 0:
        return 0.0
    a, b = a.detach().double(), b.detach().double()
    apart = (a - b).abs()
    return float(torch.where((a == b) | (a.isnan() & b.isnan()), 0.0, apart.nan_to_num(float("inf"))).max())


def check(program: Program, eager: Eager, config: Config) -> list[Finding]:
    """A program under one configuration and both schedules of the interpreter.

    Args:
        program: what to run; `eager`: what eager gave for it.
        config: the mode and Thunder's options; the schedule counts for nothing.
    """
    jitted = jit(eager.fn, config)
    found = []
    for order in SCHEDULES:
        found.append(_finding(program, eager, replace(config, schedule=order), jitted))
        if found[-1].outcome not in (Outcome.SAME, Outcome.DIFFERENT):
            break
    return found


def _finding(program: Program, eager: Eager, config: Config, jitted: Callable) -> Finding:
    try:
        seen, left = _run(program, eager, config, jitted)
    except HazardError as refusal:
        kinds = sorted({hazard.kind.name for hazard in refusal.hazards})
        return Finding(Outcome.REFUSED, config, ", ".join(kinds), str(refusal))
    except Exception as error:
        return _crash(program, eager, config, error)
    wrote = config.mode is not None and bool(verdicts(jitted))
    differences = eager.differences(seen)
    if not differences:
        return Finding(Outcome.SAME, config, left=left, wrote=wrote)
    detail = "\n".join(words for _, words in differences)
    what = ", ".join(sorted({kind for kind, _ in differences}))
    outcome = Outcome.CANNOT if _pure_difference(program, eager, what) else Outcome.DIFFERENT
    return Finding(outcome, config, what, detail, left, wrote)


def _run(program: Program, eager: Eager, config: Config, jitted: Callable) -> tuple[Seen, bool]:
    with warnings.catch_warnings(record=True) as caught, schedule(config.schedule):
        warnings.simplefilter("always")
        seen = look(eager.make, jitted, program, eager.tracked)
    return seen, any(issubclass(each.category, HazardWarning) for each in caught)


def _crash(program: Program, eager: Eager, config: Config, error: Exception) -> Finding:
    """An error: Thunder's own if it raises the same without this library, with or without nvFuser's regions."""
    what = describe(error)
    for make, executors in ((eager.make, []), (eager.make, [STOCK]), (lambda: _apart(eager.make()), [])):
        try:
            with warnings.catch_warnings(), schedule(config.schedule):
                warnings.simplefilter("ignore")
                look(make, stock(eager.fn, config, executors), program, eager.tracked)
        except Exception as theirs:
            if describe(theirs) == what:
                return Finding(Outcome.CANNOT, config, what)
    return Finding(Outcome.CRASHED, config, what, "".join(traceback.format_exception(error)))


def _apart(args: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
    """Arguments that share no memory."""
    return tuple(arg.detach().clone().requires_grad_(arg.requires_grad) for arg in args)


def stock(fn: Callable, config: Config, executors: list) -> Callable:
    """A program compiled without this library."""
    return thunder.jit(fn, executors=executors, fusion_type=config.fusion_type, skip_inplace_alias_updates=config.skip)


def _pure_difference(program: Program, eager: Eager, what: str) -> bool:
    """Whether Thunder differs in the same way with PyTorch as its only executor, in a dtype or a shape."""
    if not set(what.replace(",", "").split()) & {"dtype", "shape"}:
        return False
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            seen = look(eager.make, stock(eager.fn, Config(None), []), program, eager.tracked)
    except Exception:
        return False
    return bool(eager.differences(seen))


def describe(error: Exception) -> str:
    """An error by type, message and place, without what changes from program to program."""
    frames = [f for f in traceback.extract_tb(error.__traceback__) if "generated" not in f.filename]
    last = frames[-1] if frames else None
    where = f"{'/'.join(last.filename.split('/')[-2:])}:{last.lineno}" if last else ""
    message = (str(error).splitlines() or [""])[0]
    message = re.sub(r"\b[a-z]+\d+\b|\d+", "#", re.sub(r'"[^"]*"|<[^>]*>|\[[^\]]*\]|\([^)]*\)', "..", message))
    return f"{type(error).__name__} {message[:90]} ({where})"


def check_everywhere(
    program: Program, partitions: list[tuple[str, bool]] = PARTITIONS, modes: tuple[str, ...] = MODES
) -> list[Finding]:
    """A program under every mode and some of Thunder's options."""
    eager = Eager(program)
    configs = [Config(mode, fusion_type, skip) for mode in modes for fusion_type, skip in partitions]
    return [finding for config in configs for finding in check(program, eager, config)]


def failures(program: Program, **chosen: Any) -> list[Finding]:
    """The findings that must not be."""
    return [finding for finding in check_everywhere(program, **chosen) if finding.failed]
