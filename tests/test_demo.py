"""The demo: what it prints, and that its exit status tells a guard that keeps its promise from one that does not."""

from __future__ import annotations

import contextlib
import io
import os
import subprocess
import sys
import warnings
from collections.abc import Callable
from functools import cache

import pytest

from guarded_nvfuser import Cost, GuardedNvFuserExecutor, HazardWarning, demo
from guarded_nvfuser.__main__ import main
from guarded_nvfuser.demo_programs import PROGRAMS, Program
from guarded_nvfuser.errors import layout_error
from guarded_nvfuser.executor import InterpretableNvFuserExecutor, impl
from guarded_nvfuser.options import OnHazard, Schedule

BY_NAME = {program.name: program for program in PROGRAMS}
RIGHT, WRONG = "right under late and early", "wrong under late and early"
STOCK = dict.fromkeys(BY_NAME, WRONG) | dict.fromkeys(("transpose", "gaps", "split"), RIGHT)
STOCK["refused"] = "refused with NotImplementedError"
SAFE_AS_IT_IS = {"halves", "split"}


@pytest.fixture(autouse=True)
def interpret(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GUARDED_NVFUSER_INTERPRET", "1")


def printed(*arguments: str, terminal: bool = False) -> tuple[int, str]:
    """The status and the output of a run."""
    stream = io.StringIO()
    stream.isatty = lambda: terminal
    with contextlib.redirect_stdout(stream), warnings.catch_warnings():
        warnings.simplefilter("error", HazardWarning)  # the page shows them
        return main(["demo", *arguments]), stream.getvalue()


@cache
def page(name: str, mode: str = "rewrite") -> tuple[int, str]:
    """The status and the output for one program, with nothing replaced."""
    return printed("--mode", mode, "--only", name)


@pytest.mark.parametrize("name", BY_NAME)
@pytest.mark.parametrize("mode", list(OnHazard))
def test_each_page_in_each_mode(mode: OnHazard, name: str) -> None:
    status, out = page(name, mode.value)
    hazards = mode is not OnHazard.REWRITE and name not in SAFE_AS_IT_IS
    answer = "refused with HazardError" if mode is OnHazard.RAISE and hazards else RIGHT
    assert "\neager    " in out
    assert f"\nstock    {STOCK[name]}\n" in out
    layout = name == "gaps" and mode is not OnHazard.RAISE
    assert ("\nguard    error[GNV" in out) == (hazards and not layout)
    assert ("\nguard    nvFusion0: [GNV008] nvFuser cannot write the target of `x.mul_(2)`" in out) == layout
    assert ("\nguard    safe" in out) != (hazards or layout)
    assert ("\nguard    safe: rewritten, " in out) == (mode is OnHazard.REWRITE and not layout)
    assert f"\nguarded  {answer}\n" in out
    assert out.endswith("guarded  1 of 1 give eager's results or name the hazard\n")
    assert status == 0
    assert max(map(len, out.splitlines())) <= 100
    assert len(out.splitlines()) <= 42  # one screen
    real = BY_NAME[name].real
    assert (f"real nvFuser: {real} (from nvFuser's contract, not measured here)" in " ".join(out.split())) == bool(real)


def test_by_default_all_programs_run_in_the_librarys_default_mode(monkeypatch) -> None:
    monkeypatch.setattr(demo, "PROGRAMS", tuple(map(BY_NAME.get, ("merge", "transpose", "split"))))
    _, out = printed()
    assert [line.split()[1] for line in out.splitlines() if line.startswith("--- ")] == ["merge", "transpose", "split"]
    assert "guarded: this library's, mode rewrite\n" in out
    assert "stock    2 right, 1 wrong; on real nvFuser also wrong: transpose\n" in out


def test_source_regions_and_structure_are_shown() -> None:
    out = page("recompute", "fallback")[1]
    assert "        x.mul_(2)\n" in out
    assert "    thunder.jit(recompute, executors=[...])\n" in out
    # sin runs on x after the copy_ into x: the point of the listing, and so of resolving the barriers' names
    places = [out.index(text) for text in ("t2 = copy_(t1, x)", "matmul(x, w)  (PyTorch)", "nvFusion2(x, ", "= sin(x)")]
    assert places == sorted(places)
    assert "         unsafe, 1 region, 4 ops in PyTorch, 192 bytes\n         stock: 2 regions, 1 op in PyTorch, " in out
    assert (
        "guard    safe: rewritten, 1 region, 0 ops in PyTorch, 48 bytes\n         stock: 3 regions," in page("split")[1]
    )
    assert "unsafe, refused\n         stock: refused\n" in page("refused", "raise")[1]


def test_without_interpreting_there_are_neither_schedules_nor_notes(monkeypatch) -> None:
    monkeypatch.setenv("GUARDED_NVFUSER_INTERPRET", "0")
    trial = demo._Trial({Schedule.LATE: []}, [], None, Cost(1, 0, 8))
    lines = demo._page(BY_NAME["gaps"], {}, trial, trial, OnHazard.REWRITE)
    assert lines[-1] == "guarded  right"
    assert "real nvFuser" not in "".join(lines)


def test_status_is_1_where_guarded_differs_or_breaks_down(monkeypatch) -> None:
    monkeypatch.setattr(demo, "guarded_nvfuser_ex", InterpretableNvFuserExecutor("unguarded"))
    status, out = printed("--only", "merge", "refused", "split")
    assert status == 1
    assert f"\nguarded  {WRONG}\n         result 1 is [[6, 8], [10, 12]] instead of [[17, 22], [27, 32]]\n" in out
    assert "\nguarded  refused with NotImplementedError\n" in out  # an error that names no hazard
    assert out.endswith("1 of 3 give eager's results or name the hazard; broken: merge, refused\n")


def read_then_write(x):
    y = x.sum()
    x.mul_(2)
    return y


def test_ambiguous_is_right_under_one_schedule_only(monkeypatch) -> None:
    program = Program("ambiguous", read_then_write, "", options={"skip_inplace_alias_updates": True})
    monkeypatch.setattr(demo, "PROGRAMS", (program,))
    _, out = printed()
    assert "stock    ambiguous: right under late, wrong under early\n         result is 20 instead of 10\n" in out
    assert f"guarded  {RIGHT}\n" in out


def test_what_is_left_to_pytorch_is_told(monkeypatch) -> None:
    def leave(self, trace, fusion_pass=GuardedNvFuserExecutor.fusion_pass):
        warnings.warn("some ops run in PyTorch", HazardWarning, stacklevel=2)
        return fusion_pass(self, trace)

    monkeypatch.setattr(GuardedNvFuserExecutor, "fusion_pass", leave)
    _, out = printed("--only", "split")
    assert "\nguard    some ops run in PyTorch\n         rewritten in part, 1 region, " in out


def test_what_a_region_refuses_when_called_is_the_verdict(monkeypatch) -> None:  # as on a GPU, where it finds gaps
    def refusing(self, bsym, stored=frozenset()):
        def region(*args):
            raise layout_error(bsym, bsym.args)

        return region

    monkeypatch.setattr(GuardedNvFuserExecutor, "region_callable", refusing)
    status, out = printed("--only", "gaps")
    assert "\nguard    error[GNV008]: " in out
    assert "safe" not in out
    assert status == 0


def test_an_error_before_any_trace_is_shown() -> None:
    def broken(x):
        raise RuntimeError("no trace of this")

    trial = demo._attempt(Program("", broken, ""), InterpretableNvFuserExecutor("stock"), {})
    assert demo._answer_texts(trial) == ["refused with RuntimeError", "no trace of this"]
    assert demo._listing(trial.trace) == []
    assert not trial.kept_promise


@pytest.mark.parametrize(("arguments", "named"), [(["demo", "--only", "swop"], BY_NAME), ([], ["COMMAND"])])
def test_what_is_not_understood_is_answered_with_what_is(arguments: list[str], named: list[str], capsys) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(arguments)
    message = capsys.readouterr().err.partition("error:")[2]
    assert all(name in message for name in named)


@pytest.mark.parametrize(("variable", "value"), [("TERM", "dumb"), ("NO_COLOR", "1"), ("TERM", "xterm")])
def test_colour_is_for_terminals(variable: str, value: str, monkeypatch) -> None:
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("TERM", "xterm")
    assert "\x1b" not in printed("--only", "gaps")[1]
    monkeypatch.setenv(variable, value)
    out = printed("--only", "gaps", terminal=True)[1]
    assert ("\n\x1b[32mstock" in out) == ("\x1b" in out) == (value == "xterm")


def test_a_user_without_a_gpu_is_told_that_it_interprets() -> None:
    env = {name: value for name, value in os.environ.items() if not name.startswith("GUARDED_NVFUSER_")}
    command = [sys.executable, "-m", "guarded_nvfuser", "demo", "--only", "merge"]
    done = subprocess.run(command, env=env | {"CUDA_VISIBLE_DEVICES": ""}, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("no CUDA device: regions are interpreted on the CPU")
    assert "nvFusion0" in done.stdout


@pytest.mark.parametrize(
    ("other", "told"),
    [
        (lambda x: 1 + x, []),
        (lambda x: x + 2, ["result is [[3, 4], [7, 8]] instead of [[2, 3], [6, 7]]"]),
        (lambda x: (x + 1).double(), ["result is [[2, 3], [6, 7]] in torch.float64 instead of [[2, 3], [6, 7]]"]),
        (lambda x: None, ["result is nothing instead of [[2, 3], [6, 7]]"]),
        (lambda x: x.add_(1), ["x is", "shared memory is result with x instead of nothing", "the memory of x is"]),
        (lambda x: (x + 1, x._base[0, 3:].neg_())[0], ["the memory of x is [1, 2, 3, -4, 5, 6, 7, 8] instead of [1"]),
    ],
)
def test_every_difference_is_told(other: Callable, told: list[str]) -> None:
    program = Program("", lambda x: x + 1, "", columns=4)
    found = demo._differences(demo._look(program.fn, program), demo._look(other, program))
    assert len(found) == len(told)
    assert all(any(line.startswith(text) for line in found) for text in told)


@pytest.mark.parametrize(("interpreting", "legacy"), [("1", object()), ("0", object()), ("0", None)])
def test_stock_is_thunders_own_where_nvfuser_runs(interpreting: str, legacy: object, monkeypatch) -> None:
    monkeypatch.setattr(demo.importlib.util, "find_spec", lambda name: legacy)
    monkeypatch.setenv("GUARDED_NVFUSER_INTERPRET", interpreting)
    assert (demo._stock_executor() is impl.ex) == (interpreting == "0" and legacy is not None)
