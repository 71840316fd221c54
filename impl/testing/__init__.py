"""Simulations of groups, networks and devices, decided by a seed; predicted scaling of algorithms.

simulation      a whole group in one process
faults          what may go wrong in it
simulated_rank  what a program may do there
network         streams of bytes between simulated ranks
clock           simulated time
mailbox         runs a single schedule
scaling         predicts times for any world size; `python -m impl.testing` prints them
device/         a simulated device: streams, events, pinned memory
"""
