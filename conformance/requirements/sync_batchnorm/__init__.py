"""SyncBatchNorm: batch norm over the batches of all ranks of a group."""

# What every requirement about training needs: torch's own layer refuses CPU tensors.
TRAINS = ("feature:sync_batchnorm_on_cpu",)

DOCS = "torch 2.13 docs, SyncBatchNorm"
