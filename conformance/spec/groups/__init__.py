"""Process groups: how they are made, what they say of themselves, and how they end."""
