"""The executor: Thunder's nvFuser executor with a check between forming regions and defining fusions."""

from __future__ import annotations

import logging
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from thunder.core.compile_data import get_compile_data
from thunder.core.devices import Device, DeviceType
from thunder.core.proxies import TensorProxy
from thunder.core.pytree import tree_map
from thunder.core.symbol import BoundSymbol
from thunder.core.trace import TraceCtx, detached_trace, from_trace
from thunder.extend import ImplInfo

from guarded_nvfuser import loading, lowering
from guarded_nvfuser.arguments import current_sharing
from guarded_nvfuser.autograd import before_gradients, with_aliases, with_gradients
from guarded_nvfuser.casts import remove_lossless_casts
from guarded_nvfuser.comments import commented
from guarded_nvfuser.copies import with_copies
from guarded_nvfuser.cse import merge_common
from guarded_nvfuser.definition import guarded_wrapper
from guarded_nvfuser.effects import is_hidden_view, tensors
from guarded_nvfuser.errors import HazardError, HazardWarning, layout_error, reasons
from guarded_nvfuser.hazards import Hazard, is_region, judge, lost_views, overlap_hazards, program_hazards, refusals
from guarded_nvfuser.interpreter import InterpretedRegion
from guarded_nvfuser.options import (
    OnHazard,
    allowed_rules,
    current_on_hazard,
    eliding,
    interpreting,
    parse_on_hazard,
)
from guarded_nvfuser.prepare import in_program_order, without_dead_writes
from guarded_nvfuser.regions import form, touches, without_dead_ops
from guarded_nvfuser.results import draws_whole, exposed_views, in_doubt, keep_updates, separate_results, settle
from guarded_nvfuser.rewrite import Rewritten, rewrite
from guarded_nvfuser.states import Program, analyse, writes_anything
from guarded_nvfuser.verdict import Verdict, record
from guarded_nvfuser.violations import in_place
from guarded_nvfuser.writeback import peel, put_back

impl = loading.load()
lowering.register(impl)
log = logging.getLogger("guarded_nvfuser")
_CUDA = Device("cuda:0")


class InterpretableNvFuserExecutor(impl.nvFuserExecutor):
    """Thunder's nvFuser executor; with `GUARDED_NVFUSER_INTERPRET=1` it forms the same regions on CPU tensors.

    It shares the stock executor's op tables and guards nothing: the demo and the tests compare the guard with it.

    Args:
        name: what the executor is registered as.
    """

    def __init__(self, name: str) -> None:
        super().__init__()
        self._name = name
        self._implmap, self._opmap, self._lookasides = impl.ex._implmap, impl.ex._opmap, impl.ex._lookasides

    def can_execute(self, bsym: BoundSymbol) -> bool:
        """Whether nvFuser supports an op; when interpreting, asked as if its tensors lived on a GPU."""
        if not interpreting():
            return super().can_execute(bsym)
        info = self.implmap.get(bsym.sym.id)
        return info is not None and (info.checker is None or _check_as_cuda(info, bsym))

    def has_cuda_input_or_output(self, bsym: BoundSymbol) -> bool:
        """Whether an op touches a GPU tensor; when interpreting, any tensor."""
        if not interpreting():
            return super().has_cuda_input_or_output(bsym)
        return bool(tensors((*bsym.flat_args, *bsym.flat_outs)))

    def fuse(self, region: Any, fusion_counter: int) -> BoundSymbol:
        """Make a region one symbol; see `nvFuserExecutor.fuse` in thunder/executors/nvfuserex_impl.py."""
        bsym = super().fuse(region, fusion_counter)
        return self.calling(bsym, self.region_callable(bsym))

    def calling(self, bsym: BoundSymbol, callee: Callable) -> BoundSymbol:
        """The region `bsym`, with `callee` as what it calls."""
        return self.register_temporary_operation(
            bsym.sym.name,
            callee,
            inputs=list(bsym.args),
            outputs=list(bsym.output),
            bsyms=list(bsym.subsymbols),
        )

    def region_callable(self, bsym: BoundSymbol) -> Any:
        """What a region's symbol calls: the interpreter, or Thunder's wrapper with descriptors that work on every
        release.
        """
        if interpreting():
            return InterpretedRegion(bsym)
        return guarded_wrapper(impl, bsym._call_ctx[bsym.sym.name], bsym, lambda region, positions: None)


class GuardedNvFuserExecutor(InterpretableNvFuserExecutor):
    """Thunder's nvFuser executor, kept from giving anything but what PyTorch eager gives.

    Args:
        on_hazard: what to do where a read may see the wrong state, "raise" or "fallback"; None: the environment
            variable
            `GUARDED_NVFUSER_ON_HAZARD`, else "fallback". The context manager `on_hazard` and the compile option
            `guard_on_hazard` have precedence, in this order.

    Raises:
        ValueError: an unknown mode.
    """

    def __init__(self, on_hazard: str | OnHazard | None = None) -> None:
        super().__init__("guarded_nvfuser")
        self._on_hazard = (
            None if on_hazard is None else parse_on_hazard(on_hazard, "GuardedNvFuserExecutor(on_hazard=...)")
        )

    def rewrites(self) -> bool:
        """Whether the compilation under way rewrites its program, so that it needs no names for aliases."""
        return current_on_hazard(self._on_hazard) is OnHazard.REWRITE

    def fusion_pass(self, trace: TraceCtx) -> TraceCtx:
        """Form regions, judge them, and return only what means the same as the trace in program order.

        Args:
            trace: the computation trace, forward and backward together.

        Returns:
            The trace with fusions.

        Raises:
            HazardError: mode "raise" and a hazard, or a program that cannot be run right in any mode.
            ValueError: an unknown mode, or the stock executor beside this one.
        """
        _refuse_stock_beside()
        started, trace = time.perf_counter(), with_copies(trace)
        mode = current_on_hazard(self._on_hazard)
        if not writes_anything(trace):
            return self._without_writes(trace)
        return self._lowered(self._guarded(trace, mode), started)

    def _guarded(self, trace: TraceCtx, mode: OnHazard) -> _Decided:
        """The program as it is fused, its trace with fusions, and the verdict."""
        program = analyse(trace, current_sharing().overlapping_names)
        if refused := (*refusals(program), *_lost(program)):
            raise HazardError(refused)
        if mode is OnHazard.REWRITE and (rewritten := self._rewrite(program)) is not None:
            return rewritten
        if mode is OnHazard.REWRITE and program.joint:
            program = analyse(with_gradients(with_aliases(before_gradients(program))), program.overlaps)
        if beyond_repair := program_hazards(program):
            raise HazardError(beyond_repair)
        program = without_dead_writes(program)
        fused, hazards = self._stock(program)
        verdict = record(Verdict(mode, (*overlap_hazards(program), *hazards)))
        if not verdict.safe and mode is OnHazard.RAISE:
            raise HazardError(verdict.hazards)
        if not verdict.safe or fused is None or exposed_views(program):
            return _Decided(*self._fall_back(program, verdict.hazards), verdict)
        settled = self._with_eager_results(program, fused)
        if settled is not fused and judge(program, settled, allowed_rules()):
            # a region left with an update alone needs to be tied to the forward
            return _Decided(*self._fall_back(program, ()), verdict)
        return _Decided(program, settled, verdict)

    def _rewrite(self, program: Program) -> _Decided | None:
        """The program without mutation; None where that leaves a hazard, so that the program must fall back."""
        source = analyse(with_copies(before_gradients(program)), program.overlaps) if program.joint else program
        barred = frozenset(name for pair in program.overlaps for name in pair)
        left = list(overlap_hazards(source))
        while True:
            rewritten = rewrite(source, barred, tracked=program.joint)
            full = self._derived(rewritten, program)
            if program_hazards(full):
                return None
            fused, hazards = self._judged_rewritten(full, rewritten.left)
            if not hazards:
                left += rewritten.reasons
                _tell(left)
                return _Decided(full, fused, record(Verdict(OnHazard.REWRITE, tuple(left))))
            more = {name for hazard in hazards for name in full.names[hazard.buffer] if name in source.buffer_of}
            if more <= barred:
                return None
            left += hazards
            barred |= more

    def _derived(self, rewritten: Rewritten, source: Program) -> Program:
        """A rewritten program as it is fused: with gradients, claimed by executors, and with what it left in order."""
        trace = with_gradients(rewritten.trace) if source.joint else impl.dce(rewritten.trace)
        program = without_dead_writes(analyse(trace, source.overlaps))
        left = frozenset(name for name in rewritten.left if name in program.buffer_of)
        if left or program.stale_saves:
            stale = frozenset(save.name for save in program.stale_saves)
            program = in_program_order(program, left | stale)
        return analyse(keep_updates(program), program.overlaps)

    def _judged_rewritten(self, program: Program, left: frozenset[str]) -> tuple[TraceCtx, tuple[Hazard, ...]]:
        """Regions over a rewritten program, and their hazards; without rematerialisation if that reads what is
        overwritten by then (tests/test_autograd.py::test_rewrite_runs_what_fallback_runs).
        """
        fused = self._form_rewritten(program, left, rematerialize=True)
        hazards = judge(program, fused, allowed_rules())
        if hazards and self._use_rematerialization:
            fused = self._form_rewritten(program, left, rematerialize=False)
            hazards = judge(program, fused, allowed_rules())
        return fused, hazards

    def _form_rewritten(self, program: Program, left: frozenset[str], *, rematerialize: bool) -> TraceCtx:
        peeled, tail = peel(program)
        buffers = frozenset(peeled.buffer_of[name] for name in left if name in peeled.buffer_of)
        views = exposed_views(peeled)
        fused = form(self, peeled, lambda bsym: id(bsym) in views or touches(bsym, buffers, peeled))
        fused = self._clean_up(peeled, fused, rematerialize=rematerialize)
        fused = put_back(program, fused, tail, elide=eliding(), rules=allowed_rules())
        return self._defined(program, fused)

    def _without_writes(self, trace: TraceCtx) -> TraceCtx:
        """Nothing is written: only the memory of the results can differ from eager's, and is looked at if in doubt."""
        if draws_whole(trace):
            return self._form(analyse(trace), frozenset())
        fused = super().fusion_pass(trace)
        if not in_doubt(trace, fused):
            return fused
        program = analyse(trace)
        if exposed_views(program):
            return self._form(program, frozenset())
        return self._with_eager_results(program, fused)

    def _stock(self, program: Program) -> tuple[TraceCtx | None, tuple[Hazard, ...]]:
        """Thunder's own fusion of a program, and its hazards; no trace where its passes fail
        (lightning-thunder#2776).
        """
        try:
            fused = super().fusion_pass(program.trace)
            fused = without_dead_ops(fused) if program.joint else fused  # a dropped region leaves what only it needed
        except (AssertionError, RuntimeError) as failed:
            log.info("Thunder's fusion pass failed (%s); regions are formed in memory order", failed)
            return None, ()
        return fused, judge(program, fused, allowed_rules())

    def _fall_back(self, program: Program, hazards: tuple[Hazard, ...]) -> tuple[Program, TraceCtx]:
        """Leave the ops on the hazards' buffers to PyTorch and form regions again, until no hazard is left."""
        barred: frozenset[str] = frozenset()
        judged = program
        while True:
            _tell(hazards)
            more = barred | {name for h in hazards for name in judged.names[h.buffer] if name in program.buffer_of}
            if hazards and more == barred:
                raise HazardError(hazards)
            barred = more
            judged = analyse(keep_updates(in_program_order(program, barred) if barred else program), program.overlaps)
            fused = self._form(judged, barred)
            hazards = judge(judged, fused, allowed_rules())
            if not hazards:
                return judged, fused

    def _form(self, program: Program, barred: frozenset[str]) -> TraceCtx:
        """Regions over a program, without the ops that touch barred buffers and those whose sharing nvFuser would
        lose.
        """
        buffers, views = frozenset(program.buffer_of[name] for name in barred), exposed_views(program)
        fused = form(self, program, lambda bsym: id(bsym) in views or touches(bsym, buffers, program))
        return self._defined(program, self._clean_up(program, fused))

    def _defined(self, program: Program, fused: TraceCtx) -> TraceCtx:
        defined = impl.update_fusion_call_ctx(without_dead_ops(fused) if program.joint else fused)
        return self._with_eager_results(program, defined)

    def _clean_up(self, program: Program, fused: TraceCtx, *, rematerialize: bool = True) -> TraceCtx:
        """Thunder's passes over a trace with fusions, up to the final definition, with this library's CSE."""
        if self._use_rematerialization and rematerialize:
            fused = impl.rematerialize(fused)
        return without_dead_ops(merge_common(program, remove_lossless_casts(fused)))

    def _with_eager_results(self, program: Program, fused: TraceCtx) -> TraceCtx:
        return separate_results(program, settle(self, program, fused))

    def region_callable(self, bsym: BoundSymbol, stored: frozenset[str] = frozenset()) -> Any:
        """As in the base class, with the layout check in the mode of the compilation under way.

        Args:
            bsym: the region.
            stored: names of the results of the updates that its kernels may store themselves (violations.py, in_place).
        """
        on_gaps = _refuse_layout if current_on_hazard(self._on_hazard) is OnHazard.RAISE else _tell_layout
        if interpreting():
            return InterpretedRegion(bsym, on_gaps)
        return guarded_wrapper(impl, bsym._call_ctx[bsym.sym.name], bsym, on_gaps, stored)

    def _lowered(self, decided: _Decided, started: float) -> TraceCtx:
        """Let regions store the updates that need not be isolated, which only the whole program tells."""
        bsyms, in_places = [], frozenset()
        for bsym in decided.fused.bound_symbols:
            if is_region(bsym) and (stored := in_place(decided.program.body(bsym, allowed_rules()))):
                bsym = self.calling(bsym, self.region_callable(bsym, stored))
                in_places |= stored
            bsyms.append(bsym)
        lowered = from_trace(decided.fused)
        milliseconds = 1000 * (time.perf_counter() - started)
        lowered.bound_symbols = commented(bsyms, decided.verdict, in_places, milliseconds)
        return lowered


@dataclass(frozen=True)
class _Decided:
    """A program as it is fused, its trace with fusions, and the verdict on it."""

    program: Program
    fused: TraceCtx
    verdict: Verdict


def _lost(program: Program) -> tuple[Hazard, ...]:
    """Writes through views that Thunder decomposes into computations, where nobody runs them as a whole."""
    trace = before_gradients(program) if program.joint else program.trace
    names = {"einsum", "diagonal"} if program.joint else {"einsum"}
    if not any(bsym.sym.name in names and is_hidden_view(bsym) for bsym in trace.bound_symbols):
        return ()
    return lost_views(analyse(trace, program.overlaps), names)


def _refuse_stock_beside() -> None:
    compile_data = get_compile_data()
    if compile_data is not None and "nvfuser" in (str(executor.name) for executor in compile_data.executors_list):
        raise ValueError(
            "executors holds both 'nvfuser' and 'guarded_nvfuser': the first would fuse without the second's check. "
            "Leave 'nvfuser' out; guarded_nvfuser runs the same fusions: thunder.jit(fn, executors=[guarded_nvfuser_ex])"
        )


def _refuse_layout(region: BoundSymbol, positions: Sequence[int]) -> None:
    raise layout_error(region, [region.args[index] for index in positions])


def _tell_layout(region: BoundSymbol, positions: Sequence[int]) -> None:
    _tell(layout_error(region, [region.args[index] for index in positions]).hazards)


def _tell(hazards: Sequence[Hazard]) -> None:
    for reason in reasons(hazards).values():
        log.info("%s", reason)
        warnings.warn(reason, HazardWarning, stacklevel=2)


def _check_as_cuda(info: ImplInfo, bsym: BoundSymbol) -> bool:
    with detached_trace():
        args, kwargs = tree_map(_as_cuda, (bsym.args, bsym.kwargs))
        return info.checker(*args, **kwargs)


def _as_cuda(value: Any) -> Any:
    if isinstance(value, TensorProxy) and value.device.devicetype is DeviceType.CPU:
        return TensorProxy(shape=value.shape, device=_CUDA, dtype=value.dtype, requires_grad=value.requires_grad)
    return _CUDA if isinstance(value, Device) and value.devicetype is DeviceType.CPU else value
