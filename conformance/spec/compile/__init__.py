"""Distributed training under torch.compile: the numbers and the communication of the same program
without it.

The compiler's backends here are "eager" and "aot_eager", which need no compiler of C++: what they
are given has passed through dynamo, and through AOTAutograd.
"""
