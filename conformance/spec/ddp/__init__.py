"""Cases of the profile ddp."""
