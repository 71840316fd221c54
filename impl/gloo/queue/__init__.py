"""A group's operations: issuing, queue and worker threads, `Work`, re-entrancy, profiling.

issuing     how one operation is issued: its number, its turn, its deadline
executor    the queue of a group and its worker thread
work        `Work`: what the caller waits for
by_tensor   works that `wait_tensor` on their outputs waits for
reentrancy  calls that arrive in the middle of another operation
profiling   the ranges that a profiler sees
"""
