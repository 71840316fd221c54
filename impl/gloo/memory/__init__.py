"""The memory that a collective works on, and how results come back to the caller's tensors.

dense          any layout as flat memory on the CPU
aliasing       tensors of one call that share memory
lending        lends flat memory for the tensors of one operation
cuda_staging   lends pinned memory for tensors on a GPU
lender_choice  which of the two lends
"""
