"""Random programs that mutate tensors: short Python functions, legal in eager by construction.

A program is grown statement by statement; each statement is tried on sample tensors and kept if eager accepts it. The
source of choices is an interface of two methods, so that a seed and Hypothesis can both drive it.
"""

from __future__ import annotations

import itertools
import linecache
import random
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from thunder.core import prims
from thunder.core.trace import get_tracectx


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
    """What programs may contain."""

    views: bool = True
    grad: bool = False
    raw_copies: bool = True
    layouts: bool = False  # arguments with strides of their own
    statements: tuple[int, int] = (3, 9)


@dataclass(frozen=True)
class Program:
    """A generated program: its source, the function, and a maker of fresh arguments."""

    source: str
    fn: Callable
    make_args: Callable
    backward: bool
    counts: dict[str, int]


def put(source: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """Thunder's raw copy primitive when traced, `Tensor.copy_` in eager."""
    if get_tracectx() is None and isinstance(target, torch.Tensor):
        return target.copy_(source)
    return prims.copy_(source, target, grad_enabled=False)


UNARY = (
    "sin()",
    "cos()",
    "tanh()",
    "abs()",
    "neg()",
    "sigmoid()",
    "relu()",
    "clone()",
    "mul(0.5)",
    "add(1.0)",
    "mul(1.0)",
)
BINARY = ("{a} + {b}", "{a} - {b}", "{a} * {b}", "torch.maximum({a}, {b})", "torch.where({a} > 0, {a}, {b})")
REDUCTIONS = ("sum({d})", "mean({d})", "amax({d})", "sum({d}, keepdim=True)", "mean({d}, keepdim=True)")
VIEWS = (
    "t()",
    "transpose(0, -1)",
    "unsqueeze(0)",
    "squeeze()",
    "reshape(-1)",
    "view(-1)",
    "flatten()",
    "expand(2, *{a}.shape)",
    "contiguous()",
    "diagonal()",
    "chunk(2)[0]",
    "unbind(0)[0]",
    "select(-1, 0)",
    "movedim(0, -1)",
)
SLICES = ("[0]", "[1:]", "[:2]", "[::2]", "[:, 1:]", "[:, 0]", "[..., :2]", "[-1]", "[:, ::2]")
IN_PLACE = (
    "sin_()",
    "tanh_()",
    "mul_(0.5)",
    "add_(1.0)",
    "abs_()",
    "zero_()",
    "clamp_(-0.5, 0.5)",
    "relu_()",
    "neg_()",
)
IN_PLACE_BINARY = ("add_({b})", "mul_({b})", "sub_({b})", "copy_({b})", "lerp_({b}, 0.25)", "add_({b}, alpha=0.5)")
CASTS = ("double()", "float()", "to(torch.bfloat16)")


class _Grower:
    """One program under construction."""

    def __init__(self, choices: Choices, features: Features) -> None:
        self.choices, self.features = choices, features
        self.lines: list[str] = []
        self.names: list[str] = []
        self.scope: dict[str, Any] = {"torch": torch, "put": put}
        self.counts: dict[str, int] = {}

    def value(self) -> str:
        return self.choices.pick(self.names[-4:] + self.names)

    def like(self, name: str) -> str:
        shape = self.scope[name].shape
        same = [other for other in self.names if self.scope[other].shape == shape]
        return self.choices.pick(same or [name])

    def apart(self, target: str, value: str) -> str:
        """A value that shares no memory with a target: eager does not say what a copy between overlapping tensors
        does.
        """
        source = self.scope.get(value.split("[")[0])
        if not isinstance(source, torch.Tensor) or value == target:
            return value
        same = source.untyped_storage().data_ptr() == self.scope[target].untyped_storage().data_ptr()
        return f"{value}.clone()" if same else value

    def attempt(self, kind: str, line: str, name: str | None = None) -> None:
        """Keep a statement if eager accepts it and its results stay small."""
        snapshot = {n: t.detach().clone() for n, t in self.scope.items() if isinstance(t, torch.Tensor)}
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                exec(line, self.scope)
            fine = name is None or (isinstance(self.scope[name], torch.Tensor) and 0 < self.scope[name].numel() <= 512)
            fine = fine and all(bool(torch.isfinite(self.scope[n].detach().double()).all()) for n in self.names)
        except (RuntimeError, IndexError, ValueError, TypeError):
            fine = False
        if not fine:
            self.undo(snapshot, name)
            return
        self.lines.append(line)
        self.counts[kind] = self.counts.get(kind, 0) + 1
        if name is not None:
            self.names.append(name)

    def undo(self, snapshot: dict[str, torch.Tensor], name: str | None) -> None:
        if name is not None and name not in self.names:
            self.scope.pop(name, None)
        with torch.no_grad():
            for each, value in snapshot.items():
                try:
                    self.scope[each].copy_(value)
                except RuntimeError:
                    continue

    def statement(self, index: int) -> None:
        name, a = f"t{index}", self.value()
        kinds = [
            "unary",
            "binary",
            "binary",
            "reduce",
            "matmul",
            "cast",
            "join",
            "write",
            "write",
            "write",
            "write_from",
        ]
        kinds += ["view", "view", "slice", "write_slice", "index"] if self.features.views else []
        kinds += ["copy", "copy"]
        kinds += ["raw"] if self.features.raw_copies else []
        kind = self.choices.pick(kinds)
        b, pick = self.like(a), self.choices.pick
        match kind:
            case "unary":
                self.attempt(kind, f"{name} = {a}.{pick(UNARY)}", name)
            case "binary":
                self.attempt(kind, f"{name} = {pick(BINARY).format(a=a, b=pick([b, self.value()]))}", name)
            case "reduce":
                dim = self.choices.number(0, max(self.scope[a].ndim - 1, 0))
                self.attempt(kind, f"{name} = {a}.{pick(REDUCTIONS).format(d=dim)}", name)
            case "matmul":
                self.attempt(kind, f"{name} = {a} @ {self.value()}", name)
            case "cast":
                self.attempt(kind, f"{name} = {a}.{pick(CASTS)}", name)
            case "join":
                self.attempt(kind, f"{name} = torch.cat([{a}, {b}], 0)", name)
            case "write":
                self.attempt(kind, f"{a}.{pick(IN_PLACE)}")
            case "write_from":
                self.attempt(kind, f"{a}.{pick(IN_PLACE_BINARY).format(b=self.apart(a, pick([b, self.value()])))}")
            case "copy":
                self.attempt(kind, f"{a}.copy_({self.apart(a, b)})")
            case "view":
                self.attempt(kind, f"{name} = {a}.{pick(VIEWS).format(a=a)}", name)
            case "slice":
                self.attempt(kind, f"{name} = {a}{pick(SLICES)}", name)
            case "write_slice":
                where = pick(SLICES)
                value = pick([self.value(), "0.25", f"{b}{where}"])
                self.attempt(kind, f"{a}{where} = {self.apart(a, value)}")
            case "index":
                index_line = f"{a}.index_copy_(0, torch.tensor([0]), {b}[1:2])"
                self.attempt(kind, pick([index_line, f"{a}.masked_fill_({b} > 0.3, 0.125)", f"{a}[{b} > 2.0] = 0.5"]))
            case "raw":
                if self.scope[a].shape == self.scope[b].shape and self.scope[a].dtype == self.scope[b].dtype:
                    self.attempt(kind, f"{name} = put({b} * 1.5, {a})", name)


_numbers = itertools.count()
SHAPES = ((4, 6), (4, 4), (6,), (2, 3, 4), (4, 1), (1, 6), ())


def _make_inputs(choices: Choices, features: Features) -> list[tuple[tuple[int, ...], torch.dtype, str, bool]]:
    count, base = choices.number(1, 3), choices.pick(SHAPES[:4])
    specs = []
    for _ in range(count):
        shape = choices.pick([base, base, base, choices.pick(SHAPES)])
        dtype = choices.pick([torch.float32] * 5 + [torch.float64, torch.bfloat16])
        layout = choices.pick(["dense", "dense", "permuted", "gaps", "offset"]) if features.layouts else "dense"
        specs.append((shape, dtype, layout, features.grad and choices.number(0, 2) == 0))
    return specs


def _tensor(spec: tuple, seed: int) -> torch.Tensor:
    shape, dtype, layout, grad = spec
    values = torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)
    if layout == "permuted" and len(shape) > 1:
        values = (
            values.t().contiguous().t() if len(shape) == 2 else values.transpose(0, -1).contiguous().transpose(0, -1)
        )
    elif layout == "gaps" and shape:
        wide = torch.zeros(*shape[:-1], shape[-1] * 2, dtype=dtype)
        wide[..., : shape[-1]] = values
        values = wide[..., : shape[-1]]
    elif layout == "offset" and shape:
        flat = torch.zeros(values.numel() + 1, dtype=dtype)
        flat[1:] = values.reshape(-1)
        values = flat[1:].view(shape)
    return values.requires_grad_() if grad else values


def generate(choices: Choices, features: Features = Features()) -> Program:
    """Grow one program.

    Args:
        choices: where decisions come from.
        features: what the program may contain.

    Returns:
        A program that eager runs without an error.
    """
    grower = _Grower(choices, features)
    specs = _make_inputs(choices, features)
    params = [f"x{index}" for index in range(len(specs))]
    grower.scope.update((name, _tensor(spec, index)) for index, (name, spec) in enumerate(zip(params, specs)))
    grower.names = list(params)
    for index in range(choices.number(*features.statements)):
        grower.statement(index)
    results = [choices.pick(grower.names) for _ in range(choices.number(1, 3))]
    lines = [f"def program({', '.join(params)}):", *(f"    {line}" for line in grower.lines)]
    source = "\n".join([*lines, f"    return {', '.join(results)},"]) + "\n"
    fn = compile_source(source)
    return Program(
        source,
        fn,
        lambda: tuple(_tensor(spec, index) for index, spec in enumerate(specs)),
        features.grad and any(spec[3] for spec in specs),
        grower.counts,
    )


def compile_source(source: str) -> Callable:
    """The function `program` of a source text, with its lines where tracebacks and hazards look for them."""
    file = f"<generated {next(_numbers)}>"
    linecache.cache[file] = (len(source), None, source.splitlines(keepends=True), file)
    scope: dict[str, Any] = {"torch": torch, "put": put}
    exec(compile(source, file, "exec"), scope)
    return scope["program"]
