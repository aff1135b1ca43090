"""What each op reads, writes and shares: the table against what PyTorch eager does to memory."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cache

import pytest
import thunder
import thunder.torch as ltorch
import torch
import torch.nn.functional as F
from thunder.core import prims
from thunder.core.prims import PrimIDs
from thunder.core.proxies import TensorProxy
from thunder.core.symbol import BoundSymbol
from thunder.core.trace import TraceCtx
from thunder.executors import torchex
from torch.utils._pytree import tree_flatten

from guarded_nvfuser import effects, guarded_nvfuser_ex
from guarded_nvfuser.copies import with_copies
from guarded_nvfuser.effects import is_hidden_view, leaves, prim_id, schema_effects
from guarded_nvfuser.errors import HazardError
from guarded_nvfuser.interpreter import eager
from guarded_nvfuser.states import Program, analyse, writes_anything
from guarded_nvfuser.torch_ops import PARTIAL_WRITES
from guarded_nvfuser.torch_ops import ex as torch_ops_ex
from tests.support import Config, compare
from tests.traces import Recorder, flat, mystery, mystery_ex, mystery_in_eager, ops, program_of, put, trace_of

Op = Callable[[torch.Tensor], object]


def ramp(*shape: int) -> torch.Tensor:
    """Distinct values, so that every element can be told apart."""
    return torch.arange(1.0, 1 + torch.Size(shape).numel()).reshape(shape)


def names(proxies: Iterable[TensorProxy]) -> tuple[str, ...]:
    return tuple(proxy.name for proxy in proxies)


@dataclass(frozen=True)
class Named:
    """Effects by name: proxies cannot be compared outside a trace."""

    reads: tuple[str, ...] = ()
    writes: tuple[str, ...] = ()
    shares: tuple[tuple[str, str], ...] = ()
    opaque: bool = False


def named(bsym: BoundSymbol) -> Named:
    """The effects of a symbol that is one leaf."""
    [(_, found)] = leaves(bsym)
    return Named(names(found.reads), names(found.writes), tuple(map(names, found.shares)), found.opaque)


def the(trace: TraceCtx, name: str) -> BoundSymbol:
    """The one symbol of a name."""
    [bsym] = ops(trace, name)
    return bsym


def is_shared_in_eager(fn: Op, x: torch.Tensor) -> list[bool]:
    """Which results of a call lie in the argument's storage."""
    results = [leaf for leaf in tree_flatten(fn(x))[0] if isinstance(leaf, torch.Tensor)]
    return [result.untyped_storage().data_ptr() == x.untyped_storage().data_ptr() for result in results]


def is_shared(program: Program) -> list[bool]:
    """Which results of a program are, or may be, memory of its first argument."""
    source = program.buffer_of[program.arguments[0]]
    return [program.buffer_of[name] == source for name in program.results]


def as_function(op: Op) -> Op:
    """A Python function, for Thunder to trace, of something that may be built in."""
    return lambda x: op(x)


# --- ops that nobody declared


def test_unknown_op_reads_and_writes() -> None:
    trace = trace_of(lambda x, y: mystery(x, y), ramp(4, 4), ramp(4, 4))
    bsym = the(trace, "mystery")
    (x, y), out = names(trace.args), bsym.output.name
    assert named(bsym) == Named((x, y), (x, y), ((out, x), (out, y)), opaque=True)


def test_known_op_is_not_opaque() -> None:
    trace = trace_of(lambda x, y: x @ y, ramp(4, 4), ramp(4, 4))
    assert named(trace.bound_symbols[-2]) == Named(reads=names(trace.args))


def test_unknown_op_with_a_decomposition_is_what_it_consists_of() -> None:
    sigmoid = the(flat(lambda x: ltorch.sigmoid(x), ramp(4)), "sigmoid")
    found = list(leaves(sigmoid))
    assert [leaf.sym.name for leaf, _ in found] == ["neg", "exp", "add", "reciprocal"]
    assert not any(each.opaque or each.writes or each.shares for _, each in found)


@pytest.mark.parametrize("mode", ["rewrite", "fallback"])
def test_what_an_unknown_op_writes_is_seen(mode: str) -> None:
    def program(op: Callable) -> Callable:
        def run(x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, ...]:
            before = y * 2
            part = op(x, y)
            x.add_(1)
            return before, y * 2, part + 0

        return run

    jitted = thunder.jit(program(mystery), executors=[mystery_ex, guarded_nvfuser_ex], guard_on_hazard=mode)
    args, args_of_eager = (ramp(4, 4), ramp(4, 4)), (ramp(4, 4), ramp(4, 4))
    found = (*jitted(*args), *args)
    expected = (*program(mystery_in_eager)(*args_of_eager), *args_of_eager)
    assert all(torch.equal(mine, theirs) for mine, theirs in zip(found, expected))
    assert torch.equal(args[1], ramp(4, 4) * 3)


def test_bookkeeping_does_nothing() -> None:
    trace = trace_of(lambda x, scale: x * scale, ramp(4), 2.0)
    checks = [bsym for bsym in trace.bound_symbols if prim_id(bsym) in effects.BOOKKEEPING_PRIMS]
    assert {prim_id(bsym) for bsym in checks} >= {PrimIDs.UNPACK_TRIVIAL, PrimIDs.RETURN}
    assert all(named(bsym) == Named() for bsym in checks)


# --- the table of primitives

TABLE = {
    "pure": effects.PURE_PRIMS,
    "view": effects.VIEW_PRIMS,
    "maybe view": effects.MAYBE_VIEW_PRIMS,
    "conversion": effects.CONVERSION_PRIMS,
    "bookkeeping": effects.BOOKKEEPING_PRIMS,
    "writes and names": frozenset((PrimIDs.COPY_, PrimIDs.UPDATE_ALIASES)),
}


def test_every_primitive_has_one_entry() -> None:
    entries = [prim for part in TABLE.values() for prim in part]
    assert len(entries) == len(set(entries))


def test_primitives_without_an_entry_never_reach_a_computation() -> None:
    """They belong to prologues and epilogues; a new one that computes is opaque until somebody declares it."""
    undeclared = {prim.name for prim in PrimIDs} - {prim.name for part in TABLE.values() for prim in part}
    prologue = ("CHECK_", "ASSERT_", "UNPACK_", "PACK_")
    others = {"PYTHON_VARS", "DATACLASS_NEW", "PRINT", "NUMPY_ARRAY_TO_TORCH_TENSOR", "EXOGENOUS_LIKE"}
    assert {name for name in undeclared if not name.startswith(prologue)} <= others


_INTEGERS_ONLY = {
    "BITWISE_AND",
    "BITWISE_OR",
    "BITWISE_XOR",
    "BITWISE_NOT",
    "BITWISE_LEFT_SHIFT",
    "BITWISE_RIGHT_SHIFT",
}


def _every_elementwise_primitive(x: torch.Tensor, y: torch.Tensor, over_integers: bool) -> Callable:
    """A function of two tensors that returns what every elementwise primitive of the table makes of them, by name."""
    symbols = {prim.name: getattr(prims, prim.name.lower()) for prim in _elementwise(over_integers)}

    def every(x: TensorProxy, y: TensorProxy) -> dict[str, TensorProxy]:
        found = {}
        for name, symbol in symbols.items():
            if name == "WHERE":
                found[name] = prims.where(prims.gt(x, y), x, y)
            elif name == "LERP":
                found[name] = prims.lerp(x, y, x)
            else:
                found[name] = symbol(x) if symbol.id in effects.UNARY_PRIMS else symbol(x, y)
        return found

    trace = flat(every, x, y)
    results = trace.output
    run = eager(trace.bound_symbols[:-1], trace.args, list(results.values()), "every")
    return lambda *args: dict(zip(results, run(*args)))


def _elementwise(over_integers: bool) -> set[PrimIDs]:
    return {prim for prim in effects.ELEMENTWISE_PRIMS if (prim.name in _INTEGERS_ONLY) == over_integers}


@pytest.mark.parametrize("over_integers", [False, True])
def test_elementwise_primitives_look_at_one_element(over_integers: bool) -> None:
    x, y = torch.tensor([[3, 1, 2], [5, 4, 6]]), torch.tensor([[1, 2, 1], [2, 1, 3]])
    x, y = (x, y) if over_integers else (x / 8, y / 1)
    every = _every_elementwise_primitive(x, y, over_integers)
    before = every(x, y)
    assert before.keys() == {prim.name for prim in _elementwise(over_integers)}
    for index in range(x.numel()):
        other = x.clone()
        other.view(-1)[index] += 1
        for name, after in every(other, y).items():
            differs = ~torch.isclose(before[name].double(), after.double(), equal_nan=True).view(-1)
            differs[index] = False
            assert not differs.any(), name


def test_copy_reads_its_source_and_writes_its_target() -> None:
    trace = flat(lambda x, y: put(x, y), ramp(4), ramp(4))
    bsym, (x, y) = the(trace, "copy_"), names(trace.args)
    assert named(bsym) == Named(reads=(x,), writes=(y,), shares=((bsym.output.name, y),))


def test_claimed_copy_is_a_copy() -> None:
    """Thunder's PyTorch executor has names of its own for primitives."""
    trace = flat(lambda x, y: torchex.copy_(x, y, grad_enabled=False), ramp(4), ramp(4))
    bsym, (x, y) = the(trace, "copy_"), names(trace.args)
    assert bsym.sym.id is not PrimIDs.COPY_
    assert prim_id(bsym) is PrimIDs.COPY_
    assert named(bsym) == Named(reads=(x,), writes=(y,), shares=((bsym.output.name, y),))


def test_names_of_thunders_executor_exist() -> None:
    assert effects._TORCHEX_ALIASES.keys() <= torchex.ex.opmap.keys()


def test_update_aliases_renames_one_by_one() -> None:
    trace = flat(lambda x, y: prims.update_aliases((x, y)), ramp(4), ramp(4))
    bsym = the(trace, "update_aliases")
    assert named(bsym) == Named(shares=tuple(zip(names(bsym.flat_proxy_outs), names(trace.args))))


@pytest.mark.parametrize(
    ("convert", "same"),
    [
        (lambda x: prims.convert_element_type(x, thunder.dtypes.float32), True),
        (lambda x: prims.convert_element_type(x, thunder.dtypes.float64), False),
        (lambda x: prims.device_put(x, thunder.devices.Device("cpu")), True),
        (lambda x: prims.device_put(x, thunder.devices.Device("meta")), False),
    ],
    ids=["same dtype", "other dtype", "same device", "other device"],
)
def test_conversion_is_its_operand_if_nothing_changes(convert: Op, same: bool) -> None:
    trace = flat(convert, ramp(4))
    (x,) = names(trace.args)
    computing = [named(bsym) for bsym in trace.bound_symbols[:-1] if named(bsym) != Named()]
    assert is_shared(analyse(trace)) == [same]
    assert all(found.reads == (x,) for found in computing)
    assert same or computing


def test_reshape_reads_and_shares() -> None:
    trace = flat(lambda x: prims.reshape(x, (6, 4)), ramp(4, 6))
    bsym, (x,) = the(trace, "reshape"), names(trace.args)
    assert named(bsym) == Named(reads=(x,), shares=((bsym.output.name, x),))
    assert is_shared_in_eager(lambda t: t.reshape(6, 4), ramp(4, 6)) == [True]
    assert is_shared_in_eager(lambda t: t.reshape(6, 4), ramp(6, 4).t()) == [False]


def test_view_shares_and_reads_nothing() -> None:
    trace = flat(lambda x: prims.transpose(x, (1, 0)), ramp(4, 6))
    bsym, (x,) = the(trace, "transpose"), names(trace.args)
    assert named(bsym) == Named(shares=((bsym.output.name, x),))


_CALLS_OF_PARTIAL_WRITES: dict[PrimIDs, Callable] = {
    PrimIDs.COPY_WITH_SETITEM: lambda op, x, v, i: op(x, (slice(0, 2),), v),
    PrimIDs.INDEX_ADD: lambda op, x, v, i: op(x, i[0], v, 0),
    PrimIDs.INDEX_COPY: lambda op, x, v, i: op(x, i[0], v, 0),
    PrimIDs.INDEX_PUT: lambda op, x, v, i: op(x, (i[0],), v, False),
    PrimIDs.SCATTER: lambda op, x, v, i: op(x, i, v, 0),
    PrimIDs.SCATTER_ADD: lambda op, x, v, i: op(x, i, v, 0),
}


@pytest.mark.parametrize("prim", sorted(PARTIAL_WRITES, key=lambda prim: prim.name), ids=lambda prim: prim.name)
def test_partial_write_changes_its_first_operand(prim: PrimIDs) -> None:
    symbol, call = PARTIAL_WRITES[prim], _CALLS_OF_PARTIAL_WRITES[prim]
    recorder = Recorder(lambda _, trace: trace)
    target, values, index = ramp(4, 2), ramp(2, 2) * 10, torch.tensor([[0, 2], [1, 0]])
    jitted = thunder.jit(lambda x, v, i: call(symbol, x, v, i), executors=[torch_ops_ex, recorder])
    result = jitted(target, values, index)
    bsym, (x, v) = the(recorder.trace, symbol.name), names(recorder.trace.args[:2])
    found = named(bsym)
    assert found.writes == (x,)
    assert v in found.reads
    assert x not in found.reads
    assert found.shares == ((bsym.output.name, x),)
    assert result.data_ptr() == target.data_ptr()
    assert not torch.equal(target, ramp(4, 2))
    assert torch.equal(values, ramp(2, 2) * 10)


def test_every_partial_write_is_called() -> None:
    assert set(_CALLS_OF_PARTIAL_WRITES) == set(PARTIAL_WRITES)


# --- views

VIEWS: dict[str, Op] = {
    "adjoint": lambda x: x.adjoint(),
    "as_strided": lambda x: x.as_strided((2, 2), (1, 2)),
    "chunk": lambda x: x.chunk(2),
    "detach": torch.detach,
    "diagonal": lambda x: x.diagonal(1),
    "expand": lambda x: (x.expand(3, 4, 4), x.expand(4, 4)),
    "expand_as": lambda x: x.expand_as(torch.zeros(3, 4, 4)),
    "getitem": lambda x: (x[0], x[1:3, ::2], x[..., None], x[:], x[-1, 2:-1]),
    "hsplit": lambda x: x.hsplit(2),
    "movedim": lambda x: (x.movedim(0, 1), x.movedim(0, 0)),
    "narrow": lambda x: x.narrow(0, 1, 2),
    "permute": lambda x: (x.permute(1, 0), x.permute(0, 1)),
    "real": lambda x: x.real,
    "select": lambda x: x.select(0, 1),
    "split": lambda x: (*x.split(2), *x.split([1, 3]), *x.split(10)),
    "split_with_sizes": lambda x: x.split_with_sizes([1, 3]),
    "squeeze": lambda x: (x.squeeze(), x.squeeze(0)),
    "swapaxes": lambda x: x.swapaxes(0, 1),
    "swapdims": lambda x: x.swapdims(0, 1),
    "t": lambda x: x.t(),
    "tensor_split": lambda x: (*x.tensor_split(3), *torch.tensor_split(x, (1,), 1)),
    "transpose": lambda x: (x.transpose(0, 1), x.transpose(0, 0), x.T, x.mT),
    "unbind": lambda x: x.unbind(1),
    "unflatten": lambda x: x.unflatten(1, (2, 2)),
    "unsqueeze": lambda x: x.unsqueeze(0),
    "view": lambda x: (x.view(16), x.view(4, 4), x.view([2, 8])),
    "view_as": lambda x: x.view_as(torch.zeros(16)),
    "vsplit": lambda x: x.vsplit(2),
}
COMPLEX_VIEWS: dict[str, Op] = {
    "imag": lambda x: x.imag,
    "real": lambda x: x.real,
    "view_as_real": torch.view_as_real,
}
MAYBE_VIEWS: dict[str, Op] = {
    "contiguous": lambda x: x.contiguous(),
    "flatten": lambda x: (x.flatten(), x.flatten(0, 0)),
    "reshape": lambda x: (x.reshape(16), x.reshape(4, 4)),
    "reshape_as": lambda x: x.reshape_as(torch.zeros(2, 8)),
    "to": lambda x: (x.to(torch.float32), x.to("cpu"), x.to(torch.float64)),
}
# Thunder lists them, but no program with simple arguments reaches them.
UNREACHED = {
    "indices": "of sparse tensors, which Thunder does not trace",
    "values": "of sparse tensors, which Thunder does not trace",
    "shallow_copy": "Thunder's own, below",
    "unfold": "Thunder takes Tensor.unfold for F.unfold, which computes, and cannot trace it",
}


def _layouts(dtype: torch.dtype = torch.float32) -> dict[str, torch.Tensor]:
    return {"dense": ramp(4, 4).to(dtype), "permuted": ramp(4, 4).to(dtype).t()}


def _cases(table: dict[str, Op], dtype: torch.dtype = torch.float32) -> list:
    """Calls by op and layout, where eager allows the op on that layout."""
    found = []
    for name, op in table.items():
        for layout in _layouts(dtype):
            try:
                op(_layouts(dtype)[layout])
            except RuntimeError:
                assert (name, layout) in {("view", "permuted"), ("view_as", "permuted")}
                continue
            found.append(pytest.param(op, layout, dtype, id=f"{name}-{layout}-{dtype}"))
    return found


@pytest.mark.parametrize(("op", "layout", "dtype"), _cases(VIEWS) + _cases(COMPLEX_VIEWS, torch.complex64))
def test_thunders_views_are_views(op: Op, layout: str, dtype: torch.dtype) -> None:
    in_eager = is_shared_in_eager(op, _layouts(dtype)[layout])
    assert is_shared(program_of(as_function(op), _layouts(dtype)[layout])) == in_eager


@pytest.mark.parametrize(("op", "layout", "dtype"), _cases(MAYBE_VIEWS))
def test_thunders_maybe_views_may_be_views(op: Op, layout: str, dtype: torch.dtype) -> None:
    in_eager = is_shared_in_eager(op, _layouts(dtype)[layout])
    found = is_shared(program_of(as_function(op), _layouts(dtype)[layout]))
    assert all(may or not does for may, does in zip(found, in_eager, strict=True))


def test_every_view_of_thunders_is_called() -> None:
    definite = {symbol.name for symbol in ltorch._syms_returning_views}
    maybe = {symbol.name for symbol in ltorch._syms_that_may_return_views}
    assert VIEWS.keys() | COMPLEX_VIEWS.keys() | UNREACHED.keys() == definite
    assert MAYBE_VIEWS.keys() == maybe


def test_views_that_are_not_reached() -> None:
    for name in ("indices", "values"):
        with pytest.raises(RuntimeError):
            getattr(ramp(4), name)()
    trace = flat(lambda x: prims.shallow_copy(x), ramp(4))
    bsym = the(trace, "shallow_copy")
    assert named(bsym) == Named(shares=((bsym.output.name, trace.args[0].name),))


def test_hidden_views_are_views_that_thunder_computes() -> None:
    """Thunder decomposes them into computations, so that their parts alone would say that nothing is shared."""
    trace = trace_of(lambda x, y: (x.contiguous(), x.diagonal(), x.t(), x + y), ramp(4, 4), ramp(4, 4))
    hidden = {bsym.sym.name for bsym in trace.bound_symbols if is_hidden_view(bsym)}
    assert hidden == {"contiguous", "diagonal"}


# --- ops beyond Thunder's lists whose results may be memory of their operands



SHARING_OPS: dict[str, Op] = {
    "atleast_1d": torch.atleast_1d,
    "broadcast_to": lambda x: torch.broadcast_to(x, (3, 4, 4)),
    "conj": torch.conj,
    "cpu": lambda x: x.cpu(),
    "dropout": lambda x: (F.dropout(x, 0.5, training=False), F.dropout(x, 0.0)),
    "dropout2d": lambda x: F.dropout2d(x[None, None], 0.5, training=False),
    "einsum transpose": lambda x: torch.einsum("ij->ji", x),
    "float": lambda x: x.float(),
    "getitem with a list": lambda x: x[[0, 1]],
    "linalg.diagonal": torch.linalg.diagonal,
    "meshgrid": lambda x: torch.meshgrid(x[0], x[1], indexing="ij"),
    "moveaxis": lambda x: torch.moveaxis(x, 0, 1),
    "nn.Identity": lambda x: torch.nn.Identity()(x),
    "positive": torch.positive,
    "ravel": torch.ravel,
    "resolve_conj": torch.resolve_conj,
    "type": lambda x: x.type(torch.float32),
    "type_as": lambda x: x.type_as(torch.zeros(1)),
    "cartesian_prod": lambda x: torch.cartesian_prod(x[0]),
    "conj_physical": torch.conj_physical,
    "einsum diagonal": lambda x: torch.einsum("ii->i", x),
    "to_dense": lambda x: x.to_dense(),
    "unsafe_chunk": lambda x: torch.unsafe_chunk(x, 2),
    "unsafe_split": lambda x: torch.unsafe_split(x, 2),
    "unsafe_split_with_sizes": lambda x: torch.unsafe_split_with_sizes(x, [1, 3]),
}
COPIES: dict[str, Op] = {
    "abs": torch.abs,
    "add nothing": lambda x: x + 0,
    "cat of one": lambda x: torch.cat([x]),
    "clone": torch.clone,
    "double": lambda x: x.double(),
    "flip": lambda x: x.flip(0),
    "getitem with a tensor": lambda x: x[torch.tensor([0, 1])],
    "masked_fill": lambda x: x.masked_fill(x > 99, 0.0),
    "mean of one": lambda x: x[:, :1].mean(1),
    "narrow_copy": lambda x: torch.narrow_copy(x, 0, 0, 2),
    "pad with nothing": lambda x: F.pad(x, (0, 0)),
    "relu6": F.relu6,
    "roll": lambda x: x.roll(0),
    "slice_scatter": lambda x: torch.slice_scatter(x, torch.zeros(2, 4), 0, 0, 2),
    "sum of one": lambda x: x[:, :1].sum(1),
    "tile": lambda x: torch.tile(x, (1, 1)),
    "where": lambda x: torch.where(x > 0, x, x),
    "F.unfold": lambda x: F.unfold(x[None, None], 2),
}
# Thunder's decompositions of these return the operand's memory.
COPIES_LEFT_OUT: dict[str, Op] = {"flip nothing": lambda x: x.flip([]), "repeat": lambda x: x.repeat(1, 1)}



def _params(table: dict[str, Op]) -> list:
    return [pytest.param(op, id=name) for name, op in table.items()]


@pytest.mark.parametrize("op", _params(SHARING_OPS))
def test_what_shares_memory_is_known(op: Op) -> None:
    in_eager = is_shared_in_eager(op, ramp(4, 4))
    found = is_shared(program_of(as_function(op), ramp(4, 4)))
    assert all(may or not does for may, does in zip(found, in_eager, strict=True))


@pytest.mark.parametrize("op", _params(COPIES))
def test_copies_share_nothing(op: Op) -> None:
    assert not any(is_shared_in_eager(op, ramp(4, 4)))
    assert not any(is_shared(program_of(as_function(op), ramp(4, 4))))


@pytest.mark.parametrize("op", _params(COPIES_LEFT_OUT))
def test_copies_that_thunder_leaves_out_are_added(op: Op) -> None:
    trace = trace_of(as_function(op), ramp(4, 4))
    assert not any(is_shared_in_eager(op, ramp(4, 4)))
    assert any(is_shared(analyse(trace)))
    assert not any(is_shared(analyse(with_copies(trace))))


# --- PyTorch's schemas


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("narrow", "shares"),
        ("special_erfcx", "fresh"),
        ("erfcx", "fresh"),  # torch.special.erfcx
        ("matmul", "fresh"),  # an overload with `out=` writes only that
        ("index_add_", "writes"),
        ("no_such_op", None),
    ],
)
def test_schema_effects(name: str, expected: str | None) -> None:
    assert schema_effects(name) == expected


_TAILS = ((), (0,), (1,), (2,), (0, 1), (0.5,), (torch.float32,), ((1, 3),), ("x",))
_KNOWN_TO_SHARE = effects._MAYBE_SELF_NAMES | effects._CONVERSION_NAMES | effects._HIDDEN_VIEW_NAMES


@cache
def _wrong_schemas() -> frozenset[str]:
    """Ops that Thunder registered from PyTorch by itself and whose schema promises more than some call keeps."""
    wrong = set()
    for fn, symbol in ltorch._torch_to_thunder_function_map.items():
        name = getattr(symbol, "name", "")
        if not getattr(symbol, "is_prim", False) or name in _KNOWN_TO_SHARE or name in effects._SILENT_WRITERS:
            continue
        did = {_what_eager_does(fn, tail) for tail in _TAILS}
        declared = schema_effects(name)
        if "writes" in did and declared in ("shares", "fresh") or "shares" in did and declared == "fresh":
            wrong.add(name)
    return frozenset(wrong)


def test_schemas_that_are_trusted_are_right() -> None:
    assert not _wrong_schemas()


def _what_eager_does(fn: Callable, tail: tuple) -> str | None:
    """Whether a call writes its first argument, or returns its memory; None if neither, or if eager refuses."""
    x = ramp(4, 4)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            shared = is_shared_in_eager(lambda t: fn(t, *(t if each == "x" else each for each in tail)), x)
    except Exception:  # whatever eager raises for arguments that an op does not take
        return None
    if x.shape != (4, 4) or not torch.equal(x, ramp(4, 4)):
        return "writes"
    return "shares" if any(shared) else None


WRITERS: dict[str, tuple[Callable, tuple[torch.Tensor, ...]]] = {
    "instance_norm": (lambda x, m, v: F.instance_norm(x, m, v), (ramp(1, 4, 3), torch.zeros(4), torch.ones(4))),
    "batch_norm": (lambda x, m, v: F.batch_norm(x, m, v, training=True), (ramp(2, 4), torch.zeros(4), torch.ones(4))),
    "embedding_bag": (lambda w, i: F.embedding_bag(i, w, max_norm=1.0), (ramp(4, 4), torch.tensor([[0, 1]]))),
    "relu": (lambda x: F.relu(x, inplace=True), (-ramp(4),)),
    "rrelu": (lambda x: F.rrelu(x, inplace=True), (-ramp(4),)),
    "exponential_": (lambda x: x.exponential_(), (ramp(4),)),
    "cumsum_": (lambda x: x.cumsum_(0), (ramp(4),)),
    "index_put_": (lambda x, i, v: x.index_put_((i,), v), (ramp(4), torch.tensor([2]), ramp(1))),
    "setitem": (lambda x, y: x.__setitem__(slice(1, 3), y), (ramp(4), ramp(2))),
    "write through a view": (lambda x: x.view(2, 2).t().mul_(2), (ramp(4),)),
    "batch_norm in evaluation": (
        lambda x, m, v: F.batch_norm(x, m, v, training=False),
        (ramp(2, 4), torch.zeros(4), torch.ones(4)),
    ),
}


@pytest.mark.parametrize("name", WRITERS)
def test_what_writes_is_known(name: str) -> None:
    fn, args = WRITERS[name]
    in_eager = [arg.clone() for arg in args]
    fn(*in_eager)
    program = program_of(fn, *(arg.clone() for arg in args))
    written = [not torch.equal(before, after) for before, after in zip(args, in_eager)]
    found = [program.buffer_of[argument] in program.writes for argument in program.arguments]
    assert any(written) == (name != "batch_norm in evaluation")
    assert all(known or not did for known, did in zip(found, written, strict=True))
    assert any(found) == any(written)


# --- ops that write nothing

FUNCTIONAL: dict[str, Op] = {
    "avg_pool2d": lambda x: F.avg_pool2d(x, 2),
    "gelu": F.gelu,
    "layer_norm": lambda x: F.layer_norm(x, (4,)),
    "logsumexp": lambda x: torch.logsumexp(x, 0),
    "max_pool2d": lambda x: F.max_pool2d(x, 2),
    "scaled_dot_product_attention": lambda x: F.scaled_dot_product_attention(x, x, x),
    "softmax": lambda x: F.softmax(x, 0),
    "sort": lambda x: x.sort(0),
    "topk": lambda x: x.topk(2),
    "triu": torch.triu,
    "adaptive_avg_pool2d": lambda x: F.adaptive_avg_pool2d(x, (2, 2)),
    "argsort": torch.argsort,
    "cumsum": lambda x: torch.cumsum(x, 0),
    "fold": lambda x: F.fold(x[0], (1, 4), 1),
    "gumbel_softmax": lambda x: F.gumbel_softmax(x, hard=False),
    "lp_pool2d": lambda x: F.lp_pool2d(x, 2.0, 2),
}


@pytest.mark.parametrize("op", _params(FUNCTIONAL))
def test_functional_ops_write_nothing(op: Op) -> None:
    x = ramp(1, 1, 4, 4)
    op(x)
    assert torch.equal(x, ramp(1, 1, 4, 4))
    assert not writes_anything(trace_of(as_function(op), x))


# --- what follows for programs


def pool(x):
    return F.adaptive_avg_pool2d(x[None, None] * 2, (2, 2)) + 1


def pool_by_powers(x):
    y = x[None, None] * 2
    return F.lp_pool2d(y, 2.0, 2) + 1, y * 3


def average_pool(x):
    return F.avg_pool2d(x[None, None] * 2, 2) + 1


@pytest.mark.parametrize(
    "fn",
    [
        average_pool,
        pool,
        pool_by_powers,
    ],
)
def test_programs_that_write_nothing_have_gradients(fn: Op) -> None:
    assert compare(fn, lambda: (ramp(4, 4).requires_grad_(),), Config(), backward=True) == []


@pytest.mark.parametrize(
    "fn",
    [
        lambda x: (x * 2).softmax(0) * x,
        lambda x: (doubled := x * 2).cumsum(0) * doubled,
    ],
    ids=["softmax", "cumsum"],
)
def test_programs_that_write_nothing_are_not_refused(fn: Op) -> None:
    assert compare(fn, lambda: (ramp(4, 4),), Config(mode="raise")) == []


def _written_view(view: Op) -> Op:
    def write(x):
        part = view(x)
        part.mul_(2)
        return x + 1

    return write


def _kept_copy(copy: Op) -> Op:
    def keep(x):
        kept = copy(x)
        x.mul_(2)
        return kept

    return keep


@pytest.mark.parametrize("mode", ["rewrite", "fallback"])
@pytest.mark.parametrize(
    "fn",
    [
        pytest.param(_written_view(lambda x: torch.chunk(x, 2)[0]), id="chunk"),
        pytest.param(_written_view(lambda x: torch.unsafe_chunk(x, 2)[0]), id="unsafe_chunk"),
        pytest.param(_written_view(torch.conj_physical), id="conj_physical"),
    ],
)
def test_writes_through_such_views_are_eagers(fn: Op, mode: str) -> None:
    assert compare(fn, lambda: (ramp(4, 4),), Config(mode=mode)) == []


@pytest.mark.parametrize("mode", ["rewrite", "fallback", "raise"])
def test_a_write_through_a_diagonal_by_einsum_is_refused(mode: str) -> None:
    """Thunder knows no einsum that is a view, and PyTorch runs only its parts."""
    jitted = thunder.jit(
        _written_view(lambda x: torch.einsum("ii->i", x)), executors=[guarded_nvfuser_ex], guard_on_hazard=mode
    )
    x = ramp(4, 4)
    with pytest.raises(HazardError, match="einsum"):
        jitted(x)
    assert torch.equal(x, ramp(4, 4))


@pytest.mark.parametrize(
    "fn",
    [
        pytest.param(_kept_copy(lambda x: torch.tile(x, (1, 1))), id="tile"),
        pytest.param(_kept_copy(lambda x: x.repeat(1, 1)), id="repeat"),
        pytest.param(_kept_copy(lambda x: F.unfold(x[None, None], 2)), id="unfold"),
    ],
)
def test_copies_do_not_change_with_their_source(fn: Op) -> None:
    assert compare(fn, lambda: (ramp(4, 4),), Config()) == []
