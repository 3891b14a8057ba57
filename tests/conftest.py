"""Make the flat scripts importable from wherever pytest is called, and results independent of the number of cores."""

import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parent.parent))
torch.set_num_threads(1)
