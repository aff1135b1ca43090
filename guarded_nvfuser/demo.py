"""`python -m guarded_nvfuser demo`: programs that stock Thunder gets wrong, refuses or splits, and the guard."""

from __future__ import annotations

import argparse
import importlib.util
import inspect
import os
import sys
import textwrap
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import combinations
from typing import Any

import thunder
import torch
from thunder.core.proxies import Proxy
from thunder.core.symbol import BoundSymbol
from thunder.core.trace import TraceCtx
from thunder.extend import FusionExecutor
from torch.utils._pytree import tree_leaves

from guarded_nvfuser import Cost, HazardError, HazardWarning, cost, guarded_nvfuser_ex, on_hazard, verdicts
from guarded_nvfuser.demo_programs import PROGRAMS, Program
from guarded_nvfuser.errors import headline
from guarded_nvfuser.executor import InterpretableNvFuserExecutor, impl
from guarded_nvfuser.hazards import is_region
from guarded_nvfuser.options import DEFAULT_ON_HAZARD, INTERPRET_VARIABLE, OnHazard, Schedule, interpreting, schedule

_COLOURS = {"right": "32", "wrong": "31;1", "ambiguous": "31;1", "refused": "33"}


def _look(fn: Callable, program: Program) -> dict[str, Any]:
    """The results of a call, its arguments afterwards, the memory around those that are views, and shared memory."""
    with torch.device("cpu" if interpreting() else "cuda"):
        args = program.args()
    results = [leaf for leaf in tree_leaves(fn(*args.values())) if isinstance(leaf, torch.Tensor)]
    labels = ["result"] if len(results) == 1 else [f"result {index}" for index in range(len(results))]
    seen = dict(zip(labels, results)) | args
    pointers = {label: tensor.untyped_storage().data_ptr() for label, tensor in seen.items()}
    shared = [f"{a} with {b}" for a, b in combinations(seen, 2) if pointers[a] == pointers[b]]
    around = {f"the memory of {name}": arg._base.flatten() for name, arg in args.items() if not arg.is_contiguous()}
    return seen | around | ({"shared memory": ", ".join(shared)} if shared else {})


def _differences(eager: dict[str, Any], other: dict[str, Any]) -> list[str]:
    """How an outcome differs from eager's, in words; empty if a caller cannot tell the two apart."""
    pairs = {label: (eager.get(label), other.get(label)) for label in (*eager, *other)}
    return [f"{label} is {_text(b)} instead of {_text(a)}" for label, (a, b) in pairs.items() if not _same(a, b)]


def _same(a: Any, b: Any) -> bool:
    if not (isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor)):
        return a is b or (isinstance(a, str) and a == b)
    return a.dtype == b.dtype and a.shape == b.shape and torch.allclose(a, b, rtol=1e-5, atol=1e-6, equal_nan=True)


def _text(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return _text(value.tolist()) + (f" in {value.dtype}" if value.dtype != torch.float32 else "")
    if isinstance(value, list):
        return f"[{', '.join(map(_text, value))}]"
    return "nothing" if value is None else f"{value:.4g}" if isinstance(value, float) else str(value)


@dataclass(frozen=True)
class _Trial:
    """What came of a program under an executor."""

    runs: Mapping[Schedule, list[str] | Exception]  # the differences from eager, or the error that was raised
    notes: list[str]  # what the guard found
    trace: TraceCtx | None  # Thunder's last one, if it got to any
    cost: Cost | None  # None where the program was refused

    @property
    def answer(self) -> str:
        """The runs in one word."""
        if self.cost is None:
            return "refused"
        wrong = [bool(run) for run in self.runs.values()]
        return "wrong" if all(wrong) else "ambiguous" if any(wrong) else "right"

    @property
    def kept_promise(self) -> bool:
        """Whether every call gave what eager gives, or raised an error that names the hazards."""
        return all(isinstance(run, HazardError) or run == [] for run in self.runs.values())


def _attempt(program: Program, executor: FusionExecutor, eager: dict[str, Any]) -> _Trial:
    """Compile a program for an executor and call it once per schedule."""
    jitted = thunder.jit(program.fn, executors=[executor], **program.options)
    runs: dict[Schedule, list[str] | Exception] = {}
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", HazardWarning)
        for order in Schedule if interpreting() else [Schedule.LATE]:
            try:
                with schedule(order):
                    runs[order] = _differences(eager, _look(jitted, program))
            except Exception as error:  # whatever is raised is an answer, and the demo is there to show it
                runs[order] = error
    errors = [run for run in runs.values() if isinstance(run, Exception)]
    found = [*(error for error in errors if isinstance(error, HazardError)), *verdicts(jitted)]
    notes = [headline(hazard) for one in found for hazard in one.hazards]
    notes = notes or [str(warning.message) for warning in caught if warning.category is HazardWarning]
    traces = thunder.compile_stats(jitted).last_traces or [None]
    return _Trial(runs, list(dict.fromkeys(notes)), traces[-1], None if errors else cost(jitted))


def _stock_executor() -> FusionExecutor:
    """Thunder's own nvFuser executor, or, where that cannot run, one that forms the same regions without any guard.

    Thunder 0.2.6 asks the legacy `nvfuser` module for its inputs' descriptors, which nvFuser 0.2.36 no longer ships.
    """
    if not interpreting() and importlib.util.find_spec("nvfuser") is not None:
        return impl.ex
    return InterpretableNvFuserExecutor("stock_nvfuser")


def _listing(trace: TraceCtx | None) -> list[str]:
    """Regions and ops in the order in which they run, each tensor under the first name of its memory.

    Barriers and copy_ rename what they are given; with the names resolved, a read that moved behind a write shows.
    """
    names: dict[str, str] = {}
    lines = []
    for bsym in trace.bound_symbols if trace is not None else ():
        if bsym.sym.name == "update_aliases":
            pairs = zip(bsym.flat_proxy_outs, bsym.flat_proxy_args)
            names.update({out.name: names.get(arg.name, arg.name) for out, arg in pairs})
        elif is_region(bsym):
            lines += [_op_text(bsym, names), *(f"    {_op_text(op, names)}" for op in bsym.subsymbols)]
        elif bsym.sym.executor is not None:  # not Python's bookkeeping
            lines.append(f"{_op_text(bsym, names)}  (PyTorch)")
    return lines


def _op_text(bsym: BoundSymbol, names: dict[str, str]) -> str:
    args = (names.get(arg.name, arg.name) if isinstance(arg, Proxy) else repr(arg) for arg in bsym.args)
    text = f"{', '.join(out.name for out in bsym.flat_proxy_outs)} = {bsym.sym.name}({', '.join(args)})"
    if bsym.sym.name == "copy_":
        names[bsym.output.name] = names.get(bsym.args[1].name, bsym.args[1].name)
    return text


def _page(program: Program, eager: dict[str, Any], stock: _Trial, guarded: _Trial, mode: OnHazard) -> list[str]:
    """The report on one program, for a terminal of 100 columns."""
    options = "".join(f", {name}={value!r}" for name, value in program.options.items())
    call = f"thunder.jit({program.fn.__name__}, executors=[...]{options})"
    real = f"real nvFuser: {program.real} (from nvFuser's contract, not measured here)"
    safe, unsafe = ("safe: rewritten", "rewritten in part") if mode is OnHazard.REWRITE else ("safe", "unsafe")
    verdict = f"{unsafe if guarded.notes else safe}, {_structure(guarded)}"
    return [
        f"--- {program.name} ".ljust(100, "-"),
        *textwrap.indent(inspect.getsource(program.fn) + call, "    ").splitlines(),
        "",
        *_entry("eager", "; ".join(f"{label} = {_text(value)}" for label, value in eager.items())),
        *_paint(stock.answer, _entry("stock", *_answer_texts(stock))),
        *(f"{'':9}{line}" for line in _listing(stock.trace)),
        *_entry("", f"why: {program.why}"),
        *_paint("wrong", _entry("", real) if program.real and interpreting() else []),
        *_entry("guard", *guarded.notes, verdict, f"stock: {_structure(stock)}"),
        *_paint(guarded.answer if guarded.kept_promise else "wrong", _entry("guarded", *_answer_texts(guarded))),
    ]


def _structure(trial: _Trial) -> str:
    """Its regions, ops and bytes, in words."""
    if trial.cost is None:
        return "refused"
    counts = (trial.cost.regions, "region"), (trial.cost.ops, "op"), (trial.cost.bytes, "byte")
    regions, ops, moved = (f"{count} {what}{'' if count == 1 else 's'}" for count, what in counts)
    return f"{regions}, {ops} in PyTorch, {moved}"


def _answer_texts(trial: _Trial) -> list[str]:
    """The answer, and what differs or was raised, said once where the schedules agree."""
    runs = trial.runs.values()
    errors = dict.fromkeys(type(run).__name__ for run in runs if isinstance(run, Exception))
    each = ", ".join(f"{'wrong' if run else 'right'} under {order.value}" for order, run in trial.runs.items())
    under = f": {each}" if trial.answer == "ambiguous" else " under late and early" if interpreting() else ""
    answer = f"refused with {' and '.join(errors)}" if errors else trial.answer + under
    return [answer, *dict.fromkeys(text for run in runs for text in _details(run))]


def _details(run: list[str] | Exception) -> list[str]:
    if isinstance(run, HazardError):  # its hazards stand above
        return []
    return [textwrap.shorten(str(run), 250)] if isinstance(run, Exception) else run


def _entry(label: str, *texts: str) -> list[str]:
    """A label and texts wrapped beside it."""
    lines = [line for text in texts for line in textwrap.wrap(text, 91, break_on_hyphens=False)]
    return [f"{'' if index else label:<9}{line}" for index, line in enumerate(lines)]


def _paint(answer: str, lines: list[str]) -> list[str]:
    """Colour for terminals only, and not where `NO_COLOR` is set (https://no-color.org) or the terminal is dumb."""
    if not sys.stdout.isatty() or os.environ.get("NO_COLOR") or os.environ.get("TERM") == "dumb":
        return lines
    return [f"\x1b[{_COLOURS[answer]}m{line}\x1b[0m" for line in lines]


def add_parser(commands: Any) -> None:
    """Add the subcommand `demo` to a command line.

    Args:
        commands: what `argparse.ArgumentParser.add_subparsers` returned.
    """
    about = "run programs that mutate tensors in eager, under stock Thunder and guarded, and compare"
    parser = commands.add_parser("demo", help=about, description=f"{about}. Status 1 if guarded differs from eager.")
    modes, names = [mode.value for mode in OnHazard], [program.name for program in PROGRAMS]
    parser.add_argument("--mode", choices=modes, default=DEFAULT_ON_HAZARD.value, help="on a hazard (%(default)s)")
    parser.add_argument("--only", nargs="+", choices=names, default=names, metavar="NAME", help=", ".join(names))
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Run the demo and print its report; without a GPU, interpret: `GUARDED_NVFUSER_INTERPRET` is set for the process.

    Args:
        options: `mode` and `only`, as parsed.

    Returns:
        The exit status: 1 if a guarded program gave something else than eager without saying so, else 0.
    """
    if not torch.cuda.is_available():
        os.environ[INTERPRET_VARIABLE] = "1"
    mode, stock_executor = OnHazard(options.mode), _stock_executor()
    if interpreting():
        print(f"{INTERPRET_VARIABLE}=1" if torch.cuda.is_available() else "no CUDA device", end=": ")
        print("regions are interpreted on the CPU; late and early: orders open to nvFuser")
    print(f"stock: Thunder's nvFuser executor; guarded: this library's, mode {mode.value}")
    print("listings call a tensor by its first name, whatever Thunder's barriers and copy_ rename it to")
    found = []
    for program in (program for program in PROGRAMS if program.name in options.only):
        with on_hazard(mode):
            eager = _look(program.fn, program)
            stock, guarded = (_attempt(program, ex, eager) for ex in (stock_executor, guarded_nvfuser_ex))
        print("", *_page(program, eager, stock, guarded, mode), sep="\n", flush=True)
        found.append((program, stock, guarded))
    print("", *_summary(found), sep="\n")
    return 0 if all(guarded.kept_promise for _, _, guarded in found) else 1


def _summary(found: list[tuple[Program, _Trial, _Trial]]) -> list[str]:
    answers = [stock.answer for _, stock, _ in found]
    counts = ", ".join(f"{answers.count(answer)} {answer}" for answer in _COLOURS if answer in answers)
    unseen = [program.name for program, stock, _ in found if stock.answer == "right" and program.real]
    counts += f"; on real nvFuser also wrong: {', '.join(unseen)}" if unseen and interpreting() else ""
    broken = [program.name for program, _, guarded in found if not guarded.kept_promise]
    kept = f"{len(found) - len(broken)} of {len(found)} give eager's results or name the hazard"
    kept += f"; broken: {', '.join(broken)}" if broken else ""
    return [*_entry("stock", counts), *_paint("wrong" if broken else "right", _entry("guarded", kept))]
