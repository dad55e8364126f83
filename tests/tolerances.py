"""The one tolerance table: absolute and relative error allowed between two exact ways to compute the same thing."""

import torch

EXACT = {
    torch.float32: {"atol": 1e-5, "rtol": 1e-5},
    torch.float64: {"atol": 1e-12, "rtol": 1e-12},
}
