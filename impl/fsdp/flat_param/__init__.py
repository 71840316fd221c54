"""One flat parameter: layout, flattening, unshard and reshard, views, gradient, write-back.

layout           where each original parameter lies, and which part a rank holds
packing          how tensors go in and come out
views            what the user's modules show
config           strategy, device and precision, fixed at construction
optimizer_steps  notices steps that write shards whose gathered copy is still there
handle           sharded, gathered, freed
gradients        where its gradient is
writeback        parameters and gradients that the user has replaced
"""
