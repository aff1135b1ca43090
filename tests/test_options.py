"""Options: who wins, what is refused, and that a choice holds where it was made and nowhere else."""

from __future__ import annotations

import asyncio
import contextvars
import threading
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import thunder
import torch

from guarded_nvfuser import GuardedNvFuserExecutor, HazardError, cost, guarded_nvfuser_ex, on_hazard, verdicts
from guarded_nvfuser.contract import Looser
from guarded_nvfuser.options import (
    INTERPRET_VARIABLE,
    ON_HAZARD_VARIABLE,
    SCHEDULE_VARIABLE,
    OnHazard,
    Schedule,
    current_on_hazard,
    current_schedule,
    interpreting,
    parse_on_hazard,
    schedule,
)

MODES = ("rewrite", "raise", "fallback")


@pytest.fixture(autouse=True)
def no_choice_from_outside(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(ON_HAZARD_VARIABLE, raising=False)
    monkeypatch.delenv(SCHEDULE_VARIABLE, raising=False)


def double(x: torch.Tensor) -> torch.Tensor:
    """Safe in every mode: stock keeps it as it is."""
    return x.mul_(2)


def recompute(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    """Wrong on stock: rematerialisation recomputes sin(x) after x was overwritten."""
    y = x.sin()
    x.mul_(2)
    return y + x @ w


def mode_of(executor: Any = guarded_nvfuser_ex, **options: Any) -> OnHazard:
    """The mode that a compilation under way here and now takes."""
    jitted = thunder.jit(double, executors=[executor], **options)
    jitted(torch.ones(2))
    [verdict] = verdicts(jitted)
    return verdict.mode


LEVELS = ("option", "context", "executor", "environment")


@pytest.mark.parametrize(
    "given", [LEVELS[first:] for first in range(5)], ids=lambda given: given[0] if given else "none"
)
def test_precedence(given: tuple[str, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    """Compile option, then context manager, then executor, then environment variable, then rewrite: the first that is
    given wins over all that follow.
    """
    winner, loser = "fallback", "raise"

    def value(level: str) -> str:
        return winner if level == given[0] else loser

    if "environment" in given:
        monkeypatch.setenv(ON_HAZARD_VARIABLE, value("environment"))
    executor = GuardedNvFuserExecutor(value("executor") if "executor" in given else None)
    options = {"guard_on_hazard": value("option")} if "option" in given else {}
    with on_hazard(value("context")) if "context" in given else nullcontext():
        assert mode_of(executor, **options) is (OnHazard.FALLBACK if given else OnHazard.REWRITE)


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("mode", MODES)
def test_every_level_takes_every_mode(level: str, mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each place where a mode can be named takes each mode, and it is the one that decides."""
    if level == "environment":
        monkeypatch.setenv(ON_HAZARD_VARIABLE, mode)
    executor = GuardedNvFuserExecutor(mode) if level == "executor" else GuardedNvFuserExecutor()
    options = {"guard_on_hazard": mode} if level == "option" else {}
    with on_hazard(mode) if level == "context" else nullcontext():
        assert mode_of(executor, **options) is OnHazard(mode)


def test_modes_do_what_they_say() -> None:
    """On a program that stock gets wrong, raise refuses, fallback warns, rewrite does neither; both are right."""
    x, w = torch.rand(3, 3), torch.eye(3)
    expected = recompute(x.clone(), w)
    for mode in ("rewrite", "fallback"):
        jitted = thunder.jit(recompute, executors=[guarded_nvfuser_ex], guard_on_hazard=mode)
        assert torch.allclose(jitted(x.clone(), w), expected)
        assert bool(verdicts(jitted)[0].hazards) == (mode == "fallback")
    with pytest.raises(HazardError):
        thunder.jit(recompute, executors=[guarded_nvfuser_ex], guard_on_hazard="raise")(x.clone(), w)


def test_members_are_taken_as_values() -> None:
    """A mode may be given as the enum's member."""
    assert parse_on_hazard(OnHazard.RAISE, "here") is OnHazard.RAISE
    assert mode_of(guard_on_hazard=OnHazard.FALLBACK) is OnHazard.FALLBACK
    with schedule(Schedule.EARLY):
        assert current_schedule() is Schedule.EARLY


def test_context_holds_for_what_is_compiled_inside() -> None:
    """A function compiled before keeps its mode; one compiled inside keeps it outside; the old choice comes back."""
    before = thunder.jit(double, executors=[guarded_nvfuser_ex])
    before(torch.ones(2))
    with on_hazard("fallback"):
        before(torch.ones(2))
        inside = thunder.jit(double, executors=[guarded_nvfuser_ex])
        inside(torch.ones(2))
        with on_hazard("raise"):
            assert mode_of() is OnHazard.RAISE
        assert mode_of() is OnHazard.FALLBACK
        inside(torch.ones(3))
    inside(torch.ones(4))
    assert [verdict.mode.value for verdict in verdicts(before)] == ["rewrite"]
    assert [verdict.mode.value for verdict in verdicts(inside)] == ["fallback", "fallback", "rewrite"]


def test_context_ends_with_an_exception() -> None:
    """An exception inside the block does not leave its mode or schedule behind."""
    with pytest.raises(KeyError), on_hazard("fallback"), schedule("early"):
        raise KeyError
    assert current_on_hazard(None) is OnHazard.REWRITE
    assert current_schedule() is Schedule.LATE


def in_thread(fn: Callable[[], Any]) -> Any:
    found: list[Any] = []
    thread = threading.Thread(target=lambda: found.append(fn()))
    thread.start()
    thread.join(60)
    [answer] = found
    return answer


def test_context_is_not_seen_by_other_threads() -> None:
    """A block's choice is its thread's own, in both directions."""
    with on_hazard("fallback"), schedule("early"):
        assert in_thread(lambda: (mode_of(), current_schedule())) == (OnHazard.REWRITE, Schedule.LATE)

        def set_inside() -> OnHazard:
            with on_hazard("raise"):
                return mode_of()

        assert in_thread(set_inside) is OnHazard.RAISE
        assert mode_of() is OnHazard.FALLBACK


def test_threads_hold_their_own_modes_at_the_same_time() -> None:
    """Threads that compile side by side under different blocks each get their own mode."""
    inside, found = threading.Barrier(len(MODES), timeout=60), {}

    def compile_under(mode: str) -> None:
        with on_hazard(mode):
            inside.wait()
            found[mode] = current_on_hazard(None)
            inside.wait()

    threads = [threading.Thread(target=compile_under, args=(mode,)) for mode in MODES]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert found == {mode: OnHazard(mode) for mode in MODES}


def test_copied_contexts_and_tasks_are_isolated() -> None:
    """A task started in a block keeps its mode; what a task sets stays in it."""

    async def task(mode: str | None) -> OnHazard:
        with on_hazard(mode) if mode else nullcontext():
            await asyncio.sleep(0)
            return current_on_hazard(None)

    async def main() -> list[OnHazard]:
        with on_hazard("fallback"):
            return await asyncio.gather(task("raise"), task(None), task("rewrite"))

    assert [mode.value for mode in asyncio.run(main())] == ["raise", "fallback", "rewrite"]
    with on_hazard("raise"):
        kept = contextvars.copy_context()
    assert kept.run(current_on_hazard, None) is OnHazard.RAISE
    assert current_on_hazard(None) is OnHazard.REWRITE


LEGAL = "'rewrite', 'raise', 'fallback'"


def test_unknown_modes_list_the_legal_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    """A mode that does not exist is refused where it is given, with its origin and the legal values."""
    with pytest.raises(ValueError, match=rf"guard_on_hazard: unknown value 'rewind'; the legal ones are {LEGAL}"):
        mode_of(guard_on_hazard="rewind")
    with pytest.raises(ValueError, match=rf"on_hazard\(\): unknown value 'Raise'; .*{LEGAL}"), on_hazard("Raise"):
        pass
    with pytest.raises(ValueError, match=rf"GuardedNvFuserExecutor\(on_hazard=...\): unknown value ''; .*{LEGAL}"):
        GuardedNvFuserExecutor(on_hazard="")
    monkeypatch.setenv(ON_HAZARD_VARIABLE, "ignore")
    with pytest.raises(ValueError, match=rf"{ON_HAZARD_VARIABLE}: unknown value 'ignore'; .*{LEGAL}"):
        mode_of()
    assert mode_of(guard_on_hazard="raise") is OnHazard.RAISE  # nobody asked the variable


def test_an_empty_variable_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    """A variable that is set to nothing counts as not set."""
    for name in (ON_HAZARD_VARIABLE, SCHEDULE_VARIABLE, INTERPRET_VARIABLE):
        monkeypatch.setenv(name, "")
    assert current_on_hazard(None) is OnHazard.REWRITE
    assert current_schedule() is Schedule.LATE
    assert interpreting() is False


def test_other_unknown_values_list_the_legal_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    """So are schedules, partitions, rules and the interpreter's switch."""
    with (
        pytest.raises(ValueError, match=r"schedule\(\): unknown value 'middle'; .*'late', 'early'"),
        schedule("middle"),
    ):
        pass
    rules = ", ".join(repr(rule.value) for rule in Looser)
    with pytest.raises(ValueError, match=f"guard_looser_rules: unknown value 'lax'; the legal ones are {rules}"):
        mode_of(guard_looser_rules=["lax"])
    for mode in ("rewrite", "fallback"):
        with pytest.raises(ValueError, match="'sideways'.*'consecutive' and 'dataflow'|fusion type: .?sideways"):
            jitted = thunder.jit(
                recompute, executors=[guarded_nvfuser_ex], fusion_type="sideways", guard_on_hazard=mode
            )
            jitted(torch.ones(2, 2), torch.eye(2))
    monkeypatch.setenv(SCHEDULE_VARIABLE, "lately")
    with pytest.raises(ValueError, match=rf"{SCHEDULE_VARIABLE}: unknown value 'lately'; .*'late', 'early'"):
        current_schedule()
    monkeypatch.setenv(INTERPRET_VARIABLE, "yes")
    with pytest.raises(ValueError, match=rf"{INTERPRET_VARIABLE}: unknown value 'yes'; the legal ones are '0', '1'"):
        interpreting()


def test_schedule_precedence(monkeypatch: pytest.MonkeyPatch) -> None:
    """A block's schedule wins over the variable's, that over late."""
    assert current_schedule() is Schedule.LATE
    monkeypatch.setenv(SCHEDULE_VARIABLE, "early")
    assert current_schedule() is Schedule.EARLY
    with schedule("late"):
        assert current_schedule() is Schedule.LATE
    assert current_schedule() is Schedule.EARLY


def test_elision_is_an_option() -> None:
    """With guard_elide=False the write-back is a copy of its own, behind the region; by default it is inside."""
    found = {}
    for elide in (None, True, False):
        options = {} if elide is None else {"guard_elide": elide}
        jitted = thunder.jit(double, executors=[guarded_nvfuser_ex], **options)
        x = torch.ones(2)
        jitted(x)
        assert torch.equal(x, torch.full((2,), 2.0))
        found[elide] = cost(jitted).ops
    assert found == {None: 0, True: 0, False: 1}


def test_looser_rules_are_an_option() -> None:
    """Without the contract's looser rules a write-back that rests on one stays a copy; results are the same."""

    def tanh_power(a: torch.Tensor) -> torch.Tensor:
        a.tanh_()
        return a * a * a * a

    found = {}
    for rules in (None, ["pointwise"], []):
        options = {} if rules is None else {"guard_looser_rules": rules}
        jitted = thunder.jit(tanh_power, executors=[guarded_nvfuser_ex], **options)
        a, b = torch.full((4, 4), 0.5), torch.full((4, 4), 0.5)
        assert torch.allclose(jitted(a), tanh_power(b))
        assert torch.allclose(a, b)
        found[str(rules)] = (cost(jitted).regions, cost(jitted).ops)
    assert found == {"None": (1, 0), "['pointwise']": (1, 0), "[]": (1, 1)}
