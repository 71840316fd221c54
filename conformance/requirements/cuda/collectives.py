"""Values and refusals of collectives on CUDA tensors."""

from conformance.requirements.cuda import NOTES
from conformance.requirements.model import MUST, SHOULD, Requirement

VALUES = Requirement(
    id="cuda/values",
    level=MUST,
    profile="cuda",
    says="Every collective leaves in CUDA tensors what it leaves in CPU tensors.",
    source="torch 2.13 docs, distributed: backends",
)
STRIDED = Requirement(
    id="cuda/strided",
    level=MUST,
    profile="cuda",
    says="CUDA tensors that are views with gaps or transposed are reduced and broadcast in place; "
    "the memory between their elements stays as it is.",
    source="all_reduce/strided and broadcast/strided, on a device",
    rests_on=("cuda/values",),
)
LARGE = Requirement(
    id="cuda/large",
    level=MUST,
    profile="cuda",
    says="all_reduce of a CUDA tensor of many megabytes sums every element.",
    source="torch 2.13 docs, all_reduce",
    rests_on=("cuda/values",),
)
SPARSE = Requirement(
    id="cuda/sparse",
    level=MUST,
    profile="cuda",
    says="all_reduce of sparse CUDA tensors leaves the sum in the tensor that was passed, on its "
    "device.",
    source="torch 2.13, ProcessGroupGloo.allreduce_sparse",
    needs=("feature:sparse",),
)
MIXED_DEVICES = Requirement(
    id="cuda/mixed-devices",
    level=MUST,
    profile="cuda",
    says="A call with tensors of the host and of a device at once raises on every rank, and the "
    "group goes on.",
    source="observed, torch 2.13.0: 'tensors must all be on the same device'",
)
OTHER_DEVICE = Requirement(
    id="cuda/other-device",
    level=SHOULD,
    profile="cuda",
    says="A rank may use tensors of a device other than its current one, also by turns.",
    source=f"{NOTES}: an operation concerns the streams of its tensors' device",
    rests_on=("cuda/values",),
)
MESSAGES = Requirement(
    id="cuda/messages",
    level=SHOULD,
    profile="cuda",
    says="A message between CUDA tensors is sent after the kernels that were put on the current "
    "stream before, and is there for the kernels that come after wait.",
    source=f"{NOTES}; torch 2.13 docs, isend and irecv",
    needs=("op:send",),
)
