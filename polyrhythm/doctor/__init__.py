"""`polyrhythm doctor`: whether this machine can run what a user wants to run on it, each problem with its fix.

The kinds of checks are files here; each gives findings, and none of them ends the others by failing.
"""
