"""This tree on another kind of machine: another path, user, environment, locale and Python."""
