"""Buckets of gradients: arithmetic and memory. Nothing is communicated here, but for one agreement.

assignment  which bucket does each gradient belong to?
layout      where does each gradient lie in its bucket?
bucket      a bucket, and the `GradBucket` that hooks receive
factory     buckets with memory, from an assignment
agreement   all ranks use rank 0's buckets
"""
