"""A step recorded module by module, and where the steps of two layouts part."""
