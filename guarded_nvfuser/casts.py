"""Casts that cancel, removed only where they lose nothing.

Thunder's pass also removes a rounding, float32 to bfloat16 and back. A copy into a bfloat16 tensor implies such a
rounding, and forwarding its value must keep it (tests/test_rewrite.py::test_rounding_of_a_copy_is_kept).
"""

from __future__ import annotations

from collections.abc import Sequence

from thunder.core import dtypes
from thunder.core.prims import PrimIDs
from thunder.core.proxies import Proxy, TensorProxy, Variable
from thunder.core.symbol import BoundSymbol
from thunder.core.trace import TraceCtx, from_trace

from guarded_nvfuser.effects import prim_id, tensors
from guarded_nvfuser.hazards import is_region

_WIDER: dict[dtypes.dtype, tuple[dtypes.dtype, ...]] = {
    dtypes.bfloat16: (dtypes.float32, dtypes.float64),
    dtypes.float16: (dtypes.float32, dtypes.float64),
    dtypes.float32: (dtypes.float64,),
}


def remove_lossless_casts(trace: TraceCtx) -> TraceCtx:
    """Let casts of a widened value read the value itself, in regions.

    Args:
        trace: a trace with regions.

    Returns:
        The trace in which a cast of a cast reads the original where the first cast only widened it.
    """
    cleaned = from_trace(trace)
    cleaned.bound_symbols = [_clean_region(bsym) if is_region(bsym) else bsym for bsym in trace.bound_symbols]
    return cleaned


def _clean_region(region: BoundSymbol) -> BoundSymbol:
    outs = {out.name for out in region.flat_proxy_outs}
    origin: dict[str, TensorProxy] = {}
    same: dict[Variable, Proxy] = {}
    body: list[BoundSymbol] = []
    for bsym in region.subsymbols:
        if same and any(Variable(arg) in same for arg in bsym.flat_proxy_args):
            bsym = bsym.from_bsym_swap_proxies(same, skip_output=True)
        source, dtype = _cast(bsym)
        if source is not None:
            original = origin.get(source.name, source)
            (out,) = tensors(bsym.flat_outs)
            if original.dtype == dtype and out.name not in outs:
                same[Variable(out)] = original
                continue
            if dtype in _WIDER.get(original.dtype, ()):
                origin[out.name] = original
            if original is not source:
                bsym = bsym.from_bsym(args=(original, dtype), kwargs={})
        body.append(bsym)
    return region if _same_symbols(body, region.subsymbols) else region.from_bsym(subsymbols=tuple(body))


def _cast(bsym: BoundSymbol) -> tuple[TensorProxy | None, dtypes.dtype | None]:
    """Operand and dtype of a cast from one float to another."""
    if prim_id(bsym) is not PrimIDs.CONVERT_ELEMENT_TYPE or not tensors(bsym.flat_args):
        return None, None
    source, out = tensors(bsym.flat_args)[0], tensors(bsym.flat_outs)[0]
    floats = dtypes.is_float_dtype(source.dtype) and dtypes.is_float_dtype(out.dtype)
    return (source, out.dtype) if floats else (None, None)


def _same_symbols(a: Sequence[BoundSymbol], b: Sequence[BoundSymbol]) -> bool:
    return len(a) == len(b) and all(x is y for x, y in zip(a, b))
