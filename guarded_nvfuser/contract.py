"""nvFuser's in-place contract for one region: which updates of a region mean the same under every schedule.

After a fusion with `add_output(out, alias_input=x)`, x's memory holds `out`; nvFuser promises nothing else (csrc/fusion.h,
comment at `aliasOutputToInput`): no order against other reads of x, none between two updates. So an update is accepted
only where no order can matter. D(x) is x's memory among the region's inputs and all that is computed from it.

STRICT: everything that reads D(x) is elementwise over x's shape (ALIGNED) and flows into the update (CLOSED); nothing of
D(x) leaves the region but the update's result, which nothing inside reads; no value that shares names with these is
broadcast to more elements than x has (WIDENED). The writing thread then reads x only at the element that it writes, no
other thread writes that, and nothing can be recomputed from x elsewhere. `Looser` names what is accepted beyond that.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

from thunder.core.prims import PrimIDs
from thunder.core.proxies import TensorProxy
from thunder.core.symbol import BoundSymbol
from thunder.core.utils import is_cpu_scalar_tensor

from guarded_nvfuser.effects import ELEMENTWISE_PRIMS, prim_id, tensors


class Looser(Enum):
    """Rules beyond STRICT. Each rests on named internals of nvFuser 0.2.36 and was tried on its kernels; each can be
    switched off."""

    # Values behind an op with two operands are stored between kernels, never recomputed: only chains of unary ops and upcasts
    # from an input are (csrc/fusion_segmenter.cpp, shouldForward and privatizeUpCastOrSqueezeOp). Closed is then asked of
    # these chains alone; tests/test_kernels.py::test_behind_two_operands.
    BEHIND_TWO_OPERANDS = "behind two operands"
    # The fusion is cut at a segment_set before the store (lowering.py), so that a kernel of its own stores what the others
    # computed. ALIGNED and WIDENED are then not asked; tests/test_kernels.py::test_isolated.
    ISOLATED = "isolated"
    # One pointwise kernel loads every input into registers once, before any store (csrc/scheduler/pointwise_utils.cpp,
    # cacheInputs in csrc/scheduler/utils.cpp); tests/test_kernels.py::test_pointwise.
    POINTWISE = "pointwise"


class Rule(Enum):
    """The claims that make an update safe; the value says what may happen where one fails."""

    TARGET_IS_INPUT = "nvFuser can only update an input of the fusion; this target is made inside it"
    TARGET_ON_DEVICE = "nvFuser stores through a pointer that it takes from a CUDA tensor; this target is not on CUDA"
    ONE_NAME = "two inputs of the fusion name this memory; nvFuser takes them for independent tensors"
    ONE_UPDATE = "nvFuser does not order two updates of one tensor; the last store wins, whichever it is"
    SAME_KIND = "nvFuser stores the source's elements through the target's pointer without checking shape or dtype"
    ALIGNED = (
        "the read loads other elements than the update's thread writes; another thread may have stored them already"
    )
    WIDENED = (
        "the fusion broadcasts a value to more elements than the target has; a kernel over these would load and store each "
        "element of the target in many threads"
    )
    CLOSED = "nothing orders this read against the update; nvFuser may load it before or after the store, by shape"
    ESCAPES = "nvFuser may recompute this value from the updated memory where a later kernel of the fusion needs it"
    RESULT_USED = "nvFuser may recompute what is read here from the updated memory, in another kernel of the fusion"


@dataclass(frozen=True)
class Violation:
    """One failed claim about an update: the rule, the update, and the op that may go wrong (None: the update)."""

    rule: Rule
    update: BoundSymbol
    reader: BoundSymbol | None = None


@dataclass(frozen=True)
class Rules:
    """What is accepted: the rules beyond STRICT, and whether CPU tensors stand for CUDA tensors (interpreted regions)."""

    looser: frozenset[Looser] = frozenset(Looser)
    any_device: bool = False


ALL_RULES = Rules()


@dataclass(frozen=True)
class Body:
    """A region as nvFuser will get it.

    Attributes:
        bsyms: flat ops in order; `inputs` and `outputs`: the tensors that cross its boundary.
        buffer_of: which memory a name is; `tensor_of`: which tensor, so that aliases of one tensor count as one.
        rules: what the contract allows.
    """

    bsyms: tuple[BoundSymbol, ...]
    inputs: tuple[TensorProxy, ...]
    outputs: tuple[TensorProxy, ...]
    buffer_of: Callable[[str], int | str] = str
    tensor_of: Callable[[str], int | str] = str
    rules: Rules = Rules()

    @property
    def updates(self) -> tuple[BoundSymbol, ...]:
        """The copy_ symbols, in order."""
        return tuple(bsym for bsym in self.bsyms if prim_id(bsym) is PrimIDs.COPY_)


def body_of(region: BoundSymbol, **names: Any) -> Body:
    """The `Body` of a fusion symbol; without `buffer_of`, every name is memory of its own."""
    return Body(tuple(region.subsymbols), tensors(region.flat_args), tensors(region.flat_outs), **names)


def operands_of(update: BoundSymbol) -> tuple[TensorProxy, TensorProxy]:
    """Source and target of an update."""
    source, target = tensors(update.flat_args)[:2]
    return source, target


def read_by(bsym: BoundSymbol) -> tuple[TensorProxy, ...]:
    """The tensors whose values an op of a region loads; an update loads its source only."""
    args = tensors(bsym.flat_args)
    return args[:1] if prim_id(bsym) is PrimIDs.COPY_ else args


def loaded(body: Body, values: Sequence) -> tuple[TensorProxy, ...]:
    """The tensors among operands, without 0-d CPU tensors, which nvFuser passes to its kernels by value."""
    return tuple(p for p in tensors(values) if body.rules.any_device or not is_cpu_scalar_tensor(p))


_ALIGNED_PRIMS = ELEMENTWISE_PRIMS | {PrimIDs.CONVERT_ELEMENT_TYPE, PrimIDs.CLONE, PrimIDs.SHALLOW_COPY}


def is_elementwise(bsym: BoundSymbol) -> bool:
    """Whether each element of the results depends on the same element of the operands alone."""
    return prim_id(bsym) in _ALIGNED_PRIMS


def one_shape(body: Body, bsym: BoundSymbol) -> tuple | None:
    """The shape that all results and operands of an elementwise op have; 0-d operands are scalars to it."""
    shapes = {tuple(proxy.shape) for proxy in tensors(bsym.flat_outs)}
    shapes |= {tuple(proxy.shape) for proxy in loaded(body, bsym.flat_args)} - ({()} if shapes else set())
    return shapes.pop() if len(shapes) == 1 else None
