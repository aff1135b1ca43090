"""How updates are handed to nvFuser: stored by the kernel that reads their target, or by a kernel of their own.

nvFuser may compute an update's value in one kernel with something larger and then stores the target from many threads
(contract.py, WIDENED). A `segment_set` makes it cut the fusion: what comes before writes the value to memory of its own,
what comes behind copies it into the target (csrc/preseg_passes/segment_inplace_update.cpp does the same, in too few
cases). It costs one more kernel, and one write and one read of the value.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import ModuleType
from typing import Any

from thunder.core.prims import PrimIDs
from thunder.core.proxies import TensorProxy, Variable
from thunder.core.symbol import BoundSymbol, Symbol
from thunder.core.trace import detached_trace

from guarded_nvfuser.contract import operands_of
from guarded_nvfuser.effects import prim_id, tensors

_ID = "guarded_nvfuser.segment_set"


def _meta(a: TensorProxy) -> TensorProxy:
    return TensorProxy(like=a)


segment_set = Symbol(name="segment_set", meta=_meta, id=_ID, is_prim=True)


def register(impl: ModuleType) -> None:
    """Teach Thunder's translation to nvFuser the symbol that isolates an update.

    Args:
        impl: thunder.executors.nvfuserex_impl.
    """

    def translate(a: TensorProxy, *, fd: Any, lc_to_nv_map: dict) -> Any:
        return fd.ops.segment_set(impl.getnv(a, fd, lc_to_nv_map))

    impl.register_supported(_ID, translate, impl.is_supported_tensor)


def isolated(bsyms: Sequence[BoundSymbol], stored: frozenset[str]) -> list[BoundSymbol]:
    """A region's symbols with every update cut off from what computes its value, but for some.

    Args:
        bsyms: the region's symbols.
        stored: names of the results of the updates that stay with what computes their values.

    Returns:
        The symbols; who reads an isolated update's result reads its source.
    """
    found: list[BoundSymbol] = []
    sources: dict[Variable, TensorProxy] = {}
    with detached_trace():
        for bsym in bsyms:
            bsym = bsym.from_bsym_swap_proxies(sources, skip_output=True) if sources else bsym
            outs = tensors(bsym.flat_outs)
            if prim_id(bsym) is PrimIDs.COPY_ and not any(out.name in stored for out in outs):
                source = operands_of(bsym)[0]
                apart = TensorProxy(f"{source.name}_for_{operands_of(bsym)[1].name}", like=source)
                found.append(segment_set.bind(source, output=apart))
                bsym = bsym.from_bsym(args=(apart, *bsym.args[1:]))
                sources.update((Variable(out), source) for out in outs)
            found.append(bsym)
    return found
