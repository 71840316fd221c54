"""Parts of a model that are frozen, ignored, or looked at on their own."""

from conformance.requirements.fsdp import DOCS, must

UNUSED_INPUT = must(
    id="fsdp/frozen-unit-with-unused-input",
    says="A frozen unit may have an input that requires gradients and that it does not use.",
    source="pytorch#117510",
    rests_on=("fsdp/frozen-unit",),
)
THAWED_AFTER_EVAL = must(
    id="fsdp/thawed-after-evaluation",
    says="With use_orig_params=True, parameters that are frozen or thawed after a forward without "
    "gradients are so in the next step, whatever the strategy keeps unsharded.",
    source="pytorch#105371",
    rests_on=("fsdp/freezing-and-thawing",),
)
IGNORED_IN_UNITS = must(
    id="fsdp/ignored-parameters-of-units",
    says="Ignored parameters stay as they are also in modules that a policy makes units of.",
    source="pytorch#104258",
    rests_on=("fsdp/ignored-parameters",),
)
NORM_IGNORED = must(
    id="fsdp/norm-with-ignored",
    says="Gradients of ignored parameters count in the norm, once, and are clipped as others are.",
    source=f"{DOCS}, clip_grad_norm_: the gradients of all parameters",
    rests_on=("fsdp/norm", "fsdp/ignored-modules"),
)
NORM_LOW = must(
    id="fsdp/norm-of-low-precision-gradients",
    says="Gradients that stay in low precision count in the norm, and keep their dtype when they "
    "are clipped.",
    source="pytorch#90028",
    rests_on=("fsdp/norm", "fsdp/keep-low-precision-gradients"),
)
SUMMON_INNER = must(
    id="fsdp/summon-inner-unit",
    says="summon_full_params of an inner instance, or of a module that holds it, shows it in full "
    "and keeps what is changed.",
    source="pytorch#122663",
    rests_on=("fsdp/summon", "fsdp/summon-writes-back"),
)
SUMMON_CPU = must(
    id="fsdp/summon-on-cpu",
    says="With offload_to_cpu full parameters are shown on the CPU, and changes to them are kept.",
    source="pytorch#107081 and pytorch#188989",
    rests_on=("fsdp/summon", "fsdp/summon-writes-back"),
)
EVAL_INPUTS = must(
    id="fsdp/full-precision-eval-of-units",
    says="With FSDP_USE_FULL_PREC_IN_EVAL=1 units that cast their inputs leave them in full "
    "precision in eval mode, and cast them again in training.",
    source="pytorch#103862",
    rests_on=("fsdp/full-precision-eval", "fsdp/cast-unit-inputs"),
)
