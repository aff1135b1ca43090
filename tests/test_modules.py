"""Real modules and training programs, several steps of each, against eager: modes rewrite and fallback.

Everything is float64, so that rounding does not hide anything: a wrong running statistic or a lost update is larger.
"""

from __future__ import annotations

import copy
import math
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils._pytree import tree_leaves

from guarded_nvfuser.options import schedule
from tests.support import Config, jit

CONFIGS = [
    Config("rewrite", "consecutive", schedule="late"),
    Config("rewrite", "dataflow", schedule="early"),
    Config("fallback", "consecutive", schedule="early"),
    Config("fallback", "dataflow", schedule="late"),
]
every_config = pytest.mark.parametrize("config", CONFIGS, ids=str)


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


def randn(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def called(fn: Callable, config: Config, *args: Any) -> Any:
    """Call a compiled function under a configuration's schedule."""
    with warnings.catch_warnings(), schedule(config.schedule):
        warnings.simplefilter("ignore")
        return fn(*args)


def same(found: Any, expected: Any, what: str) -> None:
    """Every tensor of two trees agrees."""
    left, right = tree_leaves(found), tree_leaves(expected)
    assert len(left) == len(right), what
    for index, (a, b) in enumerate(zip(left, right)):
        message = f"{what}, number {index}"
        torch.testing.assert_close(a, b, rtol=1e-8, atol=1e-10, msg=lambda text, m=message: f"{m}: {text}")


def twins(make: Callable[[], nn.Module]) -> tuple[nn.Module, nn.Module]:
    """Two equal modules of their own memory."""
    torch.manual_seed(0)
    module = make().double()
    return module, copy.deepcopy(module)


def trained(make: Callable[[], nn.Module], inputs: Sequence[torch.Tensor], config: Config) -> None:
    """Train a module and its compiled twin for some steps, then evaluate both: the same at every step."""
    eager, twin = twins(make)
    compiled = jit(twin, config)
    optimizers = [torch.optim.SGD(m.parameters(), 0.05, momentum=0.9) for m in (eager, twin) if [*m.parameters()]]
    for number, x in enumerate(inputs):
        expected, found = eager(x), called(compiled, config, x)
        same(found, expected, f"output of step {number}")
        if optimizers:
            for optimizer in optimizers:
                optimizer.zero_grad()
            expected.square().mean().backward()
            called(lambda value: value.square().mean().backward(), config, found)
            same([p.grad for p in twin.parameters()], [p.grad for p in eager.parameters()], f"gradients of {number}")
            for optimizer in optimizers:
                optimizer.step()
        same(twin.state_dict(), eager.state_dict(), f"state after step {number}")
    eager.eval()
    evaluated = jit(twin.eval(), config)
    same(called(evaluated, config, inputs[0]), eager(inputs[0]), "output in evaluation")
    same(twin.state_dict(), eager.state_dict(), "state after evaluation")


# --- networks


class Residual(nn.Module):
    """ResNet-18's block: BatchNorm, in-place ReLU and an in-place addition of the shortcut."""

    def __init__(self, channels: int, out: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(channels, out, 3, stride, 1, bias=False)
        self.norm1, self.norm2 = nn.BatchNorm2d(out), nn.BatchNorm2d(out)
        self.conv2 = nn.Conv2d(out, out, 3, 1, 1, bias=False)
        self.relu = nn.ReLU(inplace=True)
        short = [nn.Conv2d(channels, out, 1, stride, bias=False), nn.BatchNorm2d(out)]
        self.shortcut = nn.Identity() if (channels, stride) == (out, 1) else nn.Sequential(*short)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = self.relu(self.norm1(self.conv1(x)))
        out = self.norm2(self.conv2(out))
        out += self.shortcut(x)
        return self.relu(out)


class ResNet(nn.Module):
    """A stem, two blocks and a head of ResNet-18, small."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 8, 3, 2, 1, bias=False), nn.BatchNorm2d(8), nn.ReLU(inplace=True))
        self.blocks = nn.Sequential(Residual(8, 8, 1), Residual(8, 16, 2))
        self.head = nn.Linear(16, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = functional.max_pool2d(self.stem(x), 3, 2, 1)
        return self.head(self.blocks(x).mean((2, 3)))


class InvertedResidual(nn.Module):
    """MobileNetV2's block: expand, depthwise, project; in-place ReLU6."""

    def __init__(self, channels: int, out: int, stride: int) -> None:
        super().__init__()
        wide = channels * 2
        layers: list[nn.Module] = []
        for conv in (nn.Conv2d(channels, wide, 1, bias=False), nn.Conv2d(wide, wide, 3, stride, 1, groups=wide)):
            layers += [conv, nn.BatchNorm2d(wide), nn.ReLU6(inplace=True)]
        self.layers = nn.Sequential(*layers, nn.Conv2d(wide, out, 1, bias=False), nn.BatchNorm2d(out))
        self.skip = stride == 1 and channels == out

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.layers(x) if self.skip else self.layers(x)


def mobile_net() -> nn.Module:
    blocks = [InvertedResidual(4, 4, 1), InvertedResidual(4, 8, 2)]
    return nn.Sequential(nn.Conv2d(3, 4, 3, 2, 1), nn.BatchNorm2d(4), nn.ReLU6(inplace=True), *blocks)


def images(count: int) -> list[torch.Tensor]:
    return [randn(3, 3, 12, 12, seed=seed) for seed in range(count)]


@every_config
@pytest.mark.parametrize("make", [ResNet, mobile_net])
def test_convolutional_network(make: Callable[[], nn.Module], config: Config) -> None:
    trained(make, images(2), config)


NORMS = {
    "batch1d": (lambda: nn.BatchNorm1d(4), (5, 4)),
    "batch1d_sequence": (lambda: nn.BatchNorm1d(4), (5, 4, 3)),
    "batch2d": (lambda: nn.BatchNorm2d(4), (3, 4, 3, 2)),
    "batch3d": (lambda: nn.BatchNorm3d(2), (2, 2, 3, 2, 2)),
    "batch_momentum": (lambda: nn.BatchNorm2d(4, momentum=0.5, affine=False), (3, 4, 3, 2)),
    "instance1d": (lambda: nn.InstanceNorm1d(4, affine=True, track_running_stats=True), (3, 4, 5)),
    "instance2d": (lambda: nn.InstanceNorm2d(4, affine=True, track_running_stats=True), (2, 4, 3, 3)),
    "instance3d": (lambda: nn.InstanceNorm3d(2, track_running_stats=True), (2, 2, 3, 2, 2)),
}


@every_config
@pytest.mark.parametrize("name", NORMS)
def test_running_statistics(name: str, config: Config) -> None:
    make, shape = NORMS[name]
    trained(make, [randn(*shape, seed=seed) * (seed + 1) for seed in range(3)], config)


# --- optimizers: the formulas of torch.optim as functions of tensors, against torch.optim


def sgd(p, g, state, step):
    (momentum,) = state
    g = g.add(p, alpha=0.01)
    momentum.mul_(0.9).add_(g)
    p.add_(momentum, alpha=-0.1)


def adam(p, g, state, step):
    mean, square = state
    step.add_(1)
    mean.lerp_(g, 1 - 0.9)
    square.mul_(0.999).addcmul_(g, g, value=1 - 0.999)
    denominator = (square.sqrt() / (1 - 0.999**step).sqrt()).add_(1e-8)
    p.sub_(0.1 / (1 - 0.9**step) * mean / denominator)


def adamw(p, g, state, step):
    p.mul_(1 - 0.1 * 0.01)
    adam(p, g, state, step)


def rmsprop(p, g, state, step):
    (square,) = state
    square.mul_(0.99).addcmul_(g, g, value=1 - 0.99)
    p.addcdiv_(g, square.sqrt().add_(1e-8), value=-0.1)


def adagrad(p, g, state, step):
    (total,) = state
    step.add_(1)
    total.addcmul_(g, g, value=1)
    p.sub_(0.1 / (1 + (step - 1) * 0.02) * g / total.sqrt().add_(1e-10))


OPTIMIZERS = {
    "SGD": (sgd, 1, lambda ps: torch.optim.SGD(ps, 0.1, momentum=0.9, weight_decay=0.01)),
    "Adam": (adam, 2, lambda ps: torch.optim.Adam(ps, 0.1)),
    "AdamW": (adamw, 2, lambda ps: torch.optim.AdamW(ps, 0.1, weight_decay=0.01)),
    "RMSprop": (rmsprop, 1, lambda ps: torch.optim.RMSprop(ps, 0.1)),
    "Adagrad": (adagrad, 1, lambda ps: torch.optim.Adagrad(ps, 0.1, lr_decay=0.02)),
}


def over_parameters(formula: Callable) -> Callable:
    """One step over all parameters, which is what one compiles."""

    def step(params, gradients, states, steps):
        for p, g, state, count in zip(params, gradients, states, steps):
            formula(p, g, state, count)

    return step


@every_config
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_optimizer(name: str, config: Config) -> None:
    formula, buffers, make = OPTIMIZERS[name]
    shapes = [(3, 4), (5,), (2, 2, 2)]
    reference = [nn.Parameter(randn(*shape, seed=i)) for i, shape in enumerate(shapes)]
    params = [p.detach().clone() for p in reference]
    states = [[torch.zeros_like(p) for _ in range(buffers)] for p in params]
    steps = [torch.zeros((), dtype=torch.float64) for _ in params]
    optimizer, compiled = make(reference), jit(over_parameters(formula), config)
    for number in range(4):
        for i, p in enumerate(reference):
            p.grad = randn(*p.shape, seed=10 * number + i)
        optimizer.step()
        called(compiled, config, params, [p.grad for p in reference], states, steps)
        same(params, [p.detach() for p in reference], f"parameters after step {number}")


@every_config
def test_moving_average_of_a_model(config: Config) -> None:
    """Against torch.optim.swa_utils."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3)).double()
    average = torch.optim.swa_utils.AveragedModel(
        model, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.9), use_buffers=False
    )
    mine = [p.detach().clone() for p in model.parameters()]

    def update(averages, params):
        for a, p in zip(averages, params):
            a.lerp_(p, 1 - 0.9)

    compiled = jit(update, config)
    average.update_parameters(model)  # the first copies
    for number in range(3):
        with torch.no_grad():
            for i, p in enumerate(model.parameters()):
                p.add_(randn(*p.shape, seed=10 * number + i))
        average.update_parameters(model)
        called(compiled, config, mine, [p.detach() for p in model.parameters()])
        same(mine, [p.detach() for p in average.module.parameters()], f"averages after step {number}")


@every_config
@pytest.mark.parametrize("bad", [None, math.inf, -math.inf, math.nan])
def test_unscaling_of_gradients(bad: float | None, config: Config) -> None:
    """Against the kernel behind torch.amp.GradScaler.unscale_."""

    def unscale(gradients, found, inverse):
        for g in gradients:
            finite = (g - g).eq(0)
            found.copy_(torch.maximum(found, 1 - finite.all().to(found.dtype)))
            g.mul_(inverse)

    gradients = [randn(3, 4).float(), randn(5, seed=1).float()]
    if bad is not None:
        gradients[1][2] = bad
    expected, expected_found = [g.clone() for g in gradients], torch.zeros(1)
    inverse = torch.tensor(1 / 128)
    torch._amp_foreach_non_finite_check_and_unscale_(expected, expected_found, inverse)
    found = torch.zeros(1)
    called(jit(unscale, config), config, gradients, found, inverse)
    assert torch.equal(found, expected_found)
    if bad is None:
        same(gradients, expected, "gradients")


@every_config
def test_gradient_accumulation(config: Config) -> None:
    """Gradients of micro-batches, added up in place by a compiled function, against one backward of the whole batch."""
    eager, twin = twins(lambda: nn.Sequential(nn.Linear(4, 3), nn.ReLU(inplace=True), nn.Linear(3, 2)))
    compiled, x = jit(twin, config), randn(6, 4)
    eager(x).square().sum().backward()
    totals = [torch.zeros_like(p) for p in twin.parameters()]

    def accumulate(totals, gradients):
        for total, gradient in zip(totals, gradients):
            total.add_(gradient)
            gradient.zero_()

    adding = jit(accumulate, config)
    for part in x.split(2):
        called(compiled, config, part).square().sum().backward()
        called(adding, config, totals, [p.grad for p in twin.parameters()])
    same(totals, [p.grad for p in eager.parameters()], "accumulated gradients")
    assert all(not p.grad.any() for p in twin.parameters())


# --- language models with caches


def rope(length: int, size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The cosines and sines of rotary position embeddings, as litgpt builds them."""
    theta = 1.0 / 10000 ** (torch.arange(0, size, 2, dtype=torch.float64) / size)
    angles = torch.outer(torch.arange(length, dtype=torch.float64), theta).repeat(1, 2)
    return angles.cos(), angles.sin()


def rotated(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    half = x.size(-1) // 2
    return x * cos + torch.cat((-x[..., half:], x[..., :half]), dim=-1) * sin


class Attention(nn.Module):
    """Causal attention with a cache of keys and values, written at the positions of the new tokens."""

    def __init__(self, size: int, heads: int, length: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv, self.project = nn.Linear(size, 3 * size), nn.Linear(size, size)
        for name in ("keys", "values"):
            self.register_buffer(name, torch.zeros(1, heads, length, size // heads))

    def forward(self, x, cos, sin, mask, positions):
        b, t, c = x.shape
        q, k, v = self.qkv(x).view(b, t, 3, self.heads, c // self.heads).permute(2, 0, 3, 1, 4).unbind(0)
        q, k = rotated(q, cos, sin), rotated(k, cos, sin)
        keys = self.keys.index_copy_(2, positions, k)
        values = self.values.index_copy_(2, positions, v)
        scores = q @ keys.transpose(-1, -2) / math.sqrt(q.size(-1))
        scores = scores.masked_fill(~mask, -1e9)
        return self.project((scores.softmax(-1) @ values).transpose(1, 2).reshape(b, t, c))


class Block(nn.Module):
    def __init__(self, size: int, heads: int, length: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(size), nn.LayerNorm(size)
        self.attention = Attention(size, heads, length)
        self.mlp = nn.Sequential(nn.Linear(size, 2 * size), nn.GELU(), nn.Linear(2 * size, size))

    def forward(self, x, *rest):
        x = x + self.attention(self.norm1(x), *rest)
        return x + self.mlp(self.norm2(x))


class GPT(nn.Module):
    """A small GPT after litgpt's design: rotary embeddings and a mask in buffers, a cache per block."""

    def __init__(self, vocabulary: int = 11, size: int = 8, heads: int = 2, length: int = 8) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(vocabulary, size), nn.Linear(size, vocabulary)
        self.blocks = nn.ModuleList(Block(size, heads, length) for _ in range(2))
        cos, sin = rope(length, size // heads)
        self.register_buffer("cos", cos)
        self.register_buffer("sin", sin)
        self.register_buffer("mask", torch.ones(length, length).tril().bool())

    def forward(self, tokens, positions):
        cos, sin = self.cos.index_select(0, positions), self.sin.index_select(0, positions)
        mask = self.mask.index_select(0, positions)
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x, cos, sin, mask, positions)
        return self.head(x)


def generated(model: Callable, prompt: torch.Tensor, count: int, config: Config | None) -> list[torch.Tensor]:
    """The logits of a prompt and of the tokens that greedy decoding adds."""
    positions, logits = torch.arange(prompt.size(1)), []
    with torch.no_grad():
        for _ in range(count):
            out = model(prompt, positions) if config is None else called(model, config, prompt, positions)
            logits.append(out)
            prompt, positions = out[:, -1:].argmax(-1), positions[-1:] + 1
    return logits


@every_config
def test_generation_with_a_cache(config: Config) -> None:
    eager, twin = twins(GPT)
    prompt = torch.tensor([[1, 4, 2]])
    expected = generated(eager, prompt, 4, None)
    same(generated(jit(twin, config), prompt, 4, config), expected, "logits")
    same(twin.state_dict(), eager.state_dict(), "caches")


class RotaryCache(nn.Module):
    """Rotary embeddings whose cache is filled in place for the positions that are asked for."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("cos", torch.zeros(8, 4))
        self.register_buffer("sin", torch.zeros(8, 4))
        self.register_buffer("inverse", 1.0 / 10000 ** (torch.arange(0, 4, 2) / 4))

    def forward(self, x: torch.Tensor, start: torch.Tensor) -> torch.Tensor:
        length = x.size(1)
        angles = torch.outer(torch.arange(length).to(x.dtype) + start, self.inverse).repeat(1, 2)
        self.cos[:length] = angles.cos()
        self.sin[:length].copy_(angles.sin())
        return rotated(x, self.cos[:length], self.sin[:length])


@every_config
def test_rotary_cache(config: Config) -> None:
    eager, twin = twins(RotaryCache)
    compiled = jit(twin, config)
    for number, length in enumerate((5, 5, 3, 8)):
        x, start = randn(2, length, 4, seed=number), torch.tensor(float(number), dtype=torch.float64)
        same(called(compiled, config, x, start), eager(x, start), f"output of call {number}")
        same(twin.state_dict(), eager.state_dict(), f"caches after call {number}")


@every_config
def test_litgpt(config: Config) -> None:
    """litgpt's own GPT with its cache, prompt and decoding."""
    litgpt = pytest.importorskip("litgpt")
    settings = litgpt.Config(
        block_size=16, vocab_size=16, padded_vocab_size=16, n_layer=2, n_head=2, n_embd=16, rotary_percentage=1.0
    )

    def make() -> nn.Module:
        model = litgpt.GPT(settings)
        model.set_kv_cache(batch_size=1, dtype=torch.float64)
        return model.eval()

    eager, twin = twins(make)
    prompt = torch.tensor([[1, 4, 2]])
    same(generated(jit(twin, config), prompt, 4, config), generated(eager, prompt, 4, None), "logits")
    same(twin.state_dict(), eager.state_dict(), "caches")


@every_config
def test_transformers_llama(config: Config) -> None:
    """transformers' Llama, trained for some steps."""
    transformers = pytest.importorskip("transformers")
    settings = transformers.LlamaConfig(
        vocab_size=16, hidden_size=16, intermediate_size=16, num_hidden_layers=2, num_attention_heads=2
    )
    eager, twin = twins(lambda: transformers.LlamaForCausalLM(settings))
    compiled = jit(twin, config)
    tokens = torch.tensor([[1, 4, 2, 5]])
    for _ in range(2):
        expected, found = (
            eager(tokens, use_cache=False).logits,
            called(lambda t: compiled(t, use_cache=False), config, tokens),
        )
        same(found["logits"], expected, "logits")
        expected.square().sum().backward()
        found["logits"].square().sum().backward()
        same([p.grad for p in twin.parameters()], [p.grad for p in eager.parameters()], "gradients")
