"""State dicts of wrapped modules, and training that goes on from a file."""

from conformance.requirements.model import MUST, SHOULD, Requirement

_DOCS = "torch tutorial 'Getting Started with DDP', save and load checkpoints"
_MODULE = "torch 2.13 docs, Module"

KEYS = Requirement(
    id="saving/keys",
    level=MUST,
    profile="checkpointing",
    says="The keys of a wrapper's state dict are the module's, in their order, with the prefix "
    "'module.'; buffers that are not persistent are left out.",
    source=f"{_MODULE}.state_dict; observed, torch 2.13.0",
)
MODULES_TENSORS = Requirement(
    id="saving/the-modules-tensors",
    level=MUST,
    profile="checkpointing",
    says="A wrapper's state dict holds the module's parameters and buffers themselves, detached.",
    source=f"{_MODULE}.state_dict: 'references to the whole state'",
    rests_on=("saving/keys",),
)
INSIDE = Requirement(
    id="saving/inside-another-module",
    level=MUST,
    profile="checkpointing",
    says="The state dict of a module that holds a wrapper has the wrapper's entries under the name "
    "that it has there, and is loaded with them.",
    source=f"{_MODULE}.state_dict: prefix and destination",
    rests_on=("saving/keys",),
)
ANY_RANK = Requirement(
    id="saving/any-rank",
    level=MUST,
    profile="checkpointing",
    says="After steps of training all ranks have the same bits in their parameters, so that one "
    "rank's file serves all.",
    source=f"{_DOCS}: 'all processes should see same parameters'",
    rests_on=("saving/keys",),
)
WITH_MODULE = Requirement(
    id="saving/exchange-with-the-module",
    level=MUST,
    profile="checkpointing",
    says="A bare module loads a wrapper's state without its prefix, a wrapper loads a module's "
    "with it, strictly.",
    source="torch 2.13 docs, consume_prefix_in_state_dict_if_present",
    rests_on=("saving/keys",),
)
WITH_TORCH = Requirement(
    id="saving/exchange-with-torch",
    level=MUST,
    profile="checkpointing",
    says="torch's DistributedDataParallel loads the target's state dict as it is, strictly, and "
    "the other way round.",
    source=f"{_MODULE}.load_state_dict",
    rests_on=("saving/keys",),
)
STRICT = Requirement(
    id="saving/strict",
    level=MUST,
    profile="checkpointing",
    says="A state dict with a key too few, a key too many or a tensor of another shape raises "
    "RuntimeError that names the key.",
    source=f"{_MODULE}.load_state_dict; observed, torch 2.13.0",
    rests_on=("saving/keys",),
)
LOADED_BY_RANK_0 = Requirement(
    id="saving/loaded-by-rank-0",
    level=MUST,
    profile="checkpointing",
    says="A state that rank 0 alone has loaded into its module is everybody's once the module is "
    "wrapped.",
    source=f"{_DOCS}; DistributedDataParallel broadcasts rank 0's state",
    rests_on=("saving/keys",),
)
OPTIMIZER = Requirement(
    id="saving/optimizer",
    level=MUST,
    profile="checkpointing",
    says="The state of an optimizer made from a wrapper's parameters serves one made from the bare "
    "module's or from those of torch's wrapper, and the other way round.",
    source="torch 2.13 docs, Optimizer.state_dict: parameters are known by their order",
    rests_on=("saving/keys",),
)
BETWEEN_STEPS = Requirement(
    id="saving/loading-between-steps",
    level=MUST,
    profile="checkpointing",
    says="A wrapper that has trained can load a state in place and train from there, and gets the "
    "same bits as it got from there before.",
    source=f"{_MODULE}.load_state_dict copies in place",
    rests_on=("saving/keys",),
)
ANY_TIME = Requirement(
    id="saving/at-any-time",
    level=MUST,
    profile="checkpointing",
    says="Taking a state dict between forward and backward, with activations to be computed again, "
    "changes nothing.",
    source=f"{_MODULE}.state_dict",
    rests_on=("saving/keys",),
)
RESUME = Requirement(
    id="saving/resume",
    level=MUST,
    profile="checkpointing",
    says="Training that goes on from files of model, optimizer, schedule and random numbers, in "
    "new groups, ends with the bits of training that did not stop.",
    source=_DOCS,
    rests_on=("saving/keys", "saving/optimizer"),
)
ACROSS_WRAPPERS = Requirement(
    id="saving/resume-across-wrappers",
    level=MUST,
    profile="checkpointing",
    says="Training that torch's wrapper began goes on in the target's, and the other way round, "
    "without a difference beyond rounding.",
    source=_DOCS,
    rests_on=("saving/resume",),
)
MORE_RANKS = Requirement(
    id="saving/another-number-of-ranks",
    level=SHOULD,
    profile="checkpointing",
    says="A state that a smaller group saved is loaded by a larger one, which goes on from there "
    "as one process with all batches would.",
    source="torch, elastic training: a job restarts with another number of workers",
    rests_on=("saving/keys", "saving/optimizer"),
)
