"""Draw method.png: the tokens that learn under GRPO and under the steps of BAPO's search.

python results/figures/method.py
"""

import sys
from pathlib import Path

from matplotlib import pyplot

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent.parent))

from bapo import GRPO, PAPER_MAIN  # noqa: E402

BOUNDS = {
    "GRPO: [0.8, 1.2]": (GRPO.low_start, GRPO.high_start),
    "BAPO 1: start; stay if rho ≥ rho0": (PAPER_MAIN.low_start, PAPER_MAIN.high_start),
    "BAPO 2: raise high, at most to 3.0": (PAPER_MAIN.low_start, PAPER_MAIN.high_max),
    "BAPO 3: raise low to 0.9": (PAPER_MAIN.low_max, PAPER_MAIN.high_max),
}
END = 3.3  # of the axes

figure, axes = pyplot.subplots(1, 2, figsize=(8.2, 2.1), sharey=True, layout="constrained")
positive, negative = axes
positive.set_title("A > 0: all tokens with r ≤ high learn", fontsize="medium")
negative.set_title("A < 0: all tokens with r ≥ low learn", fontsize="medium")
for label, (low, high) in BOUNDS.items():
    color = "C0" if label.startswith("GRPO") else "C1"
    positive.barh(label, high, color=color, height=0.7)
    negative.barh(label, END - low, left=low, color=color, height=0.7)
positive.invert_yaxis()  # of both
for axis in axes:
    axis.axvline(1, color="black", linestyle=":")
    axis.set(xlabel="importance ratio r", xlim=(0, END), xticks=[0, 0.6, 0.9, 1.2, 2, 3])
figure.savefig(HERE / "method.png", dpi=150)
