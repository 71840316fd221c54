"""Object collectives: pickled Python values instead of tensors."""
