"""Arguments that share memory: told apart by geometry, when a program is compiled and, in its prologue, at every call.

Thunder takes two arguments with one storage and as many elements for one tensor, and does not compare a module's parameters
with its inputs. Here exact duplicates are one tensor, disjoint pieces are two, and real overlaps are left to PyTorch, which
runs the ops on them in program order. A call whose arguments share memory otherwise fails the prologue, as a call with other
shapes does, and is compiled for itself. Programs that write no argument are not looked at.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy
import torch
from thunder.core import prims
from thunder.core.compile_data import _compile_data, get_cache_option, get_compile_data, get_compile_option
from thunder.core.options import CACHE_OPTIONS
from thunder.core.proxies import TensorProxy
from thunder.core.symbol import BoundSymbol, Symbol
from thunder.core.trace import TraceCtx, TraceResults, from_trace
from thunder.core.update_aliases import replace_args_with_alias_map
from thunder.executors import pythonex
from thunder.executors.passes import transform_for_execution

from guarded_nvfuser.effects import tensors
from guarded_nvfuser.states import analyse, writes_anything

_KEPT = "guarded_nvfuser_sharing"  # the attribute of Thunder's compile statistics that holds the last compilation's `Sharing`
_PLAIN = (torch.Tensor, torch.nn.Parameter, getattr(torch.nn, "Buffer", torch.Tensor))
_EXACT_WORK = 10_000  # how long to look for a common element before two interleaved tensors count as overlapping


@dataclass(frozen=True)
class Sharing:
    """How a call's tensor arguments share memory, where one of them is written.

    Attributes:
        same: groups of positions that hold one tensor: the same address, shape, strides and dtype.
        overlaps: pairs of positions whose tensors have a byte in common but are not the same.
        names: the arguments' names in the trace, by position; `details`: how each pair overlaps, in words.
    """

    same: tuple[tuple[int, ...], ...] = ()
    overlaps: tuple[tuple[int, int], ...] = ()
    names: tuple[str, ...] = ()
    details: tuple[str, ...] = ()

    @property
    def overlapping_names(self) -> tuple[tuple[str, str], ...]:
        """The overlaps by name."""
        return tuple((self.names[a], self.names[b]) for a, b in self.overlaps)


class SharingChanged(RuntimeError):
    """A call's arguments share memory otherwise than those that a program was compiled for; Thunder then compiles it again."""


def sharing_of(values: Sequence[torch.Tensor], written: frozenset[int]) -> Sharing:
    """How tensors share memory.

    Args:
        values: tensors of any shape and strides, on any devices.
        written: positions of those that the program writes; pairs without one do not count.

    Returns:
        The sharing; exact for strided tensors, but for interleaved ones that would take too long: those count as overlaps.
    """
    spans = sorted((*span, position) for position, value in enumerate(values) if (span := _span(value)) is not None)
    same: dict[int, set[int]] = {}
    overlaps: set[tuple[int, int]] = set()
    open_spans: list[tuple[int, int]] = []  # (end, position) of spans that may reach into the next ones
    for start, end, position in spans:
        open_spans = [(stop, other) for stop, other in open_spans if stop > start]
        for _, other in open_spans:
            if position in written or other in written:
                _compare(values, other, position, same, overlaps)
        open_spans.append((end, position))
    groups = {tuple(sorted(group)) for group in same.values()}
    return Sharing(tuple(sorted(groups)), tuple(sorted(overlaps)))


def _compare(values: Sequence[torch.Tensor], a: int, b: int, same: dict, overlaps: set) -> None:
    if values[a].device != values[b].device:
        return
    if _identity(values[a]) == _identity(values[b]):
        group = same.setdefault(a, {a}) | same.setdefault(b, {b})
        same.update((member, group) for member in group)
    elif _have_a_common_byte(values[a], values[b]):
        overlaps.add((min(a, b), max(a, b)))


def _identity(value: torch.Tensor) -> tuple:
    return value.data_ptr(), value.shape, value.stride(), value.dtype


def _span(value: torch.Tensor) -> tuple[int, int] | None:
    """The first byte of a tensor and the one behind its last; None for tensors without memory of this kind."""
    if not is_addressable(value) or value.numel() == 0:
        return None
    last = sum((extent - 1) * step for extent, step in zip(value.shape, value.stride()))
    start = value.data_ptr()
    return start, start + (last + 1) * value.element_size()


def is_addressable(value: object) -> bool:
    """Whether a value is a plain strided tensor, whose memory is an address, a shape and strides."""
    return type(value) in _PLAIN and value.layout is torch.strided


class _Bytes:
    """A tensor's elements as an array of bytes for numpy, which never looks at the memory."""

    def __init__(self, value: torch.Tensor) -> None:
        size = value.element_size()
        self.__array_interface__ = {
            "data": (value.data_ptr(), True),
            "shape": (*value.shape, size),
            "strides": (*(step * size for step in value.stride()), 1),
            "typestr": "|u1",
            "version": 3,
        }


def _have_a_common_byte(a: torch.Tensor, b: torch.Tensor) -> bool:
    try:
        return numpy.shares_memory(numpy.asarray(_Bytes(a)), numpy.asarray(_Bytes(b)), max_work=_EXACT_WORK)
    except numpy.exceptions.TooHardError:
        return True


class SharingCheck:
    """The check of one compiled program at every call: nothing to do while no argument moves.

    Args:
        written: positions of the tensors that the program writes.
        expected: the sharing that it was compiled for.
        fixed_shapes: the prologue has checked the shapes (it has not with cache="symbolic values").
    """

    def __init__(self, written: frozenset[int], expected: Sharing, *, fixed_shapes: bool) -> None:
        self._written, self._expected = written, replace(expected, names=(), details=())
        self._fixed_shapes = fixed_shapes
        self._seen: tuple | None = None

    def __call__(self, *values: torch.Tensor) -> None:
        """Refuse tensors that share memory otherwise.

        Raises:
            SharingChanged: so that Thunder takes another compiled program or compiles a new one.
        """
        seen = self._where(values)
        if seen == self._seen:
            return
        if sharing_of(values, self._written) != self._expected:
            raise SharingChanged(
                "the arguments share memory otherwise than those that this program was compiled for; with "
                "cache='same input', call it with arguments that share memory as on the first call"
            )
        self._seen = seen

    def _where(self, values: Sequence[torch.Tensor]) -> tuple:
        """What decides where tensors lie: addresses, and strides where they are not the usual ones."""
        addresses = list(map(torch.Tensor.data_ptr, values))
        if self._fixed_shapes and all(map(torch.Tensor.is_contiguous, values)):
            return addresses, None
        return addresses, [(value.shape, value.stride()) for value in values]


def watch(results: TraceResults, args: tuple, kwargs: dict) -> TraceResults:
    """Prepare a freshly traced program for how its arguments share memory, and have its prologue check that they still do.

    Args:
        results: what Thunder traced.
        args: the call's arguments.
        kwargs: the call's keyword arguments.

    Returns:
        The traces; the computation with one name for exact duplicates, the prologue with a check. Unchanged if no argument
        is written or the compile option `guard_arguments=False` is given: then arguments must not share memory.
    """
    option = get_compile_option("guard_arguments", "Whether to check at every call how the arguments share memory.")
    remember(Sharing())
    if option is False or not writes_anything(results.computation_trace):
        return results
    program = analyse(results.computation_trace)
    names = program.arguments
    written = frozenset(i for i, name in enumerate(names) if program.buffer_of[name] in program.writes)
    if not written:
        return results
    values = _computation_inputs(results.prologue_trace, args, kwargs)
    plain = [i for i, value in enumerate(values) if is_addressable(value)]
    written = frozenset(plain.index(i) for i in written if i in plain)
    sharing = _described(
        sharing_of([values[i] for i in plain], written), [names[i] for i in plain], [values[i] for i in plain]
    )
    remember(sharing)
    fixed_shapes = get_cache_option() is not CACHE_OPTIONS.SYMBOLIC_VALUES
    return TraceResults(
        _with_check(results.prologue_trace, sharing.names, SharingCheck(written, sharing, fixed_shapes=fixed_shapes)),
        _merged(results.computation_trace, sharing),
        results.epilogue_trace,
        results.interpreter_log,
    )


def _described(sharing: Sharing, names: Sequence[str], values: Sequence[torch.Tensor]) -> Sharing:
    details = tuple(
        f"`{names[a]}` is {_layout(values[a], values[a])}, `{names[b]}` is {_layout(values[b], values[a])}"
        for a, b in sharing.overlaps
    )
    return replace(sharing, names=tuple(names), details=details)


def _layout(value: torch.Tensor, origin: torch.Tensor) -> str:
    offset = value.data_ptr() - origin.data_ptr()
    return f"{str(value.dtype).removeprefix('torch.')}{list(value.shape)} with strides {list(value.stride())} at byte {offset}"


def remember(sharing: Sharing) -> None:
    """Keep a sharing with the statistics of the compilation under way, for the fusion pass."""
    _, stats = _compile_data.get()
    if stats is not None:
        stats.__dict__[_KEPT] = sharing


def current_sharing() -> Sharing:
    """How the arguments of the compilation under way share memory."""
    _, stats = _compile_data.get()
    return Sharing() if stats is None else stats.__dict__.get(_KEPT, Sharing())


def _computation_inputs(prologue: TraceCtx, args: tuple, kwargs: dict) -> list[torch.Tensor]:
    """The tensors that a prologue hands to the computation, in the order of the computation's tensor arguments."""
    trace = transform_for_execution(prologue, executors_list=(pythonex.ex,))
    inputs, _ = trace.python_callable(include_decorators=False)(*args, **kwargs)
    return [value for value in inputs if isinstance(value, torch.Tensor)]


def _with_check(prologue: TraceCtx, names: Sequence[str], check: SharingCheck) -> TraceCtx:
    proxies = {out.name: out for bsym in prologue.bound_symbols for out in tensors(bsym.flat_outs)}
    checked = from_trace(prologue)
    checked.bound_symbols = [
        *prologue.bound_symbols[:-1],
        _check_symbol(check).bind(*(proxies[name] for name in names), output=None),
        prologue.bound_symbols[-1],
    ]
    return checked


def _check_symbol(check: SharingCheck) -> Symbol:
    name = "check_argument_memory"

    def call_check(bsym: BoundSymbol) -> None:
        bsym._call_ctx = {name: check}

    def meta(*_: TensorProxy) -> None:
        return None

    return Symbol(
        name, meta=meta, id=name, python_impl=check, tags=[prims.OpTags.DONT_DCE], _bind_postprocess=call_check
    )


def _merged(computation: TraceCtx, sharing: Sharing) -> TraceCtx:
    """The computation with one name for arguments that are one tensor (thunder/core/update_aliases.py)."""
    if not sharing.same:
        return computation
    flat = [getattr(arg, "name", None) for arg in computation.args]
    groups = [[flat.index(sharing.names[i]) for i in group] for group in sharing.same]
    merged, _ = replace_args_with_alias_map(computation, groups)
    return merged


def guarded_executor() -> Any:
    """This library's executor, if the compilation under way uses it."""
    data = get_compile_data()
    executors = data.executors_list if data is not None else ()
    return next((executor for executor in executors if executor.name == "guarded_nvfuser"), None)


def watching(trace_program: Callable) -> Callable:
    """Thunder's tracing function, followed by `watch` where this library's executor is in use."""

    def traced(fn: Callable, args: tuple, kwargs: dict, /, **options: Any) -> TraceResults:
        results = trace_program(fn, args, kwargs, **options)
        return results if guarded_executor() is None else watch(results, args, kwargs)

    traced.__wrapped__ = trace_program
    return traced


def leaving_aliases(insert_alias_updates: Callable) -> Callable:
    """Thunder's pass that names aliases, kept from taking arguments for one tensor, and left out where states make it redundant."""

    def insert(computation_trace: TraceCtx, alias_tensor_indices: list[list[int]]) -> TraceCtx:
        executor = guarded_executor()
        if executor is None:
            return insert_alias_updates(computation_trace, alias_tensor_indices)
        return computation_trace if executor.rewrites() else insert_alias_updates(computation_trace, [])

    insert.__wrapped__ = insert_alias_updates
    return insert


__all__ = ["Sharing", "SharingChanged", "SharingCheck", "current_sharing", "leaving_aliases", "sharing_of", "watching"]
