"""For your own tests: Hypothesis strategies (``strategies``) and a second scheduler to compare with (``list_scheduler``).

``strategies`` needs ``pip install autohete[testing]``, so nothing is imported here.
"""
