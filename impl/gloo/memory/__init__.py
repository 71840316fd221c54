"""The memory that a collective works on, and how results come back to the caller's tensors.

dense          any layout as flat memory on the CPU
lending        lends flat memory for the tensors of one operation
cuda_staging   lends pinned memory for tensors on a GPU
lender_choice  which of the two lends
"""
