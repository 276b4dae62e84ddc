"""One module per question. Run one as a script, or as a module: ``python -m experiments.fig_throughput``."""

import sys

if sys.argv[0] == "-m":  # Python is still looking for the module to run
    from autohete.cli.interrupt import catch_interrupts

    catch_interrupts(sys.orig_argv[sys.orig_argv.index("-m") + 1].rpartition(".")[2])
