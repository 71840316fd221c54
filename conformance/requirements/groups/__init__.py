"""Groups: making, naming, using and destroying them."""
