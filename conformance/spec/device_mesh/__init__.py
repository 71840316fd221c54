"""DeviceMesh: ranks in the form of an array, and a group for each of its lines."""
