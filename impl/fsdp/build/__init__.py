"""FSDP's constructor: process groups, ignored modules, materialisation, auto-wrapping, sharding.

groups       which ranks share, and which replicate
ignored      ignored modules and parameters; the managed ones
materialize  device, meta parameters, the same values on all ranks
wrapping     which submodules become units
construct    puts it together
"""
