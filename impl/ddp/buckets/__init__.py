"""Buckets of gradients: assignment by size limit, layout of the flat buffers, allocation, and the
broadcast of rank 0's assignment, which is all that is communicated here.

assignment  which bucket does each gradient belong to?
layout      where does each gradient lie in its bucket?
bucket      a bucket, and the `GradBucket` that hooks receive
factory     buckets with memory, from an assignment
agreement   all ranks use rank 0's buckets
"""
