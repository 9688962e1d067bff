"""Choices that users make: meshes, precision, and what this machine allows."""
