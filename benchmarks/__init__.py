"""Speed and memory benchmarks; variants are measured side by side in one run."""
