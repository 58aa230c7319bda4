"""With which noise a drafter that has a distribution draws its tokens at temperature > 0.

Coupled: with the target's own noise, so that both draw the same token where their distributions agree (Daliri, Musco,
Suresh, arXiv 2408.07978). The other two are there to be compared with: independent noise is a draft sampled as usual,
greedy takes the likeliest token. A draft decides nothing, so the text is the same with each.
"""

from __future__ import annotations

from dataclasses import replace

from moot.core.noise import choice_seed
from moot.core.types import SamplingParams

COUPLED = "coupled"
INDEPENDENT = "independent"
GREEDY = "greedy"
DRAWS = (COUPLED, INDEPENDENT, GREEDY)

_NO_CHOICE = 1 << 32
"""No request has as many choices: the seed of this one is nobody else's."""


def drafting_params(params: SamplingParams, draws: str) -> SamplingParams:
    """What a drafter draws with for a request with `params`; `draws`: one of DRAWS."""
    if draws == COUPLED or params.is_greedy:
        return params
    if draws == GREEDY:
        return replace(params, temperature=0.0)
    return replace(params, seed=choice_seed(params.seed, _NO_CHOICE))
