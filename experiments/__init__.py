"""One file per question. Experiments import the package, never the reverse."""
