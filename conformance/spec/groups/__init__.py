"""Process groups: how they are made, what they report about themselves, and how they end."""
