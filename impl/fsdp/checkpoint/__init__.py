"""State dicts of models and optimizers: full, sharded or local.

tensor_parallel, sharded_values      values split along dimension 0: ShardedTensor, DTensor
state_dict_type, state_dict          the model's
optim_names, optim_save, optim_load  the optimizer's
optim_api                            the methods of `FullyShardedDataParallel`
"""
