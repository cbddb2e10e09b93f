"""What the versions of torch that autopipe takes do otherwise than the newest."""

import torch

NOTES_LINES_OF_LOSSES = torch.__version__ >= "2.13"
"""Whether torch.export notes lines of functions that are not called `forward`."""
