"""Saving: stage, write, commit, in the foreground or the background."""
