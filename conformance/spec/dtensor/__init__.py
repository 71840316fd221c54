"""DTensors on a backend: placements, operators and gradients give the numbers of whole tensors.

What all ranks' parts come to is compared with what torch computes for one plain tensor. An operator
may be refused, on all ranks alike; what it computes must be right.
"""
