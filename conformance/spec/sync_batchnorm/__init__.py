"""SyncBatchNorm: batch norm over the batches of all ranks of a group."""
