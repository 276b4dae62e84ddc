"""The GPU kernels of a block: tables of operations by implementation, for GPT-2 and for decoders of other families."""
