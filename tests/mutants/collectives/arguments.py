"""Mutants of conformance/spec/collectives/arguments.py."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from impl.gloo import ProcessGroupGloo
from tests.mutants.kit import ForwardingGroup, GroupMutant, breaks
from tests.mutants.replacing import Replacing


@breaks("arguments/not-a-tensor", says=r"dist\.all_reduce\(wrong\)\nshould raise .*was taken")
class TakesAListForATensor(Replacing):
    """A list of one tensor is accepted in place of the tensor."""

    @staticmethod
    def all_reduce(right: Any, tensor: Any, *args: Any, **how: Any) -> Any:
        if isinstance(tensor, list):
            [tensor] = tensor
        return right(tensor, *args, **how)


@breaks("arguments/mixed-dtypes", says=r"should raise ValueError with .*was taken")
class ConvertsDtypes(Replacing):
    """all_gather converts its input to the dtype of the outputs."""

    @staticmethod
    def all_gather(right: Any, tensors: Any, tensor: Any, *args: Any, **how: Any) -> Any:
        if isinstance(tensor, torch.Tensor) and tensors and isinstance(tensors, list):
            tensor = tensor.to(tensors[0].dtype)
        return right(tensors, tensor, *args, **how)


@breaks("arguments/complex-and-its-parts", says=r"raised ValueError: .* different dtypes")
class RefusesComplexBesideItsParts(Replacing):
    """Complex tensors and real ones with their parts are refused as different dtypes."""

    @staticmethod
    def _ensure_all_tensors_same_dtype(right: Any, *tensors: Any) -> None:
        right(*tensors)
        lists = [x if isinstance(x, list) else [x] for x in tensors]
        if len({x.dtype for one in lists for x in one}) > 1:
            raise ValueError("Invalid usage of tensors with different dtypes")


@breaks("arguments/one-root", says=r"group_src=0\)\nshould raise ValueError .*was taken")
class PrefersTheGroupRankOfARoot(Replacing):
    """If a root is given by both ranks, the group rank is used and no error is raised."""

    @staticmethod
    def _canonicalize_group_rank(
        right: Any, group: Any, global_rank: Any = None, group_rank: Any = None, **how: Any
    ) -> Any:
        if group_rank is not None:
            global_rank = None
        return right(group, global_rank, group_rank, **how)


@breaks("arguments/root-in-group", says=r"dist\.broadcast\(k\.x\(\), k\.n\)\nshould .*was taken")
class RootsWrapAround(ForwardingGroup):
    """Root n of n ranks is taken for root 0."""

    def broadcast(self, tensors: Any, opts: Any) -> Any:
        opts.rootRank %= self.size()
        return super().broadcast(tensors, opts)


@breaks("arguments/all_gather", says=r"k\.n - 1\), k\.x\(\)\)\nshould raise .*was taken")
class AllGatherTakesShortLists(ForwardingGroup):
    """Tensors that have no output in the list are discarded."""

    def allgather(self, outputs: Any, inputs: Any, opts: Any) -> Any:
        missing = self.size() - len(outputs[0])
        spare = [torch.empty_like(inputs[0]) for _ in range(missing)]
        return super().allgather([[*outputs[0], *spare]], inputs, opts)


@breaks("arguments/all_gather_into_tensor", says=r"k\.n \+ 1\), k\.x\(\)\)\nshould .*was taken")
class AllGatherTakesLongerOutputs(ForwardingGroup):
    """An output may be longer than what is gathered."""

    def all_gather_single(self, output: Any, tensor: Any, opts: Any) -> Any:
        needed = self.size() * tensor.numel()
        if output.numel() > needed:
            output = output.view(-1)[:needed]
        return super().all_gather_single(output, tensor, opts)


@breaks("arguments/gather", says=r"dist\.gather\(k\.x\(\), None, k\.rank\)\nshould .*was taken")
class GatherTakesNoList(Replacing):
    """A destination without a list gathers nothing."""

    @staticmethod
    def gather(right: Any, tensor: Any, outputs: Any = None, dst: Any = None, **how: Any) -> Any:
        if not outputs and dst == dist.get_rank():
            return None
        return right(tensor, outputs, dst, **how)


@breaks("arguments/scatter", says=r"dist\.scatter\(k\.x\(\), None, k\.rank\)\nshould .*was taken")
class ScatterTakesNoList(Replacing):
    """A source without a list scatters nothing."""

    @staticmethod
    def scatter(right: Any, tensor: Any, inputs: Any = None, src: Any = None, **how: Any) -> Any:
        if not inputs and src == dist.get_rank():
            return None
        return right(tensor, inputs, src, **how)


@breaks("arguments/reduce_scatter", says=r"k\.xs\(k\.n - 1\)\)\nshould raise .*was taken")
@breaks("arguments/reduce_scatter-output", says=r"range\(k\.n\)\]\)\nshould .*was taken")
class ReduceScattersWhatFits(ForwardingGroup):
    """Missing inputs are taken for zeros, and longer ones are cut."""

    def reduce_scatter(self, outputs: Any, inputs: Any, opts: Any) -> Any:
        numel = outputs[0].numel()
        parts = [x if x.numel() <= numel else x.view(-1)[:numel] for x in inputs[0]]
        missing = self.size() - len(parts)
        zeros = [torch.zeros_like(outputs[0]) for _ in range(missing)]
        return super().reduce_scatter(outputs, [[*parts, *zeros]], opts)


@breaks("arguments/reduce_scatter_tensor", says=r"k\.n \+ 1\)\)\nshould raise .*was taken")
class ReduceScatterTakesLongerInputs(ForwardingGroup):
    """An input may be longer than what is scattered."""

    def reduce_scatter_single(self, output: Any, tensor: Any, opts: Any) -> Any:
        needed = self.size() * output.numel()
        if tensor.numel() > needed:
            tensor = tensor.view(-1)[:needed]
        return super().reduce_scatter_single(output, tensor, opts)


@breaks("arguments/all_to_all", says=r"k\.xs\(k\.n - 1\)\)\nshould raise .*was taken")
class AllToAllTakesShortLists(ForwardingGroup):
    """A rank that is not in the lists is sent zeros, and what it sends is discarded."""

    def alltoall(self, outputs: Any, inputs: Any, opts: Any) -> Any:
        return super().alltoall(self._filled(outputs), self._filled(inputs), opts)

    def _filled(self, tensors: Any) -> Any:
        missing = self.size() - len(tensors)
        return [*tensors, *(torch.zeros_like(tensors[0]) for _ in range(missing))]


@breaks("arguments/splits", says=r"\[2\] \* k\.n \+ \[0\]\)\nshould raise .*was taken")
class IgnoresSurplusSplits(ForwardingGroup):
    """Split sizes after the last rank's are ignored."""

    def all_to_all_single(self, output: Any, tensor: Any, out: Any, into: Any, opts: Any) -> Any:
        n = self.size()
        return super().all_to_all_single(output, tensor, out[:n], into[:n], opts)


@breaks("arguments/even-splits", says=r"2 \* k\.n \+ 1\)\)\nshould raise .*was taken")
class LeavesOutRowsThatDoNotDivide(ForwardingGroup):
    """Rows that the number of ranks does not divide are left out."""

    def all_to_all_single(self, output: Any, tensor: Any, out: Any, into: Any, opts: Any) -> Any:
        if not out and not into:
            output, tensor = (x[: len(x) // self.size() * self.size()] for x in (output, tensor))
        return super().all_to_all_single(output, tensor, out, into, opts)


@breaks("arguments/group-survives", says=r"raised RuntimeError: the group has failed before")
class RefusesEverythingAfterARefusal(ForwardingGroup):
    """After a refusal, the group refuses everything."""

    has_failed = False

    def forward(self, method: str, *args: Any, **kwargs: Any) -> Any:
        if self.has_failed:
            raise RuntimeError("the group has failed before")
        try:
            return super().forward(method, *args, **kwargs)
        except (ValueError, RuntimeError):
            self.has_failed = True
            raise


@breaks("arguments/torch-words", says="with 'invalid root rank: 2', and raised RuntimeError: wro")
class RefusesWithoutAReason(ForwardingGroup):
    """The message of a refusal does not say what is wrong."""

    def forward(self, method: str, *args: Any, **kwargs: Any) -> Any:
        try:
            return super().forward(method, *args, **kwargs)
        except (ValueError, RuntimeError) as error:
            raise RuntimeError("wrong arguments") from error


@breaks("arguments/group-survives", says=r"raised (Value|Runtime)Error")
class TellsOfARefusalAgain(ForwardingGroup):
    """A refusal is also told by the next call of an operation other than all_reduce."""

    error: Exception | None = None

    def forward(self, method: str, *args: Any, **kwargs: Any) -> Any:
        if method == "allreduce":
            return super().forward(method, *args, **kwargs)
        error, self.error = self.error, None
        if error is not None:
            raise error
        try:
            return super().forward(method, *args, **kwargs)
        except (ValueError, RuntimeError) as refusal:
            self.error = refusal
            raise


@breaks("arguments/refused-on-one-rank", says="sequence number: ranks disagree|differs")
class RefusedCallsAreCounted(GroupMutant, ProcessGroupGloo):
    """A call that is refused has taken a sequence number."""

    base = "impl"

    def allgather(self, *args: Any) -> Any:
        try:
            return super().allgather(*args)
        except Exception:
            self._sequence += 1
            raise
