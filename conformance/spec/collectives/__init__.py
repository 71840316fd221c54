"""Collectives on dense tensors.

Every operation has the same few questions to answer: which values, in which shapes, for tensors
that are laid out in any way, writing to nothing else, without blocking, in a group of some ranks
only, and without any elements. The chapters ask them one by one, so that a verdict names what is
wrong.
"""
