"""Random programs that mutate tensors: Python functions `make` and `program`, legal in eager by construction.

A program is grown line by line; a line is kept if eager runs the program with it. Its arguments are lines too: their
dtypes, strides and sharing of memory can be read. Where choices come from is an interface of two methods, so that a
seed and Hypothesis can both drive it.
"""

from __future__ import annotations

import itertools
import linecache
import random
import string
import textwrap
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Protocol

import torch
from thunder.core import prims
from thunder.core.trace import get_tracectx

# What eager raises for a line that makes no sense.
REFUSALS = (RuntimeError, IndexError, ValueError, TypeError, NameError)
_LARGEST, _MOST = 1e4, 512


class Choices(Protocol):
    """Where a generator's decisions come from."""

    def pick(self, options: Sequence) -> Any:
        """One of some options."""

    def number(self, low: int, high: int) -> int:
        """An integer between two bounds, both included."""


class Seeded:
    """Choices from a seed."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)

    def pick(self, options: Sequence) -> Any:
        return self._random.choice(list(options))

    def number(self, low: int, high: int) -> int:
        return self._random.randint(low, high)


@dataclass(frozen=True)
class Features:
    """What programs may contain.

    Attributes:
        views: views, slices and writes through them; `indices`: ops and writes at indices and under masks.
        grad: arguments that require grad, and a backward pass; `raw_copies`: the primitive `prims.copy_`.
        dtypes: other dtypes than float32; `layouts`: arguments with strides of their own.
        sharing: arguments that share memory; `calls`: how often a program may be called in a row.
        statements: how many lines, from and to.
    """

    views: bool = True
    indices: bool = False
    grad: bool = False
    raw_copies: bool = True
    dtypes: bool = False
    layouts: bool = False
    sharing: bool = False
    calls: int = 1
    statements: tuple[int, int] = (3, 12)


ALL = Features(indices=True, grad=True, dtypes=True, layouts=True, sharing=True, calls=3)


@dataclass(frozen=True)
class Program:
    """A program as lines of Python.

    Attributes:
        inputs: lines that make the arguments `params`.
        body: lines of the function; `results`: names that it returns.
        calls: how often it is called in a row on the same tensors; `backward`: whether each call is followed by one.
    """

    params: tuple[str, ...]
    inputs: tuple[str, ...]
    body: tuple[str, ...]
    results: tuple[str, ...]
    calls: int = 1
    backward: bool = False

    @property
    def source(self) -> str:
        """The program as a person reads it, and as Python compiles it."""
        steps = f"# calls: {self.calls}" + (", each with a backward pass\n" if self.backward else "\n")
        params = ", ".join(self.params)
        made = _function("make", "", self.inputs, f"return {params},")
        return steps + made + _function("program", params, self.body, f"return {', '.join(self.results)},")

    def __str__(self) -> str:
        return self.source

    @cached_property
    def fn(self) -> Callable:
        """The program."""
        return self.functions()[1]

    @cached_property
    def make_args(self) -> Callable[[], tuple]:
        """The maker of fresh arguments."""
        return self.functions()[0]

    def functions(self, source: str | None = None) -> tuple[Callable, Callable]:
        """The maker of fresh arguments, and the program."""
        scope = run_source(self.source if source is None else source)
        return scope["make"], scope["program"]

    def widened(self) -> str | None:
        """The source in float64 throughout, to measure rounding; None for a program that has float64 throughout."""
        wide = self.source
        for name in ("float32", "bfloat16", "float16"):
            wide = wide.replace(f"torch.{name}", "torch.float64")
        wide = wide.replace(".float()", ".double()").replace(".half()", ".double()")
        return None if wide == self.source else wide


def parse(source: str) -> Program:
    """The program of a source text that `Program.source` printed.

    Args:
        source: the text; comments but the first are dropped.
    """
    first, *lines = textwrap.dedent(source).strip().splitlines()
    start = lines.index(next(line for line in lines if line.startswith("def program(")))
    made, body = [[line.strip() for line in part if line.startswith(" ")] for part in (lines[:start], lines[start:])]
    names = [tuple(part[-1].removeprefix("return ").replace(" ", "").strip(",").split(",")) for part in (made, body)]
    calls = int(first.removeprefix("# calls: ").split(",")[0])
    return Program(names[0], tuple(made[:-1]), tuple(body[:-1]), names[1], calls, "backward" in first)


def _function(name: str, params: str, lines: Sequence[str], last: str) -> str:
    return f"def {name}({params}):\n" + "".join(f"    {line}\n" for line in (*lines, last))


# --- what the printed programs call


def values(shape: tuple[int, ...], dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    """Distinct small numbers that float32 holds exactly, none of them 0: so that most arithmetic is exact."""
    generator = torch.Generator().manual_seed(seed)
    if dtype is torch.bool:
        return torch.rand(shape, generator=generator) > 0.5
    if not dtype.is_floating_point:
        return torch.randint(-3, 4, shape, generator=generator).to(dtype)
    return ((torch.randint(-128, 128, shape, generator=generator).double() + 0.5) / 64).to(dtype)


def put(source: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """Thunder's raw copy primitive when traced, `Tensor.copy_` in eager."""
    if get_tracectx() is None and isinstance(target, torch.Tensor):
        return target.copy_(source)
    return prims.copy_(source, target, grad_enabled=False)


# --- lines

UNARY = ("neg()", "abs()", "clone()", "mul(0.5)", "add(1.0)", "relu()", "mul(1.0)", "sign()", "square()", "add(0)")
SMOOTH = ("sin()", "cos()", "tanh()", "sigmoid()", "exp()", "erf()", "softmax(-1)")
BINARY = ("{a} + {b}", "{a} - {b}", "{a} * {b}", "torch.maximum({a}, {b})", "torch.add({a}, {b}, alpha=0.5)")
IN_PLACE = ("mul_(0.5)", "add_(1.0)", "neg_()", "abs_()", "zero_()", "clamp_(-0.5, 0.5)", "relu_()")
SMOOTH_IN_PLACE = ("sin_()", "tanh_()", "cos_()", "exp_()")
VIEWS = (
    "t()",
    "transpose(0, -1)",
    "reshape(-1)",
    "view(-1)",
    "flatten()",
    "unsqueeze(0)",
    "squeeze()",
    "expand(2, *{a}.shape)",
    "contiguous()",
    "chunk(2)[0]",
    "chunk(2, -1)[1]",
    "split(1)[0]",
    "unbind(0)[0]",
    "select(-1, 0)",
    "narrow(0, 0, 1)",
    "movedim(0, -1)",
    "permute(*range({a}.ndim)[::-1])",
    "diagonal()",
    "view_as({b})",
    "expand_as({b})",
    "reshape({b}.shape)",
    "detach()",
    "real",
    "mT",
    "type_as({a})",
    "float()",
)
SLICES = ("[0]", "[1:]", "[:2]", "[::2]", "[:, 1:]", "[:, 0]", "[..., :2]", "[-1]", "[:, ::2]", "[None]", "[1:, :2]")

# Per kind: how often it is chosen, and its lines. {n}: a new name; {a}: any value; {b}: a value, mostly of its shape;
# {d}: a dimension of it; {t}: what is written, a value or a part of it; {v}: what is written there.
KINDS: dict[str, tuple[int, tuple[str, ...]]] = {
    "unary": (3, tuple(f"{{n}} = {{a}}.{op}" for op in UNARY)),
    "smooth": (1, tuple(f"{{n}} = {{a}}.{op}" for op in SMOOTH)),
    "binary": (3, tuple(f"{{n}} = {op}" for op in BINARY)),
    "where": (1, ("{n} = torch.where({a} > 0, {a}, {b})", "{n} = torch.where({a} > {b}, {b}, 0.0)")),
    "reduce": (
        1,
        tuple(f"{{n}} = {{a}}.{op}({{d}}{keep})" for op in ("sum", "amax", "mean") for keep in ("", ", True")),
    ),
    "matmul": (1, ("{n} = {a} @ {b}", "{n} = {a} @ {b}.t()", "{n} = torch.nn.functional.linear({a}, {b})")),
    "cast": (
        1,
        tuple(f"{{n}} = {{a}}.{op}" for op in ("double()", "float()", "to(torch.bfloat16)", "half()", "long()")),
    ),
    "join": (1, ("{n} = torch.cat([{a}, {b}], 0)", "{n} = torch.stack([{a}, {b}])", "{n} = torch.cat([{a}, {b}], -1)")),
    "new": (
        1,
        (
            "{n} = torch.zeros_like({a})",
            "{n} = torch.ones({a}.shape, dtype=torch.float32)",
            "{n} = torch.full_like({a}, 0.5)",
        ),
    ),
    "write": (5, tuple(f"{{t}}.{op}" for op in IN_PLACE)),
    "smooth write": (1, tuple(f"{{t}}.{op}" for op in SMOOTH_IN_PLACE)),
    "write from": (
        6,
        tuple(
            f"{{t}}.{op}"
            for op in (
                "add_({v})",
                "mul_({v})",
                "sub_({v})",
                "lerp_({v}, 0.25)",
                "add_({v}, alpha=0.5)",
                "addcmul_({v}, {a}, value=2)",
                "masked_fill_({b} > 0.25, 0.125)",
            )
        )
        + ("{t} += {v}", "{t} *= {v}"),
    ),
    "use write": (2, ("{n} = {t}.add_({v})", "{n} = {t}.mul_(0.5)", "{n} = {t}.copy_({v})", "{n} = {t}.t().neg_()")),
    "copy": (5, ("{t}.copy_({v})", "{t}.copy_({v} * 2)", "{t}.copy_({v}.clone())")),
    "no grad": (1, ("with torch.no_grad(): {t}.mul_(0.5)", "with torch.no_grad(): {t}.copy_({v})")),
    "raw": (3, ("{n} = put({v}, {t})", "{n} = put({v} * 1.5, {t})", "put({v} + {t}, {t})")),
    "view": (3, tuple(f"{{n}} = {{a}}.{op}" for op in VIEWS)),
    "slice": (2, tuple(f"{{n}} = {{a}}{op}" for op in SLICES)),
    "write view": (2, tuple(f"{{a}}.{view}.{op}" for view in VIEWS for op in ("mul_(0.5)", "add_({v})", "copy_({v})"))),
    "write slice": (3, tuple(f"{{a}}{op} = {value}" for op in SLICES for value in ("0.25", "{v}"))),
    "index": (
        1,
        (
            "{n} = {a}.index_select(0, torch.tensor([1, 0]))",
            "{n} = {a}[torch.tensor([0, 1])]",
            "{n} = {a}.flip(0)",
            "{n} = {a}.cumsum({d})",
            "{n} = torch.gather({a}, 0, torch.zeros({a}.shape, dtype=torch.int64))",
            "{n} = torch.tril({a})",
        ),
    ),
    "write index": (
        2,
        (
            "{t}.index_copy_(0, torch.tensor([1, 0]), {v}[:2])",
            "{t}.index_add_(0, torch.tensor([1, 0]), {v}[:2])",
            "{t}.scatter_(0, torch.zeros({b}.shape, dtype=torch.int64)[:1], {v}[:1])",
            "{t}.scatter_add_(0, torch.zeros({b}.shape, dtype=torch.int64)[:1], {v}[:1])",
            "{t}.index_put_((torch.tensor([0]),), {v}[:1])",
            "{t}[torch.tensor([1, 0])] = {v}[:2]",
            "{t}[{b} > 1.0] = 0.5",
        ),
    ),
}
WRITING = ("write", "write from", "copy")
_NEEDS = {
    "views": ("view", "slice", "write view", "write slice"),
    "indices": ("index", "write index"),
    "raw_copies": ("raw",),
}


def _weighted(features: Features) -> list[str]:
    absent = {kind for name, kinds in _NEEDS.items() if not getattr(features, name) for kind in kinds}
    return [kind for kind, (weight, _) in KINDS.items() if kind not in absent for _ in range(weight)]


class _Grower:
    """One program under construction."""

    def __init__(self, choices: Choices, features: Features) -> None:
        self.choices, self.features, self.kinds = choices, features, _weighted(features)
        self.inputs, self.params = make_inputs(choices, features)
        self.body: list[str] = []
        self.writes = 0
        self.scope = execute((*self.inputs,)) or {}
        self.names = list(self.params)

    def grow(self) -> None:
        """Some lines, of which at least one writes if eager allows it; eager may refuse the first tries."""
        count = self.choices.number(*self.features.statements)
        for index in range(count):
            any(self.attempt(index, self.kinds) for _ in range(3))
        if self.writes == 0:
            any(self.attempt(count, WRITING) for _ in range(5))

    def attempt(self, index: int, kinds: Sequence[str]) -> bool:
        kind = self.choices.pick(kinds)
        template = self.choices.pick(KINDS[kind][1])
        line, name = self.filled(template, f"t{index}")
        scope = execute((*self.inputs, *self.body, line))
        names = [*self.names, name] if name is not None else self.names
        if scope is None or not all(_small(scope.get(each)) for each in names):
            return False
        self.body.append(line)
        self.writes += "write" in kind or kind in ("copy", "raw", "no grad")
        self.names, self.scope = names, scope
        return True

    def filled(self, template: str, name: str) -> tuple[str, str | None]:
        """A line with its places filled, and the name that it makes."""
        fields = {field for _, field, _, _ in string.Formatter().parse(template) if field}
        made: dict[str, str] = {"n": name, "a": self.value()}
        made["t"] = made["a"] + (
            self.choices.pick(("", "", "", *SLICES)) if self.features.views and "t" in fields else ""
        )
        target = made["t"] if "t" in fields else made["a"]
        made["b"] = self.like(target)
        made["d"] = str(self.choices.number(0, max(self.scope[made["a"]].ndim - 1, 0))) if "d" in fields else ""
        if "v" in fields:  # Thunder copies between equal shapes only
            strict = "copy_" in template or "put" in template or " = {v}" in template
            made["v"] = self.apart(target, self.like(target, strict and self.choices.number(0, 9) < 9))
        for _ in range(2):  # views have places of their own
            template = template.replace("{b}", made["b"]).replace("{a}", made["a"])
        return template.format(**made), name if "n" in fields else None

    def value(self) -> str:
        return self.choices.pick(self.names + self.names[-3:])

    def like(self, target: str, strict: bool = False) -> str:
        """A value that is mostly of a target's shape, or always if there is one."""
        shape = getattr(_evaluated(target, self.scope), "shape", None)
        same = [name for name in self.names if self.scope[name].shape == shape]
        return self.choices.pick(same if strict and same else same * 3 + self.names)

    def apart(self, target: str, source: str) -> str:
        """A value that overlaps with no target but is it: else eager does not say what a write does."""
        target_value, value = _evaluated(target, self.scope), self.scope[source]
        if not isinstance(target_value, torch.Tensor) or same_tensor(target_value, value):
            return source
        return f"{source}.clone()" if value.untyped_storage().data_ptr() == _storage(target_value) else source

    def program(self) -> Program:
        results = tuple(self.value() for _ in range(self.choices.number(1, 3)))
        grad = any("requires_grad_" in line for line in self.inputs)
        tracked = [name for name in self.names[::-1] if self.scope[name].requires_grad]
        if tracked and not set(tracked) & set(results):
            results = (*results, self.choices.pick(tracked))
        calls = self.choices.pick([1, 1, *range(1, self.features.calls + 1)])
        return Program(tuple(self.params), tuple(self.inputs), tuple(self.body), results, calls, grad)


def _evaluated(text: str, scope: dict[str, Any]) -> Any:
    try:
        return eval(text, dict(scope))
    except REFUSALS:
        return None


def _storage(value: torch.Tensor) -> int:
    return value.untyped_storage().data_ptr()


def same_tensor(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether two tensors are one memory in one layout."""
    return (a.data_ptr(), a.shape, a.stride(), a.dtype) == (b.data_ptr(), b.shape, b.stride(), b.dtype)


def _small(value: Any) -> bool:
    if not isinstance(value, torch.Tensor) or not 0 < value.numel() <= _MOST:
        return False
    return bool((value.detach().double().abs() <= _LARGEST).all())


def _scope() -> dict[str, Any]:
    return {"torch": torch, "put": put, "values": values}


def execute(lines: Sequence[str]) -> dict[str, Any] | None:
    """The names that lines make in eager; None if eager refuses one."""
    scope = _scope()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            exec("\n".join(lines), scope)
    except (*REFUSALS, SyntaxError):
        return None
    return scope


# --- arguments

SHAPES = ((4, 6), (4, 4), (6,), (2, 3, 4))
OTHER_SHAPES = ((), (4, 1), (1, 6), (1,), (2, 2, 2, 2))
DTYPES = (torch.float64, torch.bfloat16, torch.float16, torch.int64, torch.int32, torch.bool)
SHARED = (
    "{x}",
    "{x}[1:]",
    "{x}[:2]",
    "{x}.t()",
    "{x}.view(-1)",
    "{x}.detach()",
    "{x}[:, ::2]",
    "{x}.reshape(-1)[1:-1]",
    "{x}[-1]",
    "{x}.flip(0)",
)


def make_inputs(choices: Choices, features: Features) -> tuple[list[str], list[str]]:
    """Lines that make arguments, and their names."""
    lines, params, base = [], [], choices.pick(SHAPES)
    for index in range(choices.number(1, 3)):
        name = f"x{index}"
        shared = _shared(choices, name, params) if features.sharing and params and choices.number(0, 5) == 5 else None
        if shared is not None and execute([*lines, shared]) is not None:
            lines.append(shared)
        elif features.sharing and choices.number(0, 11) == 11:
            lines += _halves(base, index)
            params.append(f"{name}a")
            name = f"{name}b"
        else:
            lines.append(_own(choices, features, name, base, index))
        params.append(name)
    return lines, params


def _shared(choices: Choices, name: str, params: Sequence[str]) -> str:
    return f"{name} = {choices.pick(SHARED).format(x=choices.pick(params))}"


def _halves(shape: tuple[int, ...], seed: int) -> list[str]:
    """Two arguments that are halves of one memory."""
    name = f"x{seed}"
    return [f"m{seed} = values((2, *{shape}), torch.float32, {seed})", f"{name}a, {name}b = m{seed}[0], m{seed}[1]"]


def _own(choices: Choices, features: Features, name: str, base: tuple[int, ...], seed: int) -> str:
    shape = choices.pick([base, base, base, base, choices.pick(OTHER_SHAPES)])
    dtype = choices.pick([torch.float32] * 16 + list(DTYPES)) if features.dtypes else torch.float32
    layout = choices.pick(["", "", "", "permuted", "gaps", "offset", "steps"]) if features.layouts else ""
    made = _laid_out(shape, dtype, seed, layout if shape else "")
    grad = features.grad and dtype.is_floating_point and choices.number(0, 2) == 2
    return f"{name} = {made}{'.requires_grad_()' if grad else ''}"


def _laid_out(shape: tuple[int, ...], dtype: torch.dtype, seed: int, layout: str) -> str:
    match layout:
        case "permuted":
            return f"values({shape[::-1]}, {dtype}, {seed}).permute(*range({len(shape)})[::-1])"
        case "gaps":
            return f"values({(*shape[:-1], shape[-1] + 2)}, {dtype}, {seed})[..., :{shape[-1]}]"
        case "steps":
            return f"values({(*shape[:-1], shape[-1] * 2)}, {dtype}, {seed})[..., ::2]"
        case "offset":
            return f"values(({_count(shape) + 1},), {dtype}, {seed})[1:].view({shape})"
    return f"values({shape}, {dtype}, {seed})"


def _count(shape: tuple[int, ...]) -> int:
    return torch.Size(shape).numel()


# --- whole programs


def generate(choices: Choices, features: Features = ALL) -> Program:
    """Grow one program.

    Args:
        choices: where decisions come from.
        features: what the program may contain.

    Returns:
        A program that eager runs without an error as often as it says.
    """
    grower = _Grower(choices, features)
    grower.grow()
    return legal(grower.program())


def legal(program: Program) -> Program:
    """The program with as many calls, and a backward pass, as eager accepts."""
    for calls in dict.fromkeys((program.calls, 1)):
        for backward in dict.fromkeys((program.backward, False)):
            tried = replace(program, calls=calls, backward=backward)
            if accepted(tried):
                return tried
    raise AssertionError(f"eager refuses what it accepted line by line:\n{program}")


def accepted(program: Program) -> bool:
    """Whether eager runs a program, and its values stay small."""
    try:
        make, fn = program.functions()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            args = make()
            results = [step(fn, args, program.backward) for _ in range(program.calls)]
    except (*REFUSALS, SyntaxError):
        return False
    return all(_small(value) for value in (*args, *itertools.chain(*results)))


def step(fn: Callable, args: Sequence[torch.Tensor], backward: bool, tracked: Sequence[bool] | None = None) -> tuple:
    """One call, followed by the backward pass of a weighted sum of its results.

    Args:
        fn: the program, or what it was compiled to.
        args: its arguments.
        backward: whether there is a backward pass.
        tracked: which results take part; by default those that require grad.

    Raises:
        RuntimeError: a result that should require grad does not, or no result does.
    """
    results = tuple(fn(*args))
    if backward:
        asked = [result.requires_grad for result in results] if tracked is None else tracked
        if not any(asked):
            raise RuntimeError("no result requires grad")
        sum((r.double() * (i + 1)).sum() for i, r in enumerate(results) if asked[i]).backward()
    return results


_numbers = itertools.count()


def run_source(source: str) -> dict[str, Any]:
    """The names that a source text defines, with its lines where tracebacks and hazards look for them."""
    file = f"<generated {next(_numbers)}>"
    linecache.cache[file] = (len(source), None, source.splitlines(keepends=True), file)
    scope = _scope()
    exec(compile(source, file, "exec"), scope)
    return scope


def compile_source(source: str) -> Callable:
    """The function `program` of a source text."""
    return run_source(source)["program"]
