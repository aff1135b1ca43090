"""The demo: what it prints, and that its exit status tells a guard that keeps its promise from one that does not."""

from __future__ import annotations

import io
import os
import re
import subprocess
import sys
import warnings

import pytest
import torch

from guarded_nvfuser import GuardedNvFuserExecutor, HazardWarning, demo, guarded_nvfuser_ex
from guarded_nvfuser.__main__ import main
from guarded_nvfuser.demo import PROGRAMS, Answer, Program, attempt, compare, differences, lines_of, look
from guarded_nvfuser.errors import layout_error
from guarded_nvfuser.executor import InterpretableNvFuserExecutor, impl
from guarded_nvfuser.options import OnHazard

NAMES = [program.name for program in PROGRAMS]
STOCK_ANSWERS = {
    "recompute": Answer.WRONG,
    "dataflow": Answer.WRONG,
    "merge": Answer.WRONG,
    "swap": Answer.WRONG,
    "transpose": Answer.RIGHT,  # wrong on real nvFuser, which the interpreter cannot show
    "gaps": Answer.RIGHT,  # likewise
    "refused": Answer.REFUSED,
    "split": Answer.RIGHT,
}
# Not refused in mode "raise"; the interpreter's regions do not look at layouts, else gaps would be.
KEPT = {"gaps", "split"}
ESCAPE = "\x1b"


class Terminal(io.StringIO):
    """A stdout that calls itself a terminal."""

    def isatty(self) -> bool:
        return True


@pytest.fixture
def interpret(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GUARDED_NVFUSER_INTERPRET", "1")


@pytest.fixture
def stock(interpret: None) -> InterpretableNvFuserExecutor:
    return InterpretableNvFuserExecutor("stock_nvfuser")


def program(name: str) -> Program:
    return PROGRAMS[NAMES.index(name)]


def sections(report: str) -> dict[str, list[str]]:
    """The lines of a report by program."""
    parts = [part.splitlines() for part in report.split("\n--- ")[1:]]
    return {lines[0].split()[0]: lines for lines in parts}


def run_as_user(*arguments: str, **variables: str) -> subprocess.CompletedProcess:
    """The demo in a process of its own that sees no GPU and has none of this library's variables."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("GUARDED_NVFUSER_")}
    command = [sys.executable, "-m", "guarded_nvfuser", *arguments]
    return subprocess.run(
        command, env=kept | {"CUDA_VISIBLE_DEVICES": ""} | variables, capture_output=True, text=True, timeout=300
    )


def test_every_program_is_shown_and_guarded_gives_eagers_results(interpret, capsys) -> None:
    assert main(["demo"]) == 0
    shown = sections(capsys.readouterr().out)
    assert list(shown) == NAMES
    for lines in shown.values():
        assert any(line.startswith("guarded  right under the interpreter's schedules late and early") for line in lines)
        for label in ("eager", "stock", "guard"):
            assert sum(line.startswith(f"{label:<9}") for line in lines) >= 1
    assert [name for name, lines in shown.items() if any("[GNV" in line for line in lines)] == [
        name for name in NAMES if name not in KEPT
    ]


def test_source_regions_and_counts_are_shown(interpret, capsys) -> None:
    main(["demo", "--only", "recompute"])
    out = capsys.readouterr().out
    assert "        x.mul_(2)\n" in out
    # sin runs on x after the copy_ into x: the point of the listing, and so of resolving the barriers' names
    listing = "t2 = copy_(t1, x)", "matmul(x, w)  (PyTorch)", "= nvFusion2(x, ", "y = sin(x)"
    places = [out.index(text) for text in listing]
    assert places == sorted(places)
    assert "error[GNV002]: `x.sin()` may already see `x.mul_(2)`" in out


@pytest.mark.parametrize("name", ["recompute", "transpose", "split"])
def test_regions_and_ops_left_to_pytorch_are_counted(name: str, stock) -> None:
    found = compare(program(name), stock, guarded_nvfuser_ex, OnHazard.FALLBACK, "cpu")
    ops = re.findall(r"^  \[?\w.*\]? = (?:torch\.)?(\w+)\(", str(found.guarded.trace), re.MULTILINE)
    regions = [op for op in ops if op.startswith("nvFusion")]
    assert ops
    text = f"; regions: {len(regions)}, ops left to PyTorch: {len(ops) - len(regions)}"
    assert any(line.endswith(text) for line in lines_of(found, demo.Style(colour=False)))


def test_each_program_fits_one_screen(interpret, capsys) -> None:
    main(["demo"])
    out = capsys.readouterr().out
    assert max(map(len, out.splitlines())) <= 100
    assert max(map(len, sections(out).values())) <= 40


@pytest.mark.parametrize("name", NAMES)
def test_stock_answer(name: str, stock) -> None:
    found = compare(program(name), stock, guarded_nvfuser_ex, OnHazard.FALLBACK, "cpu")
    assert found.stock.answer is STOCK_ANSWERS[name]
    assert found.guarded.answer is Answer.RIGHT


def test_stock_splits_what_is_one_region_without_mutation(stock) -> None:
    found = compare(program("split"), stock, guarded_nvfuser_ex, OnHazard.FALLBACK, "cpu")
    assert (found.stock.regions, found.twin) == (3, 1)


@pytest.mark.parametrize("name", ["swap", "transpose", "gaps"])
def test_what_only_real_nvfuser_shows_is_marked_as_not_measured(name: str, interpret, capsys) -> None:
    main(["demo", "--only", name])
    text = " ".join(capsys.readouterr().out.split())
    assert f"real nvFuser: {program(name).real}" in text
    assert "not measured here" in text
    assert (f"on real nvFuser also wrong: {name}" in text) == (name != "swap")


def test_what_stock_gets_right_is_not_called_wrong(interpret, capsys) -> None:
    main(["demo", "--only", "split"])
    assert "real nvFuser" not in capsys.readouterr().out


def test_hazards_are_reported_once_and_not_as_warnings(interpret, capsys) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error", HazardWarning)
        assert main(["demo", "--only", "recompute"]) == 0
    assert capsys.readouterr().out.count("GNV002") == 1


def test_mode_raise_refuses_every_hazard(interpret, capsys) -> None:
    assert main(["demo", "--mode", "raise"]) == 0
    for name, lines in sections(capsys.readouterr().out).items():
        assert sum("[GNV" in line for line in lines) == (name not in KEPT), name
        wanted = "guarded  right under" if name in KEPT else "guarded  refused with HazardError"
        assert any(line.startswith(wanted) for line in lines), name


def test_only_selects(interpret, capsys) -> None:
    assert main(["demo", "--only", "swap", "--only", "split"]) == 0
    assert list(sections(capsys.readouterr().out)) == ["swap", "split"]


def test_unknown_name_lists_the_legal_ones(capsys) -> None:
    with pytest.raises(SystemExit) as stopped:
        main(["demo", "--only", "swop"])
    assert stopped.value.code == 2
    message = capsys.readouterr().err
    assert "swop" in message
    assert all(name in message.partition("choose from")[2] for name in NAMES)


def test_without_a_command_nothing_runs(capsys) -> None:
    with pytest.raises(SystemExit) as stopped:
        main([])
    assert stopped.value.code == 2
    assert "COMMAND" in capsys.readouterr().err


def test_status_is_1_where_guarded_differs(stock, monkeypatch, capsys) -> None:
    monkeypatch.setattr(demo, "guarded_nvfuser_ex", stock)  # an executor that guards nothing
    assert main(["demo", "--only", "merge", "split"]) == 1
    out = capsys.readouterr().out
    assert "guarded  wrong" in out
    assert "broken: merge\n" in out  # split is right even so


def test_status_is_1_where_guarded_breaks_down(stock, monkeypatch, capsys) -> None:
    monkeypatch.setattr(demo, "guarded_nvfuser_ex", stock)
    assert main(["demo", "--only", "refused"]) == 1  # an error that names no hazard is no promise kept
    assert "guarded  refused with NotImplementedError" in capsys.readouterr().out


def test_plain_unless_a_terminal(interpret, capsys, monkeypatch) -> None:
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("TERM", "xterm")
    main(["demo", "--only", "merge"])
    plain = capsys.readouterr().out
    coloured = _on_terminal(monkeypatch)
    monkeypatch.setenv("NO_COLOR", "1")
    asked_plain = _on_terminal(monkeypatch)
    monkeypatch.delenv("NO_COLOR")
    monkeypatch.setenv("TERM", "dumb")
    assert ESCAPE not in plain
    assert f"{ESCAPE}[31;1mstock" in coloured
    assert asked_plain == _on_terminal(monkeypatch) == plain


def _on_terminal(monkeypatch: pytest.MonkeyPatch) -> str:
    terminal = Terminal()
    with monkeypatch.context() as patched:
        patched.setattr(sys, "stdout", terminal)
        main(["demo", "--only", "merge"])
    return terminal.getvalue()


def test_without_a_gpu_it_interprets_and_says_so() -> None:
    done = run_as_user("demo", "--only", "merge")
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("no CUDA device: regions are interpreted on the CPU")
    assert "GUARDED_NVFUSER_INTERPRET=1 is set for this process" in " ".join(done.stdout.split())
    assert "nvFusion0" in done.stdout
    assert ESCAPE not in done.stdout


@pytest.mark.parametrize("before", [None, "0"])
def test_the_variable_is_as_before_afterwards(before: str | None, monkeypatch, capsys) -> None:
    monkeypatch.delenv("GUARDED_NVFUSER_INTERPRET", raising=False)
    if before is not None:
        monkeypatch.setenv("GUARDED_NVFUSER_INTERPRET", before)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    main(["demo", "--only", "merge"])
    assert "no CUDA device" in capsys.readouterr().out
    assert os.environ.get("GUARDED_NVFUSER_INTERPRET") == before


def test_what_the_user_set_is_not_called_set_by_the_demo(interpret, capsys) -> None:
    main(["demo", "--only", "merge"])
    out = capsys.readouterr().out
    assert out.startswith("GUARDED_NVFUSER_INTERPRET=1: regions are interpreted on the CPU")
    assert "set for this process" not in out


def test_without_interpreting_there_are_no_schedules(monkeypatch) -> None:
    monkeypatch.setenv("GUARDED_NVFUSER_INTERPRET", "0")
    cpu = compare(program("gaps"), impl.ex, guarded_nvfuser_ex, OnHazard.FALLBACK, "cpu")  # nothing fuses on the CPU
    assert [run.schedule for run in cpu.stock.runs] == [None]
    report = "\n".join(lines_of(cpu, demo.Style(colour=False)))
    assert "stock    right\n" in report
    assert "schedule" not in report
    assert "real nvFuser" not in report  # where nothing is interpreted, nvFuser is measured


def read_then_write(x):
    y = x.sum()
    x.mul_(2)
    return y


def test_ambiguous_is_right_under_one_schedule_only(stock) -> None:
    one = Program(
        "ambiguous",
        read_then_write,
        lambda device: (torch.ones(3, device=device),),
        "",
        {"skip_inplace_alias_updates": True},
    )
    found = compare(one, stock, guarded_nvfuser_ex, OnHazard.FALLBACK, "cpu")
    assert found.stock.answer is Answer.AMBIGUOUS
    report = "\n".join(lines_of(found, demo.Style(colour=False)))
    assert "stock    ambiguous: right under late, wrong under early\n" in report
    assert "         early: result is 6 instead of 3\n" in report
    assert found.guarded.kept_promise


class RefusingLayouts(GuardedNvFuserExecutor):
    """A guard whose regions find gaps when they are called, as on a GPU."""

    def region_callable(self, bsym):
        def refuse(*args):
            raise layout_error(bsym, bsym.args)

        return refuse


def test_what_a_region_refuses_when_called_is_the_verdict(stock) -> None:
    found = compare(program("gaps"), stock, RefusingLayouts(), OnHazard.RAISE, "cpu")
    report = "\n".join(lines_of(found, demo.Style(colour=False)))
    assert "\nguard    error[GNV008]: " in report
    assert "safe" not in report
    assert found.guarded.kept_promise


def test_an_error_before_any_trace_is_shown(stock) -> None:
    def broken(x):
        raise RuntimeError("no trace of this")

    one = Program("broken", broken, program("gaps").make_args, "")
    trial = attempt(one, stock, look(lambda x: None, one.make_args("cpu"), ["x"]), "cpu")
    assert trial.answer is Answer.REFUSED
    assert trial.listing() == []
    assert not trial.kept_promise


def test_differences_see_values_neighbours_and_shared_memory() -> None:
    def outcome(fn) -> demo.Outcome:
        return look(fn, (torch.zeros(2, 4)[:, :2],), ["x"])

    eager = outcome(lambda x: x.add(1))
    assert differences(eager, outcome(lambda x: x + 1)) == ()
    [wrong] = differences(eager, outcome(lambda x: x + 2))
    assert wrong == "result is [[2, 2], [2, 2]] instead of [[1, 1], [1, 1]]"
    [neighbour] = differences(eager, outcome(lambda x: (x._base[:, 3:].add_(1), x + 1)[1]))
    assert neighbour == "the memory of x is [0, 0, 0, 1, 0, 0, 0, 1] instead of [0, 0, 0, 0, 0, 0, 0, 0]"
    [argument, *_] = differences(eager, outcome(lambda x: (x + 1, x.sub_(1))[0]))
    assert argument == "x is [[-1, -1], [-1, -1]] instead of [[0, 0], [0, 0]]"
    nothing = outcome(lambda x: None)
    assert differences(eager, nothing) == ("result is missing",)
    assert differences(nothing, eager) == ("result is not in eager",)
    [double] = differences(eager, outcome(lambda x: x.double() + 1))
    assert "torch.float64" in double


def test_differences_see_which_results_share_memory() -> None:
    def outcome(fn) -> demo.Outcome:
        return look(fn, (torch.zeros(2),), ["x"])

    itself, copy = outcome(lambda x: x), outcome(lambda x: x.clone())
    assert differences(itself, copy) == ("result and x do not share memory, in eager they do",)
    assert differences(copy, itself) == ("result and x share memory, in eager they do not",)
    empty = look(lambda x: x.new_empty(0), (torch.zeros(0),), ["x"])
    assert empty.shared == frozenset()  # nothing to share, though all empty storages have one address


def test_stock_is_thunders_own_where_nvfuser_runs(monkeypatch) -> None:
    monkeypatch.setattr(demo.importlib.util, "find_spec", lambda name: object())
    monkeypatch.setenv("GUARDED_NVFUSER_INTERPRET", "1")
    assert type(demo.stock_executor()) is InterpretableNvFuserExecutor
    monkeypatch.setenv("GUARDED_NVFUSER_INTERPRET", "0")
    assert demo.stock_executor() is impl.ex
    monkeypatch.setattr(demo.importlib.util, "find_spec", lambda name: None)
    assert type(demo.stock_executor()) is InterpretableNvFuserExecutor
