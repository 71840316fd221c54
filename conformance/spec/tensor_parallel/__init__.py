"""Layers of which each rank has a part, by torch's plans on a backend: the numbers of whole ones.

Numbers are small and whole, so that float32 holds each product and each sum exactly: where nothing
but matrices is involved, results are compared bit for bit.
"""
