"""CUDA: what stream order means for collectives, and what wrappers do on devices.

An operation of a process group is issued by the host, and its tensors are written and read by
kernels on streams that the host does not wait for. These rules say what is ordered.
"""
