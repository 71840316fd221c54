"""Buffers of an operation: flat CPU memory, or pinned memory for CUDA tensors, and copying back.

dense           any layout as flat memory on the CPU
aliasing        tensors of one call that share memory
staging         lends flat memory for the tensors of one operation
cuda_staging    lends pinned memory for tensors on a GPU
host_copies     lends copies for tensors on a device without streams
staging_choice  which of the three lends
allocation      tensors in memory that the ranks of a group share
"""
