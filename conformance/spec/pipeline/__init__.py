"""Models of which each rank has stages, by torch's schedules on a backend: the gradients of one
process.

Numbers are small and whole, so that float32 holds each product and each sum exactly, in whatever
order the microbatches come: results are compared bit for bit.
"""
