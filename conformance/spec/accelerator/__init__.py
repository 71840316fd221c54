"""Accelerators: values and stream order of collectives, and training with wrappers on devices.

An operation of a process group is issued by the host, and its tensors are written and read by
kernels on streams that the host does not wait for. These rules say what is ordered.
"""
