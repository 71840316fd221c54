"""SyncBatchNorm: all ranks of a group normalise their batches as if they were one batch.

Forward, on each rank of the group:

    1. local moments     count, mean and M2 (the sum of squared deviations from the mean) of
                         every channel of this rank's batch
    2. one all_gather    2C + 1 numbers a rank
    3. merge             the moments of all ranks' batches as one; same bits on every rank
    4. normalise         y = (x - mean) * invstd * weight + bias

Backward:

    1. local sums        sum(dy) and sum(dy * (x - mean)) of every channel. They give this rank's
                         gradients of bias and weight, which stay local: DDP averages those.
    2. one all_reduce    2C numbers; then m(..) are means over the batches of all ranks
    3. input gradient    dx = (dy - m(dy) - (x - mean) * invstd^2 * m(dy * (x - mean)))
                              * invstd * weight

An empty batch takes part in both collectives with zeros, so that no rank waits for it in vain.

Files, in reading order: moments (what is sent, and how it is merged), passes (over a batch; with
passes_cpu and passes_cuda), normalise (the two collectives and the autograd function), module
(SyncBatchNorm). What the layer costs beside plain batch norm: python -m ci.bench_sync_batchnorm.

The layer behaves as torch.nn.SyncBatchNorm (2.13) does, and also works on CPU tensors. It differs
on purpose in this: a rank with an empty batch gets zeros as gradients of weight and bias, not none;
a batch that is empty on all ranks leaves the running statistics alone; the rule that training needs
more than one value per channel holds for the count over all ranks; a layer that a model holds under
two names is converted under both; converting a layer of a class of its own warns.
"""

from impl.sync_batchnorm.module import SyncBatchNorm

__all__ = ["SyncBatchNorm"]
