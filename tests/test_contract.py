"""nvFuser's in-place contract: for every claim a region that breaks it and a twin that keeps it."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
from thunder.core import dtypes, prims
from thunder.core.proxies import TensorProxy
from torch._subclasses.fake_tensor import FakeTensorMode

from guarded_nvfuser.contract import ALL_RULES, Body, Looser, Rule, Rules, is_elementwise, one_shape
from guarded_nvfuser.interpreter import eager, scheduled
from guarded_nvfuser.options import Schedule
from guarded_nvfuser.pointwise import read_before_written
from guarded_nvfuser.violations import in_place, violations
from tests.traces import STRICT, Fusion, calls, one_region, ops, put

ALL = Rules(ALL_RULES.looser, any_device=True)


def x4(*shape: int) -> torch.Tensor:
    return torch.ones(shape or (4, 4))


def transposed(x: TensorProxy) -> TensorProxy:
    return prims.transpose(x, (1, 0))


def row_sums(x: TensorProxy) -> TensorProxy:
    return prims.sum(x, (1,))


def as_columns(x: TensorProxy) -> TensorProxy:
    return prims.broadcast_in_dim(x, (4, 4), (0,))


def deep(x: TensorProxy) -> TensorProxy:
    """A value that nvFuser computes in another kernel than an elementwise one: two reductions, one after the other."""
    return as_columns(row_sums(as_columns(row_sums(x))))


def broken(fn: Callable, rules: Rules = STRICT, args: tuple | None = None, overlaps: bool = False) -> set[Rule]:
    """The claims that a function breaks as one region."""
    region = one_region(fn, *((x4(), x4()) if args is None else args), overlaps=overlaps)
    return {violation.rule for violation in violations(region.body(rules=rules))}


# --- every claim


def copy_into_a_local(x, y):
    value = prims.sin(y)
    return put(prims.mul(x, y), value)


def copy_into_an_input(x, y):
    return put(prims.mul(x, y), x)


def copy_twice(x, y):
    put(prims.mul(x, y), x)
    return put(prims.add(x, y), x)


def copy_into_two(x, y):
    return put(prims.neg(x), x), put(prims.neg(y), y)


def copy_a_scalar(x, y):
    return put(y, x)


def read_transposed(x, y):
    return put(prims.mul(transposed(x), y), x)


def read_the_other_transposed(x, y):
    return put(prims.mul(x, transposed(y)), x)


def read_beside(x, y):
    return put(prims.mul(x, y), x), prims.mul(prims.cos(x), y)


def read_the_other_beside(x, y):
    return put(prims.mul(x, y), x), prims.mul(prims.cos(y), y)


def return_the_source(x, y):
    source = prims.sin(x)
    return source, put(source, x)


def return_the_result(x, y):
    return put(prims.sin(x), x)


def use_the_result(x, y):
    result = put(prims.sin(x), x)
    return result, prims.cos(result)


def use_the_result_of_another_value(x, y):
    result = put(prims.sin(y), x)
    return result, prims.cos(result)


def widen_beside(x, y):
    return put(prims.mul(x, row_of(y)), x), prims.sin(prims.broadcast_in_dim(row_of(y), (3, 4), (1,)))


def stay_as_wide_beside(x, y):
    return put(prims.mul(x, row_of(y)), x), prims.sin(row_of(y))


def row_of(x: TensorProxy) -> TensorProxy:
    return prims.amax(x, (0,))


@dataclass(frozen=True)
class Twins:
    """A region that breaks one claim, and its nearest relative that breaks none."""

    bad: Callable
    good: Callable
    bad_args: tuple = ()
    good_args: tuple = ()
    overlap: bool = False
    rules: Rules = STRICT


def _fake_cuda() -> tuple[torch.Tensor, torch.Tensor]:
    with FakeTensorMode():
        return torch.empty(4, 4, device="cuda"), torch.empty(4, 4, device="cuda")


CLAIMS: dict[Rule, Twins] = {
    Rule.TARGET_IS_INPUT: Twins(copy_into_a_local, copy_into_an_input),
    Rule.TARGET_ON_DEVICE: Twins(
        copy_into_an_input, copy_into_an_input, good_args=_fake_cuda(), rules=Rules(frozenset(), any_device=False)
    ),
    Rule.ONE_NAME: Twins(copy_into_an_input, copy_into_an_input, overlap=True),
    Rule.ONE_UPDATE: Twins(copy_twice, copy_into_two),
    Rule.SAME_KIND: Twins(copy_a_scalar, copy_a_scalar, bad_args=(x4(), torch.tensor(1.0))),
    Rule.ALIGNED: Twins(read_transposed, read_the_other_transposed),
    Rule.WIDENED: Twins(widen_beside, stay_as_wide_beside, (x4(4), x4()), (x4(4), x4())),
    Rule.CLOSED: Twins(read_beside, read_the_other_beside),
    Rule.ESCAPES: Twins(return_the_source, return_the_result),
    Rule.RESULT_USED: Twins(use_the_result, use_the_result_of_another_value),
}


@pytest.mark.parametrize("rule", CLAIMS)
def test_broken_claim_is_found(rule: Rule) -> None:
    twins = CLAIMS[rule]
    assert rule in broken(twins.bad, twins.rules, twins.bad_args or None, twins.overlap)


@pytest.mark.parametrize("rule", CLAIMS)
def test_kept_claims_are_accepted(rule: Rule) -> None:
    twins = CLAIMS[rule]
    assert broken(twins.good, twins.rules, twins.good_args or None) == set()


def test_every_claim_has_twins() -> None:
    assert CLAIMS.keys() == set(Rule)


@pytest.mark.parametrize("rule", [Rule.ALIGNED, Rule.CLOSED, Rule.ESCAPES, Rule.RESULT_USED])
def test_only_one_claim_is_blamed(rule: Rule) -> None:
    """A violation names the update and the op whose read may go wrong, once."""
    region = one_region(CLAIMS[rule].bad, x4(), x4())
    [violation] = violations(region.body())
    [update] = ops(region.regions[0], "copy_")
    reader = {"ALIGNED": "transpose", "CLOSED": "cos", "ESCAPES": "sin", "RESULT_USED": "cos"}[rule.name]
    assert violation.rule is rule
    assert violation.update is update
    assert violation.reader is ops(region.regions[0], reader)[0]


def test_region_without_updates_breaks_nothing() -> None:
    assert broken(lambda x, y: (transposed(x), prims.mul(x, y), row_sums(y))) == set()


def test_copy_alone_is_accepted() -> None:
    """Its source is an input: nvFuser makes a kernel that copies."""
    assert broken(lambda x, y: put(y, x)) == set()


def test_violations_come_in_program_order() -> None:
    def several(x, y):
        first = prims.sin(transposed(x))
        second = prims.cos(x)
        return first, second, put(prims.mul(x, y), x)

    region = one_region(several, x4(), x4())
    found = violations(region.body())
    order = {id(bsym): index for index, bsym in enumerate(region.regions[0].subsymbols)}
    positions = [order[id(violation.reader)] for violation in found]
    assert len(positions) == 2
    assert positions == sorted(positions)


# --- two of something


def test_two_updates() -> None:
    region = one_region(copy_twice, x4(), x4())
    found = [violation for violation in violations(region.body(rules=ALL)) if violation.rule is Rule.ONE_UPDATE]
    first, second = ops(region.regions[0], "copy_")
    assert [violation.update for violation in found] == [second]
    assert first is not second
    assert Rule.ONE_UPDATE not in broken(copy_into_two, ALL)


def test_two_names() -> None:
    assert broken(copy_into_an_input, ALL, overlaps=True) == {Rule.ONE_NAME}
    assert broken(copy_into_an_input, ALL) == set()


def test_two_aliases() -> None:
    """Aliases of one tensor are one tensor: reading by one and writing by the other is an update of itself."""

    def by_alias(x, y):
        (alias,) = prims.update_aliases((x,))
        return put(prims.mul(alias, y), x)

    region = one_region(by_alias, x4(), x4())
    x, y, alias = (proxy.name for proxy in region.body().inputs)
    assert region.program.buffer_of[x] == region.program.buffer_of[alias]
    assert {violation.rule for violation in violations(region.body())} == set()


def test_update_through_an_alias_is_an_update_of_the_tensor() -> None:
    def by_alias(x, y):
        (alias,) = prims.update_aliases((x,))
        return put(prims.mul(x, y), x), put(prims.add(alias, y), alias)

    assert Rule.ONE_UPDATE in broken(by_alias, ALL)


# --- what counts as elementwise


@pytest.mark.parametrize(
    ("fn", "expected"),
    [
        (lambda x, y: prims.mul(x, y), True),
        (lambda x, y: prims.where(prims.gt(x, y), x, y), True),
        (lambda x, y: prims.convert_element_type(x, dtypes.float64), True),
        (lambda x, y: prims.clone(x), True),
        (lambda x, y: prims.sum(x, (1,)), False),
        (lambda x, y: transposed(x), False),
        (lambda x, y: prims.cat((x, y), 0), False),
        (lambda x, y: prims.broadcast_in_dim(x, (2, 4, 4), (1, 2)), False),
        (lambda x, y: prims.slice_prim(x, (0, 0), (4, 4)), False),
    ],
    ids="mul,where,cast,clone,sum,transpose,cat,broadcast,slice".split(","),
)
def test_is_elementwise(fn: Callable, expected: bool) -> None:
    body = one_region(fn, x4(), x4()).body()
    assert is_elementwise(body.bsyms[-1]) == expected


def test_scalars_have_every_shape() -> None:
    body = one_region(lambda x, y: prims.mul(x, y), x4(), x4(4, 4)).body()
    assert one_shape(body, body.bsyms[0]) == (4, 4)


def test_scalar_of_the_target_itself_is_unaligned() -> None:
    """A 0-d value that is computed from the target is computed from all of it."""

    def by_its_sum(x, y):
        total = prims.broadcast_in_dim(prims.sum(x, (0, 1)), (4, 4), ())
        return put(prims.div(x, total), x)

    assert broken(by_its_sum) == {Rule.ALIGNED}


# --- the strict contract, on random regions


class RandomRegion:
    """A random region over two tensors with at most two updates, one of each."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.region: Fusion = one_region(self.steps, x4(), x4())

    def steps(self, x: TensorProxy, y: TensorProxy) -> tuple[TensorProxy, ...]:
        values, kept, targets = [x, y], [], [x, y]
        for _ in range(self.random.randint(2, 5)):
            values.append(self.step(values))
        for _ in range(self.random.randint(1, 2)):
            computed = [value for value in values if value.name not in (x.name, y.name)]
            target = targets.pop(self.random.randrange(len(targets)))
            kept.append(put(self.random.choice(computed), target))
            if self.random.random() < 0.3:
                values.append(kept[-1])
                values.append(self.step(values))
        kept += self.random.sample(values[2:], self.random.choice((0, 0, 1)))
        return tuple({value.name: value for value in kept}.values())

    def step(self, values: list[TensorProxy]) -> TensorProxy:
        a, b = self.random.choice(values), self.random.choice(values)
        kind = self.random.choice(["unary", "binary", "binary", "transpose", "rows"])
        if kind == "unary":
            return self.random.choice((prims.sin, prims.neg, prims.clone))(a)
        if kind == "binary":
            return self.random.choice((prims.add, prims.mul))(a, b)
        return transposed(a) if kind == "transpose" else as_columns(row_sums(a))

    def run(self, x: torch.Tensor, y: torch.Tensor) -> dict[str, torch.Tensor]:
        body = self.region.body()
        tensors = dict(zip((arg.name for arg in self.region.program.trace.args), (x.clone(), y.clone())))
        run = eager(body.bsyms, body.inputs, body.outputs, "region")
        results = run(*(tensors[proxy.name] for proxy in body.inputs))
        return {proxy.name: result.clone() for proxy, result in zip(body.outputs, results)}


def _differs(seed: int, region: RandomRegion, target: int) -> dict[str, dict[int, torch.Tensor]]:
    """Which elements of each output change with which element of an argument."""
    args = [torch.randn(4, 4, generator=torch.Generator().manual_seed(seed + i), dtype=torch.float64) for i in (0, 1)]
    before = region.run(*args)
    found: dict[str, dict[int, torch.Tensor]] = {name: {} for name in before}
    for index in range(0, 16, 3):
        other = [arg.clone() for arg in args]
        other[target].view(-1)[index] += 1
        for name, after in region.run(*other).items():
            found[name][index] = (after != before[name]).reshape(-1).nonzero().reshape(-1)
    return found


@pytest.mark.parametrize("seed", range(120))
def test_accepted_regions_depend_on_a_target_element_by_element(seed: int) -> None:
    """What the strict contract promises: only an update's result depends on its target, each element on its own."""
    random_region = RandomRegion(seed)
    body = random_region.region.body()
    if violations(body):
        return
    arguments = [arg.name for arg in random_region.region.program.trace.args]
    for update in body.updates:
        target, result = update.flat_proxy_args[1].name, update.flat_proxy_outs[0].name
        for name, by_element in _differs(seed, random_region, arguments.index(target)).items():
            for index, changed in by_element.items():
                assert changed.tolist() in ([[], [index]] if name == result else [[]])


def test_random_regions_are_accepted_and_rejected() -> None:
    verdicts = [bool(violations(RandomRegion(seed).region.body())) for seed in range(120)]
    assert 20 <= sum(verdicts) <= 100


# --- the looser rules


def compute_behind_two_operands(x, y):
    total = prims.add(x, y)
    return put(total, x), prims.cos(total)


def compute_from_a_chain(x, y):
    chain = prims.sin(x)
    return put(prims.mul(chain, y), x), prims.mul(chain, deep(y))


def softmax(x, y):
    exponentials = prims.exp(prims.sub(x, as_columns(prims.amax(x, (1,)))))
    return put(prims.div(exponentials, as_columns(row_sums(exponentials))), x)


def softmax_and_a_later_read(x, y):
    exponentials = prims.exp(x)
    return put(prims.div(exponentials, as_columns(row_sums(exponentials))), x), prims.cos(x)


def power_of_tanh(x, y):
    result = put(prims.tanh(x), x)
    return result, prims.mul(prims.mul(prims.mul(result, result), result), result)


def power_of_tanh_and_a_reduction(x, y):
    result = put(prims.tanh(x), x)
    return result, prims.mul(result, deep(y))


LOOSER: dict[Looser, tuple[Callable, Callable]] = {
    Looser.BEHIND_TWO_OPERANDS: (compute_behind_two_operands, compute_from_a_chain),
    Looser.ISOLATED: (softmax, softmax_and_a_later_read),
    Looser.POINTWISE: (power_of_tanh, power_of_tanh_and_a_reduction),
}


@pytest.mark.parametrize("looser", LOOSER)
def test_looser_rule_accepts_what_strict_does_not(looser: Looser) -> None:
    region, _ = LOOSER[looser]
    assert broken(region)
    assert broken(region, Rules(frozenset((looser,)), any_device=True)) == set()


@pytest.mark.parametrize("looser", LOOSER)
def test_looser_rule_stops_somewhere(looser: Looser) -> None:
    _, killer = LOOSER[looser]
    assert broken(killer, ALL)


def test_every_looser_rule_has_regions() -> None:
    assert LOOSER.keys() == set(Looser)


# Programs that went wrong on nvFuser's own kernels, or may by what it promises: no rule accepts them.
WRONG: dict[str, Callable] = {
    "transposed into itself": lambda x, y: put(transposed(x), x),
    "two updates": copy_twice,
    "a chain from the target beside a reduction": lambda x, y: (
        (chain := prims.sin(x)),
        put(chain, x),
        prims.add(chain, deep(y)),
    )[1:],
    "an upcast beside a reduction": lambda x, y: (
        (wide := prims.convert_element_type(x, dtypes.float64)),
        put(prims.convert_element_type(prims.add(wide, prims.convert_element_type(y, dtypes.float64)), x.dtype), x),
        prims.add(wide, prims.convert_element_type(deep(y), dtypes.float64)),
    )[1:],
    "the result behind a broadcast": lambda x, y: (
        (result := put(prims.sin(x), x)),
        prims.add(
            prims.broadcast_in_dim(result, (2, 4, 4), (1, 2)), prims.broadcast_in_dim(deep(y), (2, 4, 4), (1, 2))
        ),
    ),
    "a reader in a later kernel": lambda x, y: (put(prims.mul(x, y), x), prims.add(x, deep(y))),
    "a reduction of the target": lambda x, y: (put(prims.mul(x, y), x), row_sums(prims.exp(prims.exp(x)))),
    "a blind overwrite": lambda x, y: (put(prims.sin(y), x), prims.mul(prims.cos(x), y)),
}


# Right where the store is cut off behind what computes the value, wrong where one kernel does both.
NEED_ISOLATION: dict[str, Callable] = {
    "transposed": read_transposed,
    "shifted": lambda x, y: put(
        prims.pad(prims.slice_prim(prims.mul(x, y), (0, 0), (3, 4)), 0.0, ((1, 0, 0), (0, 0, 0))), x
    ),
    "softmax": softmax,
}


@pytest.mark.parametrize("name", NEED_ISOLATION)
def test_stores_that_need_to_be_cut_off_are_not_in_place(name: str) -> None:
    fn = NEED_ISOLATION[name]
    assert broken(fn, Rules(ALL.looser - {Looser.ISOLATED}, any_device=True)) == {Rule.ALIGNED}
    assert broken(fn, ALL) == set()
    assert stored_in_place(fn) == [False]


def stored_in_place(fn: Callable, *args: torch.Tensor) -> list[bool]:
    """Which updates of an accepted region its kernels may store where they read the target."""
    body = one_region(fn, *(args or (x4(), x4()))).body(rules=ALL)
    assert not violations(body)
    found = in_place(body)
    return [update.flat_proxy_outs[0].name in found for update in body.updates]


@pytest.mark.parametrize("fn", [copy_into_an_input, return_the_result, power_of_tanh, compute_behind_two_operands])
def test_elementwise_updates_are_stored_in_place(fn: Callable) -> None:
    assert stored_in_place(fn) == [True]


@pytest.mark.parametrize("name", WRONG)
def test_no_rule_accepts_what_is_wrong(name: str) -> None:
    assert broken(WRONG[name], ALL)


def test_scalar_target_is_not_loaded_first() -> None:
    """nvFuser does not cache 0-d inputs in registers, so an aligned reader may see either value."""

    def beside(x, y):
        return put(prims.mul(x, y), x), prims.mul(prims.cos(x), y)

    assert broken(beside, ALL, (torch.tensor(1.0), torch.tensor(1.0)))
    assert broken(beside, ALL, (x4(1, 1), x4(1, 1)))
    assert broken(beside, ALL, (x4(), x4())) == set()


# --- values with more elements than the target


def test_widened() -> None:
    """One kernel over the wider shape would store each element of the target in many threads."""

    def beside_another(x, y):
        return put(prims.mul(x, x), x), prims.sin(prims.broadcast_in_dim(row_of(y), (3, 4), (1,)))

    def from_one_element(x, y):
        total = prims.sum(y, (0, 1))
        return put(prims.mul(x, total), x), prims.broadcast_in_dim(total, (3, 4), ())

    def joined(x, y):
        return put(prims.mul(x, row_of(y)), x), prims.cat((row_of(y), prims.neg(row_of(y))), 0)

    def repeated(x, y):
        row = row_of(y)
        return put(prims.mul(x, row), x), prims.sin(prims.cat((row, row), 0))

    args = x4(4), x4()
    assert broken(widen_beside, STRICT, args) == {Rule.WIDENED}
    assert broken(repeated, STRICT, args) == {Rule.WIDENED}
    for fn in (beside_another, from_one_element, joined):
        assert Rule.WIDENED not in broken(fn, STRICT, args)
    assert broken(from_one_element, STRICT, (torch.tensor(1.0), x4())) == {Rule.WIDENED}
    assert broken(widen_beside, ALL, args) == set()
    assert stored_in_place(widen_beside, *args) == [False]


def test_widening_is_blamed_on_the_broadcast() -> None:
    region = one_region(widen_beside, x4(4), x4())
    [violation] = violations(region.body())
    assert violation.reader is ops(region.regions[0], "broadcast_in_dim")[0]
    assert violation.update is ops(region.regions[0], "copy_")[0]


# --- pointwise regions


def ordered(fn: Callable, *args: torch.Tensor) -> list[bool]:
    """Which updates are known to be stored after every read of their target."""
    body = one_region(fn, *(args or (x4(), x4()))).body()
    found = read_before_written(body)
    return [id(update) in found for update in body.updates]


def test_pointwise_needs_own_target() -> None:
    def own(x, y):
        return put(prims.mul(x, y), x), prims.mul(prims.cos(x), y)

    def blind(x, y):
        return put(prims.mul(y, y), x), prims.mul(prims.cos(x), y)

    assert ordered(own) == [True]
    assert ordered(blind) == [False]
    assert broken(own, ALL) == set()
    assert broken(blind, ALL)


def test_pointwise_needs_one_piece() -> None:
    def one_piece(x, y, z):
        total = prims.add(x, y)
        return put(total, x), prims.mul(total, prims.cos(z))

    def two_pieces(x, y, z):
        (alias,) = prims.update_aliases((x,))
        return put(prims.add(x, y), x), prims.mul(alias, prims.cos(z))

    args = x4(), x4(), x4()
    assert ordered(one_piece, *args) == [True]
    assert ordered(two_pieces, *args) == [False]
    assert broken(two_pieces, ALL, args)


def test_pointwise_needs_a_link() -> None:
    """Beside another piece the region may be cut, and inputs alone hold nothing together."""

    def linked(x, y, z):
        total = prims.add(x, y)
        return put(total, x), prims.mul(prims.mul(x, y), total), prims.sin(z)

    def by_inputs_only(x, y, z):
        return put(prims.add(x, y), x), prims.mul(x, y), prims.sin(z)

    def alone(x, y, z):
        return put(prims.add(x, y), x), prims.mul(x, y), prims.mul(x, z)

    args = x4(), x4(), x4()
    assert ordered(linked, *args) == [True]
    assert ordered(by_inputs_only, *args) == [False]
    assert ordered(alone, *args) == [True]
    assert broken(by_inputs_only, ALL, args)


def test_pointwise_needs_elementwise_ops_over_one_shape() -> None:
    def over_rows(x, y):
        return put(prims.mul(x, y), x), prims.mul(prims.cos(x), as_columns(row_sums(y)))

    def over_elements(x, y):
        return put(prims.mul(x, y), x), prims.mul(prims.cos(x), prims.neg(y))

    assert ordered(over_elements) == [True]
    assert ordered(over_rows) == [False]


def test_pointwise_reads_a_target_by_one_name() -> None:
    def two_names(x, y):
        (alias,) = prims.update_aliases((x,))
        total = prims.add(x, y)
        return put(total, x), prims.mul(total, alias)

    assert ordered(two_names) == [False]


@pytest.mark.parametrize("good", [True, False])
def test_schedules_agree_on_the_twin_alone(good: bool) -> None:
    """The interpreter shows what an open read may see: the value before the update, or after it."""

    def beside(x, y):
        return put(prims.mul(x, y), x), prims.mul(prims.cos(y if good else x), deep(y))

    body = one_region(beside, x4(), x4()).body()
    found = []
    for which in Schedule:
        run = scheduled(body.bsyms, body.inputs, body.outputs, "region", which)
        found.append([result.clone() for result in run(2 * x4(), 3 * x4())])
    late, early = found
    assert torch.equal(late[0], 6 * x4())
    assert torch.equal(early[0], late[0])
    assert torch.equal(early[1], late[1]) == good


def test_time_is_linear_in_the_ops() -> None:
    def repeat(times: int) -> Body:
        def steps(x, y):
            value = x
            for _ in range(times):
                value = prims.add(prims.sin(value), y)
            return put(value, x), prims.mul(prims.cos(x), deep(y)), put(prims.cos(y), y)

        return one_region(steps, x4(), x4()).body(rules=ALL)

    assert violations(repeat(10))
    assert calls(violations, repeat(800)) < 8 * 1.3 * calls(violations, repeat(100))


@pytest.mark.xfail(strict=True, reason="masks of updates are as long as the updates are many, and are walked per op")
def test_time_is_linear_in_the_updates() -> None:
    def repeat(times: int) -> Body:
        def steps(*tensors):
            beside = prims.cos(tensors[0])
            return *(put(prims.mul(t, t), t) for t in tensors), prims.mul(beside, deep(tensors[1]))

        return one_region(steps, *(x4() for _ in range(times))).body(rules=ALL)

    assert violations(repeat(10))
    assert calls(violations, repeat(240)) < 8 * 1.3 * calls(violations, repeat(30))
