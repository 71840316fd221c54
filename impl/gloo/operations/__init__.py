"""Process group methods: reductions, data movement, all-to-all, point to point, monitored barrier.

reductions         allreduce, reduce, reduce_scatter
reduction_choice   which reduction a call asks for, and how it is described
data_movement      broadcast, gathers, scatter, barrier
exchanges          all-to-all
point_to_point     send, recv
monitored_barrier  a barrier that names the ranks that did not come
sparse             all_reduce of sparse tensors
flattening         several tensors in one operation, as on Gloo's wire
"""
