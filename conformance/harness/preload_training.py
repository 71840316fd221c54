"""What the fork server also imports if ranks train models: FSDP, optimizers, state dicts.

It takes as long as torch itself, so a fork server imports it only if such ranks are to come.
"""

import gc
import importlib
import warnings

_MODULES = (
    "torch.distributed.fsdp",
    "torch.distributed.checkpoint.state_dict",
    "torch.distributed.optim",
    "torch._dynamo",  # which the first optimizer of a process imports
)

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    for _name in _MODULES:
        importlib.import_module(_name)
gc.freeze()  # ranks share this memory as long as no collector looks at it
