"""What people look at: Perfetto traces and figures. Reads traces and occupancies, decides nothing.

Only this package imports matplotlib.
"""
