"""What each op reads, writes and shares memory with: one table, one function, and the worst case for what nobody
declared.

`leaves(bsym)` walks a bound symbol down to the ops whose effects are known; an op without an entry and without a
decomposition reads and writes every tensor it touches (test: tests/test_effects.py::test_unknown_op_reads_and_writes).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import lru_cache

import torch
from thunder.core.prims import PrimIDs
from thunder.core.proxies import TensorProxy
from thunder.core.symbol import BoundSymbol
from thunder.core.transform_common import NON_FUNCTIONAL_OPS

from guarded_nvfuser.torch_ops import PARTIAL_WRITE_NAMES


@dataclass(frozen=True)
class Effects:
    """What one op does to memory.

    Fields hold tensor proxies of the op: `reads`, whose values it loads; `writes`, whose memory it overwrites;
    `shares`, pairs (output, source) that may name one memory afterwards. `opaque`: nobody declared the op, this is
    the worst case.
    """

    reads: tuple[TensorProxy, ...] = ()
    writes: tuple[TensorProxy, ...] = ()
    shares: tuple[tuple[TensorProxy, TensorProxy], ...] = ()
    opaque: bool = field(default=False)


NONE = Effects()

# Views in every case: thunder/executors/torchex.py runs them as PyTorch views. They load nothing.
VIEW_PRIMS = frozenset(
    (
        PrimIDs.BITCAST,
        PrimIDs.BROADCAST_IN_DIM,
        PrimIDs.IMAG,
        PrimIDs.REAL,
        PrimIDs.SHALLOW_COPY,
        PrimIDs.SLICE,
        PrimIDs.SQUEEZE,
        PrimIDs.TRANSPOSE,
        PrimIDs.UNFOLD,
        PrimIDs.VIEW,
    )
)
# Views or copies, by strides: they load and share (test: tests/test_effects.py::test_reshape_reads_and_shares).
MAYBE_VIEW_PRIMS = frozenset((PrimIDs.RESHAPE,))
# Views exactly when they change nothing (torch.Tensor.to returns its argument then).
CONVERSION_PRIMS = frozenset((PrimIDs.CONVERT_ELEMENT_TYPE, PrimIDs.DEVICE_PUT))

BOOKKEEPING_PRIMS = frozenset(
    (
        PrimIDs.COMMENT,
        PrimIDs.CONSTRUCT_TUPLE,
        PrimIDs.DEL,
        PrimIDs.GET_GRAD,
        PrimIDs.PUT_GRAD,
        PrimIDs.RETURN,
        PrimIDs.SHAPE,
        PrimIDs.SINK,
        PrimIDs.UNPACK_EMPTY_DICT,
        PrimIDs.UNPACK_KEY,
        PrimIDs.UNPACK_SEQUENCE,
        PrimIDs.UNPACK_TRIVIAL,
    )
)

_UNARY = """ABS ACOS ACOSH ASIN ASINH ATAN ATANH BITWISE_NOT CEIL COS COSH DIGAMMA ERF ERFC ERFCINV ERFINV EXP EXP2
EXPM1 FLOOR ISFINITE LGAMMA LOG LOG10 LOG1P LOG2 NDTRI NEG RECIPROCAL ROUND RSQRT SIGN SIGNBIT SIN SINH SQRT TAN TANH TRUNC"""
_BINARY = """ADD ATAN2 BITWISE_AND BITWISE_OR BITWISE_XOR DIV EQ FMOD GE GT LE LT MAXIMUM MINIMUM MUL NE NEXTAFTER POW
REMAINDER SUB ZETA BITWISE_LEFT_SHIFT BITWISE_RIGHT_SHIFT"""
UNARY_PRIMS = frozenset(getattr(PrimIDs, name) for name in _UNARY.split())
ELEMENTWISE_PRIMS = UNARY_PRIMS | frozenset(getattr(PrimIDs, name) for name in f"{_BINARY} LERP WHERE".split())
FACTORY_PRIMS = frozenset(
    getattr(PrimIDs, name)
    for name in [
        "FULL",
        "IOTA",
        "UNIFORM",
        "UNIFORM_PHILOX",
        "RANDINT",
        "RANDN",
        "EMPTY",
        "TENSOR_FROM_SEQUENCE",
        "GET_AND_UPDATE_RNG_STATE",
    ]
)
RANDOM_PRIMS = FACTORY_PRIMS - {PrimIDs.FULL, PrimIDs.IOTA, PrimIDs.EMPTY, PrimIDs.TENSOR_FROM_SEQUENCE} | {
    PrimIDs.MULTINOMIAL
}
_OTHER_PURE = """CLONE CAT FLIP STRIDE_ORDER FREXP AMAX AMIN PROD SUM VAR VAR_MEAN STD ARGMAX ARGMIN TOPK SORT GATHER
SCATTER INDEX_ADD INDEX_COPY INDEX_PUT SCATTER_ADD TAKE TAKE_ALONG_AXIS COPY_WITH_SETITEM MATMUL _GROUPED_MM CONVOLUTION
EMBEDDING EMBEDDING_BACKWARD LINEAR PAD ITEM MULTINOMIAL PY_ABS PY_FLOORDIV"""
# Results in memory of their own, arguments untouched.
PURE_PRIMS = ELEMENTWISE_PRIMS | FACTORY_PRIMS | frozenset(getattr(PrimIDs, name) for name in _OTHER_PURE.split())

# Ops of Thunder's PyTorch executor that replace a prim one to one, under another name.
_TORCHEX_ALIASES = {
    "torch_prims_reshape_impl": PrimIDs.RESHAPE,
    "torch_slice_prim_impl": PrimIDs.SLICE,
    "torch_stride_order_prim_impl": PrimIDs.STRIDE_ORDER,
    "torch_pad_prim_impl": PrimIDs.PAD,
    "torch_div_prim_impl": PrimIDs.DIV,
    "torch_erfcinv_impl": PrimIDs.ERFCINV,
    "copy_with_setitem_impl": PrimIDs.COPY_WITH_SETITEM,
    "get_and_update_rng_state_impl": PrimIDs.GET_AND_UPDATE_RNG_STATE,
    "copy_": PrimIDs.COPY_,
    "update_aliases": PrimIDs.UPDATE_ALIASES,
    "shallow_copy": PrimIDs.SHALLOW_COPY,
    "shape": PrimIDs.SHAPE,
    "bitcast": PrimIDs.BITCAST,
    "uniform": PrimIDs.UNIFORM,
    "matmul": PrimIDs.MATMUL,
    "embedding": PrimIDs.EMBEDDING,
    "softmax": PrimIDs.EXP,
    "torch_nll_loss_backward_impl": PrimIDs.GATHER,
    "torch.ops.aten.log_sigmoid_backward": PrimIDs.MUL,
    "torch.ops.aten.embedding_backward": PrimIDs.EMBEDDING_BACKWARD,
    "torch.ops.aten._adaptive_avg_pool2d_backward": PrimIDs.GATHER,
    "multinomial_helper": PrimIDs.MULTINOMIAL,
}
# PyTorch returns the argument itself in some calls of these, whatever the decomposition says.
_MAYBE_SELF_NAMES = frozenset(
    (
        "contiguous to flatten reshape reshape_as ravel dropout alpha_dropout feature_dropout "
        "feature_alpha_dropout dropout1d dropout2d dropout3d native_dropout broadcast_tensors meshgrid "
        "align_as cartesian_prod conj_physical resize resize_as to_dense "
        "unsafe_chunk unsafe_split unsafe_split_with_sizes"
    ).split()
)
# Functions that PyTorch composes in Python, so that no schema speaks of them: they compute results of their own.
_COMPOSITE_NAMES = frozenset(
    (
        "adaptive_avg_pool2d_backward adaptive_max_pool1d_with_indices adaptive_max_pool2d_with_indices "
        "adaptive_max_pool3d_with_indices affine_grid fold fractional_max_pool2d_with_indices "
        "fractional_max_pool3d_with_indices gaussian_nll_loss grid_sample gumbel_softmax interpolate "
        "local_response_norm log_softmax_backward logsigmoid lp_pool1d lp_pool2d lp_pool3d max_unpool1d "
        "multilabel_soft_margin_loss new_tensor softsign tanhshrink triplet_margin_with_distance_loss unique "
        "unravel_index"
    ).split()
)
# Torch ops that Thunder keeps whole until an executor claims them (thunder/torch/__init__.py, is_prim=True).
_WHOLE_MODULES = frozenset(("thunder.torch", "torch", "torch.nn.functional", "Tensor"))
_RANDOM_COMPOSITES = frozenset("dropout1d dropout2d dropout3d gumbel_softmax".split())
_CONVERSION_NAMES = frozenset("bfloat16 bool byte cdouble cfloat chalf char double float half int long short".split())
_SCHEMA_NAMES = {("torch.nn.functional", "unfold"): "im2col", ("torch.nn.functional", "fold"): "col2im"}
_SCHEMA_PREFIXES = ("", "special_", "linalg_", "fft_")  # torch.special.i1 is aten::special_i1
_HIDDEN_VIEW_NAMES = frozenset(("contiguous", "diagonal", "einsum"))
# They update statistics that their schemas do not mark as written (torch/_refs,
# aten/src/ATen/native/Normalization.cpp).
_SILENT_WRITERS = frozenset(
    (
        "batch_norm instance_norm native_batch_norm batch_norm_update_stats batch_norm_gather_stats "
        "embedding_bag renorm batch_norm_gather_stats_with_counts fused_moving_avg_obs_fake_quant"
    ).split()
)
# Executors whose ops compute results in memory of their own from what they read.
_FUNCTIONAL_EXECUTORS = frozenset(
    ("sdpa", "cudnn", "cudnn_layernorm", "apex", "fa3", "triton", "nvfuser", "guarded_nvfuser")
)


def tensors(values: object) -> tuple[TensorProxy, ...]:
    """The tensor proxies among flat arguments or outputs, in order."""
    return tuple(value for value in values if isinstance(value, TensorProxy))


def prim_id(bsym: BoundSymbol) -> PrimIDs | None:
    """The primitive that a bound symbol is, also where Thunder's PyTorch executor has claimed it under another name."""
    if isinstance(bsym.sym.id, PrimIDs):
        return bsym.sym.id
    if bsym.sym.executor is not None and not bsym.subsymbols:
        return _TORCHEX_ALIASES.get(bsym.sym.name)
    if bsym.sym.name in ("copy_", "update_aliases") and bsym.sym.executor is not None:
        return _TORCHEX_ALIASES[bsym.sym.name]
    return None


def leaves(bsym: BoundSymbol) -> Iterator[tuple[BoundSymbol, Effects]]:
    """The ops with known effects below a bound symbol, in program order.

    Args:
        bsym: any bound symbol of a trace, at any stage.

    Yields:
        Pairs of a bound symbol (this one or one below it) and its effects.
    """
    found = _declared(bsym)
    if found is not None:
        yield bsym, found
    elif bsym.subsymbols:
        for sub in bsym.subsymbols:
            yield from leaves(sub)
        if is_hidden_view(bsym):
            yield bsym, Effects(shares=tuple((out, tensors(bsym.flat_args)[0]) for out in tensors(bsym.flat_outs)))
    elif bsym.sym.python_impl is not None:
        yield bsym, Effects(reads=tensors(bsym.flat_args))
    elif _is_passthrough(bsym):
        yield bsym, NONE
    else:
        yield bsym, _opaque(bsym)


def is_hidden_view(bsym: BoundSymbol) -> bool:
    """Whether eager runs an op as a view, or may, although Thunder decomposes it into a computation.

    nvFuser would give its result memory of its own (tests/test_effects.py::test_thunders_views_are_views).
    """
    operands = tensors(bsym.flat_args)
    if bsym.sym.name not in _HIDDEN_VIEW_NAMES or not operands:
        return False
    if bsym.sym.name != "einsum":
        return True
    computed = any(found.reads for part in bsym.subsymbols for _, found in leaves(part))
    return computed and len(operands) == 1  # a diagonal, or a sum


def is_random(bsym: BoundSymbol) -> bool:
    """Whether two calls of an op with equal operands may differ, by what PyTorch's own operators say
    (test: tests/test_cse.py::test_random_numbers_are_drawn_twice).
    """
    if bsym.sym.id in NON_FUNCTIONAL_OPS or prim_id(bsym) in RANDOM_PRIMS:
        return True
    if bsym.sym.name in _RANDOM_COMPOSITES or prim_id(bsym) is None and _draws(bsym.sym.name):
        return True
    return any(is_random(part) for part in bsym.subsymbols)


@lru_cache(maxsize=4096)
def _draws(name: str) -> bool:
    overloads = getattr(torch.ops.aten, name, None) if name.isidentifier() else None
    tags = [getattr(overloads, overload).tags for overload in overloads.overloads()] if overloads else []
    return any(torch.Tag.nondeterministic_seeded in each for each in tags)


def _declared(bsym: BoundSymbol) -> Effects | None:
    """The effects of a primitive, or of an op that PyTorch or another executor runs as a whole; None if unknown."""
    prim = prim_id(bsym)
    if prim is not None:
        return _of_prim(prim, bsym)
    if bsym.subsymbols and not _claimed_whole(bsym):
        return None
    if bsym.sym.executor is None:
        return _of_torch_op(bsym) if _is_whole(bsym) else None
    if bsym.sym.name in PARTIAL_WRITE_NAMES:
        target, *reads = tensors(bsym.flat_args)
        return Effects(tuple(reads), (target,), tuple((out, target) for out in tensors(bsym.flat_outs)))
    if str(bsym.sym.executor.name) in _FUNCTIONAL_EXECUTORS:
        return Effects(reads=tensors(bsym.flat_args))
    return _of_torch_op(bsym) if bsym.sym.executor.name == "torch" else None


def _claimed_whole(bsym: BoundSymbol) -> bool:
    """An op that PyTorch's executor claimed, whose one part is the op itself."""
    return (
        bsym.sym.executor is not None
        and len(bsym.subsymbols) == 1
        and bsym.subsymbols[0].sym.name == bsym.sym.name
        and not bsym.subsymbols[0].subsymbols
    )


def _is_whole(bsym: BoundSymbol) -> bool:
    module = getattr(bsym.sym.module, "__name__", "")
    return bsym.sym.is_prim and not isinstance(bsym.sym.id, PrimIDs) and module in _WHOLE_MODULES


def _of_prim(prim: PrimIDs, bsym: BoundSymbol) -> Effects | None:
    args, outs = tensors(bsym.flat_args), tensors(bsym.flat_outs)
    if prim in PURE_PRIMS:
        return Effects(reads=args)
    if prim in VIEW_PRIMS:
        return Effects(shares=tuple((out, args[0]) for out in outs))
    if prim in MAYBE_VIEW_PRIMS:
        return Effects(reads=args, shares=tuple((out, args[0]) for out in outs))
    if prim in CONVERSION_PRIMS:
        return _of_conversion(args, outs)
    if prim is PrimIDs.COPY_:
        source, target = args[:2]
        return Effects(reads=(source,), writes=(target,), shares=tuple((out, target) for out in outs))
    if prim is PrimIDs.UPDATE_ALIASES:
        return Effects(shares=tuple(zip(outs, args)) if len(outs) == len(args) else _everything_shared(bsym))
    return NONE if prim in BOOKKEEPING_PRIMS else None


def _of_conversion(args: tuple[TensorProxy, ...], outs: tuple[TensorProxy, ...]) -> Effects:
    """A cast or a move, which is the tensor itself when dtype and device stay."""
    same = args and outs and args[0].dtype == outs[0].dtype and args[0].device == outs[0].device
    return Effects(reads=args, shares=((outs[0], args[0]),) if same else ())


def _of_torch_op(bsym: BoundSymbol) -> Effects | None:
    """An op that Thunder registered from PyTorch by itself: PyTorch's own schema says what it writes and shares."""
    name = bsym.sym.name
    if name in _SILENT_WRITERS:
        return None
    if name in _CONVERSION_NAMES:
        return _of_conversion(tensors(bsym.flat_args), tensors(bsym.flat_outs))
    if name.endswith("_vjp") or name in _MAYBE_SELF_NAMES:
        return Effects(reads=tensors(bsym.flat_args), shares=_everything_shared(bsym))
    if name in _COMPOSITE_NAMES:
        return Effects(reads=tensors(bsym.flat_args))
    declared = schema_effects(_SCHEMA_NAMES.get((getattr(bsym.sym.module, "__name__", ""), name), name))
    if declared is None or declared == "writes":
        return None
    shares = _everything_shared(bsym) if declared == "shares" else ()
    return Effects(reads=tensors(bsym.flat_args), shares=shares)


@lru_cache(maxsize=4096)
def schema_effects(name: str) -> str | None:
    """What PyTorch's operator schemas say of an op.

    Args:
        name: the op's name without namespace, such as "narrow".

    Returns:
        "writes", "shares" or "fresh", the worst over its overloads without `out=`; None where PyTorch has no such op.
    """
    found = (torch._C._jit_get_schemas_for_operator(f"aten::{prefix}{name}") for prefix in _SCHEMA_PREFIXES)
    schemas = next(filter(None, found), [])
    written = [[a for a in s.arguments if a.alias_info is not None and a.alias_info.is_write] for s in schemas]
    if not schemas:
        return None
    if any(not argument.kwarg_only for arguments in written for argument in arguments):
        return "writes"
    schemas = [schema for schema, arguments in zip(schemas, written) if not arguments]  # the rest has no `out=`
    return "shares" if any(r.alias_info is not None for schema in schemas for r in schema.returns) else "fresh"


def _everything_shared(bsym: BoundSymbol) -> tuple[tuple[TensorProxy, TensorProxy], ...]:
    args = tensors(bsym.flat_args)
    return tuple((out, arg) for out in tensors(bsym.flat_outs) for arg in args)


def _is_passthrough(bsym: BoundSymbol) -> bool:
    """No op at all: a symbol that Thunder recorded although it returns its arguments or no tensor."""
    names = {arg.name for arg in tensors(bsym.flat_args)}
    return not bsym.sym.is_prim and bsym.sym.executor is None and all(o.name in names for o in tensors(bsym.flat_outs))


def _opaque(bsym: BoundSymbol) -> Effects:
    args = tensors(bsym.flat_args)
    return Effects(reads=args, writes=args, shares=_everything_shared(bsym), opaque=True)
