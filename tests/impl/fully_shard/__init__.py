"""Tests of `impl.fully_shard`: against torch's own, and of its parts without ranks."""
