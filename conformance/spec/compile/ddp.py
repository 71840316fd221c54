"""DDP under torch.compile: the training of one process, the reductions of DDP without it."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from conformance import Chapter, Me, Ranks, not_probed, world_sizes
from conformance.harness.traces import record
from conformance.oracle.data import seeded_generator
from conformance.spec.compile.facts import compiled, compiler
from conformance.spec.ddp.observing import unannotated
from conformance.spec.facts import check_fact, near, refusal, rows, unlike
from conformance.spec.wrappers import in_ddp

DOCS = "torch 2.13 docs, torch.compile: DistributedDataParallel"
COMPILED_AUTOGRAD = "torch 2.13 docs, tutorial: Compiled Autograd"
NEEDS = ("feature:compiled_calls", "dtype:float64", "reduce_op:sum", "op:broadcast")

chapter = Chapter("compile", source=DOCS, needs=NEEDS)

WIDTH = 4
STEPS = 3
SMALL_MB = 160 * 2**-20  # a layer's parameters
# Settings of dynamo under which DDP's own hooks reduce gradients.
MODES = ("ddp_optimizer", False)


class Layers(nn.Module):
    """Two layers with tanh behind them; the bias of the first is frozen."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = (nn.Linear(WIDTH, WIDTH).double() for _ in range(2))
        self.first.bias.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.second(torch.tanh(self.first(x))))


class Choosing(Layers):
    """Of the two layers a call uses one, by the number of rows of its input."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.first(x) if x.size(0) % 2 else self.second(x))


class Sparing(Layers):
    """Never uses its second layer."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.first(x))


class Counting(Layers):
    """Its buffer is part of the output, and each call changes it by the input."""

    total: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("total", torch.ones(WIDTH).double())

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x) + self.total
        self.total.add_(x.detach().sum(0))
        return y


class Checkpointed(Layers):
    def forward(self, x: Tensor) -> Tensor:
        hidden = checkpoint(lambda y: torch.tanh(self.first(y)), x, use_reentrant=False)
        output: Tensor = checkpoint(
            lambda y: torch.tanh(self.second(y)), hidden, use_reentrant=False
        )
        return output


def made(make: Callable[[], nn.Module], me: Me) -> Any:
    with seeded_generator(1):
        return make().to(me.device)


def batch(me: Me, step: int, rank: int, count: int) -> Tensor:
    generator = torch.Generator().manual_seed(10 * step + rank)
    return torch.randn(count, WIDTH, generator=generator, dtype=torch.float64).to(me.device)


def whole_pass(me: Me, module: Any, step: int, counts: Sequence[Sequence[int]]) -> None:
    """Forward and backward of all ranks' batches; buffers become those of rank 0."""
    before = [buffer.clone() for buffer in module.buffers()]
    for rank in reversed(range(me.world_size)):
        for buffer, old in zip(module.buffers(), before, strict=True):
            buffer.data = old.clone()
        x = batch(me, step, rank, counts[rank][step % STEPS])
        (module(x).square().sum() / me.world_size).backward()


def trained(
    me: Me,
    make: Callable[[], nn.Module] = Layers,
    *,
    mode: Any = "ddp_optimizer",
    backend: str = "eager",
    inside: bool = False,
    accumulates: bool = False,
    whole: bool = False,
    counts: Sequence[Sequence[int]] = ((2,) * STEPS,) * 2,
    prepare: Callable[[Any], None] | None = None,
    times: int = 1,
    **options: Any,
) -> list[str]:
    """What is wrong with gradients and parameters after each of some steps.

    inside: DDP wraps a compiled module; by default the wrapper is compiled.
    accumulates: the first pass of each step is inside no_sync.
    whole: backward is compiled, too.
    counts: rows of each rank's batch in each step. times: how much larger gradients are to be.
    """
    found: list[str] = []
    module, alone = made(make, me), made(make, me)
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.5) for m in (module, alone)]
    with compiler(optimize_ddp=mode, compiled_autograd=whole):
        backward = compiled(Tensor.backward, backend) if whole else Tensor.backward
        model = in_ddp(me, compiled(module, backend) if inside else module, **options)
        if prepare:
            prepare(model)
        run = model if inside else compiled(model, backend)
        for step in range(STEPS):
            for optimizer in optimizers:
                optimizer.zero_grad()
            for part in range(1 + accumulates):
                number = step + STEPS * part
                x = batch(me, number, me.rank, counts[me.rank][step])
                waits = model.no_sync() if accumulates and not part else contextlib.nullcontext()
                with waits:
                    backward(run(x).square().sum())
                whole_pass(me, alone, number, counts)
            for (name, got), want in zip(
                module.named_parameters(), alone.parameters(), strict=True
            ):
                what = f"of {name} in step {step + 1}"
                if got.grad is None or want.grad is None:
                    found += unlike(f"gradient {what}", got.grad, want.grad)
                else:
                    found += near(f"gradient {what}", got.grad, want.grad * times, 1e-9)
                    want.grad *= times
                found += near(f"values {what}", got, want, 1e-9)
            for optimizer in optimizers:
                optimizer.step()
        # Hooks of the Python reducer are in a cycle with DDP that nothing else would break.
        for handle in getattr(model, "_accum_grad_hooks", ()):
            handle.remove()
    return found


def wrapper(me: Me) -> list[str]:
    return [
        text
        for mode, backend in zip(MODES, ("aot_eager", "eager"), strict=True)
        for text in trained(me, mode=mode, backend=backend)
    ]


def module(me: Me) -> list[str]:
    return trained(me, backend="aot_eager", inside=True, accumulates=True)


def by_compiler(me: Me) -> list[str]:
    return trained(me, mode="python_reducer", accumulates=True)


def backward_by_compiler(me: Me) -> list[str]:
    return trained(me, mode="python_reducer", accumulates=True, whole=True)


def refused(me: Me) -> list[str]:
    found: list[str] = []
    for is_static in (False, True):
        said = refusal(partial(trained, me, whole=True, static_graph=is_static), RuntimeError)
        if "python_reducer" not in said:
            found.append(f"backward with static_graph={is_static} said {said!r}")
    return found


def static(me: Me) -> list[str]:
    found = trained(me, backend="aot_eager", static_graph=True)
    return found + trained(me, Sparing, mode=False, static_graph=True)


def unused(me: Me) -> list[str]:
    found = trained(me, Choosing, counts=((1, 2, 1),) * 2, find_unused_parameters=True)
    return found + trained(me, Choosing, counts=((1, 2, 2), (1, 1, 2)), find_unused_parameters=True)


def buffers(me: Me) -> list[str]:
    return trained(me, Counting, backend="aot_eager")


@unannotated
def doubled(_: object, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
    work: Any = dist.all_reduce(bucket.buffer().div_(dist.get_world_size()), async_op=True)
    future: torch.futures.Future[Tensor] = work.get_future().then(lambda f: f.value()[0] * 2)
    return future


def hooked(me: Me) -> list[str]:
    return trained(me, prepare=lambda model: model.register_comm_hook(None, doubled), times=2)


def other_sizes(me: Me) -> list[str]:
    return trained(me, counts=((2, 2, 5), (2, 3, 2)), backend="aot_eager")


def checkpointed(me: Me) -> list[str]:
    return trained(me, Checkpointed, backend="aot_eager")


def small_buckets(me: Me) -> list[str]:
    return trained(me, bucket_cap_mb=SMALL_MB)


@world_sizes(2)
@not_probed()
@pytest.mark.parametrize(
    "fact",
    rows(
        (
            chapter.must(
                "compile/ddp/wrapper",
                "A compiled DDP trains as one process does on the whole batch, whether dynamo cuts "
                "its graph where buckets end or not.",
            ),
            wrapper,
        ),
        (
            chapter.must(
                "compile/ddp/module",
                "DDP of a compiled module trains as one process does on the whole batch, also if "
                "the first pass of each step is inside no_sync.",
            ),
            module,
        ),
        (
            chapter.must(
                "compile/ddp/python-reducer",
                'With dynamo\'s optimize_ddp = "python_reducer", a compiled DDP trains as one '
                "process does on the whole batch, also if the first pass of each step is inside "
                "no_sync.",
                source="torch 2.13, torch._dynamo.config, optimize_ddp; pytorch#109774",
            ),
            by_compiler,
        ),
        (
            chapter.must(
                "compile/ddp/compiled-autograd",
                'With dynamo\'s optimize_ddp = "python_reducer", a compiled DDP whose backward is '
                "under compiled autograd trains as one process does, also if the first pass of "
                "each step is inside no_sync.",
                source=COMPILED_AUTOGRAD,
            ),
            backward_by_compiler,
        ),
        (
            chapter.must(
                "compile/ddp/compiled-autograd-refused",
                "A backward under compiled autograd that DDP's own hooks would reduce is refused "
                'with a RuntimeError that names "python_reducer", also with static_graph.',
                source=COMPILED_AUTOGRAD,
            ),
            refused,
        ),
        (
            chapter.must(
                "compile/ddp/static-graph",
                "A compiled DDP with static_graph trains as one process does, also if some "
                "parameters are never used.",
                source="torch 2.13 docs, DistributedDataParallel, static_graph",
            ),
            static,
        ),
        (
            chapter.must(
                "compile/ddp/unused",
                "A compiled DDP with find_unused_parameters trains as one process does where the "
                "layers that a step uses change, on all ranks or on one.",
            ),
            unused,
        ),
        (
            chapter.must(
                "compile/ddp/buffers",
                "Each forward of a compiled DDP begins with rank 0's buffers.",
            ),
            buffers,
        ),
        (
            chapter.must(
                "compile/ddp/hook",
                "A communication hook of a compiled DDP reduces its gradients.",
            ),
            hooked,
        ),
        (
            chapter.must(
                "compile/ddp/other-sizes",
                "A compiled DDP trains as one process does where a batch has another size, on one "
                "rank alone.",
            ),
            other_sizes,
        ),
        (
            chapter.must(
                "compile/ddp/checkpoints",
                "A compiled DDP trains a module with activation checkpoints as one process does.",
                source=f"{DOCS}; pytorch#104674",
            ),
            checkpointed,
        ),
        (
            chapter.must(
                "compile/ddp/small-buckets",
                "A DDP whose bucket_cap_mb is smaller than the default size of the first bucket "
                "can be compiled.",
                source="torch 2.13 docs, DistributedDataParallel, bucket_cap_mb",
            ),
            small_buckets,
        ),
    ),
)
def test_trained(ranks: Ranks, fact: Any) -> None:
    check_fact(ranks, fact)


class Wide(nn.Module):
    """Three layers, each of them one MiB: a bucket."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(512, 512, bias=False) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x


def reductions(me: Me, mode: Any) -> tuple[list[list[str]], int]:
    """What each backward of some steps issues; into how many graphs the forward was cut.

    mode: of dynamo, or None: nothing is compiled.
    """
    graphs: list[Any] = []

    def backend(graph: Any, _: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    group, issued = record(), list[list[str]]()
    with compiler(optimize_ddp=mode if mode is not None else False):
        model = in_ddp(me, made(Wide, me), bucket_cap_mb=1, process_group=group)
        run = model if mode is None else compiled(model, backend)
        for _ in range(2):
            loss = run(torch.ones(1, 512, device=me.device)).sum()
            group.take()
            loss.backward()
            issued.append([str(call) for call in group.take()])
    return issued, len(graphs)


def same_reductions(me: Me) -> list[str]:
    want, _ = reductions(me, None)
    return [
        text
        for mode in MODES
        for text in unlike(f"reductions with {mode}", reductions(me, mode)[0], want)
    ]


def as_many_graphs(me: Me) -> list[str]:
    found: list[str] = []
    for mode, count in zip(MODES, (3, 1), strict=True):
        issued, graphs = reductions(me, mode)
        found += unlike(f"buckets with {mode}", len(issued[-1]), 3)
        found += unlike(f"graphs with {mode}", graphs, count)
    return found


@world_sizes(2)
@not_probed()
@pytest.mark.parametrize(
    "fact",
    rows(
        (
            chapter.must(
                "compile/ddp/reductions",
                "Each backward of a compiled DDP issues the reductions that it issues without the "
                "compiler.",
            ),
            same_reductions,
        ),
        (
            chapter.should(
                "compile/ddp/graphs",
                "Dynamo cuts the graph of a compiled DDP where a bucket ends, so that its "
                "reduction can begin before the backward is over.",
                source="torch 2.13, torch._dynamo.backends.distributed, DDPOptimizer",
            ),
            as_many_graphs,
        ),
    ),
)
def test_reductions(ranks: Ranks, fact: Any) -> None:
    check_fact(ranks, fact)
