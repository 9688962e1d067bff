"""A step as it is recorded: storages, operators, messages, on the forms that a device runs."""
