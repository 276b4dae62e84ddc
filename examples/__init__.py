"""Loops of other libraries, training within a memory budget."""
