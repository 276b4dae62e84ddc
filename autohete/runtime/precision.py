"""Number formats, as PyTorch names them."""

import torch

from autohete.workload import Precision

#: Type of parameters and passes in each precision.
DTYPES = {Precision.FP32: torch.float32, Precision.BF16: torch.bfloat16, Precision.FP16: torch.float16}
