"""Real traces for tests: a tiny executor that keeps what Thunder hands to its fusion pass, and what becomes of it."""

from __future__ import annotations

import contextlib
import gc
import sys
import warnings
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import thunder
import torch
from thunder.core import prims
from thunder.core.prims import PrimIDs
from thunder.core.proxies import TensorProxy, variableify
from thunder.core.symbol import BoundSymbol
from thunder.core.trace import TraceCtx, from_trace
from thunder.executors.passes import _transform_for_operator_executor_execution
from thunder.extend import OperatorExecutor, get_always_executors
from thunder.transforms.autodiff import split_into_forward_and_backward

from guarded_nvfuser.contract import Body, Looser, Rules, body_of
from guarded_nvfuser.executor import InterpretableNvFuserExecutor
from guarded_nvfuser.hazards import Hazard, is_region, judge
from guarded_nvfuser.regions import Region, form
from guarded_nvfuser.states import Program, analyse

STRICT = Rules(frozenset(), any_device=True)
Pass = Callable[["Recorder", TraceCtx], TraceCtx]


class Recorded(Exception):
    """Ends a compilation of which nothing more is wanted."""


class Recorder(InterpretableNvFuserExecutor):
    """Keeps the trace that reaches the fusion pass and what the pass makes of it; Thunder's own pass, unless given."""

    def __init__(self, make: Pass | None = None, *, stop: bool = False) -> None:
        super().__init__("recording_nvfuser")
        self.make, self.stop = make, stop
        self.trace: TraceCtx | None = None
        self.fused: TraceCtx | None = None

    def fusion_pass(self, trace: TraceCtx) -> TraceCtx:
        self.trace = trace
        self.fused = super().fusion_pass(trace) if self.make is None else self.make(self, trace)
        if self.stop:
            raise Recorded
        return self.fused


@dataclass(frozen=True)
class Fusion:
    """A program, and the trace with regions that Thunder's own passes formed from it."""

    program: Program
    fused: TraceCtx

    @property
    def regions(self) -> list[BoundSymbol]:
        """The fusion symbols in order."""
        return [bsym for bsym in self.fused.bound_symbols if is_region(bsym)]

    def hazards(self, *looser: Looser) -> tuple[Hazard, ...]:
        """The judge's hazards, under the strict contract and the looser rules given."""
        return judge(self.program, self.fused, Rules(frozenset(looser), any_device=True))

    def body(self, index: int = 0, rules: Rules = STRICT) -> Body:
        """One region as the contract sees it, with the program's knowledge of memory."""
        buffers, tensors = self.program.buffer_of, self.program.tensor_of
        return body_of(
            self.regions[index],
            buffer_of=lambda name: buffers.get(name, name),
            tensor_of=lambda name: tensors.get(name, name),
            rules=rules,
        )


def mystery_in_eager(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    y.mul_(3)
    return x[:2]


mystery_ex = OperatorExecutor("mystery_ops")
mystery = mystery_ex.register_operator(
    "mystery", meta=lambda x, y: TensorProxy(like=x, shape=(2, 4)), fn=mystery_in_eager
)


def jit(recorder: Recorder, fn: Callable, *, skip: bool = False, **options: Any) -> Callable:
    """A function compiled with a recorder and the op that nobody declared, without Thunder's own check."""
    options.setdefault("disable_inplace_copy_check", True)
    return thunder.jit(fn, executors=[mystery_ex, recorder], skip_inplace_alias_updates=skip, **options)


def recorded(make: Pass | None, fn: Callable, *args: Any, **options: Any) -> Recorder:
    """Compile a function up to its fusion pass."""
    recorder = Recorder(make, stop=True)
    with contextlib.suppress(Recorded), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        jit(recorder, fn, **options)(*args)
    return recorder


def trace_of(fn: Callable, *args: Any, **options: Any) -> TraceCtx:
    """The trace of a function as it reaches a fusion pass, joint if an argument requires grad."""
    return recorded(lambda _, trace: trace, fn, *args, **options).trace


def program_of(fn: Callable, *args: Any, **options: Any) -> Program:
    """The analysed trace of a function as it reaches a fusion pass."""
    return analyse(trace_of(fn, *args, **options))


def stock(fn: Callable, *args: Any, **options: Any) -> Fusion:
    """What Thunder's own passes make of a function; `skip=True` puts its reads and writes into one region."""
    recorder = recorded(None, fn, *args, **options)
    return Fusion(analyse(recorder.trace), recorder.fused)


def split(fn: Callable, *args: Any, **options: Any) -> tuple[Fusion, TraceCtx, TraceCtx]:
    """What Thunder's passes make of a function that requires grad, and what Thunder itself then takes it apart into."""
    parts: list[TraceCtx] = []

    def fuse_and_split(executor: Recorder, trace: TraceCtx) -> TraceCtx:
        fused = InterpretableNvFuserExecutor.fusion_pass(executor, trace)
        claimed = _transform_for_operator_executor_execution(fused, get_always_executors())
        parts.extend(split_into_forward_and_backward(claimed))
        return fused

    recorder = recorded(fuse_and_split, fn, *args, **options)
    return Fusion(analyse(recorder.trace), recorder.fused), *parts


def formed(fn: Callable, *args: Any, **options: Any) -> Fusion:
    """Regions over a function in program order, before any pass of Thunder's has changed them."""
    recorder = recorded(lambda executor, trace: form(executor, analyse(trace), lambda _: False), fn, *args, **options)
    return Fusion(analyse(recorder.trace), recorder.fused)


def flat(fn: Callable, *args: Any) -> TraceCtx:
    """A trace of a function that calls Thunder's own ops: fast, for long programs, and with ops not yet claimed."""
    return thunder.trace()(fn, *args)


def put(source: TensorProxy, target: TensorProxy) -> TensorProxy:
    """Thunder's copy primitive; use in functions that only Thunder traces."""
    return prims.copy_(source, target, grad_enabled=False)


def ops(trace: TraceCtx | BoundSymbol, name: str) -> list[BoundSymbol]:
    """Every symbol of a name, at any depth, in order."""
    found = []
    for bsym in trace.bound_symbols if isinstance(trace, TraceCtx) else trace.subsymbols:
        found += [bsym] if bsym.sym.name == name else []
        found += ops(bsym, name)
    return found


def with_symbols(trace: TraceCtx, bsyms: Iterable[BoundSymbol]) -> TraceCtx:
    """The trace with other symbols, as a pass would make it."""
    changed = from_trace(trace)
    changed.bound_symbols = list(bsyms)
    return changed


def calls(fn: Callable, *args: Any) -> int:
    """How many functions a call enters, in Python and in C: time, without a clock."""
    count = 0

    def look(_frame: object, event: str, _arg: object) -> None:
        nonlocal count
        count += event in ("call", "c_call")

    collecting, before = gc.isenabled(), sys.getprofile()
    gc.disable()  # what a collection finalises belongs to nobody
    sys.setprofile(look)
    try:
        fn(*args)
    finally:
        sys.setprofile(before)
        if collecting:
            gc.enable()
    return count


def one_region(fn: Callable, *args: Any, overlaps: bool = False) -> Fusion:
    """A function of Thunder's own primitives as one region, with all that it returns: no pass has touched it.

    Aliases are made before it. `overlaps`: the first two arguments overlap in memory.
    """
    trace = flat(fn, *args)
    *body, return_bsym = trace.bound_symbols
    outside = (PrimIDs.UNPACK_TRIVIAL, PrimIDs.UNPACK_SEQUENCE, PrimIDs.UPDATE_ALIASES)
    before = [bsym for bsym in body if bsym.sym.id in outside]
    inside = [bsym for bsym in body if not any(bsym is other for other in before)]
    given = {out.name: out for bsym in before for out in bsym.flat_proxy_outs}
    used = {arg.name for bsym in inside for arg in bsym.flat_proxy_args}
    outputs = {out.name: out for out in return_bsym.flat_proxy_args if out.name not in given}
    region = Region(
        tuple(inside),
        tuple(variableify(proxy) for name, proxy in given.items() if name in used),
        tuple(map(variableify, outputs.values())),
    )
    fused = InterpretableNvFuserExecutor("recording_nvfuser").fuse(region, 0)
    program = analyse(trace, (tuple(arg.name for arg in trace.args[:2]),) if overlaps else ())
    return Fusion(program, with_symbols(trace, [*before, fused, return_bsym]))
