"""What a hook is given, what it returns, and what is refused."""

from conformance.requirements.comm_hooks import DOCS, OBSERVED
from conformance.requirements.model import MUST, SHOULD, Requirement

_CPP = "torch, reducer.cpp and comm.cpp"

CALLED = Requirement(
    id="comm_hooks/called-for-each-bucket",
    level=MUST,
    profile="comm_hooks",
    says="In each synchronised backward pass the hook is called once for each bucket, with the "
    "state that it was registered with.",
    source=DOCS,
)
UNDIVIDED = Requirement(
    id="comm_hooks/gradients-are-not-divided",
    level=MUST,
    profile="comm_hooks",
    says="A hook is given this rank's own gradients, not divided by the size of the group.",
    source=f"{DOCS}: division is the hook's business",
    rests_on=("comm_hooks/called-for-each-bucket",),
)
INDEX = Requirement(
    id="comm_hooks/bucket/index",
    level=MUST,
    profile="comm_hooks",
    says="index() counts the buckets of a pass from 0, in the order of the calls.",
    source=f"{DOCS}, GradBucket.index",
    rests_on=("comm_hooks/called-for-each-bucket",),
)
IS_LAST = Requirement(
    id="comm_hooks/bucket/is-last",
    level=MUST,
    profile="comm_hooks",
    says="is_last() is true for the last bucket of a pass alone.",
    source=f"{DOCS}, GradBucket.is_last",
    rests_on=("comm_hooks/called-for-each-bucket",),
)
INDEX_OF_A_STATIC_GRAPH = Requirement(
    id="comm_hooks/bucket/index-of-a-static-graph",
    level=SHOULD,
    profile="comm_hooks",
    says="In the first step of a static graph, too, index() counts the buckets from 0, and "
    "is_last() is true for the last alone.",
    source=f"{DOCS}, GradBucket.index and GradBucket.is_last",
    needs=("dtype:float64",),
    rests_on=("comm_hooks/bucket/index", "comm_hooks/bucket/is-last"),
)
BUFFER = Requirement(
    id="comm_hooks/bucket/buffer",
    level=MUST,
    profile="comm_hooks",
    says="buffer() is one-dimensional and holds all gradients of the bucket end to end.",
    source=f"{DOCS}, GradBucket.buffer",
    rests_on=("comm_hooks/called-for-each-bucket",),
)
GRADIENTS = Requirement(
    id="comm_hooks/bucket/gradients",
    level=MUST,
    profile="comm_hooks",
    says="gradients() are views of buffer(), one per parameter, of the parameter's shape: writing "
    "to one is writing to the other.",
    source=f"{DOCS}, GradBucket.gradients",
    rests_on=("comm_hooks/bucket/buffer",),
)
UNUSED_GRADIENTS = Requirement(
    id="comm_hooks/bucket/unused-parameters",
    level=MUST,
    profile="comm_hooks",
    says="With find_unused_parameters, the gradient of a parameter that this rank did not use is "
    "zeros to the hook.",
    source=f"{_CPP}: the slot of an undefined gradient is filled with zeros",
    rests_on=("comm_hooks/bucket/gradients",),
)
PARAMETERS = Requirement(
    id="comm_hooks/bucket/parameters",
    level=MUST,
    profile="comm_hooks",
    says="parameters() are the module's own, in the order of gradients().",
    source=f"{DOCS}, GradBucket.parameters",
    rests_on=("comm_hooks/bucket/gradients",),
)
SET_BUFFER = Requirement(
    id="comm_hooks/bucket/set-buffer",
    level=MUST,
    profile="comm_hooks",
    says="After set_buffer(), buffer() is the tensor that was given, of another dtype as well.",
    source=f"{DOCS}, GradBucket.set_buffer",
    rests_on=("comm_hooks/bucket/buffer",),
)
STRIDED_GRADIENTS = Requirement(
    id="comm_hooks/bucket/gradients-of-channels-last",
    level=SHOULD,
    profile="comm_hooks",
    says="gradients() of a channels-last parameter are, element by element, its gradient.",
    source=f"{DOCS}: per-parameter gradients; pytorch#42577",
    rests_on=("comm_hooks/bucket/gradients",),
)
COMPLEX_BUFFER = Requirement(
    id="comm_hooks/bucket/complex",
    level=SHOULD,
    profile="comm_hooks",
    says="The buffer of complex parameters is real, twice as long, and what the hook makes of it "
    "becomes their gradients.",
    source=f"{_CPP}, view_as_real; {OBSERVED}",
    rests_on=("comm_hooks/bucket/buffer",),
)
RESULT = Requirement(
    id="comm_hooks/result",
    level=MUST,
    profile="comm_hooks",
    says="The tensor in the hook's future takes the bucket's place: the same tensor or another.",
    source=DOCS,
    rests_on=("comm_hooks/called-for-each-bucket",),
)
RESULT_INSIDE_ANOTHER = Requirement(
    id="comm_hooks/result-inside-another-tensor",
    level=MUST,
    profile="comm_hooks",
    says="The tensor in the hook's future may be a part of a larger one, wherever it begins in it.",
    source=f"{DOCS}: a tensor in the bucket's place",
    rests_on=("comm_hooks/result",),
)
RESULT_OF_ANOTHER_DTYPE = Requirement(
    id="comm_hooks/result-of-another-dtype",
    level=SHOULD,
    profile="comm_hooks",
    says="The tensor in the hook's future may be of another dtype; gradients keep theirs.",
    source=OBSERVED,
    rests_on=("comm_hooks/result",),
)
RESULT_REPEATED = Requirement(
    id="comm_hooks/result-in-later-steps",
    level=MUST,
    profile="comm_hooks",
    says="A hook that returns a new tensor each time is right in all later steps too, with "
    "gradients that are views as well.",
    source="pytorch#43307",
    rests_on=("comm_hooks/result",),
)
UNUSED_EVERYWHERE = Requirement(
    id="comm_hooks/unused-everywhere",
    level=MUST,
    profile="comm_hooks",
    says="With find_unused_parameters, a parameter that no rank used keeps its gradient, whatever "
    "the hook makes of its place in the bucket: None stays None.",
    source=f"{_CPP}: gradients of globally unused parameters are kept, with a hook as without",
    rests_on=("comm_hooks/result",),
)
AWAITED = Requirement(
    id="comm_hooks/future-is-awaited",
    level=MUST,
    profile="comm_hooks",
    says="backward returns when all hooks' futures are complete, and with their values, also if "
    "another thread completes them.",
    source=f"{DOCS}: asynchronous; {_CPP}, finalize_backward",
    rests_on=("comm_hooks/result",),
)
THEN = Requirement(
    id="comm_hooks/then",
    level=MUST,
    profile="comm_hooks",
    says="Futures may be chained with then(), more than once.",
    source="torch, test_c10d_gloo.py: test_ddp_comm_hook_future_passing_cpu",
    rests_on=("comm_hooks/future-is-awaited",),
)
SEVERAL_COLLECTIVES = Requirement(
    id="comm_hooks/several-collectives",
    level=MUST,
    profile="comm_hooks",
    says="A hook may issue several collectives, one after the other, inside then() as well.",
    source="torch 2.13, powerSGD_hook does",
    rests_on=("comm_hooks/then",),
)
CHECKPOINTS = Requirement(
    id="comm_hooks/checkpoints",
    level=MUST,
    profile="comm_hooks",
    says="A hook reduces what backward adds up through activation checkpoints, in the first step "
    "of a static graph too.",
    source="torch, reducer.cpp: delay_all_reduce hands buckets to the hook",
    rests_on=(
        "comm_hooks/result",
        "checkpointing/twice",
        "checkpointing/twice-static",
    ),
)
REGISTERED_TWICE = Requirement(
    id="comm_hooks/registered-twice",
    level=MUST,
    profile="comm_hooks",
    says="Registering a second hook, builtin or not, raises RuntimeError 'comm_hook can only be "
    "called once'.",
    source=_CPP,
)
NOT_CALLABLE = Requirement(
    id="comm_hooks/not-callable",
    level=MUST,
    profile="comm_hooks",
    says="A hook that cannot be called is refused with TypeError 'Communication hook must be "
    "callable'.",
    source="torch, test_c10d_common.py and test_ddp_invalid_comm_hook_init",
)
ANNOTATIONS = Requirement(
    id="comm_hooks/annotations",
    level=MUST,
    profile="comm_hooks",
    says="A hook whose annotations contradict GradBucket and Future[Tensor] is refused with "
    "ValueError; one with the right annotations or none is taken.",
    source="torch, test_c10d_common.py: test_ddp_invalid_comm_hook_init",
)
RETURN_TYPE = Requirement(
    id="comm_hooks/returns-no-future",
    level=MUST,
    profile="comm_hooks",
    says="A hook that returns a number makes backward raise RuntimeError 'callback must return a "
    "torch.futures.Future', on every rank.",
    source="torch, test_ddp_invalid_comm_hook_return_type",
)
RETURNS_NONE = Requirement(
    id="comm_hooks/returns-none",
    level=SHOULD,
    profile="comm_hooks",
    says="A hook that forgets to return anything makes backward raise RuntimeError.",
    source=f"{OBSERVED}: the process dies",
    rests_on=("comm_hooks/returns-no-future",),
)
WRONG_VALUE = Requirement(
    id="comm_hooks/future-of-no-tensor",
    level=MUST,
    profile="comm_hooks",
    says="A future that holds no tensor makes backward raise RuntimeError.",
    source="torch, test_ddp_invalid_comm_hook_return_type",
)
RAISES = Requirement(
    id="comm_hooks/raises",
    level=MUST,
    profile="comm_hooks",
    says="An exception in a hook comes out of backward with its message.",
    source="torch 2.13, comm hooks run inside backward",
)
RAISES_LATER = Requirement(
    id="comm_hooks/future-raises",
    level=MUST,
    profile="comm_hooks",
    says="An exception in a callback of then() comes out of backward with its message.",
    source="torch 2.13 docs, Future.then",
    rests_on=("comm_hooks/raises",),
)
FREED = Requirement(
    id="comm_hooks/freed",
    level=MUST,
    profile="comm_hooks",
    says="A wrapper with a hook is freed when nobody holds it any more, with its module and the "
    "parameters.",
    source="pytorch#63211",
    rests_on=("ddp/freed-with-its-user",),
)
STEADY = Requirement(
    id="comm_hooks/steady-memory",
    level=MUST,
    profile="comm_hooks",
    says="With a hook steps of training take no more memory from one to the next.",
    source=f"{OBSERVED}: a result is let go when it was copied",
    rests_on=("ddp/steady-memory",),
)
