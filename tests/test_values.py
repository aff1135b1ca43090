"""Value numbers: names with one number hold one value, and what stands for what in which state."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
import torch
from thunder.core import devices, dtypes, prims
from thunder.core.proxies import TensorProxy

from guarded_nvfuser.states import Entry, Program, analyse, key_of
from guarded_nvfuser.values import Values
from tests.traces import calls, flat, ops, put


def x4() -> torch.Tensor:
    return torch.ones(4)


def values_of(fn: Callable) -> tuple[Values, list[str]]:
    """The value numbers of a function of two tensors, and the names of its results."""
    program = analyse(flat(fn, x4(), x4()))
    return Values(program), list(program.results)


def numbers(fn: Callable) -> list[int]:
    values, names = values_of(fn)
    return [values.number[name] for name in names]


def reading(values: Values, name: str) -> Entry:
    """The program's return as a reader of a name."""
    program = values.program
    assert name in program.entries[key_of(program.trace.bound_symbols[-1])].sees
    return program.entries[key_of(program.trace.bound_symbols[-1])]


def across(fn: Callable) -> Callable:
    """The same computation of the first argument before a write to it and after."""

    def before_and_after(x: TensorProxy, y: TensorProxy) -> tuple:
        before = fn(x)
        put(y, x)
        return before, fn(x)

    return before_and_after


# --- one number, one value


@pytest.mark.parametrize(
    ("fn", "equal"),
    [
        (lambda x, y: (prims.sin(x), prims.sin(x)), True),
        (lambda x, y: (prims.add(prims.sin(x), y), prims.add(prims.sin(x), y)), True),
        (across(prims.sin), False),
        (across(lambda x: prims.cos(prims.sin(x))), False),
        (lambda x, y: (prims.sin(x), prims.cos(x)), False),
        (lambda x, y: (prims.sin(x), prims.sin(y)), False),
        (lambda x, y: (prims.add(x, y), prims.add(y, x)), False),  # equal, but nobody needs to know
        (lambda x, y: (prims.mul(x, 2.0), prims.mul(x, 3.0)), False),
        (lambda x, y: (prims.mul(x, 2.0), prims.mul(x, 2.0)), True),
        (lambda x, y: prims.var_mean(x, (0,), correction=0), False),
        (lambda x, y: (prims.clone(x), prims.clone(x)), True),
    ],
    ids="same,chain,write between,write before chain,op,operand,order,constant,constants,position,clones".split(","),
)
def test_equal_numbers(fn: Callable, equal: bool) -> None:
    first, second = numbers(fn)
    assert (first == second) == equal


def draw() -> TensorProxy:
    return prims.uniform((4,), 0.0, 1.0, device=devices.cpu, dtype=dtypes.float32)


def test_random_values_are_never_equal() -> None:
    values, names = values_of(lambda x, y: (draw(), draw(), prims.sin(x)))
    assert [name in values.number for name in names] == [False, False, True]


def test_alias_holds_what_its_tensor_holds() -> None:
    values, [alias, sine, of_alias] = values_of(
        lambda x, y: ((new := prims.update_aliases((x,))[0]), prims.sin(x), prims.sin(new))
    )
    assert values.number[alias] == values.number[values.program.arguments[0]]
    assert values.number[sine] == values.number[of_alias]


def cast(x: TensorProxy, *kinds: dtypes.dtype) -> TensorProxy:
    for dtype in kinds:
        x = prims.convert_element_type(x, dtype)
    return x


@pytest.mark.parametrize(
    ("kinds", "equal"),
    [
        ((dtypes.float64, dtypes.float32), True),
        ((dtypes.bfloat16, dtypes.float32), True),  # thunder's remove_redundant_casts takes it so
        ((dtypes.float64, dtypes.bfloat16), False),
        ((dtypes.int32, dtypes.float32), False),
    ],
)
def test_chains_of_float_casts_are_the_last_one(kinds: tuple[dtypes.dtype, ...], equal: bool) -> None:
    def casts(x, y):
        sine = prims.sin(x)
        return sine, cast(sine, *kinds), cast(sine, kinds[-1])

    values, [sine, chain, direct] = values_of(casts)
    assert (values.number[chain] == values.number[sine]) == equal
    floats = all(dtypes.is_float_dtype(dtype) for dtype in kinds)
    assert (values.number[chain] == values.number.get(direct, values.number[sine])) == floats


# --- what stands for what


def test_state_in_which_an_equal_value_is_read() -> None:
    values, [first, second] = values_of(lambda x, y: (prims.sin(x), prims.sin(x)))
    assert values.state_to_read(reading(values, first), first, second) == 0


def test_no_state_makes_another_value_stand_for_it() -> None:
    values, [before, after] = values_of(across(prims.sin))
    assert values.state_to_read(reading(values, after), after, before) is None
    assert values.state_to_read(reading(values, before), before, after) is None


def test_cast_and_back_stands_for_the_tensor_as_it_was_cast() -> None:
    """A pass lets readers of the round trip read the tensor itself: right only before the write."""

    def round_trip(x, y):
        back = cast(x, dtypes.float64, dtypes.float32)
        put(y, x)
        return back, x

    values, [back, x] = values_of(round_trip)
    assert values.state_to_read(reading(values, back), back, x) == 0


def test_updated_tensor_does_not_stand_for_its_old_value() -> None:
    def keep(x, y):
        kept = prims.clone(x)
        new = put(y, x)
        return kept, new

    values, [kept, new] = values_of(keep)
    assert values.state_to_read(reading(values, kept), kept, new) is None


# --- where two computations part


@pytest.mark.parametrize(
    "fn", [prims.sin, lambda x: prims.cos(prims.sin(x)), lambda x: prims.add(prims.sin(x), prims.exp(prims.sin(x)))]
)
def test_difference_is_the_read_across_the_write(fn: Callable) -> None:
    values, [before, after] = values_of(across(fn))
    bsym, name, must, seen = values.difference(reading(values, before), before, after)
    assert (bsym.sym.name, name, must, seen) == ("sin", values.program.arguments[0], 0, 1)
    sines = ops(values.program.trace, "sin")
    assert any(bsym is sine for sine in sines[: len(sines) // 2])  # the program's own read, before the write


@pytest.mark.parametrize(
    "fn", [lambda x, y: (prims.sin(x), prims.cos(y)), lambda x, y: (prims.sin(x), prims.add(x, y))]
)
def test_computations_that_part_otherwise_have_no_difference(fn: Callable) -> None:
    values, [first, second] = values_of(fn)
    assert values.difference(reading(values, first), first, second) is None


# --- both claims, on random programs


class RandomProgram:
    """A random straight-line program over two tensors, evaluated by PyTorch while Thunder traces it."""

    UNARY = ((prims.sin, torch.sin), (prims.neg, torch.neg), (prims.clone, torch.clone))
    BINARY = ((prims.add, torch.add), (prims.mul, torch.mul))

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.memory: dict[str, torch.Tensor] = {}  # the real tensor of each name; names of one tensor have one
        self.history: dict[str, dict[int, torch.Tensor]] = {}  # what its memory held, by state of its buffer
        self.trace = flat(self.steps, x4(), x4())
        self.program = analyse(self.trace)

    def steps(self, x: TensorProxy, y: TensorProxy) -> list[TensorProxy]:
        names, states = [x, y], {}
        for index, proxy in enumerate(names):
            value = torch.randn(4, generator=torch.Generator().manual_seed(index), dtype=torch.float64)
            self.memory[proxy.name], self.history[proxy.name] = value, {0: value.clone()}
        for _ in range(14):
            a, b = self.random.choice(names), self.random.choice(names)
            kind = self.random.choice(["unary", "unary", "binary", "binary", "write"])
            if kind == "write" and a is not b:
                names.append(self.write(a, b, states))
                continue
            prim, op = self.random.choice(self.UNARY if kind == "unary" else self.BINARY)
            operands = (a,) if kind == "unary" else (a, b)
            out = prim(*operands)
            value = op(*(self.memory[operand.name] for operand in operands))
            self.memory[out.name], self.history[out.name] = value, {0: value.clone()}
            names.append(out)
        return names

    def write(self, source: TensorProxy, target: TensorProxy, states: dict[int, int]) -> TensorProxy:
        memory = self.memory[target.name]
        out = put(source, target)
        memory.copy_(self.memory[source.name])
        states[id(memory)] = state = states.get(id(memory), 0) + 1
        self.memory[out.name], self.history[out.name] = memory, self.history[target.name]
        self.history[target.name][state] = memory.clone()
        return out

    def content(self, name: str, state: int) -> torch.Tensor:
        return self.history[name][state]


@pytest.mark.parametrize("seed", range(25))
def test_equal_numbers_hold_equal_values(seed: int) -> None:
    ran = RandomProgram(seed)
    program, values = ran.program, Values(ran.program)
    first: dict[int, str] = {}
    for name, number in values.number.items():
        other = first.setdefault(number, name)
        mine, theirs = (ran.content(each, program.bound[each]) for each in (name, other))
        assert torch.equal(mine, theirs), (name, other)
    assert len(first) > 2


@pytest.mark.parametrize("seed", range(25))
def test_what_stands_for_a_name_holds_its_value(seed: int) -> None:
    ran = RandomProgram(seed)
    values = Values(ran.program)
    for entry in ran.program.entries.values():
        for meant in entry.args:
            for found in ran.history:
                state = values.state_to_read(entry, meant, found)
                if state is not None:
                    assert torch.equal(ran.content(found, state), ran.content(meant, entry.sees[meant])), (meant, found)


def test_random_programs_hold_equal_values_at_all() -> None:
    """The two tests above say something: some names do stand for others, and some programs write."""
    stand, written = 0, 0
    for seed in range(25):
        ran = RandomProgram(seed)
        values = Values(ran.program)
        stand += len(values.number) - len(set(values.number.values()))
        written += len(ran.program.writes)
    assert stand > 10
    assert written > 10


def test_time_is_linear() -> None:
    def repeat(times: int) -> Program:
        def steps(x, y):
            for _ in range(times):
                x = put(prims.mul(prims.sin(x), y), x)
            return x

        return analyse(flat(steps, x4(), x4()))

    few, many = repeat(100), repeat(800)
    assert calls(Values, many) < 8 * 1.3 * calls(Values, few)
