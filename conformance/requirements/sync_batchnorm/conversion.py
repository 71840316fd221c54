"""convert_sync_batchnorm."""

from conformance.requirements.model import MUST, SHOULD, Requirement
from conformance.requirements.sync_batchnorm import TRAINS

_DOCS = "torch 2.13 docs, SyncBatchNorm.convert_sync_batchnorm"

ALL_LAYERS = Requirement(
    id="convert_sync_batchnorm/every-layer",
    level=MUST,
    profile="sync_batchnorm",
    says="Every BatchNorm1d, BatchNorm2d and BatchNorm3d inside of a module, however deep, is "
    "replaced, and nothing else is.",
    source=f"{_DOCS}: 'converts all BatchNorm*D layers in the model'",
)
IN_PLACE = Requirement(
    id="convert_sync_batchnorm/returns",
    level=MUST,
    profile="sync_batchnorm",
    says="It returns the module that it was given, or a new layer if that is itself a batch norm.",
    source=f"{_DOCS}, Returns",
)
KEEPS_TENSORS = Requirement(
    id="convert_sync_batchnorm/keeps-tensors",
    level=MUST,
    profile="sync_batchnorm",
    says="The very parameters and buffers are taken over, with dtype, device and requires_grad, so "
    "that an optimizer that was made before goes on working.",
    source="torch 2.13, convert_sync_batchnorm assigns them",
    rests_on=("convert_sync_batchnorm/every-layer",),
)
KEEPS_OPTIONS = Requirement(
    id="convert_sync_batchnorm/keeps-options",
    level=MUST,
    profile="sync_batchnorm",
    says="num_features, eps, momentum, affine, bias, track_running_stats and training or eval mode "
    "stay as they were.",
    source="torch 2.13, convert_sync_batchnorm hands them on",
    rests_on=("convert_sync_batchnorm/every-layer",),
)
GROUP = Requirement(
    id="convert_sync_batchnorm/group",
    level=MUST,
    profile="sync_batchnorm",
    says="Every layer gets the process_group that is given, None by default.",
    source=f"{_DOCS}, argument process_group; pytorch#19240",
    rests_on=("convert_sync_batchnorm/every-layer",),
)
TWICE = Requirement(
    id="convert_sync_batchnorm/twice",
    level=MUST,
    profile="sync_batchnorm",
    says="A model that was converted may be converted again; the second process_group holds, and "
    "tensors are still the same.",
    source="observed, torch 2.13.0: SyncBatchNorm is a batch norm layer too",
    rests_on=("convert_sync_batchnorm/group", "convert_sync_batchnorm/keeps-tensors"),
)
SHARED = Requirement(
    id="convert_sync_batchnorm/shared-layer",
    level=MUST,
    profile="sync_batchnorm",
    says="A layer that a model holds in several places is replaced in all of them, by one layer.",
    source="torch 2.13 converts it under one name alone, and leaves plain batch norm elsewhere",
    rests_on=("convert_sync_batchnorm/every-layer",),
)
SUBCLASS = Requirement(
    id="convert_sync_batchnorm/more-than-batch-norm",
    level=SHOULD,
    profile="sync_batchnorm",
    says="A batch norm of a class whose forward does more keeps doing so, or a warning says that "
    "it is reduced to plain batch norm.",
    source="pytorch#187298",
    rests_on=("convert_sync_batchnorm/every-layer",),
)
TRAINS_ALIKE = Requirement(
    id="convert_sync_batchnorm/trains",
    level=MUST,
    profile="sync_batchnorm",
    says="A converted model's layers normalise over all ranks: forward equals that of the model as "
    "it was on the whole batch.",
    source=_DOCS,
    needs=TRAINS,
    rests_on=("convert_sync_batchnorm/every-layer", "sync_batchnorm/output"),
)
