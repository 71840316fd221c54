"""The constructor: from a module to a unit with a sharded flat parameter.

groups       which ranks share, and which replicate
ignored      what a unit leaves alone
materialize  device, meta parameters, the same values on all ranks
wrapping     which submodules become units
construct    puts it together
"""
