"""The command line: a file for each command; ``app.py`` puts them together."""
