"""The module `DistributedDataParallel`: constructor, forward, buffers, hooks, join, logging data.

api                                  `DistributedDataParallel`
options                              what the constructor's arguments mean
verification, module_sync            is the model the same on all ranks? make it so
buffer_sync, outputs                 before and after a forward
hook_registration                    communication hooks and overlapped optimizers
optimizer_in_backward                optimizers that step inside backward
mixed_precision                      compute and communicate in low precision
join                                 ranks that have run out of input
wrapper_methods, logging_data        settings, copies, statistics
delayed_all_reduce, compiled_reduction   other ways to average
"""
