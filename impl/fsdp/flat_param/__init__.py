"""One flat parameter: what is in it, and its life from sharded to gathered and back.

layout           where each original parameter lies, and which part a rank holds
packing          how tensors go in and come out
views            what the user's modules show
config           strategy, device and precision, given once
optimizer_steps  notices steps that write shards whose gathered copy is still there
handle           sharded, gathered, freed
gradients        where its gradient is
writeback        parameters and gradients that the user has replaced
"""
