"""Training: gradients, statistics and errors are eager's; a gradient is right or refused, never silently wrong."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import thunder
import torch
import torch.nn.functional as F
from torch import nn

from guarded_nvfuser import HazardError, HazardWarning, Kind, guarded_nvfuser_ex
from guarded_nvfuser.options import schedule
from tests.generator import compile_source
from tests.support import Config, Outcome, differences, jit, run

MODES = ("rewrite", "raise", "fallback")
Args = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def x_w_m() -> Args:
    """An input without gradient and two parameters."""
    generator = torch.Generator().manual_seed(0)
    x, w, m = (torch.randn(shape, generator=generator) for shape in ((4, 6), (4, 6), (6, 6)))
    return x, w.requires_grad_(), m.requires_grad_()


def program(body: str) -> Callable:
    """A function of x, w, m whose statements are separated by semicolons."""
    lines = "".join(f"    {line.strip()}\n" for line in body.split(";"))
    return compile_source(f"import torch.nn.functional as F\ndef program(x, w, m):\n{lines}")


def outcomes(fn: Callable, config: Config, make_args: Callable = x_w_m, calls: int = 1) -> list[Outcome]:
    """What a compiled function does, backward included, under both schedules."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", HazardWarning)
        jitted, found = jit(fn, config), []
        for order in ("late", "early"):
            with schedule(order):
                found.append(run(jitted, make_args, calls=calls, backward=True))
    return found


def check(fn: Callable | str, *, modes: tuple[str, ...] = ("rewrite",), refuse: bool = False, **options: Any) -> None:
    """Fail unless a program and its gradients are eager's in both partitions; `refuse`: or it is refused."""
    fn = program(fn) if isinstance(fn, str) else fn
    expected = run(fn, x_w_m, calls=options.get("calls", 1), backward=True)
    for mode in modes:
        for fusion_type, skip in (("consecutive", False), ("dataflow", True)):
            try:
                found = outcomes(fn, Config(mode, fusion_type, skip), **options)
            except HazardError:
                assert refuse, (mode, fusion_type, skip)
                continue
            for outcome in found:
                assert differences(expected, outcome) == [], (mode, fusion_type, skip)


# --- in-place ops on intermediates

INTERMEDIATES = [
    "h = w * 2; h.sin_(); return h * x",
    "h = w @ m; F.relu(h, inplace=True); return h",
    "h = w @ m; h.add_(x); return h * h",
    "h = w.sin(); h.mul_(w); return h",
    "h = w.sin(); h.mul_(2); return h, h.cos()",
    "h = w * 1.5; h.add_(x).mul_(w).sub_(1); return h",
    "h = w * 1.5; h.clamp_(-0.5, 0.5); return h * h",
    "h = w * 1.5; h.div_(x.abs() + 1); return h",
    "h = w.abs() + 1; h.pow_(2); h.sqrt_(); return h",
    "h = w * 1.5; s = h.sum(); h.zero_(); return s",
    "h = w.clone(); h.copy_(x); h.mul_(w); return h",
    "h = torch.zeros(4, 6); h.add_(w); return h * h",
    "h = w.clone(); h.tril_(); h.addcmul_(x, w, value=0.5); return h * h",
    "h = F.linear(w, m); h.add_(x); F.relu(h, inplace=True); return F.linear(h, m)",
]


@pytest.mark.parametrize("body", INTERMEDIATES)
def test_in_place_on_intermediates(body: str) -> None:
    """Mode rewrite differentiates values: whatever in-place ops an intermediate went through, the gradient is right."""
    check(body)


@pytest.mark.parametrize("body", INTERMEDIATES)
def test_other_modes_are_right_or_refuse(body: str) -> None:
    """The other modes take Thunder's gradients, and refuse where it lost a write."""
    check(body, modes=("raise", "fallback"), refuse=True)


def test_with_renames_thunder_follows_whole_writes() -> None:
    """With Thunder's renames (the default) writes of whole intermediates are followed: fallback refuses none."""
    for body in INTERMEDIATES:
        fn = program(body)
        for outcome in outcomes(fn, Config("fallback")):
            assert differences(run(fn, x_w_m, backward=True), outcome) == []


def test_residual_adds() -> None:
    """The residual spelling of a stock network: in-place add of the input, in-place activation, twice."""

    def block(x, w, m):
        h = F.relu(w @ m, inplace=True)
        h = h @ m
        h += w
        h = F.relu(h, inplace=True)
        g = h @ m
        g += h
        g += x
        return F.relu(g, inplace=True)

    check(block)
    check(block, modes=("raise", "fallback"), refuse=True)


# --- writes through views

VIEWS = [
    "h = w * 1.5; h.t().mul_(x.t()); return h.sin()",
    "h = w * 1.5; h.view(24).mul_(x.view(24)); return h.sin()",
    "h = w * 1.5; v = h.view(6, 4); v.sin_(); return h * 2, v",
    "h = w * 1.5; v = h[1]; v.sin_(); return h * 2, v",
    "h = w * 1.5; v = h[1]; h.sin_(); return h * 2, v",
    "h = w * 1.5; h[0] = 0.0; return h * h",
    "h = w * 1.5; h[0] = x[0]; return h * h",
    "h = w * 1.5; h[1:3].mul_(2); return h * h",
    "h = w * 1.5; h[:, 1].mul_(x[:, 1]); return h * h",
    "h = w * 1.5; h.select(1, 2).zero_(); return h * h",
    "h = w * 1.5; h.unsqueeze(0).mul_(2); return h * h",
    "h = w * 1.5; h[0] *= 2; h[:, 0] += 1; return h * h",
    "h = w * 1.5; h.masked_fill_(x > 0, 0.5); return h * h",
    "h = w * 1.5; h.index_copy_(0, torch.tensor([1]), w[:1] * 2); return h * h",
    "h = w.clone(); h[0] = w[1]; h[1] = w[0]; return h * x",
    "h = torch.zeros(4, 6); h[1:3] = w[1:3]; return h * h",
    "h = torch.zeros(4, 6); h[1:3].copy_(w[1:3]); return h * h",
    "k = m * 2; k.t().add_(1); return w @ k",
    "x[:, 1:3] = w[:, 1:3]; return x * x",
    "x[:, ::2] = w[:, ::2]; return x * x",
    "x.t().mul_(w.t()); return x.sin()",
]
DIAGONALS = [
    "h = w * 1.5; h.diagonal().mul_(3); return h * h",
    "h = w * 1.5; d = h.diagonal(); d.zero_(); return h.sum()",
    "x.diagonal().mul_(2); return x * w",
]


@pytest.mark.parametrize("body", VIEWS)
def test_writes_through_views(body: str) -> None:
    """In mode rewrite the gradient of a write through a view reaches the base and what was written."""
    check(body)


@pytest.mark.parametrize("body", VIEWS)
def test_writes_through_views_are_right_or_refused(body: str) -> None:
    """Thunder's autograd cannot follow them: the other modes say so instead of giving a gradient without the write."""
    check(body, modes=("raise", "fallback"), refuse=True)


@pytest.mark.parametrize("body", DIAGONALS)
def test_writes_through_diagonals_are_right_or_refused(body: str) -> None:
    """Thunder decomposes a diagonal into a gather, through which it derives no gradient of a write."""
    check(body, modes=MODES, refuse=True)


MAYBE_VIEWS = [
    "h = w * 1.5; r = h.t().reshape(24); r.mul_(2); return h * h, r",
    "h = w * 1.5; r = h.t().contiguous(); h.mul_(2); return h, r",
    "h = w * 1.5; r = h.flatten(); r.mul_(2); return h * h",
    "x.reshape(24).mul_(w.reshape(24)); return x * w",
]


@pytest.mark.parametrize("body", MAYBE_VIEWS)
def test_writes_through_maybe_views_are_right_or_refused(body: str) -> None:
    """Where strides decide what is a view there is no gradient to derive: right, or refused, in every mode."""
    check(body, modes=MODES, refuse=True)


@pytest.mark.parametrize(
    "body",
    [
        "h = (w * 1.5).double(); h.mul_(2); return h.float()",
        "h = w.sin(); h.add_(x); x.add_(h); return x * h",
        "h = w.clone(); h.cumsum_(1); return h * h",
    ],
)
def test_rewrite_runs_what_fallback_runs(body: str) -> None:
    """The default mode refuses no program that the more careful one gets right."""
    fn = program(body)
    for mode in ("fallback", "rewrite"):
        for outcome in outcomes(fn, Config(mode)):
            assert differences(run(fn, x_w_m, backward=True), outcome) == []


# --- saved for backward, then overwritten

# a program that eager refuses at backward, and the same maths without the overwriting
OVERWRITTEN = [
    ("y = w * x; x.mul_(2); return y", "return w * x"),
    ("y = w * x; x.zero_(); return y", "return w * x"),
    ("y = F.linear(w, x); x.zero_(); return y", "return F.linear(w, x)"),
    ("y = (w * x).sin(); x.add_(1); z = w * x; return y, z", "return (w * x).sin(), w * (x + 1)"),
    ("h = w * 1.5; y = h * h; h.zero_(); return y", "h = w * 1.5; return h * h"),
    ("h = w.exp(); h.mul_(2); return h", "return w.exp() * 2"),
    ("h = w.tanh(); z = h * x; h.mul_(2); return z + h", "h = w.tanh(); return h * x + h * 2"),
    ("h = w.exp(); z = h * h; h.mul_(2); return z + h", "h = w.exp(); return h * h + h * 2"),
    ("h = w @ m; h.relu_(); h += x; return h.sigmoid()", "return ((w @ m).relu() + x).sigmoid()"),
    ("h = F.softmax(w, -1); h.mul_(x); return h", "return F.softmax(w, -1) * x"),
    ("y = w[:2] * x[:2]; x[0] = 1.0; return y", "return w[:2] * x[:2]"),
    ("y = w * x.t().t(); x.view(24).mul_(2); return y", "return w * x"),
]


# the same, where backward reads a view that it makes itself
THROUGH_VIEWS = [
    ("y = w @ x.t(); x.zero_(); return y", "return w @ x.t()"),
    ("y = w.t() @ x; x.zero_(); return y", "return w.t() @ x"),
    ("y = w @ x[:, :].t(); x.mul_(2); return y", "return w @ x.t()"),
    ("h = m * 2; y = w @ h.t(); h.zero_(); return y", "return w @ (m * 2).t()"),
]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("body, twin", [*OVERWRITTEN, *THROUGH_VIEWS])
def test_a_tensor_saved_and_overwritten(body: str, twin: str, mode: str) -> None:
    """Eager refuses the backward; a compiled program gives the gradient of the saved values, or refuses too."""
    fn, meant = program(body), program(twin)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        run(fn, x_w_m, backward=True)
    expected = run(meant, x_w_m, backward=True)
    for skip in (False, True):
        try:
            found = outcomes(fn, Config(mode, skip=skip))
        except RuntimeError as refused:  # HazardError, or autograd's own
            assert isinstance(refused, HazardError) or "inplace" in str(refused)
            continue
        for outcome in found:
            assert (
                differences(Outcome(expected.results, [], expected.gradients, [], []), without_arguments(outcome)) == []
            )


def without_arguments(outcome: Outcome) -> Outcome:
    return Outcome(outcome.results, [], outcome.gradients, [], [])


def test_an_overwritten_save_is_named() -> None:
    """Mode raise says which write overwrites what backward reads."""
    with pytest.raises(HazardError) as refused:
        jit(program("y = w * x; x.mul_(2); return y"), Config("raise"))(*x_w_m())
    [hazard] = refused.value.hazards
    assert hazard.kind is Kind.SAVED
    assert "`x.mul_(2)` overwrote after it was saved" in str(refused.value)


def test_tensors_that_backward_does_not_need_may_be_overwritten() -> None:
    """Nothing is refused where the overwritten values play no part in the gradient."""
    for body in (
        "y = w + x; x.mul_(2); return y",
        "t = x.clone(); x.mul_(2); return w * t",
        "y = w - x; x.zero_(); return y",
    ):
        check(body, modes=("rewrite", "fallback"))


def test_the_callers_own_saves_are_noticed() -> None:
    """A tensor that eager code saved and a compiled call then changed makes the backward fail, as in eager."""
    scale = jit(lambda x, w, m: x.mul_(2), Config("rewrite"))
    x, w, m = x_w_m()
    loss = (w * x).sum()
    scale(x, w.detach(), m.detach())
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


# --- leaves


LEAVES = [
    "w.mul_(2); return w * x",
    "w[0] = 1.0; return w * x",
    "w.view(24).mul_(2); return w * x",
    "w.t().add_(1); return w",
]
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("body", LEAVES)
def test_in_place_on_a_leaf_raises_as_in_eager(body: str, mode: str) -> None:
    """A parameter cannot be written in place outside no_grad; nothing is written then."""
    fn = program(body)
    with pytest.raises(RuntimeError, match="leaf Variable that requires grad"):
        fn(*x_w_m())
    x, w, m = x_w_m()
    with pytest.raises(RuntimeError, match="leaf Variable that requires grad"):
        jit(fn, Config(mode))(x, w, m)
    assert torch.equal(w, x_w_m()[1])


@pytest.mark.parametrize("mode", MODES)
def test_an_optimizer_step_under_no_grad(mode: str) -> None:
    """Called under no_grad, a function updates parameters as eager does, step by step, and they stay leaves."""

    def step(x, w, m):
        x.mul_(0.9).add_(w, alpha=0.1)
        w.sub_(x, alpha=0.5)
        m.mul_(0.99)

    jitted = jit(step, Config(mode))
    args, twins = x_w_m(), x_w_m()
    with torch.no_grad():
        for _ in range(3):
            jitted(*args)
            step(*twins)
    for arg, twin in zip(args, twins):
        assert torch.allclose(arg, twin)
        assert (arg.is_leaf, arg.requires_grad) == (twin.is_leaf, twin.requires_grad)


def parameter_scaled_inside(x, w, m):
    with torch.no_grad():
        w.mul_(2)
    return (w * x).sum() + (m * m).sum()


def intermediate_scaled_inside(x, w, m):
    h = w * 1.5
    with torch.no_grad():
        h.mul_(2)
    return h.sin().sum() + (m * m).sum()


def parameter_copied_inside(x, w, m):
    with torch.no_grad():
        x.copy_(w)
    return x * w


def buffer_scaled_inside(x, w, m):
    with torch.no_grad():
        x.mul_(0.5)
    return x * w


def average_kept_inside(x, w, m):
    with torch.no_grad():
        x.mul_(0.9).add_(w, alpha=0.1)
    return (w - x) ** 2


@pytest.mark.parametrize(
    "fn",
    [
        buffer_scaled_inside,
        average_kept_inside,
        parameter_scaled_inside,
        intermediate_scaled_inside,
        parameter_copied_inside,
    ],
)
def test_no_grad_blocks_inside(fn: Callable) -> None:
    """Writes inside a no_grad block happen, and gradients are as if the values had always been there, as in eager."""
    check(fn, refuse=True)


@pytest.mark.parametrize(
    "fn",
    [
        buffer_scaled_inside,
        average_kept_inside,
        parameter_copied_inside,
        parameter_scaled_inside,
        intermediate_scaled_inside,
    ],
)
def test_no_grad_blocks_inside_are_right_or_refused(fn: Callable) -> None:
    """The same for the other modes, which may refuse."""
    check(fn, modes=("raise", "fallback"), refuse=True)


def test_detached_statistics() -> None:
    """A running average of detached values takes no part in the gradient."""
    check("x.mul_(0.9).add_(w.detach(), alpha=0.1); return (w - x) ** 2", modes=("rewrite", "fallback"), refuse=True)
    check("x.copy_(w.detach()); return x * w", modes=("rewrite", "fallback"), refuse=True)
    check("y = w - x; x.copy_(y.detach()); return y * y", modes=("rewrite", "fallback"), refuse=True)


# --- arguments that get a history


@pytest.mark.parametrize(
    "body",
    [
        "x.mul_(w); return x * 2",
        "x.copy_(w); return x.sin()",
        "x.add_(w); return (x * 2).sum()",
        "x[0] = w[0]; return x * 2",
    ],
)
def test_gradients_flow_through_a_written_argument(body: str) -> None:
    """What a program writes to an argument without gradient carries the gradient of what was written."""
    check(body)


@pytest.mark.parametrize("mode", MODES)
def test_an_argument_returned_with_a_history_is_refused(mode: str) -> None:
    """Thunder leaves a returned argument unconnected; a program that needs the connection is refused, at its line."""
    fn = program("x.mul_(w); return x")
    assert fn(*x_w_m()).requires_grad
    with pytest.raises(HazardError, match="GNV007"):
        jit(fn, Config(mode))(*x_w_m())


# --- modules and loops


class Block(nn.Module):
    """Batch norm in train mode, an in-place activation and an in-place residual add."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(6, 6), nn.Linear(6, 6)
        self.norm = nn.BatchNorm1d(6)
        self.act = nn.ReLU(inplace=True)

    def forward(self, x):
        out = self.act(self.norm(self.first(x)))
        out = self.second(out)
        out += x
        return self.act(out)


@pytest.mark.parametrize("mode", MODES)
def test_training_a_module(mode: str) -> None:
    """Three steps of SGD: losses, parameters, running statistics and the batch counter are eager's."""
    eager, traced = Block(), Block()
    compiled = thunder.jit(traced, executors=[guarded_nvfuser_ex], guard_on_hazard=mode)
    optimizers = [torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9) for module in (eager, traced)]
    generator = torch.Generator().manual_seed(1)
    for _ in range(3):
        x = torch.randn(5, 6, generator=generator)
        losses = []
        for module, optimizer in zip((eager, compiled), optimizers):
            optimizer.zero_grad()
            loss = module(x).square().mean()
            loss.backward()
            optimizer.step()
            losses.append(loss.detach())
        assert torch.allclose(*losses, atol=1e-6)
    for (name, value), (_, other) in zip(eager.state_dict().items(), traced.state_dict().items()):
        assert torch.allclose(value, other, atol=1e-5), name
    assert traced.norm.num_batches_tracked.item() == 3


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("kind, shape", [(nn.BatchNorm1d, (6, 3)), (nn.BatchNorm2d, (4, 3, 2, 2))])
def test_batch_norm(kind: type[nn.Module], shape: tuple[int, ...], mode: str) -> None:
    """Statistics are written in the forward; in eval mode they are read and left alone."""
    eager, traced = kind(3), kind(3)
    compiled = thunder.jit(traced, executors=[guarded_nvfuser_ex], guard_on_hazard=mode)
    generator = torch.Generator().manual_seed(1)
    for step in range(3):
        if step == 2:
            eager.eval()
            traced.eval()
            compiled = thunder.jit(traced, executors=[guarded_nvfuser_ex], guard_on_hazard=mode)
        x = torch.randn(shape, generator=generator)
        left, right = x.clone().requires_grad_(), x.clone().requires_grad_()
        expected, found = eager(left), compiled(right)
        assert torch.allclose(found, expected, atol=1e-5)
        for (name, value), (_, other) in zip(eager.named_buffers(), traced.named_buffers()):
            assert torch.allclose(value, other, atol=1e-6), name
        expected.square().sum().backward()
        found.square().sum().backward()
        assert torch.allclose(left.grad, right.grad, atol=1e-5)
    assert torch.allclose(eager.weight.grad, traced.weight.grad, atol=1e-4)


@pytest.mark.parametrize("mode", MODES)
def test_gradients_accumulate(mode: str) -> None:
    """Backward after backward without zeroing adds up, with state that changes in between."""

    def fn(x, w, m):
        x.mul_(0.5)
        h = w @ m
        h = h + x
        return h.sin()

    jitted = jit(fn, Config(mode))
    args, twins = x_w_m(), x_w_m()
    for _ in range(3):
        jitted(*args).sum().backward()
        fn(*twins).sum().backward()
    for arg, twin in zip(args, twins):
        assert torch.allclose(arg, twin)
        assert (arg.grad is None) == (twin.grad is None)
        assert arg.grad is None or torch.allclose(arg.grad, twin.grad, atol=1e-5)


@pytest.mark.parametrize("mode", ["rewrite", "fallback"])
def test_two_forwards_before_the_backwards(mode: str) -> None:
    """Each backward sees what its own forward saved, whatever a later call did to the arguments."""

    def fn(x, w, m):
        h = (w * x.sum()).sin()
        x.mul_(2)
        return h

    jitted = jit(fn, Config(mode))
    args, twins = x_w_m(), x_w_m()
    found, expected = [jitted(*args) for _ in range(2)], [fn(*twins) for _ in range(2)]
    for a, b in zip(reversed(found), reversed(expected)):
        assert torch.allclose(a, b)
        (a.sum() + a.square().sum()).backward()
        (b.sum() + b.square().sum()).backward()
    assert torch.allclose(args[1].grad, twins[1].grad, atol=1e-5)


@pytest.mark.parametrize("calls", [2, 3])
def test_later_calls(calls: int) -> None:
    """The gradient of a later call is that of the state which earlier calls left."""
    check("x.mul_(0.5); return w * x.sum(), x.sum()", calls=calls)


def test_same_function_with_and_without_gradients() -> None:
    """A compiled function is compiled anew when its arguments stop requiring gradients, and is right both times."""
    fn = program("h = w * 1.5; h.mul_(x); x.add_(1); return h")
    jitted = jit(fn, Config("rewrite"))
    x, w, m = x_w_m()
    assert jitted(x, w, m).requires_grad
    y, twin = x_w_m()[:2]
    fn(y, twin, m)
    found, expected = jitted(x, w.detach(), m.detach()), fn(y, twin.detach(), m.detach())
    assert not found.requires_grad
    assert torch.allclose(found, expected)
    assert torch.allclose(x, y)
