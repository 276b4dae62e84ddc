"""Output for people: tables, figures and Perfetto traces. Reads traces and occupancies, decides nothing.

Only this package imports matplotlib.
"""
