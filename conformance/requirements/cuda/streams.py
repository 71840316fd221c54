"""What a collective on CUDA tensors is ordered after, and what is ordered after it."""

from conformance.requirements.cuda import NOTES, SEMANTICS
from conformance.requirements.model import MUST, Requirement

READS_LATE = Requirement(
    id="cuda/reads-after-the-stream",
    level=MUST,
    profile="cuda",
    says="A collective reads its tensors after all kernels that were put on the current stream "
    "before the call.",
    source=SEMANTICS,
    rests_on=("cuda/values",),
)
WRITES_LATE = Requirement(
    id="cuda/writes-after-the-stream",
    level=MUST,
    profile="cuda",
    says="A collective writes to its outputs after all kernels that were put on the current stream "
    "before the call, which may still read what the outputs held.",
    source=SEMANTICS,
    rests_on=("cuda/values",),
)
AFTER_CALL = Requirement(
    id="cuda/after-the-call",
    level=MUST,
    profile="cuda",
    says="Kernels that are put on the current stream after a synchronous call see its results.",
    source=f"{NOTES}: 'function calls utilizing the output on the same CUDA stream will behave as "
    "expected'",
    rests_on=("cuda/reads-after-the-stream",),
)
AFTER_WAIT = Requirement(
    id="cuda/after-the-wait",
    level=MUST,
    profile="cuda",
    says="Kernels that are put on a stream after wait was called with it as the current stream see "
    "the results, on whatever stream the call was issued.",
    source=f"{NOTES}: Work.wait",
    rests_on=("cuda/reads-after-the-stream",),
)
REUSE = Requirement(
    id="cuda/reuse-after-the-call",
    level=MUST,
    profile="cuda",
    says="What a synchronous call has read may be overwritten on the current stream right after "
    "it, and no rank's result shows it.",
    source=NOTES,
    rests_on=("cuda/after-the-call",),
)
DROPPED = Requirement(
    id="cuda/dropped-tensors",
    level=MUST,
    profile="cuda",
    says="Tensors may be dropped after an asynchronous call; their memory is not given out again "
    "before the operation has used it.",
    source="torch 2.13 docs, Tensor.record_stream",
    rests_on=("cuda/after-the-wait",),
)
FUTURES = Requirement(
    id="cuda/futures",
    level=MUST,
    profile="cuda",
    says="Kernels of a callback of the operation's future, and those that come after the future's "
    "wait, see the results.",
    source="torch 2.13 docs, torch.futures.Future: devices",
    rests_on=("cuda/after-the-wait",),
)
IN_FLIGHT = Requirement(
    id="cuda/several-in-flight",
    level=MUST,
    profile="cuda",
    says="Several asynchronous operations may be under way, issued on different streams, and be "
    "waited for in any order.",
    source=NOTES,
    rests_on=("cuda/after-the-wait",),
)
