"""The texts of the reducer's errors and warnings.

The words are torch's where torch says it too, because users search for them and tests match them;
see reducer.cpp.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

UNFINISHED = (
    "Expected to have finished reduction in the prior iteration before starting a new one. "
)
GRAPH_CHANGED = (
    "Your training graph has changed in this iteration, e.g., one parameter is unused in first "
    "iteration, but then got used in the second iteration. this is not compatible with "
    "static_graph set to True."
)
HOOK_REGISTERED_TWICE = "register_comm_hook or register_builtin_comm_hook can only be called once."
BUILTIN_HOOK_REGISTERED_TWICE = (
    "register_builtin_comm_hook or register_comm_hook can only be called once."
)
STATIC_GRAPH_TOO_LATE = (
    "set_static_graph() should be called before training loop starts and after "
    "DistributedDataParallel is constructed."
)
UNDEFINED_BUT_USED = (
    "Encountered gradient which is undefined, but still allreduced by DDP reducer. This indicates "
    "a bug in DDP implementation, please report a bug with a repro to PyTorch."
)
NO_UNUSED_PARAMETERS = (
    "find_unused_parameters=True was specified in DDP constructor, but did not find any unused "
    "parameters in the forward pass. This flag results in an extra traversal of the autograd graph "
    "every iteration,  which can adversely affect performance. If your model indeed never has any "
    "unused parameters in the forward pass, consider turning this flag off. Note that this warning "
    "may be a false positive if your model has flow control causing later iterations to have "
    "unused parameters."
)

_NOT_AVERAGED = "are not averaged over the ranks: wrap the module again."


def unfinished_reduction(
    *,
    rank: int,
    missing: Sequence[int],
    names: Mapping[int, str],
    debug: bool,
    static_graph: bool,
    find_unused_parameters: bool,
) -> str:
    """A backward pass ended, or was left out, with gradients missing.

    Args:
        rank: of this process in the group.
        missing: indices of the parameters without a gradient.
        names: parameter names by index.
        debug: whether TORCH_DISTRIBUTED_DEBUG asks for names.
        static_graph, find_unused_parameters: DDP's options, which decide the advice.
    """
    if static_graph:
        message = (
            f"{UNFINISHED}This error indicates that your training graph has changed in this "
            "iteration, e.g., one parameter is used in first iteration, but then got unused in the "
            "second iteration. this is not compatible with static_graph set to True."
        )
    else:
        message = (
            f"{UNFINISHED}This error indicates that your module has parameters that were not used "
            "in producing loss. "
        )
        if find_unused_parameters:
            message += (
                "Since `find_unused_parameters=True` is enabled, this likely  means that not all "
                "`forward` outputs participate in computing loss. You can fix this by "
            )
        else:
            message += (
                "You can enable unused parameter detection by passing the keyword argument "
                "`find_unused_parameters=True` to `torch.nn.parallel.DistributedDataParallel`, and "
                "by \n"
            )
        message += (
            "making sure all `forward` function outputs participate in calculating loss. \n"
            "If you already have done the above, then the distributed data parallel module wasn't "
            "able to locate the output tensors in the return value of your module's `forward` "
            "function. Please include the loss function and the structure of the return value of "
            "`forward` of your module when reporting this issue (e.g. list, dict, iterable)."
        )
    indices = (
        f"\nParameter indices which did not receive grad for rank {rank}: "
        f"{' '.join(str(index) for index in missing)}"
    )
    if not debug:
        return (
            f"{message}{indices}\n In addition, you can set the environment variable "
            "TORCH_DISTRIBUTED_DEBUG to either INFO or DETAIL to print out information about which "
            "particular parameters did not receive gradient on this rank as part of this error"
        )
    missing_names = ", ".join(names[index] for index in missing if index in names)
    names_line = f"Parameters which did not receive grad for rank {rank}: {missing_names}"
    return f"{message}\n{names_line}{indices}"


def ready_twice(index: int, name: str | None) -> str:
    """A parameter's gradient was complete, and then its hook fired again."""
    message = (
        "Expected to mark a variable ready only once. This error is caused by one of the following "
        "reasons: 1) Use of a module parameter outside the `forward` function. Please make sure "
        "model parameters are not shared across multiple concurrent forward-backward passes. or "
        "try to use _set_static_graph() as a workaround if this module graph does not change "
        "during training loop.2) Reused parameters in multiple reentrant backward passes. For "
        "example, if you use multiple `checkpoint` functions to wrap the same part of your model, "
        "it would result in the same set of parameters been used by different reentrant backward "
        "passes multiple times, and hence marking a variable ready multiple times. DDP does not "
        "support such use cases in default. You can try to use _set_static_graph() as a workaround "
        "if your module graph does not change over iterations.\n"
        f"Parameter at index {index}{'' if name is None else f' with name {name}'} has been marked "
        "as ready twice. This means that multiple autograd engine  hooks have fired for this "
        "particular parameter during this iteration."
    )
    if name is None:
        message += (
            " You can set the environment variable TORCH_DISTRIBUTED_DEBUG to either INFO or "
            "DETAIL to print parameter names for further debugging."
        )
    return message


def replaced(name: str) -> str:
    """The module has another parameter than the one that was wrapped."""
    return (
        f"The parameter {name.removeprefix('.')} was replaced after DistributedDataParallel was "
        "constructed, for instance by load_state_dict(..., assign=True). Gradients of the new one "
        + _NOT_AVERAGED
    )


def trainable_later(name: str) -> str:
    """The module has a parameter that requires gradients, and was not wrapped as such."""
    return (
        f"The parameter {name.removeprefix('.')} was added to the module, or began to require "
        f"gradients, after DistributedDataParallel was constructed. Its gradients {_NOT_AVERAGED}"
    )
