"""What pytest's session carries for the plugin: items, failures, the certificate at its end."""
