"""A call: validation, torch's option objects, ReduceOps, hooks, and torch's dispatcher.

validation   torch's checks, in torch's words
settings     what the options of a call say: timeout, root, asynchronous or not
reduce_ops   what each ReduceOp does to each dtype
call_hooks   hooks before and after each call
dispatching  tensors without memory, and dispatch modes
titles       names of operations in profiles and recordings
"""
