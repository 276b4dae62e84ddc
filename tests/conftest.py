"""How hard Hypothesis tries: the same examples in every run by default, many random ones when asked for.

``AUTOHETE_HYPOTHESIS=wide pytest`` looks for new counterexamples; what it finds is printed as a blob to reproduce it.
"""

from __future__ import annotations

import os

from hypothesis import HealthCheck, settings

# Drawing a profile with its plan takes many small draws; that is no sign of a bad strategy.
_SLOW_IS_FINE = [HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.large_base_example]

settings.register_profile(
    "ci", derandomize=True, deadline=None, max_examples=100, print_blob=True, suppress_health_check=_SLOW_IS_FINE
)
settings.register_profile("wide", deadline=None, max_examples=1000, print_blob=True, suppress_health_check=_SLOW_IS_FINE)
settings.load_profile(os.environ.get("AUTOHETE_HYPOTHESIS", "ci"))
