"""Every picture of the packed experiments: path below results/ -> the function that draws it."""

from functools import partial

import figures
import harder_case
import questions

PICTURES = {
    "default/curves.png": questions.front,
    "scheme/scheme.png": questions.scheme,
    "ranges/ranges.png": questions.ranges,
    "figures/figure4.png": figures.figure4,
    "figures/figure5.png": figures.figure5,
    "figures/figure6.png": figures.figure6,
    "figures/figure8.png": figures.figure8,
    "figures/figure11.png": figures.figure11,
    "figures/figure12.png": figures.figure12,
    "figures/rule.png": figures.figure_rule,
    "figures/dose.png": harder_case.figure_dose,
    "figures/rescue.png": harder_case.figure_rescue,
    "figures/objectives.png": harder_case.figure_objectives,
}
for _name in figures.CURVES:
    PICTURES[f"figures/{_name}.png"] = partial(figures.curves, name=_name)
for _name in harder_case.MAPS:
    PICTURES[f"figures/{_name}.png"] = partial(harder_case.figure_map, name=_name)
