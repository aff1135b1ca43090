"""Mode rewrite: values instead of mutation, in-place only for parts of tensors, and eager's results throughout."""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import thunder
import thunder.torch as ltorch
import torch
import torch.nn.functional as F

from guarded_nvfuser import Cost, HazardWarning, cost
from guarded_nvfuser.hazards import is_region
from guarded_nvfuser.options import schedule
from guarded_nvfuser.rewrite import rewrite
from tests.generator import compile_source
from tests.support import Config, differences, jit, run
from tests.traces import program_of


def three() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return tuple(torch.randn(4, 6, generator=generator) for _ in range(3))


def squares() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return tuple(tensor[:, :4].contiguous() for tensor in three())


def program(body: str) -> Callable:
    """A function of x, y, z whose statements are separated by semicolons."""
    lines = "".join(f"    {line.strip()}\n" for line in body.split(";"))
    return compile_source(f"def program(x, y, z):\n{lines}")


def check(fn: Callable | str, make_args: Callable = three, **options: Any) -> None:
    """Fail unless a program does what eager does, in both partitions and under both schedules."""
    fn = program(fn) if isinstance(fn, str) else fn
    expected = run(fn, make_args, **options)
    for fusion_type in ("consecutive", "dataflow"):
        jitted = jit(fn, Config("rewrite", fusion_type))
        for order in ("late", "early"):
            with schedule(order):
                assert differences(expected, run(jitted, make_args, **options)) == [], (fusion_type, order)


def compiled(fn: Callable | str, *args: torch.Tensor, **options: Any) -> Callable:
    jitted = jit(program(fn) if isinstance(fn, str) else fn, Config("rewrite"), **options)
    jitted(*(args or three()))
    return jitted


def ops(jitted: Callable) -> list[str]:
    """The names of all ops that run, inside regions and outside, without renames and bookkeeping."""
    found = []
    for bsym in thunder.last_traces(jitted)[-1].bound_symbols:
        found += [sub.sym.name for sub in bsym.subsymbols] if is_region(bsym) else [bsym.sym.name]
    return [name for name in found if name not in ("update_aliases", "python_del", "python_return", "unpack_trivial")]


# --- forwarding


def test_rounding_of_a_copy_is_kept() -> None:
    """A copy into a narrower dtype rounds; reading the target afterwards reads the rounded value, not the source."""

    def fn(acc, x):
        acc.copy_(x)
        return acc.float(), acc.float() + x

    def args() -> tuple[torch.Tensor, torch.Tensor]:
        return torch.zeros(4, 6, dtype=torch.bfloat16), three()[0]

    expected, found = run(fn, args), run(jit(fn, Config("rewrite")), args)
    assert differences(expected, found, exact=True) == []
    assert not torch.equal(found.results[0], args()[1])


@pytest.mark.parametrize("narrow", [torch.bfloat16, torch.float16, torch.float32])
def test_rounding_happens_at_every_write(narrow: torch.dtype) -> None:
    """An accumulator of a narrow dtype rounds after each of its updates, as in eager."""

    def fn(acc, x):
        acc.mul_(x)
        acc.add_(x)
        acc.div_(3)
        return acc + x

    def args() -> tuple[torch.Tensor, torch.Tensor]:
        return three()[0].to(narrow), three()[1].double()

    assert differences(run(fn, args), run(jit(fn, Config("rewrite")), args), exact=True) == []


def test_widening_and_integer_copies() -> None:
    """The cast that a copy implies is forwarded, whichever way it goes."""

    def fn(wide, whole, flag, x):
        wide.copy_(x)
        whole.copy_(x * 3)
        flag.copy_(x)
        return wide + 1, whole + 1, torch.logical_not(flag)

    def args() -> tuple[torch.Tensor, ...]:
        x = three()[0].round()
        return torch.zeros(4, 6, dtype=torch.float64), torch.zeros(4, 6, dtype=torch.int64), x > 9, x

    check(fn, args)


def test_a_write_chain_is_one_region() -> None:
    """In-place ops in a row are values in a row: one region, no op left, the argument written once."""
    jitted = compiled("x.tanh_(); return x * x * x * x")
    assert cost(jitted) == Cost(1, 0, 3 * 4 * 6 * 4)
    assert ops(jitted).count("copy_") == 1


def test_dead_writes_are_dropped() -> None:
    """What is overwritten before anybody reads it, and what nobody can see, is not computed."""
    assert ops(compiled("x.exp_(); x.copy_(y); return z + 1")).count("exp") == 0
    assert ops(compiled("t = x * 1; t.exp_(); return z + 1")) == ["add"]
    assert ops(compiled("t = torch.zeros(4, 6); t.copy_(x); t.mul_(y); return t")) == ["mul"]
    check("x.exp_(); x.copy_(y); return z + 1")


def test_a_read_before_the_overwrite_keeps_the_write() -> None:
    """A write that somebody reads is not dead, though it is overwritten later."""
    check("x.mul_(2); s = x.sum(); x.copy_(y); return s")
    assert "mul" in ops(compiled("x.mul_(2); s = x.sum(); x.copy_(y); return s"))


# --- sources that are overwritten


@pytest.mark.parametrize(
    "body",
    [
        "t = x.clone(); x.copy_(y); y.copy_(t)",
        "t = x.clone(); x.copy_(y); y.copy_(t); return x, y",
        "t = x * 1; x.copy_(y); y.copy_(t); return t, y",
        "t = x.clone(); x.copy_(y); y.copy_(z); z.copy_(t); return x, y, z",
        "t = x.clone(); x.copy_(y * 2); y.copy_(t * 3); return x * y",
        "x.copy_(y); y.copy_(z); return x, y",
        "x.copy_(y); y.copy_(z); z.copy_(x); return x, y, z",
        "x.copy_(y); y.mul_(2); return x, y",
        "x.copy_(y); z.copy_(y); y.zero_(); return x, z",
        "x.copy_(y); x.add_(1); y.copy_(x); return x, y",
        "x.mul_(y); y.mul_(x); x.mul_(y); return x, y",
        "x.copy_(y); y[0] = 1.0; return x, y",
        "y.copy_(x); x[1:].mul_(2); y[0] = z[0]; return x, y",
    ],
)
def test_swaps_and_chains(body: str) -> None:
    """A value that lies in an argument's memory outlives the overwriting of that argument; cycles are broken."""
    check(body)


@pytest.mark.parametrize(
    "body",
    [
        "y.t().copy_(x); x.mul_(2); return y, x",
        "y.t().copy_(x); x.copy_(z); z.zero_(); return y, x",
        "y.t().copy_(x); x[0] = 1.0; return y, x",
        "y.t().copy_(x); x.t().copy_(z); return y, x",
        "y.view(16).copy_(x.view(16)); x[0] = 1.0; return y, x",
        "t = y * 1; s = z * 1; t.t().copy_(s); s[0] = 1.0; return t, s",
    ],
)
def test_sources_written_through_views(body: str) -> None:
    """So does a value that reaches its target through a view."""
    check(body, squares)


@pytest.mark.parametrize(
    "body",
    [
        "x.copy_(y); y.mul_(2); return x + y",
        "x.copy_(y); y.copy_(z); return x * y",
        "t = torch.empty(4, 6); t.copy_(y); y.zero_(); return t - y",
    ],
)
def test_a_copy_and_its_changed_source_are_read_together(body: str) -> None:
    """An op that reads a tensor and the one that it was copied from, changed since, sees both values."""
    check(body)


def test_self_copies() -> None:
    """A copy of a tensor to itself, rearranged or not, is computed before it is written."""
    check("x.copy_(x.t() * 2); return x", squares)
    check("x.copy_(x.flip(0)); return x")
    check("x.copy_(x.clone()); return x")
    check("x.copy_(x); return x + 1")
    check("x.add_(x); x.mul_(x); return x")
    check("x.copy_(torch.cat([x[1:], y[:1]])); return x")


def test_one_source_for_two() -> None:
    """A value written to two arguments, returned, and changed further is three tensors."""
    check("s = x.sin(); x.copy_(s); y.copy_(s); return s")
    check("s = x.sin(); x.copy_(s); s.mul_(2); return s, x")
    check("s = x.sin(); x.copy_(s); x.mul_(2); return s")


# --- views

VIEWS = [
    "x.view(24)",
    "x.view(2, 2, 6)",
    "x.reshape(6, 4)",
    "x.flatten()",
    "x.t()",
    "x.transpose(0, 1)",
    "x.permute(1, 0)",
    "x.movedim(0, 1)",
    "x.swapaxes(0, 1)",
    "x.unsqueeze(0)",
    "x.unsqueeze(1).squeeze(1)",
    "x.unflatten(1, (2, 3))",
    "x[1:3]",
    "x[::2]",
    "x[:, 1:4]",
    "x[:, ::3]",
    "x[0]",
    "x[:, -1]",
    "x[1, 2]",
    "x[None]",
    "x[..., 2:]",
    "x.select(0, 1)",
    "x.narrow(1, 1, 3)",
    "x.diagonal()",
    "x.diagonal(1)",
    "x.split(2)[1]",
    "x.split([1, 5], 1)[1]",
    "x.chunk(3, 1)[2]",
    "x.tensor_split(2)[1]",
    "x.unbind(0)[2]",
    "x.unbind(1)[0]",
    "x.hsplit(2)[1]",
    "x.expand(2, 4, 6)[0]",
    "x.as_strided((2, 2), (6, 1))",
    "x.detach()",
    "x.view_as(y)",
    "x[1:].t()",
    "x.t()[1:]",
    "x.view(24)[3:9]",
    "x.reshape(2, 12)[:, 3:7].t()",
    "x[1:][0][2:4]",
    "x.contiguous()",
    "x.float()",
    "x.t().contiguous()",
    "x.t().reshape(24)",
]


@pytest.mark.parametrize("view", VIEWS)
def test_writes_through_views(view: str) -> None:
    """A write through a view reaches its base, reads through it see later writes of the base, in eager's order."""
    check(f"v = {view}; v.mul_(2); return x + y, v")
    check(f"w = x.sin(); v = {view}; x.add_(1); s = v * 2; v.copy_(s.cos()); x.mul_(y); return v, w")


@pytest.mark.parametrize(
    "body",
    [
        "a, b = x.chunk(2); a.add_(b); b.mul_(a); return x, a",
        "a, b, c, d = x.unbind(0); a.mul_(2); b.copy_(a); return x, c",
        "u = x.view(24); v = u.view(2, 12); v.mul_(2); w = x.t(); w.add_(1); return u, v",
        "v = x[0]; w = x[:, 0]; v.mul_(2); w.add_(1); return v, w",
        "x[0].copy_(x[1]); x[1].zero_(); return x",
        "v = x.t(); y.t().copy_(v); v.mul_(2); return y, x",
        "t = x * 1; u = t.view(24); t.mul_(2); u.add_(1); return t, u",
        "t = torch.zeros(4, 6); t[1:] = x[1:]; t.mul_(y); return t, t[0]",
    ],
)
def test_several_views_of_one_tensor(body: str) -> None:
    """Views that overlap each other, and views of views, see each other's writes."""
    check(body)


def test_bijective_views_are_undone() -> None:
    """A write through a view that shows every element once is a value of the base: no copy and no op of its own."""
    for view in ("x.view(24)", "x.t()", "x.unsqueeze(0)", "x.permute(1, 0)"):
        jitted = compiled(f"{view}.mul_(2); return x + 1")
        assert ops(jitted).count("copy_") == 1
        assert cost(jitted).regions == 1


# --- parts of tensors


def test_slice_write() -> None:
    """A write into a part goes to the real memory: the part is moved, not the whole; later reads come behind it."""

    def fill(buffer, row):
        buffer[:, 3:4] = row
        return (buffer[:, :4] * 2).sum()

    def args() -> tuple[torch.Tensor, torch.Tensor]:
        return torch.zeros(2, 1000), torch.ones(2, 1)

    check(fill, args)
    jitted = compiled(fill, *args())
    assert "write_setitem" in ops(jitted)
    bsyms = thunder.last_traces(jitted)[-1].bound_symbols
    names = [bsym.sym.name for bsym in bsyms]
    write = bsyms[names.index("write_setitem")]
    reader = next(bsym for bsym in bsyms if is_region(bsym))
    assert names.index("write_setitem") < bsyms.index(reader)
    aliases = bsyms[names.index("update_aliases")]
    assert write.flat_proxy_outs[0].name in {arg.name for arg in aliases.flat_proxy_args}
    assert {out.name for out in aliases.flat_proxy_outs} & {arg.name for arg in reader.flat_proxy_args}


def test_part_writes_cost_the_part() -> None:
    """Bytes moved by a write into a part do not grow with the tensor."""
    found = {}
    for length in (64, 4096):
        jitted = jit(lambda cache, k: cache.index_copy_(0, torch.tensor([5]), k), Config("rewrite"))
        jitted(torch.zeros(length, 8), torch.ones(1, 8))
        found[length] = cost(jitted).bytes
    assert found[64] == found[4096] < 1000


@pytest.mark.parametrize(
    "body",
    [
        "x[1:3] = y[1:3]; return x + y",
        "x[:, ::2] = 0.5; return x * y",
        "x[1, 2] = y.sum(); return x",
        "x[1:3][0][1:2] = 7.0; return x",
        "x[..., -1] = z[..., 0]; x.mul_(2); return x",
        "x.mul_(2); x[0] = y[0]; x.add_(1); return x, x[0]",
        "x[:, 1:] = x[:, :-1].clone(); return x",
        "x[0] += 1; x[:, 1] *= y[:, 1]; return x",
        "x[torch.tensor([0, 2])] = y[:2]; return x",
        "x[x > 0] = 0.25; return x",
        "x.index_copy_(0, torch.tensor([1, 0]), y[:2]); return x * z",
        "x.index_copy_(1, torch.tensor([5]), y[:, :1]); return x",
        "x.index_add_(0, torch.tensor([1, 1]), y[:2]); return x * z",
        "x.scatter_(0, torch.zeros(1, 6, dtype=torch.int64), y); return x * z",
        "x.scatter_(1, torch.ones(4, 1, dtype=torch.int64), 0.5); return x",
        "x.scatter_add_(0, torch.zeros(2, 6, dtype=torch.int64), y); return x",
        "x.masked_fill_(y > 0, 0.5); return x + z",
        "x.zero_(); return x + y",
        "before = x.sin(); x[0] = y[0]; return before + x",
        "v = x[0]; x[0] = y[0]; return v, x",
        "t = x * 1; t[0] = y[0]; u = t + 1; t[1] = u[0]; return t",
        "for i in range(4):\n        x[i] = x[i - 1] + y[i]\n    return x",
    ],
)
def test_part_writes(body: str) -> None:
    """Setitem and the index ops change their part in place, in order with reads and writes of the whole."""
    check(body)


# --- views that strides decide


def layouts() -> dict[str, Callable]:
    """The same values in a layout for which `x.t().reshape(16)` is a copy, and in one for which it is a view."""
    return {"copy": squares, "view": lambda: tuple(tensor.t().contiguous().t() for tensor in squares())}


@pytest.mark.parametrize("layout", ["copy", "view"])
def test_maybe_view_is_left(layout: str) -> None:
    """Where strides decide whether an op is a view, and it matters, PyTorch runs the ops on the tensor as they are."""
    make_args = layouts()[layout]
    for body in (
        "r = x.t().reshape(16); x.mul_(2); return r + 1",
        "r = x.t().reshape(16); r.mul_(2); return x",
        "r = x.t().contiguous(); x.mul_(2); r.add_(1); return x, r",
        "r = x.t().flatten(); x[0] = 1.0; return r, x",
    ):
        check(body, make_args)
        fn = program(body)
        left = rewrite(program_of(fn, *make_args(), skip=True)).left
        assert "x" in left, body
    assert not rewrite(program_of(program("r = x.view(16); x.mul_(2); return r"), *make_args(), skip=True)).left


@pytest.mark.parametrize("layout", ["copy", "view"])
def test_maybe_view_of_a_result(layout: str) -> None:
    """With nothing written after it, such an op is made from the final memory: it shares it if it does in eager."""
    for body in (
        "x.mul_(2); return x.t().reshape(16)",
        "x.mul_(2); return x, x.t().reshape(16)",
        "t = x * y; t.add_(1); return t, t.t().reshape(16)",
        "x.mul_(2); return x.t().contiguous()",
    ):
        check(body, layouts()[layout])
        assert not rewrite(program_of(program(body), *layouts()[layout](), skip=True)).left, body


def test_maybe_views_that_nobody_can_tell_apart_are_rewritten() -> None:
    """If neither side is written while the other is looked at, a maybe-view does not stop the rewrite."""
    body = "r = x.t().reshape(24); s = r.sin(); y.mul_(2); return s + y.sum()"
    check(body)
    assert not rewrite(program_of(program(body), *three(), skip=True)).left


# --- every in-place op that Thunder knows

UNARY = (
    "abs acos asin asinh atan atanh ceil cos cosh digamma erf erfc erfinv exp exp2 expm1 floor lgamma log log10 log1p "
    "log2 logical_not neg reciprocal relu round rsqrt sign sin sinh sqrt square tan tanh trunc zero"
)
BINARY = (
    "add atan2 div eq floor_divide fmod ge gt le logical_and logical_or logical_xor lt mul ne nextafter pow remainder "
    "sub true_divide"
)
ACTIVATIONS = "celu elu hardsigmoid hardswish hardtanh leaky_relu mish relu relu6 selu silu"
CALLS = {f"{name}_": f"x.{name}_()" for name in UNARY.split()}
CALLS |= {f"{name}_": f"x.{name}_(y)" for name in BINARY.split()}
CALLS |= {name: f"F.{name}(x, inplace=True)" for name in ACTIVATIONS.split()}
CALLS |= {f"bitwise_{name}_": f"i.bitwise_{name}_(j)" for name in ("and", "or", "xor")}
CALLS |= {
    "acosh_": "x.add_(1).acosh_()",
    "addcdiv_": "x.addcdiv_(y, y + 2, value=0.5)",
    "addcmul_": "x.addcmul_(y, y, value=0.5)",
    "bitwise_not_": "i.bitwise_not_()",
    "clamp_": "x.clamp_(0.2, 0.6)",
    "cumsum_": "x.cumsum_(1)",
    "hardtanh_": "F.hardtanh_(x, 0.2, 0.6)",
    "index_add_": "x.index_add_(0, k, y[:2])",
    "index_copy_": "x.index_copy_(0, k, y[:2])",
    "index_put_": "x.index_put_((k,), y[:2])",
    "lerp_": "x.lerp_(y, 0.25)",
    "masked_fill_": "x.masked_fill_(y > 0.5, 0.25)",
    "polygamma_": "x.polygamma_(1)",
    "relu_": "torch.relu_(x)",
    "rrelu": "F.rrelu(x, training=False, inplace=True)",
    "rrelu_": "F.rrelu_(x)",
    "scatter_": "x.scatter_(0, m, y)",
    "scatter_add_": "x.scatter_add_(0, m, y)",
    "setitem_": "x[1:] = y[1:]",
    "tanhshrink": "F.tanhshrink(x)",
    "threshold": "F.threshold(x, 0.5, 0.25, inplace=True)",
    "threshold_": "F.threshold_(x, 0.5, 0.25)",
    "tril_": "x.tril_()",
    "triu_": "x.triu_(1)",
}
# Without a process group there is nothing to call; random numbers have no eager twin; Thunder refuses this one itself.
ELSEWHERE = {"all_gather_", "all_reduce_", "reduce_scatter_", "exponential_", "dropout"}


def operands() -> tuple[torch.Tensor, ...]:
    """Floats in (0, 1), integers, and indices, for every op of the table."""
    generator = torch.Generator().manual_seed(3)
    x, y = (torch.rand(3, 4, generator=generator) * 0.8 + 0.1 for _ in range(2))
    i = torch.arange(12).reshape(3, 4)
    return x, y, i, i % 5, torch.tensor([2, 0]), torch.randint(0, 3, (3, 4), generator=generator)


def test_the_table_of_in_place_ops_is_complete() -> None:
    """Every in-place op that Thunder knows is tried; one that a release adds shows up here."""
    known = {symbol.name for symbol in ltorch._inplace_to_out_of_place}
    assert set(CALLS) | ELSEWHERE == known
    assert not set(CALLS) & ELSEWHERE


@pytest.mark.parametrize("name", CALLS)
def test_every_in_place_op(name: str) -> None:
    """Each does what it does in eager, to its operand and to what reads it before and after."""
    source = f"def fn(x, y, i, j, k, m):\n    before = x * 2\n    {CALLS[name]}\n    return before, x + y, i + j\n"
    scope: dict[str, Any] = {"F": F, "torch": torch}
    exec(source, scope)
    check(scope["fn"], operands)


def test_random_in_place_ops_write_what_they_return() -> None:
    """A random op changes its operand, and the result of the call is that operand."""

    def fn(x):
        drawn = x.exponential_()
        return drawn, x + 0

    x = torch.zeros(100)
    result, after = jit(fn, Config("rewrite"))(x)
    assert result is x
    assert torch.equal(after, x)
    assert x.min() > 0
    assert x.std() > 0.1


@pytest.mark.parametrize(
    "body", ["x.fill_(2.0)", "x.index_fill_(0, torch.tensor([0]), 1.0)", "x.resize_(3)", "torch.add(x, y, out=x)"]
)
def test_unknown_in_place_ops_are_errors(body: str) -> None:
    """What Thunder cannot trace is an error, not a program with the write left out."""
    x, y, z = three()
    with pytest.raises((AttributeError, TypeError, NotImplementedError)):
        jit(program(f"{body}; return x"), Config("rewrite"))(x, y, z)
    assert torch.equal(x, three()[0])


# --- the whole


def test_rewriting_says_nothing() -> None:
    """Where everything can be expressed nothing is left to PyTorch, so there is no warning."""
    with warnings.catch_warnings():
        warnings.simplefilter("error", HazardWarning)
        for body in ("x.mul_(2); return x @ y.t()", "y = x.sin(); x.mul_(2); z = x @ x.t(); return y.sum() + z"):
            compiled(body)


def test_the_rewritten_trace_is_pure_up_to_its_write_backs() -> None:
    """In the rewritten trace nothing is written but each changed argument, once, at the end."""
    traced = program_of(program("x.sin_(); t = x * y; t.mul_(2); x.add_(t); y.copy_(t); return x @ t.t()"), *three())
    names = [bsym.sym.name for bsym in rewrite(traced).trace.bound_symbols]
    assert names.count("copy_") == 2
    assert names[-3:] == ["copy_", "copy_", "python_return"]
    assert not any(re.fullmatch(r"(?!copy_)\w+[a-z]_", name) for name in names)


def test_barred_buffers_are_left_in_place() -> None:
    """A buffer that must not be rewritten keeps its writes, at their places; the others are rewritten around it."""
    traced = program_of(program("x.sin_(); y.mul_(x); x.add_(y); return x + y"), *three(), skip=True)
    rewritten = rewrite(traced, frozenset({"x"}))
    names = [bsym.sym.name for bsym in rewritten.trace.bound_symbols]
    assert "x" in rewritten.left
    assert "y" not in rewritten.left
    assert [name for name in names if name.endswith("_")] == ["sin_", "add_", "copy_"]


@pytest.mark.parametrize("calls", [2, 3])
def test_later_calls(calls: int) -> None:
    """State carried from call to call is eager's."""
    check("y.copy_(x); x.mul_(0.5).add_(z); return x @ y.t()", calls=calls)


def test_new_shapes_and_dtypes_are_compiled_for_themselves() -> None:
    """A compiled function called with other arguments is right for them too."""
    fn = program("s = x.sum(); x.mul_(2); return x + s")
    jitted = jit(fn, Config("rewrite"))
    for shape, dtype in (((3,), torch.float32), ((2, 5), torch.float32), ((2, 5), torch.float64), ((), torch.float32)):
        x, twin = (torch.ones(shape, dtype=dtype) for _ in range(2))
        assert torch.equal(jitted(x, x.clone(), x.clone()), fn(twin, twin.clone(), twin.clone()))
        assert torch.equal(x, twin)


def test_closures_globals_and_modules() -> None:
    """Buffers and captured tensors are arguments like any other: what is written to them stays."""

    class Counting(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("total", torch.zeros(6))
            self.register_buffer("calls", torch.tensor(0))

        def forward(self, x):
            self.calls.add_(1)
            self.total.mul_(0.5).add_(x.sum(0))
            return x * self.total / self.calls

    eager, traced = Counting(), Counting()
    jitted = jit(traced, Config("rewrite"))
    for x in three():
        assert torch.allclose(jitted(x), eager(x))
    assert torch.allclose(traced.total, eager.total)
    assert traced.calls.item() == 3
