"""Running statistics, and eval mode."""

from conformance.requirements.model import MUST, Requirement
from conformance.requirements.sync_batchnorm import DOCS, TRAINS

RUNNING = Requirement(
    id="sync_batchnorm/running-statistics",
    level=MUST,
    profile="sync_batchnorm",
    says="Training moves running_mean and running_var by momentum towards the mean and the "
    "unbiased variance of the whole batch.",
    source=f"{DOCS}, argument momentum; pytorch#22192",
    needs=TRAINS,
    rests_on=("sync_batchnorm/output",),
)
SAME_STATISTICS = Requirement(
    id="sync_batchnorm/same-statistics",
    level=MUST,
    profile="sync_batchnorm",
    says="Every rank ends with the same bits in its running statistics, however different the "
    "ranks' batches are.",
    source="pytorch#22192",
    needs=TRAINS,
    rests_on=("sync_batchnorm/output",),
)
CUMULATIVE = Requirement(
    id="sync_batchnorm/cumulative-average",
    level=MUST,
    profile="sync_batchnorm",
    says="With momentum None, running statistics are the plain average over all batches so far.",
    source=f"{DOCS}, argument momentum: 'cumulative moving average'",
    needs=TRAINS,
    rests_on=("sync_batchnorm/running-statistics",),
)
CUMULATIVE_RESUMED = Requirement(
    id="sync_batchnorm/cumulative-average-resumed",
    level=MUST,
    profile="sync_batchnorm",
    says="With momentum None, a layer that loads a state goes on from as many batches as that "
    "counts.",
    source="torch 2.13, batch norm's factor is 1 / num_batches_tracked",
    needs=TRAINS,
    rests_on=("sync_batchnorm/cumulative-average", "sync_batchnorm/state-dict"),
)
COUNT = Requirement(
    id="sync_batchnorm/counts-batches",
    level=MUST,
    profile="sync_batchnorm",
    says="num_batches_tracked is an int64 that grows by one with each batch of training, and by "
    "none in eval mode.",
    source="torch 2.13, batch norm's num_batches_tracked",
    needs=TRAINS,
    rests_on=("sync_batchnorm/output",),
)
IN_PLACE = Requirement(
    id="sync_batchnorm/statistics-in-place",
    level=MUST,
    profile="sync_batchnorm",
    says="Statistics and the count of batches change in place: who holds the buffers, as a state "
    "dict does, sees them change.",
    source="torch 2.13, SyncBatchNorm.forward: num_batches_tracked.add_; pytorch#63916",
    needs=TRAINS,
    rests_on=("sync_batchnorm/running-statistics", "sync_batchnorm/counts-batches"),
)
OPTIONS_CHANGED = Requirement(
    id="sync_batchnorm/options-changed",
    level=MUST,
    profile="sync_batchnorm",
    says="Another momentum, eps or process_group that is set on a layer holds from the next batch "
    "on.",
    source="torch 2.13, SyncBatchNorm.forward reads them; torch.optim.swa_utils.update_bn sets "
    "momentum",
    needs=TRAINS,
    rests_on=("sync_batchnorm/running-statistics",),
)
EMPTY_STATISTICS = Requirement(
    id="sync_batchnorm/empty-statistics",
    level=MUST,
    profile="sync_batchnorm",
    says="A batch that is empty on all ranks leaves running_mean and running_var alone.",
    source="pytorch#36530; torch 2.13, BatchNorm of an empty batch",
    needs=TRAINS,
    rests_on=("sync_batchnorm/running-statistics", "sync_batchnorm/empty-on-all-ranks"),
)
UNTRACKED = Requirement(
    id="sync_batchnorm/untracked",
    level=MUST,
    profile="sync_batchnorm",
    says="A layer with track_running_stats=False trains like any other and has no statistics.",
    source="pytorch#40147",
    needs=TRAINS,
    rests_on=("sync_batchnorm/output",),
)
TRACKING_SWITCHED_OFF = Requirement(
    id="sync_batchnorm/tracking-switched-off",
    level=MUST,
    profile="sync_batchnorm",
    says="Statistics of a layer whose track_running_stats was set to False stay as they are in "
    "training, and serve in eval mode.",
    source="torch 2.13, SyncBatchNorm.forward: 'ensure that they won't be updated'",
    needs=TRAINS,
    rests_on=("sync_batchnorm/output",),
)
EVAL = Requirement(
    id="sync_batchnorm/eval",
    level=MUST,
    profile="sync_batchnorm",
    says="In eval mode a layer normalises by its running statistics, changes nothing in itself and "
    "has gradients that take the statistics for constants.",
    source=f"{DOCS}: 'during evaluation'",
)
EVAL_FORMATS = Requirement(
    id="sync_batchnorm/eval-formats",
    level=MUST,
    profile="sync_batchnorm",
    says="In eval mode too, the output has the type of the input and is channels-last if that is.",
    source="torch 2.13, batch norm; observed on CPU",
    rests_on=("sync_batchnorm/eval",),
)
EVAL_UNTRACKED = Requirement(
    id="sync_batchnorm/eval-untracked",
    level=MUST,
    profile="sync_batchnorm",
    says="In eval mode a layer without running statistics normalises by those of the rank's own "
    "batch.",
    source="pytorch#56982; torch 2.13, 'Don't sync batchnorm stats in inference mode'",
)
EVAL_AFTER_TRAINING = Requirement(
    id="sync_batchnorm/eval-after-training",
    level=MUST,
    profile="sync_batchnorm",
    says="After training, eval mode gives all ranks the same output for the same input, and "
    "training goes on afterwards where it stopped.",
    source="torch 2.13, Module.train and Module.eval",
    needs=TRAINS,
    rests_on=("sync_batchnorm/eval", "sync_batchnorm/running-statistics"),
)
RESET = Requirement(
    id="sync_batchnorm/reset",
    level=MUST,
    profile="sync_batchnorm",
    says="reset_running_stats gives statistics, reset_parameters also weight and bias, the values "
    "of a new layer.",
    source="torch 2.13, batch norm's reset_parameters",
)
