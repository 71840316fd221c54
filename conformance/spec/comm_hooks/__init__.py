"""Communication hooks: how users of DDP change the way in which a bucket is reduced."""
