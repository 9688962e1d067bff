"""Ranks that wait for each other: what they wait for, and who ends a program that waits in vain."""
