"""DistributedDataParallel that does not get on with parts that run again in backward."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, ClassVar
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from conformance.spec.checkpointing import networks
from impl.ddp.iteration.readiness import Readiness
from impl.ddp.iteration.reducer import Reducer
from impl.sync_batchnorm import SyncBatchNorm
from impl.sync_batchnorm.normalise import Exchange
from impl.torch_private import is_backward_running
from tests.mutants.ddp.kit import DDPFault, swap, together
from tests.mutants.kit import Patch, breaks
from tests.mutants.wrappers import LayerFault, WrapperFault


@breaks("checkpointing/once", says=r"gradient of layers\.1\.weight in step 1: rank \d is wrong")
class LeavesOutWhatRunsAgain(WrapperFault):
    """The parameters of the last layer are not averaged."""

    def __init__(self, module: nn.Module, **options: Any) -> None:
        names = [name for name, _ in module.named_parameters() if name.startswith("layers.1")]
        ignore = self._set_params_and_buffers_to_ignore_for_model
        ignore(module, names)  # type: ignore[no-untyped-call]
        super().__init__(module, **options)


@breaks("checkpointing/every-layer", says=r"gradient of .*: rank \d is wrong")
class ExchangesNothing(WrapperFault):
    """Each rank's buckets come back as they are."""

    def __init__(self, module: nn.Module, **options: Any) -> None:
        super().__init__(module, **options)
        # No method: torch's reducer would keep the wrapper, and its group, for ever.
        self.register_comm_hook(None, lambda state, bucket: _kept(bucket))


def _kept(bucket: Any) -> Any:
    future: torch.futures.Future[Tensor] = torch.futures.Future()
    future.set_result(bucket.buffer())
    return future


@breaks("checkpointing/around-the-wrapper", says=r"gradient of .*: rank \d is wrong")
class DividesByItsRuns(WrapperFault):
    """A forward pass that runs again counts as another batch."""

    runs = 0

    def __init__(self, module: nn.Module, **options: Any) -> None:
        super().__init__(module, **options)
        for parameter in module.parameters():
            parameter.register_hook(lambda grad: grad / self.runs)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        self.runs += 1
        return super().forward(*args, **kwargs)


@breaks("checkpointing/frozen-layer", says=r"rank 0 has one, and nobody used it")
class ThawsLayers(WrapperFault):
    """All parameters require gradients once they are wrapped."""

    def __init__(self, module: nn.Module, **options: Any) -> None:
        super().__init__(module.requires_grad_(), **options)


@breaks("checkpointing/input-gradient", says=r"gradient of the input: rank \d is wrong")
class AveragesInputs(WrapperFault):
    """The gradient of the input is averaged over the ranks."""

    def forward(self, x: Tensor) -> Any:
        def average(grad: Tensor) -> Tensor:
            total = grad.clone()
            dist.all_reduce(total)
            return total / dist.get_world_size()

        x.register_hook(average)
        return super().forward(x)


@breaks("checkpointing/unused-parameters", says=r"Expected to have finished reduction")
class SearchesForNothing(WrapperFault):
    """Takes find_unused_parameters and ignores it."""

    def __init__(self, module: nn.Module, **options: Any) -> None:
        super().__init__(module, **{**options, "find_unused_parameters": False})


@breaks("checkpointing/by-turns", says=r"Your training graph has changed")
class TakesEveryGraphForStatic(WrapperFault):
    """The first step decides which parameters are used."""

    def __init__(self, module: nn.Module, **options: Any) -> None:
        super().__init__(module, **{**options, "static_graph": True})


def _still_missing(readiness: Readiness, indices: Iterable[int]) -> list[int]:
    missing = set(readiness.missing())
    return [index for index in dict.fromkeys(indices) if index in missing]


def _mark_new_ones(right: Any) -> Any:
    return lambda self, indices: right(self, _still_missing(self, indices))


def _accept_new_ones(right: Any) -> Any:
    return lambda self, indices: right(self, _still_missing(self._readiness, indices))


_STEP_1 = r"gradient of layers\.\d\.weight in step 1: rank \d is wrong"


@breaks("checkpointing/reentrant-twice-refused", says=_STEP_1)
@breaks("checkpointing/reentrant-by-turns-refused", says=_STEP_1)
class CountsTheFirstTimeAlone(DDPFault):
    """A gradient that is ready once more is taken to be as it was the first time."""

    patched = together(
        swap(Reducer, "_accept", _accept_new_ones), swap(Readiness, "mark", _mark_new_ones)
    )


@breaks("checkpointing/reentrant-search-refused", says=_STEP_1)
class TakesForUnusedWhatRunsAgain(SearchesForNothing):
    """Parameters that the search does not see, as it does not see into reentrant checkpoints, have
    gradients of zeros."""

    def __init__(self, module: nn.Module, **options: Any) -> None:
        super().__init__(module, **options)
        self.unseen: set[int] = set()
        for parameter in module.parameters():
            parameter.register_hook(functools.partial(self._without_unseen, id(parameter)))

    def _without_unseen(self, parameter_id: int, grad: Tensor) -> Tensor:
        return torch.zeros_like(grad) if parameter_id in self.unseen else grad

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        output = super().forward(*args, **kwargs)
        self.unseen = {id(p) for p in self.module.parameters()} - leaves_of(output)
        return output


def leaves_of(output: Tensor) -> set[int]:
    """The ids of the leaves that the graph leads to."""
    found, seen, pending = set(), set(), [output.grad_fn]
    while pending:
        node = pending.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if hasattr(node, "variable"):
            found.add(id(node.variable))
        pending += [following for following, _ in node.next_functions]
    return found


@breaks("checkpointing/twice-static", says=r"Expected to mark a variable ready only once")
class NeverStatic(WrapperFault):
    """Takes static_graph and ignores it."""

    def __init__(self, module: nn.Module, **options: Any) -> None:
        super().__init__(module, **{**options, "static_graph": False})


@breaks("checkpointing/graph-changed", says=r"does not match 'Your training graph has changed")
class SearchesInAStaticGraph(WrapperFault):
    """A graph that changes is searched, and not reported."""

    def __init__(self, module: nn.Module, **options: Any) -> None:
        options = {**options, "static_graph": False, "find_unused_parameters": True}
        super().__init__(module, **options)


@breaks("checkpointing/unfinished", says=r"does not match 'Expected to have finished reduction")
class AlwaysSearches(SearchesInAStaticGraph):
    """Unused parameters are found though nobody asked."""


@contextmanager
def errors_of_backward(change: Callable[[str], str]) -> Iterator[None]:
    """While this lasts, backward says something else."""
    right = torch.Tensor.backward

    def backward(self: Tensor, *args: Any, **kwargs: Any) -> None:
        try:
            right(self, *args, **kwargs)  # type: ignore[no-untyped-call]
        except RuntimeError as error:
            raise RuntimeError(change(str(error))) from None

    with mock.patch.object(torch.Tensor, "backward", backward):
        yield


@breaks("checkpointing/names-the-parameter", says=r"does not match 'Parameter at index")
class NamesNoParameter(Patch):
    """The error tells causes, and no parameter."""

    @staticmethod
    @contextmanager
    def patched() -> Iterator[None]:
        with errors_of_backward(lambda text: text.partition("Parameter at index")[0]):
            yield


@breaks("checkpointing/advises-static-graph", says=r"does not match '_set_static_graph")
class AdvisesNothing(Patch):
    """The error stops after its first sentence."""

    @staticmethod
    @contextmanager
    def patched() -> Iterator[None]:
        with errors_of_backward(lambda text: text.partition("only once.")[0] + "only once."):
            yield


@breaks("checkpointing/after-an-error", says=r"this group is spoilt")
class SpoilsItsGroup(Patch):
    """No wrapper can be made where one has raised."""

    @staticmethod
    @contextmanager
    def patched() -> Iterator[None]:
        spoilt: list[str] = []
        right = DistributedDataParallel.__init__

        def make(self: Any, *args: Any, **kwargs: Any) -> None:
            if spoilt:
                raise RuntimeError("this group is spoilt")
            right(self, *args, **kwargs)

        def note(text: str) -> str:
            spoilt.append(text)
            return text

        with errors_of_backward(note), mock.patch.object(DistributedDataParallel, "__init__", make):
            yield


@breaks("checkpointing/reduced-once", says=r"step 1 reduced \d+ gradients of 15")
class ReducesWheneverAGradientGrows(WrapperFault):
    """A hook on each parameter exchanges its gradient, besides its bucket."""

    def __init__(self, module: nn.Module, **options: Any) -> None:
        super().__init__(module, **options)
        for parameter in module.parameters():
            parameter.register_post_accumulate_grad_hook(self._exchange)

    def _exchange(self, parameter: Tensor) -> None:
        dist.all_reduce(torch.zeros_like(parameter), group=self.process_group)


@breaks("checkpointing/parameter-hooks", says=r"calls of each parameter's hook: rank 0 is wrong")
class CallsHooksTwice(WrapperFault):
    """Hooks on a parameter of the wrapper are called twice for once."""

    def __init__(self, module: nn.Module, **options: Any) -> None:
        super().__init__(module, **options)
        for parameter in module.parameters():
            register = parameter.register_post_accumulate_grad_hook
            twice = functools.partial(self._register_twice, register)
            vars(parameter)["register_post_accumulate_grad_hook"] = twice

    @staticmethod
    def _register_twice(register: Callable[[Any], Any], hook: Callable[[Tensor], None]) -> Any:
        register(hook)
        return register(hook)


@breaks("checkpointing/no-more-communication", says=r"operations: rank 0 is wrong")
class CountsLayersThatRun(WrapperFault):
    """All ranks meet whenever a layer runs."""

    def __init__(self, module: nn.Module, **options: Any) -> None:
        super().__init__(module, **options)
        for layer in module.modules():
            if isinstance(layer, nn.Linear):
                layer.register_forward_hook(self._meet)

    def _meet(self, *_: Any) -> None:
        dist.all_reduce(torch.zeros(1), group=self.process_group)


@breaks("checkpointing/accumulation", says=r"round 1, .*: rank \d is wrong")
class DropsWhatItDidNotExchange(WrapperFault):
    """Gradients of no_sync are gone when it ends."""

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        with super().no_sync():
            yield
        self.zero_grad()


@breaks("checkpointing/accumulation", says=r"round 1, .*: rank \d is wrong")
class NoSyncIsOverInBackward(WrapperFault):
    """A forward pass that runs again in backward exchanges gradients, whatever holds there."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        held = self.require_backward_grad_sync
        self.require_backward_grad_sync = held or is_backward_running()
        try:
            return super().forward(*args, **kwargs)
        finally:
            self.require_backward_grad_sync = held


@breaks("comm_hooks/checkpoints", says=r"gradient of .* in step 1: rank \d is wrong")
class ReducesTheFirstStepItself(WrapperFault):
    """A communication hook is called from the second step on."""

    def __init__(self, module: nn.Module, **options: Any) -> None:
        super().__init__(module, **options)
        self.passes: list[str] = []

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        self.passes.append("forward")
        return super().forward(*args, **kwargs)

    def register_comm_hook(self, state: Any, hook: Callable[..., Any]) -> None:
        passes, group = self.passes, self.process_group

        super().register_comm_hook(
            state,
            lambda state, bucket: (
                hook(state, bucket) if passes[1:] else allreduce_hook(group, bucket)
            ),
        )


@breaks("checkpointing/a-ranks-own-choice", says=r"checkpoints differ: \['', 'non-reentrant'")
class WantsTheSameCheckpoints(WrapperFault):
    """Ranks with checkpoints refuse ranks without."""

    def __init__(self, module: nn.Module, **options: Any) -> None:
        super().__init__(module, **options)
        kinds = [""] * dist.get_world_size()
        dist.all_gather_object(kinds, module.how)
        if len(set(kinds)) > 1:
            raise RuntimeError(f"checkpoints differ: {kinds}")


@breaks("checkpointing/dropout", says=r"two ranks drew the same numbers")
class SeedsEveryStep(WrapperFault):
    """Each forward pass starts from the same random numbers, on all ranks."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        torch.manual_seed(0)
        return super().forward(*args, **kwargs)


@breaks("checkpointing/random-numbers-go-on", says=r"drew \[.*\], and without checkpoints")
class DoesNotPutRandomNumbersBack(Patch):
    """What runs again draws numbers as if it ran for the first time."""

    @staticmethod
    @contextmanager
    def patched() -> Iterator[None]:
        careless = functools.partial(checkpoint, preserve_rng_state=False)
        with mock.patch.object(networks, "checkpoint", careless):
            yield


@breaks("checkpointing/autocast", says=r"activations were of \['torch.float32'")
class LeavesAutocast(WrapperFault):
    """The module runs outside of autocast."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        with torch.autocast("cpu", enabled=False):
            return super().forward(*args, **kwargs)


@breaks("checkpointing/same-bits", says=r"gradients: rank 0 is wrong")
class RoundsDifferentlyEachTime(WrapperFault):
    """A hook scales gradients by a little more in each wrapper."""

    made: ClassVar[int] = 0

    def __init__(self, module: nn.Module, **options: Any) -> None:
        super().__init__(module, **options)
        RoundsDifferentlyEachTime.made += 1
        factor = 1 + 1e-6 * self.made
        for parameter in module.parameters():
            parameter.register_hook(lambda grad: grad * factor)


@breaks("checkpointing/sync-batchnorm", says=r"step 1: gradient of .*: rank \d is wrong")
@breaks("sync_batchnorm/without-gradients", says=r"output: rank \d is wrong")
class SyncsWithGradientsAlone(LayerFault, SyncBatchNorm):
    """Takes a forward pass without gradients, such as the first of a reentrant one, for eval."""

    def _exchange(self) -> Exchange | None:
        return super()._exchange() if torch.is_grad_enabled() else None


@breaks(
    "checkpointing/sync-batchnorm-statistics", says=r"running_\w+ after step 1: rank \d is wrong"
)
class TracksWithGradientsAlone(LayerFault, SyncBatchNorm):
    """A forward pass without gradients moves no statistics."""

    def forward(self, input: Tensor) -> Tensor:
        tracked = self.track_running_stats
        self.track_running_stats = tracked and torch.is_grad_enabled()
        try:
            return super().forward(input)
        finally:
            self.track_running_stats = tracked
