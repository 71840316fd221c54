"""One iteration of the reducer: hooks fire, buckets are reduced during backward, `.grad` is set.

autograd_hooks, distributed_autograd  how a gradient's arrival is noticed
graph_search, used_map                which parameters take no part
readiness, static_graph               what is still missing, and what may be reduced
progress                              where the reducer is, and what may come next
backward_pass                         the iteration: decide, then act
reduction, comm_hooks, grad_copy      fill a bucket, reduce it, hand out the result
reducer                               the `Reducer` as torch knows it
"""
