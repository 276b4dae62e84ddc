"""The command line: one file per command; ``app.py`` combines them."""
