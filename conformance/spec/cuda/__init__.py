"""Cases for CUDA devices; see `conformance.requirements.cuda`."""
