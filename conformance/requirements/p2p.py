"""Point to point: send, recv, isend, irecv, batch_isend_irecv."""

from conformance.requirements.model import MUST, SHOULD, Requirement

_TIMEOUT_REPORTS = "pytorch#40948 and pytorch#41265; observed, torch 2.13.0 gloo"

DELIVERS = Requirement(
    id="p2p/delivers",
    level=MUST,
    profile="p2p",
    says="recv fills the tensor with the elements that send was given on the source rank.",
    source="torch 2.13 docs, send and recv",
    needs=("op:send",),
)
TOUCHES_NOTHING_ELSE = Requirement(
    id="p2p/touches-nothing-else",
    level=MUST,
    profile="p2p",
    says="A receive writes into its tensor alone: the storage around a view, the tensor that was "
    "sent and the tensors of other ranks keep their values.",
    source="torch 2.13 docs, recv: 'Tensor to fill with received data'",
    rests_on=("p2p/delivers",),
)
DTYPES = Requirement(
    id="p2p/dtypes",
    level=MUST,
    profile="p2p",
    says="Tensors of every dtype arrive bit for bit.",
    source="observed, torch 2.13.0 gloo: a message is bytes",
    rests_on=("p2p/delivers",),
)
SHAPES = Requirement(
    id="p2p/shapes",
    level=MUST,
    profile="p2p",
    says="Tensors of any shape arrive whole, from zero dimensions and a single element to several "
    "megabytes.",
    source="torch 2.13 docs, send and recv",
    rests_on=("p2p/delivers",),
)
EMPTY = Requirement(
    id="p2p/zero-elements",
    level=MUST,
    profile="p2p",
    says="A message of zero elements is a message: it is waited for, and takes its place in the "
    "order of those of its tag.",
    source="gloo, messages of zero bytes do the whole exchange; observed, torch 2.13.0 gloo",
    rests_on=("p2p/delivers", "p2p/order"),
)
NON_CONTIGUOUS = Requirement(
    id="p2p/non-contiguous",
    level=MUST,
    profile="p2p",
    says="A tensor that is not contiguous is sent or received element by element, or it is refused "
    "with an error that says 'contiguous'; never is its storage taken as if it were dense.",
    source="pytorch#24836 and pytorch#158903 for collectives; torch 2.13.0 gloo refuses",
    rests_on=("p2p/delivers",),
)
NEGATED = Requirement(
    id="p2p/negated",
    level=SHOULD,
    profile="p2p",
    says="A message to or from a tensor with the neg bit, as x.conj().imag has it, carries the "
    "values and not the memory, or is refused.",
    source="torch 2.13 docs, Tensor.resolve_neg",
    rests_on=("p2p/delivers",),
)
CONJUGATED = Requirement(
    id="p2p/conjugated",
    level=MUST,
    profile="p2p",
    says="A message to or from a tensor with the conj bit, as x.conj() has it, carries the values "
    "and not the memory, or is refused.",
    source="torch 2.13 docs, Tensor.resolve_conj",
    needs=("dtype:complex64",),
    rests_on=("p2p/delivers",),
)
HUGE = Requirement(
    id="p2p/larger-than-buffers",
    level=MUST,
    profile="p2p",
    says="A message of 64 MiB, larger than any buffer or segment, arrives whole, from its first "
    "element to its last.",
    source="derived: activations between the stages of a pipeline",
    needs=("dtype:int32",),
    rests_on=("p2p/delivers",),
)
OFFSETS = Requirement(
    id="p2p/storage-offset",
    level=MUST,
    profile="p2p",
    says="A contiguous view is sent from and received at its own place in its storage.",
    source="torch 2.13 docs, send and recv",
    rests_on=("p2p/delivers",),
)
BUFFER = Requirement(
    id="p2p/buffer-is-free",
    level=MUST,
    profile="p2p",
    says="After send has returned, or isend was waited for, the tensor may be changed without "
    "changing what arrives.",
    source="torch 2.13 docs, isend: 'Modifying tensor before the request completes causes "
    "undefined behavior'",
    rests_on=("p2p/delivers",),
)
NO_WAITING = Requirement(
    id="p2p/does-not-block",
    level=MUST,
    profile="p2p",
    says="isend and irecv return without waiting for the other side, however large the tensor.",
    source="torch 2.13 docs, isend: 'Send a tensor asynchronously'",
    rests_on=("p2p/delivers",),
)
BOTH_SEND_FIRST = Requirement(
    id="p2p/both-send-first",
    level=MUST,
    profile="p2p",
    says="Ranks that all isend large tensors to each other before any of them receives do not "
    "deadlock.",
    source="torch 2.13 docs, isend",
    rests_on=("p2p/delivers",),
)
ANY_PROGRAM = Requirement(
    id="p2p/any-order-of-posts",
    level=MUST,
    profile="p2p",
    says="Sends and receives that match each other complete in whatever order each rank posts them "
    "and waits for them.",
    source="torch 2.13 docs, isend and irecv",
    rests_on=("p2p/delivers", "p2p/tags", "p2p/order"),
)
MANY_PENDING = Requirement(
    id="p2p/many-pending",
    level=MUST,
    profile="p2p",
    says="Hundreds of messages between two ranks may be under way at once, whichever side posts "
    "its part first.",
    source="derived: order/many-pending, for messages",
    rests_on=("p2p/order", "p2p/does-not-block"),
)
MANY_IN_A_ROW = Requirement(
    id="p2p/many-in-a-row",
    level=MUST,
    profile="p2p",
    says="After a thousand messages between two ranks the next one arrives as the first did.",
    source="derived: order/many-in-a-row, for messages",
    rests_on=("p2p/many-pending",),
)
THREADS = Requirement(
    id="p2p/threads",
    level=SHOULD,
    profile="p2p",
    says="Threads of one process may exchange messages at once, each under a tag of its own.",
    source="observed, torch 2.13.0 gloo",
    rests_on=("p2p/tags",),
)

TAGS = Requirement(
    id="p2p/tags",
    level=MUST,
    profile="p2p",
    says="A receive takes a message of its own tag, although messages of other tags came before.",
    source="torch 2.13 docs, send: 'Tag to match send with remote recv'; pytorch#94819",
    rests_on=("p2p/delivers",),
)
NEGATIVE_TAG = Requirement(
    id="p2p/negative-tag",
    level=MUST,
    profile="p2p",
    says="A negative tag is refused with a RuntimeError that says 'Tag must be nonnegative'.",
    source="observed, torch 2.13.0 gloo",
    needs=("op:send",),
)
TAG_TYPE = Requirement(
    id="p2p/no-tag",
    level=MUST,
    profile="p2p",
    says="A tag that is no integer of 32 bits is refused with a TypeError, and the group goes on.",
    source="observed, torch 2.13.0 gloo: 'incompatible function arguments'",
    rests_on=("p2p/delivers",),
)
ORDER = Requirement(
    id="p2p/order",
    level=MUST,
    profile="p2p",
    says="Messages from one rank to another under one tag arrive in the order in which they were "
    "sent.",
    source="torch 2.13 docs, batch_isend_irecv: 'The ordering does matter for multiple operations "
    "between the same pair of ranks in the same direction'",
    rests_on=("p2p/delivers",),
)

ANY_SOURCE = Requirement(
    id="p2p/any-source",
    level=MUST,
    profile="p2p",
    says="recv without a source takes a message from whichever rank sent one, and returns the "
    "global rank of the sender.",
    source="torch 2.13 docs, recv: 'Will receive from any process if unspecified'",
    needs=("feature:any_source",),
    rests_on=("p2p/delivers",),
)
ANY_SOURCE_ONCE = Requirement(
    id="p2p/any-source-each-once",
    level=MUST,
    profile="p2p",
    says="Receives without a source get every message of every sender once, those of one sender in "
    "their order.",
    source="torch 2.13 docs, recv",
    needs=("feature:any_source",),
    rests_on=("p2p/any-source", "p2p/order"),
)
ANY_SOURCE_TAG = Requirement(
    id="p2p/any-source-tag",
    level=MUST,
    profile="p2p",
    says="A receive without a source takes only messages of its own tag.",
    source="torch 2.13 docs, irecv",
    needs=("feature:any_source",),
    rests_on=("p2p/any-source", "p2p/tags"),
)
ANY_SOURCE_SUBGROUP = Requirement(
    id="p2p/any-source-in-a-subgroup",
    level=MUST,
    profile="p2p",
    says="In a subgroup, recv without a source returns the sender's global rank, while the handle "
    "of an irecv knows its rank in the group.",
    source="torch/distributed/distributed_c10d.py of torch 2.13, recv",
    needs=("feature:any_source",),
    rests_on=("p2p/any-source", "p2p/subgroup-peers"),
)
RETURNS_SOURCE = Requirement(
    id="p2p/recv-returns-the-source",
    level=MUST,
    profile="p2p",
    says="recv returns the global rank of the sender, also where it was given.",
    source="torch 2.13 docs, recv: 'Returns: Sender rank'",
    rests_on=("p2p/delivers",),
)

DROPPED = Requirement(
    id="p2p/dropped-handles",
    level=MUST,
    profile="p2p",
    says="A message whose isend handle was dropped arrives all the same.",
    source="gloo#308",
    rests_on=("p2p/order",),
)
COMPLETES = Requirement(
    id="p2p/completes-without-wait",
    level=MUST,
    profile="p2p",
    says="is_completed of an isend and of an irecv becomes true by itself once the message is "
    "over.",
    source="pytorch#30723",
    rests_on=("p2p/delivers",),
)
COMPLETED_IS_WRITTEN = Requirement(
    id="p2p/completed-is-written",
    level=MUST,
    profile="p2p",
    says="Once is_completed of an irecv is true its tensor holds the whole message, although "
    "nobody has waited.",
    source="torch 2.13 docs, Work.is_completed",
    rests_on=("p2p/completes-without-wait",),
)
AFTER_WAIT = Requirement(
    id="p2p/handle-after-wait",
    level=MUST,
    profile="p2p",
    says="After wait a handle is completed, successful and without an exception.",
    source="torch 2.13 docs, Work",
    rests_on=("p2p/delivers",),
)
WAIT_TWICE = Requirement(
    id="p2p/wait-twice",
    level=SHOULD,
    profile="p2p",
    says="wait on a handle that was waited for already returns at once.",
    source="torch 2.13 docs, Work.wait; the handles of torch 2.13.0 gloo's collectives do",
    rests_on=("p2p/handle-after-wait",),
)
NOT_YET = Requirement(
    id="p2p/incomplete-before-the-message",
    level=MUST,
    profile="p2p",
    says="is_completed of an irecv is false while nothing has been sent.",
    source="torch 2.13 docs, Work.is_completed",
    rests_on=("p2p/delivers",),
)
SOURCE_RANK = Requirement(
    id="p2p/source-rank",
    level=MUST,
    profile="p2p",
    says="The handle of a receive knows the rank in the group that the message came from.",
    source="torch 2.13, Work.source_rank",
    rests_on=("p2p/delivers",),
)
FUTURE = Requirement(
    id="p2p/future-and-result",
    level=SHOULD,
    profile="p2p",
    says="A handle's future completes, and its result is the tensor that was received.",
    source="torch 2.13 docs, Work.get_future and Work.result",
    needs=("feature:work_result",),
    rests_on=("p2p/delivers",),
)
WAIT_TIMEOUT = Requirement(
    id="p2p/wait-timeout",
    level=MUST,
    profile="p2p",
    says="wait(timeout) on a receive without a partner raises soon after its timeout, and not "
    "before; on a send it does so too, or the send is over, where sends are buffered.",
    source=_TIMEOUT_REPORTS,
    needs=("feature:timeouts",),
    rests_on=("p2p/delivers",),
)

SELF_ASYNC = Requirement(
    id="p2p/to-oneself",
    level=SHOULD,
    profile="p2p",
    says="isend and irecv deliver a message from a rank to itself.",
    source="torch 2.13 docs, isend: 'Unlike send, which is blocking, isend allows src == dst rank'",
    rests_on=("p2p/delivers",),
)
SELF_BLOCKING = Requirement(
    id="p2p/blocking-to-oneself",
    level=MUST,
    profile="p2p",
    says="send and recv with the rank itself as peer raise a ValueError that says which rank is "
    "invalid.",
    source="torch/distributed/distributed_c10d.py of torch 2.13, send and recv",
)
PEER_ARGUMENTS = Requirement(
    id="p2p/peer-arguments",
    level=MUST,
    profile="p2p",
    says="A peer is given as a global rank or as a rank of the group: both at once, or neither for "
    "a send, raise a ValueError.",
    source="torch 2.13 docs, send: 'Invalid to specify both dst and group_dst'",
)
NEEDS_TENSOR = Requirement(
    id="p2p/needs-a-tensor",
    level=MUST,
    profile="p2p",
    says="Anything but a tensor is refused with a TypeError.",
    source="torch/distributed/distributed_c10d.py of torch 2.13, isend and irecv",
)
PEER_OUT_OF_RANGE = Requirement(
    id="p2p/peer-out-of-range",
    level=MUST,
    profile="p2p",
    says="A peer that the world does not have is refused with an error, and the process lives on.",
    source="torch 2.13 docs, isend; torch 2.13.0 gloo reads past its table of peers",
    needs=("op:send",),
)
LONGER = Requirement(
    id="p2p/longer-message",
    level=MUST,
    profile="p2p",
    says="A receive whose tensor is smaller than the message raises, and the process lives on.",
    source="gloo: 'Received data size doesn't match expected size', which ends the process",
    needs=("feature:mismatch_errors",),
    rests_on=("p2p/delivers",),
)
SHORTER = Requirement(
    id="p2p/shorter-message",
    level=MUST,
    profile="p2p",
    says="A receive whose tensor is larger than the message raises instead of leaving its end as "
    "it was.",
    source="torch 2.13 docs, recv; torch 2.13.0 gloo accepts it without a word",
    needs=("feature:mismatch_errors",),
    rests_on=("p2p/delivers",),
)

SUBGROUP_PEERS = Requirement(
    id="p2p/subgroup-peers",
    level=MUST,
    profile="p2p",
    says="In a subgroup dst and src are global ranks, group_dst and group_src are ranks of the "
    "group.",
    source="torch 2.13 docs, send: 'Destination rank on global process group (regardless of group "
    "argument)'",
    rests_on=("p2p/delivers",),
)
PEER_OUTSIDE = Requirement(
    id="p2p/peer-outside-the-group",
    level=MUST,
    profile="p2p",
    says="A global rank outside the subgroup is refused with a ValueError that says 'not part of "
    "group'.",
    source="torch/distributed/distributed_c10d.py of torch 2.13, get_group_rank",
)
GROUPS_APART = Requirement(
    id="p2p/groups-are-apart",
    level=MUST,
    profile="p2p",
    says="Messages between the same ranks under the same tag do not mix when they are sent in "
    "different groups.",
    source="torch 2.13 docs, new_group",
    rests_on=("p2p/delivers",),
)
BESIDE_COLLECTIVES = Requirement(
    id="p2p/beside-collectives",
    level=MUST,
    profile="p2p",
    says="Messages and collectives under way in one group at the same time do not disturb each "
    "other, whatever the tag.",
    source="torch 2.13 docs, send: 'Tag to match send with remote recv'",
    rests_on=("p2p/delivers", "all_reduce/sum"),
)

BATCH = Requirement(
    id="p2p/batch",
    level=MUST,
    profile="p2p",
    says="batch_isend_irecv carries out every operation of its list and returns handles that can "
    "be waited for.",
    source="torch 2.13 docs, batch_isend_irecv",
    rests_on=("p2p/delivers",),
)
BATCH_ORDER = Requirement(
    id="p2p/batch-order",
    level=MUST,
    profile="p2p",
    says="Receives before sends in a batch do not deadlock, and operations between one pair of "
    "ranks in one direction match in their order.",
    source="torch 2.13 docs, batch_isend_irecv",
    rests_on=("p2p/batch", "p2p/order"),
)
BATCH_SUBGROUP = Requirement(
    id="p2p/batch-in-a-subgroup",
    level=MUST,
    profile="p2p",
    says="P2POp takes its peer as a global rank or as group_peer, a rank of its group.",
    source="torch 2.13 docs, P2POp",
    rests_on=("p2p/batch", "p2p/subgroup-peers"),
)
BATCH_ARGUMENTS = Requirement(
    id="p2p/batch-arguments",
    level=MUST,
    profile="p2p",
    says="P2POp and batch_isend_irecv refuse other operations than isend and irecv, things that "
    "are no P2POp, and operations of different groups, with a ValueError.",
    source="torch/distributed/distributed_c10d.py of torch 2.13, _check_op and _check_p2p_op_list",
)
KEEPS_NOTHING = Requirement(
    id="p2p/keeps-nothing",
    level=MUST,
    profile="p2p",
    says="When messages have arrived and their handles are dropped, the group has let go of their "
    "tensors, but for a few of the last ones, and memory does not grow with their number.",
    source="derived: a pipeline sends millions of them",
    rests_on=("p2p/does-not-block",),
)
