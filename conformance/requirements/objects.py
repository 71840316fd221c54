"""Object collectives: pickled Python values instead of tensors."""

from conformance.requirements.model import MUST, SHOULD, Requirement

_C10D = "torch/distributed/distributed_c10d.py of torch 2.13"

ALL_GATHER = Requirement(
    id="all_gather_object/gathers",
    level=MUST,
    profile="objects",
    says="all_gather_object leaves the object of group rank i at index i of every rank's list.",
    source="torch 2.13 docs, all_gather_object",
    needs=("op:all_gather", "dtype:uint8", "dtype:int64"),
)
ALL_GATHER_SIZES = Requirement(
    id="all_gather_object/differing-sizes",
    level=MUST,
    profile="objects",
    says="Objects whose pickles differ in size, by a little or by a megabyte, are gathered whole.",
    source="torch 2.13 docs, all_gather_object: any picklable object",
    needs=("op:all_gather",),
    rests_on=("all_gather_object/gathers",),
)
ALL_GATHER_LIST = Requirement(
    id="all_gather_object/list-length",
    level=MUST,
    profile="objects",
    says="A list with more entries than ranks keeps the rest of its entries; one with fewer raises "
    "an IndexError.",
    source=f"{_C10D}, all_gather_object: 'It should be correctly sized'",
    needs=("op:all_gather",),
    rests_on=("all_gather_object/gathers",),
)
GATHER = Requirement(
    id="gather_object/gathers",
    level=MUST,
    profile="objects",
    says="gather_object leaves the object of group rank i at index i of the destination's list; "
    "other ranks pass None.",
    source="torch 2.13 docs, gather_object",
    needs=("op:all_gather", "op:gather", "dtype:uint8", "dtype:int64"),
)
GATHER_ARGUMENTS = Requirement(
    id="gather_object/arguments",
    level=MUST,
    profile="objects",
    says="The destination without a list, and any other rank with one, get a ValueError.",
    source=f"{_C10D}, gather_object",
)
BROADCAST = Requirement(
    id="broadcast_object_list/broadcasts",
    level=MUST,
    profile="objects",
    says="broadcast_object_list replaces every entry of the other ranks' lists by the source's.",
    source="torch 2.13 docs, broadcast_object_list",
    needs=("op:broadcast", "dtype:uint8", "dtype:int64"),
)
BROADCAST_SOURCE = Requirement(
    id="broadcast_object_list/source-keeps-its-own",
    level=MUST,
    profile="objects",
    says="The source's list still holds the very objects that it held before.",
    source=f"{_C10D}, broadcast_object_list",
    needs=("op:broadcast",),
    rests_on=("broadcast_object_list/broadcasts",),
)
BROADCAST_DEVICE = Requirement(
    id="broadcast_object_list/device",
    level=MUST,
    profile="objects",
    says="With device given, the objects travel by way of that device and arrive unchanged.",
    source="torch 2.13 docs, broadcast_object_list",
    needs=("op:broadcast",),
    rests_on=("broadcast_object_list/broadcasts",),
)
BROADCAST_LENGTHS = Requirement(
    id="broadcast_object_list/lists-of-differing-lengths",
    level=SHOULD,
    profile="objects",
    says="Lists that are longer on one rank than on another raise on every rank, and no process "
    "ends.",
    source="torch 2.13 docs, broadcast_object_list: 'each rank must provide lists of equal sizes'",
    needs=("op:broadcast", "feature:mismatch_errors"),
    rests_on=("broadcast_object_list/broadcasts",),
)
SCATTER = Requirement(
    id="scatter_object_list/scatters",
    level=MUST,
    profile="objects",
    says="scatter_object_list puts the source's object for this rank into the first entry of the "
    "output list, and leaves the other entries alone.",
    source="torch 2.13 docs, scatter_object_list",
    needs=("op:broadcast", "op:scatter", "dtype:uint8", "dtype:int64"),
)
SCATTER_OTHERS = Requirement(
    id="scatter_object_list/input-of-others",
    level=MUST,
    profile="objects",
    says="What other ranks than the source pass as input is ignored.",
    source="torch 2.13 docs, scatter_object_list: 'Only objects on the src rank will be scattered'",
    needs=("op:broadcast", "op:scatter"),
    rests_on=("scatter_object_list/scatters",),
)
SCATTER_ARGUMENTS = Requirement(
    id="scatter_object_list/arguments",
    level=MUST,
    profile="objects",
    says="An output that is no list with an entry, and a source without input, raise a ValueError.",
    source=f"{_C10D}, scatter_object_list",
)
SEND_RECV = Requirement(
    id="send_object_list/delivers",
    level=MUST,
    profile="objects",
    says="recv_object_list fills its list with the objects that send_object_list was given, and "
    "returns the global rank of the sender.",
    source="torch 2.13 docs, send_object_list and recv_object_list",
    rests_on=("p2p/delivers", "p2p/order"),
    needs=("dtype:uint8", "dtype:int64"),
)
SEND_RECV_BATCH = Requirement(
    id="send_object_list/batch",
    level=MUST,
    profile="objects",
    says="use_batch sends and receives the same objects by batch_isend_irecv.",
    source="torch 2.13 docs, send_object_list",
    rests_on=("send_object_list/delivers", "p2p/batch"),
)
SEND_RECV_ARGUMENTS = Requirement(
    id="send_object_list/arguments",
    level=MUST,
    profile="objects",
    says="The own rank as peer, and no peer at all, raise a ValueError.",
    source=f"{_C10D}, send_object_list and recv_object_list",
)
GROUP_ROOTS = Requirement(
    id="objects/roots-in-subgroups",
    level=MUST,
    profile="objects",
    says="In a subgroup, src and dst are global ranks, group_src and group_dst are ranks of the "
    "group.",
    source="pytorch#74602, pytorch#149200; torch 2.13 docs, broadcast_object_list",
    rests_on=("broadcast_object_list/broadcasts", "scatter_object_list/scatters"),
)
ROOT_ARGUMENTS = Requirement(
    id="objects/root-arguments",
    level=MUST,
    profile="objects",
    says="A root given in both ways raises a ValueError, as does one outside of the group, and the "
    "default root, global rank 0, in a group without it.",
    source=f"{_C10D}, _canonicalize_group_rank",
)
ANYTHING = Requirement(
    id="objects/anything-picklable",
    level=MUST,
    profile="objects",
    says="Every value that can be pickled arrives equal to the original: nested containers, "
    "tensors, instances of classes, None, bytes, an empty list.",
    source="torch 2.13 docs, all_gather_object: 'Pickable Python object'",
    rests_on=("all_gather_object/gathers", "broadcast_object_list/broadcasts"),
)
UNPICKLABLE = Requirement(
    id="objects/unpicklable",
    level=MUST,
    profile="objects",
    says="An object that cannot be pickled raises where it was given, before anything is sent, so "
    "that the group is as good as before.",
    source="observed, torch 2.13.0 gloo",
    rests_on=("all_gather_object/gathers", "all_reduce/sum"),
)
COPIES = Requirement(
    id="objects/received-are-copies",
    level=MUST,
    profile="objects",
    says="What is received belongs to the receiver: changing it changes no other rank's, no "
    "earlier result and nothing that was given.",
    source="torch 2.13 docs, all_gather_object: objects are pickled",
    rests_on=("all_gather_object/gathers",),
)
IN_SEQUENCE = Requirement(
    id="objects/between-collectives",
    level=MUST,
    profile="objects",
    says="Object collectives and collectives of tensors in any sequence do not disturb each other.",
    source="torch 2.13 docs, object collectives",
    rests_on=("all_gather_object/gathers", "broadcast_object_list/broadcasts", "all_reduce/sum"),
)
