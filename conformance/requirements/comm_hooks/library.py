"""torch's own hooks, unchanged, on the target's DDP."""

from conformance.requirements.comm_hooks import DOCS
from conformance.requirements.model import MUST, SHOULD, Requirement

_CALLED = "comm_hooks/called-for-each-bucket"

ALL_REDUCE = Requirement(
    id="comm_hooks/library/allreduce",
    level=MUST,
    profile="comm_hooks",
    says="allreduce_hook, with a group or None, trains as DDP without a hook does.",
    source=f"{DOCS}; torch 2.13, test_ddp_hook_parity_allreduce",
    rests_on=(_CALLED,),
)
FP16 = Requirement(
    id="comm_hooks/library/fp16",
    level=MUST,
    profile="comm_hooks",
    says="fp16_compress_hook averages up to half precision, and gradients keep their dtype.",
    source=DOCS,
    needs=("dtype:float16",),
    rests_on=(_CALLED,),
)
FP16_WIRE = Requirement(
    id="comm_hooks/library/fp16-on-the-wire",
    level=MUST,
    profile="comm_hooks",
    says="With fp16_compress_hook all that travels is half precision.",
    source="pytorch#63375",
    needs=("dtype:float16",),
    rests_on=("comm_hooks/library/fp16",),
)
FP16_RANGE = Requirement(
    id="comm_hooks/library/fp16-range",
    level=MUST,
    profile="comm_hooks",
    says="With fp16_compress_hook gradients that half precision can hold do not overflow in the "
    "sum.",
    source="pytorch#57410 and pytorch#59522",
    needs=("dtype:float16",),
    rests_on=("comm_hooks/library/fp16",),
)
BF16 = Requirement(
    id="comm_hooks/library/bf16",
    level=MUST,
    profile="comm_hooks",
    says="bf16_compress_hook averages up to bfloat16's precision.",
    source=DOCS,
    needs=("dtype:bfloat16", "feature:bf16_hooks_on_cpu"),
    rests_on=(_CALLED,),
)
WRAPPERS = Requirement(
    id="comm_hooks/library/fp16-wrapper",
    level=MUST,
    profile="comm_hooks",
    says="fp16_compress_wrapper around another hook hands it half precision and gives gradients "
    "back in their dtype.",
    source=DOCS,
    needs=("dtype:float16",),
    rests_on=("comm_hooks/library/fp16",),
)
POWER_SGD = Requirement(
    id="comm_hooks/library/power-sgd",
    level=MUST,
    profile="comm_hooks",
    says="powerSGD_hook averages plainly before start_powerSGD_iter; from then on gradients are of "
    "low rank, the same on all ranks, and are exact if the rank suffices.",
    source=f"{DOCS}; torch 2.13, test_ddp_hook_parity_powerSGD",
    rests_on=(_CALLED,),
)
POWER_SGD_STATE = Requirement(
    id="comm_hooks/library/power-sgd-state",
    level=MUST,
    profile="comm_hooks",
    says="PowerSGD's state goes on from step to step: warm starts keep Q, and the error feedback "
    "is of the buckets that there are now.",
    source="pytorch#50283 and pytorch#49418",
    rests_on=("comm_hooks/library/power-sgd",),
)
POWER_SGD_INVALID = Requirement(
    id="comm_hooks/library/power-sgd-invalid-state",
    level=MUST,
    profile="comm_hooks",
    says="A PowerSGDState that begins to compress before buckets are rebuilt, with error feedback "
    "or a warm start, is refused with ValueError 'Expect `start_powerSGD_iter` > 1'.",
    source="torch, test_c10d_common.py: test_invalid_powerSGD_state",
)
POWER_SGD_PICKLE = Requirement(
    id="comm_hooks/library/power-sgd-pickle",
    level=SHOULD,
    profile="comm_hooks",
    says="A PowerSGDState can be saved in the middle of training, and training goes on from the "
    "loaded one as from the saved one.",
    source="torch 2.13, test_ddp_hook_pickling_powerSGD",
    rests_on=("comm_hooks/library/power-sgd",),
)
LOCAL_SGD = Requirement(
    id="comm_hooks/library/post-local-sgd",
    level=MUST,
    profile="comm_hooks",
    says="post_localSGD_hook averages over all ranks before start_localSGD_iter and over the "
    "subgroup from then on.",
    source=f"{DOCS}; torch 2.13, test_ddp_hook_parity_post_localSGD",
    rests_on=(_CALLED,),
)
NOOP = Requirement(
    id="comm_hooks/library/noop",
    level=MUST,
    profile="comm_hooks",
    says="noop_hook leaves each rank its own gradients and issues nothing.",
    source=DOCS,
    rests_on=(_CALLED,),
)
OPTIMIZER = Requirement(
    id="comm_hooks/library/hook-then-optimizer",
    level=SHOULD,
    profile="comm_hooks",
    says="_hook_then_optimizer around a hook steps a functional optimizer on what the hook gives.",
    source="torch 2.13, test_ddp_hook_with_optimizer_parity_sgd",
    rests_on=("comm_hooks/library/allreduce",),
)
ZERO = Requirement(
    id="comm_hooks/library/zero",
    level=SHOULD,
    profile="comm_hooks",
    says="For a model of one bucket, hook_with_zero_step and its interleaved form step a "
    "ZeroRedundancyOptimizer inside of backward as one optimizer would step the whole model after "
    "it, but for the two steps before buckets are final; or they refuse the backend.",
    source="torch 2.13, test_ddp_zero_overlap; both refuse gloo",
    rests_on=("comm_hooks/library/allreduce", "comm_hooks/bucket/is-last"),
)
BUILTIN_ALL_REDUCE = Requirement(
    id="comm_hooks/builtin/allreduce",
    level=MUST,
    profile="comm_hooks",
    says="The builtin hook ALLREDUCE trains as DDP without a hook does.",
    source="torch 2.13, _register_builtin_comm_hook",
)
BUILTIN_FP16 = Requirement(
    id="comm_hooks/builtin/fp16",
    level=MUST,
    profile="comm_hooks",
    says="The builtin hook FP16_COMPRESS averages up to half precision, without overflow.",
    source="torch 2.13, _register_builtin_comm_hook",
    needs=("dtype:float16",),
)
LOGGED = Requirement(
    id="comm_hooks/logged",
    level=SHOULD,
    profile="comm_hooks",
    says="The logging data have the hook's name.",
    source="torch 2.13, test_ddp_comm_hook_logging",
)
