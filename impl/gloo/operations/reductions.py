"""Methods of the process group: allreduce, reduce, reduce_scatter, also coalesced and sparse.

Each method asks four questions and then waits for its turn; `reduce` shows it best:

    may it be asked?           `validation`; the errors are torch's
    with which arithmetic?     `choose`: op, dtype -> `Reduction`, and the words that ranks compare
    on which memory?           a `Lender` lends flat CPU memory for each tensor
    what happens in its turn?  `run`: stage, let the communicator reduce, conclude

`Reduction.stage` gives what travels, sometimes in a wider dtype; `conclude` brings the result back,
and divides for AVG. See `reduce_ops` for the arithmetic.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed import Work

from impl.gloo.memory import aliasing, dense
from impl.gloo.memory.staging_choice import lender_for
from impl.gloo.operations import flattening, sparse
from impl.gloo.operations.reduction_choice import choose, choose_all_reduce, choose_each
from impl.gloo.queue.issuing import Described, GroupCore, as_list, as_lists
from impl.gloo.requests import validation
from impl.gloo.requests.dispatching import bypasses_dispatcher, dispatched
from impl.gloo.requests.reduce_ops import AnyReduceOp, Reduction, op_name
from impl.gloo.requests.settings import CallSettings, Timeout, own_timeout_s, settings
from impl.torch_dispatch import never_traced
from impl.torch_private import AllreduceOptions
from impl.transport import lent
from impl.transport.base import CallInfo, Communicator, Deadline, PacedCommunicator


class Reductions(GroupCore):
    """Operations that combine elements of all ranks."""

    @property
    def _widens(self) -> bool:
        """Whether elements may be sent in a wider dtype; C++ ranks on Gloo's wire never do."""
        return self._comm.kind != "gloo"

    @dispatched("reduce", 1, also=["tensor"])
    def reduce(
        self,
        tensors: Tensor | Sequence[Tensor],
        opts: Any = None,
        op: AnyReduceOp | None = None,
        timeout: Timeout | None = None,
        *,
        root: int | None = None,
    ) -> Work:
        """Reduce to the root; other ranks' tensors stay as they are."""
        method = "reduce"
        asked = settings(opts, root=root, op=op, timeout=timeout)
        given = as_list(tensors)
        validation.check_root(method, asked.root, self._size)
        validation.check_root_tensor(method, asked.root_tensor, len(given))
        if len(given) != 1:
            validation.refuse(method, "requires a single-element tensor list")
        validation.check_dense(method, given)
        validation.check_device(method, given)
        tensor = given[0]
        chosen, described = choose(
            method, asked.op, tensor.dtype, tensor.shape, f" root={asked.root}", self._widens
        )
        lender = lender_for(given)
        receives = asked.root == self._rank
        if receives:
            aliasing.check_writable(method, given)
        memory = lender.update(tensor) if receives else lender.read(tensor)

        def run(comm: Communicator, call: CallInfo, until: Deadline) -> None:
            travelling = chosen.stage(memory)
            comm.reduce(travelling, asked.root, chosen.combine, call, until)
            if receives:
                chosen.conclude(travelling, memory, comm.world_size)

        return self._issue(method, described, run, given, asked, lender=lender)

    @never_traced
    def allreduce(
        self,
        tensors: Tensor | Sequence[Tensor] | None = None,
        opts: Any = None,
        timeout: Timeout | None = None,
        *,
        op: AnyReduceOp | None = None,
        tensor: Tensor | None = None,
    ) -> Work:
        """Reduce over all ranks and, if there are several, over all `tensors` (of one shape).

        `tensor` may stand in the place of `tensors`, as in torch's short form.

        Every tensor ends with the result. Sparse COO tensors: SUM only; the caller's tensor and
        the future both hold the coalesced result.
        """
        if type(tensors) is list and tensor is None:
            given = tensors
        else:
            given = _one_or_several(tensors, tensor)
        if len(given) == 1 and type(opts) is AllreduceOptions and self.call_hooks.is_empty:
            only = given[0]
            # the common case is the one that is worth microseconds
            is_dense = only.is_cpu and only.layout is torch.strided and only.is_contiguous()
            if is_dense and bypasses_dispatcher(only) and dense.memory_holds_elements(only):
                try:
                    chosen, described = choose_all_reduce(opts.reduceOp, only)
                except (RuntimeError, ValueError) as error:
                    validation.sign(error, "allreduce", self)
                    raise
                if not chosen.is_average:
                    return self._allreduce_contiguous_cpu(only, opts, chosen, described)
        if op is None and timeout is None:
            return self._allreduce_any(given, opts)
        return self._allreduce_any(given, opts, timeout, op=op)

    def _allreduce_contiguous_cpu(
        self, tensor: Tensor, opts: Any, chosen: Reduction, described: Described
    ) -> Work:
        memory = tensor.data if tensor.dim() == 1 else tensor.data.view(-1)
        combine = chosen.combine

        def run(comm: Communicator, call: CallInfo, until: Deadline) -> None:
            comm.all_reduce(memory, combine, call, until)

        asked, timeout_s = _ASKED[opts.asyncOp], own_timeout_s(opts.timeout)
        if timeout_s is not None:
            asked = asked._replace(timeout_s=timeout_s)
        return self._issue("all_reduce", described, run, [tensor], asked)

    @dispatched("allreduce", 1)
    def _allreduce_any(
        self,
        tensors: list[Tensor],
        opts: Any,
        timeout: Timeout | None = None,
        *,
        op: AnyReduceOp | None = None,
    ) -> Work:
        method = "allreduce"
        asked = settings(opts, op=op, timeout=timeout)
        validation.check_not_empty(method, tensors)
        validation.check_same_layout(method, tensors)
        validation.check_like(method, tensors, tensors[0])
        validation.check_device(method, tensors)
        if tensors[0].layout is torch.sparse_coo:
            return self._allreduce_sparse(tensors, asked)
        if tensors[0].layout is not torch.strided:
            validation.refuse(method, "unsupported layout")
        return self._allreduce_dense("all_reduce", [tensors], tensors, asked)

    def _allreduce_dense(
        self,
        operation: str,
        bundles: Sequence[Sequence[Tensor]],
        outputs: list[Tensor],
        asked: CallSettings,
    ) -> Work:
        """Reduce each bundle: tensors of one shape that are also reduced with each other."""
        chosen, described = choose_each(
            "all_reduce", asked.op, [first for first, *_ in bundles], self._widens
        )
        for bundle in bundles:
            aliasing.check_writable(operation, aliasing.distinct(bundle))
        lender = lender_for(outputs)
        memories = [[lender.update(tensor) for tensor in bundle] for bundle in bundles]
        pace = None
        if isinstance(self._comm, PacedCommunicator) and chosen[0].is_in_place:
            pace = lender.pace()

        def run(comm: Communicator, call: CallInfo, until: Deadline) -> None:
            if pace is not None and isinstance(comm, PacedCommunicator):
                comm.all_reduce_paced(memories[0][0], chosen[0].combine, call, until, pace)
                return
            if flattening.is_wanted(comm, memories):
                same = chosen[0]  # tensors that are reduced as one are of one dtype
                staged = [same.stage(memory[0]) for memory in memories]
                flattening.all_reduce(comm, staged, same.combine, call, until)
                for travelling, memory in zip(staged, memories, strict=True):
                    same.conclude(travelling, memory[0], comm.world_size)
                return
            for memory, each in zip(memories, chosen, strict=True):
                travelling = each.stage(memory[0])
                if len(memory) > 1:
                    # not in the caller's tensor: it must not change if the ranks disagree
                    own = [each.stage(one) for one in memory]
                    travelling = torch.empty_like(travelling)
                    each.combine.fold(travelling, own)
                comm.all_reduce(travelling, each.combine, call, until)
                each.conclude(travelling, memory[0], comm.world_size)
                for more in memory[1:]:
                    lent.fill(more, memory[0])

        return self._issue(operation, described, run, list(outputs), asked, lender=lender)

    def _allreduce_sparse(self, tensors: list[Tensor], asked: CallSettings) -> Work:
        if op_name(asked.op) != "sum":
            validation.refuse(
                "allreduce",
                "unsupported reduction operation (allreduce of sparse tensors only works with "
                "ReduceOp.SUM)",
            )
        exchange = sparse.SparseSum(tensors, self._comm.kind)
        return self._issue(
            "all_reduce",
            exchange.described,
            exchange.run,
            exchange.outputs,
            asked,
            lender=exchange.lender,
            inputs=tensors,
        )

    @dispatched("allreduce_coalesced", 1)
    def allreduce_coalesced(self, tensors: Sequence[Tensor], opts: Any = None) -> Work:
        """Reduce each tensor over all ranks; one place in the group's order for all of them."""
        method = "allreduce_coalesced"
        asked = settings(opts)
        given = list(tensors)
        validation.check_not_empty(method, given)
        validation.check_same_layout(method, given)
        if any(tensor.dtype != given[0].dtype for tensor in given):
            validation.refuse(method, "tensors must all have the same type")
        validation.check_device(method, given)
        if given[0].layout is not torch.strided:
            validation.refuse(method, "unsupported layout")
        firsts = aliasing.first_uses(given)
        aliasing.check_writable(method, list(itertools.compress(given, firsts)))
        # a tensor's second place is reduced as well, for the ranks where it is another tensor, but
        # in a copy: the result is the same, and adding twice to one memory would not be
        bundles = [
            [tensor if is_first else tensor.detach().clone()]
            for tensor, is_first in zip(given, firsts, strict=True)
        ]
        return self._allreduce_dense(method, bundles, given, asked)

    @dispatched("reduce_scatter", 2, also=["output", "input"])
    def reduce_scatter(
        self,
        output_tensors: Tensor | Sequence[Tensor],
        input_tensors: Sequence[Tensor] | Sequence[Sequence[Tensor]],
        opts: Any = None,
        timeout: Timeout | None = None,
        *,
        op: AnyReduceOp | None = None,
    ) -> Work:
        """Rank r's output = the reduction of every rank's input r.

        Inputs may differ in shape, as long as all ranks' lists do in the same way.
        """
        method = "reduce_scatter"
        asked = settings(opts, op=op, timeout=timeout)
        outputs, lists = as_list(output_tensors), as_lists(input_tensors)
        if len(outputs) != 1:
            validation.refuse(method, "reduce_scatter only supports 1 output")
        if len(lists) != 1:
            validation.refuse(method, "requires input/output tensor lists to have the same length")
        output, inputs = outputs[0], lists[0]
        if len(inputs) != self._size:
            validation.refuse(method, "invalid input tensor list size, must be world size")
        validation.check_dense(method, [output, *inputs])
        validation.check_device(method, [output, *inputs])
        validation.check_like(method, [inputs[self._rank]], output, self._rank)
        validation.check_dtypes(method, inputs, output.dtype)
        aliasing.check_writable(method, outputs)
        if len({given.numel() for given in inputs}) > 1:
            return self._reduce_scatter_uneven(output, inputs, asked)
        chosen, described = choose(method, asked.op, output.dtype, output.shape, "", self._widens)
        lender = lender_for(outputs)
        memory = lender.room(output)
        sources = [lender.read(given) for given in inputs]

        def run(comm: Communicator, call: CallInfo, until: Deadline) -> None:
            whole = torch.cat(sources)
            travelling = chosen.stage(whole)
            result = memory
            if travelling is not whole:
                result = travelling.new_empty(memory.numel())
            comm.reduce_scatter(result, travelling, chosen.combine, call, until)
            chosen.conclude(result, memory, comm.world_size)

        return self._issue(
            method,
            described,
            run,
            outputs,
            asked,
            lender=lender,
            inputs=inputs,
            tags=self._size,
        )

    def _reduce_scatter_uneven(
        self, output: Tensor, inputs: list[Tensor], asked: CallSettings
    ) -> Work:
        method = "reduce_scatter"
        numels = ",".join(str(given.numel()) for given in inputs)
        chosen, described = choose(
            method, asked.op, output.dtype, output.shape, f" of numels={numels}", self._widens
        )
        plain = validation.plain_dtype(output.dtype)
        signature = f"op={chosen.op_name} dtype={plain} numels={numels}"
        lender = lender_for([output])
        memory = lender.room(output)
        sources = [lender.read(given) for given in inputs]

        def run(comm: Communicator, call: CallInfo, until: Deadline) -> None:
            own = chosen.stage(sources[comm.rank].clone())
            for rank, source in enumerate(sources):
                travelling = own if rank == comm.rank else chosen.stage(source)
                comm.reduce(travelling, rank, chosen.combine, call, until)
            chosen.conclude(own, memory, comm.world_size)

        return self._issue(
            method,
            Described(signature, described.shown),
            run,
            [output],
            asked,
            lender=lender,
            inputs=inputs,
            tags=self._size,
        )

    @dispatched(
        "reduce_scatter_single",
        2,
        formerly="_reduce_scatter_base",
        also=["outputTensor", "inputTensor"],
    )
    def reduce_scatter_single(self, output: Tensor, input: Tensor, opts: Any = None) -> Work:
        """Rank r's output = chunk r of the reduction of all inputs; `output` may be that chunk."""
        return self._reduce_scatter_singles(
            "reduce_scatter_tensor", [output], [input], settings(opts)
        )

    _reduce_scatter_base = reduce_scatter_single  # torch 2.11's name

    @dispatched("reduce_scatter_single_coalesced", 2, formerly="reduce_scatter_tensor_coalesced")
    def reduce_scatter_single_coalesced(
        self, outputs: Sequence[Tensor], inputs: Sequence[Tensor], opts: Any = None
    ) -> Work:
        """Several `reduce_scatter_single` in one place of the group's order."""
        if len(outputs) != len(inputs):
            validation.refuse(
                "reduce_scatter_tensor_coalesced",
                "requires input/output tensor lists to have the same length",
            )
        return self._reduce_scatter_singles(
            "reduce_scatter_tensor_coalesced", list(outputs), list(inputs), settings(opts)
        )

    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced  # torch 2.11's name

    def _reduce_scatter_singles(
        self, method: str, outputs: list[Tensor], inputs: list[Tensor], asked: CallSettings
    ) -> Work:
        validation.check_not_empty(method, outputs)
        validation.check_dense(method, [*outputs, *inputs])
        validation.check_device(method, [*outputs, *inputs])
        for output, given in zip(outputs, inputs, strict=True):
            validation.check_gathered_numel(method, given, output, self._size)
        aliasing.check_writable(method, outputs)
        chosen, described = choose_each(method, asked.op, inputs, self._widens)
        lender = lender_for(outputs)
        memories = [lender.room(output) for output in outputs]
        sources = [
            aliasing.without_overlap(
                lender.read(given), memories, memory, self._rank * memory.nbytes
            )
            for given, memory in zip(inputs, memories, strict=True)
        ]

        def run(comm: Communicator, call: CallInfo, until: Deadline) -> None:
            for memory, source, each in zip(memories, sources, chosen, strict=True):
                travelling = each.stage(source)
                result = memory
                if travelling is not source:
                    result = travelling.new_empty(memory.numel())
                comm.reduce_scatter(result, travelling, each.combine, call, until)
                each.conclude(result, memory, comm.world_size)

        return self._issue(
            method,
            described,
            run,
            outputs,
            asked,
            lender=lender,
            inputs=inputs,
            tags=len(outputs),
        )


def _one_or_several(
    tensors: Tensor | Sequence[Tensor] | None, tensor: Tensor | None
) -> list[Tensor]:
    """Raises TypeError unless exactly one of them was given."""
    given = tensors if tensor is None else tensor
    if given is None or (tensor is not None and tensors is not None):
        raise TypeError("allreduce takes either tensors or, in its short form, tensor")
    return as_list(given)


# The settings of an all_reduce without a timeout of its own, by `asyncOp`: made once, since that
# takes half a microsecond.
_ASKED = {asynchronous: CallSettings(asynchronous=asynchronous) for asynchronous in (False, True)}
