"""Options of the guard and who wins: compile option, then context manager, then executor, then environment, then
default.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from enum import Enum

import nvfuser_direct
from looseversion import LooseVersion
from thunder.core.compile_data import get_compile_option

from guarded_nvfuser.contract import Looser, Rules

ON_HAZARD_VARIABLE = "GUARDED_NVFUSER_ON_HAZARD"
INTERPRET_VARIABLE = "GUARDED_NVFUSER_INTERPRET"
SCHEDULE_VARIABLE = "GUARDED_NVFUSER_SCHEDULE"


class OnHazard(Enum):
    """What to do where a read may see the wrong state."""

    REWRITE = "rewrite"  # compile it as if it did not mutate, and write each changed input back once
    RAISE = "raise"  # refuse the program with a HazardError
    FALLBACK = "fallback"  # leave the ops on the hazard's buffers to PyTorch, in program order


class Schedule(Enum):
    """How the interpreter orders a region's updates; nvFuser may do either."""

    LATE = "late"  # reads see the values at entry, updates land at exit
    EARLY = "early"  # an update lands as soon as its source is known


DEFAULT_ON_HAZARD = OnHazard.REWRITE
_on_hazard: ContextVar[OnHazard | None] = ContextVar("guarded_nvfuser_on_hazard", default=None)
_schedule: ContextVar[Schedule | None] = ContextVar("guarded_nvfuser_schedule", default=None)


def parse_on_hazard(value: str | OnHazard, origin: str) -> OnHazard:
    """The mode that a user named.

    Args:
        value: "rewrite", "raise" or "fallback", or a member of `OnHazard`.
        origin: where the value came from, for the message.

    Raises:
        ValueError: an unknown value; the message lists the legal ones.
    """
    return _parse(OnHazard, value, origin)


def _parse(kind: type[Enum], value: object, origin: str) -> Enum:
    if isinstance(value, kind):
        return value
    for member in kind:
        if member.value == value:
            return member
    legal = ", ".join(repr(member.value) for member in kind)
    raise ValueError(f"{origin}: unknown value {value!r}; the legal ones are {legal}")


@contextmanager
def on_hazard(mode: str | OnHazard) -> Iterator[None]:
    """Set the mode for everything that is compiled inside a `with` block.

    A function that was compiled before keeps what it was compiled with; only the compile option has precedence over
    this.

    Args:
        mode: "rewrite", "raise" or "fallback".

    Raises:
        ValueError: an unknown mode.
    """
    token = _on_hazard.set(parse_on_hazard(mode, "on_hazard()"))
    try:
        yield
    finally:
        _on_hazard.reset(token)


def current_on_hazard(of_executor: OnHazard | None) -> OnHazard:
    """The mode that holds for the compilation under way.

    Args:
        of_executor: what `GuardedNvFuserExecutor(on_hazard=...)` was given, if anything.

    Raises:
        ValueError: the compile option or the environment variable has an unknown value.
    """
    option = get_compile_option(
        "guard_on_hazard", "What guarded_nvfuser does with a program that mutates: 'rewrite', 'raise' or 'fallback'."
    )
    if option is not None:
        return parse_on_hazard(option, "guard_on_hazard")
    for given in (_on_hazard.get(), of_executor):
        if given is not None:
            return given
    if variable := os.environ.get(ON_HAZARD_VARIABLE):
        return parse_on_hazard(variable, ON_HAZARD_VARIABLE)
    return DEFAULT_ON_HAZARD


def eliding() -> bool:
    """Whether write-backs may join the regions that compute their values (compile option `guard_elide`, on by
    default).
    """
    option = get_compile_option("guard_elide", "Whether write-backs may join the regions that compute their values.")
    return option is None or bool(option)


def allowed_rules() -> Rules:
    """What nvFuser's contract allows for the compilation under way.

    The compile option `guard_looser_rules` names the rules beyond STRICT that count ("pointwise", ...). By default all do
    with nvFuser 0.2.36, on whose internals they rest, and none with another release.

    Raises:
        ValueError: an unknown rule.
    """
    option = get_compile_option("guard_looser_rules", "Names of the contract's rules beyond STRICT that may be used.")
    if option is None:
        tested = LooseVersion(nvfuser_direct.version()).version[:3] == [0, 2, 36]
        return Rules(frozenset(Looser) if tested else frozenset(), interpreting())
    return Rules(frozenset(_parse(Looser, rule, "guard_looser_rules") for rule in option), interpreting())


def interpreting() -> bool:
    """Whether regions are interpreted on the CPU: only when `GUARDED_NVFUSER_INTERPRET` is set, never chosen silently.

    Raises:
        ValueError: the variable holds something else than 0 or 1.
    """
    value = os.environ.get(INTERPRET_VARIABLE, "0")
    if value not in ("", "0", "1"):
        raise ValueError(f"{INTERPRET_VARIABLE}: unknown value {value!r}; the legal ones are '0', '1'")
    return value == "1"


@contextmanager
def schedule(which: str | Schedule) -> Iterator[None]:
    """Choose the interpreter's schedule for calls inside a `with` block.

    Args:
        which: "late" or "early".

    Raises:
        ValueError: an unknown schedule.
    """
    token = _schedule.set(_parse(Schedule, which, "schedule()"))
    try:
        yield
    finally:
        _schedule.reset(token)


def current_schedule() -> Schedule:
    """The schedule of the interpreter's calls: from `schedule()`, from `GUARDED_NVFUSER_SCHEDULE`, else late."""
    chosen = _schedule.get()
    if chosen is not None:
        return chosen
    variable = os.environ.get(SCHEDULE_VARIABLE)
    return _parse(Schedule, variable, SCHEDULE_VARIABLE) if variable else Schedule.LATE
