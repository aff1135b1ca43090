"""`python -m guarded_nvfuser demo`: programs that stock Thunder gets wrong, refuses or splits, in eager, stock and
guarded.

Every program is a function of this file, so that the listings and the hazards point at lines that can be read here.
"""

from __future__ import annotations

import argparse
import importlib.util
import inspect
import os
import sys
import textwrap
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from enum import Enum
from itertools import combinations
from typing import Any, TextIO

import thunder
import torch
from thunder.core.proxies import Proxy
from thunder.core.symbol import BoundSymbol
from thunder.core.trace import TraceCtx
from thunder.extend import FusionExecutor
from torch.utils._pytree import tree_leaves

from guarded_nvfuser import HazardError, HazardWarning, guarded_nvfuser_ex, on_hazard, verdicts
from guarded_nvfuser.errors import headline
from guarded_nvfuser.executor import InterpretableNvFuserExecutor, impl
from guarded_nvfuser.hazards import Hazard, is_region
from guarded_nvfuser.options import DEFAULT_ON_HAZARD, INTERPRET_VARIABLE, OnHazard, Schedule, interpreting, schedule

_WIDTH = 100
_LABEL = 9  # columns of "guarded  "
_INTERPRETED = "regions are interpreted on the CPU, in two orders that nvFuser could choose, late and early"


# --- the programs, without annotations and docstrings: the report shows their source as a user would write it


def recompute(x, w):
    y = x.sin()
    x.mul_(2)
    z = x @ w
    return y + z


def merge(x, y):
    a = x + y
    x.copy_(a * 2)
    b = x + y
    return a, b


def swap(x, y):
    t = x.clone()
    x.copy_(y)
    y.copy_(t)


def transpose(x):
    x.copy_(x.t() * 2)


def gaps(head):  # called with head = buf[:, :2], whose rows lie apart in memory
    head.mul_(2)


def refused(x, y):
    z = x * y
    x.copy_(z)
    return x + y


def split(a):
    a.tanh_()
    return a * a * a * a


def split_without_mutation(a):
    a = a.tanh()
    return a * a * a * a


@dataclass(frozen=True)
class Program:
    """One program of the demo.

    Attributes:
        name: what `--only` selects it by.
        fn: the program; it returns tensors or nothing.
        make_args: makes fresh arguments on a device.
        why: the cause of what stock Thunder does.
        options: further options of `thunder.jit`.
        real: what real nvFuser does where the interpreter cannot show it, from nvFuser's contract; None: nothing.
        twin: the same program written without mutation, whose regions are counted for comparison.
    """

    name: str
    fn: Callable
    make_args: Callable[[str], tuple[torch.Tensor, ...]]
    why: str
    options: Mapping[str, Any] = field(default_factory=dict)
    real: str | None = None
    twin: Callable | None = None


def _count(device: str, *shape: int, start: int = 1) -> torch.Tensor:
    """start, start + 1, ...: small numbers, which a reader can check by eye."""
    size = torch.Size(shape).numel()
    return torch.arange(start, start + size, dtype=torch.float32, device=device).reshape(shape)


PROGRAMS = (
    Program(
        "recompute",
        recompute,
        lambda device: (_count(device, 2, 2), _count(device, 2, 2)),
        "rematerialisation computes x.sin() again, after x was overwritten",
    ),
    Program(
        "dataflow",
        recompute,
        lambda device: (_count(device, 2, 2), _count(device, 2, 2)),
        "the same under ThunderFX's default partition: nothing orders an earlier read before a later write",
        options={"fusion_type": "dataflow"},
    ),
    Program(
        "merge",
        merge,
        lambda device: (_count(device, 3), _count(device, 3, start=4)),
        "CSE takes the two x + y for the same value, across the write between them",
        options={"skip_inplace_alias_updates": True},
    ),
    Program(
        "swap",
        swap,
        lambda device: (_count(device, 3), _count(device, 3, start=4)),
        "rematerialisation clones x again, after x was overwritten",
        real="wrong even where the clone stays in its place: a clone comes back as the memory of x itself",
    ),
    Program(
        "transpose",
        transpose,
        lambda device: (_count(device, 2, 2),),
        "x and x.t() enter the region as two inputs, and nvFuser takes them for independent tensors",
        real="x itself is wrong: in one kernel, some threads read x.t() where others have already written x",
    ),
    Program(
        "gaps",
        gaps,
        lambda device: (_count(device, 2, 4)[:, :2],),
        "nothing in a trace tells how an argument lies in memory",
        real="writes the target's gaps: the update lands at contiguous addresses, on the elements between head's rows "
        "(NVIDIA/Fuser#5356). On a GPU the guard looks at the layout when the region is called, and runs it in "
        "PyTorch or raises GNV008, by mode",
    ),
    Program(
        "refused",
        refused,
        lambda device: (_count(device, 3), _count(device, 3, start=4)),
        "Thunder's check refuses a region that reads the target of a copy_ after it; eager's answer is well defined",
        options={"skip_inplace_alias_updates": True},
    ),
    Program(
        "split",
        split,
        lambda device: (_count(device, 3),),
        "the barriers that Thunder inserts before in-place ops break fusions",
        twin=split_without_mutation,
    ),
)


# --- what a caller sees


@dataclass(frozen=True)
class Outcome:
    """What a caller sees of a call.

    Attributes:
        tensors: by label: each result, each argument afterwards, and the memory around arguments that are views.
        shared: the pairs of labels of results and arguments that share memory.
    """

    tensors: Mapping[str, torch.Tensor]
    shared: frozenset[tuple[str, str]]


def look(fn: Callable, args: Sequence[torch.Tensor], names: Sequence[str]) -> Outcome:
    """Call a function and look at everything that it may have touched.

    Args:
        fn: what to call.
        args: its arguments.
        names: the arguments' names, for the labels.

    Returns:
        What a caller sees.
    """
    results = [leaf for leaf in tree_leaves(fn(*args)) if isinstance(leaf, torch.Tensor)]
    labels = ["result"] if len(results) == 1 else [f"result {index}" for index in range(len(results))]
    seen = dict(zip((*labels, *names), (*results, *args)))
    around = {f"the memory of {name}": _storage(arg) for name, arg in zip(names, args) if _is_part(arg)}
    pairs = combinations(seen, 2)
    shared = frozenset((a, b) for a, b in pairs if _address(seen[a]) == _address(seen[b]) and seen[a].numel())
    return Outcome(seen | around, shared)


def differences(eager: Outcome, other: Outcome) -> tuple[str, ...]:
    """How an outcome differs from eager's, in words.

    Args:
        eager: what PyTorch eager gives.
        other: what else was given.

    Returns:
        One sentence per difference; empty if a caller cannot tell the two apart.
    """
    missing = [f"{label} is missing" for label in eager.tensors if label not in other.tensors]
    added = [f"{label} is not in eager" for label in other.tensors if label not in eager.tensors]
    values = [
        f"{label} is {_value(other.tensors[label], tensor)} instead of {_value(tensor, other.tensors[label])}"
        for label, tensor in eager.tensors.items()
        if label in other.tensors and not _same(tensor, other.tensors[label])
    ]
    kept_apart = [f"{a} and {b} share memory, in eager they do not" for a, b in sorted(other.shared - eager.shared)]
    joined = [f"{a} and {b} do not share memory, in eager they do" for a, b in sorted(eager.shared - other.shared)]
    return (*missing, *added, *values, *kept_apart, *joined)


def _is_part(tensor: torch.Tensor) -> bool:
    return tensor.numel() * tensor.element_size() != tensor.untyped_storage().nbytes()


def _storage(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.as_strided((tensor.untyped_storage().nbytes() // tensor.element_size(),), (1,), 0)


def _address(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _same(a: torch.Tensor, b: torch.Tensor) -> bool:
    alike = (a.dtype, a.shape, a.device) == (b.dtype, b.shape, b.device)
    return alike and torch.allclose(a, b, rtol=1e-5, atol=1e-6, equal_nan=True)


def _value(tensor: torch.Tensor, beside: torch.Tensor) -> str:
    return _text(tensor) + (f" in {tensor.dtype}" if tensor.dtype != beside.dtype else "")


def _text(value: Any) -> str:
    value = value.tolist() if isinstance(value, torch.Tensor) else value
    return f"[{', '.join(map(_text, value))}]" if isinstance(value, list) else f"{value:.4g}"


# --- one program under one executor


class Answer(Enum):
    """What an executor makes of a program, compared with eager."""

    RIGHT = "right"
    WRONG = "wrong"
    AMBIGUOUS = "ambiguous"  # right under one schedule, wrong under another
    REFUSED = "refused"


@dataclass(frozen=True)
class Run:
    """One call: how it differs from eager, or the error that it raised.

    Attributes:
        schedule: the interpreter's schedule; None on a GPU.
        differences: see the function of this name.
        error: what was raised; None if nothing.
    """

    schedule: Schedule | None
    differences: tuple[str, ...] = ()
    error: Exception | None = None


@dataclass(frozen=True)
class Trial:
    """A program under an executor.

    Attributes:
        runs: one call per schedule.
        trace: Thunder's last trace; None if it got to none.
        hazards: what the guard found; None if it gave no verdict.
    """

    runs: tuple[Run, ...]
    trace: TraceCtx | None
    hazards: tuple[Hazard, ...] | None

    @property
    def answer(self) -> Answer:
        """The runs in one word."""
        if any(run.error is not None for run in self.runs):
            return Answer.REFUSED
        wrong = [bool(run.differences) for run in self.runs]
        if all(wrong):
            return Answer.WRONG
        return Answer.AMBIGUOUS if any(wrong) else Answer.RIGHT

    @property
    def kept_promise(self) -> bool:
        """Whether every call gave what eager gives, or said what stands against it."""
        return all(isinstance(run.error, HazardError) or not (run.error or run.differences) for run in self.runs)

    @property
    def regions(self) -> int:
        """How many regions the program became."""
        return sum(map(is_region, self._ops()))

    @property
    def left(self) -> int:
        """How many ops outside regions PyTorch runs."""
        return len(self._ops()) - self.regions

    def listing(self) -> list[str]:
        """The regions with their ops, and the ops between them."""
        return _listing(self.trace) if self.trace is not None else []

    def _ops(self) -> list[BoundSymbol]:
        return [bsym for bsym in self.trace.bound_symbols if _runs(bsym)] if self.trace is not None else []


def attempt(program: Program, executor: FusionExecutor, expected: Outcome, device: str) -> Trial:
    """Compile a program for an executor and call it once per schedule.

    Args:
        program: what to compile.
        executor: the only executor besides those that Thunder always adds.
        expected: eager's outcome.
        device: where the arguments live.

    Returns:
        What came of it.
    """
    jitted = thunder.jit(program.fn, executors=[executor], **program.options)
    orders = tuple(Schedule) if interpreting() else (None,)
    runs = tuple(_call(jitted, program, expected, device, order) for order in orders)
    return Trial(runs, _last_trace(jitted), _hazards(jitted, runs))


def _call(jitted: Callable, program: Program, expected: Outcome, device: str, order: Schedule | None) -> Run:
    with schedule(order) if order is not None else nullcontext():
        try:
            outcome = look(jitted, program.make_args(device), _names(program))
        except Exception as error:  # whatever is raised is an answer, and the demo is there to show it
            return Run(order, error=error)
    return Run(order, differences(expected, outcome))


def _names(program: Program) -> list[str]:
    return list(inspect.signature(program.fn).parameters)


def _last_trace(jitted: Callable) -> TraceCtx | None:
    try:
        return thunder.last_traces(jitted)[-1]
    except TypeError:  # Thunder's way to say that it got to none
        return None


def _hazards(jitted: Callable, runs: Sequence[Run]) -> tuple[Hazard, ...] | None:
    for run in runs:
        if isinstance(run.error, HazardError):
            return run.error.hazards
    given = verdicts(jitted)
    return given[-1].hazards if given else None


def _runs(bsym: BoundSymbol) -> bool:
    """Whether a symbol of a final trace computes something: neither Python's bookkeeping nor a barrier."""
    return bsym.sym.executor is not None and bsym.sym.name != "update_aliases"


def _listing(trace: TraceCtx) -> list[str]:
    """Regions and ops in the order in which they run, each tensor under the first name of its memory.

    Barriers and copy_ rename what they are given; with the names resolved, a read that moved behind a write shows.
    """
    names: dict[str, str] = {}
    lines = []
    for bsym in trace.bound_symbols:
        if bsym.sym.name == "update_aliases":
            pairs = zip(bsym.flat_proxy_outs, bsym.flat_proxy_args)
            names.update({out.name: names.get(arg.name, arg.name) for out, arg in pairs})
        elif is_region(bsym):
            outs = ", ".join(out.name for out in bsym.flat_proxy_outs)
            lines.append(f"[{outs}] = {_call_text(bsym, names)}")
            lines += [f"    {_op_text(op, names)}" for op in bsym.subsymbols]
        elif _runs(bsym):
            lines.append(f"{_op_text(bsym, names)}  (PyTorch)")
    return lines


def _op_text(bsym: BoundSymbol, names: dict[str, str]) -> str:
    text = f"{', '.join(out.name for out in bsym.flat_proxy_outs)} = {_call_text(bsym, names)}"
    if bsym.sym.name == "copy_":
        target = bsym.args[1].name
        names[bsym.output.name] = names.get(target, target)
    return text


def _call_text(bsym: BoundSymbol, names: Mapping[str, str]) -> str:
    args = (names.get(arg.name, arg.name) if isinstance(arg, Proxy) else repr(arg) for arg in bsym.args)
    return f"{bsym.sym.name}({', '.join(args)})"


# --- the report


@dataclass(frozen=True)
class Style:
    """ANSI colours, or none.

    Attributes:
        colour: whether to colour.
    """

    colour: bool

    @classmethod
    def of(cls, stream: TextIO) -> Style:
        """Colour for terminals only, and not where `NO_COLOR` is set (https://no-color.org) or the terminal is dumb."""
        plain = os.environ.get("NO_COLOR") or os.environ.get("TERM") == "dumb"
        return cls(stream.isatty() and not plain)

    def __call__(self, code: str, lines: Sequence[str]) -> list[str]:
        """The lines in a colour, given as the numbers of an ANSI code."""
        return [f"\x1b[{code}m{line}\x1b[0m" if self.colour and line else line for line in lines]


_BOLD, _DIM, _SOURCE = "1", "2", "36"
_COLOURS = {Answer.RIGHT: "32", Answer.WRONG: "31;1", Answer.AMBIGUOUS: "31;1", Answer.REFUSED: "33"}


@dataclass(frozen=True)
class Comparison:
    """A program in eager, stock and guarded.

    Attributes:
        program: what was run.
        eager: what it must give.
        stock: the program under Thunder's nvFuser executor.
        guarded: the program under this library's.
        twin: the regions of the twin without mutation; None without a twin.
    """

    program: Program
    eager: Outcome
    stock: Trial
    guarded: Trial
    twin: int | None


def compare(
    program: Program, stock: FusionExecutor, guarded: FusionExecutor, mode: OnHazard, device: str
) -> Comparison:
    """Run a program in all three ways.

    Args:
        program: what to run.
        stock: Thunder's executor.
        guarded: the executor that must give what eager gives.
        mode: what `guarded` does on a hazard.
        device: where the arguments live.

    Returns:
        Everything that the report shows.
    """
    eager = look(program.fn, program.make_args(device), _names(program))
    with warnings.catch_warnings(), on_hazard(mode):
        warnings.simplefilter("ignore", HazardWarning)  # the report shows the hazards itself
        under_guard = attempt(program, guarded, eager, device)
    twin = None
    if program.twin is not None:
        pure = Program(program.name, program.twin, program.make_args, program.why, program.options)
        twin = attempt(pure, stock, eager, device).regions
    return Comparison(program, eager, attempt(program, stock, eager, device), under_guard, twin)


def lines_of(found: Comparison, style: Style) -> list[str]:
    """The report on one program, for a terminal of 100 columns.

    Args:
        found: what came of it.
        style: colours.

    Returns:
        The lines, without line ends.
    """
    return [
        *style(_BOLD, [f"--- {found.program.name} ".ljust(_WIDTH, "-")]),
        *_program_lines(found.program, style),
        "",
        *_entry("eager", "; ".join(f"{label} = {_text(tensor)}" for label, tensor in found.eager.tensors.items())),
        *_stock_lines(found, style),
        *_guard_lines(found.guarded, style),
    ]


def _program_lines(program: Program, style: Style) -> list[str]:
    source = textwrap.dedent(inspect.getsource(program.fn)).rstrip().splitlines()
    options = "".join(f", {name}={value!r}" for name, value in program.options.items())
    call = f"thunder.jit({program.fn.__name__}, executors=[...]{options})"
    return [f"    {line}" for line in (*style(_SOURCE, source), *style(_DIM, [call]))]


def _stock_lines(found: Comparison, style: Style) -> list[str]:
    lines = style(_COLOURS[found.stock.answer], _entry("stock", _answer_text(found.stock)))
    lines += _details(found.stock)
    lines += [" " * _LABEL + line for line in found.stock.listing()]
    lines += style(_DIM, _entry("", f"why: {found.program.why}"))
    if found.twin is not None:
        lines += style(_DIM, _entry("", f"regions: {found.stock.regions}; written without mutation: {found.twin}"))
    return lines + style(_COLOURS[Answer.WRONG], _entry("", _real_text(found.program)))


def _real_text(program: Program) -> str:
    """What the interpreter cannot show; empty where nvFuser itself runs and is measured."""
    if program.real is None or not interpreting():
        return ""
    return f"real nvFuser: {program.real} (from nvFuser's contract, not measured here)"


def _guard_lines(trial: Trial, style: Style) -> list[str]:
    lines = []
    for index, text in enumerate(_verdict_texts(trial)):
        lines += _entry("" if index else "guard", text)
    left = (
        f"; regions: {trial.regions}, ops left to PyTorch: {trial.left}" if trial.answer is not Answer.REFUSED else ""
    )
    colour = _COLOURS[trial.answer] if trial.kept_promise else _COLOURS[Answer.WRONG]
    return lines + style(colour, _entry("guarded", _answer_text(trial) + left)) + _details(trial)


def _verdict_texts(trial: Trial) -> list[str]:
    if trial.hazards is None:
        return ["no verdict"]
    return [headline(hazard) for hazard in trial.hazards] or ["safe: Thunder's regions mean what the program means"]


def _answer_text(trial: Trial) -> str:
    if trial.answer is Answer.AMBIGUOUS:
        each = (f"{'wrong' if run.differences else 'right'} under {run.schedule.value}" for run in trial.runs)
        return f"{trial.answer.value}: {', '.join(each)}"
    errors = dict.fromkeys(type(run.error).__name__ for run in trial.runs if run.error is not None)
    if errors:
        return f"{trial.answer.value} with {' and '.join(errors)}"
    orders = [run.schedule.value for run in trial.runs if run.schedule is not None]
    return trial.answer.value + (f" under the interpreter's schedules {' and '.join(orders)}" if orders else "")


def _details(trial: Trial) -> list[str]:
    """What differs or was raised, said once where the schedules agree."""
    texts = {}
    for run in trial.runs:
        for text in run.differences if run.error is None else _error_texts(run.error):
            texts.setdefault(text, []).append(run)
    lines = []
    for text, runs in texts.items():
        under = "" if len(runs) == len(trial.runs) else f"{runs[0].schedule.value}: "
        lines += _entry("", under + text)
    return lines


def _error_texts(error: Exception) -> list[str]:
    """The beginning of an error's message; nothing for the guard's, whose hazards stand above it."""
    first = str(error).partition("\n")[0]
    return [] if isinstance(error, HazardError) else [textwrap.shorten(first, 300, placeholder=" ...")]


def _entry(label: str, text: str) -> list[str]:
    """A label and a text wrapped beside it."""
    wrapped = textwrap.wrap(text, _WIDTH - _LABEL, break_on_hyphens=False)
    return [f"{head:<{_LABEL}}{line}" for head, line in zip([label, *[""] * len(wrapped)], wrapped)]


# --- the command


def add_parser(commands: Any) -> None:
    """Add the subcommand `demo` to a command line.

    Args:
        commands: what `argparse.ArgumentParser.add_subparsers` returned.
    """
    about = "run programs that mutate tensors in eager, under stock Thunder and guarded, and compare"
    parser = commands.add_parser("demo", help=about, description=f"{about}. Status 1 if guarded differs from eager.")
    modes = [mode.value for mode in OnHazard]
    parser.add_argument(
        "--mode", choices=modes, default=DEFAULT_ON_HAZARD.value, help="what the guard does on a hazard (%(default)s)"
    )
    names = [program.name for program in PROGRAMS]
    parser.add_argument(
        "--only", nargs="+", action="extend", choices=names, metavar="NAME", help=f"of {', '.join(names)}"
    )
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Run the demo and print its report.

    Args:
        options: `mode` and `only`, as parsed.

    Returns:
        The exit status: 1 if a guarded program gave something else than eager without saying so, else 0.
    """
    style = Style.of(sys.stdout)
    chosen = [program for program in PROGRAMS if options.only is None or program.name in options.only]
    with _interpreting_without_gpu() as notice:
        print("\n".join(_head(notice, options.mode)))
        device = "cpu" if interpreting() else "cuda"
        stock, mode = stock_executor(), OnHazard(options.mode)
        found = []
        for program in chosen:
            found.append(compare(program, stock, guarded_nvfuser_ex, mode, device))
            print("", *lines_of(found[-1], style), sep="\n", flush=True)
        print("", *_summary(found, style), sep="\n")
    return 0 if all(one.guarded.kept_promise for one in found) else 1


def stock_executor() -> FusionExecutor:
    """Thunder's own nvFuser executor, or, where that cannot run, one that forms the same regions without any guard.

    Thunder 0.2.6 asks the legacy `nvfuser` module for its inputs' descriptors, which nvFuser 0.2.36 no longer ships.
    """
    if not interpreting() and importlib.util.find_spec("nvfuser") is not None:
        return impl.ex
    return InterpretableNvFuserExecutor("stock_nvfuser")


@contextmanager
def _interpreting_without_gpu() -> Iterator[str | None]:
    """Interpret where there is no GPU, and yield the line that says so; None where nvFuser runs."""
    if interpreting():
        yield f"{INTERPRET_VARIABLE}=1: {_INTERPRETED}"
    elif torch.cuda.is_available():
        yield None
    else:
        before = os.environ.get(INTERPRET_VARIABLE)
        os.environ[INTERPRET_VARIABLE] = "1"
        try:
            yield f"no CUDA device: {_INTERPRETED} ({INTERPRET_VARIABLE}=1 is set for this process)"
        finally:
            if before is None:
                del os.environ[INTERPRET_VARIABLE]
            else:
                os.environ[INTERPRET_VARIABLE] = before


def _head(notice: str | None, mode: str) -> list[str]:
    about = (
        f"stock: Thunder's nvFuser executor. guarded: this library's, mode {mode}. In the listings, what Thunder's "
        "barriers (update_aliases) and copy_ rename keeps its first name."
    )
    return [line for text in (notice, about) if text for line in textwrap.wrap(text, _WIDTH, break_on_hyphens=False)]


def _summary(found: Sequence[Comparison], style: Style) -> list[str]:
    answers = [one.stock.answer for one in found]
    counts = ", ".join(f"{answers.count(answer)} {answer.value}" for answer in Answer if answer in answers)
    broken = [one.program.name for one in found if not one.guarded.kept_promise]
    kept = f"{len(found) - len(broken)} of {len(found)} give eager's results or name the hazard"
    colour = _COLOURS[Answer.WRONG if broken else Answer.RIGHT]
    text = f"{kept}; broken: {', '.join(broken)}" if broken else kept
    unseen = [
        one.program.name for one in found if one.stock.answer is Answer.RIGHT and one.program.real and interpreting()
    ]
    if unseen:
        counts += f"; on real nvFuser also wrong: {', '.join(unseen)}"
    return [*_entry("stock", counts), *style(colour, _entry("guarded", text))]
