"""DDP communication hooks: user functions that take over the reduction of gradient buckets."""
